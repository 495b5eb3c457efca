"""Updates, injections and interactions of proxies, each against a slow reference, and streaming against one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearfar.modeling.proxy_block import AttentionBlock, FeedForwardBlock
from nearfar.modeling.proxy_injection import INJECTIONS, Injection
from nearfar.modeling.proxy_interaction import (
    PROXY_INTERACTIONS,
    CausalAttentionInteraction,
    CrossAttentionInteraction,
    ProxyInteraction,
    RecurrentInteraction,
    linear_scan,
    make_interaction,
)
from nearfar.modeling.proxy_merge import ProxyMerge
from nearfar.modeling.proxy_update import PROXY_UPDATES, ProxyUpdate
from nearfar.modeling.rotary_halves import rotate_halves

EPS = 1e-6
BATCH, PROXIES, SIZE, HEADS, HEAD_DIM, MIDDLE, CONDITION = 3, 9, 12, 2, 4, 20, 5
STREAMING = ("causal_attention", "recurrent", "mlp", "identity", "cross_attention")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def interaction(kind: str, out_scale: float = 1.0) -> ProxyInteraction:
    return randomised(make_interaction(kind, SIZE, HEADS, HEAD_DIM, MIDDLE, EPS, out_scale, CONDITION).double())


def randomised(module: ProxyInteraction) -> ProxyInteraction:
    """Norms away from 1, and a recurrence that forgets within a few proxies, so that nothing hides."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
        elif name == "decay":
            nn.init.normal_(parameter)
    return module


def ragged() -> torch.Tensor:
    """Valid proxies with padding on the left, on the right and in the middle; the second row has none at all."""
    valid = torch.ones(BATCH, PROXIES, dtype=torch.bool)
    valid[0, :3] = False
    valid[0, 5] = False
    valid[1] = False
    valid[2, 6:] = False
    return valid


def pieces(length: int, sizes: list[int]) -> Iterator[slice]:
    """Consecutive slices of these sizes, the last repeated to the end."""
    start = 0
    while start < length:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        yield slice(start, min(start + size, length))
        start += size


