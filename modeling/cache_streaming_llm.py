"""StreamingLLM (Xiao et al., 2023): keep the first tokens and the newest ones.

Stores `budget` pairs a head; scoring costs nothing. Kept keys stay at their true positions by default. With
`rerotate=True` the sinks are moved, by rotating their keys, to sit directly before the window, as in the paper, where
positions are places in the cache: a query is never further from a kept token than there are tokens in the cache.
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
        shape, pairs = (store.batch, store.heads, sinks), store.pairs
        has_window = (pairs.lengths.view(shape[:2]) > sinks).all(1)  # a shorter row has nothing to stand before
        slots = pairs.starts[:, None] + torch.arange(sinks + 1, device=pairs.starts.device)
        slots = slots.clamp(max=pairs.keys.shape[0] - 1).view(store.batch, store.heads, sinks + 1)
        sink_slots = slots[..., :sinks]
        keys = pairs.keys[sink_slots]
        # The sinks as first cached: later moves start from these, so that rounding errors do not add up.
        known = layer.extra.setdefault("knows_sinks", torch.zeros_like(has_window))
        first_keys = layer.extra.get("sink_keys", keys)
        layer.extra["sink_keys"] = torch.where(known[:, None, None, None], first_keys, keys)
        layer.extra["knows_sinks"] = known | has_window
        places = store.places[slots[:, 0]].long()
        wanted = places[:, sinks:] - sinks + torch.arange(sinks, device=places.device)
        moved = self._rotation.rotate(layer.extra["sink_keys"], wanted - places[:, :sinks], layer.layer_idx)
        chosen = has_window[:, None, None].expand(shape)
        pairs.keys[sink_slots[chosen]] = moved.to(pairs.keys.dtype)[chosen]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "rerotate": self.rerotate}
