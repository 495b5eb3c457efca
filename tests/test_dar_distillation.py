"""Distillation: what is trained, what the loss counts, and that an interrupted run ends like one that was not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, random_ids
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, TrainerCallback, TrainingArguments

from nearfar.conversion.dar_from_pythia import dar_around, dar_config
from nearfar.conversion.dar_initialisation import initialise_bottlenecks
from nearfar.modeling.modeling_dar import DARForCausalLM
from nearfar.training.dar_distillation import (
    KL_CHUNK,
    DARDistillationTrainer,
    DistillationSettings,
    attention_loss,
    distill_dar,
    every_token_near,
    freeze_base,
    logits_loss,
)
from nearfar.training.token_blocks import TokenBlocks

WINDOW, TOKENS, SIZE = 3, 24, 4


def _source(seed: int = 0) -> GPTNeoXForCausalLM:
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, rotary_pct=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25)
    return model.eval()


def _model(window: int = WINDOW, source: GPTNeoXForCausalLM | None = None) -> DARForCausalLM:
    source = _source() if source is None else source
    model = dar_around(source, dar_config(source.config, bottleneck_size=SIZE, window_size=window))
    initialise_bottlenecks(model, None, method="svd")
    return model


def _blocks(rows: int = 12) -> TokenBlocks:
    return TokenBlocks(random_ids(rows, TOKENS).numpy().astype(np.uint16).reshape(-1), TOKENS)


def _trainer(model: DARForCausalLM, folder: Path, batch: int, accumulate: int = 1, **losses: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=batch, learning_rate=0.1, optim="sgd",
        gradient_accumulation_steps=accumulate, per_device_eval_batch_size=2, lr_scheduler_type="constant",
        max_grad_norm=0.0, use_cpu=True, report_to="none",
        save_strategy="no", dataloader_drop_last=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    return DARDistillationTrainer(model, arguments, train_dataset=_blocks(4), eval_dataset=_blocks(4), **losses)


def _bottlenecks(model: DARForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "bottleneck" in name}


# --- teacher ---------------------------------------------------------------------------------------------------------


def test_every_token_near_is_the_source() -> None:
    source = _source()
    model, ids = _model(source=source), random_ids(2, TOKENS)
    with torch.no_grad():
        expected, far = source(ids).logits, model(ids, use_cache=False).logits
        with every_token_near(model):
            near = model(ids, use_cache=False).logits
        again = model(ids, use_cache=False).logits
    torch.testing.assert_close(near, expected, rtol=0, atol=1e-5)
    assert (far - expected)[:, :WINDOW].abs().max() < 1e-5 < (far - expected)[:, WINDOW:].abs().max()
    torch.testing.assert_close(again, far, rtol=0, atol=0)


def test_windows_come_back_after_an_error() -> None:
    model = _model()
    with pytest.raises(RuntimeError), every_token_near(model):
        raise RuntimeError
    assert [layer.attention.window for layer in model.gpt_neox.layers] == [WINDOW, WINDOW]


def test_freeze_base() -> None:
    model = _model()
    trained = freeze_base(model)
    assert len(trained) == 4
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with pytest.raises(ValueError, match="no bottleneck"):
        freeze_base(_source())


# --- losses ----------------------------------------------------------------------------------------------------------


def test_losses_by_hand() -> None:
    teacher = [torch.randn(2, 5, 6) for _ in range(3)]
    student = [x + 0.1 * torch.randn_like(x) for x in teacher]
    by_hand = [
        ((s[row] - t[row]) ** 2).sum() / (t[row] ** 2).sum()
        for s, t in zip(student, teacher, strict=True)
        for row in (0, 1)
    ]
    torch.testing.assert_close(attention_loss(student, teacher), torch.stack(by_hand).mean())
    assert attention_loss(teacher, teacher) == 0
    zero = [torch.zeros(1, 2, 3)]
    assert bool(attention_loss(zero, zero).isfinite())

    ours, theirs = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 5, 7)
    p, q = theirs.softmax(-1), ours.softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    torch.testing.assert_close(logits_loss(ours, theirs), expected)


def test_logits_loss_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KL_CHUNK > 10
    ours, theirs = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 5, 7)
    whole = logits_loss(ours, theirs)
    (gradient,) = torch.autograd.grad(whole, ours)
    monkeypatch.setattr("nearfar.training.dar_distillation.KL_CHUNK", 3)
    chunked = logits_loss(ours, theirs)
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(torch.autograd.grad(chunked, ours)[0], gradient)


def test_the_loss_counts_far_seeing_columns_only(tmp_path: Path) -> None:
    model = _model()
    trainer = _trainer(model, tmp_path, 2)
    ids = random_ids(2, TOKENS)
    inputs = {"input_ids": ids, "labels": ids}
    model.train()
    loss = trainer.compute_loss(model, inputs)

    outputs: list[torch.Tensor] = []
    hooks = [
        layer.attention.register_forward_hook(lambda module, args, out: outputs.append(out[0][:, WINDOW:]))
        for layer in model.gpt_neox.layers
    ]
    with torch.no_grad():
        with every_token_near(model):
            teacher = model(ids, use_cache=False).logits[:, WINDOW:]
        student = model(ids, use_cache=False).logits[:, WINDOW:]
    for hook in hooks:
        hook.remove()
    expected = attention_loss(outputs[2:], outputs[:2]) + logits_loss(student, teacher)
    torch.testing.assert_close(loss.detach(), expected)
    # Terms without weight are not there.
    trainer.logits_weight = 0.0
    torch.testing.assert_close(trainer.compute_loss(model, inputs).detach(), attention_loss(outputs[2:], outputs[:2]))
    trainer.logits_weight, trainer.attention_weight = 2.0, 0.0
    torch.testing.assert_close(trainer.compute_loss(model, inputs).detach(), 2 * logits_loss(student, teacher))


def test_nothing_to_learn_at_full_size(tmp_path: Path) -> None:
    source = _source()
    model = dar_around(source, dar_config(source.config, bottleneck_size=32, window_size=WINDOW))
    initialise_bottlenecks(model, None)
    ids = random_ids(2, TOKENS)
    loss = _trainer(model, tmp_path, 2).compute_loss(model.train(), {"input_ids": ids, "labels": ids})
    assert float(loss.detach()) < 1e-7


def test_gradient_accumulation_is_exact(tmp_path: Path) -> None:
    source, found = _source(), []
    for batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        model = _model(source=source)
        freeze_base(model)
        _trainer(model, tmp_path, batch, accumulate).train()
        found.append(_bottlenecks(model))
    start = _bottlenecks(_model(source=source))
    for name, value in found[0].items():
        assert not torch.equal(value, start[name])
        for other in found[1:]:
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)


def test_evaluation_is_the_next_token_loss_and_gathers_nothing(tmp_path: Path) -> None:
    model = _model()
    trainer = _trainer(model, tmp_path, 2)
    metrics = trainer.evaluate()
    ids = random_ids(4, TOKENS)
    with torch.no_grad():
        expected = model(ids, labels=ids).loss
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert trainer.predict(_blocks(4)).predictions is None


# --- both stages -----------------------------------------------------------------------------------------------------


def test_the_base_stays_and_the_loss_falls(tmp_path: Path) -> None:
    source = _source()
    before = copy.deepcopy(source.state_dict())
    model = _model(source=source)
    start = _bottlenecks(model)
    settings = DistillationSettings(steps=40, batch_size=4, learning_rate=1e-2)
    losses: list[float] = []

    class Log(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    report = distill_dar(model, _blocks(), tmp_path, settings, quiet=True, callbacks=[Log()])
    assert losses[-1] < 0.8 * losses[0]
    assert report.losses == {"frozen": losses[-1]}
    assert (report.steps, report.unfrozen_steps, report.tokens) == (40, 0, 40 * 4 * TOKENS)
    assert report.epochs == pytest.approx(40 * 4 / 12)
    for name, value in before.items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    assert all(not torch.equal(value, start[name]) for name, value in _bottlenecks(model).items())
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert [layer.attention.window for layer in model.gpt_neox.layers] == [WINDOW, WINDOW]
    assert not any(module._forward_hooks for module in model.modules())


def test_second_stage_trains_everything_against_the_first_base(tmp_path: Path) -> None:
    source = _source()
    model = _model(source=copy.deepcopy(source))
    seen: list[torch.Tensor] = []

    class Teacher(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["model"].lm_head.weight.detach().clone())

    settings = DistillationSettings(steps=2, unfrozen_steps=3, batch_size=4, unfrozen_learning_rate=1e-2)
    report = distill_dar(model, _blocks(), tmp_path, settings, quiet=True, callbacks=[Teacher()])
    assert set(report.losses) == {"frozen", "unfrozen"} and report.tokens == 5 * 4 * TOKENS
    # The first step of a stage warms up, at a learning rate of 0.
    assert torch.equal(seen[2], source.lm_head.weight) and not torch.equal(seen[3], source.lm_head.weight)
    for name, value in source.named_parameters():
        assert not torch.equal(model.get_parameter(name), value), name


def test_second_stage_loss_uses_its_teacher(tmp_path: Path) -> None:
    model, teacher = _model(), _model(source=_source(seed=1)).requires_grad_(False)
    trainer = _trainer(model, tmp_path, 2, attention_weight=0.0, next_token_weight=1.0, teacher=teacher)
    ids = random_ids(2, TOKENS)
    loss = trainer.compute_loss(model.train(), {"input_ids": ids, "labels": ids})
    with torch.no_grad():
        out = model(ids, labels=ids)
        expected = out.loss + logits_loss(out.logits[:, WINDOW:], _source(seed=1)(ids).logits[:, WINDOW:])
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


class _Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "stops",
    [
        lambda: [_Stop(3)],  # in the first stage, which ends at 5
        lambda: [_StopIn("unfrozen", 1)],  # before the second stage has saved anything
        lambda: [_StopIn("unfrozen", 3)],
    ],
)
def test_resumed_is_as_uninterrupted(tmp_path: Path, stops: Callable[[], list[TrainerCallback]]) -> None:
    """12 blocks in batches of 5 make epochs of two steps, so that the order of a third one matters as well."""
    settings = DistillationSettings(steps=5, unfrozen_steps=4, batch_size=5, save_steps=2, learning_rate=1e-2)
    source = _source()
    whole = _model(source=copy.deepcopy(source))
    expected = distill_dar(whole, _blocks(), tmp_path / "whole", settings, quiet=True)

    torch.manual_seed(1)  # the order must not come from here
    with pytest.raises(KeyboardInterrupt):
        distill_dar(
            _model(source=copy.deepcopy(source)), _blocks(), tmp_path / "cut", settings, quiet=True, callbacks=stops()
        )
    torch.manual_seed(2)
    resumed = _model(source=copy.deepcopy(source))
    report = distill_dar(resumed, _blocks(), tmp_path / "cut", settings, quiet=True)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=1e-6)
    assert report.losses["unfrozen"] == pytest.approx(expected.losses["unfrozen"], rel=1e-5)

    # And once all is done, the same call only reads the result.
    third = _model(source=copy.deepcopy(source))
    distill_dar(third, _blocks(), tmp_path / "cut", settings, quiet=True, callbacks=[_Stop(step) for step in range(9)])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(third.state_dict()[name], value, rtol=0, atol=1e-6)


class _StopIn(_Stop):
    def __init__(self, stage: str, step: int) -> None:
        super().__init__(step)
        self.stage = stage

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if Path(args.output_dir).name == self.stage:
            super().on_step_end(args, state, control, **kwargs)


def test_gradient_checkpointing_gives_the_same(tmp_path: Path) -> None:
    source, found = _source(), []
    for checkpointing in (False, True):
        model = _model(source=source)
        settings = DistillationSettings(steps=3, batch_size=4, gradient_checkpointing=checkpointing)
        distill_dar(model, _blocks(), tmp_path / str(checkpointing), settings, quiet=True)
        assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        found.append(_bottlenecks(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-6)


def test_autocast_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = _model()
    settings = DistillationSettings(steps=2, batch_size=4)
    distill_dar(model, _blocks(), tmp_path, settings, bf16=True, quiet=True)
    assert model.dtype == torch.float32 and model(random_ids(1, 4)).logits.dtype == torch.float32
    assert not {"forward", "_original_forward"} & vars(model).keys()


def test_window_zero(tmp_path: Path) -> None:
    model = _model(window=0)
    start = _bottlenecks(model)
    distill_dar(model, _blocks(), tmp_path, DistillationSettings(steps=2, batch_size=4), quiet=True)
    assert all(not torch.equal(value, start[name]) for name, value in _bottlenecks(model).items())


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "steps must be 0 or more, got -1"),
        ({"batch_size": 0}, "batch_size must be positive, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": math.nan}, "learning_rate must be positive, got nan"),
        ({"attention_weight": math.inf}, "attention_weight must be 0 or more, got inf"),
        ({"save_steps": 0}, "save_steps must be positive"),
        ({"attention_weight": 0, "logits_weight": 0}, "nothing to learn from"),
    ],
)
def test_settings_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillationSettings(**options)


def test_refusals(tmp_path: Path) -> None:
    settings = DistillationSettings(steps=1, batch_size=4)
    with pytest.raises(ValueError, match="at least 8 windows, 32 tokens, and they have 24"):
        distill_dar(_model(window=4), _blocks(), tmp_path, settings)
    with pytest.raises(ValueError, match="2 blocks of 24 tokens are fewer than one batch of 4"):
        distill_dar(_model(), _blocks(2), tmp_path, settings)
    with pytest.raises(ValueError, match=r"bfloat16, whose steps would be rounded away"):
        distill_dar(_model().bfloat16(), _blocks(), tmp_path, settings)
    model = _model()
    model.config.window_size = None
    with pytest.raises(ValueError, match="no bottleneck"):
        distill_dar(model, _blocks(), tmp_path, settings)
    model = _model()
    model.gpt_neox.emb_dropout.p = 0.1
    with pytest.raises(ValueError, match="dropout"):
        distill_dar(model, _blocks(), tmp_path, settings)
    assert not any(tmp_path.iterdir())