def rotary(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[:, None, :, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)
    return rotate_halves(x, angles.cos(), angles.sin())


def normalise(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm.weight


def slow_feed_forward(block: FeedForwardBlock, x: torch.Tensor) -> torch.Tensor:
    n = normalise(x, block.mlp_norm)
    gate, up = n @ block.gate_proj.weight.T, n @ block.up_proj.weight.T
    return x + (gate * torch.sigmoid(gate) * up) @ block.down_proj.weight.T


def slow_attention(block: AttentionBlock, x: torch.Tensor, seen: list[list[int]], turn: bool = False) -> torch.Tensor:
    """One row `(m, d)`; proxy i attends to the proxies `seen[i]`."""
    n = normalise(x, block.input_norm)
    query, key, value = (
        (n @ linear.weight.T).view(-1, HEADS, HEAD_DIM) for linear in (block.q_proj, block.k_proj, block.v_proj)
    )
    query, key = normalise(query, block.q_norm), normalise(key, block.k_norm)
    if turn:
        places = torch.arange(x.shape[0])[None]
        query, key = (rotary(t.transpose(0, 1)[None], places)[0].transpose(0, 1) for t in (query, key))
    attended = torch.zeros_like(query)
    for i, others in enumerate(seen):
        for head in range(HEADS):
            scores = torch.stack([query[i, head] @ key[j, head] / math.sqrt(HEAD_DIM) for j in others])
            for weight, j in zip(scores.softmax(0), others, strict=True):
                attended[i, head] += weight * value[j, head]
    return slow_feed_forward(block, x + attended.flatten(1) @ block.o_proj.weight.T)


def slow_recurrence(module: RecurrentInteraction, x: torch.Tensor, valid: list[bool]) -> torch.Tensor:
    """One row `(m, d)`, a proxy at a time."""
    hidden = torch.zeros(SIZE, dtype=torch.float64)
    out = []
    for proxy, counts in zip(x, valid, strict=True):
        n = normalise(proxy, module.input_norm)
        r = torch.sigmoid(module.recurrence_gate_proj.weight @ n)
        i = torch.sigmoid(module.input_gate_proj.weight @ n)
        a = torch.exp(-torch.log1p(module.decay.exp()) * r)
        if counts:
            hidden = a * hidden + (1 - a**2).sqrt() * i * (module.x_proj.weight @ n)
        gate = module.output_gate_proj.weight @ n
        out.append(proxy + module.o_proj.weight @ (gate * torch.sigmoid(gate) * hidden))
    return slow_feed_forward(module.block, torch.stack(out))


def slow_cross_attention(
    module: CrossAttentionInteraction, x: torch.Tensor, condition: torch.Tensor, counts: list[bool]
) -> torch.Tensor:
    """One row of proxies `(m, d)` and of the condition `(n, c)`."""
    query = (normalise(x, module.input_norm) @ module.q_proj.weight.T).view(-1, HEADS, HEAD_DIM)
    states = normalise(condition, module.condition_norm)
    key, value = ((states @ p.weight.T).view(-1, HEADS, HEAD_DIM) for p in (module.k_proj, module.v_proj))
    query, key = normalise(query, module.q_norm), normalise(key, module.k_norm)
    attended = torch.zeros_like(query)
    real = [j for j, is_real in enumerate(counts) if is_real]
    for i in range(x.shape[0]):
        for head in range(HEADS):
            if real:
                scores = torch.stack([query[i, head] @ key[j, head] / math.sqrt(HEAD_DIM) for j in real])
                attended[i, head] = sum(w * value[j, head] for w, j in zip(scores.softmax(0), real, strict=True))
    return slow_feed_forward(module.block, x + attended.flatten(1) @ module.o_proj.weight.T)


def stream(
    module: ProxyInteraction,
    proxies: torch.Tensor,
    sizes: list[int],
    valid: torch.Tensor | None = None,
    condition: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """All proxies in calls of some sizes, each with what the earlier ones left."""
    outputs = []
    keys: list[tuple[torch.Tensor, ...]] = []
    past: tuple[torch.Tensor | None, ...] | None = None
    for piece in pieces(proxies.shape[1], list(sizes)):
        out, state = module(
            proxies[:, piece],
            past=past,
            valid=None if valid is None else valid[:, piece],
            condition=condition,
            positions=None if positions is None else positions[:, piece],
            rotary=None if positions is None else rotary,
        )
        outputs.append(out)
        if len(state) == 2:
            keys.append(state)
            key, value = (torch.cat(parts, dim=2) for parts in zip(*keys, strict=True))
            past = (key, value, None if valid is None else valid[:, : key.shape[2]])
        else:
            past = state
    return torch.cat(outputs, dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Updates
# ---------------------------------------------------------------------------------------------------------------------


def slow_update(module: ProxyUpdate, previous: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
    if module.kind == "residual":
        return previous + compressed
    if module.kind == "replace":
        return compressed
    assert module.proj is not None
    mixed = previous @ module.proj.weight[:, :SIZE].T + compressed @ module.proj.weight[:, SIZE:].T
    return mixed if module.kind == "concatenate" else previous + compressed / (1 + torch.exp(-mixed))


@pytest.mark.parametrize("kind", PROXY_UPDATES)
def test_update(kind: str) -> None:
    module = ProxyUpdate(kind, SIZE).double()
    previous, compressed = draw(BATCH, PROXIES, SIZE), draw(BATCH, PROXIES, SIZE)
    assert (module(previous, compressed) - slow_update(module, previous, compressed)).abs().max() <= 1e-12
    zeros = torch.zeros_like(previous)
    assert (module(None, compressed) - slow_update(module, zeros, compressed)).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", PROXY_UPDATES)
def test_update_without_a_layer_before_uses_every_parameter(kind: str) -> None:
    module = ProxyUpdate(kind, SIZE)
    compressed = torch.randn(2, SIZE, requires_grad=True)
    module(None, compressed).sum().backward()
    assert compressed.grad is not None and compressed.grad.any()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("kind", PROXY_UPDATES)
def test_only_replacing_forgets_the_layer_before(kind: str) -> None:
    module, compressed, previous = ProxyUpdate(kind, SIZE).double(), draw(4, SIZE), draw(4, SIZE)
    kept = not torch.equal(module(previous, compressed), module(-previous, compressed))
    assert kept == (kind != "replace")
    assert not torch.equal(module(previous, compressed), module(previous, -compressed))


def test_update_refuses() -> None:
    with pytest.raises(ValueError, match="Unknown proxy update 'sum'"):
        ProxyUpdate("sum", SIZE)
    with pytest.raises(ValueError, match="None where the block size changes"):
        ProxyUpdate("residual", SIZE)(draw(1, 4, SIZE), draw(1, 2, SIZE))


# ---------------------------------------------------------------------------------------------------------------------
# Injections
# ---------------------------------------------------------------------------------------------------------------------

LOCAL, PLACES, SLOTS = 4, 5, 3


def slow_injection(module: Injection, x: torch.Tensor, delta: torch.Tensor, proxy: torch.Tensor) -> torch.Tensor:
    """One block `(P, d_h)` with its delta `(P, d_h)` and proxy `(d_p,)`, a place at a time."""
    out = []
    for features, change in zip(x, delta, strict=True):
        if module.kind == "residual":
            out.append(features + change)
        elif module.kind == "gated":
            out.append(features + torch.sigmoid(module.gate.weight @ torch.cat([features, change])) * change)
        elif module.kind == "affine":
            scale, shift = (weight @ change for weight in module.scale_shift.weight.chunk(2))
            out.append((1 + scale) * normalise(features, module.norm) + shift)
        else:
            query = module.q_proj.weight @ normalise(features, module.norm)
            slots = normalise(proxy, module.proxy_norm).view(SLOTS, LOCAL)
            keys, values = slots @ module.k_proj.weight.T, slots @ module.v_proj.weight.T
            weights = torch.stack([query @ key / math.sqrt(LOCAL) for key in keys]).softmax(0)
            read = sum(weight * value for weight, value in zip(weights, values, strict=True))
            out.append(features + module.o_proj.weight @ read)
    return torch.stack(out)


@pytest.mark.parametrize("kind", INJECTIONS)
def test_injection(kind: str) -> None:
    module = Injection(kind, LOCAL, SLOTS * LOCAL, EPS).double()
    for name, parameter in module.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    x, delta = draw(2, 3, PLACES, LOCAL).requires_grad_(), draw(2, 3, PLACES, LOCAL).requires_grad_()
    proxy = draw(2, 3, SLOTS * LOCAL).requires_grad_()
    out = module(x, delta, proxy)
    for row in range(2):
        for block in range(3):
            wanted = slow_injection(module, x[row, block], delta[row, block], proxy[row, block])
            assert (out[row, block] - wanted).abs().max() <= 1e-12
    # What is not read may be left out, and gets no gradient.
    assert module.uses_delta == (kind != "cross_attention")
    alone = module(x, delta, None) if module.uses_delta else module(x, None, proxy)
    assert torch.equal(alone, out)
    gradients = torch.autograd.grad(out.sum(), [x, delta, proxy], allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [True, module.uses_delta, not module.uses_delta]
    for parameter in module.parameters():
        assert torch.autograd.grad(module(x, delta, proxy).square().sum(), parameter)[0].any()


@pytest.mark.parametrize("kind", INJECTIONS)
def test_without_a_delta_injections_keep_the_features(kind: str) -> None:
    """Zero decompression leaves X, or its norm for affine modulation; a zero proxy is read as zero."""
    module = Injection(kind, LOCAL, SLOTS * LOCAL, EPS).double()
    x = draw(2, PLACES, LOCAL)
    out = module(x, torch.zeros_like(x), torch.zeros(2, SLOTS * LOCAL, dtype=torch.float64))
    wanted = F.rms_norm(x, (LOCAL,), eps=EPS) if kind == "affine" else x
    assert (out - wanted).abs().max() <= 1e-12


def test_injections_start_small() -> None:
    small = {kind: {} for kind in INJECTIONS}
    for kind in INJECTIONS:
        for name, module in Injection(kind, LOCAL, SLOTS * LOCAL, EPS).named_modules():
            if hasattr(module, "init_scale"):
                small[kind][name] = module.init_scale
    assert small["residual"] == small["gated"] == {}
    assert set(small["affine"]) == {"scale_shift"} and set(small["cross_attention"]) == {"o_proj"}
    assert all(0 < scale < 0.5 for scales in small.values() for scale in scales.values())


def test_injection_refuses() -> None:
    with pytest.raises(ValueError, match="Unknown injection 'sum'"):
        Injection("sum", 4, 8, EPS)
    for d_p in (10, 4):
        with pytest.raises(ValueError, match=f"proxies of {d_p} must be twice"):
            Injection("cross_attention", 4, d_p, EPS)
    x = draw(2, PLACES, LOCAL)
    for delta in (None, x[:, 1:]):
        with pytest.raises(ValueError, match="delta shaped like x"):
            Injection("residual", LOCAL, 8, EPS)(x, delta)
    for proxy in (None, draw(2, 12), draw(1, 8)):
        with pytest.raises(ValueError, match="reads proxies"):
            Injection("cross_attention", LOCAL, 8, EPS).double()(x, None, proxy)


# ---------------------------------------------------------------------------------------------------------------------
# Interactions against slow references
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("kind", ["causal_attention", "bidirectional_attention"])
def test_attention(kind: str, turn: bool, masked: bool) -> None:
    module = interaction(kind)
    assert isinstance(module, CausalAttentionInteraction)
    proxies, valid = draw(BATCH, PROXIES, SIZE), ragged() if masked else None
    positions = torch.arange(PROXIES)[None] if turn else None
    out, (key, value) = module(proxies, valid=valid, positions=positions, rotary=rotary if turn else None)
    assert key.shape == value.shape == (BATCH, HEADS, PROXIES, HEAD_DIM)
    for row in range(BATCH):
        counts = [True] * PROXIES if valid is None else valid[row].tolist()
        everyone = [j for j in range(PROXIES) if counts[j]]
        if kind == "causal_attention":
            seen = [sorted({i, *(j for j in everyone if j < i)}) for i in range(PROXIES)]
        elif everyone:
            seen = [everyone] * PROXIES
        else:
            continue  # nothing to compare with: only finite numbers are promised
        wanted = slow_attention(module.block, proxies[row], seen, turn)
        assert (out[row] - wanted).abs().max() <= 1e-10
    assert out.isfinite().all()


def test_a_rotary_that_knows_its_positions() -> None:
    module, proxies, positions = interaction("causal_attention"), draw(1, PROXIES, SIZE), torch.arange(PROXIES)[None]
    wanted = module(proxies, positions=positions, rotary=rotary)[0]
    assert torch.equal(module(proxies, rotary=lambda x: rotary(x, positions))[0], wanted)
    assert not torch.allclose(module(proxies)[0], wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_recurrence(masked: bool) -> None:
    module = interaction("recurrent")
    assert isinstance(module, RecurrentInteraction)
    proxies, valid = draw(BATCH, PROXIES, SIZE), ragged() if masked else None
    out, (hidden,) = module(proxies, valid=valid)
    assert hidden.shape == (BATCH, SIZE)
    for row in range(BATCH):
        counts = [True] * PROXIES if valid is None else valid[row].tolist()
        assert (out[row] - slow_recurrence(module, proxies[row], counts)).abs().max() <= 1e-10
    if masked:
        assert not hidden[1].any(), "a row without valid proxies has seen nothing"
        last_valid = module(proxies[2:, :6])[1][0][0]
        assert (hidden[2] - last_valid).abs().max() <= 1e-12


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 15, 33])
def test_scan(length: int) -> None:
    a, b = torch.rand(2, length, 3, dtype=torch.float64).requires_grad_(), draw(2, length, 3).requires_grad_()
    hidden, states = torch.zeros(2, 3, dtype=torch.float64), []
    for t in range(length):
        hidden = a[:, t] * hidden + b[:, t]
        states.append(hidden)
    reference, out = torch.stack(states, dim=1), linear_scan(a, b)
    assert (out - reference).abs().max() <= 1e-12
    towards = draw(2, length, 3)
    for x in (a, b):
        wanted = torch.autograd.grad(reference, x, towards, retain_graph=True, allow_unused=True)[0]
        got = torch.autograd.grad(out, x, towards, retain_graph=True, allow_unused=True)[0]
        assert ((0 if got is None else got) - (0 if wanted is None else wanted)).abs().max() <= 1e-12


@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention(masked: bool) -> None:
    module = interaction("cross_attention")
    assert isinstance(module, CrossAttentionInteraction)
    proxies, condition = draw(BATCH, PROXIES, SIZE), draw(BATCH, 4, CONDITION)
    counts = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4]) if masked else None
    out, state = module(proxies, condition=condition, condition_valid=counts)
    assert state == ()
    for row in range(BATCH):
        real = [True] * 4 if counts is None else counts[row].tolist()
        assert (out[row] - slow_cross_attention(module, proxies[row], condition[row], real)).abs().max() <= 1e-10


def test_mlp_and_identity() -> None:
    proxies = draw(BATCH, PROXIES, SIZE)
    module = interaction("mlp")
    out, state = module(proxies)
    assert state == () and (out - slow_feed_forward(module.block, proxies)).abs().max() <= 1e-12
    out, state = interaction("identity")(proxies)
    assert state == () and torch.equal(out, proxies)


# ---------------------------------------------------------------------------------------------------------------------
# Streaming, causality, padding
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1], [2], [4, 1], [1, 5, 3], [PROXIES - 1, 1], [PROXIES]])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", STREAMING)
def test_streaming_equals_one_pass(kind: str, masked: bool, sizes: list[int]) -> None:
    module = interaction(kind)
    assert module.causal
    proxies, valid = draw(BATCH, PROXIES, SIZE), ragged() if masked else None
    condition = draw(BATCH, 4, CONDITION)
    positions = torch.arange(PROXIES)[None] + 3
    turned = kind == "causal_attention"
    whole, _ = module(
        proxies,
        valid=valid,
        condition=condition,
        positions=positions if turned else None,
        rotary=rotary if turned else None,
    )
    pieced = stream(module, proxies, sizes, valid, condition, positions if turned else None)
    assert (pieced - whole).abs().max() <= 1e-10


