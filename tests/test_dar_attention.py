"""Two-path DAR attention against the dense formula: outputs, gradients, padding, packing, devices and dtypes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from dar_models import tiny_dar
from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar import DARCache
from nearfar.modeling.attention_with_lse import (
    causal_attention,
    full_attention,
    masked_reference,
    merge,
    window_attention,
    window_visible,
)
from nearfar.modeling.dar_attention import FarPairs, dar_attention, projected_dar_attention, projects_itself
from nearfar.modeling.dar_far_weights import fuse_far_weights, probe_far_weights
from nearfar.modeling.dar_flex_attention import flex_dar_attention
from nearfar.modeling.dar_plan import plan_attention
from nearfar.modeling.dar_reference import dense_dar_attention
from nearfar.modeling.dar_rotary_kernel import (
    join_pair_gradients,
    rotary_kernel_available,
    turn_in_place,
    turned_queries_and_keys,
)
from nearfar.modeling.rotary_halves import rotate_halves

WINDOWS = (0, 1, 4, 16, 64, 128, 256)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(
    batch: int = 2, heads: int = 3, tokens: int = 37, dim: int = 8, size: int = 5, *, rotary: int = 4,
    bias: bool = True, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0,
) -> tuple[list[torch.Tensor], FarPairs]:  # fmt: skip
    """Queries, keys, values, and a source of far pairs, all leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return x.to(device, dtype).requires_grad_()

    states = [draw(batch, heads, tokens, dim) for _ in range(3)]
    angles = torch.rand(1, tokens, rotary // 2, generator=generator, dtype=torch.float64).to(device) * 6
    angles = torch.cat([angles, angles], -1)
    far = FarPairs(
        bottleneck=draw(batch, tokens, size),
        weight=draw(heads, 2 * dim, size, scale=size**-0.5),
        bias=draw(heads, 2 * dim) if bias else None,
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
    )
    return states, far


def leaves(states: list[torch.Tensor], far: FarPairs) -> list[torch.Tensor]:
    return [*states, *(x for x in (far.bottleneck, far.weight, far.bias) if x is not None)]


def gradients(out: torch.Tensor, to: list[torch.Tensor], seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    towards = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
    found = torch.autograd.grad(out, to, towards, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(to, found, strict=True)]


def dense(states: list[torch.Tensor], far: FarPairs, window: int) -> torch.Tensor:
    return dense_dar_attention(*states, *far.pairs(), window, states[0].shape[-1] ** -0.5)[0]


def largest_error(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(((x - y).abs().max() / y.abs().max().clamp_min(1e-3)).item() for x, y in zip(a, b, strict=True))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def check_against_dense(window: int, tokens: int, **options: object) -> None:
    states, far = inputs(tokens=tokens, **options)  # type: ignore[arg-type]
    out = dar_attention(*states, far, window, states[0].shape[-1] ** -0.5)
    reference = dense(states, far, window)
    assert (out - reference).abs().max() < 1e-10
    wanted = gradients(reference, leaves(states, far))
    assert largest_error(gradients(out, leaves(states, far)), wanted) < 1e-10


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [1, 17, 129, 301])
def test_forward_and_backward_equal_the_dense_formula(window: int, tokens: int) -> None:
    check_against_dense(window, tokens)


@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(0, 40), tokens=st.integers(1, 70), batch=st.integers(1, 3), heads=st.integers(1, 3),
    dim=st.sampled_from([2, 6, 16]), size=st.integers(1, 9), bias=st.booleans(),
)  # fmt: skip
def test_any_shape(window: int, tokens: int, batch: int, heads: int, dim: int, size: int, bias: bool) -> None:
    check_against_dense(window, tokens, batch=batch, heads=heads, dim=dim, size=size, rotary=2, bias=bias)


@pytest.mark.parametrize("window", [0, 3, 50])
def test_given_far_pairs(window: int) -> None:
    """Where the projections are not plain matrices, far keys and values are given; the result is the same."""
    states, far = inputs()
    key, value = (x.detach().requires_grad_() for x in far.pairs())
    given_pairs = FarPairs(far.bottleneck, None, None, far.cos, far.sin, key, value)
    out = dar_attention(*states, given_pairs, window, 0.3)
    reference = dense_dar_attention(*states, key, value, window, 0.3)[0]
    assert (out - reference).abs().max() < 1e-10
    wanted = gradients(reference, [*states, key, value])
    assert largest_error(gradients(out, [*states, key, value]), wanted) < 1e-10


def test_gradients_by_finite_differences() -> None:
    states, far = inputs(batch=1, heads=2, tokens=11, dim=4, size=3, rotary=2)

    def attend(*x: torch.Tensor) -> torch.Tensor:
        source = FarPairs(x[3], x[4], x[5], far.cos, far.sin)
        return dar_attention(*x[:3], source, 3, 0.5)

    assert torch.autograd.gradcheck(attend, leaves(states, far), atol=1e-6)


def test_all_near_gives_the_bottleneck_zero_gradients() -> None:
    """Not missing ones: data-parallel training waits for every parameter."""
    states, far = inputs(tokens=9)
    found = torch.autograd.grad(dar_attention(*states, far, 9, 0.3).sum(), [far.bottleneck, far.weight])
    assert all((x == 0).all() for x in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_on_a_cpu(dtype: torch.dtype) -> None:
    states, far = inputs(tokens=70, dim=16, dtype=dtype)
    out = dar_attention(*states, far, 16, 0.25)
    exact = [x.detach().double().requires_grad_() for x in leaves(states, far)]
    reference = dense(exact[:3], FarPairs(*exact[3:], far.cos.double(), far.sin.double()), 16)
    limit = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert out.dtype == dtype
    assert relative(out, reference) < limit
    for mine, wanted in zip(gradients(out, leaves(states, far)), gradients(reference, exact), strict=True):
        assert relative(mine, wanted) < 3 * limit


def test_work_is_not_quadratic_in_what_is_kept() -> None:
    """For the backward pass nothing of the far pairs is kept: bytes a token do not hold far keys and values."""
    kept: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    states, far = inputs(batch=1, heads=4, tokens=512, dim=16, size=4)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        dar_attention(*states, far, 16, 0.25)
    own = 4 * 512 * 16
    assert sum(kept) < 4 * own + 512 * (4 + 2 * 4 + 4) + far.weight.numel() * 2 + 4096  # q, k, v, output; bottleneck


# ---------------------------------------------------------------------------------------------------------------------
# Attention with log-sum-exp
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (7, 30), (40, 43), (33, 80), (64, 64)])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 33])
def test_window_attention(queries: int, keys: int, window: int) -> None:
    q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.float64) for n in (queries, keys, keys))
    out, lse = window_attention(q, k, v, window, 0.5)
    reference, reference_lse = masked_reference(q, k, v, window_visible(queries, keys, window, q.device), 0.5)
    assert (out - reference).abs().max() < 1e-12
    assert (lse - reference_lse).abs().max() < 1e-12


