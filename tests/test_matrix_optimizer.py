"""Which parameter goes where, stacked Muon against torch's, and one optimiser under schedules, Trainer, Accelerate."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import VOCABULARY, random_ids, tiny_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from nearfar.training.mano import Mano
from nearfar.training.matrix_optimizer import (
    BatchedMuon,
    MatrixOptimizer,
    make_optimizer,
    newton_schulz,
    optimizer_groups,
    warmup_constant_linear,
    warmup_cosine,
)

OPTIMIZERS = ("muon", "mano", "adamw")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.gate_proj = nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8, bias=False)
        self.proxy_gate = nn.Linear(8, 2)
        self.to_scalar = nn.Linear(8, 1)
        self.norm = nn.LayerNorm(8)
        self.table = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        near = self.q_proj(self.norm(x))
        gate = self.proxy_gate(x).sigmoid().mean(-1, keepdim=True)
        hidden = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)))
        return x + gate * near + hidden + self.to_scalar(x) + self.table.mean(0)


class _Model(nn.Module):
    """Tied head, a second head, a frozen layer and gates as a module and as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.proxy_gate = nn.Parameter(torch.zeros(2, 3))
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.middle_head = nn.Linear(8, 20, bias=False)
        self.lm_head = nn.Linear(8, 20, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.frozen(x) + self.proxy_gate.mean()
        return self.lm_head(x) + self.middle_head(x)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    ids = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def test_groups_of_a_small_tree() -> None:
    groups = optimizer_groups(_Model())
    assert groups == {
        "matrices": [f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("q_proj", "gate_proj", "down_proj")],
        "embeddings": ["embed.weight", "middle_head.weight"],
        "gates": [
            "proxy_gate", "blocks.0.proxy_gate.weight", "blocks.0.proxy_gate.bias", "blocks.1.proxy_gate.weight",
            "blocks.1.proxy_gate.bias",
        ],
        "vectors": [
            f"blocks.{i}.{name}"
            for i in (0, 1)
            for name in (
                "table", "gate_proj.bias", "to_scalar.weight", "to_scalar.bias", "norm.weight", "norm.bias"
            )
        ],
    }  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_groups_of_language_models(family: str) -> None:
    model = tiny_model(family)
    groups = optimizer_groups(model)
    named = dict(model.named_parameters())
    assert sorted(name for names in groups.values() for name in names) == sorted(named)
    per_layer = 4 if family == "gpt_neox" else 7
    assert len(groups["matrices"]) == per_layer * model.config.num_hidden_layers
    assert all(named[name].ndim == 2 and VOCABULARY not in named[name].shape for name in groups["matrices"])
    heads = 1 if model.config.tie_word_embeddings else 2
    assert len(groups["embeddings"]) == heads
    assert all(named[name].shape == (VOCABULARY, 32) for name in groups["embeddings"])
    assert groups["gates"] == []
    assert groups["vectors"] and all(named[name].ndim == 1 for name in groups["vectors"])


def test_patterns_overrule() -> None:
    groups = optimizer_groups(_Model(), {"*.1.q_proj.weight": "gates", "blocks.*.table": "matrices"})
    assert "blocks.1.q_proj.weight" in groups["gates"]
    assert "blocks.0.table" in groups["matrices"] and "blocks.1.table" in groups["matrices"]
    assert "blocks.0.q_proj.weight" in groups["matrices"]
    with pytest.raises(ValueError, match=r"kinds\['nothing'\] is the first to match no parameter"):
        optimizer_groups(_Model(), {"nothing": "vectors"})
    with pytest.raises(ValueError, match="must be one of matrices"):
        optimizer_groups(_Model(), {"*": "matrix"})
    with pytest.raises(ValueError, match=r"puts blocks.0.gate_proj.bias under matrices, and its shape is \(12,\)"):
        optimizer_groups(_Model(), {"*.gate_proj.*": "matrices"})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rates_and_decay_of_the_groups(kind: str) -> None:
    model = _Model()
    optimizer = make_optimizer(
        model, kind, lr=0.01, embedding_lr=0.02, gate_lr=0.03, vector_lr=0.04, weight_decay=0.1, betas=(0.8, 0.9)
    )
    assert isinstance(optimizer, torch.optim.Optimizer)
    rows = [(g["kind"], g["optimizer"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert rows == [
        ("matrices", kind, 0.01, 0.1), ("embeddings", "adamw", 0.02, 0.1), ("gates", "adamw", 0.03, 0.0),
        ("vectors", "adamw", 0.04, 0.0),
    ]  # fmt: skip
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    held = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    plain = make_optimizer(model, kind, lr=0.01)
    assert [g["lr"] for g in plain.param_groups] == [0.01] * 4


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_part_does_what_it_would_alone(kind: str) -> None:
    model = _Model()
    optimizer = make_optimizer(model, kind, lr=0.01, gate_lr=0.05, weight_decay=0.1, nesterov=True)
    alone = copy.deepcopy(model)
    named = dict(alone.named_parameters())
    groups = {name: [named[n] for n in names] for name, names in optimizer_groups(alone).items()}
    rest: list[dict[str, Any]] = [
        {"params": groups["embeddings"], "lr": 0.01, "weight_decay": 0.1},
        {"params": groups["gates"], "lr": 0.05, "weight_decay": 0.0},
        {"params": groups["vectors"], "lr": 0.01, "weight_decay": 0.0},
    ]
    parts: list[torch.optim.Optimizer] = []
    if kind == "muon":
        parts.append(BatchedMuon(groups["matrices"], lr=0.01, weight_decay=0.1))
    elif kind == "mano":
        parts.append(Mano(groups["matrices"], lr=0.01, weight_decay=0.1, nesterov=True))
    else:
        rest.append({"params": groups["matrices"], "lr": 0.01, "weight_decay": 0.1})
    parts.append(torch.optim.AdamW(rest, betas=(0.9, 0.98)))
    for step in range(3):
        _step(model, optimizer, step)
        for part in parts:
            part.zero_grad()
        ids = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(alone(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        for part in parts:
            part.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


def _matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((8, 8), (24, 8), (8, 24), (8, 8), (24, 8))
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def _set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_stacked_muon_agrees_with_torch(nesterov: bool, adjust: str) -> None:
    arguments: dict[str, Any] = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "nesterov": nesterov,
        "adjust_lr_fn": adjust,
    }
    theirs, ours, wide = _matrices(), _matrices(), _matrices()
    starts = [parameter.detach().clone() for parameter in theirs]
    reference = torch.optim.Muon(theirs, **arguments)
    stacked = BatchedMuon(ours, **arguments, ns_dtype=torch.bfloat16)
    single = BatchedMuon(wide, **arguments)
    for step in range(5):
        for parameters, optimizer in ((theirs, reference), (ours, stacked), (wide, single)):
            _set_gradients(parameters, step)
            optimizer.step()
    for start, their, our, wider in zip(starts, theirs, ours, wide, strict=True):
        moved = (their - start).norm()
        assert moved > 0.05
        # torch's always computes in bfloat16: the same to its rounding in that dtype, near in float32.
        assert (our - their).norm() < 0.01 * moved
        assert (wider - their).norm() < 0.05 * moved
        torch.testing.assert_close(
            reference.state[their]["momentum_buffer"], stacked.state[our]["momentum_buffer"], rtol=1e-5, atol=1e-6
        )
    # The state is torch's too: each goes on from the other's.
    stacked.load_state_dict({**stacked.state_dict(), "state": reference.state_dict()["state"]})


def test_stacked_muon_follows_its_formula_in_float64() -> None:
    lr, momentum, decay = 0.02, 0.9, 0.1
    a, b, c = 3.4445, -4.7750, 2.0315
    parameters = _matrices(torch.float64)
    expected = [parameter.detach().clone() for parameter in parameters]
    running = [torch.zeros_like(parameter) for parameter in expected]
    optimizer = BatchedMuon(parameters, lr=lr, weight_decay=decay, momentum=momentum)
    for step in range(4):
        _set_gradients(parameters, step)
        for i, parameter in enumerate(parameters):
            assert parameter.grad is not None
            running[i] = momentum * running[i] + (1 - momentum) * parameter.grad
            move = momentum * running[i] + (1 - momentum) * parameter.grad
            # Newton–Schulz acts on the singular values alone.
            left, values, right = torch.linalg.svd(move, full_matrices=False)
            values = values / values.norm()
            for _ in range(5):
                values = a * values + b * values**3 + c * values**5
            direction = left @ values.diag() @ right
            scale = 0.2 * math.sqrt(max(parameter.shape))
            expected[i] = (1 - lr * decay) * expected[i] - lr * scale * direction
        optimizer.step()
        for parameter, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (2, 9, 9)])
def test_newton_schulz_approaches_orthonormal(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    result = newton_schulz(matrices)
    assert result.shape == shape
    values = torch.linalg.svdvals(result)
    assert values.max() < 1.25 and values.median() > 0.65
    if shape[1] != shape[2]:  # square random matrices have a singular value near 0
        assert values.min() > 0.65
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"momentum": 1.5}, "momentum must be"),
        ({"ns_steps": 0}, "ns_steps must be 1 to 99, got 0"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn must be"),
        ({"ns_dtype": torch.int32}, "ns_dtype must be"),
    ],
)
def test_muon_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchedMuon(_matrices(), **arguments)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_saved_state_goes_on_the_same(kind: str) -> None:
    model = _Model()
    optimizer = make_optimizer(model, kind, lr=0.01)
    schedule = warmup_constant_linear(optimizer, 2, 8)
    for step in range(3):
        _step(model, optimizer, step)
        schedule.step()
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    resumed_model = copy.deepcopy(model)
    resumed = make_optimizer(resumed_model, kind, lr=0.5)
    resumed_schedule = warmup_constant_linear(resumed, 2, 8)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved[0])
    resumed_schedule.load_state_dict(saved[1])
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(3, 8):
        assert _step(model, optimizer, step) == _step(resumed_model, resumed, step)
        schedule.step()
        resumed_schedule.step()
    for one, other, before in zip(model.parameters(), resumed_model.parameters(), start, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, before) != one.requires_grad