@pytest.mark.parametrize("kind", STREAMING)
def test_a_long_stream(kind: str) -> None:
    module = interaction(kind)
    proxies, condition = draw(1, 70, SIZE), draw(1, 4, CONDITION)
    valid = torch.rand(1, 70) < 0.7
    whole, _ = module(proxies, valid=valid, condition=condition)
    assert (stream(module, proxies, [7, 1, 20], valid, condition) - whole).abs().max() <= 1e-10


def test_gradients_pass_what_is_streamed() -> None:
    for kind in ("causal_attention", "recurrent"):
        module, proxies, towards = interaction(kind), draw(2, PROXIES, SIZE).requires_grad_(), draw(2, PROXIES, SIZE)
        wanted = torch.autograd.grad(module(proxies)[0], [proxies, *module.parameters()], towards)
        got = torch.autograd.grad(stream(module, proxies, [4, 1]), [proxies, *module.parameters()], towards)
        assert all((x - y).abs().max() <= 1e-10 for x, y in zip(got, wanted, strict=True)), kind


def test_a_past_of_which_only_some_is_valid() -> None:
    """`past_valid` alone, with all new proxies valid, and one new proxy: as with the invalid ones taken out."""
    module = interaction("causal_attention")
    proxies = draw(1, PROXIES, SIZE)
    keep = torch.tensor([True, False, True, True, False])
    _, (key, value) = module(proxies[:, :5])
    wanted_all, _ = module(proxies[:, 5:], past=(key[:, :, keep], value[:, :, keep], None))
    for new in (1, PROXIES - 5):
        out, _ = module(proxies[:, 5 : 5 + new], past=(key, value, keep[None]))
        assert (out - wanted_all[:, :new]).abs().max() <= 1e-10


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", PROXY_INTERACTIONS)
def test_who_depends_on_whom(kind: str, masked: bool) -> None:
    """By gradient: exactly the promised proxies, no more and no fewer."""
    module = interaction(kind)
    proxies, valid = draw(BATCH, PROXIES, SIZE), ragged() if masked else None
    condition = draw(BATCH, 4, CONDITION)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: module(x, valid=valid, condition=condition)[0].square().sum((0, 2)), proxies
    )
    assert isinstance(jacobian, torch.Tensor)
    depends = (jacobian != 0).any(-1)  # (reading proxy, row, read proxy)
    counts = torch.ones(BATCH, PROXIES, dtype=torch.bool) if valid is None else valid
    for row in range(BATCH):
        for i in range(PROXIES):
            for j in range(PROXIES):
                among = (kind in ("causal_attention", "recurrent") and j < i) or kind == "bidirectional_attention"
                wanted = i == j or (among and bool(counts[row, j]))
                if kind == "bidirectional_attention" and not counts[row].any():
                    continue
                assert bool(depends[i, row, j]) == wanted, (row, i, j)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", PROXY_INTERACTIONS)
