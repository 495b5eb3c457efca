"""Stages, learning rates and the loss of `training/needle_curriculum.py`, and the tokenizer with single digits."""

from __future__ import annotations

import dataclasses
import json
import lzma
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from proxyformer_models import tiny_proxyformer
from tiny_texts import english, tiny_tokenizer
from transformers import AutoTokenizer

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM
from nearfar.evaluation.needle_documents import NeedleBatch, NeedleDocuments, NeedleTemplates, encode_background
from nearfar.evaluation.text_pieces import read_text_pieces
from nearfar.training.digit_tokenizer import train_digit_tokenizer
from nearfar.training.needle_curriculum import (
    NEEDLE_PLANS,
    Curriculum,
    NeedlePlan,
    NeedleStage,
    apply_stage,
    learning_rate_factor,
    needle_loss,
    read_plan,
    sample_stage,
)

STAGE = NeedleStage(96, 2, 3, 2)


def plan(**changes: Any) -> NeedlePlan:
    return NeedlePlan(**{"name": "test", "stages": (STAGE, STAGE), "steps": 100, **changes})


@pytest.fixture(scope="module")
def documents() -> NeedleDocuments:
    """Over the digit tokenizer's tokens, two ids of one digit and some of two."""
    text = english(3000)
    tokenizer = train_digit_tokenizer([text], 400)
    return NeedleDocuments(encode_background(text, tokenizer), NeedleTemplates(tokenizer, num_ids=12))


def batch_of(documents: NeedleDocuments, stage: NeedleStage = STAGE) -> NeedleBatch:
    return sample_stage(documents, plan(), stage, torch.Generator().manual_seed(0))


def model_for(documents: NeedleDocuments, **changes: Any) -> ProxyFormerForCausalLM:
    return tiny_proxyformer(
        vocab_size=len(documents.templates.tokenizer), generation_block_size=32, **changes
    ).train()  # fmt: skip


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NEEDLE_PLANS))
def test_plans_survive_json(name: str, tmp_path: Path) -> None:
    written = NEEDLE_PLANS[name]
    (tmp_path / "plan.json").write_text(json.dumps(written.to_dict()), encoding="utf-8")
    assert read_plan(tmp_path / "plan.json") == written
    assert written.name == name


