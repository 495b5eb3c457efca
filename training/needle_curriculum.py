"""How a ProxyFormer learns to find many needles: stages from short to long, when to leave one, and the loss.

A plan is data: stages that share weights and optimiser state, and how these are trained::

    plan = NEEDLE_PLANS["fast"]
    curriculum = Curriculum(plan)
    while not curriculum.finished:
        apply_stage(model, curriculum.stage, block_size, text_tokens)
        batch = sample_stage(documents, plan, curriculum.stage, generator)
        result = needle_loss(model, batch, curriculum.stage.history)
        ...
        curriculum.update(steps=10, loss=mean_loss, exact=mean_exact)

`"fast"` learns 8,192 tokens with 50 needles from random weights in some 2,600 steps. `"long"` goes on from there to
65,536 tokens, two documents at a time. `"merged"` is "fast" for tokenizers that merge digits, such as GPT-2's, where a
passkey's name is a token of its own. `"paper"` is the curriculum of the ProxyFormer paper (Section 5.3): a plain
decoder first, then proxies, then many needles, then longer documents and no rotary embedding. Where the paper gives no
number (batch sizes, steps), the plan chooses one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from nearfar.evaluation.needle_documents import NeedleBatch, NeedleDocuments

if TYPE_CHECKING:
    from nearfar.modeling.modeling_proxyformer import ProxyFormerForCausalLM

__all__ = [
    "NEEDLE_PLANS",
    "Curriculum",
    "NeedleLoss",
    "NeedlePlan",
    "NeedleStage",
    "apply_stage",
    "learning_rate_factor",
    "needle_loss",
    "read_plan",
    "sample_stage",
]

SCHEDULES = ("constant_linear", "cosine")
OPTIMIZERS = ("muon", "mano", "adamw")
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
IGNORED = -100


@dataclass(frozen=True)
class NeedleStage:
    """Documents of one kind, until they are learnt.

    Attributes:
        length: tokens of a document.
        needles: in each document.
        documents: of a batch, on each process.
        queries: asked about each document.
        leave_at: share of exact answers, smoothed, at which the stage ends; None to stay.
        max_steps: after which it ends in any case; None for no limit.
        history: whether documents are compressed into proxies. Without, the model is a plain decoder of the same
            weights that reads the document in front of the question as raw tokens.
        rope: whether raw tokens are turned by a rotary embedding.
        question_weight: of the loss of the question itself, in nats a question. Of a question only the passkey's name
            is not known beforehand, so that this loss makes proxies keep the names they hold. Answers to questions
            about a single needle do not; where names are tokens of their own a model was seen to stay at chance as
            soon as there were several needles.

    Raises:
        ValueError: a number out of range, or several questions about a document that is read as raw tokens.
    """

    length: int
    needles: int
    documents: int
    queries: int
    leave_at: float | None = None
    max_steps: int | None = None
    history: bool = True
    rope: bool = True
    question_weight: float = 0.0

    def __post_init__(self) -> None:
        for name in ("length", "needles", "documents", "queries"):
            _check_count(f"a stage's {name}", getattr(self, name))
        if self.max_steps is not None:
            _check_count("a stage's max_steps", self.max_steps)
        if not 0 <= self.question_weight < math.inf:
            raise ValueError(f"a stage's question_weight must be 0 or more, got {self.question_weight}")
        if self.queries > self.needles:
            raise ValueError(
                f"a stage asks {self.queries} queries about {self.needles} needles: ask no more than that"
            )
        if self.leave_at is not None and not 0 < self.leave_at <= 1:
            raise ValueError(f"a stage's leave_at must be above 0 and at most 1, got {self.leave_at}")
        if not self.history and self.queries != 1:
            raise ValueError(
                f"a stage without history puts the document in front of one query, got queries = {self.queries}"
            )

    def __str__(self) -> str:
        kinds = [", raw"] * (not self.history) + [", NoPE"] * (not self.rope)
        kinds += [f", question {self.question_weight:g}"] * (self.question_weight > 0)
        return f"{self.length:,}/{self.needles} × {self.documents}·{self.queries}{''.join(kinds)}"


@dataclass(frozen=True)
class NeedlePlan:
    """Stages and how they are trained.

    Attributes:
        name: of the plan.
        stages: one after the other, weights and optimiser state carried over.
        steps: of the whole run, if no budget of time is given.
        optimizer: of the matrices, `"muon"`, `"mano"` or `"adamw"`; AdamW takes the rest.
        learning_rate: the highest; `gate_learning_rate` that of the gates, None for the same.
        schedule: after the warm-up: `"constant_linear"` stays and falls linearly over the last `decay` of the run,
            `"cosine"` falls along half a cosine.
        warmup_steps, warmup: the learning rate rises over so many steps, and over this share of the run.
        decay: share of the run, of `"constant_linear"`.
        final: share of the learning rate at the end.
        clip: of the gradient's norm; 0 for none.
        accumulation: batches of a step.
        constant_background: share of documents whose background is one repeated token.
        dense: share of documents with all needles in a short span.
        plateau_steps: a stage ends when its smoothed loss has not fallen by 1 % for so many steps; None to wait.

    Raises:
        ValueError: a number out of range, an unknown name, or no stages.
    """

    name: str
    stages: tuple[NeedleStage, ...]
    steps: int
    optimizer: str = "muon"
    learning_rate: float = 3e-3
    gate_learning_rate: float | None = None
    schedule: str = "constant_linear"
    warmup_steps: int = 0
    warmup: float = 0.0
    decay: float = 0.4
    final: float = 0.05
    clip: float = 1.0
    accumulation: int = 1
    constant_background: float = 0.1
    dense: float = 0.0
    plateau_steps: int | None = None

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError(f"the plan {self.name!r} has no stages")
        for name in ("steps", "accumulation"):
            _check_count(name, getattr(self, name))
        if self.plateau_steps is not None:
            _check_count("plateau_steps", self.plateau_steps)
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        rates = [("learning_rate", self.learning_rate), ("gate_learning_rate", self.gate_learning_rate)]
        for name, rate in rates:
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"{name} must be above 0, got {rate}")
        for name in ("warmup", "decay", "final", "constant_background", "dense"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.warmup_steps < 0 or self.clip < 0:
            raise ValueError(f"warmup_steps and clip must be 0 or more, got {self.warmup_steps} and {self.clip}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` reads it. A `question_weight` of 0 is left out, as in what was written before it."""
        stages = [dataclasses.asdict(stage) for stage in self.stages]
        for stage in stages:
            if not stage["question_weight"]:
                del stage["question_weight"]
        return {**dataclasses.asdict(self), "stages": stages}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NeedlePlan:
        """Read what `to_dict` gave, or a hand-written plan.

        Raises:
            ValueError: an unknown or missing entry, or a value out of range.
        """
        values = dict(data)
        stages = values.get("stages")
        if not isinstance(stages, (list, tuple)):
            raise ValueError("a plan needs `stages`, a list")
        values["stages"] = tuple(_from_dict(NeedleStage, stage, "stage") for stage in stages)
        return _from_dict(cls, values, "plan")


