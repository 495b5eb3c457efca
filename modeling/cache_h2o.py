"""H2O (Zhang et al., 2023): keep the heavy hitters, the pairs that have received most attention, and the newest pairs.

A pair's score is the attention probability that all queries since its own have given it, over the query heads of its
group: the column sums of the attention matrix. The sum goes on while the model decodes; an evicted pair's is lost, and
probabilities are those over the pairs that are still held, as the model's own attention has them.

A query's probabilities are worked out when its layer evicts next: until then no pair that it saw has gone, so the sums
are the same as after every step, and computing many queries at once costs less. At prefill this is one more product of
queries and keys and a softmax, in blocks, never the matrix as a whole; an `eviction_interval` of decode steps costs as
much as a second attention over the same pairs.
"""

import torch

from .pruned_cache import PrunedCache, Queries, TokenStates
from .ragged_layer import RaggedLayer
from .received_attention import NO_COLUMN, received_attention

# Queries that a layer holds before it adds them to the sums, if `eviction_interval` is not more.
HELD_QUERIES = 64


class H2OCache(PrunedCache):
    """Pairs with the largest accumulated attention.

    Beside the pairs, each layer holds the queries that are not in the sums yet: of tokens since the last eviction, at
    most twice `eviction_interval` or 128 of them.

    A prompt read in chunks is evicted chunk by chunk by the sums so far, as in decode. Inside `hold_eviction()` it
    ends as if it had been read at once. `crop` takes back the newest `eviction_interval` (at least 64) tokens, no
    more: what older queries gave cannot be told apart.

    Args:
        model_or_config: see `PrunedCache`.
        options: see `PrunedCache`. By default half of the budget goes to `recent_tokens`, and allocation is "uniform",
            as in the paper; the paper has no sinks (`sink_tokens=0`) and evicts after every step
            (`eviction_interval=1`).
    """

    watches_queries = True

    def recent_of(self, budget: int) -> int:
        wanted = budget // 2 if self.recent_tokens is None else self.recent_tokens
        return max(1, min(wanted, budget - self.sink_tokens))

    # -- the queries to come into the sums --------------------------------------------------------------------------

    def watch(self, layer: RaggedLayer, queries: Queries) -> None:
        """Hold the queries; add the older ones to the sums where there are too many."""
        states, columns, most = queries.states, queries.columns, self._most_held
        if "scaling" not in layer.extra:  # a tensor, so that it goes into files
            layer.extra["scaling"] = torch.full_like(columns[:, 0], queries.scaling, dtype=torch.float64)
        if layer.store.kept == 0:  # a prompt that is evicted as it comes: `score` takes them at once
            layer.extra["queries"], layer.extra["query_columns"] = states, columns
            return
        if "queries" in layer.extra:
            states = torch.cat([layer.extra["queries"], states], dim=2)
            pieces = layer.extra["query_columns"], columns
            columns = self.once("held columns", lambda: torch.cat(pieces, dim=1), *pieces)
        elif columns.shape[1] <= 2 * most:
            states = states.clone()  # the model's own must not be held on to
        if columns.shape[1] > 2 * most:
            self._add(layer, states[:, :, :-most], columns[:, :-most])
            states, held = states[:, :, -most:].clone(), columns
            columns = self.once(("newest columns", most), lambda: held[:, -most:].clone(), held)
        layer.extra["queries"], layer.extra["query_columns"] = states, columns

    @property
    def _most_held(self) -> int:
        return max(HELD_QUERIES, self.eviction_interval)

    def crop(self, tokens_to_remove: int) -> None:
        """See `PrunedCache.crop`. ValueError too where queries of tokens to remove are in the sums."""
        for layer in self.ragged_layers:
            layer.check_crop(-tokens_to_remove)
            held = layer.extra["queries"].shape[2] if "queries" in layer.extra else 0
            if -tokens_to_remove > held:
                raise ValueError(
                    f"Cannot remove {-tokens_to_remove} token(s): what all but the newest {held} gave is in the sums "
                    "of the others. Take a snapshot() before, or raise eviction_interval."
                )
        super().crop(tokens_to_remove)

    def after_crop(self, layer: RaggedLayer, removed: int) -> None:
        left = layer.extra["query_columns"].shape[1] - removed
        layer.extra["queries"] = layer.extra["queries"][:, :, :left].clone()
        layer.extra["query_columns"] = layer.extra["query_columns"][:, :left].clone()
        if "summed" in layer.extra:
            layer.extra["summed"] = layer.extra["summed"].clamp(max=layer.seen)

    # -- the sums ---------------------------------------------------------------------------------------------------

    def score(self, states: TokenStates) -> torch.Tensor:
        """Of a prompt that is evicted as it comes; all other pairs are scored by `_score_pending`."""
        layer = self.layers[states.layer_idx]
        queries, columns = layer.extra.pop("queries"), layer.extra.pop("query_columns")
        self._note_summed(layer, columns)
        _, mass = received_attention(
            queries, states.keys, self._scaling(layer), columns[0] if states.real is None else columns, layer.window
        )
        return mass

    def _score_pending(self, layer: RaggedLayer) -> None:
        """Bring all queries into the sums."""
        if "queries" in layer.extra:
            self._add(layer, layer.extra.pop("queries"), layer.extra.pop("query_columns"))
        layer.store.settle()

    def _add(self, layer: RaggedLayer, queries: torch.Tensor, query_columns: torch.Tensor) -> None:
        """Add what `queries` `(batch, query heads, q, head dim)` give to the sums of the pairs that are held."""
        store = layer.store
        keys, slots, columns = store.rectangle()
        _, mass = received_attention(queries, keys, self._scaling(layer), columns, layer.window, query_columns)
        sums = mass.to(store.scores.dtype)
        if "summed" in layer.extra:  # pairs that have come since have no sum yet
            known = columns < layer.extra["summed"][:, None, None]
            sums = sums + store.scores[slots].masked_fill(~known, 0.0)
        held = columns != NO_COLUMN
        store.scores = store.scores.index_copy(0, slots[held], sums[held])
        self._note_summed(layer, query_columns)

    def _scaling(self, layer: RaggedLayer) -> float:
        return float(layer.extra["scaling"][0])

    def _note_summed(self, layer: RaggedLayer, columns: torch.Tensor) -> None:
        """All pairs stored so far have a sum, be it 0: those before column `summed`."""
        layer.extra["summed"] = torch.full_like(columns[:, 0], layer.seen)