def test_a_copy_goes_on_by_itself() -> None:
    model = _Model()
    optimizer = make_optimizer(model, "muon")
    _step(model, optimizer, 0)
    other_model, other = copy.deepcopy((model, optimizer))
    _step(model, optimizer, 1)
    assert not torch.equal(model.embed.weight, other_model.embed.weight)
    _step(other_model, other, 1)
    for one, copied in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(one, copied)


def test_state_of_another_kind_is_refused() -> None:
    model = _Model()
    with pytest.raises(ValueError, match="make it the same way"):
        make_optimizer(model, "mano").load_state_dict(make_optimizer(model, "muon").state_dict())


def test_momenta_of_narrow_weights_stay_wide() -> None:
    model = _Model().to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"weights are torch.bfloat16"):
        optimizer = make_optimizer(model, "muon")
    _step(model, optimizer, 0)
    weight = model.get_parameter("blocks.0.q_proj.weight")
    before = optimizer.state[weight]["momentum_buffer"].clone()
    assert before.dtype == torch.float32
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], before)
    assert optimizer.state[weight]["momentum_buffer"].dtype == torch.float32


def test_schedule_scales_every_group() -> None:
    optimizer = make_optimizer(_Model(), "muon", lr=1.0, embedding_lr=2.0, gate_lr=3.0, vector_lr=4.0)
    schedule = warmup_constant_linear(optimizer, warmup_steps=4, total_steps=20, decay_fraction=0.4, final=0.05)
    factors = []
    for _ in range(24):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([rates[0], 2 * rates[0], 3 * rates[0], 4 * rates[0]])
        factors.append(rates[0])
        optimizer.step()
        schedule.step()
    decay = [1 - 0.95 * i / 8 for i in range(1, 9)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 9, *decay, *[0.05] * 4])


