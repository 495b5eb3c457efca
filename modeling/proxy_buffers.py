"""Growing stores of a `ProxyCache`: rows of one batch that hold different numbers of entries."""

from collections.abc import Sequence
from typing import Any

import torch

SPARE = 1.25  # how much more than needed is reserved
LEAST = 16


def rows_tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """One whole number a row, `(rows,)`; without waiting for a GPU where they are equal."""
    if values and min(values) == max(values):
        return torch.full((len(values),), values[0], device=device)
    return torch.tensor(values, dtype=torch.long, device=device)


class RaggedBuffer:
    """Entries `(rows, heads, entries, dim)`, appended at each row's own end.

    Several rows of a batch may share one stored row (a prompt's beams, many questions about one text), until
    something is appended.

    Attributes:
        counts: entries of each stored row, trimmed ones included.
        start: entries trimmed from the front of every row.
        repeats: rows of the batch that share a stored row, one after the other.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.data: torch.Tensor | None = None
        self.counts: list[int] = []
        self.start = 0
        self.repeats = 1

    @property
    def longest(self) -> int:
        """Entries of the longest row, trimmed ones included."""
        return max(self.counts, default=0)

    @property
    def even(self) -> bool:
        """Whether all rows hold the same number."""
        return min(self.counts, default=0) == self.longest

    def view(self) -> torch.Tensor | None:
        """What is held, `(stored rows, heads, longest - start, dim)`; behind a row's end it has no meaning."""
        return None if self.data is None else self.data[:, :, : self.longest - self.start]

    def valid(self) -> torch.Tensor | None:
        """`(stored rows, longest - start)`, which entries are there; `None` if all are."""
        if self.data is None or self.even:
            return None
        counts = rows_tensor(self.counts, self.data.device)
        return torch.arange(self.start, self.longest, device=self.data.device) < counts[:, None]

    def append(self, new: torch.Tensor, counts: list[int] | None = None) -> None:
        """Append the first `counts[row]` of `new` `(batch, heads, n, dim)` to each row (all of them if `None`)."""
        new = new.detach()
        batch, heads, many, dim = new.shape
        self.own_rows()
        if self.data is None:
            self.counts = [0] * batch
            self.data = new.new_zeros(batch, heads, 0, dim)
        new = new.to(self.data.dtype)
        added = [many] * batch if counts is None else counts
        ends = [have + more for have, more in zip(self.counts, added, strict=True)]
        # Rows that get fewer are written over by their next ones, so that room for all of `new` is needed.
        room = max(have + many for have in self.counts) - self.start
        if room > self.data.shape[2]:
            # What comes first, a prompt, is often all there is; what is added to will be added to again.
            size = room if not self.data.shape[2] else max(int(room * SPARE), LEAST)
            grown = new.new_zeros(batch, heads, size, dim)
            kept = self.longest - self.start
            grown[:, :, :kept] = self.data[:, :, :kept]
            self.data = grown
        if self.even:
            end = self.longest - self.start
            self.data[:, :, end : end + many] = new
        else:
            begin = rows_tensor(self.counts, new.device) - self.start
            places = begin[:, None] + torch.arange(many, device=new.device)
            self.data.scatter_(2, places[:, None, :, None].expand_as(new), new)
        self.counts = ends

    def trim(self, start: int) -> None:
        """Drop entries before `start` of every row."""
        if self.data is None or start <= self.start:
            return
        kept = self.data[:, :, start - self.start : self.longest - self.start]
        self.data = kept.clone()
        self.start = start

    def own_rows(self) -> None:
        """Give every row of the batch a stored row of its own."""
        if self.repeats > 1:
            assert self.data is not None
            self.data = self.data.repeat_interleave(self.repeats, dim=0)
            self.counts = [count for count in self.counts for _ in range(self.repeats)]
            self.repeats = 1

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times; they share what is stored."""
        self.repeats *= times if self.data is not None else 1

    def select(self, rows: list[int]) -> None:
        """Choose rows of the batch."""
        if self.data is None:
            return
        if self.repeats > 1:
            owners = [row // self.repeats for row in rows]
            stored = self.data.shape[0]
            if owners == [row for row in range(stored) for _ in range(self.repeats)]:
                return  # every row still reads the row it read
        self.own_rows()
        self.data = self.data[rows]
        self.counts = [self.counts[row] for row in rows]

    def map(self, function: Any) -> None:
        """Apply `function` to the stored tensor, for moving it between devices."""
        if self.data is not None:
            self.data = function(self.data)

    def nbytes(self) -> int:
        """Bytes of the stored tensor, spare room included."""
        return 0 if self.data is None else self.data.nbytes
