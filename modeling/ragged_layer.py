"""One layer of a `PrunedCache`: transformers' cache-layer interface over a `RaggedStore`."""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .attention_dispatch import AttentionCall, AttentionOutput, CacheHandle, take_over
from .budgets import Candidates
from .new_states import check_batch_and_dtype
from .ragged_store import RaggedStore
from .resting_pairs import RestingPairs, put_to_rest, wake_up

if TYPE_CHECKING:
    from .pruned_cache import PrunedCache


class RaggedLayer(CacheLayerMixin):
    """One layer of a `PrunedCache`; it attends over its own pairs through `attention_dispatch`."""

    is_croppable = True

    def __init__(self, cache: "PrunedCache", layer_idx: int, window: int | None) -> None:
        super().__init__()
        # A strong reference would close a cycle, and the memory would wait for the garbage collector.
        self._cache = weakref.ref(cache)
        self.layer_idx = layer_idx
        self.window = window
        self.is_sliding = window is not None
        self._store: RaggedStore | None = None
        self.seen = 0
        self.evicted = False
        self.device: torch.device | None = None
        # Further tensors of a policy, `(batch, …)`: they follow the rows wherever the pairs go.
        self.extra: dict[str, torch.Tensor] = {}
        # The quantised pairs, and whether they stand for the store's buffers at the moment.
        self.resting: RestingPairs | None = None
        self.asleep = False
        # transformers' flag: tokens may be rolled back, so eviction waits until they are known to stay.
        self.record_past = False
        # Of the pruned layers; a forward pass begins with the one and ends with the other.
        self.is_first = self.is_last = False

    @property
    def cache(self) -> "PrunedCache":
        cache = self._cache()
        if cache is None:
            raise RuntimeError("This layer's cache is gone; keep a reference to the cache, not to its layers.")
        return cache

    @property
    def store(self) -> RaggedStore:
        """The pairs; there are none before the first `update`."""
        if self._store is None:
            raise RuntimeError("This layer has not seen any token yet.")
        return self._store

    @store.setter
    def store(self, store: RaggedStore) -> None:
        self._store = store

    @property
    def batch_size(self) -> int:
        return self.store.batch if self.is_initialized else -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads = key_states.shape[:2]
        score_dtype = self.cache.score_dtype(key_states.dtype)
        self.store = RaggedStore.empty(batch, heads, key_states, value_states, score_dtype)
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CacheHandle, CacheHandle]:
        """Announce new states; they are stored by `attend`, when the attention call arrives.

        Returns:
            Handles that stand for this layer's keys and values in the model's attention layer.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        check_batch_and_dtype(key_states, self.store.batch, self.store.dtype)
        return take_over(self.cache.config, key_states, value_states, self)

    def attend(self, call: AttentionCall) -> AttentionOutput:
        return self.cache.attend(self, call)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Only the last `query_length` columns of the model's mask are read: they tell padding from tokens."""
        if self.evicted:
            return query_length, self.seen
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor the layer holds."""
        if not self.is_initialized:
            return []
        resting = self.resting.tensors() if self.resting is not None else []
        return [*self.store.tensors(), *resting, *self.extra.values()]

    def candidates(self, sink_tokens: int, recent_tokens: list[int]) -> Candidates:
        """The pairs held, all scored, with the sinks and each row's newest `recent_tokens` marked as protected."""
        store = self.store
        newest = [seen - recent for seen, recent in zip(store.real_tokens, recent_tokens, strict=True)]
        # A number costs a GPU nothing, a tensor a transfer.
        bound: int | torch.Tensor = newest[0]
        if len(set(newest)) > 1:
            bound = torch.tensor(newest, device=store.device)[store.slot_owners()[0] // store.heads]
        protected = (store.places < sink_tokens) | (store.places >= bound)
        scores = store.without_spare(store.scores.masked_fill(protected, math.inf), -math.inf)
        columns = store.pairs.columns
        sizes = store.capacities.view(store.batch, store.heads).tolist()
        return Candidates(self._within_window(scores, columns), columns, store.row_slots(), sizes)

    def arriving_candidates(
        self,
        scores: torch.Tensor,
        first_column: int,
        valid: torch.Tensor | None,
        sink_tokens: int,
        recent_tokens: list[int],
    ) -> Candidates:
        """The same for a whole prompt that is not stored yet.

        Args:
            scores: `(batch, heads, n)`.
            first_column: column of the first of the n tokens.
            valid: `(batch, n)`, bool, False for padding; None when there is none.
            sink_tokens, recent_tokens: as for `candidates`.
        """
        batch, heads, n = scores.shape
        device = scores.device
        recent, before = (
            torch.tensor(count, device=device)[:, None] for count in (recent_tokens, self.store.real_tokens)
        )
        ranks = torch.arange(n, device=device).expand(batch, n) if valid is None else valid.cumsum(1) - 1
        protected = (before + ranks < sink_tokens) | (ranks > ranks[:, -1:] - recent)
        marked = torch.where(protected[:, None], math.inf, scores)
        if valid is not None:
            marked = marked.masked_fill(~valid[:, None], -math.inf)
        columns = torch.arange(first_column, first_column + n, device=device, dtype=torch.int32)
        return Candidates(
            self._within_window(marked, columns).reshape(-1),
            columns.expand(batch, heads, n).reshape(-1),
            [(row * heads * n, (row + 1) * heads * n) for row in range(batch)],
            [[n] * heads] * batch,
        )

    def _within_window(self, scores: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """-inf for pairs that no later token of a sliding-window layer can see."""
        if self.window is None:
            return scores
        return scores.masked_fill(columns <= self.seen - self.window, -math.inf)

    def wake(self) -> None:
        """Bring the pairs to where attention needs them: on the model's device, in the model's dtype."""
        self.prefetch()
        if self.resting is not None and self.asleep:
            wake_up(self.store, self.resting)
            self.asleep = False

    def rest(self) -> None:
        """Put the pairs away as the cache's settings say."""
        cache = self.cache
        # Before the first eviction all pairs are pending, which stay exact.
        if cache.quantization is not None and self.evicted and not self.asleep:
            self.resting = put_to_rest(self.store, int(cache.quantization.removeprefix("int")), self.resting)
            self.asleep = True
        if cache.offload_layers:
            self.offload()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The pairs are awake inside."""
        self.wake()
        try:
            yield
        finally:
            self.rest()

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        if self.device is not None:
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.is_initialized and self.store.scores.device != device:
            self.store = self.store.to(device)
            self.extra = {name: tensor.to(device) for name, tensor in self.extra.items()}
            self.resting = None if self.resting is None else self.resting.to(device)

    def reset(self) -> None:
        self._store, self.seen, self.evicted, self.extra, self.is_initialized = None, 0, False, {}, False
        self.resting, self.asleep = None, False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            if indices.dtype == torch.bool:
                indices = indices.nonzero()[:, 0]
            with self.awake():
                self.store.select_rows(indices)
            self.extra = {name: tensor[indices.to(tensor.device)] for name, tensor in self.extra.items()}

    def activate_past_recording(self) -> None:
        """See `PrunedCache.activate_past_recording`."""
        self.record_past = True

    def check_crop(self, remove: int) -> None:
        """Raise ValueError unless the newest `remove` tokens can be forgotten without a trace."""
        pending = self.store.pending_tokens() if self.is_initialized else 0
        if remove > pending:
            raise ValueError(
                f"Cannot remove {remove} token(s): of {self.seen} seen, the newest {pending} came after the last "
                "eviction, and older ones cannot be rolled back. Take a snapshot() before, or prefill inside "
                "hold_eviction()."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens; see `PrunedCache.crop`."""
        remove = -tokens_to_remove
        self.check_crop(remove)
        if remove > 0:
            self.seen -= remove
            with self.awake():
                self.store.crop(self.seen, remove)
                self.cache.after_crop(self, remove)
