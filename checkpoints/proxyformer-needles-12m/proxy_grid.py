"""Where the tokens of one forward pass lie: rows without padding, cut into generation blocks.

A row's sequence is what its current block holds already (its pending tokens) and the new tokens behind. Block 0 of a
pass is the row's current one.
"""

from dataclasses import dataclass

import torch

from .proxy_buffers import rows_tensor


@dataclass
class Rows:
    """New tokens of each row, in order and without padding.

    Args:
        ids: `(batch, longest)`; behind a row's end they have no meaning.
        counts: real new tokens of each row.
        ranks: `(batch, columns)`, a column's place among its row's real tokens (of the nearest before it, for
            padding); `None` where column c holds token c.
    """

    ids: torch.Tensor
    counts: list[int]
    ranks: torch.Tensor | None = None


def read_rows(ids: torch.Tensor, mask: torch.Tensor | None, seen: int = 0, name: str = "attention_mask") -> Rows:
    """Take padding out of `(batch, columns)`.

    Args:
        ids: token ids.
        mask: `(batch, columns)` or `(batch, seen + columns)`, 1 for real tokens; or `None`.
        seen: columns a cache has seen before.
        name: of the mask, for messages.

    Raises:
        ValueError: a mask of another shape.
    """
    batch, columns = ids.shape
    if mask is None:
        return Rows(ids, [columns] * batch)
    fits = mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] in (columns, seen + columns)
    if not fits:
        cached = f" or ({batch}, {seen + columns}) with the cached tokens" if seen else ""
        raise ValueError(
            f"{name} must have shape ({batch}, {columns}){cached}, one number a token, got {tuple(mask.shape)}."
        )
    real = mask[:, mask.shape[1] - columns :].bool()
    if torch.compiler.is_exporting():
        # Without shapes that depend on values, columns stay as they are: right where all padding is on the right,
        # since nothing reads what lies behind it.
        right = (real[:, 1:] <= real[:, :-1]).all()
        torch._assert_async(right, f"{name}: an exported ProxyFormer takes padding on the right alone")
        return Rows(ids, [columns] * batch)
    return _without_padding(ids, real)


@torch.compiler.disable
def _without_padding(ids: torch.Tensor, real: torch.Tensor) -> Rows:
    """`read_rows` where there may be padding; shapes depend on values, which no graph can hold."""
    batch, columns = ids.shape
    if bool(real.all()):
        return Rows(ids, [columns] * batch)
    counts = real.sum(1).tolist()
    order = torch.argsort(~real, dim=1, stable=True)[:, : max(1, *counts)]
    ranks = (real.cumsum(1) - 1).clamp_(min=0)
    return Rows(ids.gather(1, order), counts, ranks)


def join_pending(pending: torch.Tensor | None, fill: list[int], rows: Rows) -> torch.Tensor:
    """Each row's sequence, `(batch, longest)`: its `fill[row]` pending ids, then its new ones."""
    if pending is None or not any(fill):
        return rows.ids
    if min(fill) == max(fill):
        return torch.cat([pending[:, : fill[0]], rows.ids], dim=1)
    longest = max(have + new for have, new in zip(fill, rows.counts, strict=True))
    place = torch.arange(longest, device=rows.ids.device)
    begin = rows_tensor(fill, rows.ids.device)[:, None]
    old = pending.gather(1, place.clamp(max=pending.shape[1] - 1).expand(len(fill), -1))
    new = rows.ids.gather(1, (place - begin).clamp(0, rows.ids.shape[1] - 1))
    return torch.where(place < begin, old, new)


@dataclass
class Grid:
    """Generation blocks that are computed in a pass, `blocks` of them for each row, `width` tokens each.

    Args:
        width: tokens a block; fewer than a generation block's where one short block is all there is.
        blocks: how many a row.
        first: `(batch,)` each row's first block, where the blocks are consecutive; else `None`.
        numbers: `(batch or 1, blocks)`, which block of its row each is.
        complete: whether these are all blocks of all rows, in order.
        only_last: whether they are each row's last block alone.
        tokens: `(batch, blocks · width)`, indices into the rows' sequences; `None` where grid place g holds token g,
            after padding on the right.
        places: `(batch, wanted)`, where on the grid each wanted column lies; `None` for the first columns in order.
    """

    width: int
    blocks: int
    first: list[int] | None
    numbers: torch.Tensor
    complete: bool
    only_last: bool
    tokens: torch.Tensor | None
    places: torch.Tensor | None

    def gather_ids(self, sequence: torch.Tensor) -> torch.Tensor:
        """`(batch, blocks · width)` ids; places behind a row's end hold any."""
        size = self.blocks * self.width
        if self.tokens is None:
            missing = size - sequence.shape[1]
            if not torch.compiler.is_exporting() and missing <= 0:  # an exported graph serves all lengths alike
                return sequence[:, :size]
            return torch.nn.functional.pad(sequence, (0, missing))
        return sequence.gather(1, self.tokens)