def read_plan(path: str | Path) -> NeedlePlan:
    """A plan from a JSON file with the fields of `NeedlePlan`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON object, or a wrong entry.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object with the fields of a plan")
    return NeedlePlan.from_dict(data)


def _from_dict(kind: type[Any], data: Any, what: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"a {what} must be an object with named entries, got {data!r}")
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(f"a {what} has no entry {unknown[0]!r}; there are {', '.join(known)}")
    missing = [
        name
        for name, entry in known.items()
        if name not in data and entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"a {what} needs {', '.join(missing)}")
    return kind(**data)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


NEEDLE_PLANS: dict[str, NeedlePlan] = {
    "fast": NeedlePlan(
        name="fast",
        stages=(
            NeedleStage(256, 1, 256, 1, leave_at=0.5),
            NeedleStage(512, 8, 64, 8, leave_at=0.6),
            NeedleStage(2048, 25, 16, 25, leave_at=0.6),
            NeedleStage(8192, 50, 8, 50),
        ),
        steps=3000,
        plateau_steps=1500,
        warmup_steps=100,
    ),
    "long": NeedlePlan(
        name="long",
        stages=(
            NeedleStage(256, 1, 256, 1, leave_at=0.5),
            NeedleStage(512, 8, 64, 8, leave_at=0.6),
            NeedleStage(2048, 25, 16, 25, leave_at=0.6),
            # By then it is learnt but for what a lower learning rate mends, which the last stage's does.
            NeedleStage(8192, 50, 8, 50, leave_at=0.8, max_steps=1500),
            NeedleStage(65_536, 50, 2, 50),
        ),
        steps=4000,
        plateau_steps=1500,
        warmup_steps=100,
    ),
    "merged": NeedlePlan(
        name="merged",
        stages=(
            # Most of the steps: answers are of over a thousand different tokens, not of ten.
            NeedleStage(256, 1, 256, 1, leave_at=0.5, question_weight=1.0),
            NeedleStage(512, 8, 64, 8, leave_at=0.6, question_weight=0.3),
            NeedleStage(2048, 25, 16, 25, leave_at=0.6),
            NeedleStage(8192, 50, 8, 50),
        ),
        steps=9000,
        plateau_steps=3000,
        warmup_steps=100,
    ),
    "paper": NeedlePlan(
        name="paper",
        stages=(
            NeedleStage(256, 1, 32, 1, leave_at=0.98, max_steps=4000, history=False),
            NeedleStage(256, 1, 32, 1, leave_at=0.98, max_steps=8000),
            NeedleStage(8192, 50, 1, 50, leave_at=0.98, max_steps=16_000),
            NeedleStage(8192, 50, 1, 50, leave_at=0.98, max_steps=8000, rope=False),
            NeedleStage(65_536, 50, 1, 50, rope=False),
        ),
        steps=40_000,
        optimizer="mano",
        learning_rate=3e-4,
        gate_learning_rate=3e-3,
        schedule="cosine",
        warmup=0.06,
        final=1e-5 / 3e-4,
        accumulation=16,
        plateau_steps=3000,
    ),
}


# --- progress --------------------------------------------------------------------------------------------------------


def learning_rate_factor(plan: NeedlePlan, step: int, progress: float) -> float:
    """What the learning rate is multiplied by.

    Args:
        plan: its schedule.
        step: steps taken so far.
        progress: share of the run that is over, by steps or by time.

    Returns:
        A number above 0, at most 1.
    """
    progress = min(max(progress, 0.0), 1.0)
    rise = min(1.0, (step + 1) / plan.warmup_steps) if plan.warmup_steps else 1.0
    if progress < plan.warmup:
        # Not from 0: the first step is to do something.
        return min(rise, max(progress / plan.warmup, 1e-3))
    if plan.schedule == "cosine":
        over = (progress - plan.warmup) / (1 - plan.warmup) if plan.warmup < 1 else 0.0
        return rise * (plan.final + (1 - plan.final) * 0.5 * (1 + math.cos(math.pi * over)))
    left = 1.0 if plan.decay == 0 else min(1.0, (1 - progress) / plan.decay)
    return rise * max(plan.final, left)


@dataclass
class Curriculum:
    """Which stage a run is in, from what was measured.

    Attributes:
        plan: the stages.
        index: of the stage.
        step: steps in this stage.
        exact, loss: of this stage, smoothed: each measurement counts a fifth. None before the first.
        best_loss, best_step: the lowest smoothed loss, and when it was reached.
        left: for each stage that is over: steps, smoothed share of exact answers, and why it was left.
    """

    plan: NeedlePlan
    index: int = 0
    step: int = 0
    exact: float | None = None
    loss: float | None = None
    best_loss: float = math.inf
    best_step: int = 0
    left: list[dict[str, Any]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the last stage has been left."""
        return self.index >= len(self.plan.stages)

    @property
    def stage(self) -> NeedleStage:
        """The stage to train, the last one if all are left."""
        return self.plan.stages[min(self.index, len(self.plan.stages) - 1)]

    def update(self, steps: int, loss: float, exact: float) -> str | None:
        """Take note of a measurement, and go on to the next stage if it says so.

        Args:
            steps: taken since the last one, in this stage.
            loss: their mean cross-entropy.
            exact: their mean share of exact answers.

        Returns:
            Why the stage was left, or None.
        """
        self.step += steps
        self.exact = exact if self.exact is None else 0.8 * self.exact + 0.2 * exact
        self.loss = loss if self.loss is None else 0.8 * self.loss + 0.2 * loss
        if self.loss < 0.99 * self.best_loss:
            self.best_loss, self.best_step = self.loss, self.step
        stage, patience = self.stage, self.plan.plateau_steps
        reason = None
        if stage.leave_at is not None and self.exact >= stage.leave_at:
            reason = f"exact {self.exact:.3f} reached {stage.leave_at}"
        elif stage.max_steps is not None and self.step >= stage.max_steps:
            reason = f"{stage.max_steps} steps"
        elif patience is not None and self.step - self.best_step >= patience:
            reason = f"plateau of {patience} steps"
        if reason is not None:
            self.left.append({"stage": str(stage), "steps": self.step, "exact": self.exact, "reason": reason})
            self.index, self.step = self.index + 1, 0
            self.exact = self.loss = None
            self.best_loss, self.best_step = math.inf, 0
        return reason

    def state_dict(self) -> dict[str, Any]:
        """Everything but the plan."""
        state = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.name != "plan"}
        return {**state, "left": list(self.left)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        for name, value in state.items():
            setattr(self, name, list(value) if name == "left" else value)


# --- a stage's model, data and loss ----------------------------------------------------------------------------------


def apply_stage(model: ProxyFormerForCausalLM, stage: NeedleStage, block_size: int, text_tokens: int) -> None:
    """Bring a model's configuration to a stage; its weights stay as they are.

    Without history, a generation block is as long as the whole text, so that nothing is ever compressed: the model is
    a plain decoder with full causal attention.

    Args:
        model: a ProxyFormer.
        stage: the stage.
        block_size: tokens of a generation block where there is history.
        text_tokens: the longest question and answer.
    """
    config = model.config
    if stage.rope and config.rope_parameters is None:
        config.rope_parameters = dict(DEFAULT_ROPE)
    elif not stage.rope:
        config.rope_parameters = None
    unit = math.lcm(*config.ratios)
    config.generation_block_size = block_size if stage.history else -(-(stage.length + text_tokens) // unit) * unit


def sample_stage(
    documents: NeedleDocuments, plan: NeedlePlan, stage: NeedleStage, generator: torch.Generator | None = None
) -> NeedleBatch:
    """A stage's batch, on the documents' device."""
    return documents.sample(
        stage.documents,
        stage.length,
        stage.needles,
        stage.queries,
        generator,
        constant_background=plan.constant_background,
        dense=plan.dense,
    )


class NeedleLoss(NamedTuple):
    """What a batch gives.

    Attributes:
        loss: to be minimised, a float32 scalar with gradient: the last head's cross-entropy, and the middle head's at
            its weight; both with the question's own loss at its weight.
        cross_entropy: of the last head, on answers.
        question: the question's own loss, of the last head, in nats a question; 0 at a weight of 0.
        token_accuracy: share of answer tokens that are the most likely ones.
        exact: share of answers of which each token is the most likely one after the right ones before it.
    """

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    question: torch.Tensor
    token_accuracy: torch.Tensor
    exact: torch.Tensor


def needle_loss(
    model: ProxyFormerForCausalLM, batch: NeedleBatch, history: bool = True, question_weight: float = 0.0
) -> NeedleLoss:
    """Cross-entropy of the answers (the space and the digits), and how many are right.

    The loss is the model's own with `labels`, which looks for the labelled positions among all and so waits for the
    GPU. Here their places follow from the questions' lengths: nothing waits, shapes depend on the batch's shape alone,
    a CUDA graph can hold it, and the same logits tell which answers are exact.

    Args:
        model: in training mode for the middle head's share of the loss.
        batch: of documents and questions.
        history: whether documents are compressed; see `NeedleStage`.
        question_weight: of the questions' own loss; see `NeedleStage`.

    Returns:
        Scalars; all but the first without gradient.
    """
    ids = batch.input_ids.flatten(0, 1)
    lengths = batch.query_lengths.flatten()[:, None]
    start = 0
    if history:
        outputs = model.model(input_ids=ids, history_ids=batch.documents, use_cache=False)
    else:
        outputs = model.model(input_ids=torch.cat((batch.documents, ids), 1), use_cache=False)
        start = batch.documents.shape[1]
    answers = batch.answer_ids.flatten(0, 1)
    place = torch.arange(answers.shape[1], device=answers.device)
    real = place < batch.answer_lengths.flatten()[:, None]
    targets = torch.where(real, answers, IGNORED)
    places = (start + lengths - 1 + place)[..., None]
    asked = batch.queries.flatten(0, 1)[:, 1:]
    asked = torch.where(torch.arange(1, asked.shape[1] + 1, device=asked.device) < lengths, asked, IGNORED)

    def scores(chosen: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model.lm_head(chosen.flatten(0, 1))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def losses(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A head's logits of the answers, their cross-entropy, and the question's."""
        logits = scores(states.gather(1, places.expand(-1, -1, states.shape[-1])))
        entropy = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
        if not question_weight:
            return logits, entropy, torch.zeros_like(entropy)
        words = scores(states[:, start : start + asked.shape[1]])
        total = F.cross_entropy(words, asked.flatten(), ignore_index=IGNORED, reduction="sum")
        return logits, entropy, total / len(ids)

    logits, cross_entropy, question = losses(outputs.last_hidden_state)
    loss = cross_entropy + question_weight * question
    weight = float(model.config.auxiliary_loss_weight)
    if weight and model.training and outputs.middle_hidden_state is not None:
        _, middle, middle_question = losses(outputs.middle_hidden_state)
        loss = loss + weight * (middle + question_weight * middle_question)
    with torch.no_grad():
        right = (logits.argmax(-1).view_as(targets) == targets) & real
        exact = (right | ~real).all(-1).float().mean()
        accuracy = right.sum() / real.sum()
    return NeedleLoss(loss, cross_entropy.detach(), question.detach(), accuracy, exact)
