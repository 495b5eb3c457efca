"""Storage of one layer's kept pairs: flat buffers, a length for every row and key-value head.

A pair costs `2 * head dim` numbers in the model's dtype plus 12 bytes (its column, its place and its score).
Each segment has some spare slots, so a decode step writes its pair in place: one write of keys and one of values a
layer, no copy, no loop. Columns, places and the device's lengths follow from the host's numbers; they are written up
for many tokens at once, when something asks for them (`pairs`, `places`). When the spare slots are used up the
segments are laid out anew (amortised by growing the spare room with the length).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .append_plan import AppendPlan
from .ragged_attention import RaggedPairs
from .received_attention import NO_COLUMN

# Pieces of the pending sequence before they are joined.
MOST_PIECES = 64


@dataclass
class Pending:
    """Tokens stored since the last eviction; their pairs have no score yet.

    Attributes:
        positions: `(batch, n)`, int64, rotary positions.
        valid: `(batch, n)`, bool, False for padding (which is never stored), or None when all are real.
    """

    positions: torch.Tensor
    valid: torch.Tensor | None

    def select(self, rows: torch.Tensor) -> "Pending":
        return Pending(self.positions[rows], None if self.valid is None else self.valid[rows])

    def drop_last(self, n: int) -> "Pending":
        keep = self.positions.shape[1] - n
        return Pending(self.positions[:, :keep], None if self.valid is None else self.valid[:, :keep])


@dataclass
class RaggedStore:
    """Kept pairs of one layer.

    Attributes:
        stored: buffers and lengths as far as they are written up; `pairs` gives them complete.
        scores: `(slots,)`, float32 (or float64), importance; meaningless for pending pairs and spare slots.
        stored_places: see `places`, likewise.
        capacities: `(batch * heads,)`, int64 on the CPU: slots of each segment.
        real_tokens: tokens seen by each row, padding not counted.
        pending: pieces of the sequence stored since the last eviction.
        layout: changes whenever slots are given out anew, or pending pairs settle.
        unwritten: newest tokens, none of them padding, whose keys and values alone are written; their columns follow
            each other from `unwritten_column`.
    """

    stored: RaggedPairs
    scores: torch.Tensor
    stored_places: torch.Tensor
    capacities: torch.Tensor
    real_tokens: list[int]
    pending: list[Pending] = field(default_factory=list)
    layout: int = 0
    unwritten: int = 0
    unwritten_column: int = 0
    _plan: AppendPlan | None = field(default=None, repr=False)

    # -- making one -------------------------------------------------------------------------------------------------

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        score_dtype: torch.dtype = torch.float32,
    ) -> "RaggedStore":
        """A store without pairs, for states like `keys` `(…, head dim)` and `values` `(…, value dim)`."""
        device, segments = keys.device, batch * heads
        zeros = torch.zeros(segments, dtype=torch.int64, device=device)
        pairs = RaggedPairs(
            keys=keys.new_empty(0, keys.shape[-1]),
            values=values.new_empty(0, values.shape[-1]),
            columns=torch.empty(0, dtype=torch.int32, device=device),
            starts=zeros,
            lengths=zeros.clone(),
            host_lengths=torch.zeros(segments, dtype=torch.int64),
            batch=batch,
            heads=heads,
        )
        return cls(
            pairs,
            torch.empty(0, dtype=score_dtype, device=device),
            torch.empty(0, dtype=torch.int32, device=device),
            torch.zeros(segments, dtype=torch.int64),
            [0] * batch,
        )

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def pairs(self) -> RaggedPairs:
        """Buffers and lengths, complete."""
        self._write_up()
        return self.stored

    @pairs.setter
    def pairs(self, pairs: RaggedPairs) -> None:
        self.stored, self._plan = pairs, None

    @property
    def places(self) -> torch.Tensor:
        """`(slots,)`, int32, each pair's index among its row's real tokens (its column, less the padding before)."""
        self._write_up()
        return self.stored_places

    @places.setter
    def places(self, places: torch.Tensor) -> None:
        self.stored_places = places

    @property
    def plan(self) -> AppendPlan:
        """The layout's numbers, for the host."""
        if self._plan is None:
            self._plan = AppendPlan(self.pairs, self.capacities)
        return self._plan

    @property
    def batch(self) -> int:
        return self.stored.batch

    @property
    def heads(self) -> int:
        return self.stored.heads

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.stored.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.scores.device

    @property
    def kept(self) -> int:
        """Pairs stored, over rows and heads."""
        return self.plan.kept

    @property
    def longest(self) -> int:
        """Pairs of the longest segment."""
        return self.plan.longest

    @property
    def uniform_length(self) -> int | None:
        """The common length of all segments, if they are all as long and evenly laid out."""
        plan = self.plan
        return None if plan.capacity is None else plan.longest

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values as `(batch, heads, length, dim)`; only where `uniform_length` is not None."""
        plan = self.plan
        keys, values = plan.rectangles(self.stored.keys, self.stored.values)
        return keys.narrow(2, 0, plan.longest), values.narrow(2, 0, plan.longest)

    def rectangle(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All pairs as a rectangle, its length that of the longest segment.

        Returns:
            keys `(batch, heads, length, dim)` (a view where segments are even, a copy elsewhere); the slots they lie
            in and their columns, `(batch, heads, length)`. Places that a shorter segment does not fill have the
            column `NO_COLUMN`; their key and slot are some other pair's.
        """
        pairs, shape = self.pairs, (self.batch, self.heads, self.pairs.max_length)
        places = torch.arange(pairs.max_length, device=pairs.starts.device)
        slots = pairs.starts[:, None] + torch.minimum(places, (pairs.lengths - 1).clamp(min=0)[:, None])
        slots = slots.clamp(max=max(self.scores.shape[0] - 1, 0))
        columns = pairs.columns[slots].long()
        even = self.uniform_length is not None
        if not even:
            columns = columns.masked_fill(places >= pairs.lengths[:, None], NO_COLUMN)
        keys = self.dense()[0] if even else pairs.keys[slots].view(*shape, pairs.keys.shape[-1])
        return keys, slots.view(shape), columns.view(shape)

    def filled(self) -> torch.Tensor:
        """`(slots,)`, bool: the slots that hold a pair."""
        return self.slot_owners()[1]

    def slot_owners(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each slot's segment, and whether it holds a pair; both `(slots,)`."""
        slots, pairs = self.scores.shape[0], self.pairs
        segment = torch.repeat_interleave(self.capacities.to(pairs.starts.device), output_size=slots)
        ends = (pairs.starts + pairs.lengths)[segment]
        return segment, torch.arange(slots, device=ends.device) < ends

    def without_spare(self, marks: torch.Tensor, mark: float) -> torch.Tensor:
        """`marks` `(slots,)`, with `mark` at slots that hold no pair; changed in place."""
        plan = self.plan
        if plan.capacity is None:
            return marks.masked_fill_(~self.filled(), mark)
        marks.view(-1, plan.capacity)[:, plan.longest :] = mark
        return marks

    def row_slots(self) -> list[tuple[int, int]]:
        """First slot and end slot of each row: a row's segments lie side by side."""
        ends = self.capacities.view(self.batch, self.heads).sum(1).cumsum(0).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor the store holds."""
        pairs = self.stored
        held = [pairs.keys, pairs.values, pairs.columns, pairs.starts, pairs.lengths, pairs.host_lengths]
        held += [self.scores, self.stored_places, self.capacities, *self.plan.tensors()]
        for piece in self.pending:
            held += [piece.positions] if piece.valid is None else [piece.positions, piece.valid]
        return held

    # -- writing ----------------------------------------------------------------------------------------------------

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        first_column: int,
        positions: torch.Tensor,
        valid: torch.Tensor | None,
        spare: int,
    ) -> None:
        """Add new tokens' pairs to every segment; padding is left out.

        Args:
            keys, values: `(batch, heads, n, dim)`.
            first_column: column of the first new token.
            positions: `(batch, n)`, int64, rotary positions.
            valid: `(batch, n)`, bool, or None when no new token is padding.
            spare: free slots to leave in every segment when it has to grow.
        """
        if self.scores.is_inference() and not torch.is_inference_mode_enabled():
            self._replace_by(self.clone())  # prefilled in inference mode, whose tensors cannot be written to outside
        if valid is not None:
            self._append_padded(keys, values, first_column, positions, valid, spare)
            return
        n = keys.shape[2]
        if self.plan.free < n:
            self.grow(self.pairs.host_lengths + (n + spare))
        plan = self.plan
        if plan.capacity is not None:
            for buffer, states in zip(
                plan.rectangles(self.stored.keys, self.stored.values), (keys, values), strict=True
            ):
                buffer.narrow(2, plan.longest, n).copy_(states)
        else:
            slots = plan.slots_ahead(n)
            slots = slots[0] if n == 1 else slots.t().reshape(-1)
            self.stored.keys.index_copy_(0, slots, keys.reshape(-1, keys.shape[-1]))
            self.stored.values.index_copy_(0, slots, values.reshape(-1, values.shape[-1]))
        if self.unwritten == 0:
            self.unwritten_column = first_column
        plan.used += n
        self.unwritten += n
        self._note_tokens(positions, None, [n] * self.batch)

    def _append_padded(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        first_column: int,
        positions: torch.Tensor,
        valid: torch.Tensor,
        spare: int,
    ) -> None:
        """`append` where rows take different numbers of tokens."""
        batch, heads, n, _ = keys.shape
        device = keys.device
        before = self._tokens_before()
        columns = torch.arange(first_column, first_column + n, device=device, dtype=torch.int32)
        added = valid.sum(1).cpu()
        ranks = valid.cumsum(1) - 1
        pairs = self.pairs  # what came before is written up while `real_tokens` is still theirs
        self._note_tokens(positions, valid, added.tolist())
        added = added.repeat_interleave(heads)
        if bool((pairs.host_lengths + added > self.capacities).any()):
            self.grow(pairs.host_lengths + added + spare)
            pairs = self.pairs
        slots = (pairs.starts + pairs.lengths).view(batch, heads, 1) + ranks[:, None, :]
        places = (before + ranks.int())[:, None].expand(batch, heads, n).reshape(-1)
        chosen = valid[:, None].expand(batch, heads, n).reshape(-1).nonzero()[:, 0]
        slots, columns = slots.reshape(-1)[chosen], columns.expand(batch, heads, n).reshape(-1)[chosen]
        pairs.keys.index_copy_(0, slots, keys.reshape(-1, keys.shape[-1])[chosen])
        pairs.values.index_copy_(0, slots, values.reshape(-1, values.shape[-1])[chosen])
        pairs.columns.index_copy_(0, slots, columns)
        self.places.index_copy_(0, slots, places[chosen])
        self.pairs = dataclasses.replace(
            pairs, host_lengths=pairs.host_lengths + added, lengths=pairs.lengths + added.to(device)
        )

    def _tokens_before(self) -> "int | torch.Tensor":
        """Real tokens of each row so far: a number, which costs a GPU nothing, or `(batch, 1)`, int32."""
        if len(set(self.real_tokens)) == 1:
            return self.real_tokens[0]
        return torch.tensor(self.real_tokens, dtype=torch.int32, device=self.device)[:, None]

    def _write_up(self) -> None:
        """Write columns, places and lengths of the tokens that have none yet."""
        n, self.unwritten = self.unwritten, 0
        if n == 0:
            return
        pairs, places, batch, heads = self.stored, self.stored_places, self.batch, self.heads
        columns = pairs.columns
        if columns.is_inference() and not torch.is_inference_mode_enabled():
            columns, places = columns.clone(), places.clone()
        steps = torch.arange(n, device=columns.device, dtype=torch.int32)
        first = self.unwritten_column
        new_places = (self._tokens_before() - n + steps).expand(batch, n)[:, None].expand(batch, heads, n)
        new_columns = (first + steps).expand(batch, heads, n)
        sizes, lengths = self.capacities.tolist(), pairs.host_lengths.tolist()
        if len(set(sizes)) == len(set(lengths)) == 1:
            for buffer, new in ((columns, new_columns), (places, new_places)):
                buffer.view(batch, heads, sizes[0]).narrow(2, lengths[0], n).copy_(new)
        else:
            slots = ((pairs.starts + pairs.lengths)[:, None] + steps).view(-1)
            columns.index_copy_(0, slots, new_columns.reshape(-1))
            places.index_copy_(0, slots, new_places.reshape(-1))
        # The plan has counted them already, and stays.
        self.stored_places = places
        self.stored = dataclasses.replace(
            pairs, columns=columns, lengths=pairs.lengths + n, host_lengths=pairs.host_lengths + n
        )

    def fill(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor,
        keep: torch.Tensor,
        first_column: int,
        positions: torch.Tensor,
        valid: torch.Tensor | None,
        spare: int,
    ) -> None:
        """Store a chosen part of a first prefill, straight from the model's states, into an empty store.

        Args:
            keys, values: `(batch, heads, n, dim)`.
            scores: `(batch, heads, n)`, in the dtype of `self.scores`.
            keep: `(batch, heads, n)`, bool; False for padding.
            first_column, positions, valid: as for `append`.
            spare: free slots to leave in every segment.
        """
        batch, _, n, _ = keys.shape
        added = torch.full((batch,), n) if valid is None else valid.sum(1).cpu()
        ranks = torch.arange(n, device=keys.device).expand(batch, n) if valid is None else valid.cumsum(1) - 1
        places = (self._tokens_before() + ranks).int()
        self._note_tokens(positions, valid, added.tolist())
        self.pending.clear()
        lengths = keep.sum(-1).view(-1)
        host_lengths = lengths.cpu()
        target = self._lay_out(host_lengths, lengths, host_lengths + spare)
        row, head, column = keep.nonzero(as_tuple=True)
        pairs = self.pairs
        slots = int(self.capacities.sum())
        pairs.keys = _scattered(keys[row, head, column], target, slots)
        pairs.values = _scattered(values[row, head, column], target, slots)
        pairs.columns = _scattered((column + first_column).int(), target, slots)
        self.scores = _scattered(scores[row, head, column], target, slots)
        self.places = _scattered(places[row, column], target, slots)

    def keep(self, mask: torch.Tensor, spare: int) -> None:
        """Keep the slots in `mask` `(slots,)`, free the rest, leave `spare` free slots in every segment.

        Args:
            mask: bool, False at slots that hold no pair.
        """
        counts = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
        starts = self.pairs.starts
        ends = torch.cat([starts[1:], starts.new_full((1,), mask.shape[0])])
        lengths = counts[ends] - counts[starts]
        host_lengths = lengths.cpu()
        self._move(mask.nonzero()[:, 0], host_lengths, lengths, host_lengths + spare)

    def grow(self, capacities: torch.Tensor) -> None:
        """Give every segment `capacities[s]` slots (int64, on the CPU), keeping its pairs."""
        self._move(self.filled().nonzero()[:, 0], self.pairs.host_lengths, self.pairs.lengths, capacities)

    def _move(
        self, source: torch.Tensor, host_lengths: torch.Tensor, lengths: torch.Tensor, capacities: torch.Tensor
    ) -> None:
        """New buffers with `capacities`, whose segments take `lengths[s]` pairs each from slots `source` in turn."""
        target = self._lay_out(host_lengths, lengths, capacities)
        slots, pairs = int(capacities.sum()), self.pairs
        # One buffer at a time, so that at most one is held twice.
        for name in ("keys", "values", "columns"):
            setattr(pairs, name, _scattered(getattr(pairs, name)[source], target, slots))
        self.scores = _scattered(self.scores[source], target, slots)
        self.places = _scattered(self.places[source], target, slots)

    def _lay_out(self, host_lengths: torch.Tensor, lengths: torch.Tensor, capacities: torch.Tensor) -> torch.Tensor:
        """Give out slots anew; returns the slots of the first `lengths[s]` places of every segment s, in order.

        The buffers are the caller's to fill.
        """
        self._write_up()
        host_starts = capacities.cumsum(0) - capacities
        starts, total = host_starts.to(lengths.device), int(host_lengths.sum())
        shift = starts - (lengths.cumsum(0) - lengths)
        self.capacities, self.layout = capacities, self.layout + 1
        # Copies: on a CPU the two lengths may be one tensor, and both are counted up in place.
        self.pairs = dataclasses.replace(
            self.pairs, starts=starts, lengths=lengths.clone(), host_lengths=host_lengths.clone()
        )
        owners = torch.repeat_interleave(lengths, output_size=total)
        return torch.arange(total, device=starts.device) + shift[owners]

    def select_rows(self, rows: torch.Tensor) -> None:
        """The batch becomes `[rows[0], rows[1], …]` (repeats allowed)."""
        device = self.pairs.keys.device
        host_rows = rows.cpu()
        rows = rows.to(device)
        old, sizes = self.pairs, self.capacities.tolist()
        segments = (host_rows[:, None] * self.heads + torch.arange(self.heads)).view(-1)
        capacities, old_starts = self.capacities[segments], (self.capacities.cumsum(0) - self.capacities)[segments]
        starts = capacities.cumsum(0) - capacities
        if len(set(sizes)) == 1:  # rows of a rectangle

            def moved(buffer: torch.Tensor) -> torch.Tensor:
                return buffer.view(old.batch, -1, *buffer.shape[1:])[rows].flatten(0, 1)

        else:
            total = int(capacities.sum())
            owner = torch.repeat_interleave(torch.arange(len(segments)), capacities, output_size=total)
            source = (old_starts[owner] + torch.arange(total) - starts[owner]).to(device)

            def moved(buffer: torch.Tensor) -> torch.Tensor:
                return buffer[source]

        host_lengths = old.host_lengths[segments]
        self.pairs = RaggedPairs(
            keys=moved(old.keys),
            values=moved(old.values),
            columns=moved(old.columns),
            starts=starts.to(device),
            lengths=host_lengths.to(device, copy=True),
            host_lengths=host_lengths,
            batch=len(host_rows),
            heads=old.heads,
        )
        self.scores, self.places, self.capacities = moved(self.scores), moved(self.places), capacities
        self.layout += 1
        self.real_tokens = [self.real_tokens[row] for row in host_rows.tolist()]
        self.pending = [piece.select(rows) for piece in self.pending]

    def crop(self, end_column: int, n: int) -> None:
        """Forget the last n tokens, all of them pending: those from column `end_column` on."""
        if self._plan is not None and n <= self.unwritten:  # nobody but the host has counted them
            self._plan.used -= n
            self.unwritten -= n
        else:
            segment, filled = self.slot_owners()
            stay = segment[filled & (self.pairs.columns < end_column)]
            host_lengths = torch.bincount(stay, minlength=self.batch * self.heads).cpu()
            lengths = host_lengths.to(segment.device, copy=True)
            self.pairs = dataclasses.replace(self.stored, host_lengths=host_lengths, lengths=lengths)
        while n > 0:
            piece = self.pending.pop()
            dropped = min(n, piece.positions.shape[1])
            gone = [dropped] * self.batch
            if piece.valid is not None:
                gone = piece.valid[:, -dropped:].sum(1).tolist()
            self.real_tokens = [a - b for a, b in zip(self.real_tokens, gone, strict=True)]
            if dropped < piece.positions.shape[1]:
                self.pending.append(piece.drop_last(dropped))
            n -= dropped

    def _note_tokens(self, positions: torch.Tensor, valid: torch.Tensor | None, added: list[int]) -> None:
        self.real_tokens = [a + b for a, b in zip(self.real_tokens, added, strict=True)]
        self.pending.append(Pending(positions, valid))
        if len(self.pending) > MOST_PIECES:
            self.pending = [_joined(self.pending)]

    # -- pending pairs ----------------------------------------------------------------------------------------------

    def pending_tokens(self) -> int:
        """Columns stored since the last eviction."""
        return sum(piece.positions.shape[1] for piece in self.pending)

    def pending_slots(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the pending tokens' pairs are, rectangular.

        Returns:
            slots `(batch, heads, m)`, rotary positions `(batch, m)`, and `(batch, m)` bool telling real entries from
            filling; m is the most real pending tokens of any row.
        """
        pieces, pairs = self.pending, self.pairs
        if not pieces:
            nothing = torch.zeros(self.batch, 0, dtype=torch.int64, device=pairs.starts.device)
            return nothing[:, None].expand(-1, self.heads, -1), nothing, nothing.bool()
        joined = _joined(pieces)
        positions, valid = joined.positions, joined.valid
        if valid is None:
            m = positions.shape[1]
            real = torch.ones_like(positions, dtype=torch.bool)
            first = pairs.lengths.view(self.batch, self.heads, 1) - m
        else:
            counts = valid.sum(1)
            m = int(counts.max())
            order = (~valid).int().argsort(dim=1, stable=True)[:, :m]  # real tokens first, in order
            positions = positions.gather(1, order)
            real = torch.arange(m, device=counts.device) < counts[:, None]
            first = pairs.lengths.view(self.batch, self.heads, 1) - counts.view(-1, 1, 1)
        slots = pairs.starts.view(self.batch, self.heads, 1) + first + torch.arange(m, device=first.device)
        return slots.clamp(0, max(int(self.capacities.sum()) - 1, 0)), positions, real

    def pending_states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What the pending tokens' pairs are, rectangular.

        Returns:
            keys and values `(batch, heads, m, dim)` (views where segments are even), rotary positions `(batch, m)`,
            and `(batch, m)` bool telling real entries from filling, or None when all are real.
        """
        if self.plan.capacity is not None and all(piece.valid is None for piece in self.pending):
            positions = _joined(self.pending).positions
            keys, values = (states[:, :, self.longest - positions.shape[1] :] for states in self.dense())
            return keys, values, positions, None
        slots, positions, valid = self.pending_slots()
        real = None if all(piece.valid is None for piece in self.pending) else valid
        return self.stored.keys[slots], self.stored.values[slots], positions, real

    def score_pending(self, scores: torch.Tensor) -> None:
        """Give the pending pairs their scores `(batch, heads, m)`, in the order of `pending_states`."""
        capacity, m = self.plan.capacity, scores.shape[2]
        if any(piece.valid is not None for piece in self.pending):
            slots, _, real = self.pending_slots()
            chosen = real[:, None].expand_as(scores)
            self.scores[slots[chosen]] = scores[chosen]
        elif capacity is not None:
            self.scores.view(self.batch, self.heads, capacity).narrow(2, self.longest - m, m).copy_(scores)
        else:
            self.scores.index_copy_(0, self.pending_slots()[0].reshape(-1), scores.reshape(-1))
        self.settle()

    def settle(self) -> None:
        """Pending pairs have been scored and are like the others now."""
        if self.pending:
            self.pending.clear()
            self.layout += 1  # whatever was made of the buffers before does not have them

    # -- copies and devices -----------------------------------------------------------------------------------------

    def _replace_by(self, other: "RaggedStore") -> None:
        for field_ in dataclasses.fields(self):
            setattr(self, field_.name, getattr(other, field_.name))

    def clone(self) -> "RaggedStore":
        """An independent copy."""
        return self._map(torch.Tensor.clone)

    def to(self, device: torch.device | str) -> "RaggedStore":
        """The same store with its device tensors on `device`."""
        host = ("host_lengths", "capacities")
        return self._map(lambda tensor: tensor.to(device), skip=host)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor], skip: tuple[str, ...] = ()) -> "RaggedStore":
        def apply(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor if name in skip else function(tensor)

        pairs = dataclasses.replace(self.pairs)
        for name in ("keys", "values", "columns", "starts", "lengths", "host_lengths"):
            setattr(pairs, name, apply(name, getattr(self.pairs, name)))
        pending = [
            Pending(function(piece.positions), None if piece.valid is None else function(piece.valid))
            for piece in self.pending
        ]
        return RaggedStore(
            pairs,
            function(self.scores),
            function(self.places),
            apply("capacities", self.capacities),
            list(self.real_tokens),
            pending,
            self.layout,
        )


def _joined(pieces: list[Pending]) -> Pending:
    """Several pieces of the sequence as one."""
    positions = torch.cat([piece.positions for piece in pieces], dim=1)
    if all(piece.valid is None for piece in pieces):
        return Pending(positions, None)
    masks = [torch.ones_like(p.positions, dtype=torch.bool) if p.valid is None else p.valid for p in pieces]
    return Pending(positions, torch.cat(masks, dim=1))


def _scattered(rows: torch.Tensor, target: torch.Tensor, slots: int) -> torch.Tensor:
    """A buffer of `slots` whose slots `target` hold `rows`; what the others hold is left open."""
    buffer = rows.new_empty(slots, *rows.shape[1:])
    return buffer.index_copy_(0, target, rows)
