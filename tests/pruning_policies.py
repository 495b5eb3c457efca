"""Policies, padded batches and a conversation for the tests of `PrunedCache`."""

from typing import Any

import torch
from dense_oracle import Drive
from tiny_models import random_ids

from nearfar.modeling.cache_h2o import H2OCache
from nearfar.modeling.cache_snapkv import SnapKVCache
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates

EXACT = 1e-10


class UnevenCache(PrunedCache):
    """Scores that favour some heads and layers strongly, so that lengths differ a lot."""

    default_allocation = "global"

    def score(self, states: TokenStates) -> torch.Tensor:
        batch, heads, n = states.keys.shape[:3]
        noise = torch.sin(states.positions.double() * 12.9898 + states.layer_idx)[:, None].expand(batch, heads, n)
        favour = torch.arange(heads, device=states.keys.device, dtype=torch.float64)[None, :, None] * 0.7
        return noise + favour + 0.3 * states.layer_idx


class PlainCache(PrunedCache):
    """All tokens equal: ties everywhere."""

    def score(self, states: TokenStates) -> torch.Tensor:
        return states.keys.new_zeros(states.keys.shape[:3])


class SmallSnapKVCache(SnapKVCache):
    """A window that is shorter than the tests' budgets, and lengths that differ."""

    default_allocation = "global"

    def __init__(self, model: Any, *, window_tokens: int = 3, pooling_kernel: int = 3, **options: Any) -> None:
        super().__init__(model, window_tokens=window_tokens, pooling_kernel=pooling_kernel, **options)


class SharedH2OCache(H2OCache):
    """Lengths that differ."""

    default_allocation = "global"


# What a pruned cache promises holds for policies that look at keys only and for those that watch queries.
POLICIES: tuple[type[PrunedCache], ...] = (UnevenCache, SmallSnapKVCache, SharedH2OCache)


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(lengths)
    ids, mask = random_ids(len(lengths), longest, seed), torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : longest - length], mask[row, : longest - length] = 0, 0
    return ids, mask


def run_turns(drive: Drive, batch: int = 1, prompt: int = 37, decode: int = 11, turn: int = 7) -> Drive:
    """A prompt, some decode steps, a second turn, more decode steps."""
    drive.feed(random_ids(batch, prompt, 1))
    for step in range(decode):
        drive.feed(random_ids(batch, 1, 100 + step))
    drive.feed(random_ids(batch, turn, 2))
    for step in range(decode):
        drive.feed(random_ids(batch, 1, 200 + step))
    return drive
