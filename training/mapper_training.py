"""The training loop of HybridAxialMapper on Accelerate, by the recipe of the ProxyKV paper (Section 4.3, Appendix F).

An epoch shows each target layer of each context as many random crops as windows of 2,048 tokens every 1,024 cover it.
After each one the mapper is measured on contexts held out: the loss decides when the learning rate is halved, the mass
reconstruction which weights are kept as the best.

What a step reads and draws is a function of (seed, step, process), and a checkpoint holds weights, optimiser and all
running figures, so that a run that goes on from one is the run that was not interrupted, bit for bit where the kernels
are deterministic.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import math
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from nearfar.configuration.configuration_axial_mapper import HybridAxialMapperConfig
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper, window_starts
from nearfar.training import run_folder
from nearfar.training.mapper_batches import ALL_LAYERS, Crop, MapperBatch, ResidentPairs, read_crops
from nearfar.training.mapper_losses import MapperLoss, mass_reconstruction
from nearfar.training.mapper_pairs import MapperPairs
from nearfar.training.mapper_report import LOG_NAME, PLOT_NAME, model_card, plot_mapper_training, read_log

__all__ = ["MODEL_NAME", "MapperTrainer", "MapperTraining", "Plateau", "last_checkpoint", "new_mapper"]

MODEL_NAME = "model"
_STATE_NAME = "training_state.pt"
# Options that may differ where a run goes on.
_FREE = ("epochs", "steps", "seconds", "save_every", "log_every")
# Share of a GPU's free memory that pairs may take to be held there.
_RESIDENT_SHARE = 0.25
_NO_VALUES = (
    "the mapper reads proxy_states='values', and the pairs were computed with 'none': compute pairs with proxy_states="
    "'values'"
)


@dataclass(frozen=True)
class MapperTraining:
    """How a run is carried out; defaults are the paper's where it gives them.

    Attributes:
        epochs: passes over the training contexts.
        steps: end after so many steps, if that is sooner.
        seconds: end after so many seconds, those of an interrupted run included, if that is sooner.
        epoch_steps: steps of an epoch; None for what shows every crop once.
        batch_size: crops a step, of each process.
        learning_rate, weight_decay: of AdamW.
        warmup_steps: over which the learning rate grows linearly.
        schedule: after it: "plateau" as below (the paper's), or "cosine" to zero at the end, whichever of steps and
            seconds is nearer to its own; for short runs.
        plateau_factor, plateau_patience: the learning rate is multiplied by the factor when the validation loss has
            not improved for more than so many epochs.
        clip: largest norm of the gradient; 0 for no limit.
        validation: share of the contexts that is held out.
        validation_crops: most crops that are measured after an epoch, the same ones each time.
        mass_ratios: retention ratios of the mass reconstruction. The best weights are those with the highest mean.
        seed: of the split, the crops, dropout and the pairs drawn by the loss.
        log_every: steps between two lines of the log within an epoch.
        save_every: steps between checkpoints, a multiple of `log_every`, besides those after an epoch; None for these
            alone.
        bf16: autocast to bfloat16; weights are float32.
        save_dtype: of the weights in `model/`; "bfloat16" takes half the room.
        loss: the terms and their weights.

    Raises:
        ValueError: a number out of range, or `save_every` that is no multiple of `log_every`.
    """

    epochs: int = 30
    steps: int | None = None
    seconds: float | None = None
    epoch_steps: int | None = None
    batch_size: int = 8
    learning_rate: float = 2e-4
    weight_decay: float = 1e-4
    warmup_steps: int = 1000
    schedule: Literal["plateau", "cosine"] = "plateau"
    plateau_factor: float = 0.5
    plateau_patience: int = 3
    clip: float = 1.0
    validation: float = 0.05
    validation_crops: int = 512
    mass_ratios: tuple[float, ...] = (0.1, 0.3)
    seed: int = 0
    log_every: int = 50
    save_every: int | None = 1000
    bf16: bool = False
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    loss: MapperLoss = field(default_factory=MapperLoss)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "validation_crops", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("steps", "epoch_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        if self.save_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"save_dtype must be 'float32' or 'bfloat16', got {self.save_dtype!r}")
        if self.schedule not in ("plateau", "cosine"):
            raise ValueError(f"schedule must be 'plateau' or 'cosine', got {self.schedule!r}")
        for name in ("weight_decay", "warmup_steps", "plateau_patience", "clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        for name in ("plateau_factor", "validation"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if not self.mass_ratios or not all(0 < ratio <= 1 for ratio in self.mass_ratios):
            raise ValueError(f"mass_ratios must be retention ratios in (0, 1], got {self.mass_ratios}")
        if self.save_every is not None and (self.save_every < 1 or self.save_every % self.log_every):
            raise ValueError(f"save_every must be a multiple of log_every, {self.log_every}, got {self.save_every}")

    def to_dict(self) -> dict[str, Any]:
        content: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**content, "mass_ratios": list(self.mass_ratios), "loss": self.loss.to_dict()}


def new_mapper(pairs: MapperPairs, seed: int = 0, **kwargs: Any) -> HybridAxialMapper:
    """A random float32 mapper for the models that pairs were computed with.

    Args:
        seed: of the weights; the global random state is left as it was.
        kwargs: further fields of `HybridAxialMapperConfig`.

    Raises:
        ValueError: fields that cannot work, or a mapper that reads values which the pairs do not hold.
    """
    if kwargs.get("proxy_states", "none") != "none" and pairs.mapper_fields["proxy_states"] == "none":
        raise ValueError(_NO_VALUES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HybridAxialMapper(HybridAxialMapperConfig(**{**pairs.mapper_fields, **kwargs}))


@dataclass
class Plateau:
    """`ReduceLROnPlateau` of a figure that should fall, as a factor that goes with the warm-up.

    Attributes:
        factor, patience: see `MapperTraining`.
        scale: what the learning rate is multiplied by.
        best: the lowest figure so far.
        waiting: epochs since then.
    """

    factor: float = 0.5
    patience: int = 3
    scale: float = 1.0
    best: float = math.inf
    waiting: int = 0

    # Smaller improvements, relative to the best, do not count.
    THRESHOLD = 1e-4

    def update(self, value: float) -> None:
        if value < self.best * (1 - self.THRESHOLD):
            self.best, self.waiting = value, 0
            return
        self.waiting += 1
        if self.waiting > self.patience:
            self.scale, self.waiting = self.scale * self.factor, 0


class _Objective(nn.Module):
    """Forward pass and loss as one module, which data-parallel training wants."""

    def __init__(self, mapper: HybridAxialMapper, loss: MapperLoss) -> None:
        super().__init__()
        self.mapper, self.loss = mapper, loss

    def forward(self, batch: MapperBatch) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.mapper(batch.features, batch.mask, batch.layers)
        if logits.ndim == 4:  # all target layers of a crop
            logits = logits.flatten(0, 1)
        total, terms = self.loss(logits.float(), batch.target, batch.valid, thresholds=batch.thresholds)
        return total, torch.stack([total.detach(), *terms.values()]), logits.detach()


# --- training --------------------------------------------------------------------------------------------------------


class MapperTrainer:
    """Trains a mapper on pairs.

    In `folder` it leaves `model/` (the best weights, a self-contained checkpoint), `training.jsonl`, `training.png`
    where matplotlib is installed, and `checkpoint-<step>/` to go on from.

    Args:
        mapper: in float32, made for the pairs' models (see `new_mapper`); trained in place.
        pairs: what it learns from.
        folder: where everything goes.
        options: see there.
        cpu: even where there is a GPU.
        progress: show a progress bar.
        plot: draw `training.png` after each epoch.

    Raises:
        ValueError: a mapper of other sizes than the pairs, or too few contexts.
    """

    def __init__(
        self,
        mapper: HybridAxialMapper,
        pairs: MapperPairs,
        folder: str | Path,
        options: MapperTraining | None = None,
        *,
        cpu: bool = False,
        progress: bool = True,
        plot: bool = True,
    ) -> None:
        self.pairs, self.folder, self.options = pairs, Path(folder), options or MapperTraining()
        self.progress, self.plot = progress, plot
        config = mapper.config
        for name, value in pairs.mapper_fields.items():
            is_size = name.startswith(("proxy_num", "target_num")) or name == "target_layers"
            if is_size and getattr(config, name) != value:
                raise ValueError(f"the mapper has {name} = {getattr(config, name)} and the pairs have {value}")
        if config.proxy_states != "none":
            if pairs.mapper_fields["proxy_states"] == "none":
                raise ValueError(_NO_VALUES)
            mine, theirs = config.proxy_state_size, pairs.mapper_fields["proxy_state_size"]
            if mine != theirs:
                raise ValueError(f"the mapper has proxy_state_size = {mine} and the pairs have {theirs}")
        self.layer_pairs, self._together = config.layer_pairs, config.proxy_layers == "all"
        self.train_contexts, self.validation_contexts = pairs.split(self.options.validation, self.options.seed)
        self._items = self._list_items(self.train_contexts, config)
        self._validation = self._choose_validation(config)

        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no")  # autocast is entered here
        self.device = self.accelerator.device
        self.mapper = mapper.to(self.device)
        self._source: MapperPairs | ResidentPairs = pairs
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if ResidentPairs.nbytes(pairs, config.layer_channels) <= _RESIDENT_SHARE * free:
                self._source = ResidentPairs(pairs, self.device, config.layer_channels)
        self.objective: nn.Module = _Objective(self.mapper, self.options.loss)
        if self.accelerator.num_processes > 1:
            self.objective = self.accelerator.prepare_model(self.objective)
        self._parameters = [parameter for parameter in self.mapper.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self.options.learning_rate,
            weight_decay=self.options.weight_decay,
            fused=True if self.device.type == "cuda" else None,
        )
        together = self.options.batch_size * self.accelerator.num_processes
        self.epoch_steps = self.options.epoch_steps or max(1, len(self._items) // together)
        self.total_steps = self.options.epochs * self.epoch_steps
        if self.options.steps is not None:
            self.total_steps = min(self.total_steps, self.options.steps)

        weights = self.options.loss.to_dict()
        self.terms = [name for name in ("binary", "mse", "fine", "boundary", "cosine") if weights[name]]
        self.step, self.elapsed, self._clock = 0, 0.0, 0.0
        self._passed = 0.0  # seconds, as all processes agree
        self.plateau = Plateau(self.options.plateau_factor, self.options.plateau_patience)
        self.best: dict[str, Any] = {"mass": -math.inf, "step": 0}
        # Sums of (loss, terms) since the last line and since the epoch began, and how many steps are in them.
        self._sums = torch.zeros(2, 1 + len(self.terms), device=self.device)
        self._counts = [0, 0]

    @staticmethod
    def _windows(tokens: int, config: HybridAxialMapperConfig) -> tuple[list[int], int]:
        return window_starts(tokens, config.window_tokens, config.window_stride)

    def _list_items(self, contexts: Sequence[int], config: HybridAxialMapperConfig) -> np.ndarray:
        """`(items, 2)`: a context and a layer's place, as often as windows cover the context."""
        items = []
        for context in contexts:
            windows = len(self._windows(self.pairs.contexts[context].tokens, config)[0])
            items += [(context, place) for place in self._places() for _ in range(windows)]
        return np.array(items, np.int64)

    def _places(self) -> Sequence[int]:
        """Target layers that crops are taken of, one by one or together."""
        return [ALL_LAYERS] if self._together else range(len(self.layer_pairs))

    def _choose_validation(self, config: HybridAxialMapperConfig) -> list[Crop]:
        crops = []
        for context in self.validation_contexts:
            starts, length = self._windows(self.pairs.contexts[context].tokens, config)
            crops += [(context, place, start, length) for start in starts for place in self._places()]
        most = self.options.validation_crops
        if self._together:  # each has all target layers
            most = max(1, most // len(self.layer_pairs))
        if len(crops) > most:
            generator = np.random.default_rng([self.options.seed, 0])
            chosen = generator.choice(len(crops), most, replace=False)
            crops = [crops[index] for index in sorted(chosen)]
        return crops

    def _crops(self, step: int) -> list[Crop]:
        """What this process reads at a step."""
        epoch, place = divmod(step, self.epoch_steps)
        processes, size = self.accelerator.num_processes, self.options.batch_size
        order = self._order(epoch)
        first = (place * processes + self.accelerator.process_index) * size
        crops = []
        for number in range(first, first + size):
            context, layer = self._items[order[number % len(order)]]
            tokens = self.pairs.contexts[context].tokens
            length = min(tokens, self.mapper.config.window_tokens)
            start = np.random.default_rng([self.options.seed, 2, epoch, number]).integers(tokens - length + 1)
            crops.append((int(context), int(layer), int(start), length))
        return crops

    def _order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_ordered", None) != epoch:
            self._permutation = np.random.default_rng([self.options.seed, 1, epoch]).permutation(len(self._items))
            self._ordered = epoch
        return self._permutation

    def _batches(self) -> Iterator[MapperBatch]:
        """The batches from the current step on, read while the one before is worked on."""

        def read(step: int) -> MapperBatch:
            return read_crops(self._source, self._crops(step), self.mapper.config, self.options.loss)

        if self._source is not self.pairs:  # there is nothing to wait for
            for step in range(self.step, self.total_steps):
                yield read(step)
            return
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(read, self.step)
            for step in range(self.step + 1, self.total_steps + 1):
                batch = waiting.result()
                if step < self.total_steps:
                    waiting = pool.submit(read, step)
                yield batch

    # --- running -----------------------------------------------------------------------------------------------------

    def train(self, checkpoint: str | Path | None = None) -> dict[str, Any]:
        """Train to the end of the epochs or steps.

        Args:
            checkpoint: a folder that an earlier run with the same options left, to go on from; `epochs` and `steps`
                may be others.

        Returns:
            Steps, epochs, seconds, the last epoch's line of the log, and the best one's mass reconstruction and step.

        Raises:
            ValueError: a checkpoint of another run.
            FloatingPointError: the loss is not finite.
        """
        if checkpoint is not None:
            self._load(Path(checkpoint))
        self._start_log()
        self._clock = time.perf_counter() - self.elapsed
        self._passed = self.elapsed
        bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            unit="step",
            dynamic_ncols=True,
            disable=None if self.progress and self.accelerator.is_main_process else True,
        )
        line: dict[str, Any] = {}
        with bar:
            if self.step == 0:
                line = self._finish_epoch(bar)  # the untrained mapper, to compare with
            self.objective.train()
            for batch in self._batches():
                self._learn(batch)
                self.step += 1
                bar.update()
                if self._time_is_over():
                    self.total_steps = self.step
                if self.step % self.options.log_every == 0:
                    self._log(self._means(0, "step"), bar)
                if self.step % self.epoch_steps == 0:
                    line = self._finish_epoch(bar)
                    self.save_checkpoint()
                    self.objective.train()
                elif self.step == self.total_steps:
                    # Saved first: a longer run that goes on from here has no epoch's end here.
                    self.save_checkpoint()
                    line = self._finish_epoch(bar)
                elif self.options.save_every is not None and self.step % self.options.save_every == 0:
                    self.save_checkpoint()
                if self.step == self.total_steps:
                    break
        self.mapper.eval()
        lines = read_log(self.folder) if self.accelerator.is_main_process else []
        epochs = [entry for entry in lines if entry["kind"] == "epoch"]
        return {
            "steps": self.step,
            "epochs": self.step // self.epoch_steps,
            "seconds": round(self.elapsed, 3),
            "best": dict(self.best),
            "untrained": epochs[0] if epochs else {},
            "last": line or (epochs[-1] if epochs else {}),
        }

    def _learn(self, batch: MapperBatch) -> None:
        self._seed(self.step, self.accelerator.process_index)
        warmup = min(1.0, (self.step + 1) / self.options.warmup_steps) if self.options.warmup_steps else 1.0
        scale = self.plateau.scale if self.options.schedule == "plateau" else self._cosine()
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * warmup * scale
        with self._autocast():
            loss, figures, _ = self.objective(batch.to(self.device))
        loss.backward()
        if self.options.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._sums += figures
        self._counts = [count + 1 for count in self._counts]

    def _time_is_over(self) -> bool:
        if self.options.seconds is None:
            return False
        self._passed = time.perf_counter() - self._clock
        if self.accelerator.num_processes > 1:  # one that stopped alone would leave the others waiting
            agreed = torch.tensor(self._passed, device=self.device)
            torch.distributed.broadcast(agreed, 0)
            self._passed = float(agreed)
        return self._passed >= self.options.seconds

    def _cosine(self) -> float:
        """Of the learning rate, from 1 to 0."""
        done = self.step / max(1, self.total_steps)
        if self.options.seconds is not None:
            done = max(done, self._passed / self.options.seconds)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16)

    def _seed(self, *numbers: int) -> None:
        """Of dropout and of the pairs that the loss draws."""
        name = "/".join(map(str, (self.options.seed, *numbers)))
        torch.manual_seed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1)

    def _means(self, row: int, kind: str) -> dict[str, Any]:
        """A line of means since the last one of its kind; waits for the GPU."""
        means = self.accelerator.reduce(self._sums[row] / max(1, self._counts[row]), "mean").tolist()
        counted = self._counts[row]
        self._sums[row] = 0
        self._counts[row] = 0
        self.elapsed = time.perf_counter() - self._clock
        line: dict[str, Any] = {
            "kind": kind,
            "step": self.step,
            "epoch": self.step / self.epoch_steps,
            "seconds": round(self.elapsed, 3),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        if counted:
            line["loss"] = means[0]
            line["terms"] = dict(zip(self.terms, means[1:], strict=True))
            if not math.isfinite(means[0]):
                raise FloatingPointError(
                    f"the loss is {means[0]} after {self.step} steps: lower the learning rate, or look at the pairs"
                )
        return line

    def _finish_epoch(self, bar: Any) -> dict[str, Any]:
        """Measure, keep the best weights, log; the untrained mapper is measured only."""
        line = {**self._means(1, "epoch"), **self.validate()}
        mass = sum(line["mass_reconstruction"].values()) / len(line["mass_reconstruction"])
        if self.step:
            self.plateau.update(line["validation_loss"])
            if mass > self.best["mass"]:
                self.best = {"mass": mass, "step": self.step}
                self._save_model(line)
        self._log(line, bar)
        if self.plot and self.accelerator.is_main_process:
            self._plot()
        return line

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss, terms and mass reconstruction on the crops that were chosen for it, all processes together."""
        self.objective.eval()
        if self.accelerator.num_processes > 1:
            for buffer in self.mapper.buffers():  # of batch normalisation: the main process's, which are saved
                torch.distributed.broadcast(buffer, 0)
        ratios = self.options.mass_ratios
        sums = torch.zeros(2 + len(self.terms) + 2 * len(ratios), dtype=torch.float64, device=self.device)
        mine = self._validation[self.accelerator.process_index :: self.accelerator.num_processes]
        size = self.options.batch_size
        objective = _Objective(self.mapper, self.options.loss)
        for number, first in enumerate(range(0, len(mine), size)):
            crops = mine[first : first + size]
            batch = read_crops(self._source, crops, self.mapper.config, self.options.loss).to(self.device)
            self._seed(-1, number, self.accelerator.process_index)
            with self._autocast():
                _, figures, logits = objective.eval()(batch)
            rows, heads, _ = batch.target.shape
            scores, target = logits.float().flatten(1), batch.target.flatten(1)
            valid = batch.valid[:, None].expand(-1, heads, -1).flatten(1)
            masses = [
                mass_reconstruction(scores, target, ratio, valid, relative=relative).sum()
                for relative in (False, True)
                for ratio in ratios
            ]
            sums += torch.cat([figures.new_tensor([rows]), rows * figures, torch.stack(masses)]).double()
        total = self.accelerator.reduce(sums, "sum").tolist()
        means = [value / total[0] for value in total[1:]]
        after = 1 + len(self.terms)
        names = [f"{ratio:g}" for ratio in ratios]
        return {
            "validation_loss": means[0],
            "validation_terms": dict(zip(self.terms, means[1:after], strict=True)),
            "mass_reconstruction": dict(zip(names, means[after : after + len(names)], strict=True)),
            "relative_mass_reconstruction": dict(zip(names, means[after + len(names) :], strict=True)),
        }

    # --- the log -----------------------------------------------------------------------------------------------------

    def _start_log(self) -> None:
        """Keep the lines up to the step that is gone on from."""
        if not self.accelerator.is_main_process:
            return
        path = self.folder / LOG_NAME
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() and self.step else []
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        write_beside(path, lambda file: file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8"))

    def _log(self, line: dict[str, Any], bar: Any) -> None:
        if not self.accelerator.is_main_process:
            return
        with open(self.folder / LOG_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = []
        if "loss" in line:
            shown.append(f"loss {line['loss']:.3f}")
        if "mass_reconstruction" in line:
            shown += [f"mass@{ratio} {mass:.3f}" for ratio, mass in line["mass_reconstruction"].items()]
        bar.set_postfix_str(" ".join(shown), refresh=False)

    def _plot(self) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            if self.step == 0:
                warnings.warn("no figure of the training: pip install 'nearfar[train]' for matplotlib", stacklevel=2)
            return
        plot_mapper_training(self.folder / PLOT_NAME, read_log(self.folder))

    # --- files -------------------------------------------------------------------------------------------------------

    def _save_model(self, line: dict[str, Any]) -> None:
        """The best weights so far, beside and then in their place."""
        if self.accelerator.is_main_process:
            with run_folder.replaced_folder(self.folder / MODEL_NAME) as beside:
                saved = self.mapper
                if self.options.save_dtype == "bfloat16":
                    saved = copy.deepcopy(saved).bfloat16()
                saved.save_pretrained(beside)
                card = model_card(self.mapper.config, self.options.seed, line)
                (beside / "README.md").write_text(card, encoding="utf-8")
        self.accelerator.wait_for_everyone()

    def save_checkpoint(self) -> Path:
        """Write `checkpoint-STEP`, whole or not at all, and delete the one before it."""
        path = self.folder / f"checkpoint-{self.step}"
        # All processes go on from what the main process has, as they will if the run is resumed.
        self._sums = self.accelerator.reduce(self._sums, "mean")
        if self.accelerator.is_main_process:
            with run_folder.replaced_folder(path) as beside:
                state = {
                    **self._identity(),
                    "step": self.step,
                    "elapsed": time.perf_counter() - self._clock,
                    "model": self.mapper.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "plateau": dict(vars(self.plateau)),
                    "best": self.best,
                    "sums": self._sums,
                    "counts": self._counts,
                }
                torch.save(state, beside / _STATE_NAME)
            for other in run_folder.whole_checkpoints(self.folder, _STATE_NAME):
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return path

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a run to be gone on with."""
        settings = {name: value for name, value in self.options.to_dict().items() if name not in _FREE}
        config = self.mapper.config
        sizes = {entry.name: getattr(config, entry.name) for entry in fields(HybridAxialMapperConfig)}
        own = HybridAxialMapperConfig.__annotations__
        return {
            "settings": settings,
            "mapper": {name: value for name, value in sizes.items() if name in own and not name.endswith("_name")},
            "pairs": self.pairs.digest,
            "processes": self.accelerator.num_processes,
            "epoch_steps": self.epoch_steps,
        }

    def _load(self, checkpoint: Path) -> None:
        state = torch.load(checkpoint / _STATE_NAME, map_location="cpu", weights_only=True)
        for name, mine in self._identity().items():
            theirs = state[name]
            if name == "mapper":  # what an older release did not know is as it was without it
                known = {entry.name: entry.default for entry in fields(HybridAxialMapperConfig)}
                theirs = {**{key: known[key] for key in mine}, **theirs}
            if theirs == mine:
                continue
            if isinstance(mine, dict):
                differing = [key for key in mine if theirs.get(key) != mine[key]]
                if not differing:  # fields that older checkpoints do not have yet, at None
                    continue
                name = differing[0]
                mine, theirs = mine[name], theirs.get(name)
            raise ValueError(f"{checkpoint} is of a run with {name} = {theirs!r}, and now it is {mine!r}")
        self.step, self.elapsed, self.best = state["step"], state["elapsed"], state["best"]
        self.mapper.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.plateau = Plateau(**state["plateau"])
        self._sums, self._counts = state["sums"].to(self.device), list(state["counts"])


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint in a run's folder, or None."""
    return run_folder.last_checkpoint(folder, _STATE_NAME)