def test_built_in_plans_are_the_designs() -> None:
    fast, paper = NEEDLE_PLANS["fast"], NEEDLE_PLANS["paper"]
    shapes = [(s.length, s.needles, s.documents, s.queries, s.leave_at) for s in fast.stages]
    assert shapes == [(256, 1, 256, 1, 0.5), (512, 8, 64, 8, 0.6), (2048, 25, 16, 25, 0.6), (8192, 50, 8, 50, None)]
    assert (fast.optimizer, fast.learning_rate, fast.warmup_steps) == ("muon", 3e-3, 100)
    longer = NEEDLE_PLANS["long"].stages
    assert longer[:3] == fast.stages[:3]
    assert [(s.length, s.needles, s.queries) for s in longer[3:]] == [(8192, 50, 50), (65536, 50, 50)]
    assert longer[3].leave_at, "or the run would end with it"
    assert longer[3].max_steps
    kinds = [(s.length, s.needles, s.history, s.rope) for s in paper.stages]
    assert kinds == [
        (256, 1, False, True),
        (256, 1, True, True),
        (8192, 50, True, True),
        (8192, 50, True, False),
        (65536, 50, True, False),
    ]
    assert (paper.optimizer, paper.accumulation, paper.clip, paper.schedule) == ("mano", 16, 1.0, "cosine")
    assert learning_rate_factor(paper, 10**6, 1.0) * paper.learning_rate == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "length must be a whole number of at least 1, got 0"),
        ({"queries": 3}, "3 queries about 2 needles"),
        ({"leave_at": 1.5}, "leave_at must be above 0 and at most 1, got 1.5"),
        ({"history": False}, "one query, got queries = 2"),
        ({"max_steps": 0}, "max_steps"),
        ({"question_weight": -1.0}, "question_weight must be 0 or more, got -1.0"),
    ],
)
def test_bad_stages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(STAGE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "has no stages"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"optimizer": "sgd"}, "optimizer must be one of muon, mano, adamw, got 'sgd'"),
        ({"schedule": "none"}, "schedule must be one of"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"dense": 2.0}, "dense must be between 0 and 1, got 2.0"),
        ({"clip": -1.0}, "clip must be 0 or more"),
        ({"plateau_steps": 0}, "plateau_steps"),
    ],
)
def test_bad_plans(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_plans_from_before_questions_had_a_loss_are_the_same() -> None:
    """Or runs begun with them could not be gone on with."""
    stages = plan().to_dict()["stages"]
    assert all("question_weight" not in stage for stage in stages)
    asking = plan(stages=(dataclasses.replace(STAGE, question_weight=0.5),))
    assert asking.to_dict()["stages"][0]["question_weight"] == 0.5
    assert NeedlePlan.from_dict(asking.to_dict()) == asking


def test_bad_plan_files(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    good = plan().to_dict()
    for content, message in (
        ("{", "is no JSON"),
        ("[]", "JSON object"),
        (json.dumps({**good, "speed": 1}), "a plan has no entry 'speed'"),
        (json.dumps({**good, "stages": 3}), "needs `stages`"),
        (json.dumps({**good, "stages": [{"length": 5}]}), "a stage needs needles, documents, queries"),
        (json.dumps({**good, "stages": [7]}), "a stage must be an object"),
    ):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_plan(file)


# --- progress --------------------------------------------------------------------------------------------------------


def test_constant_linear_rate() -> None:
    made = plan(warmup_steps=10, decay=0.4, final=0.05)
    factors = [learning_rate_factor(made, step, step / 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:61] == pytest.approx([1.0] * 52)
    assert factors[80] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.05)
    assert all(before >= after for before, after in pairwise(factors[60:]))


def test_cosine_rate() -> None:
    made = plan(schedule="cosine", warmup=0.1, final=0.1)
    assert 0 < learning_rate_factor(made, 0, 0.0) < 0.01
    assert learning_rate_factor(made, 5, 0.05) == pytest.approx(0.5)
    assert learning_rate_factor(made, 10, 0.1) == pytest.approx(1.0)
    assert learning_rate_factor(made, 55, 0.55) == pytest.approx(0.55)
    assert learning_rate_factor(made, 100, 1.0) == pytest.approx(0.1)


def test_stage_is_left_when_the_smoothed_share_passes_its_number() -> None:
    curriculum = Curriculum(plan(stages=(dataclasses.replace(STAGE, leave_at=0.5), STAGE)))
    assert curriculum.update(10, 2.0, 0.0) is None
    for _ in range(3):  # 1 - 0.8^3 = 0.488: one lucky batch is not enough
        assert curriculum.update(10, 1.0, 1.0) is None
    assert curriculum.index == 0
    assert "reached 0.5" in (curriculum.update(10, 1.0, 1.0) or "")
    assert (curriculum.index, curriculum.step, curriculum.exact) == (1, 0, None)
    assert curriculum.left[0]["steps"] == 50
    for _ in range(50):
        assert curriculum.update(10, 1.0, 1.0) is None, "the last stage has no number"
    assert not curriculum.finished


def test_stage_is_left_on_a_plateau_of_the_loss_or_after_its_steps() -> None:
    curriculum = Curriculum(plan(plateau_steps=40, stages=(STAGE, dataclasses.replace(STAGE, max_steps=20))))
    for loss in (3.0, 2.5, 2.0, 1.5):
        assert curriculum.update(10, loss, 0.0) is None, "chance is no plateau while the loss falls"
    reasons = [curriculum.update(10, 2.6, 0.0) for _ in range(5)]
    assert "plateau" in str(next(reason for reason in reasons if reason))
    while curriculum.index == 0:
        curriculum.update(10, 2.6, 0.0)
    begun = Curriculum(curriculum.plan)
    begun.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert begun == curriculum
    while not begun.finished:
        begun.update(10, 0.5, 0.0)
    assert begun.left[-1]["reason"] == "20 steps"
    assert curriculum != begun


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("weight", [0.3, 0.0])
def test_loss_is_the_models_own(documents: NeedleDocuments, rope: bool, weight: float) -> None:
    """With labels the model finds the answers itself; loss and gradients must be the same."""
    model = model_for(documents, auxiliary_loss_weight=weight)
    stage = dataclasses.replace(STAGE, rope=rope)
    apply_stage(model, stage, 32, 0)
    assert (model.config.rope_parameters is not None) == rope
    batch = batch_of(documents)
    assert len(set(batch.query_lengths.flatten().tolist())) > 1, "answers lie in different columns"
    result = needle_loss(model, batch)
    result.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ids, labels = batch.input_ids.flatten(0, 1), batch.labels.flatten(0, 1)
    own = model(ids, history_ids=batch.documents, labels=labels).loss
    own.backward()
    assert float(result.loss.detach()) == pytest.approx(float(own.detach()), rel=1e-10)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in grads), name
        if parameter.grad is not None:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-8, atol=1e-12)
    assert any(name.startswith("model.history_layers.") for name in grads)

    model.eval()
    with torch.no_grad():
        quiet = needle_loss(model, batch)
        logits = model(ids, history_ids=batch.documents).logits[:, :-1]
    right = (logits.argmax(-1) == labels[:, 1:]) | (labels[:, 1:] == -100)
    assert float(quiet.exact) == pytest.approx(float(right.all(-1).double().mean()))
    assert float(quiet.loss) == float(quiet.cross_entropy), "the middle head is for training"


