"""What appending to a `RaggedStore`, and a new token's attention over it, need to know of the store's layout.

All of it is known when slots are given out. So a decode step launches nothing for bookkeeping and asks the device for
nothing: lengths are Python numbers, and the slots of the next tokens stand in a table.
"""

from itertools import accumulate

import torch

from .ragged_attention import RaggedPairs

# Tokens whose slots are worked out at once.
TABLE_TOKENS = 64


class AppendPlan:
    """A layout's numbers, and how many tokens have been appended to every segment since.

    Attributes:
        batch, heads: segments are numbered row by row, head by head.
        used: tokens appended since the plan was made (negative if tokens from before were taken back).
        capacity: slots of each segment if all have as many and are equally long, so that buffers are rectangular.
        starts: first slot of each segment.
    """

    def __init__(self, pairs: RaggedPairs, capacities: torch.Tensor) -> None:
        sizes, self._lengths = capacities.tolist(), pairs.host_lengths.tolist()
        self.batch, self.heads, self.used = pairs.batch, pairs.heads, 0
        self.starts: list[int] = list(accumulate(sizes[:-1], initial=0))
        even = len(set(sizes)) == len(set(self._lengths)) == 1
        self.capacity: int | None = sizes[0] if even else None
        self._slots, self._longest, self._kept = sum(sizes), max(self._lengths), sum(self._lengths)
        self._free = min(size - length for size, length in zip(sizes, self._lengths, strict=True))
        # As they were when the plan was made.
        self._device_starts, self._device_lengths = pairs.starts, pairs.lengths
        self._next_slots: torch.Tensor | None = None
        self._next_lengths: torch.Tensor | None = None
        self._table_begin = 0
        self._offsets: tuple[torch.Tensor, torch.Tensor] | None = None
        self._places: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, torch.Tensor, bool, torch.Tensor, torch.Tensor] | None = None

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Tokens that still fit into every segment."""
        return self._free - self.used

    @property
    def longest(self) -> int:
        """Pairs of the longest segment."""
        return self._longest + self.used

    @property
    def kept(self) -> int:
        """Pairs of all segments."""
        return self._kept + len(self._lengths) * self.used

    @property
    def lengths(self) -> list[int]:
        """Pairs of each segment."""
        return [length + self.used for length in self._lengths]

    # -- even segments ----------------------------------------------------------------------------------------------

    def rectangles(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers as `(batch, heads, capacity, dim)`; only where `capacity` is not None."""
        known, inference = self._views, torch.is_inference_mode_enabled()
        if known is None or known[0] is not keys or known[1] is not values or known[2] != inference:
            assert self.capacity is not None
            shape = (self.batch, self.heads, self.capacity)
            known = (keys, values, inference, keys.view(*shape, keys.shape[1]), values.view(*shape, values.shape[1]))
            self._views = known
        return known[3], known[4]

    # -- uneven segments --------------------------------------------------------------------------------------------

    def slots_ahead(self, n: int) -> torch.Tensor:
        """`(n, segments)`, int64: where the next n tokens go; n at most `free`."""
        slots, _, row = self._tables(self.used, n)
        return slots[row : row + n]

    def last_slots(self) -> torch.Tensor:
        """`(segments,)`, int64: where each segment's newest pair lies."""
        slots, _, row = self._tables(self.used - 1, 1)
        return slots[row]

    def device_lengths(self) -> torch.Tensor:
        """`(segments,)`, int32, on the device: pairs of each segment; there has to be a newest token."""
        _, lengths, row = self._tables(self.used - 1, 1)
        return lengths[row]

    def offsets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both `(segments + 1,)`, int32: each segment's first slot and the end of all, and 0, 1, 2, …"""
        if self._offsets is None:
            starts = self._device_starts
            end = starts.new_full((1,), self._slots)
            count = torch.arange(starts.shape[0] + 1, dtype=torch.int32, device=starts.device)
            self._offsets = torch.cat([starts, end]).int(), count
        return self._offsets

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each segment's first slot, `(segments, 1)`, and the numbers up to the longest's length, `(longest,)`."""
        if self._places is None or self._places.shape[0] < self.longest:
            self._places = torch.arange(self.longest + TABLE_TOKENS, device=self._device_starts.device)
        return self._device_starts[:, None], self._places[: self.longest]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor the plan holds beside the store's own."""
        if self.capacity is not None:
            return []
        held = [*self._tables(self.used, 0)[:2], self._places, *(self._offsets or ())]
        return [tensor for tensor in held if tensor is not None]

    def _tables(self, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Slots of tokens from number `first` on, the lengths with each of them, and `first`'s row in both."""
        row = first - self._table_begin
        if self._next_slots is None or self._next_lengths is None or row < 0 or row + n > self._next_slots.shape[0]:
            rows = min(max(n, TABLE_TOKENS), self._free - first)
            steps = torch.arange(first, first + rows, device=self._device_starts.device)[:, None]
            after = self._device_lengths + steps
            self._next_slots, self._next_lengths = self._device_starts + after, (after + 1).int()
            self._table_begin, row = first, 0
        return self._next_slots, self._next_lengths, row