def test_merge_is_the_softmax_over_the_union() -> None:
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (6, 10, 10))
    whole, lse = full_attention(q, k, v, 0.5)
    first, second = full_attention(q, k[:, :, :3], v[:, :, :3], 0.5), full_attention(q, k[:, :, 3:], v[:, :, 3:], 0.5)
    merged, merged_lse = merge(*first, *second)
    assert (merged - whole).abs().max() < 1e-12
    assert (merged_lse - lse).abs().max() < 1e-12


def test_merge_with_rows_that_see_nothing() -> None:
    out = torch.ones(1, 1, 2, 3)
    nothing, something = torch.full((1, 1, 2), -math.inf), torch.tensor([[[-math.inf, 2.0]]])
    merged, lse = merge(torch.zeros_like(out), nothing, out * (something > 0)[..., None], something)
    assert torch.equal(merged[0, 0], torch.tensor([[0.0] * 3, [1.0] * 3]))
    assert torch.equal(lse, something)


# ---------------------------------------------------------------------------------------------------------------------
# Padding and packing
# ---------------------------------------------------------------------------------------------------------------------


def mask_of(kind: str, batch: int, tokens: int) -> torch.Tensor:
    mask = torch.ones(batch, tokens, dtype=torch.long)
    for row in range(batch):
        count = (5 * row + 3) % tokens
        if kind == "left":
            mask[row, :count] = 0
        elif kind == "right":
            mask[row, tokens - count :] = 0
        else:  # holes
            mask[row, 1 :: row + 2] = 0
    return mask


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("window", [0, 1, 4, 16, 64])
def test_padding(kind: str, window: int) -> None:
    """Real tokens see what they would without padding, and padding gets no say."""
    states, far = inputs(batch=4, tokens=23)
    mask = mask_of(kind, 4, 23)
    plan = plan_attention(mask, None, 4, 23, seen=0)
    out = dar_attention(*states, far, window, 0.3, plan)
    real = mask.bool()
    weight = torch.randn(out.shape, dtype=torch.float64) * real[:, None, :, None]
    found = torch.autograd.grad((out * weight).sum(), leaves(states, far), allow_unused=True, materialize_grads=True)
    wanted_out = torch.zeros_like(out)
    total = 0.0
    for row in range(4):
        rows = [x[row : row + 1, :, real[row]] for x in states]
        cos, sin = far.cos[:, real[row]], far.sin[:, real[row]]
        alone = FarPairs(far.bottleneck[row : row + 1, real[row]], far.weight, far.bias, cos, sin)
        result = dense_dar_attention(*rows, *alone.pairs(), window, 0.3)[0]
        wanted_out[row, :, real[row]] = result[0].detach()
        total = total + (result[0] * weight[row, :, real[row]]).sum()
    assert ((out - wanted_out) * real[:, None, :, None]).abs().max() < 1e-10
    wanted = torch.autograd.grad(total, leaves(states, far), allow_unused=True, materialize_grads=True)
    assert largest_error(list(found), list(wanted)) < 1e-10


