"""Refusing new tokens whose positions say that they do not come after what a cache has seen."""

from collections.abc import Sequence

import torch


def check_positions_continue(
    position_ids: torch.Tensor | None, real: torch.Tensor | None, held: Sequence[int] | torch.Tensor
) -> None:
    """Raise unless every row's new tokens begin behind the row's tokens in the cache.

    transformers' `generate` takes positions from its inputs alone. Given a prompt of which the cache has seen
    everything, or a mask that hides tokens which the cache holds as real ones, it lets them overlap, without a word,
    and what comes out is of neither text.

    Args:
        position_ids: `(batch or 1, new)`, as the caller gave them; nothing is checked without, nor for a single token,
            where reading it would cost each decode step a wait for the device.
        real: `(batch, new)`, bool, False for padding; `None` when all are real.
        held: real tokens of each row in the cache, `(batch,)`.

    Raises:
        ValueError: a row's first new token stands where the cache has one already.
    """
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] < 2:
        return
    if real is None:
        first = position_ids[:, 0]
        counts = torch.ones_like(first, dtype=torch.bool)
    else:
        first = position_ids.expand_as(real).gather(1, real.int().argmax(1, keepdim=True))[:, 0]
        # A mask that is too short for cache and new tokens hides all of these; padding has no positions that run on.
        run_on = position_ids[:, -1] - position_ids[:, 0] == position_ids.shape[1] - 1
        counts = real.any(1) | run_on
    before = torch.as_tensor(held, device=first.device)
    overlapping = ((first < before) & counts).nonzero()[:, 0].tolist()
    if not overlapping:
        return
    row = overlapping[0]
    begin, seen = int(first.expand_as(before)[row]), int(before[row])
    raise ValueError(
        f"New tokens of row {row} begin at position {begin}, and the cache has seen {seen} tokens of it. Give "
        "generate the whole text, which must be longer than what the cache has seen, or the new ids alone with an "
        "attention_mask of the whole text's length; no use_cache=False beside a cache; and assisted decoding an empty "
        "cache, for it feeds the whole text again. Without an attention_mask generate takes pad_token_id for padding "
        "wherever it stands: give torch.ones_like(ids) where it is text. What the cache has seen as tokens cannot "
        "become padding later: where answers of a batch ended early, leave the mask at 1 behind them, or give each "
        "row a cache of its own."
    )
