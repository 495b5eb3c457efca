"""DAR attention by FlexAttention, for CUDA dtypes and head sizes without other kernels, and inside `torch.compile`."""

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .attention_with_lse import has_kernels
from .dar_plan import AttentionPlan

# Without kernels, ordinary operations hold all scores at once: from this length on compiling FlexAttention is worth
# it.
FLEX_TOKENS = 1024
_compiled = None


def flex_serves(query: torch.Tensor) -> bool:
    """Whether FlexAttention is of use here: on a GPU, below float64. On a CPU it has no backward pass."""
    return query.is_cuda and query.dtype != torch.float64


def prefers_flex(query: torch.Tensor, implementation: str | None) -> bool:
    """Whether FlexAttention is to be used where the two paths could be: asked for, or the best there is."""
    if not flex_serves(query):
        return False
    return implementation == "flex_attention" or (not has_kernels(query) and query.shape[2] > FLEX_TOKENS)


def flex_dar_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far_key: torch.Tensor,
    far_value: torch.Tensor,
    window: int,
    scaling: float,
    plan: AttentionPlan,
) -> torch.Tensor:
    """One softmax over the far keys followed by the near ones, of which a query sees one of each pair.

    Args and result as in `dar_attention`, with far keys and values given. Blocks that no query sees are skipped, so
    the work is that of one causal attention and a window.
    """
    tokens = query.shape[2]
    ranks, ids, real = plan.ranks, plan.sequence_ids, plan.real
    padded = real if ids is None else None

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        is_near = k >= tokens
        j = torch.where(is_near, k - tokens, k)
        distance = q - j if ranks is None else ranks[b, q] - ranks[b, j]
        seen = (q >= j) & torch.where(is_near, distance < window, distance >= window)
        if ids is not None:
            seen = seen & (ids[b, q] == ids[b, j])
        if padded is not None:
            # A padding query sees itself: a row of the softmax must see something.
            seen = seen & (padded[b, j] | (q == j))
        return seen

    rows = query.shape[0] if plan.real is not None else None
    mask = create_block_mask(visible, rows, None, tokens, 2 * tokens, device=query.device)
    global _compiled
    attend: Any = flex_attention
    if not torch.compiler.is_compiling() and query.is_cuda:
        if _compiled is None:
            _compiled = torch.compile(flex_attention, dynamic=True)
        attend = _compiled
    keys, values = torch.cat([far_key, key], dim=2), torch.cat([far_value, value], dim=2)
    return attend(query, keys, values, block_mask=mask, scale=scaling)
