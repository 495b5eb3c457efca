"""Bottlenecks in closed form: the solution is the best there is, its weights are what the paper's sums say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import random_ids, tiny_model
from transformers import GPTNeoXForCausalLM

from nearfar.conversion.dar_from_pythia import dar_around, dar_config
from nearfar.conversion.dar_initialisation import (
    METHODS,
    SHRINKAGE,
    AttentionMoments,
    average_over_rotations,
    bottleneck_weights,
    collect_moments,
    initialise_bottlenecks,
    needs_moments,
    weighted_low_rank,
)
from nearfar.modeling.modeling_dar import DARForCausalLM
from nearfar.modeling.rotary_halves import rotate_halves
from nearfar.training.token_blocks import TokenBlocks

WINDOW, TOKENS = 5, 24


def _moment(size: int, seed: int) -> torch.Tensor:
    """A second moment with a wide range of eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return directions * torch.logspace(0, -3, size, dtype=torch.float64) @ directions.mT


def _blocks(rows: int = 3) -> TokenBlocks:
    return TokenBlocks(random_ids(rows, TOKENS).numpy().astype(np.uint16).reshape(-1), TOKENS)


@pytest.fixture(scope="module")
def source() -> GPTNeoXForCausalLM:
    return tiny_model("gpt_neox")


@pytest.fixture(scope="module")
def moments(source: GPTNeoXForCausalLM) -> list[AttentionMoments]:
    return collect_moments(source, _blocks(), window=WINDOW, queries_per_block=TOKENS, batch_size=2, quiet=True)


def _dar(source: GPTNeoXForCausalLM, size: int, window: int = WINDOW) -> DARForCausalLM:
    return dar_around(source, dar_config(source.config, bottleneck_size=size, window_size=window))


# --- the low-rank solution -------------------------------------------------------------------------------------------


def _error(moment: torch.Tensor, readout: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> float:
    """E|(h - h W_down W_up) readout|^2, from h's second moment."""
    lost = torch.eye(len(moment), dtype=moment.dtype) - down @ up
    return float((readout.mT @ lost.mT @ moment @ lost @ readout).trace())


def test_low_rank_solution_is_the_best() -> None:
    moment, rank = _moment(12, 0), 4
    readout = torch.randn(12, 30, dtype=torch.float64)
    down, up = weighted_low_rank(moment, readout, rank)
    found = _error(moment, readout, down, up)
    # By Eckart and Young nothing of this rank leaves less than the other singular values.
    root = torch.linalg.cholesky(moment)
    tail = torch.linalg.svdvals(root.mT @ readout)[rank:].square().sum()
    assert found == pytest.approx(float(tail), rel=1e-9)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        for size in (1e-1, 1e-3):
            moved = [w + size * torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in (down, up)]
            assert _error(moment, readout, *moved) >= found - 1e-12
    # A projection whose factors are equally long.
    torch.testing.assert_close(up @ down, torch.eye(rank, dtype=down.dtype), rtol=0, atol=1e-9)
    torch.testing.assert_close(down.norm(dim=0), up.norm(dim=1))


def test_low_rank_solution_minds_the_weights() -> None:
    """Where nothing is read, or nothing ever is, nothing is kept."""
    moment = torch.diag(torch.tensor([1.0, 100.0, 1.0, 1.0], dtype=torch.float64))
    readout = torch.diag(torch.tensor([1.0, 0.0, 5.0, 2.0], dtype=torch.float64))
    down, up = weighted_low_rank(moment, readout, 2)
    torch.testing.assert_close(down @ up, torch.diag(torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)))


def test_low_rank_solution_of_a_degenerate_moment_is_finite() -> None:
    """Fewer tokens than dimensions, and one direction with nearly all of the energy."""
    h = torch.randn(3, 8, dtype=torch.float64) * torch.tensor([1e4] + [1.0] * 7, dtype=torch.float64)
    down, up = weighted_low_rank(h.mT @ h / 3, torch.randn(8, 16, dtype=torch.float64), 5)
    assert bool(down.isfinite().all() and up.isfinite().all())
    assert (h @ down @ up - h).norm() < 1e-5 * h.norm()


