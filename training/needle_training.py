"""The training loop of the multi-needle curriculum, on Accelerate.

It is a loop of its own, not transformers' Trainer, for three reasons. A batch's shape belongs to the stage, and how
long a stage lasts is measured. Documents are made on the GPU, for a step's number and not in the order of a loader.
And at these sizes a step is thousands of small kernels that a GPU finishes faster than Python launches them: forward
and backward pass are therefore recorded as a CUDA graph once a stage, and nothing waits for the GPU between two lines
of the log. The Trainer sets gradients to None after each step, which would take a graph's own from under it.

What a step reads is a function of (seed, step, process), and checkpoints hold weights, optimiser, stage and time, so
that a run that goes on from one is the run that was not interrupted, bit for bit where the kernels are deterministic.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import math
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from tqdm import tqdm

from nearfar.evaluation.needle_documents import NeedleBatch, NeedleDocuments
from nearfar.modeling.atomic_file import write_beside
from nearfar.training import run_folder
from nearfar.training.matrix_optimizer import make_optimizer
from nearfar.training.needle_curriculum import (
    Curriculum,
    NeedlePlan,
    NeedleStage,
    apply_stage,
    learning_rate_factor,
    needle_loss,
    sample_stage,
)

if TYPE_CHECKING:
    from nearfar.modeling.modeling_proxyformer import ProxyFormerForCausalLM

__all__ = ["LOG_NAME", "NeedleTrainer", "NeedleTraining", "last_checkpoint"]

LOG_NAME = "training.jsonl"
_STATE_NAME = "training_state.pt"
# Batches that run as they are before a stage is recorded: kernels are chosen and compiled then.
_WARM_UP_BATCHES = 3


@dataclass(frozen=True)
class NeedleTraining:
    """How a run is carried out.

    Attributes:
        seconds: of training, in place of the plan's steps; stages, learning rate and end follow the time then.
        seed: of the documents.
        log_every: steps between two lines of the log, at which stages are left and checkpoints are due.
        save_every: steps between checkpoints, a multiple of `log_every`; None for none.
        bf16: autocast to bfloat16; weights are float32.
        pure_bf16: the passes use bfloat16 copies of the weights, and the optimiser float32 ones.
        compile: `torch.compile` of the layers.
        cuda_graphs: record forward and backward pass, where there is one process and one GPU.

    Raises:
        ValueError: a number out of range, or `save_every` that is no multiple of `log_every`.
    """

    seconds: float | None = None
    seed: int = 0
    log_every: int = 10
    save_every: int | None = None
    bf16: bool = False
    pure_bf16: bool = False
    compile: bool = False
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        if self.log_every < 1:
            raise ValueError(f"log_every must be at least 1, got {self.log_every}")
        if self.save_every is not None and (self.save_every < 1 or self.save_every % self.log_every):
            raise ValueError(f"save_every must be a multiple of log_every, {self.log_every}, got {self.save_every}")


class NeedleTrainer:
    """Trains a model through a plan's stages.

    Args:
        model: a ProxyFormer in float32, with proxies; trained in place.
        plan: stages and optimiser.
        documents: training documents; moved to the device.
        folder: where the log, checkpoints and TensorBoard's files go.
        options: see there.
        cpu: even where there is a GPU.
        progress: show a progress bar.

    Raises:
        ValueError: stages that the model or the text cannot serve, or options that do not go together.
    """

    def __init__(
        self,
        model: ProxyFormerForCausalLM,
        plan: NeedlePlan,
        documents: NeedleDocuments,
        folder: str | Path,
        options: NeedleTraining | None = None,
        *,
        cpu: bool = False,
        progress: bool = True,
    ) -> None:
        self.plan, self.folder, self.options = plan, Path(folder), options or NeedleTraining()
        self.curriculum = Curriculum(plan)
        self.step, self.elapsed, self._clock = 0, 0.0, 0.0
        self.progress = progress
        templates = documents.templates
        self.text_tokens = templates.max_query_tokens + templates.max_answer_tokens
        _check(model, plan, documents, self.text_tokens)
        self.block_size = model.config.block_size

        raw = not all(stage.history for stage in plan.stages)
        tracker = "tensorboard" if importlib.util.find_spec("tensorboard") else None
        self.accelerator = Accelerator(
            cpu=cpu,
            mixed_precision="no",  # autocast is entered here, inside of what is recorded
            log_with=tracker,
            project_dir=self.folder,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=raw)],
        )
        self.device = self.accelerator.device
        if self.options.pure_bf16 and self.accelerator.num_processes > 1:
            raise ValueError("pure_bf16 is for one process: leave it out, or start without accelerate launch")
        self.documents = NeedleDocuments(documents.background, templates, self.device)
        self.model = model.to(self.device).train()
        # What the passes use; float32 weights stay with the optimiser.
        self.working = copy.deepcopy(self.model).to(torch.bfloat16) if self.options.pure_bf16 else self.model
        self.optimizer = make_optimizer(
            self.model, plan.optimizer, lr=plan.learning_rate, gate_lr=plan.gate_learning_rate
        )
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.objective: nn.Module = _Objective(self.working)
        if self.accelerator.num_processes > 1:
            self.objective = self.accelerator.prepare_model(self.objective)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._copies = [parameter for parameter in self.working.parameters() if parameter.requires_grad]
        self._tracked = bool(tracker)

    # --- running -----------------------------------------------------------------------------------------------------

    def train(self, checkpoint: str | Path | None = None) -> dict[str, Any]:
        """Train to the end of the plan, of the steps or of the time.

        Args:
            checkpoint: a folder that an earlier run with the same plan left, to go on from.

        Returns:
            Steps, seconds, why it ended, and for each stage what `Curriculum.left` says.

        Raises:
            ValueError: a checkpoint of another plan or seed.
            FloatingPointError: the loss is not finite; the last checkpoint is kept.
        """
        if checkpoint is not None:
            self._load(Path(checkpoint))
        self._start_log()
        self._clock = time.perf_counter() - self.elapsed
        total = self.plan.steps
        bar = tqdm(
            total=total if self.options.seconds is None else None,
            initial=self.step,
            unit="step",
            dynamic_ncols=True,
            disable=None if self.progress and self.accelerator.is_main_process else True,
        )
        reason = ""
        with bar, self._compiled():
            while not reason:
                reason = self._train_stage(bar)
        self._settle()
        for tracker in self.accelerator.trackers:  # end_training would also end the process group
            tracker.finish()
        return {
            "steps": self.step,
            "seconds": round(self.elapsed, 3),
            "ended": reason,
            "stage": min(self.curriculum.index, len(self.plan.stages) - 1),
            "exact": self.curriculum.exact,
            "left": list(self.curriculum.left),
        }

    def _train_stage(self, bar: Any) -> str:
        """Train until the stage is left; why the run is over, or an empty text."""
        stage, index = self.curriculum.stage, self.curriculum.index
        apply_stage(self.model, stage, self.block_size, self.text_tokens)
        if self.working is not self.model:
            apply_stage(self.working, stage, self.block_size, self.text_tokens)
        runner = _StageRunner(self.objective, stage, self._autocast, self._graphs(), self.plan.accumulation)
        total, every = self.plan.steps, self.options.log_every
        sums = torch.zeros(4, device=self.device)
        first = since = self.step
        reason = ""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            while not reason and self.curriculum.index == index:
                factor = learning_rate_factor(self.plan, self.step, self._share_done())
                for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                    group["lr"] = rate * factor
                for part in range(self.plan.accumulation):
                    last = part == self.plan.accumulation - 1
                    hold = nullcontext() if last else self.accelerator.no_sync(self.objective)
                    with hold:
                        sums += runner.run(sample_stage(self.documents, self.plan, stage, self._generator(part)))
                self._update()
                self.step += 1
                bar.update()
                if self.step % every and (self.options.seconds is not None or self.step < total):
                    continue

                # The only place that waits for the GPU.
                steps = self.step - since
                values = self.accelerator.reduce(sums / (steps * self.plan.accumulation), "mean").tolist()
                now = time.perf_counter() - self._clock
                speed = (now - self.elapsed) / steps
                self.elapsed = self._agreed(now)
                sums.zero_()
                since = self.step
                loss, question, accuracy, exact = values
                left = self.curriculum.update(steps, loss, exact)
                if self.curriculum.finished:
                    reason = left or "the last stage was left"
                elif self.options.seconds is None and self.step >= total:
                    reason = f"{total} steps"
                elif self.options.seconds is not None and self.elapsed >= self.options.seconds:
                    reason = f"{self.options.seconds:g} seconds"
                line = {
                    "step": self.step,
                    "seconds": round(self.elapsed, 3),
                    "stage": index,
                    "length": stage.length,
                    "needles": stage.needles,
                    "loss": loss,
                    "token_accuracy": accuracy,
                    "exact": exact,
                    "learning_rate": self.rates[0] * factor,
                    "milliseconds_per_step": round(1000 * speed, 2),
                }
                if stage.question_weight:
                    line["question_loss"] = question
                if left or reason:
                    line["left"] = left or reason
                    line["stage_steps"] = self.step - first
                    line["cuda_graph"] = runner.recorded
                    if self.device.type == "cuda":
                        line["peak_gib"] = round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2)
                self._log(line, bar)
                if not math.isfinite(loss):  # before a checkpoint takes the last good one's place
                    raise FloatingPointError(f"the loss is not finite at step {self.step}")
                if self.options.save_every and (self.step % self.options.save_every == 0 or reason):
                    self._settle()
                    self.save_checkpoint()
        finally:
            runner.close()
        return reason

    def _share_done(self) -> float:
        """Share of the run that is over; by time it is that of the last line of the log."""
        if self.options.seconds is not None:
            return self.elapsed / self.options.seconds
        return self.step / self.plan.steps

    def _update(self) -> None:
        """One step of the optimiser from the gradients, which are left as they are."""
        if self.working is not self.model:
            given = [copied.grad for copied in self._copies]
            for parameter, grad in zip(self._parameters, given, strict=True):
                if grad is None:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
            pairs = [(p.grad, grad) for p, grad in zip(self._parameters, given, strict=True) if grad is not None]
            torch._foreach_copy_([grad for grad, _ in pairs], [grad for _, grad in pairs])
        if self.plan.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.plan.clip)
        self.optimizer.step()
        if self.working is not self.model:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._parameters)

    def _autocast(self) -> Any:
        enabled = self.options.bf16 and not self.options.pure_bf16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def _graphs(self) -> bool:
        return self.options.cuda_graphs and self.device.type == "cuda" and self.accelerator.num_processes == 1

    def _generator(self, part: int) -> torch.Generator:
        """Of one batch: it depends on the seed, the step and the process alone."""
        name = f"{self.options.seed}/{self.step}/{part}/{self.accelerator.process_index}"
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
        return torch.Generator(self.device).manual_seed(number)

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
        kinds = tuple(self.working._no_split_modules or ())
        layers = [module for module in self.working.modules() if type(module).__name__ in kinds]
        config = torch._dynamo.config
        name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        before = getattr(config, name)
        # A stage's shapes, the first layer and the last each make a graph of their own.
        setattr(config, name, max(before, 64))
        for layer in layers:
            layer.compile(dynamic=False)
        try:
            yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            setattr(config, name, before)

    def _settle(self) -> None:
        """Leave the model as it is saved: the last stage's positions, and a block of the usual size."""
        stage = self.curriculum.stage
        apply_stage(self.model, stage, self.block_size, self.text_tokens)
        self.model.config.generation_block_size = self.block_size

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
        # An unfinished run's lines are worth reading, and a torn last one is not: append whole lines.
        with open(self.folder / LOG_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._tracked:
            numbers = {name: value for name, value in line.items() if isinstance(value, (int, float))}
            self.accelerator.log({f"train/{name}": value for name, value in numbers.items()}, step=self.step)
        bar.set_postfix_str(
            f"{line['length']}/{line['needles']} loss {line['loss']:.3f} exact {line['exact']:.3f} "
            f"{line['milliseconds_per_step']:.0f} ms",
            refresh=False,
        )
        if "left" in line and bar.disable and self.progress:
            print(
                f"step {self.step}, {self.elapsed:.1f} s: left {line['length']:,}/{line['needles']} ({line['left']})",
                file=sys.stderr,
                flush=True,
            )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> Path:
        """Write `checkpoint-STEP`, whole or not at all, and delete the one before it."""
        path = self.folder / f"checkpoint-{self.step}"
        if self.accelerator.is_main_process:
            state = {
                "step": self.step,
                "elapsed": self.elapsed,
                "plan": self.plan.to_dict(),
                "seed": self.options.seed,
                "processes": self.accelerator.num_processes,
                "curriculum": self.curriculum.state_dict(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            with run_folder.replaced_folder(path) as beside:
                torch.save(state, beside / _STATE_NAME)
            for other in run_folder.whole_checkpoints(self.folder, _STATE_NAME):
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return path

    def _load(self, checkpoint: Path) -> None:
        state = torch.load(checkpoint / _STATE_NAME, map_location=self.device, weights_only=True)
        expected = {"seed": self.options.seed, "processes": self.accelerator.num_processes}
        for name, value in expected.items():
            if state[name] != value:
                raise ValueError(f"{checkpoint} is of a run with {name} {state[name]}, this one has {value}")
        saved = NeedlePlan.from_dict(state["plan"])
        for entry in fields(NeedlePlan):
            if getattr(saved, entry.name) != getattr(self.plan, entry.name):
                raise ValueError(
                    f"{checkpoint} is of a plan with another {entry.name}: {getattr(saved, entry.name)!r} there, "
                    f"{getattr(self.plan, entry.name)!r} now"
                )
        self.step, self.elapsed = state["step"], state["elapsed"]
        self.curriculum.load_state_dict(state["curriculum"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.working is not self.model:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._parameters)


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint in a run's folder, or None."""
    return run_folder.last_checkpoint(folder, _STATE_NAME)


def _check(model: ProxyFormerForCausalLM, plan: NeedlePlan, documents: NeedleDocuments, text_tokens: int) -> None:
    config = model.config
    if not config.has_proxies:
        raise ValueError("the model has no proxies (compression_ratio=None) to learn with")
    if text_tokens > config.block_size:
        raise ValueError(
            f"a question and its answer take up to {text_tokens} tokens and generation_block_size is "
            f"{config.block_size}: make it at least that"
        )
    if (config.head_dim or 0) % 2 and any(stage.rope for stage in plan.stages):
        raise ValueError(f"stages with a rotary embedding need an even head_dim, the model's is {config.head_dim}")
    if config.proxy_rope and not all(stage.rope for stage in plan.stages):
        raise ValueError("proxy_rope=True needs a rotary embedding, and the plan has stages without: set rope for all")
    templates = documents.templates
    for stage in plan.stages:
        if stage.needles > templates.num_ids:
            raise ValueError(f"stage {stage}: there are only {templates.num_ids} different passkeys")
        least = templates.min_length(stage.needles)
        if stage.length < least:
            raise ValueError(f"stage {stage}: {stage.needles} needles take {least} tokens, more than {stage.length}")


class _Objective(nn.Module):
    """The loss as a module's forward pass, which data-parallel training wants."""

    def __init__(self, model: ProxyFormerForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: NeedleBatch, stage: NeedleStage) -> tuple[Tensor, Tensor]:
        result = needle_loss(self.model, batch, stage.history, stage.question_weight)
        return result.loss, torch.stack((result.cross_entropy, result.question, result.token_accuracy, result.exact))


class _StageRunner:
    """Forward and backward pass of a stage's batches, recorded as a CUDA graph where that is possible.

    Gradients of the batches of a step add up. Of a recorded pass they stay the same tensors, which every replay
    overwrites, or adds to where a step has several batches.
    """

    def __init__(
        self,
        objective: nn.Module,
        stage: NeedleStage,
        autocast: Callable[[], Any],
        graphs: bool,
        accumulation: int,
    ) -> None:
        self.objective, self.stage, self.autocast, self.graphs = objective, stage, autocast, graphs
        self.accumulation = accumulation
        self.recorded = False
        self._parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        self._count = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: NeedleBatch | None = None
        self._figures: Tensor | None = None
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, batch: NeedleBatch) -> Tensor:
        """Cross-entropy, the question's loss, accuracy, share of exact answers `(4,)`; parameters get gradients."""
        first = self._count % self.accumulation == 0
        self._count += 1
        if self._graph is None and self.graphs and first and self._count > _WARM_UP_BATCHES:
            self._record(batch)
        if self._graph is not None:
            if first and self.accumulation > 1:
                torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])
            assert self._batch is not None and self._figures is not None
            pairs = list(zip(_tensors(self._batch), _tensors(batch), strict=True))
            torch._foreach_copy_([own for own, _ in pairs], [given for _, given in pairs])
            self._graph.replay()
            return self._figures
        if first:
            for parameter in self._parameters:
                parameter.grad = None
        return self._passes(batch)

    def _passes(self, batch: NeedleBatch) -> Tensor:
        with self.autocast():
            loss, figures = self.objective(batch, self.stage)
        (loss / self.accumulation).backward()
        return figures

    def _record(self, batch: NeedleBatch) -> None:
        """Record the passes; where they wait for the GPU, say so once and go on without."""
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(), self.autocast():
                warnings.simplefilter("ignore")  # it says that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
                self.objective(batch, self.stage)
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph, because the model waits for the GPU: {error}", stacklevel=2)
            self.graphs = False
            return
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        self._batch = NeedleBatch(*(tensor.clone() for tensor in _tensors(batch)))
        keeps = self.accumulation > 1
        for parameter in self._parameters:
            # With None a recorded pass writes gradients; with zeros it adds to them.
            parameter.grad = None if not keeps or parameter.grad is None else torch.zeros_like(parameter)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._figures = self._passes(self._batch)
        self.recorded = True

    def close(self) -> None:
        """Let go of the graph and its memory, once it has run."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._graph is not None:
            torch.cuda.synchronize()  # a graph must not be destroyed in flight
            self._graph = self._figures = self._batch = None
            torch.cuda.empty_cache()


def _tensors(batch: NeedleBatch) -> list[Tensor]:
    return [getattr(batch, entry.name) for entry in fields(batch)]
