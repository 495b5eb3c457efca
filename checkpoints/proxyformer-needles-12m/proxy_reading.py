"""How the generation stream reads: raw tokens of its own block, and the proxies of all blocks before (Eq. 19).

Queries lie on a grid of blocks, `(batch, heads, blocks · width, head dim)`. Raw tokens and proxies are attended to in
two separate softmaxes, whose results a gate adds up. A query that sees no proxy reads exactly zero.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

# Booleans of a mask that are in memory at a time.
MASK_NUMBERS = 1 << 28


def attend_own_block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int) -> torch.Tensor:
    """Causal attention inside each block.

    Args:
        query, key, value: `(batch, heads, blocks · width, head dim)`.
        width: tokens a block.

    Returns:
        `(batch, heads, blocks · width, head dim)`.
    """
    if query.shape[2] == width:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    # Blocks go beside the batch.
    batch, heads, tokens, dim = query.shape
    query, key, value = (
        x.reshape(batch, heads, -1, width, dim).transpose(1, 2).flatten(0, 1) for x in (query, key, value)
    )
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.view(batch, -1, heads, width, dim).transpose(1, 2).reshape(batch, heads, tokens, dim)


def attend_retained_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    width: int,
    retained: int,
    known: torch.Tensor,
) -> torch.Tensor:
    """Causal attention inside each block and to the blocks before it.

    Args:
        query: `(batch, heads, blocks · width, head dim)`.
        key, value: `(batch, heads, (retained + blocks) · width, head dim)`, the retained blocks first.
        width: tokens a block.
        retained: blocks before its own that a query sees.
        known: `(batch or 1,)`, how many of the first `retained` blocks of `key` are there (the last of them).

    Returns:
        `(batch, heads, blocks · width, head dim)`.
    """
    batch, heads, tokens, dim = query.shape
    blocks, span = tokens // width, (retained + 1) * width
    # (batch, heads, blocks, head dim, span) -> blocks beside the batch.
    key, value = (x.unfold(2, span, width).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (key, value))
    query = query.reshape(batch, heads, blocks, width, dim).transpose(1, 2).flatten(0, 1)
    place, slot = (torch.arange(n, device=query.device) for n in (width, span))
    causal = slot <= retained * width + place[:, None]
    before = (
        torch.arange(blocks, device=query.device) + known[:, None]
    )  # blocks there are before each, (batch, blocks)
    there = slot >= (retained - before.clamp(max=retained))[..., None] * width
    mask = (causal & there[:, :, None]).expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return out.view(batch, blocks, heads, width, dim).transpose(1, 2).reshape(batch, heads, tokens, dim)


@dataclass
class ProxyLevel:
    """Proxies of one ratio that a layer reads.

    Args:
        key, value: `(histories, heads, proxies, head dim)`.
        group: proxies of the finest level that one of these stands for.
        start: index, among all of this level, of the first one given; older ones are gone.
    """

    key: torch.Tensor
    value: torch.Tensor
    group: int = 1
    start: int = 0


@dataclass
class Visibility:
    """Which proxies the queries of a grid see, counted in proxies of the finest level.

    Args:
        counts: `(batch or 1, blocks)`, how many of the first proxies the queries of each block see; `None` where all
            queries see all proxies.
        valid: `(histories,)`, proxies of each history, where these differ and `counts` is `None`.
        step: the blocks are all those of a row in order, and each sees `step` more than the one before, the first
            none; 0 where that is not so.
    """

    counts: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    step: int = 0


def read_proxies(
    query: torch.Tensor,
    levels: list[ProxyLevel],
    seen: Visibility,
    width: int,
    distances: list[int] | None = None,
    sharpen_from: int | None = None,
) -> torch.Tensor:
    """Attention of the generation stream to proxies; zero where a query sees none.

    Args:
        query: `(batch, heads, blocks · width, head dim)`; the batch may be a multiple of the histories, G rows one
            after the other reading the same one.
        levels: of proxies, the finest first.
        seen: see there.
        width: tokens a block.
        distances: for each level but the first, from how many proxies (of the finest level) back it is read.
        sharpen_from: queries that see n proxies, more than this many, are multiplied by log n / log `sharpen_from`.

    Returns:
        `(batch, heads, blocks · width, head dim)`.
    """
    dtype, device = query.dtype, query.device
    if levels[0].key.dtype != dtype:  # a cache filled under autocast, read outside it
        levels = [ProxyLevel(x.key.to(dtype), x.value.to(dtype), x.group, x.start) for x in levels]
    seen = Visibility(
        None if seen.counts is None else seen.counts.to(device),
        None if seen.valid is None else seen.valid.to(device),
        seen.step,
    )
    first = levels[0]
    if sharpen_from is not None:
        query = query * _sharpness(query, first, seen, width, sharpen_from)
    if len(levels) == 1 and first.start == 0:
        if seen.counts is None and seen.valid is None:
            return _read_all(query, first.key, first.value)
        if seen.step == 1 and query.shape[0] == first.key.shape[0]:
            return _read_block_causal(query, first.key, first.value, width)
    return _read_masked(query, levels, seen, width, distances or [])


def _sharpness(
    query: torch.Tensor, finest: ProxyLevel, seen: Visibility, width: int, reference: int
) -> torch.Tensor | float:
    """What queries `(batch, heads, blocks · width, head dim)` are multiplied by, a number or broadcastable to them.

    Among n proxies that have nothing to do with a query, the one that has needs a score higher by log n.
    """
    if seen.counts is not None:
        counts = seen.counts.repeat_interleave(width, dim=1)
    elif seen.valid is not None:
        counts = seen.valid.repeat_interleave(query.shape[0] // seen.valid.shape[0])[:, None]
    else:
        return max(1.0, math.log(max(1, finest.start + finest.key.shape[2])) / math.log(reference))
    factor = (counts.clamp(min=1).double().log() / math.log(reference)).clamp(min=1.0)
    return factor[:, None, :, None].to(query.dtype)


def _read_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if key.shape[2] == 0:
        return torch.zeros_like(query)
    folded = _fold_rows(query, key.shape[0])
    return _unfold_rows(F.scaled_dot_product_attention(folded, key, value), query.shape)


def _fold_rows(x: torch.Tensor, histories: int) -> torch.Tensor:
    """Rows that read one history, one after the other along the tokens: `(histories, heads, G · tokens, head dim)`."""
    batch, heads, tokens, dim = x.shape
    if batch == histories:
        return x
    return x.reshape(histories, -1, heads, tokens, dim).transpose(1, 2).reshape(histories, heads, -1, dim)


def _unfold_rows(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    batch, heads, tokens, dim = shape
    if x.shape[0] == batch:
        return x
    return x.reshape(x.shape[0], heads, -1, tokens, dim).transpose(1, 2).reshape(shape)


def _read_block_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int) -> torch.Tensor:
    """Block b sees proxies 0 … b - 1: square causal attention of blocks 1 … n - 1 over proxies 0 … n - 2.

    A block's tokens become query heads that share a key-value head, so that no mask is needed.
    """
    batch, heads, tokens, dim = query.shape
    blocks = tokens // width
    if blocks < 2:
        return torch.zeros_like(query)
    key, value = key[:, :, : blocks - 1], value[:, :, : blocks - 1]
    grouped = query.reshape(batch, heads, blocks, width, dim)[:, :, 1:].transpose(2, 3).flatten(1, 2)
    out = F.scaled_dot_product_attention(grouped, key, value, is_causal=True, enable_gqa=True)
    out = out.view(batch, heads, width, blocks - 1, dim).transpose(2, 3)
    return F.pad(out, (0, 0, 0, 0, 1, 0)).reshape(query.shape)


def _read_masked(
    query: torch.Tensor, levels: list[ProxyLevel], seen: Visibility, width: int, distances: list[int]
) -> torch.Tensor:
    key = torch.cat([level.key for level in levels], dim=2)
    value = torch.cat([level.value for level in levels], dim=2)
    if key.shape[2] == 0:
        return torch.zeros_like(query)
    batch, histories = query.shape[0], key.shape[0]
    folded = _fold_rows(query, histories)
    blocks = folded.shape[2] // width
    if seen.counts is None:
        total = levels[0].start + levels[0].key.shape[2]
        valid = torch.full((1,), total, device=query.device) if seen.valid is None else seen.valid
        counts = valid[:, None].expand(-1, blocks)
    elif histories != batch:
        counts = seen.counts.expand(batch, -1).reshape(histories, -1)
    else:
        counts = seen.counts
    numbers = counts.shape[0] * width * key.shape[2]
    step = max(1, MASK_NUMBERS // max(1, numbers))
    parts = []
    for begin in range(0, counts.shape[1], step):
        chunk = counts[:, begin : begin + step]
        mask = visible_proxies(chunk, levels, distances)  # (batch or 1, blocks, proxies)
        some = mask.any(-1, keepdim=True)
        mask = (mask | ~some).repeat_interleave(width, dim=1)[:, None]
        rows = folded[:, :, begin * width : (begin + chunk.shape[1]) * width]
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
        parts.append(torch.where(some.repeat_interleave(width, dim=1)[:, None], out, 0.0))
    return _unfold_rows(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2), query.shape)


def visible_proxies(counts: torch.Tensor, levels: list[ProxyLevel], distances: list[int]) -> torch.Tensor:
    """The definition of what is seen: `(batch or 1, blocks, proxies of all levels)`, bool.

    A reader that sees the first `n` proxies of the finest level reads level k (k ≥ 1) up to the last whole group that
    ends `distances[k - 1]` or more before `n`, and each level from where the next coarser one ends.
    """
    ends = level_ends(counts, levels, distances)
    masks = []
    for index, level in enumerate(levels):
        last = levels[index + 1].group if index + 1 < len(levels) else 0
        begin = ends[index + 1] if last else torch.zeros_like(counts)
        place = (torch.arange(level.key.shape[2], device=counts.device) + level.start) * level.group
        masks.append((place >= begin[..., None]) & (place + level.group <= ends[index][..., None]))
    return torch.cat(masks, dim=-1)


def level_ends(counts: torch.Tensor, levels: list[ProxyLevel], distances: list[int]) -> list[torch.Tensor]:
    """Where each level ends, in proxies of the finest one, for readers that see `counts` of these."""
    ends = [counts]
    for level, distance in zip(levels[1:], distances, strict=True):
        ends.append((counts - distance).clamp(min=0) // level.group * level.group)
    return ends
