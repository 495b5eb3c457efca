"""Distillation of a DAR from the GPT-NeoX inside it: the same weights with every token near are the teacher.

Stage 1 trains `bottleneck_down` and `bottleneck_up` alone. The base is frozen, so teacher and student share it, and no
second model is held; a step is two forward passes and one backward pass. Optional stage 2 trains all weights on the
next token, with the teacher's logits beside it; the teacher is then a frozen copy of the base.

    loss = attention_weight · mean over layers of |o - o'|² / |o'|²  +  logits_weight · KL(teacher || student)
           (+ next-token loss in stage 2)

o and o' are a layer's attention output in student and teacher, each on its own inputs, so that a layer also makes up
for what earlier ones lost. (Feeding student layers the teacher's inputs learnt no more a step, and beside the KL it
costs one more attention.) Only columns that see far tokens count in the first two terms: the others are equal.

    distill_dar(model, load_token_blocks("book.txt", tokenizer, 2048), "work", DistillationSettings(steps=300))

With several GPUs, start the script with `accelerate launch`.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from nearfar.training.run_folder import checkpoint_step, last_checkpoint

if TYPE_CHECKING:
    from nearfar.modeling.modeling_dar import DARForCausalLM
    from nearfar.training.token_blocks import TokenBlocks

__all__ = [
    "DARDistillationTrainer",
    "DistillationReport",
    "DistillationSettings",
    "distill_dar",
    "every_token_near",
    "freeze_base",
]

# A window that no sequence is longer than.
UNBOUNDED = 1 << 30
# Positions whose logits are in float32 at once, of teacher and student.
KL_CHUNK = 4096


@dataclass(frozen=True)
class DistillationSettings:
    """How to distill.

    Attributes:
        steps: optimiser steps with the base frozen; 0 for none.
        batch_size: blocks that each process reads in one forward pass.
        gradient_accumulation_steps: forward passes a step.
        learning_rate: highest; a twentieth of the steps warm up, then a cosine to zero.
        attention_weight, logits_weight: of the two losses; see the module's docstring.
        unfrozen_steps: steps of stage 2, with all weights trained; 0 for none.
        unfrozen_learning_rate: of stage 2.
        min_windows: how many windows long a block has to be. In short blocks few columns see far tokens, and none sees
            tokens as far away as they will be when the model is used.
        gradient_checkpointing: less memory, a third more time.
        save_steps: steps between checkpoints to resume from.
        seed: of the order of the blocks.

    Raises:
        ValueError: a value out of range.
    """

    steps: int = 300
    batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    attention_weight: float = 1.0
    logits_weight: float = 1.0
    unfrozen_steps: int = 0
    unfrozen_learning_rate: float = 2e-5
    min_windows: int = 8
    gradient_checkpointing: bool = False
    save_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "unfrozen_steps", "attention_weight", "logits_weight", "min_windows"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in (
            "batch_size", "gradient_accumulation_steps", "learning_rate", "unfrozen_learning_rate", "save_steps"
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.steps and not self.attention_weight and not self.logits_weight:
            raise ValueError("attention_weight and logits_weight are both 0: there is nothing to learn from")

    @property
    def total_steps(self) -> int:
        """Steps of both stages."""
        return self.steps + self.unfrozen_steps

    def tokens(self, block_tokens: int, processes: int = 1) -> int:
        """How many tokens both stages read."""
        return self.total_steps * self.batch_size * self.gradient_accumulation_steps * processes * block_tokens

    def check_blocks(self, block_tokens: int, window: int) -> None:
        """Raise a `ValueError` where blocks are too short for the window."""
        if block_tokens < max(self.min_windows * window, window + 1):
            raise ValueError(
                f"distillation wants blocks of at least {self.min_windows} windows, {self.min_windows * window} "
                f"tokens, and they have {block_tokens}: give longer blocks, a smaller window, or a smaller min_windows"
            )


@dataclass(frozen=True)
class DistillationReport:
    """What was done.

    Attributes:
        steps, unfrozen_steps: optimiser steps of each stage.
        tokens: read in all, by all processes.
        epochs: how often the text was read.
        seconds: of training; for a resumed run those since it was resumed.
        losses: stage ("frozen", "unfrozen") to mean training loss of the last steps.
    """

    steps: int
    unfrozen_steps: int
    tokens: int
    epochs: float
    seconds: float
    losses: dict[str, float]


# ---------------------------------------------------------------------------------------------------------------------
# Teacher and student in one model
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def every_token_near(model: Any) -> Iterator[None]:
    """Inside, a DAR without cache (`use_cache=False`) is the GPT-NeoX of its base weights: no token is far."""
    attentions = [layer.attention for layer in model.gpt_neox.layers]
    windows = [attention.window for attention in attentions]
    try:
        for attention in attentions:
            attention.window = None if attention.window is None else UNBOUNDED
        yield
    finally:
        for attention, window in zip(attentions, windows, strict=True):
            attention.window = window


def freeze_base(model: nn.Module) -> list[str]:
    """Let only the bottlenecks be trained; returns their parameters' names.

    Raises:
        ValueError: the model has no bottleneck.
    """
    trained = []
    for name, parameter in model.named_parameters():
        chosen = name.endswith(("bottleneck_down.weight", "bottleneck_up.weight"))
        parameter.requires_grad_(chosen)
        if chosen:
            trained.append(name)
    if not trained:
        raise ValueError("the model has no bottleneck (window_size=None): there is nothing to distill")
    return trained


@contextmanager
def _recorded(model: Any, first: int) -> Iterator[list[torch.Tensor]]:
    """Collects each layer's attention output from column `first` on, `(batch, columns, hidden size)`."""
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
        outputs.append(output[0][:, first:])

    handles = [layer.attention.register_forward_hook(keep) for layer in model.gpt_neox.layers]
    try:
        yield outputs
    finally:
        for handle in handles:  # before the backward pass, where checkpointed layers run again
            handle.remove()