@pytest.mark.parametrize("history", [True, False])
def test_questions_own_loss_is_the_models_own(documents: NeedleDocuments, history: bool) -> None:
    """In nats a question, of both heads, and beside the answers' loss."""
    model = model_for(documents, auxiliary_loss_weight=0.3)
    stage = STAGE if history else dataclasses.replace(STAGE, history=False, queries=1, documents=8)
    apply_stage(model, stage, 32, 20)
    batch = batch_of(documents, stage)
    result = needle_loss(model, batch, history, question_weight=0.7)
    result.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    texts = batch.input_ids.flatten(0, 1)
    answers = batch.labels.flatten(0, 1)
    inside = torch.arange(texts.shape[1]) < batch.query_lengths.flatten()[:, None]
    questions = torch.where(inside, texts, -100)
    questions[:, 0] = -100  # nothing in the question tells its first token
    given: dict[str, Any] = {"history_ids": batch.documents}
    if not history:
        given, nothing = {}, torch.full_like(batch.documents, -100)
        texts = torch.cat((batch.documents, texts), 1)
        answers, questions = torch.cat((nothing, answers), 1), torch.cat((nothing, questions), 1)
    count = int((questions != -100).sum())
    assert count == int((batch.query_lengths - 1).sum()) and len({*batch.query_lengths.flatten().tolist()}) > 1
    own = model(texts, labels=answers, **given).loss
    own = own + 0.7 * model(texts, labels=questions, **given).loss * count / len(texts)
    own.backward()
    logits = model(texts, **given).logits[:, :-1].flatten(0, 1)
    words = torch.nn.functional.cross_entropy(logits, questions[:, 1:].flatten(), reduction="sum")
    assert float(result.question) == pytest.approx(float(words.detach()) / len(texts), rel=1e-10), "of the last head"
    assert float(result.loss.detach()) == pytest.approx(float(own.detach()), rel=1e-10)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-8, atol=1e-12)
    quiet = needle_loss(model.eval(), batch, history)
    assert float(result.cross_entropy) == pytest.approx(float(quiet.cross_entropy)), "answers alone"
    assert float(quiet.question) == 0


def test_exact_answers_are_counted(documents: NeedleDocuments) -> None:
    """A head that writes the right token at all but one place of one answer."""
    model = model_for(documents).eval()
    batch = batch_of(documents)
    answers = batch.answer_ids.flatten(0, 1)
    told = answers.clone()
    told[1, 2] = (told[1, 2] + 1) % 50
    logits = torch.nn.functional.one_hot(told.flatten(), model.config.vocab_size).double()
    model.lm_head.register_forward_hook(lambda *_: logits)
    with torch.no_grad():
        result = needle_loss(model, batch)
    assert float(result.exact) == pytest.approx(1 - 1 / len(answers))
    assert float(result.token_accuracy) == pytest.approx(1 - 1 / answers.numel())


def test_stage_without_history_is_a_plain_decoder_of_the_same_weights(documents: NeedleDocuments) -> None:
    stage = dataclasses.replace(STAGE, history=False, queries=1)
    model = model_for(documents)
    apply_stage(model, stage, 32, 20)
    batch = batch_of(documents, stage)
    plain = ProxyFormerForCausalLM(
        ProxyFormerConfig.from_dict({
            **model.config.to_dict(), "compression_ratio": None, "generation_block_size": None,
        })
    )  # fmt: skip
    plain = plain.double().train()
    shared = {name: value for name, value in model.state_dict().items() if name in plain.state_dict()}
    assert len(shared) == len(plain.state_dict())
    plain.load_state_dict(shared)
    ids, labels = batch.as_one_text()
    wanted = plain(ids, labels=labels).loss
    result = needle_loss(model, batch, history=False)
    assert float(result.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-10)
    result.loss.backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "history" in name or "proxy" in name)

    apply_stage(model, STAGE, 32, 20)
    assert model.config.generation_block_size == 32


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def test_digit_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_digit_tokenizer([english(3000)], 600)
    assert len(tokenizer) <= 600
    text = " The passkey_12 is 90125. Remember it.\nzażółć 𝔘 1990s\t2.5"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert all(len(piece) == 1 for piece in pieces if any(letter.isdigit() for letter in piece))
    assert "Ġpasskey" in pieces
    templates = NeedleTemplates(tokenizer)
    assert templates.single_digits
    assert templates.max_answer_tokens == 6
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text).input_ids == ids
    assert again.pad_token_id == again.eos_token_id == tokenizer.eos_token_id is not None
    other = train_digit_tokenizer([english(3000)], 600)
    assert other.get_vocab() == tokenizer.get_vocab(), "the same text gives the same tokenizer"
    assert not NeedleTemplates(tiny_tokenizer()).exact_text


def test_digit_tokenizer_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 257"):
        train_digit_tokenizer(["text"], 256)
    with pytest.raises(ValueError, match="no text"):
        train_digit_tokenizer([], 300)
    with pytest.raises(FileNotFoundError):
        list(read_text_pieces([tmp_path / "missing.txt"]))


def test_text_is_read_in_pieces(tmp_path: Path) -> None:
    text = english(20_000)
    (tmp_path / "a.txt").write_text(text[:50_000], encoding="utf-8")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(text[50_000:].encode()))
    apart = f"{text[:50_000]}\n\n{text[50_000:]}"
    assert "".join(read_text_pieces([tmp_path])).rstrip("\n") == apart
    assert "".join(read_text_pieces([tmp_path / "a.txt", tmp_path / "b.txt.xz"], 60_001)) == apart[:60_001]
    assert all(read_text_pieces([tmp_path]))
