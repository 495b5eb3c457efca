"""Distillation of a small causal language model from a large one with the same tokenizer, by the Trainer.

    loss = T² · KL(teacher || student, both at temperature T)  +  next_token_weight · next-token loss

    distill_logits(student, teacher, load_token_blocks("book.txt", tokenizer, 2048), "work", ProxyDistillation())

A limit of seconds ends training like a limit of steps does: the learning rate falls with whichever is nearer to its
end. With several GPUs, start the script with `accelerate launch`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from nearfar.modeling.atomic_file import write_beside
from nearfar.training.dar_distillation import DistillationProgress, logits_loss
from nearfar.training.run_folder import last_checkpoint

if TYPE_CHECKING:
    from nearfar.training.token_blocks import TokenBlocks

__all__ = ["ProxyDistillation", "ProxyDistillationReport", "ProxyDistillationTrainer", "distill_logits"]

_CLOCK_NAME = "seconds.json"
# Share of the training that warms up, and what is left of the learning rate at the end.
WARMUP, LAST_RATE = 0.05, 0.05


@dataclass(frozen=True)
class ProxyDistillation:
    """How to distill.

    Attributes:
        steps: most optimiser steps; 0 for no distillation.
        seconds: end after so many seconds of training, if that is sooner; None for no such limit.
        batch_size: blocks that each process reads in one forward pass.
        gradient_accumulation_steps: forward passes a step.
        learning_rate: highest; a twentieth of the training warms up, then a cosine to a twentieth of it.
        temperature: of both models' logits in the divergence.
        next_token_weight: of the next-token loss beside it.
        weight_decay: of AdamW, on matrices.
        train_embedding: also train the embedding and the output head. Left as they are, they cannot forget rare
            tokens, and cost no optimiser state.
        gradient_checkpointing: less memory, a third more time.
        save_steps: steps between checkpoints to resume from.
        seed: of the order of the blocks.

    Raises:
        ValueError: a value out of range.
    """

    steps: int = 1000
    seconds: float | None = None
    batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-4
    temperature: float = 1.0
    next_token_weight: float = 0.0
    weight_decay: float = 0.0
    train_embedding: bool = False
    gradient_checkpointing: bool = False
    save_steps: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "next_token_weight", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("batch_size", "gradient_accumulation_steps", "learning_rate", "temperature", "save_steps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")

    def tokens(self, block_tokens: int, processes: int = 1) -> int:
        """How many tokens all steps read."""
        return self.steps * self.batch_size * self.gradient_accumulation_steps * processes * block_tokens


@dataclass(frozen=True)
class ProxyDistillationReport:
    """What was done.

    Attributes:
        steps: optimiser steps.
        tokens: read in all, by all processes.
        epochs: how often the text was read.
        seconds: of training, those before it was resumed included.
        loss: mean training loss of the last steps.
    """

    steps: int
    tokens: int
    epochs: float
    seconds: float
    loss: float


class _Clock(TrainerCallback):
    """Seconds of training, over interruptions and the same in all processes; ends the training when they are over."""

    def __init__(self, settings: ProxyDistillation) -> None:
        self.settings = settings
        self.seconds, self._before, self._start = 0.0, 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before, self._start = self.seconds, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = self._before + time.monotonic() - self._start
        if args.world_size > 1:  # one that stopped alone would leave the others waiting
            agreed = torch.tensor(self.seconds, device=args.device)
            torch.distributed.broadcast(agreed, 0)
            self.seconds = float(agreed)
        if self.settings.seconds is not None and self.seconds >= self.settings.seconds:
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / _CLOCK_NAME
            text = json.dumps(self.seconds)
            write_beside(path, lambda file: file.write_text(text, encoding="utf-8"))

    def resume(self, checkpoint: Path) -> None:
        file = checkpoint / _CLOCK_NAME
        self.seconds = float(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else 0.0

    def progress(self, step: int) -> float:
        """How much of the training is over, 0 to 1."""
        done = step / max(1, self.settings.steps)
        if self.settings.seconds is not None:
            done = max(done, self.seconds / self.settings.seconds)
        return min(1.0, done)


class ProxyDistillationTrainer(Trainer):
    """A Trainer for the loss of the module's docstring; all else is the Trainer's own.

    In evaluation the loss is the student's next-token loss.

    Args:
        model: the student.
        teacher: the target, on the Trainer's device, in any dtype.
        settings: losses and limits.
        others: the Trainer's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *others: Any,
        teacher: PreTrainedModel,
        settings: ProxyDistillation,
        **more: Any,
    ) -> None:
        self.teacher, self.settings = teacher.to(args.device).eval(), settings
        # Several GPUs of one process would mean nn.DataParallel; several processes work.
        if args.n_gpu > 1:
            args._n_gpu = 1
        args.prediction_loss_only = True
        super().__init__(model, args, *others, **more)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over whole batches of equal size
        self.clock = _Clock(settings)
        self.add_callback(self.clock)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Warm-up and cosine by `_Clock.progress`."""
        made: Any = getattr(self, "lr_scheduler", None)
        if made is None:

            def rate(step: int) -> float:
                done = self.clock.progress(step)
                # The first step of all must not be lost.
                warm = min(1.0, max(done, 1 / max(1, self.settings.steps)) / WARMUP)
                cosine = 0.5 * (1 + torch.cos(torch.tensor(done * torch.pi)).item())
                return warm * (LAST_RATE + (1 - LAST_RATE) * cosine)

            made = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rate)
            self.lr_scheduler = made
        return made

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The distillation loss in training, the next-token loss in evaluation."""
        ids, weight = inputs["input_ids"], self.settings.next_token_weight
        if not model.training:
            loss = model(input_ids=ids, labels=inputs["labels"], use_cache=False).loss
            return (loss, {}) if return_outputs else loss
        precision: AbstractContextManager[Any] = nullcontext()
        if self.teacher.dtype == torch.float32:  # in half precision it needs no autocast
            precision = self.accelerator.autocast()
        with torch.no_grad(), precision:
            expected = self.teacher(input_ids=ids, use_cache=False).logits
        options = {"labels": inputs["labels"]} if weight else {}
        student = model(input_ids=ids, use_cache=False, **options)
        loss = logits_loss(student.logits, expected, self.settings.temperature)
        if weight:
            loss = loss + weight * student.loss
        return (loss, {}) if return_outputs else loss


