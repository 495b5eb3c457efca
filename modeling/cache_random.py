"""Random eviction: the floor that any policy has to beat at the same budget."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .budgets import Allocation
from .pruned_cache import PrunedCache, TokenStates


class RandomCache(PrunedCache):
    """Pairs chosen at random; sinks and recent tokens stay, as in every policy.

    Args:
        model_or_config: see `PrunedCache`.
        seed: makes the choice repeatable; it depends on the layer and on how many tokens were seen.
        options: see `PrunedCache`.
    """

    default_allocation: Allocation = "global"

    def __init__(self, model_or_config: nn.Module | PreTrainedConfig, *, seed: int = 0, **options: Any) -> None:
        super().__init__(model_or_config, **options)
        self.seed = seed

    def score(self, states: TokenStates) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, states.layer_idx, states.seen)) & (2**63 - 1))
        return torch.rand(states.keys.shape[:3], generator=generator).to(states.keys.device)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "seed": self.seed}
