"""Attention of a chunk behind a cache, in two parts without a mask, against one softmax with a mask."""

import pytest
import torch

from nearfar.modeling import chunk_attention as module
from nearfar.modeling.chunk_attention import chunk_attention, chunk_attention_available
from nearfar.modeling.received_attention import highest_attention, received_attention

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCALING = 0.3


def states(batch, heads, key_heads, new, past, dim, dtype=torch.float64, device="cpu", seed=0):
    """Queries, past keys and values, own keys and values."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(heads, new), (key_heads, past), (key_heads, past), (key_heads, new), (key_heads, new)]
    made = [torch.randn(batch, *size, dim, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.to(device, dtype) for x in made]


def masked(query, past_keys, past_values, keys, values, scaling=SCALING):
    """The definition, in float64 on the states' device, a few heads at a time."""
    group, (new, past) = query.shape[1] // keys.shape[1], (query.shape[2], past_keys.shape[2])
    key, value = torch.cat([past_keys, keys], 2), torch.cat([past_values, values], 2)
    visible = torch.ones(new, past + new, dtype=torch.bool, device=query.device).tril(past)
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head].double() @ key[:, head // group].double().mT * scaling
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        heads.append(weights @ value[:, head // group].double())
    return torch.stack(heads, 1)


def relative(mine, exact):
    return float((mine.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("heads, key_heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("new, past", [(1, 0), (1, 1), (1, 30), (7, 0), (7, 3), (7, 7), (7, 40), (33, 90)])
@pytest.mark.parametrize("dim", [8, 5])
def test_equals_the_mask(heads, key_heads, new, past, dim):
    inputs = states(2, heads, key_heads, new, past, dim)
    assert chunk_attention_available(inputs[0], inputs[4])
    for many in (False, True):
        out = chunk_attention(*inputs, SCALING, many=many)
        torch.testing.assert_close(out, masked(*inputs), atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_other_dtypes_and_strides(dtype, limit):
    query, *rest = states(1, 4, 2, 9, 50, 16, dtype)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # as projections leave it
    padded = [torch.cat([x, x], 2)[:, :, : x.shape[2]] for x in rest]  # the front of a longer buffer
    out = chunk_attention(query, *padded, SCALING)
    assert out.dtype == dtype and relative(out, masked(query, *rest)) < limit


def test_large_scores_neither_overflow_nor_vanish():
    query, *rest = states(1, 2, 1, 5, 20, 8)
    for factor in (1e3, -1e3):  # the past, or the chunk, has all of the weight
        past = [rest[0] * 0 + factor * query[:, :1, :1], rest[1]]
        out = chunk_attention(query, *past, *rest[2:], SCALING)
        assert bool(torch.isfinite(out).all())
        torch.testing.assert_close(out, masked(query, *past, *rest[2:]), atol=1e-10, rtol=0)


def test_what_has_no_kernel():
    query, value = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8)
    assert not chunk_attention_available(query, torch.ones(1, 2, 3, 4))  # values of another size
    assert not chunk_attention_available(query, value.double())
    assert not chunk_attention_available(query.to("meta"), value.to("meta"))


@cuda
def test_what_has_no_kernel_on_cuda():
    for dtype, dim in [(torch.float32, 64), (torch.float64, 64), (torch.bfloat16, 60), (torch.bfloat16, 264)]:
        query = torch.ones(1, 2, 3, dim, dtype=dtype, device="cuda")
        assert not chunk_attention_available(query, query)


@cuda
@pytest.mark.parametrize("dtype, limit", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("heads, key_heads, dim", [(8, 2, 128), (4, 4, 64), (4, 1, 80), (2, 1, 256)])
@pytest.mark.parametrize("new, past", [(1, 700), (200, 200), (333, 1001), (64, 0), (130, 17_001)])
@pytest.mark.parametrize("many", [False, True])
def test_equals_the_mask_on_cuda(dtype, limit, heads, key_heads, dim, new, past, many):
    """With 17,001 keys and `many`, cuDNN's kernel where it serves: a length that no tile divides."""
    inputs = states(1, heads, key_heads, new, past, dim, dtype, "cuda")
    inputs[0] = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert chunk_attention_available(inputs[0], inputs[4])
    scaling = dim**-0.5
    out = chunk_attention(*inputs, scaling, many=many)
    assert out.dtype == dtype and out.shape == inputs[0].shape
    assert relative(out, masked(*inputs, scaling)) < limit


@cuda
def test_cudnn_is_chosen_for_many_calls_behind_a_long_past(monkeypatch):
    inputs = states(1, 8, 2, 100, 17_000, 128, torch.bfloat16, "cuda")
    if not module._cudnn_serves(inputs[0], inputs[1]):
        pytest.skip("needs cuDNN 9.15.1 on Hopper or later")
    found = [module._past_attention(*inputs[:3], 0.1, many) for many in (True, False)]
    for mine, flash in zip(*found, strict=True):
        assert mine.shape == flash.shape
        assert relative(mine, flash.double()) < 8e-3
    monkeypatch.setattr(module, "full_attention", None)  # not called
    module._past_attention(*inputs[:3], 0.1, True)


# -- the largest probability ------------------------------------------------------------------------------------------


def check_highest(device, dtype, shape, tolerance):
    query, past, _, own, _ = states(*shape, dtype, device)
    keys = torch.cat([past, own], 2)
    found = highest_attention(query, keys, SCALING)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact, _ = received_attention(query.cpu().double(), keys.cpu().double(), SCALING, torch.arange(keys.shape[2]))
    torch.testing.assert_close(found.cpu().double(), exact, atol=tolerance, rtol=tolerance)


SHAPES = [(2, 4, 2, 150, 0, 24), (1, 4, 1, 33, 137, 8), (1, 2, 1, 1, 69, 16)]


@pytest.mark.parametrize("shape", SHAPES)
def test_highest_attention(shape):
    """Against the matrix of all probabilities."""
    query, past, _, own, _ = states(*shape)
    keys = torch.cat([past, own], 2)
    group = shape[1] // shape[2]
    visible = torch.ones(shape[3], keys.shape[2], dtype=torch.bool).tril(shape[4])
    scores = query @ keys.repeat_interleave(group, 1).mT * SCALING
    matrix = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = matrix.amax(2).unflatten(1, (shape[2], group)).amax(2)
    torch.testing.assert_close(highest_attention(query, keys, SCALING), expected, atol=1e-10, rtol=0)


@cuda
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float16, 1e-3), (torch.bfloat16, 1e-3)])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 8, 2, 700, 900, 128), (1, 4, 2, 2026, 2004, 64)])
def test_highest_attention_on_cuda(dtype, tolerance, shape):
    check_highest("cuda", dtype, shape, tolerance)
