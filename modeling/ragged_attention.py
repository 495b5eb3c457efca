"""Attention over key-value heads that hold different numbers of pairs.

Pairs live in flat buffers: segment `s = row * heads + head` owns the slots `starts[s] … starts[s] + lengths[s] - 1`,
in order of position. All functions here compute the same thing; `ragged_attention` picks one:

- `reference_attention`: explicit softmax, a loop over segments and queries; the definition, for tests;
- `segment_attention`: SDPA segment by segment without copying the pairs; for CPU;
- `varlen_attention`: one flash kernel over all segments; CUDA, half precision;
- `padded_attention`: pairs gathered into a rectangle, one masked SDPA; everything else.

A query sees the pairs of its own row and key-value head whose column (index in the row's sequence, padding included)
is not later than its own and, with a sliding window w, later than its own column - w. A query that sees none gives 0.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Elements of a boolean mask that is built at once; longer blocks of queries are cut.
MASK_ELEMENTS = 1 << 27


@dataclass
class RaggedPairs:
    """Key-value pairs of one layer.

    Attributes:
        keys: `(slots, head dim)`.
        values: `(slots, value dim)`.
        columns: `(slots,)`, int32, each pair's index in its row's sequence.
        starts: `(batch * heads,)`, int64, first slot of each segment.
        lengths: `(batch * heads,)`, int64, pairs in each segment.
        host_lengths: the same on the CPU.
        batch, heads: segments are numbered row by row, head by head.
    """

    keys: torch.Tensor
    values: torch.Tensor
    columns: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    host_lengths: torch.Tensor
    batch: int
    heads: int

    @property
    def max_length(self) -> int:
        return int(self.host_lengths.max())


def ragged_attention(
    query: torch.Tensor,
    pairs: RaggedPairs,
    scaling: float,
    query_columns: torch.Tensor,
    window: int | None = None,
    tail: bool = True,
) -> torch.Tensor:
    """Attention of new tokens over ragged pairs, by the fastest path that applies.

    Args:
        query: `(batch, query heads, q, head dim)`.
        pairs: what is kept, the new tokens' own pairs included.
        scaling: factor on query-key products.
        query_columns: `(q,)`, int, the queries' columns.
        window: sliding window in tokens, None for full attention.
        tail: the last q pairs of every segment are the queries' own, in order (no padding among the new tokens).

    Returns:
        `(batch, q, query heads, value dim)`, in the query's dtype.
    """
    if not query.is_cuda:
        return segment_attention(query, pairs, scaling, query_columns, window)
    if flash_takes(query, pairs.values) and window is None and (tail or query.shape[2] == 1):
        return varlen_attention(query, pairs, scaling)
    return padded_attention(query, pairs, scaling, query_columns, window)


def flash_takes(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether torch's flash kernel computes in this dtype and with these dimensions."""
    dims_match = query.shape[-1] == values.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    return dims_match and query.dtype in (torch.float16, torch.bfloat16)


