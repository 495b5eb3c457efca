"""What a `ProxyCache` remembers of its rows' token ids and lengths from one pass to the next."""

from typing import Any

import torch

from .proxy_buffers import rows_tensor
from .proxy_generation import last_on_grid
from .proxy_grid import Grid, Rows


def last_ids(ids: torch.Tensor, counts: list[int], stem: int) -> torch.Tensor:
    """The last `stem` ids of each row `(batch, stem)`, -1 where there are none."""
    place = torch.arange(stem, device=ids.device) - stem + rows_tensor(counts, ids.device)[:, None]
    found = ids.gather(1, place.clamp(0, ids.shape[1] - 1))
    return torch.where(place >= 0, found, -1)


def note_context(cache: Any, ids: torch.Tensor, counts: list[int]) -> None:
    """Remember the last ids of `(batch, longest)`, of which each row has `counts[row]`."""
    stem = cache.context.shape[1]
    if stem == 0:
        return
    joined = torch.cat([cache.context, ids], dim=1)
    place = torch.arange(stem, device=ids.device) + rows_tensor(counts, ids.device)[:, None]
    cache.context = joined.gather(1, place)


def with_context(
    ids: torch.Tensor, real: torch.Tensor | None, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Blocks with the tokens before them in front, and which of all these are there."""
    if real is None:
        real = torch.ones_like(ids, dtype=torch.bool)
    return torch.cat([context.clamp(min=0), ids], dim=1), torch.cat([context >= 0, real], dim=1), context.shape[1]


def note_tokens(
    cache: Any,
    sequence: torch.Tensor,
    rows: Rows,
    fill: list[int],
    known: list[int],
    last: list[int],
    grid: Grid,
    block: int,
    retained: int,
    step: bool,
) -> None:
    """Bring a cache's record of its rows up to date."""
    begins = [number * block for number in last]
    note_context(cache, sequence, begins)
    totals = [have + new for have, new in zip(fill, rows.counts, strict=True)]
    place = torch.arange(block, device=sequence.device) + rows_tensor(begins, sequence.device)[:, None]
    cache.pending = sequence.gather(1, place.clamp(max=sequence.shape[1] - 1))
    cache.fill = [total - begin for total, begin in zip(totals, begins, strict=True)]
    cache.lengths = [have + new for have, new in zip(cache.lengths, rows.counts, strict=True)]
    if retained:
        computed = last if step else last_on_grid(grid, last)
        starts = [0] * len(last) if step or grid.first is None else grid.first
        cache.retained = [
            min(retained, (before if start == 0 else 0) + done)
            for before, done, start in zip(known, computed, starts, strict=True)
        ]
