"""ProxyKV's cache: a target's pairs are evicted by scores that a smaller proxy model makes of the same prompt.

Made by `ProxyScorer.prefill`, which starts the proxy, and handed to the target's own `generate`. The target reads its
prompt in the meantime. After each layer it evicts that layer, if the scores are there; layers that were read before
are held in full and evicted as soon as they are, at the latest at the end of the prompt, where the target waits. So:
with the scores ahead (the proxy ran first, or is faster) the target holds what is kept and one layer; with the scores
behind it holds the full cache until they come, and loses no time. What is kept is the same either way.

Tokens after the prompt are not scored, because the proxy does not run while the target decodes: they rank above every
token of the prompt, the newest highest. An answer, and a further turn, thus push the prompt's lowest-scored pairs out.
`ProxyScorer.extend` has the proxy read a further turn.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig

from .attention_dispatch import AttentionCall, AttentionOutput
from .budgets import Allocation
from .layer_state import CacheSnapshot
from .pending_scores import LARGEST_SCORE, PendingScores
from .pruned_cache import PrunedCache, TokenStates
from .ragged_layer import RaggedLayer

if TYPE_CHECKING:
    from .proxy_scorer import PromptScorer


@dataclass
class ScoredSnapshot(CacheSnapshot):
    """Contents of a `ProxyKVCache`, and the scores it had not used up."""

    scores: PendingScores | None = None
    score_rows: torch.Tensor | None = None


class ProxyKVCache(PrunedCache):
    """Pairs that a proxy model's attention predicts to be important; use `ProxyScorer.prefill` to make one.

    Args:
        model_or_config: the target; see `PrunedCache`.
        scores: of the prompt to come. A cache without them cannot read a prompt, but can hold a saved context.
        scorer: what `score_prompt` asks for them; a cache that `PromptScorer.prefill` made needs none.
        chunked_prefill: the target reads its prompt in several passes (`prefill_chunk_size`), each of which is
            evicted as it comes. A prompt shorter than the proxy's is then noticed only when decoding starts, and not
            if a single token is missing.
        options: see `PrunedCache`. The default allocation is "global", one threshold for all layers and heads, and
            `recent_tokens` 1: as in the paper, the newest tokens of the prompt are scored like the others.

    Raises:
        TypeError, ValueError: see `PrunedCache`; scores of another number of layers or heads; a scorer for another
            target.
    """

    default_allocation: Allocation = "global"

    def __init__(
        self,
        model_or_config: nn.Module | PreTrainedConfig,
        *,
        scores: PendingScores | None = None,
        scorer: "PromptScorer | None" = None,
        chunked_prefill: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model_or_config, **options)
        self.chunked_prefill, self.scorer = chunked_prefill, scorer
        # Which row of the scores belongs to each row of the cache; None while rows are the prompt's own.
        self._score_rows: torch.Tensor | None = None
        self._scores: PendingScores | None = None
        # Columns of the tokens that `score` is asked for, `(batch or 1, n)`.
        self._columns: torch.Tensor | None = None
        # Layers of the pass under way were left in full because the scores were late.
        self._held_back = False
        if scorer is not None:
            scorer.check_target(model_or_config)
        if scores is not None:
            self.expect(scores)

    def recent_of(self, budget: int) -> int:
        return 1 if self.recent_tokens is None else super().recent_of(budget)

    @property
    def scores(self) -> PendingScores | None:
        """Scores of a prompt that has not been evicted by them yet."""
        return self._scores

    def expect(self, scores: PendingScores) -> None:
        """Evict by these scores from now on; they count from the first token that the cache has seen.

        Raises:
            ValueError: scores of other layers or heads, or of no more tokens than were seen.
        """
        layers = [layer.layer_idx for layer in self.ragged_layers]
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        if scores.layers != layers or scores.heads != heads:
            raise ValueError(
                f"The cache has {heads} key-value heads in layers {layers}, the scores {scores.heads} in layers "
                f"{scores.layers}."
            )
        if scores.tokens <= self.get_seq_length():
            raise ValueError(
                f"The cache has seen {self.get_seq_length()} tokens and the scores are of {scores.tokens}: the proxy "
                "has to read everything the target has seen and the new tokens too."
            )
        self._scores, self._score_rows = scores, None

    def score_prompt(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> "ProxyKVCache":
        """Have the scorer read the prompt that the target is about to read; see `PromptScorer.start`.

        Returns:
            This cache.

        Raises:
            ValueError: the cache was made without a scorer.
        """
        if self.scorer is None:
            raise ValueError(
                f"This {type(self).__name__} has no scorer: make it with scorer=…, or by the scorer's prefill()."
            )
        self.scorer.start(self, input_ids, attention_mask, **options)
        return self

    # -- scoring ----------------------------------------------------------------------------------------------------

    def score(self, states: TokenStates) -> torch.Tensor:
        """The proxy's scores of a prompt's tokens, for which it waits; later tokens rank above them, by their age."""
        assert self._columns is not None
        columns = self._columns.to(states.keys.device)
        batch, heads, n = states.keys.shape[:3]
        newest = (LARGEST_SCORE + columns.float())[:, None].expand(batch, heads, n)
        if self._scores is None:
            return newest
        scores = self._scores.of_layer(states.layer_idx, states.keys.device)
        scores = scores[self._rows(batch).to(scores.device)]
        tokens = scores.shape[-1]
        places = columns.long().clamp(max=tokens - 1)[:, None].expand(batch, heads, n)
        return torch.where((columns < tokens)[:, None], scores.gather(2, places).float(), newest)

    def _rows(self, batch: int) -> torch.Tensor:
        """`(batch,)`: the scores' row for each row of the cache."""
        assert self._scores is not None
        if self._score_rows is not None:
            return self._score_rows
        if batch % self._scores.rows:
            raise ValueError(
                f"The proxy read {self._scores.rows} row(s) and the target {batch}: give both the same batch."
            )
        # Beams and several answers repeat each prompt.
        return torch.arange(self._scores.rows).repeat_interleave(batch // self._scores.rows)

    def _score_pending(self, layer: RaggedLayer) -> None:
        slots, _, _ = layer.store.pending_slots()
        self._columns = layer.store.pairs.columns[slots][:, 0]  # heads have the same new tokens
        super()._score_pending(layer)

    # -- evicting when the scores are there -------------------------------------------------------------------------

    def attend(self, layer: RaggedLayer, call: AttentionCall) -> AttentionOutput:
        """See `PrunedCache.attend`.

        Raises:
            ValueError: the prompt is not as long as the one that was scored, or there are no scores.
            RuntimeError: the proxy failed.
        """
        first_layer, last_layer = self._ends()
        if layer is first_layer:
            self._held_back = False
            self._check_length(layer.seen, call.keys.shape[2])
        output = super().attend(layer, call)
        if layer is last_layer:
            self._drop_used_scores()
        return output

    def _check_length(self, seen: int, n: int) -> None:
        scores, end = self._scores, seen + n
        if scores is None:
            if seen == 0:
                raise ValueError(
                    f"This {type(self).__name__} has no scores: make a cache for each prompt with the scorer's "
                    "prefill(input_ids, target_model_or_config=model)."
                )
            return
        if seen >= scores.tokens:
            return
        # Assisted decoding appends its first guesses to the prompt.
        too_long = end > scores.tokens and not self._recording
        in_pieces = self._held or (self.chunked_prefill and n > 1)
        if too_long or (end < scores.tokens and not in_pieces):
            raise ValueError(
                f"The proxy read {scores.tokens} tokens, the target has read {end}: they need the same input_ids, "
                "padding included. A target that reads its prompt in several passes needs chunked_prefill=True or "
                "hold_eviction()."
            )

    def _late(self, layer: RaggedLayer) -> bool:
        return self._scores is not None and not self._scores.ready() and layer is not self._ends()[1]

    def _evict_arrivals(
        self,
        layer: RaggedLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        first_column: int,
        positions: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> None:
        late = self._late(layer)
        if not late and not self._held_back:
            self._columns = torch.arange(first_column, first_column + keys.shape[2], device=keys.device)[None]
            super()._evict_arrivals(layer, keys, values, first_column, positions, valid)
            return
        layer.store.append(keys, values, first_column, positions, valid, 0)
        self._catch_up(layer, late)

    def _evict(self, layer: RaggedLayer) -> None:
        late = self._late(layer)
        if not late and not self._held_back:
            super()._evict(layer)
            return
        self._catch_up(layer, late)

    def _catch_up(self, layer: RaggedLayer, late: bool) -> None:
        """Evict the layers up to this one together, or leave them if their scores are late."""
        self._held_back = late
        if not late:
            # They compete as at the end of a prompt, and no layer before has set a bar.
            self._weakest_kept = None
            layers = self.ragged_layers
            self._evict_all(layers[: layers.index(layer) + 1])

    def compress(self) -> None:
        """See `PrunedCache.compress`; waits for the scores.

        Raises:
            ValueError: the prompt is shorter than the one that was scored.
        """
        seen = self.get_seq_length()
        if self._scores is not None and not self.chunked_prefill and 0 < seen < self._scores.tokens:
            raise ValueError(f"The proxy read {self._scores.tokens} tokens, the target has read {seen}.")
        super().compress()
        self._drop_used_scores()

    def ingest(self, full_cache: Cache, attention_mask: torch.Tensor | None = None) -> "PrunedCache":
        """See `PrunedCache.ingest`; the full cache holds the prompt that was scored."""
        self._held_back = False
        self._check_length(0, full_cache.get_seq_length())
        super().ingest(full_cache, attention_mask)
        self._drop_used_scores()
        return self

    def _drop_used_scores(self) -> None:
        layers = self.ragged_layers
        if self._scores is None or not all(layer.is_initialized for layer in layers):
            return
        # Only what came since the last eviction has no score in the store yet.
        if all(layer.seen - layer.store.pending_tokens() >= self._scores.tokens for layer in layers):
            self._scores = self._score_rows = None

    # -- rows, copies, files ----------------------------------------------------------------------------------------

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose_rows(torch.arange(self._batch()).repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._choose_rows(indices)
        super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._choose_rows(beam_idx)
        super().reorder_cache(beam_idx)

    def _batch(self) -> int:
        layer = self.ragged_layers[0]
        return layer.batch_size if layer.is_initialized else 0

    def _choose_rows(self, indices: torch.Tensor) -> None:
        if self._scores is not None and self._batch() > 0:
            self._score_rows = self._rows(self._batch())[indices.cpu()]

    def reset(self) -> None:
        """Empty the cache, and forget the scores: the next prompt needs its own."""
        super().reset()
        self._scores = self._score_rows = None
        self._held_back = False

    def snapshot(self) -> ScoredSnapshot:
        taken = super().snapshot()
        return ScoredSnapshot(taken.layers, taken.row_budgets, taken.budgets_settled, self._scores, self._score_rows)

    def restore(self, snapshot: CacheSnapshot) -> None:
        super().restore(snapshot)
        self._scores = getattr(snapshot, "scores", None)
        self._score_rows = getattr(snapshot, "score_rows", None)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "chunked_prefill": self.chunked_prefill}