def attention_loss(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> torch.Tensor:
    """Squared error over the teacher's energy, its mean over layers and rows; a scalar in float32.

    The ratio is each row's own, so that the mean over small batches is that over the large one they make up.

    Args:
        student, teacher: one tensor a layer, `(batch, columns, hidden size)`.
    """
    losses = []
    for ours, theirs in zip(student, teacher, strict=True):
        ours, theirs = ours.float(), theirs.float()
        energy = theirs.square().sum((1, 2)).clamp_min(torch.finfo(theirs.dtype).tiny)
        losses.append(((ours - theirs).square().sum((1, 2)) / energy).mean())
    return torch.stack(losses).mean()


def logits_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """KL(teacher || student) in nats, its mean over positions; a scalar in float32.

    Args:
        student, teacher: `(batch, columns, vocabulary)`. Log-probabilities are there for `KL_CHUNK` positions at once,
            in the backward pass too.
        temperature: T, which both logits are divided by; the divergence is then multiplied by T², so that gradients
            stay of the same size.
    """
    ours, theirs = student.flatten(0, 1), teacher.flatten(0, 1)
    total = torch.zeros((), device=student.device)
    for part, target in zip(ours.split(KL_CHUNK), theirs.split(KL_CHUNK), strict=True):
        total = total + checkpoint(_kl_sum, part, target, temperature, use_reentrant=False)
    return temperature**2 * total / ours.shape[0]


def _kl_sum(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    ours, theirs = ((logits.float() / temperature).log_softmax(-1) for logits in (student, teacher))
    return F.kl_div(ours, theirs, log_target=True, reduction="sum")


class DARDistillationTrainer(Trainer):
    """A Trainer for the loss of the module's docstring; all else is the Trainer's own.

    In evaluation the loss is the student's next-token loss, and neither logits nor caches are gathered.

    Args:
        model: a `DARForCausalLM` without dropout.
        attention_weight, logits_weight, next_token_weight: of the losses.
        teacher: a model whose near path is the teacher, on the Trainer's device; `None` for `model` itself, which is
            right as long as its base is frozen.
        others: the Trainer's. `train_dataset` gives blocks of one length, longer than the window.

    Raises:
        ValueError: a model without bottleneck, or with dropout, which would differ between teacher and student.
    """

    def __init__(
        self,
        model: DARForCausalLM,
        args: TrainingArguments,
        *others: Any,
        attention_weight: float = 1.0,
        logits_weight: float = 1.0,
        next_token_weight: float = 0.0,
        teacher: DARForCausalLM | None = None,
        **more: Any,
    ) -> None:
        config = model.config
        if not config.has_bottleneck:
            raise ValueError("the model has no bottleneck (window_size=None): there is nothing to distill")
        if config.attention_dropout or any(module.p for module in model.modules() if isinstance(module, nn.Dropout)):
            raise ValueError(
                f"dropout (attention_dropout={config.attention_dropout}, hidden_dropout={config.hidden_dropout}) "
                "differs between two passes of one model: load it with both set to 0 to distill"
            )
        self.window = config.near_window
        self.attention_weight, self.logits_weight = attention_weight, logits_weight
        self.next_token_weight = next_token_weight
        self.teacher = None if teacher is None else teacher.to(args.device)
        # Several GPUs of one process would mean nn.DataParallel, whose replicas know nothing of windows and hooks set
        # here; several processes work.
        if args.n_gpu > 1:
            args._n_gpu = 1
        args.prediction_loss_only = True
        super().__init__(model, args, *others, **more)
        # The loss is a mean over a forward pass's rows. With whole batches (`dataloader_drop_last`) its mean over the
        # passes of a step, which the Trainer takes if the model does not count tokens itself, is exact.
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The distillation loss in training, the next-token loss in evaluation."""
        ids, labels = inputs["input_ids"], inputs["labels"]
        if not model.training:
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            return (loss, {}) if return_outputs else loss

        core = self.accelerator.unwrap_model(model)
        # The model's own forward pass is in the Trainer's precision; another teacher's has to be put there.
        precision: AbstractContextManager[Any] = nullcontext()
        teacher_model, teacher_core = model, core
        if self.teacher is not None:
            teacher_model, teacher_core, precision = self.teacher, self.teacher, self.accelerator.autocast()
        columns = ids.shape[1] - self.window
        # A model computes at least one column's logits; these are left alone where they have no weight.
        kept = columns if self.logits_weight else 1
        with (
            torch.no_grad(),
            precision,
            every_token_near(teacher_core),
            _recorded(teacher_core, self.window) as expected,
        ):
            expected_logits = teacher_model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
        options = {"labels": labels} if self.next_token_weight else {"logits_to_keep": kept}
        with _recorded(core, self.window) as found:
            student = model(input_ids=ids, use_cache=False, **options)

        loss = torch.zeros((), device=ids.device)
        if self.attention_weight:
            loss = loss + self.attention_weight * attention_loss(found, expected)
        if self.logits_weight:
            loss = loss + self.logits_weight * logits_loss(student.logits[:, -columns:], expected_logits)
        if self.next_token_weight:
            loss = loss + self.next_token_weight * student.loss
        return (loss, {}) if return_outputs else loss


# ---------------------------------------------------------------------------------------------------------------------
# Both stages, resumable
# ---------------------------------------------------------------------------------------------------------------------


class DistillationProgress(TrainerCallback):
    """A bar with the loss in it, on standard error; the Trainer's own prints every log to standard output."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bar: tqdm[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=self.name, disable=None, file=sys.stderr
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.bar is not None and logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.4g}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()


def distill_dar(
    model: DARForCausalLM,
    blocks: TokenBlocks,
    folder: str | Path,
    settings: DistillationSettings,
    *,
    bf16: bool | None = None,
    quiet: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> DistillationReport:
    """Distill `model` in place. The same call with the same folder goes on where it was interrupted.

    Args:
        model: with bottlenecks initialised, in float32. Trained where it lies: on a CPU if it is there, otherwise on
            the process's GPU. It is left in eval mode with all parameters trainable.
        blocks: the text; read again from its start, in another order, if it is shorter than the steps need.
        folder: where checkpoints lie until the caller deletes them; the caller also sees to it that a folder with an
            earlier run's checkpoints is of the same run.
        settings: steps, losses, seed.
        bf16: bfloat16 autocast; `None` for that on a GPU.
        quiet: no progress bar.
        callbacks: further callbacks for the Trainer.

    Returns:
        What was done.

    Raises:
        ValueError: blocks too short for the window, fewer blocks than a batch, a model without bottleneck or with
            dropout, or not in float32 (float64 on a CPU works too).
    """
    if not model.config.has_bottleneck:
        raise ValueError("the model has no bottleneck (window_size=None): there is nothing to distill")
    settings.check_blocks(blocks.block_tokens, model.config.near_window)
    if model.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"the model is {model.dtype}, whose steps would be rounded away: use model.float() to distill"
        )
    processes = PartialState().num_processes
    if len(blocks) < settings.batch_size * processes:
        raise ValueError(
            f"{len(blocks)} blocks of {blocks.block_tokens} tokens are fewer than one batch of {settings.batch_size} "
            f"for each of {processes} process(es): give more text or a smaller batch_size"
        )
    start = time.monotonic()
    losses: dict[str, float] = {}
    # Made before training changes the base, or a checkpoint that has changed it is loaded.
    teacher = copy.deepcopy(model).eval().requires_grad_(False) if settings.unfrozen_steps else None
    stages = [("frozen", settings.steps, settings.learning_rate)]
    stages.append(("unfrozen", settings.unfrozen_steps, settings.unfrozen_learning_rate))
    wrapped = {name: model.__dict__.get(name) for name in ("forward", "_original_forward")}
    if settings.gradient_checkpointing:
        # Its name from transformers 5.24 on, and before.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    try:
        for stage, steps, learning_rate in stages:
            if not steps:
                continue
            frozen = stage == "frozen"
            if frozen:
                freeze_base(model)
            else:
                model.requires_grad_(True)
            losses[stage] = _train_stage(
                model,
                blocks,
                Path(folder) / stage,
                _arguments(model, Path(folder) / stage, settings, steps, learning_rate, bf16),
                quiet,
                callbacks,
                attention_weight=settings.attention_weight if frozen else 0.0,
                logits_weight=settings.logits_weight,
                next_token_weight=0.0 if frozen else 1.0,
                teacher=None if frozen else teacher,
            )
    finally:
        model.requires_grad_(True).eval()
        # The Trainer leaves its autocast around the forward pass.
        for name, value in wrapped.items():
            model.__dict__.pop(name, None)
            if value is not None:
                setattr(model, name, value)
        if settings.gradient_checkpointing:
            (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
    tokens = settings.tokens(blocks.block_tokens, processes)
    return DistillationReport(
        steps=settings.steps,
        unfrozen_steps=settings.unfrozen_steps,
        tokens=tokens,
        epochs=tokens / (len(blocks) * blocks.block_tokens),
        seconds=time.monotonic() - start,
        losses=losses,
    )


def _arguments(
    model: DARForCausalLM,
    folder: Path,
    settings: DistillationSettings,
    steps: int,
    learning_rate: float,
    bf16: bool | None,
) -> TrainingArguments:
    on_cpu = model.device.type == "cpu"
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=not on_cpu if bf16 is None else bf16,
        use_cpu=on_cpu,
        dataloader_drop_last=True,
        seed=settings.seed,
        data_seed=settings.seed,
        logging_steps=max(1, min(10, steps // 10)),
        save_strategy="steps",
        save_steps=settings.save_steps,
        save_total_limit=1,
        report_to="none",
        ddp_find_unused_parameters=False,
    )


def _train_stage(
    model: DARForCausalLM,
    blocks: TokenBlocks,
    folder: Path,
    arguments: TrainingArguments,
    quiet: bool,
    callbacks: Sequence[TrainerCallback],
    **losses: Any,
) -> float:
    """Train one stage, from its last checkpoint if there is one; returns the last logged loss."""
    last = last_checkpoint(folder)
    trainer = DARDistillationTrainer(model, arguments, train_dataset=blocks, callbacks=list(callbacks), **losses)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if not quiet:
        trainer.add_callback(DistillationProgress("distilling" if folder.name == "frozen" else "training all weights"))
    if last is not None and checkpoint_step(last) >= arguments.max_steps:
        # The Trainer would take one step more before it sees that there are enough.
        trainer._load_from_checkpoint(str(last))
        state = trainer.state.load_from_json(str(last / "trainer_state.json"))
    else:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        state = trainer.state
    logged = [entry["loss"] for entry in state.log_history if "loss" in entry]
    return float(logged[-1]) if logged else float("nan")