def test_the_scheduled_rate_is_the_one_that_is_used() -> None:
    model = _Model()
    optimizer = make_optimizer(model, "muon", lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 1 else 1.0)
    _step(model, optimizer, 0)
    schedule.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    _step(model, optimizer, 1)
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)


def test_cosine() -> None:
    optimizer = make_optimizer(_Model(), "mano", lr=3e-4, gate_lr=3e-3)
    schedule = warmup_cosine(optimizer, 5, 25, final=0.1)
    rates = []
    for _ in range(26):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates[0] == [0.0] * 4
    assert rates[5] == pytest.approx([3e-4, 3e-4, 3e-3, 3e-4])
    assert rates[15] == pytest.approx([0.55 * 3e-4, 0.55 * 3e-4, 0.55 * 3e-3, 0.55 * 3e-4])
    assert rates[25] == pytest.approx([3e-5, 3e-5, 3e-4, 3e-5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_steps": -1, "total_steps": 5}, "warmup_steps must be between 0 and total_steps, 5, got -1"),
        ({"warmup_steps": 0, "total_steps": 0}, "total_steps must be at least 1"),
        ({"warmup_steps": 0, "total_steps": 5, "final": 2.0}, "final must be between 0 and 1"),
    ],
)
def test_schedules_refuse(arguments: dict[str, Any], message: str) -> None:
    optimizer = make_optimizer(_Model())
    with pytest.raises(ValueError, match=message):
        warmup_constant_linear(optimizer, **arguments)
    with pytest.raises(ValueError, match=message):
        warmup_cosine(optimizer, **arguments)
    with pytest.raises(ValueError, match="7 warm-up steps and 4 of decay are more than total_steps, 10"):
        warmup_constant_linear(optimizer, 7, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "sgd"}, "kind must be one of muon, mano, adamw, got 'sgd'"),
        ({"lr": -1.0}, "lr must be finite and 0 or more, got -1.0"),
        ({"gate_lr": math.inf}, "gate_lr must be finite"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
    ],
)
def test_values_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizer(_Model(), **arguments)