def make_grid(
    rows: Rows,
    fill: list[int],
    block: int,
    margin: int,
    wanted: torch.Tensor | None,
    keeps_last: bool,
    full_width: bool,
) -> Grid:
    """Choose the blocks that must be computed.

    Args:
        rows: the new tokens.
        fill: pending tokens of each row.
        block: tokens of a generation block.
        margin: how many blocks before a wanted one it depends on through raw tokens.
        wanted: `(batch, columns)`, bool, columns whose hidden states are asked for; `None` for all.
        keeps_last: whether each row's last block is needed too (for a cache).
        full_width: never a shorter block.
    """
    device, columns = rows.ids.device, rows.ids.shape[1] if rows.ranks is None else rows.ranks.shape[1]
    batch = len(fill)
    totals = [have + new for have, new in zip(fill, rows.counts, strict=True)]
    last = [max(total - 1, 0) // block for total in totals]
    highest = max(last)
    even = min(totals) == max(totals) and min(fill) == max(fill) and rows.ranks is None

    lists: list[list[int]] | None = None
    first: list[int] | None
    if wanted is not None and highest > 0:
        lists = _needed_blocks(rows, fill, block, margin, wanted, last, keeps_last)
        if all(row == list(range(row_last + 1)) for row, row_last in zip(lists, last, strict=True)):
            lists = None
    if lists is None:
        width = block if highest or full_width else max(1, *totals)
        numbers = torch.arange(highest + 1, device=device)[None]
        first, complete, tokens = [0] * batch, True, None
    else:
        width = block
        count = max(1, *(len(row) for row in lists))
        # Rows with fewer blocks repeat their last: computed twice, read once.
        padded = [(row + [row[-1] if row else 0] * count)[:count] for row in lists]
        numbers = torch.tensor(padded, device=device)
        consecutive = all(row == list(range(row[0], row[0] + len(row))) for row in lists if row)
        if consecutive and margin:  # raw tokens of the block before are looked for in the grid's block before
            starts = [row[0] if row else 0 for row in lists]
            numbers = rows_tensor(starts, device)[:, None] + torch.arange(count, device=device)
        first = [row[0] if row else 0 for row in lists] if consecutive else None
        complete = False
        places = (numbers[:, :, None] * block + torch.arange(block, device=device)).flatten(1)
        tokens = places.clamp(max=max(0, max(totals) - 1))

    if wanted is None and even and fill[0] == 0:
        where = None
    else:
        rank = torch.arange(columns, device=device)[None] if rows.ranks is None else rows.ranks
        # Columns of a row without real tokens may lie behind its last place, and have no meaning.
        place = (rank + rows_tensor(fill, device)[:, None]).clamp(max=(highest + 1) * block - 1)
        if complete:
            where = place.clamp(max=numbers.shape[1] * width - 1)
        else:
            table = torch.zeros(numbers.shape[0], highest + 2 + numbers.shape[1], dtype=torch.long, device=device)
            # Backwards, so that of a block that is there twice the first is found.
            order = torch.arange(numbers.shape[1] - 1, -1, -1, device=device)
            table.scatter_(1, numbers.flip(1), order.expand(numbers.shape[0], -1))
            where = table.gather(1, (place // block).clamp(max=highest)) * block + place % block
    only_last = numbers.shape[1] == 1 and (highest == 0 if lists is None else lists == [[end] for end in last])
    return Grid(width, numbers.shape[1], first, numbers, complete, only_last, tokens, where)


def _needed_blocks(
    rows: Rows,
    fill: list[int],
    block: int,
    margin: int,
    wanted: torch.Tensor,
    last: list[int],
    keeps_last: bool,
) -> list[list[int]]:
    """Blocks of each row that hold a wanted token, and those they depend on, in order."""
    device = wanted.device
    rank = torch.arange(wanted.shape[1], device=device)[None] if rows.ranks is None else rows.ranks
    number = (rank + rows_tensor(fill, device)[:, None]) // block
    hit = torch.zeros(len(fill), max(last) + 1, dtype=torch.uint8, device=device)
    number = number.clamp(max=max(last)).expand(len(fill), -1)
    hit.scatter_reduce_(1, number, wanted.to(torch.uint8), "amax")
    found = []
    for row, end in zip(hit.tolist(), last, strict=True):
        chosen = [index for index, here in enumerate(row[: end + 1]) if here]
        if keeps_last and (not chosen or chosen[-1] != end):
            chosen.append(end)
        if margin and chosen:
            chosen = list(range(max(0, chosen[0] - margin), chosen[-1] + 1))
        found.append(chosen)
    return found


def input_columns(hidden: torch.Tensor, grid: Grid | None, columns: int, wanted: torch.Tensor | None) -> torch.Tensor:
    """Hidden states of the input's columns, from where they lie on the grid."""
    places = None if grid is None else grid.places
    if wanted is not None:
        row, column = wanted.nonzero(as_tuple=True)
        return hidden[row, column if places is None else places.expand(hidden.shape[0], -1)[row, column]]
    if places is None:
        if torch.compiler.is_exporting():  # no question of whether it is whole: the graph serves both
            return hidden.index_select(1, torch.arange(columns, device=hidden.device))
        # The tensor itself where it is whole, so that gradients of what is returned can be asked for.
        return hidden if hidden.shape[1] == columns else hidden[:, :columns]
    index = places.expand(hidden.shape[0], -1)[..., None].expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, index)