def reference_attention(
    query: torch.Tensor,
    pairs: RaggedPairs,
    scaling: float,
    query_columns: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """The definition, slow and obvious; see `ragged_attention` for shapes."""
    batch, query_heads, q, _ = query.shape
    group = query_heads // pairs.heads
    output = query.new_zeros(batch, q, query_heads, pairs.values.shape[-1])
    for row in range(batch):
        for head in range(query_heads):
            segment = row * pairs.heads + head // group
            start, length = int(pairs.starts[segment]), int(pairs.lengths[segment])
            keys, values = pairs.keys[start : start + length], pairs.values[start : start + length]
            columns = pairs.columns[start : start + length]
            for i in range(q):
                seen = columns <= query_columns[i]
                if window is not None:
                    seen &= columns > query_columns[i] - window
                if seen.any():
                    logits = keys[seen] @ query[row, head, i] * scaling
                    output[row, i, head] = logits.softmax(0) @ values[seen]
    return output


def segment_attention(
    query: torch.Tensor,
    pairs: RaggedPairs,
    scaling: float,
    query_columns: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """One SDPA call a segment, its query heads as rows of one query matrix; no copy of keys or values."""
    batch, query_heads, q, dim = query.shape
    group = query_heads // pairs.heads
    grouped = query.reshape(batch * pairs.heads, group, q, dim)
    output = query.new_zeros(batch * pairs.heads, group, q, pairs.values.shape[-1])
    for segment, (start, length) in enumerate(zip(pairs.starts.tolist(), pairs.host_lengths.tolist(), strict=True)):
        if length == 0:
            continue
        held = slice(start, start + length)
        keys, values = pairs.keys[None, None, held], pairs.values[None, None, held]
        block = max(1, MASK_ELEMENTS // (group * length))
        for first in range(0, q, block):
            part = grouped[segment, :, first : first + block]
            mask = None
            if q > 1 or window is not None:
                mask = _visible(pairs.columns[held], query_columns[first : first + block], window).repeat(group, 1)
            rows = part.reshape(1, 1, -1, dim)
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
            if mask is not None:
                out = out.masked_fill(~mask.any(-1)[:, None], 0.0)
            output[segment, :, first : first + block] = out.view(group, part.shape[1], -1)
    return output.view(batch, query_heads, q, -1).transpose(1, 2)


def padded_attention(
    query: torch.Tensor,
    pairs: RaggedPairs,
    scaling: float,
    query_columns: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Pairs gathered to `(batch, heads, longest, dim)`, then masked SDPA over blocks of queries."""
    batch, query_heads, q, dim = query.shape
    heads, group, longest = pairs.heads, query_heads // pairs.heads, max(pairs.max_length, 1)
    offsets = torch.arange(longest, device=query.device)
    filled = offsets < pairs.lengths[:, None]
    # Past a segment's end its last pair is read again: spare slots may hold NaN, which no mask would hide.
    slots = pairs.starts[:, None] + torch.minimum(offsets, (pairs.lengths - 1).clamp(min=0)[:, None])
    slots = slots.clamp_(max=pairs.keys.shape[0] - 1)
    keys, values = pairs.keys[slots], pairs.values[slots]
    if bool((pairs.host_lengths == 0).any()):
        keys, values = (states.masked_fill(~filled[..., None], 0.0) for states in (keys, values))
    keys, values = (states.view(batch, heads, longest, -1) for states in (keys, values))
    columns = pairs.columns[slots].view(batch, heads, 1, longest)
    filled = filled.view(batch, heads, 1, longest)
    grouped = query.reshape(batch, heads, group, q, dim)
    block = max(1, MASK_ELEMENTS // (batch * heads * group * longest))
    outputs = []
    for first in range(0, q, block):
        here = query_columns[first : first + block]
        mask = _visible(columns, here, window) & filled
        mask = mask[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, heads, -1, longest)
        out = F.scaled_dot_product_attention(
            grouped[:, :, :, first : first + block].reshape(batch, heads, -1, dim),
            keys,
            values,
            attn_mask=mask,
            scale=scaling,
        )
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        outputs.append(out.view(batch, heads, group, here.shape[0], -1))
    return torch.cat(outputs, dim=3).reshape(batch, query_heads, q, -1).transpose(1, 2)


def varlen_attention(query: torch.Tensor, pairs: RaggedPairs, scaling: float) -> torch.Tensor:
    """torch's variable-length flash kernel: a sequence is a (row, key-value head), its heads the query group.

    The queries' own pairs must be the last q of every segment: the kernel's causal mask is aligned to the lower right.
    """
    batch, query_heads, q, dim = query.shape
    segments, group = batch * pairs.heads, query_heads // pairs.heads
    packed = query.view(batch, pairs.heads, group, q, dim).transpose(2, 3).reshape(segments * q, group, dim)
    query_offsets = torch.arange(0, segments * q + 1, q, dtype=torch.int32, device=query.device)
    end = pairs.starts.new_full((1,), pairs.keys.shape[0])
    offsets = torch.cat([pairs.starts, end]).int()
    output = flash_over_segments(
        packed, pairs.keys, pairs.values, query_offsets, offsets, q, pairs.max_length, pairs.lengths.int(), scaling
    )
    return output.view(batch, pairs.heads, q, group, -1).transpose(1, 2).reshape(batch, q, query_heads, -1)


def flash_over_segments(
    packed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_offsets: torch.Tensor,
    offsets: torch.Tensor,
    q: int,
    longest: int,
    lengths: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """The variable-length flash kernel, causal from the lower right.

    Args:
        packed: `(segments * q, query heads a key-value head, head dim)`.
        keys, values: buffers, `(slots, dim)`.
        query_offsets, offsets: `(segments + 1,)`, int32: where each segment's queries and slots begin, and their ends.
        q: queries of each segment.
        longest: pairs of the longest segment.
        lengths: `(segments,)`, int32, pairs of each.
        scaling: factor on query-key products.

    Returns:
        Like `packed`.
    """
    return torch.ops.aten._flash_attention_forward(
        packed,
        keys[:, None],
        values[:, None],
        query_offsets,
        offsets,
        q,
        longest,
        0.0,
        q > 1,
        False,
        scale=scaling,
        seqused_k=lengths,
    )[0]


def _visible(columns: torch.Tensor, query_columns: torch.Tensor, window: int | None) -> torch.Tensor:
    """`(…, q, n)`: which of `columns` `(…, n)` or `(…, 1, n)` each query column sees."""
    queries = query_columns[:, None]
    seen = columns <= queries
    if window is not None:
        seen &= columns > queries - window
    return seen