def test_nothing_to_train_and_late_groups() -> None:
    model = _Model()
    with pytest.raises(ValueError, match="takes no further groups"):
        make_optimizer(model).add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    part = torch.optim.AdamW([model.proxy_gate])
    with pytest.raises(ValueError, match="more than one parameter group"):
        MatrixOptimizer([part, torch.optim.AdamW([model.proxy_gate])])
    with pytest.raises(ValueError, match="empty parameter list"):
        MatrixOptimizer([])
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(model.requires_grad_(False))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_only_some_kinds_are_there(kind: str) -> None:
    linear = nn.Linear(4, 6, bias=False)
    assert [group["kind"] for group in make_optimizer(linear, kind).param_groups] == ["matrices"]
    norm = nn.LayerNorm(4)
    optimizer = make_optimizer(norm, kind, lr=0.1)
    norm(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(norm.weight, torch.ones(4))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_learns_with_a_closure(kind: str) -> None:
    model = _Model()
    optimizer = make_optimizer(model, kind, lr=0.01)
    ids = random_ids(4, 9) % 20
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(60)]
    assert calls == 60
    assert losses[-1] < 0.6 * losses[0]


def test_accelerate() -> None:
    plain_model = _Model()
    model = copy.deepcopy(plain_model)
    plain = make_optimizer(plain_model, "muon", lr=0.01)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, "muon", lr=0.01))
    for step in range(3):
        _step(plain_model, plain, step)
        ids = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        accelerator.backward(
            nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        )  # fmt: skip
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(plain_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


class _Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = random_ids(1, 10, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def _trainer(folder: Path, kind: str) -> Trainer:
    model = tiny_model("llama", dtype=torch.float32)
    optimizer = make_optimizer(model, kind, lr=1e-2, embedding_lr=3e-3)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, save_steps=2, logging_steps=1, seed=0,
        report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=1.0, gradient_accumulation_steps=1,
    )  # fmt: skip
    schedule = warmup_constant_linear(optimizer, 1, 4)
    return Trainer(model, arguments, train_dataset=_Rows(), optimizers=(optimizer, schedule))


@pytest.mark.parametrize("kind", ["muon", "mano"])
def test_trainer_and_resuming(kind: str, tmp_path: Path) -> None:
    whole = _trainer(tmp_path, kind)
    start = [parameter.detach().clone() for parameter in whole.model.parameters()]
    whole.train()
    rates = [row["learning_rate"] for row in whole.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([1e-2, 1e-2, 0.525e-2, 0.05e-2])
    resumed = _trainer(tmp_path, kind)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for one, other, before in zip(whole.model.parameters(), resumed.model.parameters(), start, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gpu_steps_do_not_wait_and_fit_a_graph(kind: str) -> None:
    model = _Model().cuda()
    optimizer = make_optimizer(model, kind, lr=1e-2, capturable=True)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device="cuda")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]
    graph.replay()
    torch.cuda.synchronize()
    after = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(
        not torch.equal(one, other) and other.isfinite().all() for one, other in zip(before, after, strict=True)
    )