def packed_positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.parametrize("lengths", [[23], [1, 1, 21], [10, 13], [3, 7, 1, 12], [1] * 23])
@pytest.mark.parametrize("window", [0, 1, 4, 16])
def test_packing(lengths: list[int], window: int) -> None:
    states, far = inputs(batch=2, tokens=23)
    plan = plan_attention(None, packed_positions(lengths), 2, 23, seen=0)
    out = dar_attention(*states, far, window, 0.3, plan)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = FarPairs(far.bottleneck[:, part], far.weight, far.bias, far.cos[:, part], far.sin[:, part])
        wanted = dense_dar_attention(*(x[:, :, part] for x in states), *alone.pairs(), window, 0.3)[0]
        assert (out[:, :, part] - wanted).abs().max() < 1e-10
        start += length


def test_packing_differs_by_row() -> None:
    ids = torch.cat([packed_positions([5, 18]), packed_positions([20, 3])])
    plan = plan_attention(None, ids, 2, 23, seen=0)
    assert plan.sequences is not None
    flat = torch.cat([group.flatten() for group in plan.sequences.groups])
    assert torch.equal(flat[plan.sequences.places].flatten(), torch.arange(46))


def test_plan_of_ordinary_input_is_empty() -> None:
    for mask, ids in ((None, None), (torch.ones(2, 5), None), (None, torch.arange(5)[None])):
        plan = plan_attention(mask, ids, 2, 5, seen=0)
        assert plan.sequences is None
        assert plan.real is None


@pytest.mark.parametrize("shape", [(3, 5), (2, 4), (2,), (2, 1, 5)])
def test_masks_of_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        plan_attention(torch.zeros(shape), None, 2, 5, seen=0)


