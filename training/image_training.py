"""The training loop of image models and their autoencoder, on Accelerate.

All images lie on the device as bytes, and a step draws its own: no loader, and nothing that Python does image by
image. On a GPU forward and backward pass, the drawing of images, times and noise included, are recorded as a CUDA
graph once and replayed, since small models are thousands of small kernels.

What a step draws is a function of (seed, step, process), so that a run that goes on from a checkpoint is the run that
was not interrupted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from tqdm import tqdm

from nearfar.evaluation.image_data import ImageData
from nearfar.evaluation.image_grid import image_grid
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.modeling_proxyformer_autoencoder import ProxyFormerAutoencoder
from nearfar.modeling.modeling_proxyformer_image import ProxyFormerImageModel
from nearfar.modeling.pipeline_flow_matching import FlowMatchingPipeline, to_uint8
from nearfar.training import run_folder
from nearfar.training.flow_matching import TIMES, WEIGHTINGS, flow_matching_loss
from nearfar.training.matrix_optimizer import make_optimizer
from nearfar.training.weight_average import WeightAverage

__all__ = ["LOG_NAME", "ImageTrainer", "ImageTraining", "encode_images", "last_checkpoint", "settle_latents"]

LOG_NAME = "training.jsonl"
_STATE_NAME = "training_state.pt"
# Steps that run as they are before one is recorded: kernels are chosen and compiled then.
_WARM_UP_STEPS = 3
_ENCODED_AT_ONCE = 1024


@dataclass(frozen=True)
class ImageTraining:
    """How a run is carried out.

    Attributes:
        steps: how many; None where `seconds` says how long.
        seconds: of training, grids and checkpoints not counted; the learning rate follows the time then.
        batch_size: images a step, on each process.
        optimizer: "muon", "mano" or "adamw", of the matrices; AdamW for the rest.
        learning_rate: highest, of the matrices; of the rest it is at most 1e-3.
        warmup_steps: over which the learning rate rises.
        decay: share of the run at the end over which it falls to `final`.
        final: of the learning rate, at the end.
        weight_decay: of matrices and embeddings.
        clip: largest norm of the gradient.
        ema_decay: of the averaged weights, which are what is saved.
        condition_dropout, weighting, times: see `flow_matching_loss`.
        flip: turn half of the images around, left to right.
        seed: of everything that is drawn.
        bf16: autocast to bfloat16; weights are float32.
        compile: `torch.compile` of the layers.
        cuda_graphs: record forward and backward pass, where there is one process and one GPU.
        log_every: steps between two lines of the log.
        save_every: steps between checkpoints, a multiple of `log_every`; None for none.
        sample_every: steps between grids of samples, a multiple of `log_every`; None for one at the end.

    Raises:
        ValueError: a number out of range, both or none of `steps` and `seconds`, or multiples that are none.
    """

    steps: int | None = None
    seconds: float | None = None
    batch_size: int = 256
    optimizer: str = "muon"
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    decay: float = 0.5
    final: float = 0.02
    weight_decay: float = 0.0
    clip: float = 1.0
    ema_decay: float = 0.999
    condition_dropout: float = 0.1
    weighting: str = "image"
    times: str = "uniform"
    flip: bool = False
    seed: int = 0
    bf16: bool = False
    compile: bool = False
    cuda_graphs: bool = True
    log_every: int = 50
    save_every: int | None = None
    sample_every: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("give steps or seconds")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        for name in ("steps", "batch_size", "log_every", "save_every", "sample_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay}")
        for name, known in (("weighting", WEIGHTINGS), ("times", TIMES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not 0 <= self.condition_dropout <= 1:
            raise ValueError(f"condition_dropout must be between 0 and 1, got {self.condition_dropout}")
        for name in ("save_every", "sample_every"):
            value = getattr(self, name)
            if value is not None and value % self.log_every:
                raise ValueError(f"{name} must be a multiple of log_every, {self.log_every}, got {value}")
        if self.warmup_steps < 0 or not 0 <= self.decay <= 1 or not 0 <= self.final <= 1:
            raise ValueError(
                f"warmup_steps must be 0 or more, decay and final between 0 and 1, got {self.warmup_steps}, "
                f"{self.decay} and {self.final}"
            )


class ImageTrainer:
    """Trains an image model or an autoencoder.

    Args:
        model: in float32; trained in place.
        data: images, which are moved to the device; their size and channels are the model's, or for a model of latents
            the autoencoder's.
        folder: where the log, checkpoints, grids and TensorBoard's files go.
        options: see there.
        autoencoder: of a model of latents, in eval mode; the images are encoded once, before training.
        cpu: even where there is a GPU.
        progress: show a progress bar.

    Raises:
        ValueError: images that the model cannot read, labels that it has no classes for, a missing autoencoder.
    """

    def __init__(
        self,
        model: ProxyFormerImageModel | ProxyFormerAutoencoder,
        data: ImageData,
        folder: str | Path,
        options: ImageTraining,
        *,
        autoencoder: ProxyFormerAutoencoder | None = None,
        cpu: bool = False,
        progress: bool = True,
    ) -> None:
        self.folder, self.options, self.progress = Path(folder), options, progress
        self.step, self.elapsed, self._clock = 0, 0.0, 0.0
        self._line: dict[str, Any] = {}  # the log's last
        self._check(model, data, autoencoder)
        tracker = "tensorboard" if importlib.util.find_spec("tensorboard") else None
        self.accelerator = Accelerator(
            cpu=cpu,
            mixed_precision="no",  # autocast is entered here, inside of what is recorded
            log_with=tracker,
            project_dir=self.folder,
        )
        self._tracked = bool(tracker)
        self.device = self.accelerator.device
        # One process on a CPU may look at its own clock in each step; several must agree on the time.
        self._alone = self.device.type == "cpu" and self.accelerator.num_processes == 1
        self.model = model.to(self.device).train()
        self.autoencoder = None if autoencoder is None else autoencoder.to(self.device).eval()
        self.data = data.to(self.device)
        given = self.data.images
        if self.autoencoder is not None:
            given = encode_images(self.autoencoder, given, self._autocast, progress=progress)
        self.average = WeightAverage(self.model, options.ema_decay)
        rest = min(options.learning_rate, 1e-3)
        self.optimizer = make_optimizer(
            self.model,
            options.optimizer,
            lr=options.learning_rate,
            embedding_lr=rest,
            vector_lr=rest,
            weight_decay=options.weight_decay,
            kinds={"*_embedding.weight": "embeddings"},
        )
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        classes = getattr(self.model.config, "num_classes", None)
        labels = self.data.labels if classes is not None else None
        self.objective: nn.Module = _Objective(self.model, given, labels, options)
        if self.accelerator.num_processes > 1:
            self.objective = self.accelerator.prepare_model(self.objective)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _check(
        self,
        model: ProxyFormerImageModel | ProxyFormerAutoencoder,
        data: ImageData,
        autoencoder: ProxyFormerAutoencoder | None,
    ) -> None:
        config: Any = model.config
        latent = bool(getattr(config, "latent", False))
        if latent != (autoencoder is not None):
            raise ValueError("an autoencoder goes with a model of latents (latent=True), and such a model needs one")
        reader: Any = config if autoencoder is None else autoencoder.config
        if data.images.shape[1] != reader.in_channels:
            raise ValueError(f"the images have {data.images.shape[1]} channels, the model reads {reader.in_channels}")
        if data.images.ndim != len(reader.sizes) + 2:
            raise ValueError(f"images of shape {tuple(data.images.shape)} do not fit image_size {list(reader.sizes)}")
        classes = getattr(config, "num_classes", None)
        if classes is None:
            return
        if data.labels is None:
            raise ValueError("the model has classes, and the images have no labels")
        low, high = int(data.labels.min()), int(data.labels.max())
        if low < 0 or high >= classes:
            raise ValueError(f"labels must lie between 0 and {classes - 1}, got {low} to {high}")

    # --- running -----------------------------------------------------------------------------------------------------

    def train(self, checkpoint: str | Path | None = None) -> dict[str, Any]:
        """Train to the end of the steps or of the time.

        Args:
            checkpoint: a folder that an earlier run with the same options left, to go on from.

        Returns:
            Steps, seconds, images a second, the last errors, and why it ended.

        Raises:
            ValueError: a checkpoint of other options.
            FloatingPointError: the loss is not finite; the last checkpoint is kept.
        """
        if checkpoint is not None:
            self._load(Path(checkpoint))
        self._start_log()
        options = self.options
        graphs = options.cuda_graphs and self.device.type == "cuda" and self.accelerator.num_processes == 1
        runner = _StepRunner(self.objective, self._autocast, graphs)
        bar = tqdm(
            total=options.steps,
            initial=self.step,
            unit="step",
            dynamic_ncols=True,
            disable=None if self.progress and self.accelerator.is_main_process else True,
        )
        sums = torch.zeros(2, device=self.device)
        since, reason = self.step, ""
        self._clock = time.perf_counter() - self.elapsed
        if options.steps is not None and self.step >= options.steps:
            reason = f"{options.steps} steps"
        elif options.seconds is not None and self.elapsed >= options.seconds:
            reason = f"{options.seconds:g} seconds"
        with bar, self._compiled():
            try:
                while not reason:
                    factor = self._factor()
                    for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                        group["lr"] = rate * factor
                    torch.manual_seed(self._seed())
                    sums += runner.run()
                    torch.nn.utils.clip_grad_norm_(self._parameters, options.clip)
                    self.optimizer.step()
                    self.average.update()
                    self.step += 1
                    bar.update()
                    # On a CPU nothing runs ahead, so that looking at the clock costs nothing.
                    late = self._alone and self._late()
                    last = options.steps is not None and self.step >= options.steps
                    if self.step % options.log_every and not last and not late:
                        continue
                    steps, since = self.step - since, self.step
                    error, middle = self.accelerator.reduce(sums / steps, "mean").tolist()  # waits for the GPU
                    sums.zero_()
                    before, self.elapsed = self.elapsed, self._agreed(time.perf_counter() - self._clock)
                    speed = steps * options.batch_size * self.accelerator.num_processes / (self.elapsed - before)
                    if last:
                        reason = f"{options.steps} steps"
                    elif options.seconds is not None and self.elapsed >= options.seconds:
                        reason = f"{options.seconds:g} seconds"
                    line = {
                        "step": self.step, "seconds": round(self.elapsed, 3), "error": error, "middle_error": middle,
                        "learning_rate": self.rates[0] * factor, "images_per_second": round(speed, 1),
                    }  # fmt: skip
                    if reason and self.device.type == "cuda":
                        line["cuda_graph"] = runner.recorded
                        line["peak_gib"] = round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2)
                    self._line = line
                    self._log(line, bar)
                    if not math.isfinite(error):  # before the last good checkpoint is replaced
                        raise FloatingPointError(f"the loss is not finite at step {self.step}")
                    self._at_intervals(bool(reason))
            finally:
                runner.close()
        for tracker in self.accelerator.trackers:  # end_training would also end the process group
            tracker.finish()
        overall = self.step * options.batch_size * self.accelerator.num_processes / max(self.elapsed, 1e-9)
        return {"steps": self.step, "ended": reason, **self._line, "images_per_second": round(overall, 1)}

    def averaged(self) -> Any:
        """The model with averaged weights, in eval mode; an autoencoder's latents are made to have variance 1."""
        found = self.average.model()
        if isinstance(self.model, ProxyFormerAutoencoder):
            settle_latents(found, self.data.images, self._autocast)
        return found

    def _late(self) -> bool:
        seconds = self.options.seconds
        return seconds is not None and time.perf_counter() - self._clock >= seconds

    def _factor(self) -> float:
        """What the learning rate is multiplied by; a run by time knows how late it is from the log's last line."""
        options = self.options
        if options.seconds is not None:
            now = time.perf_counter() - self._clock if self._alone else self.elapsed
            done = min(now / options.seconds, 1.0)
        else:
            done = self.step / (options.steps or 1)
        rise = min(1.0, (self.step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
        fall = min(1.0, (1 - done) / options.decay) if options.decay else 1.0
        return rise * max(options.final, fall)

    def _seed(self) -> int:
        name = f"{self.options.seed}/{self.step}/{self.accelerator.process_index}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16)

    def _agreed(self, value: float) -> float:
        """The main process's value, on all of them."""
        if self.accelerator.num_processes == 1:
            return value
        values = [value]
        broadcast_object_list(values)
        return float(values[0])

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        """The layers compiled, one after the other; layers of one kind share their kernels."""
        if not self.options.compile:
            yield
            return
        layers = [module for module in self.model.modules() if type(module).__name__ == "ImageLayer"]
        config = torch._dynamo.config
        name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        before = getattr(config, name)
        # The first layer, those with a condition and those without, training and sampling: a graph each.
        setattr(config, name, max(before, 64))
        for layer in layers:
            layer.compile(dynamic=False)
        try:
            yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            setattr(config, name, before)

    # --- grids -------------------------------------------------------------------------------------------------------

    def _at_intervals(self, last: bool) -> None:
        options = self.options
        sample = last or bool(options.sample_every and self.step % options.sample_every == 0)
        save = bool(options.save_every and (last or self.step % options.save_every == 0))
        if not sample and not save:
            return
        began = time.perf_counter()
        if sample and self.accelerator.is_main_process:
            self.write_grid()
        if save:
            self.save_checkpoint()
        self._clock += time.perf_counter() - began

    @torch.no_grad()
    def write_grid(self, rows: int = 8) -> Path:
        """Write `samples/step-N.png`: samples by class, or of an autoencoder images above what it makes of them."""
        # Compiled layers would be compiled once more for the grid's shapes.
        with self.average.applied(), self._autocast(), torch.compiler.set_stance("force_eager"):
            if isinstance(self.model, ProxyFormerAutoencoder):
                self.model.eval()
                columns = min(8, len(self.data.images))
                images = self.data.images[: columns * (rows // 2)]
                images = images[: len(images) // columns * columns]
                again = to_uint8(self.model(images.float() / 127.5 - 1).sample)
                found = torch.stack([part.unflatten(0, (-1, columns)) for part in (images, again)], 1).flatten(0, 2)
            else:
                pipe = FlowMatchingPipeline(self.model, self.autoencoder)
                columns = min(self.model.config.num_classes or rows, 10)
                labels = [index % columns for index in range(columns * rows)]
                generator = torch.Generator().manual_seed(self.options.seed)
                found = pipe(
                    len(labels),
                    labels if self.model.config.num_classes else None,
                    generator=generator,
                    output_type="uint8",
                )
            self.model.train()
        grid = image_grid(found, columns, scale=max(1, 64 // found.shape[-1]))
        if self._tracked:
            import numpy as np

            tracker: Any = self.accelerator.get_tracker("tensorboard")
            tracker.log_images({"samples": np.asarray(grid.convert("RGB"))[None]}, self.step, dataformats="NHWC")
        return write_beside(self.folder / "samples" / f"step-{self.step:07d}.png", grid.save)

    # --- the log -----------------------------------------------------------------------------------------------------

    def _start_log(self) -> None:
        """Keep the lines up to the step that is gone on from."""
        if not self.accelerator.is_main_process:
            return
        path = self.folder / LOG_NAME
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() and self.step else []
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        write_beside(path, lambda file: file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8"))
        if self._tracked:
            self.accelerator.init_trackers("tensorboard")

    def _log(self, line: dict[str, Any], bar: Any) -> None:
        if not self.accelerator.is_main_process:
            return
        with open(self.folder / LOG_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._tracked:
            self.accelerator.log({f"train/{name}": value for name, value in line.items()}, step=self.step)
        bar.set_postfix_str(f"error {line['error']:.4f}, {line['images_per_second']:,.0f} images/s", refresh=False)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> Path:
        """Write `checkpoint-STEP`, whole or not at all, and delete the one before it."""
        path = self.folder / f"checkpoint-{self.step}"
        if self.accelerator.is_main_process:
            state = {
                "step": self.step,
                "elapsed": self.elapsed,
                "line": self._line,
                "options": self._settings(),
                "model": self.model.state_dict(),
                "average": self.average.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            with run_folder.replaced_folder(path) as beside:
                torch.save(state, beside / _STATE_NAME)
            for other in run_folder.whole_checkpoints(self.folder, _STATE_NAME):
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return path

    def _settings(self) -> dict[str, Any]:
        how = ("compile", "cuda_graphs", "log_every", "save_every", "sample_every")
        found = {name: value for name, value in asdict(self.options).items() if name not in how}
        return {**found, "processes": self.accelerator.num_processes}

    def _load(self, checkpoint: Path) -> None:
        state = torch.load(checkpoint / _STATE_NAME, map_location=self.device, weights_only=True)
        for name, value in self._settings().items():
            if state["options"].get(name) != value:
                raise ValueError(
                    f"{checkpoint} is of a run with {name} = {state['options'].get(name)!r}, this one has {value!r}"
                )
        self.step, self.elapsed, self._line = state["step"], state["elapsed"], state.get("line", {})
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint in a run's folder, or None."""
    return run_folder.last_checkpoint(folder, _STATE_NAME)


# ---------------------------------------------------------------------------------------------------------------------
# Latents
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def encode_images(
    autoencoder: ProxyFormerAutoencoder, images: Tensor, autocast: Callable[[], Any], *, progress: bool = False
) -> Tensor:
    """Latents of all images, float32, on the autoencoder's device.

    Args:
        autoencoder: in eval mode.
        images: uint8.
        autocast: makes the context to encode in.
        progress: show a progress bar.
    """
    parts = images.split(_ENCODED_AT_ONCE)
    found = []
    for part in tqdm(parts, desc="latents", leave=False, dynamic_ncols=True, disable=None if progress else True):
        with autocast():
            found.append(autoencoder.encode(part.to(autoencoder.device).float() / 127.5 - 1).float())
    return torch.cat(found)


@torch.no_grad()
def settle_latents(
    autoencoder: ProxyFormerAutoencoder, images: Tensor, autocast: Callable[[], Any], count: int = 16384
) -> None:
    """Measure the latents' means and variances anew, over up to `count` images: averaged weights have their own.

    The images are drawn from all of them, since those of one class often lie together.
    """
    norm: Any = autoencoder.latent_norm
    momentum = norm.momentum
    norm.reset_running_stats()
    norm.momentum = None  # a plain mean over the batches
    norm.train()
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count].to(images.device)
    encode_images(autoencoder, images[chosen], autocast)
    norm.eval()
    norm.momentum = momentum


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


class _Objective(nn.Module):
    """Draws a batch and gives its loss, as a module's forward pass, which data-parallel training wants."""

    def __init__(
        self,
        model: ProxyFormerImageModel | ProxyFormerAutoencoder,
        images: Tensor,
        labels: Tensor | None,
        options: ImageTraining,
    ) -> None:
        super().__init__()
        self.model, self.options = model, options
        # No buffers, which data-parallel training would send around.
        self._data = (images, labels)

    def forward(self, unused: None = None) -> tuple[Tensor, Tensor]:
        # Data-parallel training on GPUs moves the first argument, and there must be one.
        images, labels = self._data
        options = self.options
        chosen = torch.randint(len(images), (options.batch_size,), device=images.device)
        batch = images.index_select(0, chosen)
        if batch.dtype == torch.uint8:
            batch = batch.float() / 127.5 - 1
        if options.flip:
            turned = torch.rand(len(batch), device=batch.device) < 0.5
            batch = torch.where(turned.view(-1, *[1] * (batch.ndim - 1)), batch.flip(-1), batch)
        if isinstance(self.model, ProxyFormerAutoencoder):
            loss = self.model(batch).loss
            return loss, torch.stack([loss.detach(), torch.zeros_like(loss)])
        found = flow_matching_loss(
            self.model,
            batch,
            None if labels is None else labels.index_select(0, chosen),
            condition_dropout=options.condition_dropout,
            weighting=options.weighting,
            times=options.times,
        )
        middle = torch.zeros_like(found.error) if found.middle_error is None else found.middle_error
        return found.loss, torch.stack([found.error, middle])


class _StepRunner:
    """Forward and backward pass of a step, recorded as a CUDA graph where that is possible.

    Of a recorded pass the gradients stay the same tensors, which every replay overwrites. Random numbers drawn in it
    follow the seed that is set before the replay.
    """

    def __init__(self, objective: nn.Module, autocast: Callable[[], Any], graphs: bool) -> None:
        self.objective, self.autocast, self.graphs = objective, autocast, graphs
        self.recorded = False
        self._parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        self._count = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._figures: Tensor | None = None

    def run(self) -> Tensor:
        """Errors of the last and the middle head `(2,)`; gradients are left in the parameters."""
        self._count += 1
        if self._graph is None and self.graphs and self._count > _WARM_UP_STEPS:
            self._record()
        if self._graph is not None:
            assert self._figures is not None
            self._graph.replay()
            return self._figures
        for parameter in self._parameters:
            parameter.grad = None
        return self._passes()

    def _passes(self) -> Tensor:
        with self.autocast():
            loss, figures = self.objective(None)
        loss.backward()
        return figures

    def _record(self) -> None:
        """Record the passes; where they wait for the GPU, say so once and go on without."""
        state = torch.cuda.get_rng_state()
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(), self.autocast():
                warnings.simplefilter("ignore")  # it says that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
                self.objective(None)
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph, because the model waits for the GPU: {error}", stacklevel=2)
            self.graphs = False
            return
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.set_rng_state(state)
        for parameter in self._parameters:
            parameter.grad = None  # a recorded pass then writes gradients instead of adding to them
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._figures = self._passes()
        self._graph = graph
        self.recorded = True

    def close(self) -> None:
        """Let go of the graph and its memory, once it has run."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._graph is not None:
            torch.cuda.synchronize()  # a graph must not be destroyed in flight
            self._graph = self._figures = None
            torch.cuda.empty_cache()