# --- rotations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary_dims", [0, 4, 8])
def test_average_over_rotations_is_the_brute_force_one(rotary_dims: int) -> None:
    """Every pair turns on its own; four angles a pair, a right angle apart, average a quadratic form exactly."""
    dim, moment = 8, torch.stack([_moment(8, 1), _moment(8, 2)])
    half, angles = rotary_dims // 2, 0.3 + torch.arange(4, dtype=torch.float64) * math.pi / 2
    total = torch.zeros_like(moment)
    grids = torch.cartesian_prod(*[angles] * half).view(-1, half) if half else torch.zeros(1, 0, dtype=torch.float64)
    for grid in grids:
        both = torch.cat([grid, grid])
        # Rows of the identity, turned: the matrix R with q R = the turned q.
        rotation = rotate_halves(torch.eye(dim, dtype=torch.float64), both.cos(), both.sin())
        total += rotation.mT @ moment @ rotation
    averaged = average_over_rotations(moment, rotary_dims)
    torch.testing.assert_close(averaged, total / len(grids), rtol=1e-12, atol=1e-12)
    # What has been averaged is the same after any further rotation.
    more = torch.rand(half, dtype=torch.float64).repeat(2)
    rotation = rotate_halves(torch.eye(dim, dtype=torch.float64), more.cos(), more.sin())
    torch.testing.assert_close(rotation.mT @ averaged @ rotation, averaged, rtol=1e-12, atol=1e-12)


# --- moments ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _sums_by_hand(source: GPTNeoXForCausalLM, layer: int) -> AttentionMoments:
    """The docstring's sums, pair by pair."""
    config, attention = source.config, source.gpt_neox.layers[layer].attention
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    seen: list[torch.Tensor] = []
    handle = attention.query_key_value.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    ids = torch.stack([_blocks()[i]["input_ids"] for i in range(3)])
    cos, sin = source.gpt_neox.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(TOKENS)[None])
    source(ids)
    handle.remove()
    (hidden,) = seen
    d = config.hidden_size
    tokens = torch.einsum("btd,bte->de", hidden, hidden) / (3 * TOKENS)
    averages, queries, values = torch.zeros(d, d).double(), torch.zeros(heads, dim, dim).double(), torch.zeros(heads)
    values = values.double()
    states = attention.query_key_value(hidden).view(3, TOKENS, heads, 3, dim)
    count = 0
    for row in range(3):
        for i in range(WINDOW, TOKENS):
            count += 1
            for head in range(heads):
                output = attention.dense.weight[:, head * dim : (head + 1) * dim]
                q, k, v = states[row, :, head].unbind(1)
                q = q * dim**-0.5
                scores = rotate_halves(q, cos[0], sin[0])[i] @ rotate_halves(k, cos[0], sin[0])[: i + 1].mT
                p = scores.softmax(-1)
                out = p @ v[: i + 1]
                average = sum(p[j] * hidden[row, j] for j in range(i - WINDOW + 1))
                averages += torch.outer(average, average)
                for j in range(i - WINDOW + 1):
                    turn = (output @ (v[j] - out)).square().sum()
                    queries[head] += p[j] ** 2 * turn * torch.outer(q[i], q[i])
                    values[head] += p[j] ** 2
    return AttentionMoments(tokens, averages / (count * heads), queries / count, values / count)


def test_moments_are_the_sums(source: GPTNeoXForCausalLM, moments: list[AttentionMoments]) -> None:
    assert len(moments) == source.config.num_hidden_layers
    expected = _sums_by_hand(source, 1)
    for name in ("tokens", "far_averages", "queries", "values"):
        found = getattr(moments[1], name)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, getattr(expected, name), rtol=1e-6, atol=1e-9, msg=lambda m, n=name: n + m)