def test_four_dimensional_masks() -> None:
    with pytest.raises(ValueError, match="with a cache"):
        plan_attention(torch.zeros(2, 1, 5, 9), None, 2, 5, cached=True)
    with pytest.raises(ValueError, match="must end in"):
        plan_attention(torch.zeros(2, 1, 5, 9), None, 2, 5, seen=0)


@pytest.mark.parametrize("case", ["plain", "left", "packed"])
@pytest.mark.parametrize("window", [0, 4, 64])
def test_flex_attention(case: str, window: int) -> None:
    """On a CPU the forward pass alone."""
    states, far = inputs(batch=2, heads=2, tokens=40, dtype=torch.float32)
    mask = mask_of("left", 2, 40) if case == "left" else None
    ids = packed_positions([13, 27]) if case == "packed" else None
    plan = plan_attention(mask, ids, 2, 40, seen=0)
    with torch.no_grad():
        pairs = [x.detach() for x in (*states, *far.pairs())]
        out = flex_dar_attention(*pairs, window, 0.3, plan)
        wanted = dar_attention(*states, far, window, 0.3, plan)
    real = torch.ones(2, 40) if mask is None else mask
    assert ((out - wanted) * real[:, None, :, None]).abs().max() < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# The model around it
# ---------------------------------------------------------------------------------------------------------------------


def model_gradients(model: torch.nn.Module, ids: torch.Tensor, **options: object) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False, **options).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("activation", [None, "sigmoid"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_model_gradients_equal_eager(activation: str | None, checkpointing: bool) -> None:
    model = tiny_dar(window_size=5, bottleneck_activation=activation).train()
    ids = torch.randint(3, 61, (2, 29))
    model.set_attn_implementation("eager")
    wanted = model_gradients(model, ids)
    model.set_attn_implementation("sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert largest_error(model_gradients(model, ids), wanted) < 1e-9


@pytest.mark.parametrize("window", [0, 4])
def test_eager_and_sdpa_agree_on_every_mask(window: int) -> None:
    model = tiny_dar(window_size=window)
    ids = torch.randint(3, 61, (3, 20))
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    causal[10:, :3] = False
    added = torch.zeros(20, 20, dtype=torch.float64).masked_fill(~causal, torch.finfo(torch.float64).min)
    for options in (
        {"attention_mask": mask_of("left", 3, 20)}, {"attention_mask": mask_of("right", 3, 20)},
        {"position_ids": packed_positions([8, 12])}, {"attention_mask": causal[None, None].expand(3, 1, -1, -1)},
    ):  # fmt: skip
        results = []
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                results.append(model(ids, use_cache=False, **options).logits)
        mask = options.get("attention_mask", torch.ones(3, 20))
        real = mask if mask.ndim == 2 else torch.ones(3, 20)
        assert ((results[0] - results[1]) * real[..., None]).abs().max() < 1e-10
    with torch.no_grad():
        as_bool = model(ids, attention_mask=causal[None, None], use_cache=False).logits
        as_bias = model(ids, attention_mask=added[None, None], use_cache=False).logits
    assert (as_bool - as_bias).abs().max() < 1e-10


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_cache_is_made_for_what_it_cannot_hold(attention: str) -> None:
    """Otherwise the mask, or where one sequence ends, would be lost."""
    model = tiny_dar(attention=attention)
    ids = torch.randint(3, 61, (2, 20))
    banded = (torch.ones(20, 20).tril() - torch.ones(20, 20).tril(-6)).bool()[None, None]
    for options in ({"attention_mask": banded}, {"position_ids": packed_positions([8, 12])}):
        with torch.no_grad():
            found, plain = model(ids, **options), model(ids)
            wanted = model(ids, use_cache=False, **options).logits
        assert torch.equal(found.logits, wanted)
        assert (wanted - plain.logits).abs().max() > 0.1
        assert found.past_key_values is None
        assert plain.past_key_values is not None
        with pytest.raises(ValueError, match="cache"):
            model(ids, past_key_values=DARCache(model), **options)


def test_packing_inside_a_compiled_graph() -> None:
    model = tiny_dar()
    ids = torch.randint(3, 61, (2, 20))
    options = {"position_ids": packed_positions([8, 12]), "use_cache": False}
    with torch.no_grad():
        wanted = model(ids, **options).logits
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, **options).logits
    assert (found - wanted).abs().max() < 1e-10


def test_masks_must_fit_what_has_been_seen() -> None:
    model = tiny_dar()
    ids = torch.randint(3, 61, (1, 10))
    cache = DARCache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for width in (3, 13):
            model(ids[:, :3], attention_mask=torch.ones(1, width), past_key_values=copy.deepcopy(cache))
        for width in (12, 99):
            with pytest.raises(ValueError, match=r"\(1, 13\) with the cached tokens"):
                model(ids[:, :3], attention_mask=torch.ones(1, width), past_key_values=cache)
        with pytest.raises(ValueError, match="must have shape"):
            model(ids, attention_mask=torch.ones(1, 37))


def test_all_near_in_float16_stays_finite() -> None:
    states, far = inputs(batch=8, tokens=64, size=32, dtype=torch.float16)
    far.bottleneck = (torch.rand(8, 64, 32) + 8).half().requires_grad_()  # their sum is beyond float16
    out = dar_attention(*states, far, 64, 0.3)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), [states[0], far.bottleneck]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_probed_weights_survive_a_large_bias(dtype: torch.dtype) -> None:
    """Adapters and quantised projections are probed; the bias must not eat the weights' digits."""
    attention = tiny_dar(hidden_size=128, bottleneck_size=32, dtype=dtype).gpt_neox.layers[0].attention
    attention.query_key_value.bias.data.mul_(100)
    exact, bias = fuse_far_weights(attention.query_key_value.double(), attention.bottleneck_up.double(), 4)
    attention.to(dtype)
    like = torch.zeros(1, dtype=dtype)
    weight, probed = probe_far_weights(attention.query_key_value, attention.bottleneck_up, 32, 32, like)
    limit = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}[dtype]
    assert relative(weight, exact) < limit
    assert relative(probed, bias) < limit


