"""DAR attention by FlexAttention, for CUDA dtypes and head sizes without other kernels, and inside `torch.compile`."""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .attention_with_lse import has_kernels
from .dar_plan import AttentionPlan

# Without kernels, ordinary operations hold all scores at once: from this length on compiling FlexAttention is worth
# it.
FLEX_TOKENS = 1024
BLOCK = 128
_BEYOND = 1 << 40  # greater than any place
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

    mask = dar_block_mask(visible, tokens, window, ranks, plain=ids is None and padded is None, device=query.device)
    global _compiled
    attend: Any = flex_attention
    if not torch.compiler.is_compiling() and query.is_cuda:
        if _compiled is None:
            _compiled = torch.compile(flex_attention, dynamic=True)
        attend = _compiled
    keys, values = torch.cat([far_key, key], dim=2), torch.cat([far_value, value], dim=2)
    return attend(query, keys, values, block_mask=mask, scale=scaling)


def dar_block_mask(
    visible: Any, tokens: int, window: int, ranks: torch.Tensor | None, *, plain: bool, device: torch.device
) -> BlockMask:
    """Which blocks of queries see anything of which blocks of keys, far ones before near ones.

    Found from where blocks begin and end: to look at every query and key, as `create_block_mask` does, takes 19 GB for
    98,304 tokens.

    Args:
        visible: the mask itself, which is applied inside of blocks that are not seen in full.
        tokens: of the sequence, half of the keys.
        window: in tokens.
        ranks: `(batch, tokens)`, a token's place in its sequence; `None` where that is its index.
        plain: no padding and no packed sequences, so that a block can be seen in full.
        device: where the mask is made.
    """
    index = torch.arange(tokens, device=device)
    place = index[None] if ranks is None else ranks
    far = torch.arange(2 * tokens, device=device) < tokens
    queries = _in_blocks(index, tokens), _in_blocks(place, tokens)
    q_last = queries[0].amax(-1)[..., None]
    q_least, q_most = (reduced[..., None] for reduced in (queries[1].amin(-1), queries[1].amax(-1)))
    needed: Any = False
    full: Any = False
    for half in (far, ~far):
        keys, places = (_in_blocks(torch.cat([x, x], dim=-1), 2 * tokens, half) for x in (index, place))
        k_first, k_last = keys.amin(-1)[..., None, :], _largest(keys)[..., None, :]
        least, most = q_least - _largest(places)[..., None, :], q_most - places.amin(-1)[..., None, :]
        inside = (least.clamp(min=0) < window, most < window) if half is not far else (most >= window, least >= window)
        needed = needed | ((k_first < tokens) & (q_last >= k_first) & inside[0])
        whole = (keys < tokens).all(-1)[..., None, :] & (queries[0].amin(-1)[..., None] >= k_last)
        full = full | (whole & inside[1])
    if not plain:
        full = torch.zeros_like(needed)
    # Of the last queries' block there is a part only.
    full = full & ((q_last + 1) % BLOCK == 0)
    partial_blocks, full_blocks = _listed(needed & ~full), _listed(full)
    return BlockMask.from_kv_blocks(
        *partial_blocks, *full_blocks, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(tokens, 2 * tokens)
    )


def _listed(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `(rows, query blocks, key blocks)`: how many of each query block are set, and which, in order."""
    count = dense.sum(-1, dtype=torch.int32)
    order = dense.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return count[:, None], order.to(torch.int32)[:, None]


def _in_blocks(values: torch.Tensor, length: int, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """`(rows, blocks, BLOCK)`; places behind the end repeat the last one, and those not chosen are beyond all."""
    values = values.expand(1, -1) if values.ndim == 1 else values
    if chosen is not None:
        values = values.masked_fill(~chosen, _BEYOND)
    missing = -length % BLOCK
    if missing:
        last = values[:, -1:] if chosen is None else torch.full_like(values[:, -1:], _BEYOND)
        values = torch.cat([values, last.expand(-1, missing)], dim=1)
    return values.unflatten(1, (-1, BLOCK))


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """The largest number of each block that is chosen."""
    return blocks.masked_fill(blocks == _BEYOND, -1).amax(-1)
