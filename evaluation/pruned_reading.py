"""One context, read once with a full cache and handed to one pruned cache after another, with the seconds it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from nearfar.evaluation.comparison import prefill
from nearfar.evaluation.machine import synchronize
from nearfar.evaluation.needles import NeedleContext
from nearfar.modeling.cache_kvzip import KVzipCache
from nearfar.modeling.cache_proxykv import ProxyKVCache
from nearfar.modeling.kvzip_scores import Reconstruction, RepeatPrompt, reconstruction_scores
from nearfar.modeling.pending_scores import PendingScores
from nearfar.modeling.prunable_models import text_config
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates
from nearfar.modeling.received_attention import NO_COLUMN


class Reading:
    """One context, read with a full cache, and how pruned caches come to hold it.

    Attributes:
        full: the full cache.
        prefill_seconds: how long that took.
    """

    def __init__(self, model: Any, context: NeedleContext, prompt: RepeatPrompt) -> None:
        self.model, self.context, self.prompt = model, context, prompt
        self.full = DynamicCache(config=text_config(model))
        self.prefill_seconds, _ = prefill(model, self.full, context.context_ids)
        self._repeated: tuple[Reconstruction, float] | None = None
        self._scored: dict[int, tuple[PendingScores, float]] = {}

    def fill(self, cache: PrunedCache) -> tuple[float, float]:
        """Compress the context into `cache`, which is empty.

        Returns:
            Seconds of scoring, and of all that came to the full cache's prefill.
        """
        if isinstance(cache, KVzipCache):
            repeated, scoring = self._repeat()
            return scoring, scoring + self._timed(lambda: cache.ingest_scored(repeated))
        if isinstance(cache, ProxyKVCache):
            pending, scoring = self._read_by_proxy(cache)
            cache.expect(pending)
            return scoring, scoring + self._timed(lambda: cache.ingest(self.full))
        with timed_scores(cache, self.model.device) as scores:
            if cache.watches_queries:
                seconds, _ = prefill(self.model, cache, self.context.context_ids)
                eviction = max(seconds - self.prefill_seconds, sum(scores))
            else:
                eviction = self._timed(lambda: cache.ingest(self.full))
        return sum(scores), eviction

    def _repeat(self) -> tuple[Reconstruction, float]:
        """KVzip's scores, which no budget changes, and the seconds that they took beside the prefill."""
        if self._repeated is None:
            ids, prefix = self.context.context_ids, len(self.context.prefix_ids)
            start = time.perf_counter()
            found = reconstruction_scores(self.model, ids, self.prompt, prefix_length=prefix)
            synchronize(self.model.device)
            self._repeated = found, time.perf_counter() - start - self.prefill_seconds
        return self._repeated

    def _read_by_proxy(self, cache: ProxyKVCache) -> tuple[PendingScores, float]:
        """The proxy's scores, which no budget changes, and the seconds that they took."""
        key = id(cache.scorer)
        if key not in self._scored:
            ids = torch.tensor([list(self.context.context_ids)], device=self.model.device)
            start = time.perf_counter()
            cache.score_prompt(ids)
            synchronize(self.model.device)
            assert cache.scores is not None
            self._scored[key] = cache.scores, time.perf_counter() - start
        return self._scored[key]

    def kvzip_mass(self, cache: PrunedCache) -> float:
        """Share of KVzip's scores, the header's left out, that stands in the pairs that a cache keeps."""
        repeated, _ = self._repeat()
        prefix, kept, total = len(self.context.prefix_ids), 0.0, 0.0
        for layer in cache.ragged_layers:
            scores = repeated.scores[layer.layer_idx][0].clone()  # (heads, n)
            scores[:, :prefix] = 0
            with layer.awake():
                _, _, columns = layer.store.rectangle()
            held = columns[0] != NO_COLUMN
            found = scores.gather(1, columns[0].masked_fill(~held, 0).to(scores.device).long())
            kept += float((found * held.to(scores.device)).sum())
            total += float(scores.sum())
        return kept / total

    def _timed(self, work: Callable[[], Any]) -> float:
        synchronize(self.model.device)
        start = time.perf_counter()
        work()
        synchronize(self.model.device)
        return time.perf_counter() - start


@contextmanager
def timed_scores(cache: PrunedCache, device: torch.device) -> Iterator[list[float]]:
    """Seconds of each call of the policy's `score`."""
    seconds: list[float] = []
    score = cache.score

    def timed(states: TokenStates) -> torch.Tensor:
        synchronize(device)
        start = time.perf_counter()
        scores = score(states)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        return scores

    cache.score = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del cache.score
