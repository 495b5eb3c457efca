"""What a pruned cache must compute, worked out without one.

A driver feeds a sequence to a model piece by piece with a cache, and notes before each piece which tokens every layer
and head still held. The oracle then runs the whole sequence in ONE forward pass without any cache, with explicit
softmax attention in which each query sees exactly the tokens that were held when its piece came, and its own piece up
to itself. Positions are the true ones. The two must give the same logits.
"""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nearfar.modeling.compat import cache_argument
from nearfar.modeling.prunable_models import attention_types
from nearfar.modeling.pruned_cache import PrunedCache
from nearfar.modeling.ragged_layer import RaggedLayer

_SEEN: list[torch.Tensor] = []
# Of the last oracle, by layer: query-key products `(batch, query heads, tokens, tokens)`, nothing masked; what each
# query saw, `(batch, key-value heads, tokens, tokens)`.
LOGITS: dict[int, torch.Tensor] = {}
SEEN: dict[int, torch.Tensor] = {}


def _explicit_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    visible = _SEEN[module.layer_idx]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.transpose(-1, -2) * scaling
    LOGITS[module.layer_idx], SEEN[module.layer_idx] = logits, visible
    logits = logits.masked_fill(~visible.repeat_interleave(group, 1), float("-inf"))
    weights = torch.nan_to_num(logits.softmax(-1))  # a query that sees nothing (padding) gives 0
    return (weights @ value).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("dense_oracle", _explicit_attention)


@dataclass
class Drive:
    """Feeds a batch to `model` with `cache` and records what was held.

    Attributes:
        mask: `(batch, tokens)` so far, 1 for tokens and 0 for padding.
    """

    model: PreTrainedModel
    cache: PrunedCache
    ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    pieces: list[tuple[int, int, list[list[list[list[int]]]]]] = field(default_factory=list)

    def feed(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """One forward pass over `ids` `(batch, n)`; returns its logits."""
        mask = torch.ones_like(ids) if mask is None else mask
        start = 0 if self.ids is None else self.ids.shape[1]
        held = [self._held(layer, ids.shape[0]) for layer in self.cache.layers]
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], 1)
        self.pieces.append((start, start + ids.shape[1], held))
        with torch.no_grad():
            out = self.model(
                input_ids=ids,
                attention_mask=self.mask,
                position_ids=self.positions()[:, start:],
                **{cache_argument(self.model): self.cache},
            )
        self.logits.append(out.logits)
        return out.logits

    def positions(self) -> torch.Tensor:
        return (self.mask.cumsum(1) - 1).clamp(min=0)

    def _held(self, layer, batch: int) -> list[list[list[int]]] | None:
        if not isinstance(layer, RaggedLayer):
            return None
        if not layer.is_initialized:
            return [[[] for _ in range(64)] for _ in range(batch)]
        return [self.cache.kept_columns(layer.layer_idx, row) for row in range(batch)]

    def oracle(self) -> torch.Tensor:
        """Logits of the whole sequence, `(batch, tokens, vocabulary)`."""
        batch, total = self.ids.shape
        config = self.cache.config
        kinds, window = attention_types(config), getattr(config, "sliding_window", None)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        column = torch.arange(total)
        causal = column[None] <= column[:, None]
        in_window = column[None] > column[:, None] - (window or total + 1)
        real = self.mask.bool()
        _SEEN.clear()
        for index, kind in enumerate(kinds):
            visible = torch.zeros(batch, heads, total, total, dtype=torch.bool)
            for start, stop, held in self.pieces:
                visible[:, :, start:stop, start:stop] = causal[start:stop, start:stop]
                if held[index] is None:  # a stock sliding layer forgets nothing inside its window
                    visible[:, :, start:stop, :start] = True
                    continue
                for row in range(batch):
                    for head in range(heads):
                        visible[row, head, start:stop, held[index][row][head]] = True
            if kind == "sliding_attention":
                visible &= in_window
            _SEEN.append(visible & real[:, None, None, :])
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = "dense_oracle"
        try:
            with torch.no_grad():
                return self.model(input_ids=self.ids, position_ids=self.positions(), use_cache=False).logits
        finally:
            self.model.config._attn_implementation = before

    def error(self) -> float:
        """Largest difference from the oracle over the logits of real tokens."""
        got, expected = torch.cat(self.logits, 1), self.oracle()
        return float((got - expected)[self.mask.bool()].abs().max())