def distill_logits(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    blocks: TokenBlocks,
    folder: str | Path,
    settings: ProxyDistillation,
    *,
    bf16: bool | None = None,
    quiet: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> ProxyDistillationReport:
    """Distill `student` in place. The same call with the same folder goes on where it was interrupted.

    Args:
        student: in float32. Trained where it lies: on a CPU if it is there, otherwise on the process's GPU. It is left
            in eval mode with all parameters trainable.
        teacher: knows the same token ids.
        blocks: the text; read again from its start, in another order, if it is shorter than the steps need.
        folder: where checkpoints lie until the caller deletes them.
        settings: steps, losses, seed.
        bf16: bfloat16 autocast; `None` for that on a GPU.
        quiet: no progress bar.
        callbacks: further callbacks for the Trainer.

    Returns:
        What was done.

    Raises:
        ValueError: no steps, fewer blocks than a batch, other vocabularies, or a student in half precision.
    """
    if not settings.steps:
        raise ValueError("steps is 0: there is nothing to distill")
    if student.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"the student is {student.dtype}, whose steps would be rounded away: use student.float() to distill"
        )
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the student predicts {sizes[0]} tokens and the teacher {sizes[1]}: they need the same ids")
    processes = PartialState().num_processes
    if len(blocks) < settings.batch_size * processes:
        raise ValueError(
            f"{len(blocks)} blocks of {blocks.block_tokens} tokens are fewer than one batch of {settings.batch_size} "
            f"for each of {processes} process(es): give more text or a smaller batch_size"
        )
    folder = Path(folder)
    last = last_checkpoint(folder)
    wrapped = {name: student.__dict__.get(name) for name in ("forward", "_original_forward")}
    student.requires_grad_(True)
    if not settings.train_embedding:
        for part in (student.get_input_embeddings(), student.get_output_embeddings()):
            part.requires_grad_(False)
    if settings.gradient_checkpointing:
        # Its name from transformers 5.24 on, and before.
        enable = getattr(student, "activation_checkpointing_enable", None) or student.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    try:
        arguments = _arguments(student, folder, settings, bf16)
        trainer = ProxyDistillationTrainer(
            student, arguments, train_dataset=blocks, callbacks=list(callbacks), teacher=teacher, settings=settings
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        if not quiet:
            trainer.add_callback(DistillationProgress("distilling"))
        state = trainer.state
        if last is not None:
            trainer.clock.resume(last)
            state = state.load_from_json(str(last / "trainer_state.json"))
        over = settings.seconds is not None and trainer.clock.seconds >= settings.seconds
        if last is not None and (state.global_step >= settings.steps or over):
            # The Trainer would take one step more before it sees that there are enough.
            trainer._load_from_checkpoint(str(last))
        else:
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
            state = trainer.state
    finally:
        student.requires_grad_(True).eval()
        # The Trainer leaves its autocast around the forward pass.
        for name, value in wrapped.items():
            student.__dict__.pop(name, None)
            if value is not None:
                setattr(student, name, value)
        if settings.gradient_checkpointing:
            (getattr(student, "activation_checkpointing_disable", None) or student.gradient_checkpointing_disable)()
    logged = [entry["loss"] for entry in state.log_history if "loss" in entry]
    per_step = settings.batch_size * settings.gradient_accumulation_steps * processes * blocks.block_tokens
    tokens = state.global_step * per_step
    return ProxyDistillationReport(
        steps=state.global_step,
        tokens=tokens,
        epochs=tokens / (len(blocks) * blocks.block_tokens),
        seconds=trainer.clock.seconds,
        loss=float(logged[-1]) if logged else float("nan"),
    )


def _arguments(
    student: PreTrainedModel, folder: Path, settings: ProxyDistillation, bf16: bool | None
) -> TrainingArguments:
    on_cpu = student.device.type == "cpu"
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        learning_rate=settings.learning_rate,
        adam_beta2=0.98,
        weight_decay=settings.weight_decay,
        max_grad_norm=1.0,
        bf16=not on_cpu if bf16 is None else bf16,
        use_cpu=on_cpu,
        dataloader_drop_last=True,
        dataloader_pin_memory=not on_cpu,
        seed=settings.seed,
        data_seed=settings.seed,
        logging_steps=max(1, min(10, settings.steps // 10)),
        save_strategy="steps",
        save_steps=settings.save_steps,
        save_total_limit=1,
        report_to="none",
        ddp_find_unused_parameters=False,
    )