def test_moments_do_not_depend_on_the_batch_and_leave_no_hooks(source: GPTNeoXForCausalLM) -> None:
    one, three = (collect_moments(source, _blocks(), window=WINDOW, batch_size=n, quiet=True) for n in (1, 3))
    for a, b in zip(one, three, strict=True):
        torch.testing.assert_close(a.far_averages, b.far_averages)
        torch.testing.assert_close(a.queries, b.queries)
    assert not any(module._forward_hooks for module in source.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_in_other_dtypes(dtype: torch.dtype, moments: list[AttentionMoments]) -> None:
    model = tiny_model("gpt_neox", dtype=dtype)
    found = collect_moments(model, _blocks(), window=WINDOW, queries_per_block=TOKENS, quiet=True)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    error = (found[0].far_averages - moments[0].far_averages).norm() / moments[0].far_averages.norm()
    assert error < tolerance and found[0].far_averages.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": TOKENS}, "hold none beyond a window of 24"),
        ({"window": -1}, "window must be positive, got -1"),
        ({"window": 2, "batch_size": 0}, "batch_size must be positive, got 0"),
        ({"window": 2, "queries_per_block": 0}, "queries_per_block must be positive"),
    ],
)
def test_moments_refuse(source: GPTNeoXForCausalLM, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect_moments(source, _blocks(), quiet=True, **options)


# --- weights of a layer ----------------------------------------------------------------------------------------------


def test_layout_of_the_fused_projection(source: GPTNeoXForCausalLM, moments: list[AttentionMoments]) -> None:
    """Rows are `[heads, 3, head dim]`: the solution reads keys and values, and queries have no part in it."""
    attention, config = source.gpt_neox.layers[0].attention, source.config
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    weight, dense = attention.query_key_value.weight.detach(), attention.dense.weight.detach()
    options = {"heads": heads, "rotary_dims": 4}
    down, up = bottleneck_weights(weight, dense, moments[0], 6, **options)
    assert down.shape == (6, 32) and up.shape == (32, 6)

    queries = average_over_rotations(moments[0].queries, 4)
    parts = []
    for head in range(heads):
        rows = weight[3 * dim * head : 3 * dim * (head + 1)]
        key, value = rows[dim : 2 * dim], rows[2 * dim :]
        output = dense[:, dim * head : dim * (head + 1)]
        # Any square roots do, as only the products of the parts with themselves count.
        parts += [key.mT @ torch.linalg.cholesky(queries[head]), moments[0].values[head].sqrt() * value.mT @ output.mT]
    moment = moments[0].far_averages
    moment = moment + SHRINKAGE * moment.diagonal().mean() * torch.eye(32, dtype=torch.float64)
    expected = weighted_low_rank(moment, torch.cat(parts, 1), 6)
    torch.testing.assert_close(down.mT @ up.mT, expected[0] @ expected[1], rtol=1e-7, atol=1e-7)

    changed = weight.view(heads, 3, dim, -1).clone()
    changed[:, 0] += 1
    again = bottleneck_weights(changed.view_as(weight), dense, moments[0], 6, **options)
    torch.testing.assert_close(again[0], down)
    changed[:, 2] += torch.randn_like(changed[:, 2])
    other = bottleneck_weights(changed.view_as(weight), dense, moments[0], 6, **options)
    assert not torch.allclose(other[0], down)


def test_svd_and_pca(source: GPTNeoXForCausalLM, moments: list[AttentionMoments]) -> None:
    attention = source.gpt_neox.layers[0].attention
    weight, dense = attention.query_key_value.weight.detach(), attention.dense.weight.detach()
    options = {"heads": 4, "rotary_dims": 4}
    down, up = bottleneck_weights(weight, dense, None, 6, method="svd", **options)
    pairs = weight.view(4, 3, 8, 32)[:, 1:].reshape(-1, 32)
    kept = torch.linalg.svd(pairs).Vh[:6]
    torch.testing.assert_close(down.mT @ up.mT, kept.mT @ kept, rtol=1e-9, atol=1e-9)

    down, up = bottleneck_weights(weight, dense, moments[0], 6, method="pca", **options)
    torch.testing.assert_close(up, down.mT)
    energy = torch.linalg.eigvalsh(moments[0].tokens)
    assert float((down @ moments[0].tokens @ up).trace()) == pytest.approx(float(energy[-6:].sum()), rel=1e-9)


def test_what_needs_text() -> None:
    assert needs_moments("weighted", 8, 32) and needs_moments("pca", 8, 32)
    assert not needs_moments("svd", 8, 32) and not needs_moments("weighted", 32, 32)


# --- models ----------------------------------------------------------------------------------------------------------


def _output_error(source: GPTNeoXForCausalLM, model: DARForCausalLM) -> float:
    """What the first layer's attention loses, on text it was not calibrated on."""
    ids = random_ids(8, TOKENS, seed=9)
    seen: list[torch.Tensor] = []
    hooks = [
        m.gpt_neox.layers[0].attention.register_forward_hook(lambda module, args, out: seen.append(out[0][:, WINDOW:]))
        for m in (source, model)
    ]
    with torch.no_grad():
        source(ids, use_cache=False)
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return float((seen[1] - seen[0]).norm() / seen[0].norm())


def test_weighted_loses_least(source: GPTNeoXForCausalLM) -> None:
    moments = collect_moments(source, _blocks(40), window=WINDOW, quiet=True)
    errors = {}
    for method in METHODS:
        model = _dar(source, 8)
        initialise_bottlenecks(model, moments, method=method)
        errors[method] = _output_error(source, model)
    assert errors["weighted"] < 0.9 * min(errors["svd"], errors["pca"])
    assert errors["weighted"] > 0.01  # and the far path is there at all


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_full_size_is_gpt_neox(method: str, dtype: torch.dtype) -> None:
    source = tiny_model("gpt_neox", dtype=dtype)
    model = _dar(source, 32)
    initialise_bottlenecks(model, None, method=method)
    attention = model.gpt_neox.layers[0].attention
    product = attention.bottleneck_up.weight @ attention.bottleneck_down.weight
    torch.testing.assert_close(product, torch.eye(32, dtype=dtype), rtol=0, atol=1e-6)
    ids = random_ids(2, TOKENS)
    with torch.no_grad():
        expected, found = source(ids).logits, model(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_model_refusals(source: GPTNeoXForCausalLM, moments: list[AttentionMoments]) -> None:
    model = _dar(source, 8)
    with pytest.raises(ValueError, match="method must be one of weighted, svd, pca, got 'random'"):
        initialise_bottlenecks(model, moments, method="random")
    with pytest.raises(ValueError, match="needs the moments"):
        initialise_bottlenecks(model, None)
    with pytest.raises(ValueError, match="3 layers, and there are moments of 2"):
        initialise_bottlenecks(model, moments[:2])
    config = dar_config(source.config, bottleneck_size=8, window_size=WINDOW)
    config.bottleneck_activation = "sigmoid"
    with pytest.raises(ValueError, match="squashed bottleneck"):
        initialise_bottlenecks(DARForCausalLM(config), moments)
    config.bottleneck_activation, config.window_size = None, None
    with pytest.raises(ValueError, match="window_size=None"):
        initialise_bottlenecks(DARForCausalLM(config), moments)
    attention = source.gpt_neox.layers[0].attention
    for size in (0, 33):
        with pytest.raises(ValueError, match=f"between 1 and the hidden size 32, got {size}"):
            bottleneck_weights(
                attention.query_key_value.weight, attention.dense.weight, moments[0], size, heads=4, rotary_dims=4
            )