def test_rows_without_valid_proxies_are_finite(kind: str, training: bool) -> None:
    module = interaction(kind)
    proxies = draw(BATCH, PROXIES, SIZE).requires_grad_(training)
    valid = torch.zeros(BATCH, PROXIES, dtype=torch.bool)
    nothing = torch.zeros(BATCH, 4, dtype=torch.bool)
    out, state = module(proxies, valid=valid, condition=draw(BATCH, 4, CONDITION), condition_valid=nothing)
    assert out.isfinite().all() and all(x.isfinite().all() for x in state)
    if module.causal:
        past = (*state, valid) if kind == "causal_attention" else state
        one, _ = module(proxies[:, :1], past=past, valid=valid[:, :1], condition=draw(BATCH, 4, CONDITION))
        assert one.isfinite().all()
        out = torch.cat([out, one], dim=1)
    if training:
        out.square().sum().backward()
        assert proxies.grad is not None and proxies.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", PROXY_INTERACTIONS)
def test_invalid_proxies_change_nothing_elsewhere(kind: str) -> None:
    module, valid, condition = interaction(kind), ragged(), draw(BATCH, 4, CONDITION)
    proxies = draw(BATCH, PROXIES, SIZE)
    changed = torch.where(valid[..., None], proxies, draw(BATCH, PROXIES, SIZE))
    out, _ = module(proxies, valid=valid, condition=condition)
    other, _ = module(changed, valid=valid, condition=condition)
    assert torch.equal(out[valid], other[valid])


