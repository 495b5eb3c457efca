"""KVzip (Kim et al., 2025): keep what the model needs to repeat its context.

The context is read with a full cache, then repeated chunk by chunk; a pair's score is the largest attention that it
receives meanwhile (see `kvzip_scores`). Only then is it evicted. No question is looked at, so one compressed context
serves any question.

What it costs: each chunk is read once more with the whole cache in place, which is twice the prefill's attention, and
its attention over the chunk is computed a second time. At the peak it holds the full cache, one layer's keys and
values once more, and what is kept. `ProactiveCache` predicts the scores instead.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .budgets import Allocation
from .kvzip_scores import Reconstruction, RepeatPrompt, reconstruction_scores
from .prunable_models import text_config
from .pruned_cache import PrunedCache, TokenStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class KVzipCache(PrunedCache):
    """Pairs that the model attends to while it repeats its context.

    The cache does not see token ids, and the context has to be read twice: fill it before use. Then it works as any
    other pruned cache does::

        cache = KVzipCache(model, retention_ratio=0.3).compress_context(model, context_ids, tokenizer)
        model.generate(context_and_question_ids, past_key_values=cache)

    Tokens that come after the context count as most important (score 1, as the context's prefix does): when the budget
    is exceeded again, the context's weakest pairs make room for them.

    Args:
        model_or_config: see `PrunedCache`.
        options: see `PrunedCache`. The default allocation is "global", and `recent_tokens` 1: as in the paper, the
            newest tokens of the context are scored like the others.
    """

    default_allocation: Allocation = "global"

    def __init__(self, model_or_config: nn.Module | PreTrainedConfig, **options: Any) -> None:
        super().__init__(model_or_config, **options)
        # The context's scores by layer, while it is taken over.
        self._context_scores: dict[int, torch.Tensor] = {}

    def recent_of(self, budget: int) -> int:
        return 1 if self.recent_tokens is None else super().recent_of(budget)

    # -- filling it -------------------------------------------------------------------------------------------------

    def compress_context(
        self,
        model: "PreTrainedModel",
        input_ids: torch.Tensor | Sequence[int],
        prompt: "RepeatPrompt | PreTrainedTokenizerBase",
        *,
        attention_mask: torch.Tensor | None = None,
        prefix_length: int | None = None,
        chunk_tokens: int = 2000,
    ) -> "KVzipCache":
        """Read a context, score its pairs by having it repeated, and keep the best of them.

        Rows are read one after the other, so that scores do not depend on the padding; all their full caches are held
        until the end.

        Args:
            model: the model that the cache is for, in evaluation mode.
            input_ids: `(batch, n)`, or the ids of one context.
            prompt: the request to repeat it, or the model's tokenizer (see `RepeatPrompt.from_tokenizer`).
            attention_mask: `(batch, n)`, 1 for tokens and 0 for padding.
            prefix_length: first tokens of each row that are not repeated and stay (system prompt, chat header). By
                default the prompt's own prefix, in rows that start with it.
            chunk_tokens: most tokens to repeat in one pass.

        Returns:
            This cache.

        Raises:
            ValueError: the cache is not empty, or belongs to another model; a mask of another shape; an empty row; see
                also `reconstruction_scores`.
        """
        self._check_empty()
        if text_config(model) is not self.config:
            raise ValueError("The cache was made for another model: build it from the model that reads the context.")
        ids = input_ids if isinstance(input_ids, torch.Tensor) else torch.tensor(list(input_ids))
        ids = ids[None] if ids.ndim == 1 else ids
        if attention_mask is not None and attention_mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}, input_ids {tuple(ids.shape)}."
            )
        if not isinstance(prompt, RepeatPrompt):
            prompt = RepeatPrompt.from_tokenizer(prompt)
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids.device)
        found = []
        for row, real in zip(ids, mask.bool(), strict=True):
            context = row[real].tolist()
            own_prefix = len(prompt.prefix) if tuple(context[: len(prompt.prefix)]) == prompt.prefix else 0
            length = min(own_prefix, len(context) - 1) if prefix_length is None else prefix_length
            found.append(
                reconstruction_scores(
                    model,
                    context,
                    prompt,
                    prefix_length=max(length, 0),
                    chunk_tokens=chunk_tokens,
                    sink_tokens=self.sink_tokens,
                )
            )
        return self.ingest_scored(found, attention_mask)

    def ingest_scored(
        self, contexts: Reconstruction | Sequence[Reconstruction], attention_mask: torch.Tensor | None = None
    ) -> "KVzipCache":
        """Take over contexts that have been read and scored before; see `kvzip_scores.reconstruction_scores`.

        One `Reconstruction` may fill several caches, of different budgets: it is left as it is.

        Args:
            contexts: one, or one for each row.
            attention_mask: `(batch, n)`, where each row's tokens stand; needed where rows differ in length.

        Returns:
            This cache.
        """
        self._check_empty()
        rows = [contexts] if isinstance(contexts, Reconstruction) else list(contexts)
        lengths = [row.cache.get_seq_length() for row in rows]
        if attention_mask is not None and attention_mask.sum(1).tolist() != lengths:
            raise ValueError(
                f"attention_mask has {attention_mask.sum(1).tolist()} tokens a row, the contexts have {lengths}."
            )
        if attention_mask is None and len(set(lengths)) > 1:
            raise ValueError(f"The contexts have {lengths} tokens: say where they stand with attention_mask.")
        full = rows[0].cache
        if len(rows) > 1 or attention_mask is not None:
            if attention_mask is None:
                attention_mask = torch.ones(len(rows), lengths[0], dtype=torch.bool)
            full = _joined([row.cache for row in rows], attention_mask.bool())
        self._context_scores = {
            index: torch.cat([_lengthened(row.scores[index], max(lengths)) for row in rows])
            for index in rows[0].scores
        }
        try:
            self.ingest(full, attention_mask)
            for layer in self.ragged_layers:  # what has not been evicted has not been scored either
                with layer.awake():
                    self._score_pending(layer)
        finally:
            self._context_scores = {}
        return self

    def ingest(self, full_cache: Cache, attention_mask: torch.Tensor | None = None) -> "PrunedCache":
        """Refused: a full cache has no scores; see `ingest_scored`."""
        if not self._context_scores:
            raise ValueError(
                "A full cache does not tell what its context's pairs are worth: use compress_context(), or "
                "ingest_scored() with the result of kvzip_scores.reconstruction_scores()."
            )
        return super().ingest(full_cache, attention_mask)

    def _check_empty(self) -> None:
        if self.get_seq_length() > 0:
            raise ValueError("A KVzipCache takes one context: call reset() before another one.")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PrunedCache.update`; refused before the context has been read."""
        if not self.layers[layer_idx].is_initialized:
            raise ValueError(
                "This KVzipCache is empty, and it cannot score what it reads by itself: call "
                "cache.compress_context(model, context_ids, tokenizer) first, then generate with the context and what "
                "follows it."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    # -- the policy -------------------------------------------------------------------------------------------------

    def score(self, states: TokenStates) -> torch.Tensor:
        """The context's pairs as they were found to be needed; 1 for any that come later."""
        if not self._context_scores:
            return states.keys.new_ones(states.keys.shape[:3])
        scores = self._context_scores[states.layer_idx].to(states.keys.device)
        return scores.gather(2, states.positions[:, None].expand(states.keys.shape[:3]))


def _lengthened(scores: torch.Tensor, length: int) -> torch.Tensor:
    return nn.functional.pad(scores, (0, length - scores.shape[-1]))


def _joined(caches: Sequence[Cache], real: torch.Tensor) -> Cache:
    """Full caches of one row each as one padded batch; `real` `(batch, n)`, bool, is where each row's tokens stand."""
    total, layers = real.shape[1], []
    for sources in zip(*(cache.layers for cache in caches), strict=True):
        states = [_padded([getattr(source, name) for source in sources], real) for name in ("keys", "values")]
        layer: Any = DynamicLayer()
        if isinstance(sources[0], DynamicSlidingWindowLayer):  # it holds the last tokens only
            window = sources[0].sliding_window
            layer, first = DynamicSlidingWindowLayer(window), max(0, total - window + 1)
            states = [tensor[:, :, first:] for tensor in states]
            layer.cumulative_length = total
        layer.lazy_initialization(*states)
        layer.keys, layer.values = states
        layers.append(layer)
    return Cache(layers=layers)


def _padded(rows: Sequence[torch.Tensor], real: torch.Tensor) -> torch.Tensor:
    """The last tokens' states of each row, `(1, heads, tokens, dim)`, at their columns; 0 elsewhere."""
    _, heads, _, dim = rows[0].shape
    joined = rows[0].new_zeros(len(rows), heads, real.shape[1], dim)
    for index, states in enumerate(rows):
        columns = real[index].nonzero()[:, 0].to(states.device)
        joined[index, :, columns[columns.shape[0] - states.shape[2] :]] = states[0]
    return joined
