"""Every attention path over ragged pairs, against the plain definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar.modeling.ragged_attention import (
    RaggedPairs,
    padded_attention,
    ragged_attention,
    reference_attention,
    segment_attention,
    varlen_attention,
)


def ragged_pairs(
    lengths: list[int], heads: int, q: int, *, dim: int = 8, spare: int = 2, seed: int = 0, device: str = "cpu"
) -> tuple[RaggedPairs, torch.Tensor]:
    """Segments of `lengths` pairs, the last q of each the new tokens' own, and the new tokens' columns."""
    generator = torch.Generator().manual_seed(seed)
    seen = max(lengths) + 7
    host = torch.tensor(lengths)
    starts = (host + spare).cumsum(0) - (host + spare)
    slots = int((host + spare).sum())
    columns = torch.full((slots,), -5, dtype=torch.int32)  # spare slots hold rubbish
    for start, length in zip(starts.tolist(), lengths, strict=True):
        old = torch.randperm(seen - q, generator=generator)[: length - q].sort().values
        columns[start : start + length] = torch.cat([old, torch.arange(seen - q, seen)]).int()
    keys = torch.randn(slots, dim, generator=generator, dtype=torch.float64) * 2
    values = torch.randn(slots, dim, generator=generator, dtype=torch.float64)
    keys[columns < 0], values[columns < 0] = float("nan"), float("nan")
    batch = len(lengths) // heads
    pairs = RaggedPairs(
        keys.to(device),
        values.to(device),
        columns.to(device),
        starts.to(device),
        host.to(device),
        host,
        batch,
        heads,
    )
    return pairs, torch.arange(seen - q, seen, device=device, dtype=torch.int32)


def queries(pairs: RaggedPairs, group: int, q: int, seed: int = 1) -> torch.Tensor:
    shape = (pairs.batch, pairs.heads * group, q, pairs.keys.shape[1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(pairs.keys.device)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    q=st.integers(1, 5),
    window=st.sampled_from([None, 1, 2, 6, 1000]),
)
def test_paths_agree_with_the_definition(data, batch: int, heads: int, group: int, q: int, window: int | None) -> None:
    size = batch * heads
    lengths = data.draw(st.lists(st.integers(q, q + 9), min_size=size, max_size=size))
    pairs, columns = ragged_pairs(lengths, heads, q)
    query = queries(pairs, group, q)
    expected = reference_attention(query, pairs, 0.3, columns, window)
    for path in (segment_attention, padded_attention, ragged_attention):
        got = path(query, pairs, 0.3, columns, window)
        assert got.shape == (batch, q, heads * group, 8)
        assert float((got - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("path", [padded_attention, segment_attention])
@pytest.mark.parametrize("window", [None, 4])
def test_small_blocks_of_queries(path, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfar.modeling.ragged_attention.MASK_ELEMENTS", 64)
    pairs, columns = ragged_pairs([9, 14, 11, 12], 2, 7)
    query = queries(pairs, 2, 7)
    expected = reference_attention(query, pairs, 0.3, columns, window)
    assert float((path(query, pairs, 0.3, columns, window) - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("path", [reference_attention, segment_attention, padded_attention])
def test_a_query_that_sees_nothing_gives_zero(path) -> None:
    pairs, _ = ragged_pairs([4, 6], 2, 1)
    pairs.keys[:4], pairs.values[:4] = float("nan"), float("nan")
    pairs.host_lengths[0] = 0
    pairs.lengths[0] = 0
    early = torch.tensor([-1, 100], dtype=torch.int32)  # the first query comes before every pair
    out = path(queries(pairs, 2, 2), pairs, 0.3, early, None)
    assert torch.isfinite(out).all()
    assert (out[:, 0] == 0).all()
    assert (out[:, 1, :2] == 0).all()  # head 0 holds nothing
    assert (out[:, 1, 2:] != 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q", [1, 5, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_varlen_on_cuda(dtype: torch.dtype, q: int, dim: int) -> None:
    pairs, columns = ragged_pairs([700, 90, 64, 1300, 333, 65], 3, q, dim=dim, device="cuda")
    query = queries(pairs, 4, q)
    pairs.keys, pairs.values, query = (x.to(dtype) for x in (pairs.keys, pairs.values, query))
    exact = RaggedPairs(**{**vars(pairs), "keys": pairs.keys.double(), "values": pairs.values.double()})
    expected = reference_attention(query.double(), exact, dim**-0.5, columns)
    for path in (varlen_attention(query, pairs, dim**-0.5), padded_attention(query, pairs, dim**-0.5, columns)):
        assert float((path.double() - expected).norm() / expected.norm()) < 1e-2
