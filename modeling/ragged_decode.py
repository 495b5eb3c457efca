"""Attention of one new token a row over all pairs of its row and key-value head: `ragged_attention` for decode steps.

Everything that is kept lies before the token, so neither columns nor masks of them are needed, and lengths come from
the `AppendPlan`. The paths are those of `ragged_attention`.
"""

import torch
import torch.nn.functional as F

from .append_plan import AppendPlan
from .ragged_attention import flash_over_segments, flash_takes


def decode_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AppendPlan, scaling: float
) -> torch.Tensor:
    """Attention of the newest token over its segment, by the fastest path that applies.

    Args:
        query: `(batch, query heads, 1, head dim)`.
        keys, values: the store's buffers, `(slots, dim)`, the new token's own pairs included.
        plan: the layout; no segment is empty.
        scaling: factor on query-key products.

    Returns:
        `(batch, 1, query heads, value dim)`, in the query's dtype.
    """
    if not query.is_cuda:
        return segment_decode(query, keys, values, plan, scaling)
    if flash_takes(query, values):
        return varlen_decode(query, keys, values, plan, scaling)
    return padded_decode(query, keys, values, plan, scaling)


def segment_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AppendPlan, scaling: float
) -> torch.Tensor:
    """One SDPA call a segment, its query heads as rows of one query matrix; no copy of keys or values."""
    batch, query_heads, _, dim = query.shape
    grouped = query.reshape(len(plan.starts), 1, 1, -1, dim)
    outputs = []
    for rows, start, length in zip(grouped.unbind(), plan.starts, plan.lengths, strict=True):
        held, theirs = keys[start : start + length], values[start : start + length]
        outputs.append(F.scaled_dot_product_attention(rows, held[None, None], theirs[None, None], scale=scaling))
    return torch.cat(outputs, dim=2).view(batch, 1, query_heads, -1)


def varlen_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AppendPlan, scaling: float
) -> torch.Tensor:
    """torch's variable-length flash kernel, one launch."""
    batch, query_heads, _, dim = query.shape
    segments = len(plan.starts)
    packed = query.reshape(segments, query_heads // plan.heads, dim)
    offsets, query_offsets = plan.offsets()
    output = flash_over_segments(
        packed, keys, values, query_offsets, offsets, 1, plan.longest, plan.device_lengths(), scaling
    )
    return output.view(batch, 1, query_heads, -1)


def padded_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AppendPlan, scaling: float
) -> torch.Tensor:
    """Pairs gathered to `(batch, heads, longest, dim)`, then one masked SDPA."""
    batch, query_heads, _, dim = query.shape
    group, longest = query_heads // plan.heads, plan.longest
    starts, places = plan.places()
    # Past a segment's end its last pair is read again: spare slots may hold NaN, which no mask would hide.
    slots = torch.minimum(starts + places, plan.last_slots()[:, None])
    shape = (batch, plan.heads, longest, -1)
    filled = (places < plan.device_lengths()[:, None]).view(batch, plan.heads, 1, longest)
    output = F.scaled_dot_product_attention(
        query.reshape(batch, plan.heads, group, dim),
        keys[slots].view(shape),
        values[slots].view(shape),
        attn_mask=filled.expand(-1, -1, group, -1),
        scale=scaling,
    )
    return output.reshape(batch, 1, query_heads, -1)
