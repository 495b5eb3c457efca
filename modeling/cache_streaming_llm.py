"""StreamingLLM (Xiao et al., 2023): keep the first tokens and the newest ones.

Stores `budget` pairs a head; scoring costs nothing. Kept keys stay at their true positions by default. With
`rerotate=True` the sinks are moved, by rotating their keys, to sit directly before the window, as in the paper, where
positions are places in the cache: distances between a query and any kept token then never exceed the budget.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .pruned_cache import PrunedCache, TokenStates
from .ragged_layer import RaggedLayer
from .rotary import KeyRotation


class StreamingLLMCache(PrunedCache):
    """Sinks and a window of the newest tokens.

    Args:
        model_or_config: see `PrunedCache`.
        rerotate: move the sinks next to the window by rotating their keys.
        options: see `PrunedCache`; `recent_tokens` is what the budget leaves beside the sinks, and cannot be given.

    Raises:
        ValueError: `recent_tokens` given; `rerotate` with a rotary embedding that cannot be redone (see
            `rotary.KeyRotation`), with sliding-window layers only, or without sinks.
    """

    def __init__(
        self, model_or_config: nn.Module | PreTrainedConfig, *, rerotate: bool = False, **options: Any
    ) -> None:
        if options.get("recent_tokens") is not None:
            raise ValueError("StreamingLLM keeps budget - sink_tokens recent tokens; do not give recent_tokens.")
        if options.get("allocation") not in (None, "uniform"):
            raise ValueError(
                "StreamingLLM keeps the same tokens in every head: "
                f"allocation {options['allocation']!r} has no meaning, leave it out."
            )
        super().__init__(model_or_config, **options)
        self.rerotate = rerotate
        self._rotation = KeyRotation(self.config) if rerotate else None
        if rerotate and (self.sink_tokens == 0 or self.ragged_layers[0].window is not None):
            raise ValueError("rerotate moves sinks to the window: it needs sink_tokens >= 1 and full attention.")

    def recent_of(self, budget: int) -> int:
        return max(1, budget - self.sink_tokens)

    def score(self, states: TokenStates) -> torch.Tensor:
        """The position itself: the newest tokens win."""
        batch, heads, n = states.keys.shape[:3]
        return states.positions[:, None].expand(batch, heads, n).float()

    def after_eviction(self, layer: RaggedLayer) -> None:
        if self._rotation is None:
            return
        store, sinks = layer.store, self.sink_tokens
        if bool((store.pairs.host_lengths <= sinks).any()):
            return
        slots = store.pairs.starts[:, None] + torch.arange(sinks + 1, device=store.pairs.starts.device)
        columns = store.pairs.columns[slots].view(store.batch, store.heads, sinks + 1)[:, 0].long()
        sink_slots = slots[:, :sinks]
        if "sink_keys" not in layer.extra:  # as first cached: later moves start from these, so errors do not add up
            layer.extra["sink_keys"] = store.pairs.keys[sink_slots].view(store.batch, store.heads, sinks, -1)
        wanted = columns[:, sinks:] - sinks + torch.arange(sinks, device=columns.device)
        moved = self._rotation.rotate(layer.extra["sink_keys"], wanted - columns[:, :sinks], layer.layer_idx)
        store.pairs.keys[sink_slots] = moved.to(store.pairs.keys.dtype).view(len(slots), sinks, -1)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "rerotate": self.rerotate}