def test_a_plan_moves_with_its_layers() -> None:
    """As accelerate moves what it hands to a layer on another device."""
    mask, ids = mask_of("left", 3, 20), packed_positions([8, 12])
    for plan in (plan_attention(mask, None, 3, 20), plan_attention(None, ids, 3, 20)):
        moved = plan.to("meta")
        tensors = [
            x for x in (moved.real, moved.ranks, moved.order, moved.counts, moved.sequence_ids) if x is not None
        ]
        assert all(x.is_meta for x in (*tensors, moved.sequences.places, *moved.sequences.groups))
        assert not plan.real.is_meta


def test_attention_dropout_is_refused_where_it_would_be_ignored() -> None:
    model = tiny_dar(attention_dropout=0.1).train()
    ids = torch.randint(3, 61, (1, 20))
    with pytest.raises(ValueError, match="attention_dropout"):
        model(ids, use_cache=False)
    with pytest.raises(ValueError, match="attention_dropout"), torch.no_grad():
        model(ids, use_cache=True)
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    first = model(ids, use_cache=False).logits
    assert (first - model(ids, use_cache=False).logits).abs().max() > 0
    assert model.eval().set_attn_implementation("sdpa") is None
    model(ids)


@pytest.mark.slow
def test_compiled_model_equals_eager() -> None:
    """The graph is traced whole, forward and backward; no code is generated here."""
    model = tiny_dar(window_size=5).train()
    ids = torch.randint(3, 61, (2, 29))
    wanted = model_gradients(model, ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert largest_error(model_gradients(compiled, ids), wanted) < 1e-9


# ---------------------------------------------------------------------------------------------------------------------
# A GPU
# ---------------------------------------------------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 96, 256])
@pytest.mark.parametrize(("window", "tokens"), [(0, 700), (1, 333), (128, 1000), (128, 131), (200, 2048), (256, 1537)])
def test_kernels_on_cuda(dtype: torch.dtype, dim: int, window: int, tokens: int) -> None:
    states, far = inputs(2, 3, tokens, dim, 32, rotary=dim // 4, dtype=dtype, device="cuda")
    out = dar_attention(*states, far, window, dim**-0.5)
    exact = [x.detach().double().requires_grad_() for x in leaves(states, far)]
    reference = dense_dar_attention(
        *exact[:3], *FarPairs(*exact[3:], far.cos.double(), far.sin.double()).pairs(), window, dim**-0.5
    )[0]
    limit = 6e-3 if dtype == torch.bfloat16 else 1e-3
    assert relative(out, reference) < limit
    for mine, wanted in zip(gradients(out, leaves(states, far)), gradients(reference, exact), strict=True):
        assert relative(mine, wanted) < 3 * limit


@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(3, 64, 16), (2, 40, 10), (12, 128, 128), (5, 96, 2)])
@pytest.mark.parametrize("rows", [1, 2])
def test_rotary_kernels_on_cuda(dtype: torch.dtype, heads: int, dim: int, rotary: int, rows: int) -> None:
    """Each against `rotate_halves` in float64; angles of each row or of all, in float32 as under autocast."""
    tokens, seen = 133, 100

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    angles = torch.rand(rows, tokens, rotary // 2, device="cuda") * 6
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos(), angles.sin()
    wide = cos.double()[:, None], sin.double()[:, None]
    limit = 4e-3 if dtype == torch.bfloat16 else 5e-4
    states = draw(2, tokens, heads * 3 * dim)
    assert rotary_kernel_available(states)
    exact = states.double().view(2, tokens, heads, 3, dim).transpose(1, 2).unbind(3)
    for found, x in zip(turned_queries_and_keys(states, heads, cos, sin), exact[:2], strict=True):
        assert relative(found, rotate_halves(x, *wide)) < limit

    x = draw(2, tokens, heads, 3, dim)
    wanted = [*(rotate_halves(y, wide[0], -wide[1]) for y in x.double().transpose(1, 2).unbind(3)[:2])]
    found = turn_in_place(x.clone(), 2, cos, sin, backwards=True)
    assert torch.equal(found[:, :, :, 2], x[:, :, :, 2])
    for part, one in enumerate(wanted):
        assert relative(found[:, :, :, part].transpose(1, 2), one) < limit

    key, value = draw(2, seen, heads, dim).transpose(1, 2), draw(2, heads, seen, dim)
    joined = join_pair_gradients(key, value, tokens, cos, sin).transpose(1, 2)
    cos, sin = (x[:, :, :seen] for x in wide)
    assert relative(joined[:, :, :seen, 0], rotate_halves(key.double(), cos, -sin)) < limit
    assert torch.equal(joined[:, :, :seen, 1], value)
    assert not joined[:, :, seen:].any()


@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 96])
@pytest.mark.parametrize(("window", "tokens"), [(1, 333), (128, 1000), (128, 131), (200, 1537)])
@pytest.mark.parametrize("bias", [True, False])
def test_projected_attention_on_cuda(dtype: torch.dtype, dim: int, window: int, tokens: int, bias: bool) -> None:
    """From the fused projection on, against the dense formula in float64."""
    states, far = inputs(2, 3, tokens, dim, 32, rotary=dim // 4, bias=bias, dtype=dtype, device="cuda")
    projected = torch.stack(states, 3).transpose(1, 2).flatten(2).detach().requires_grad_()
    assert projects_itself(projected, far, window)
    sources = [projected, *(x for x in (far.bottleneck, far.weight, far.bias) if x is not None)]
    out = projected_dar_attention(projected, far, window, dim**-0.5)
    exact = [x.detach().double().requires_grad_() for x in sources]
    cos, sin = far.cos.double(), far.sin.double()
    query, key, value = exact[0].view(2, tokens, 3, 3, dim).transpose(1, 2).unbind(3)
    query, key = (rotate_halves(x, cos[:, None], sin[:, None]) for x in (query, key))
    pairs = FarPairs(*exact[1:3], exact[3] if bias else None, cos, sin).pairs()
    reference = dense_dar_attention(query, key, value, *pairs, window, dim**-0.5)[0]
    limit = 8e-3 if dtype == torch.bfloat16 else 1e-3
    assert relative(out, reference) < limit
    for mine, wanted in zip(gradients(out, sources), gradients(reference, exact), strict=True):
        assert relative(mine, wanted) < 3 * limit


@cuda
def test_padding_on_cuda() -> None:
    states, far = inputs(4, 2, 300, 64, 32, rotary=16, dtype=torch.bfloat16, device="cuda")
    plan = plan_attention(mask_of("left", 4, 300).cuda(), None, 4, 300, seen=0)
    out = dar_attention(*states, far, 64, 0.125, plan)
    wanted = dense_dar_attention(*states, *far.pairs(), 64, 0.125, ranks=plan.ranks, visible=plan.real[:, None, None])[
        0
    ]
    assert relative(out * plan.real[:, None, :, None], wanted * plan.real[:, None, :, None]) < 1e-2


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_on_cuda(dtype: torch.dtype) -> None:
    """Gradients too, and with padding."""
    states, far = inputs(2, 2, 300, 64, 32, rotary=16, dtype=dtype, device="cuda")
    plan = plan_attention(mask_of("left", 2, 300).cuda(), None, 2, 300, seen=0)
    real = plan.real[:, None, :, None]
    out = flex_dar_attention(*states, *far.pairs(), 64, 0.125, plan) * real
    wanted = dense_dar_attention(
        *states, *far.pairs(), 64, 0.125, ranks=plan.ranks, visible=plan.real[:, None, None]
    )[0] * real  # fmt: skip
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-3
    assert relative(out, wanted) < limit
    for mine, exact in zip(gradients(out, leaves(states, far)), gradients(wanted, leaves(states, far)), strict=True):
        assert relative(mine, exact) < 3 * limit


@cuda
def test_log_sum_exp_of_each_backend_on_cuda() -> None:
    """Some backends have returned it in base 2, or zero."""
    q, k, v = (torch.randn(1, 2, 600, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    visible = window_visible(600, 600, 600, q.device)
    _, wanted = masked_reference(q.double(), k.double(), v.double(), visible, 0.125)
    for training in (False, True):  # FlashAttention, and on Hopper cuDNN
        _, lse, _ = causal_attention(q, k, v, 0.125, training)
        assert lse.shape == wanted.shape
        assert (lse - wanted).abs().max() < 2e-2


@cuda
def test_compiled_training_step_on_cuda() -> None:
    """Its gradients are as near to float64 as those of the uncompiled step."""
    model = tiny_dar(window_size=16, hidden_size=128, num_attention_heads=2, dtype=torch.bfloat16).cuda().train()
    for parameter in model.parameters():  # scores of ordinary size: a saturated softmax magnifies any rounding
        parameter.data.mul_(0.3 if parameter.ndim == 2 else 1.0)
    ids = torch.randint(3, 61, (2, 200), device="cuda")
    exact = model_gradients(copy.deepcopy(model).double(), ids)
    eager = model_gradients(model, ids)
    compiled = model_gradients(torch.compile(model, fullgraph=True), ids)
    for mine, plain, wanted in zip(compiled, eager, exact, strict=True):
        assert relative(mine, wanted) < max(1.5 * relative(plain, wanted), 1e-2)
        assert relative(plain, wanted) < 0.1
