"""What all layers of one forward pass share about its tokens: which are real, and which belong to one sequence."""

from dataclasses import dataclass, fields, replace

import torch


@dataclass
class Sequences:
    """Tokens gathered into rows that each hold one sequence from its first real token on, without holes.

    Attention that knows nothing of padding or packing is then right: rows are only padded at their end, which a causal
    query never sees. `groups` holds, for sequences of similar length, `(sequences, longest)` indices of tokens in the
    flattened `(batch · length)` batch; behind its end a sequence repeats its last token. `places` `(batch, length)`
    says where a token of the batch ended up in the flattened groups, one after the other.
    """

    groups: list[torch.Tensor]
    places: torch.Tensor

    def gather(self, x: torch.Tensor, group: torch.Tensor, dim: int) -> torch.Tensor:
        """The rows of one group of `x`, whose dimension 0 is the batch and `dim` the tokens (1, or 2 after heads)."""
        flat = x.transpose(1, dim).flatten(0, 1)
        return flat[group].transpose(1, dim)

    def scatter(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Outputs `(sequences, heads, longest, head dim)`, one a group, back in the batch's order.

        That is `(batch, heads, length, …)`.
        """
        flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])
        return flat[self.places].transpose(1, 2)


@dataclass
class AttentionPlan:
    """Padding and packing of the new tokens of one forward pass.

    Args:
        real: `(batch, new tokens)`, bool, where a new token is padding or rows are packed with several sequences.
        sequences: see `Sequences`; `None` where each row is one sequence from its first column on.
        ranks: `(batch, new tokens)`, a token's place in its sequence (of new tokens), for the dense path.
        sequence_ids: `(batch, new tokens)`, which sequence of its row a token belongs to; `None` without packing.
        counts: `(batch,)`, real new tokens of each row; `None` if all are real.
        order: `(batch, new tokens)`, columns with the real tokens first; `None` if all are real.
        mask: a four-dimensional attention mask that the caller gave, bool or added to scores.
    """

    real: torch.Tensor | None = None
    sequences: Sequences | None = None
    ranks: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    order: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every row is one sequence from its first column on, without a mask."""
        return self.real is None and self.sequence_ids is None and self.mask is None

    @property
    def needs_mask(self) -> bool:
        """Whether sequences share rows and have not been gathered, so that only a mask tells them apart."""
        return self.sequence_ids is not None and self.sequences is None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "AttentionPlan":
        """The plan on another device: layers of one model may lie on several."""

        moved = replace(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                setattr(moved, field.name, value.to(device, non_blocking=non_blocking))
        if self.sequences is not None:
            groups = [group.to(device, non_blocking=non_blocking) for group in self.sequences.groups]
            moved.sequences = Sequences(groups, self.sequences.places.to(device, non_blocking=non_blocking))
        return moved


def plan_attention(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    batch: int,
    length: int,
    seen: int | None = 0,
    cached: bool = False,
) -> AttentionPlan:
    """Read a caller's attention mask and position ids.

    Args:
        attention_mask: `(batch, length)` or `(batch, seen + length)`, 1 for real tokens; or four-dimensional; or
            `None`.
        position_ids: as the caller gave them, `(batch or 1, length)`, or `None`. Without mask and cached tokens, a
            position that does not follow the one before it starts another sequence in the same row (packing).
        batch, length: of the new tokens.
        seen: columns that the cache has seen before, 0 without; `None` if only the device knows.
        cached: whether the caller gave a cache.

    Raises:
        ValueError: a mask of another shape; a four-dimensional mask, or packed sequences, together with a cache.
    """
    if attention_mask is None:
        if position_ids is None or seen != 0 or length == 1:
            return AttentionPlan()
        starts = torch.cat([torch.ones_like(position_ids[:, :1]).bool(), position_ids.diff(dim=1) != 1], dim=1)
        if torch.compiler.is_compiling():
            # Values cannot be looked at: the sequences stay where they are, told apart by a mask. A cache's prompt is
            # taken to be one sequence.
            return AttentionPlan() if cached else _unmoved(starts.expand(batch, length))
        if not bool(starts[:, 1:].any()):
            return AttentionPlan()
        if cached:
            raise ValueError(
                "position_ids pack several sequences into a row, and a cache holds one a row: pass none, or an "
                "attention_mask if the row is one sequence."
            )
        return _packed(starts.expand(batch, length))
    if attention_mask.ndim == 4:
        if cached:
            raise ValueError(
                "A four-dimensional attention mask cannot be combined with a cache: give (batch, length)."
            )
        expected = (length, length)
        if tuple(attention_mask.shape[2:]) != expected:
            raise ValueError(
                f"A four-dimensional attention mask must end in {expected}, got {tuple(attention_mask.shape)}."
            )
        return AttentionPlan(mask=attention_mask)
    shape = tuple(attention_mask.shape)
    fits = len(shape) == 2 and shape[0] == batch and shape[1] >= length
    if not fits or (seen is not None and shape[1] not in (length, seen + length)):
        cached_too = "" if not seen else f", or ({batch}, {seen + length}) with the cached tokens"
        raise ValueError(
            f"attention_mask must have shape (batch, length) = ({batch}, {length}){cached_too}, got {shape}."
        )
    real = attention_mask[:, attention_mask.shape[1] - length :].bool()
    if not torch.compiler.is_compiling() and bool(real.all()):
        return AttentionPlan()
    counts = real.sum(1)
    order = torch.argsort(~real, dim=1, stable=True)
    rank = torch.arange(length, device=real.device)
    row = torch.arange(batch, device=real.device)[:, None]
    # Columns behind a row's end repeat its last real token; a row without any repeats its first column.
    index = order.gather(1, torch.minimum(rank[None], (counts - 1).clamp_(min=0)[:, None]).expand(batch, length))
    ranks = (real.cumsum(1) - 1).clamp_(min=0)
    sequences = Sequences(groups=[row * length + index], places=row * length + ranks)
    return AttentionPlan(real=real, sequences=sequences, ranks=ranks, counts=counts, order=order)


def _unmoved(starts: torch.Tensor) -> AttentionPlan:
    """The same without `sequences`, by operations whose shapes do not depend on values."""
    column = torch.arange(starts.shape[1], device=starts.device)
    first = torch.where(starts, column, 0).cummax(1).values
    return AttentionPlan(real=torch.ones_like(starts), ranks=column - first, sequence_ids=starts.int().cumsum(1))


def _packed(starts: torch.Tensor) -> AttentionPlan:
    """A plan for rows that hold several sequences; `starts` `(batch, length)` marks each one's first token."""
    batch, length = starts.shape
    device = starts.device
    begin = starts.flatten().nonzero()[:, 0]
    lengths = torch.diff(begin, append=begin.new_tensor([batch * length]))
    # Sequences whose lengths share a power of two go together, so that filling up at most doubles the work.
    groups: list[torch.Tensor] = []
    places = torch.empty(batch * length, dtype=torch.long, device=device)
    offset = 0
    sizes = lengths.double().log2().floor().long()
    for size in sizes.unique().tolist():
        chosen = (sizes == size).nonzero()[:, 0]
        longest = int(lengths[chosen].max())
        rank = torch.arange(longest, device=device)[None]
        index = begin[chosen, None] + torch.minimum(rank, lengths[chosen, None] - 1)
        groups.append(index)
        slot = offset + torch.arange(index.numel(), device=device).view_as(index)
        inside = rank < lengths[chosen, None]
        places[index[inside]] = slot[inside]
        offset += index.numel()
    plan = _unmoved(starts)
    plan.sequences = Sequences(groups=groups, places=places.view(batch, length))
    return plan
