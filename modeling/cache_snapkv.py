"""SnapKV (Li et al., 2024): keep what the last queries of the prompt attend to.

A pair's score is the attention probability that it receives from the last `window_tokens` queries (the observation
window): summed over them, averaged over the query heads of its group, then pooled over neighbouring tokens, so that
what stands around a heavily used token stays with it. Scoring costs `window_tokens` rows of the attention matrix.

Whatever the end of the prompt does not ask for may be evicted: a question must stand at the end of the prompt, not
come later.
"""

from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig

from .pruned_cache import PrunedCache, Queries, TokenStates
from .ragged_layer import RaggedLayer
from .received_attention import NO_COLUMN, received_attention

Pooling = Literal["max", "avg"]
POOLINGS: tuple[str, ...] = get_args(Pooling)


class SnapKVCache(PrunedCache):
    """Pairs that the last queries attend to.

    Of each layer the window's queries are held as well, for the evictions that come later: as many numbers as the keys
    of `window_tokens * query heads / key-value heads` pairs a head.

    At each further eviction (of a second turn, and during decode) all pairs held are scored anew, by the last
    `window_tokens` queries at that time; in a turn shorter than the window these reach back before it.

    A prompt read in chunks is evicted chunk by chunk, each time by the chunk's last queries, before the end of the
    prompt is known. Inside `hold_eviction()` the prompt's own end decides, as if it had been read at once.

    Args:
        model_or_config: see `PrunedCache`.
        window_tokens: queries that decide (the paper's: 16 to 64). They are kept themselves, as far as the budget
            goes, unless `recent_tokens` says otherwise.
        pooling_kernel: tokens that are pooled, odd; 1 for no pooling.
        pooling: "max" or "avg"; places beyond either end count as 0.
        options: see `PrunedCache`. The default allocation is "uniform", as in the paper; the others share the budget.

    Raises:
        TypeError, ValueError: a window or a kernel that is not a positive number, an even kernel, another pooling.
    """

    watches_queries = True

    def __init__(
        self,
        model_or_config: nn.Module | PreTrainedConfig,
        *,
        window_tokens: int = 64,
        pooling_kernel: int = 7,
        pooling: Pooling = "max",
        **options: Any,
    ) -> None:
        for name, value in (("window_tokens", window_tokens), ("pooling_kernel", pooling_kernel)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number of tokens, got {value!r}.")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if pooling_kernel % 2 == 0:
            raise ValueError(f"pooling_kernel must be odd, to have a middle, got {pooling_kernel}.")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be {' or '.join(POOLINGS)}, got {pooling!r}.")
        super().__init__(model_or_config, **options)
        self.window_tokens, self.pooling_kernel, self.pooling = window_tokens, pooling_kernel, pooling

    def recent_of(self, budget: int) -> int:
        wanted = self.window_tokens if self.recent_tokens is None else self.recent_tokens
        return max(1, min(wanted, budget - self.sink_tokens))

    # -- the window -------------------------------------------------------------------------------------------------

    def watch(self, layer: RaggedLayer, queries: Queries) -> None:
        """Remember the last `window_tokens` real queries of each row."""
        states, columns, window = queries.states, queries.columns, self.window_tokens
        if "window_queries" in layer.extra and (queries.padded or states.shape[2] < window):
            kept, pieces = layer.extra["window_queries"], (layer.extra["window_columns"], columns)
            if not queries.padded:  # only what stays is copied
                kept = kept[:, :, max(0, kept.shape[2] + states.shape[2] - window) :]
            states = torch.cat([kept, states], dim=2)
            columns = self.once("window columns", lambda: torch.cat(pieces, dim=1), *pieces)
        elif not queries.padded:
            states = states[:, :, -window:].clone()  # the model's own must not be held on to
        if queries.padded:
            both = columns
            last = self.once(  # real ones to the end
                "last queries", lambda: (both != NO_COLUMN).int().argsort(dim=1, stable=True)[:, -window:], both
            )
            states = states.gather(2, last[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))
            columns = self.once("their columns", lambda: both.gather(1, last), both)
        layer.extra["window_queries"] = states
        newest = columns
        layer.extra["window_columns"] = self.once(("window", window), lambda: newest[:, -window:].clone(), newest)
        if "scaling" not in layer.extra:  # a tensor, so that it goes into files
            layer.extra["scaling"] = torch.full_like(columns[:, 0], queries.scaling, dtype=torch.float64)

    def after_crop(self, layer: RaggedLayer, removed: int) -> None:
        if "window_columns" in layer.extra:  # those that are left decide alone
            columns = layer.extra["window_columns"]
            layer.extra["window_columns"] = columns.masked_fill(columns >= layer.seen, NO_COLUMN)

    # -- scores -----------------------------------------------------------------------------------------------------

    def score(self, states: TokenStates) -> torch.Tensor:
        """Of a prompt that is evicted as it comes; all other pairs are scored by `_score_pending`."""
        batch, _, n, _ = states.keys.shape
        columns = torch.arange(states.seen - n, states.seen, device=states.keys.device).expand(batch, n)
        places = columns
        if states.real is not None:
            columns, places = columns.masked_fill(~states.real, NO_COLUMN), states.real.cumsum(1)
        return self._pooled_mass(self.layers[states.layer_idx], states.keys, columns[:, None], places[:, None])

    def _score_pending(self, layer: RaggedLayer) -> None:
        """All pairs anew: they are compared as the same queries see them."""
        store = layer.store
        if store.pending_tokens() == 0:
            return
        keys, slots, columns = store.rectangle()
        scores = self._pooled_mass(layer, keys, columns, store.places[slots])
        held = columns != NO_COLUMN
        store.scores = store.scores.index_copy(0, slots[held], scores[held].to(store.scores.dtype))
        store.settle()

    def _pooled_mass(
        self, layer: RaggedLayer, keys: torch.Tensor, columns: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Scores of pairs.

        Args:
            layer: whose window decides.
            keys: `(batch, heads, n, head dim)`.
            columns: `(batch, heads or 1, n)`, as for `received_attention`.
            places: likewise, the pairs' indices among their row's real tokens.
        """
        queries, window_columns = layer.extra["window_queries"], layer.extra["window_columns"]
        scaling, group = float(layer.extra["scaling"][0]), queries.shape[1] // keys.shape[1]
        _, mass = received_attention(
            queries, keys, scaling, columns.expand(-1, keys.shape[1], -1), layer.window, window_columns
        )
        mass /= group
        # The window's own pairs are kept, or compete by themselves: they do not lend their scores to those before.
        in_window = columns >= window_columns.amin(1)[:, None, None]
        average, radius = self.pooling == "avg", self.pooling_kernel // 2
        pooled = torch.zeros_like(mass)
        # In the order of the text, so that equal neighbourhoods give equal sums to the last bit.
        for shift in range(-radius, radius + 1):
            here, there = _shifted(shift), _shifted(-shift)
            near = (places[there] - places[here]).abs() <= radius
            lent = mass[there].masked_fill(~(near & (in_window[there] == in_window[here])), 0.0)
            pooled[here] = pooled[here] + lent if average else torch.maximum(pooled[here], lent)
        return pooled / self.pooling_kernel if average else pooled

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "window_tokens": self.window_tokens,
            "pooling_kernel": self.pooling_kernel,
            "pooling": self.pooling,
        }


def _shifted(shift: int) -> tuple[Any, slice]:
    """The entries of a sequence that have another one `shift` places on."""
    return ..., slice(max(0, -shift), -shift if shift > 0 else None)