@pytest.mark.parametrize("kind", ["causal_attention", "recurrent"])
def test_padding_on_the_right_needs_no_mask(kind: str) -> None:
    module, proxies = interaction(kind), draw(BATCH, PROXIES, SIZE)
    valid = torch.arange(PROXIES) < torch.tensor([[4], [PROXIES], [1]])
    masked, plain = module(proxies, valid=valid)[0], module(proxies)[0]
    assert (masked[valid] - plain[valid]).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", ["causal_attention", "bidirectional_attention", "cross_attention"])
def test_no_query_is_left_without_a_key(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels answer such a query with NaN, others with zeros: none of them may meet one."""
    masks: list[torch.Tensor] = []
    original = F.scaled_dot_product_attention

    def recording(*args: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        masks.append(attn_mask)
        return original(*args, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    real = torch.tensor([[True, False], [False, False], [True, True]])
    condition = draw(BATCH, 2, CONDITION)
    interaction(kind)(draw(BATCH, PROXIES, SIZE), valid=ragged(), condition=condition, condition_valid=real)
    (mask,) = masks
    assert mask.any(-1).all() and not mask.all()


def test_masks_are_made_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, proxies = interaction("causal_attention"), draw(BATCH, PROXIES, SIZE)
    _, (key, value) = module(proxies)
    calls: list[tuple[bool, bool]] = []
    original = F.scaled_dot_product_attention

    def recording(query: torch.Tensor, *args: torch.Tensor, **options: object) -> torch.Tensor:
        mask = options.get("attn_mask")
        calls.append((type(mask) is torch.Tensor, bool(options.get("is_causal"))))
        return original(query, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    everyone = torch.ones(BATCH, PROXIES, dtype=torch.bool)
    module(proxies)
    module(proxies[:, :1], valid=everyone[:, :1])
    module(proxies[:, :1], past=(key, value, None))
    module(proxies, past=(key, value, None))
    module(proxies, valid=everyone)
    module(proxies[:, :1], past=(key, value, everyone))
    assert calls == [(False, True), (False, False), (False, False), (False, False), (True, False), (True, False)]


@pytest.mark.parametrize("kind", PROXY_INTERACTIONS)
def test_bfloat16(kind: str) -> None:
    """Weights in bfloat16; the recurrence still scans in float32."""
    module = interaction(kind)
    proxies, condition = draw(BATCH, PROXIES, SIZE), draw(BATCH, 4, CONDITION)
    exact, _ = module(proxies, condition=condition, valid=ragged())
    out, state = module.bfloat16()(proxies.bfloat16(), condition=condition.bfloat16(), valid=ragged())
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).norm() / exact.norm()).item() < 3e-2
    assert [x.dtype for x in state] == ([torch.float32] if kind == "recurrent" else [torch.bfloat16] * len(state))


@pytest.mark.filterwarnings("error:Mismatch dtype:UserWarning")
@pytest.mark.parametrize("kind", PROXY_INTERACTIONS)
def test_autocast(kind: str) -> None:
    module = interaction(kind).float()
    proxies, condition = draw(BATCH, PROXIES, SIZE).float(), draw(BATCH, 4, CONDITION).float()
    exact, _ = module(proxies, condition=condition)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = module(proxies, condition=condition)
    assert ((out - exact).norm() / exact.norm()).item() < 3e-2
    assert out.dtype == torch.float32, "the residual stream keeps its dtype"
    if kind == "recurrent":
        assert state[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "streamed"),
    [(kind, False) for kind in PROXY_INTERACTIONS] + [("causal_attention", True), ("recurrent", True)],
)
def test_compiles_into_one_graph(kind: str, streamed: bool) -> None:
    module = interaction(kind)
    proxies, condition = draw(BATCH, PROXIES, SIZE), draw(BATCH, 4, CONDITION)
    past: tuple[torch.Tensor | None, ...] | None = None
    if streamed:
        state = module(proxies)[1]
        past = (*state, None) if kind == "causal_attention" else state
    torch.compiler.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    wanted = module(proxies, past=past, condition=condition)[0]
    assert (compiled(proxies, past=past, condition=condition)[0] - wanted).abs().max() <= 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# The block, options, refusals
# ---------------------------------------------------------------------------------------------------------------------


def test_the_block_returns_its_normalised_states() -> None:
    block = AttentionBlock(SIZE, HEADS, HEAD_DIM, MIDDLE, EPS, 0.5).double()
    x = draw(2, 5, SIZE)
    n, query, key, value = block.project(x)
    assert (n - normalise(x, block.input_norm)).abs().max() <= 1e-12
    assert query.shape == key.shape == value.shape == (2, HEADS, 5, HEAD_DIM)
    assert (query.pow(2).mean(-1) - 1).abs().max() < 1e-4 and (key.pow(2).mean(-1) - 1).abs().max() < 1e-4
    scales = {name: getattr(module, "init_scale", 1.0) for name, module in block.named_modules()}
    assert {name for name, scale in scales.items() if scale != 1.0} == {"o_proj", "down_proj"}
    assert scales["o_proj"] == scales["down_proj"] == 0.5
    assert not any(name.endswith("bias") for name, _ in block.named_parameters())
    with pytest.raises(NotImplementedError, match="project"):
        block(x)


@pytest.mark.parametrize("kind", PROXY_INTERACTIONS)
def test_out_scale_marks_what_enters_the_residual_stream(kind: str) -> None:
    scales = {
        name.rsplit(".", 1)[-1]: module.init_scale
        for name, module in interaction(kind, out_scale=0.25).named_modules()
        if hasattr(module, "init_scale")
    }
    wanted = {"identity": set(), "mlp": {"down_proj"}}.get(kind, {"o_proj", "down_proj"})
    assert set(scales) == wanted and set(scales.values()) <= {0.25}


@pytest.mark.parametrize("kind", [kind for kind in PROXY_INTERACTIONS if kind != "identity"])
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    module = interaction(kind)
    module(draw(BATCH, PROXIES, SIZE), condition=draw(BATCH, 4, CONDITION))[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_a_new_recurrence_forgets_over_ten_to_ten_thousand_proxies() -> None:
    decay = RecurrentInteraction.initial_decay(5)
    spans = 1 / F.softplus(decay.double())
    assert torch.allclose(spans, torch.tensor([1e1, 56.2341, 316.2278, 1778.2794, 1e4]).double(), rtol=1e-3)


def test_merging_proxies() -> None:
    module, proxies = ProxyMerge(3, SIZE).double(), draw(BATCH, PROXIES, SIZE)
    out = module(proxies)
    assert out.shape == (BATCH, 3, SIZE)
    for i in range(3):
        wanted = torch.cat([proxies[:, 3 * i + j] for j in range(3)], -1) @ module.proj.weight.T
        assert (out[:, i] - wanted).abs().max() <= 1e-12
    assert module.proj.init_average
    module.proj.weight.data.copy_(module.average_weight())
    assert (module(proxies) - proxies.view(BATCH, 3, 3, SIZE).mean(2)).abs().max() <= 1e-12
    with pytest.raises(ValueError, match="multiple of 3"):
        module(proxies[:, 1:])
    with pytest.raises(ValueError, match="multiple of 3, 12"):
        module(proxies[..., 1:])
    with pytest.raises(ValueError, match="group must be at least 1"):
        ProxyMerge(0, SIZE)


def test_interactions_refuse() -> None:
    with pytest.raises(ValueError, match="Unknown proxy interaction 'ssm'"):
        interaction("ssm")
    with pytest.raises(ValueError, match="condition_size"):
        make_interaction("cross_attention", SIZE, HEADS, HEAD_DIM, MIDDLE)
    proxies = draw(BATCH, PROXIES, SIZE)
    causal = interaction("causal_attention")
    with pytest.raises(ValueError, match=r"\(batch, m, d\)"):
        causal(proxies[0])
    for valid in (ragged()[:, 1:], ragged().long()):
        with pytest.raises(ValueError, match="valid must be bool"):
            causal(proxies, valid=valid)
    with pytest.raises(ValueError, match="positions are read by rotary"):
        causal(proxies, positions=torch.arange(PROXIES)[None])
    _, (key, value) = causal(proxies)
    with pytest.raises(ValueError, match="past_valid must have shape"):
        causal(proxies, past=(key, value, ragged()[:, 1:]))
    with pytest.raises(ValueError, match="past must hold the keys"):
        causal(proxies, past=(None, None, ragged()))
    both = interaction("bidirectional_attention")
    with pytest.raises(ValueError, match="cannot continue a past"):
        both(proxies, past=(key, value, None))
    assert torch.equal(both(proxies, past=())[0], both(proxies)[0])
    with pytest.raises(ValueError, match="hidden state"):
        interaction("recurrent")(proxies, past=(draw(BATCH, SIZE + 1),))
    cross = interaction("cross_attention")
    with pytest.raises(ValueError, match="needs a condition"):
        cross(proxies)
    for condition in (draw(BATCH, 4, CONDITION + 1), draw(BATCH + 1, 4, CONDITION), draw(BATCH, CONDITION)):
        with pytest.raises(ValueError, match="condition must have shape"):
            cross(proxies, condition=condition)
    with pytest.raises(ValueError, match="condition_valid must have shape"):
        cross(proxies, condition=draw(BATCH, 4, CONDITION), condition_valid=ragged())
