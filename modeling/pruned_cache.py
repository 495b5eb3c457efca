"""`PrunedCache`: a key-value cache that keeps the pairs its policy scores highest, within a budget.

What it stores: of every layer with full attention, the kept pairs of each row and key-value head in flat buffers
(`ragged_store`), `2 * head dim` numbers and 12 bytes a pair, plus `eviction_interval` spare places a head. Heads and
layers may hold different numbers of pairs, and what is evicted is freed. Sliding-window layers of hybrid models are
left to transformers' own layer, which holds the window and no more.

When it evicts: after each layer's attention of a forward pass over several tokens (prefill, or a further turn), so a
prefill holds what is kept and about one layer's states; and during decode whenever `eviction_interval`
tokens have been added since the last eviction, so that bytes and time a step are bounded however many tokens are seen.

Positions stay true: `get_seq_length()` is the number of tokens seen, kept keys keep their rotary positions, and masks
compare positions in the sequence, never places in the cache.

A policy subclasses this and gives one method, `score`, which looks at keys and values. One that looks at queries sets
`watches_queries` and gives `watch` too.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig

from .attention_dispatch import AttentionCall, AttentionOutput
from .budgets import ALLOCATIONS, Allocation, Candidates, check_budget, passing, select, weakest_kept
from .context_file import read_context, write_context
from .continued_positions import check_positions_continue
from .forward_pass import ForwardPass
from .layer_state import CacheSnapshot, all_tensors, copy_layer_state, put_layer_state
from .prunable_models import attention_types, refuse_unsupported, text_config
from .ragged_attention import ragged_attention
from .ragged_decode import decode_attention
from .ragged_layer import RaggedLayer
from .received_attention import NO_COLUMN
from .resting_pairs import QUANTIZATIONS, Quantization
from .row_budgets import RowBudgets
from .window_layer import WindowLayer

# First tokens that every policy keeps unless the user says otherwise.
SINK_TOKENS = 4
# Share of the budget that goes to the newest tokens unless the user says otherwise.
RECENT_SHARE = 0.25
# Layers compete for a shared budget when they hold more than all of it by this share, and by this many bytes: each
# time, what stays of every earlier layer is copied.
TRIM_SLACK = 0.08
TRIM_BYTES = 16 << 20


@dataclass
class Queries:
    """The queries of one forward pass in one layer, for policies that watch them.

    Attributes:
        states: `(batch, query heads, n, head dim)`, rotated; the model's own, not a copy.
        columns: `(batch, n)`, int64, each query's index in its row's sequence, `NO_COLUMN` for padding.
        scaling: factor on query-key products.
        padded: whether there is padding.
    """

    states: torch.Tensor
    columns: torch.Tensor
    scaling: float
    padded: bool


@dataclass
class TokenStates:
    """What a policy may look at when it scores tokens of one layer.

    Attributes:
        layer_idx: the layer.
        keys: `(batch, heads, n, head dim)`, as cached: rotated at `positions`.
        values: `(batch, heads, n, value dim)`.
        positions: `(batch, n)`, int64, rotary positions.
        real: `(batch, n)`, bool, False where an entry only fills up a shorter row; None when all are real.
        seen: tokens seen so far, these included.
    """

    layer_idx: int
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor | None
    seen: int


class PrunedCache(Cache):
    """Base of the pruning policies; pass an instance as `past_key_values=` to `generate` or to a forward pass.

    Args:
        model_or_config: the model the cache is for, or that model's own configuration object (not a copy).
        budget: pairs to keep, a layer and key-value head on average.
        retention_ratio: in place of `budget`: the share of the tokens seen at the end of the last prefill, in (0, 1].
        sink_tokens: first tokens of each row, always kept.
        recent_tokens: newest tokens of each row, always kept; a quarter of the budget by default. Sinks and recent
            tokens count towards the budget.
        allocation: where pairs compete: "uniform" inside each head, "head" across the heads of a layer, "global"
            across all layers and heads. Default: the policy's own.
        eviction_interval: tokens that decode may add before it evicts down to the budget again.
        offloading: keep every pruned layer on the CPU except while it is used.
        quantization: "int8" or "int4" to store kept pairs in 8 or 4 bits a number except while their layer is used
            (needs torchao; see `resting_pairs`). Tokens since the last eviction stay exact.

    Raises:
        TypeError, ValueError: see `budgets.check_budget`; also a model whose cache cannot be pruned.
    """

    default_allocation: Allocation = "uniform"
    # Whether the policy looks at queries, in `watch`.
    watches_queries = False
    is_compileable = False  # lengths change from step to step

    def __init__(
        self,
        model_or_config: nn.Module | PreTrainedConfig,
        *,
        budget: int | None = None,
        retention_ratio: float | None = None,
        sink_tokens: int = SINK_TOKENS,
        recent_tokens: int | None = None,
        allocation: Allocation | None = None,
        eviction_interval: int = 64,
        offloading: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        check_budget(budget, retention_ratio, sink_tokens, recent_tokens)
        allocation = self.default_allocation if allocation is None else allocation
        if allocation not in ALLOCATIONS:
            raise ValueError(f"allocation must be one of {', '.join(ALLOCATIONS)}, got {allocation!r}.")
        if isinstance(eviction_interval, bool) or not isinstance(eviction_interval, int) or eviction_interval < 1:
            raise ValueError(f"eviction_interval must be a whole number of at least 1, got {eviction_interval!r}.")
        if quantization is not None and quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization must be None, {' or '.join(QUANTIZATIONS)}, got {quantization!r}.")
        self.config = text_config(model_or_config)
        self.budget, self.retention_ratio = budget, retention_ratio
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        self.allocation: Allocation = allocation
        self.eviction_interval = eviction_interval
        self.offload_layers, self.quantization = offloading, quantization
        self._held = False
        self._row_budgets = RowBudgets(budget, retention_ratio, sink_tokens)
        self._weakest_kept: list[torch.Tensor] | None = None
        self._pass = ForwardPass()
        super().__init__(layers=self._make_layers())

    # -- the policy -------------------------------------------------------------------------------------------------

    def score(self, states: TokenStates) -> torch.Tensor:
        """Importance of tokens, higher is kept longer; each token is scored once.

        Returns:
            `(batch, heads, n)`, finite, comparable across whatever `allocation` lets compete.
        """
        raise TypeError(f"{type(self).__name__} is a base class without a policy; use one of its subclasses.")

    def watch(self, layer: RaggedLayer, queries: Queries) -> None:
        """With `watches_queries`: a layer's queries of every pass, before any of its pairs may be evicted.

        The new pairs have been stored by then, except of a prompt that is evicted as it comes, when nothing is stored
        yet and `score` gets the keys next. What is to be remembered goes to `layer.extra`, as tensors `(batch, …)`.
        """

    def after_crop(self, layer: RaggedLayer, removed: int) -> None:
        """Called when a layer's newest `removed` tokens have been forgotten; those up to `layer.seen` are left."""

    def recent_of(self, budget: int) -> int:
        """Newest tokens to protect in a row that may keep `budget`."""
        wanted = self.recent_tokens if self.recent_tokens is not None else max(1, int(budget * RECENT_SHARE))
        return max(1, min(wanted, budget - self.sink_tokens))

    def after_eviction(self, layer: RaggedLayer) -> None:
        """Called when a layer's pairs have been evicted; for policies that change kept pairs."""

    # -- what it holds ----------------------------------------------------------------------------------------------

    @property
    def ragged_layers(self) -> list[RaggedLayer]:
        """The layers that are pruned."""
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    def nbytes(self) -> int:
        """Bytes of all tensors the cache holds, bookkeeping and spare places included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in all_tensors(self.layers))

    def kept_pairs(self) -> int:
        """Key-value pairs held, over rows, layers and key-value heads (sliding layers included)."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, RaggedLayer):
                total += layer.store.kept if layer.is_initialized else 0
            elif layer.is_initialized:
                total += math.prod(layer.keys.shape[:3])
        return total

    def kept_columns(self, layer_idx: int, row: int = 0) -> list[list[int]]:
        """Per key-value head, the kept tokens' indices in the row's sequence (padding counted), ascending."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, RaggedLayer) or not layer.is_initialized:
            raise ValueError(f"Layer {layer_idx} holds no pruned pairs.")
        pairs, heads = layer.store.pairs, layer.store.heads
        segments = range(row * heads, (row + 1) * heads)
        starts, lengths = pairs.starts.tolist(), pairs.host_lengths.tolist()
        return [pairs.columns[starts[s] : starts[s] + lengths[s]].tolist() for s in segments]

    def __repr__(self) -> str:
        size = f"budget={self.budget}" if self.budget is not None else f"retention_ratio={self.retention_ratio}"
        return f"{type(self).__name__}({size}, seen={self.get_seq_length()}, kept_pairs={self.kept_pairs()})"

    # -- attention --------------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RaggedLayer.update`. Layers that are not pruned behave as in transformers."""
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def attend(self, layer: RaggedLayer, call: AttentionCall) -> AttentionOutput:
        """Attention of one layer's new tokens over what is kept and themselves; then eviction where it is due.

        Args:
            layer: the layer's state.
            call: query `(batch, heads, n, head_dim)`, keys and values `(batch, key-value heads, n, head_dim)`.

        Returns:
            `(batch, n, heads, head_dim)` as stock attention functions give it, and no weights.

        Raises:
            ValueError: what pruning does not support, or positions of several new tokens that overlap with those of
                the cache; `position_ids=None` is not checked.
        """
        refuse_unsupported(call)
        batch, _, n, _ = call.keys.shape
        if layer.is_first and layer.record_past and not self._held:
            self._evict_when_due(layer)  # what is still here at the next pass has been accepted
        layer.device = call.keys.device
        layer.wake()
        valid = self._pass.validity(call.mask, batch, n)
        if layer.is_first and layer.seen > 0:
            check_positions_continue(call.position_ids, valid, layer.store.real_tokens)
        positions = self._pass.positions(call.position_ids, valid, batch, n, layer.device, layer.store.real_tokens)
        prefill = n > 1
        holding = self._held or layer.record_past
        if prefill and layer.is_first and not holding:
            self._row_budgets.settle(_added(layer.store.real_tokens, valid, n))
        first_column, layer.seen = layer.seen, layer.seen + n
        with torch.no_grad():
            keys, values = call.keys, call.values
            queries = self._queries(call, valid, first_column) if self.watches_queries else None
            if first_column == 0:
                output = call.stock(call.keys, call.values, call.mask)
                evicting = (
                    prefill
                    and not holding
                    and self._row_budgets.exceeded_by(_added(layer.store.real_tokens, valid, n))
                )
                if not evicting:
                    layer.store.append(keys, values, 0, positions, valid, self._spare(layer, n))
                if queries is not None:
                    self.watch(layer, queries)
                if evicting:
                    self._evict_arrivals(layer, keys, values, 0, positions, valid)
            else:
                layer.store.append(keys, values, first_column, positions, valid, self._spare(layer, n))
                output = self._attend_stored(layer, call, valid, first_column)
                if queries is not None:
                    self.watch(layer, queries)
                if prefill and not holding and self._row_budgets.exceeded_by(layer.store.real_tokens):
                    self._evict(layer)
            if layer.is_last and not prefill and not holding:
                self._evict_when_due(layer)
        layer.rest()
        if layer.is_last:
            self._pass.forget()
        return output

    def _attend_stored(
        self, layer: RaggedLayer, call: AttentionCall, valid: torch.Tensor | None, first_column: int
    ) -> AttentionOutput:
        store, n = layer.store, call.query.shape[2]
        even = store.uniform_length
        if even is not None and valid is None:
            if not layer.evicted and even == layer.seen:
                return call.stock(*store.dense(), call.mask)
            if n == 1 and layer.window is None:
                return call.stock(*store.dense(), None)
        if n == 1 and layer.window is None and valid is None:
            pairs = store.stored
            return decode_attention(call.query, pairs.keys, pairs.values, store.plan, call.scaling), None
        columns = torch.arange(first_column, first_column + n, device=call.query.device, dtype=torch.int32)
        output = ragged_attention(call.query, store.pairs, call.scaling, columns, layer.window, tail=valid is None)
        return output.contiguous(), None  # as stock functions give it, for models that take a view

    def _queries(self, call: AttentionCall, valid: torch.Tensor | None, first_column: int) -> Queries:
        batch, _, n, _ = call.query.shape
        device = call.query.device

        def counted() -> torch.Tensor:
            columns = torch.arange(first_column, first_column + n, device=device).repeat(batch, 1)
            return columns if valid is None else columns.masked_fill_(~valid, NO_COLUMN)

        columns = self.once(("columns", first_column, n, device), counted, valid)
        return Queries(call.query.detach(), columns, call.scaling, valid is not None)

    def once(self, name: Hashable, make: Callable[[], torch.Tensor], *sources: Any) -> torch.Tensor:
        """What `make` gives, computed once for all layers of a forward pass: it must not be changed in place.

        Args:
            name: of the thing, with the numbers it depends on.
            make: computes it.
            sources: objects it depends on; a layer that has others gets its own.
        """
        return self._pass.once(name, make, *sources)

    # -- eviction ---------------------------------------------------------------------------------------------------

    def compress(self) -> None:
        """Evict down to the budget now, in all layers; nothing happens where the budget is not exceeded."""
        layers = [layer for layer in self.ragged_layers if layer.seen > 0]
        if not layers:
            return
        self._row_budgets.settle(layers[0].store.real_tokens)
        self._evict_all(layers)

    @contextmanager
    def hold_eviction(self) -> Iterator[None]:
        """Inside, nothing is evicted; at the end the cache is compressed once.

        A prompt prefilled in chunks inside this context ends exactly as if prefilled at once (and needs as much
        memory as a full cache until then). Outside, every chunk is evicted as it comes, and later chunks see what
        earlier ones left.
        """
        if self._held:
            raise RuntimeError("hold_eviction() is already active on this cache.")
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.compress()

    def ingest(self, full_cache: Cache, attention_mask: torch.Tensor | None = None) -> "PrunedCache":
        """Take over a prompt prefilled with a full `DynamicCache`, evicting as a prefill with this cache would.

        Args:
            full_cache: a cache of the same model with one or more tokens seen; it is left as it is.
            attention_mask: `(batch, tokens seen)`, 1 for tokens and 0 for padding, if the prompt was padded.

        Returns:
            This cache.
        """
        if self.watches_queries:
            raise ValueError(
                f"{type(self).__name__} judges pairs by queries, which a full cache does not hold: read the prompt "
                "with this cache itself."
            )
        if self.get_seq_length() > 0:
            raise ValueError("ingest() needs an empty cache; call reset() first.")
        if len(full_cache.layers) != len(self.layers) or full_cache.get_seq_length() == 0:
            raise ValueError(
                f"Expected a filled cache of {len(self.layers)} layers, got {len(full_cache.layers)} layers and "
                f"{full_cache.get_seq_length()} tokens seen."
            )
        with torch.no_grad():
            for layer, source in zip(self.layers, full_cache.layers, strict=True):
                if isinstance(layer, RaggedLayer):
                    self._ingest_layer(layer, source, full_cache.get_seq_length(), attention_mask)
                else:
                    put_layer_state(layer, copy_layer_state(source), copy=False)
        return self

    def _ingest_layer(self, layer: RaggedLayer, source: Any, seen: int, attention_mask: torch.Tensor | None) -> None:
        keys, values = source.keys.detach(), source.values.detach()
        batch, _, n, _ = keys.shape  # a sliding-window layer holds fewer tokens than it has seen
        layer.lazy_initialization(keys, values)
        valid, before = None, [seen - n] * batch
        positions = torch.arange(seen - n, seen, device=keys.device).expand(batch, n)
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.to(keys.device).bool()
            valid, before = real[:, -n:], real[:, : seen - n].sum(1).tolist()
            positions = (real.cumsum(1) - 1).clamp(min=0)[:, -n:]
        layer.store.real_tokens = before
        layer.seen, tokens = seen, _added(before, valid, n)
        if layer is self._ends()[0] and not self._held:
            self._row_budgets.settle(tokens)
        if not self._held and self._row_budgets.exceeded_by(tokens):
            self._evict_arrivals(layer, keys, values, seen - n, positions, valid)
        else:
            layer.store.append(keys, values, seen - n, positions, valid, self._spare(layer, n))
        layer.rest()

    def _ends(self) -> tuple[RaggedLayer, RaggedLayer]:
        layers = self.ragged_layers
        return layers[0], layers[-1]

    def _spare(self, layer: RaggedLayer, n: int) -> int:
        """Free places to leave each head when its layer has to grow for n more tokens."""
        if layer.evicted:
            return self.eviction_interval
        return max(self.eviction_interval, (layer.store.longest + n) // 8)

    def _evict_when_due(self, layer: RaggedLayer) -> None:
        """During decode: evict once `eviction_interval` tokens have come and the budget is exceeded."""
        if layer.store.pending_tokens() < self.eviction_interval:
            return
        if not self._row_budgets.settled:
            self._row_budgets.set(layer.store.real_tokens)
        if self._row_budgets.exceeded_by(layer.store.real_tokens):
            self._evict_all(self.ragged_layers)

    def _evict_all(self, layers: list[RaggedLayer]) -> None:
        with torch.no_grad():
            if not self._row_budgets.exceeded_by(layers[0].store.real_tokens):
                return
            candidates = []
            for layer in layers:
                layer.wake()
                self._score_pending(layer)
                candidates.append(self._candidates(layer))
                layer.rest()
            for layer, keep in zip(layers, self._select(candidates), strict=True):
                self._keep(layer, keep)

    def _evict(self, layer: RaggedLayer) -> None:
        """Evict one layer that already held pairs, and trim the layers before it where they compete with it."""
        self._score_pending(layer)
        own, earlier = self._choose(layer, self._candidates(layer))
        self._keep(layer, own)
        for rival, keep in earlier:
            self._keep(rival, keep)

    def _evict_arrivals(
        self,
        layer: RaggedLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        first_column: int,
        positions: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> None:
        """First prefill: store only what survives, straight from the model's states."""
        scores = self._checked_score(TokenStates(layer.layer_idx, keys, values, positions, valid, layer.seen))
        recent = [self.recent_of(budget) for budget in self._row_budgets.known()]
        arrivals = layer.arriving_candidates(scores, first_column, valid, self.sink_tokens, recent)
        own, earlier = self._choose(layer, arrivals)
        layer.store.fill(
            keys, values, scores, own.view(scores.shape), first_column, positions, valid, self.eviction_interval
        )
        layer.evicted = True
        self.after_eviction(layer)
        for rival, keep in earlier:
            self._keep(rival, keep)

    def _choose(
        self, layer: RaggedLayer, own: Candidates
    ) -> tuple[torch.Tensor, list[tuple[RaggedLayer, torch.Tensor]]]:
        """What a layer keeps of its candidates, and what earlier layers have to give up for it.

        With global allocation all layers share the budget, and the layers to come are not known yet. But the best of
        the layers so far contain the best of all: whatever is not among them can go at once. So the layers compete
        anew whenever they hold noticeably more than the whole budget, and at the last one; in between, a layer's pairs
        only have to reach the weakest that was kept in the last competition.

        Returns:
            `(slots,)` bool for the layer, and the same for each earlier layer that has to be trimmed.
        """
        if self.allocation != "global":
            return self._select([own])[0], []
        layers = self.ragged_layers
        rivals, last = layers[: layers.index(layer)], layer is layers[-1]
        if not rivals:
            self._weakest_kept = None
        keep = passing(own, self._weakest_kept)
        allowed = sum(self._row_budgets.known()) * len(layers) * layer.store.heads
        surplus = sum(rival.store.kept for rival in rivals) + int(keep.sum()) - allowed
        pairs = layer.store.pairs
        pair_bytes = (pairs.keys.shape[1] + pairs.values.shape[1]) * pairs.keys.element_size()
        if not last and surplus <= max(TRIM_SLACK * allowed, TRIM_BYTES / pair_bytes):
            return keep, []
        contenders = [*(self._candidates(rival) for rival in rivals), own]
        *earlier, keep = keeps = self._select(contenders)
        self._weakest_kept = weakest_kept(contenders, keeps)
        return keep, list(zip(rivals, earlier, strict=True))

    def _keep(self, layer: RaggedLayer, keep: torch.Tensor) -> None:
        layer.wake()
        # An offloaded rival was chosen from where it lay.
        layer.store.keep(keep.to(layer.store.scores.device), self.eviction_interval)
        layer.evicted = True
        self.after_eviction(layer)
        layer.rest()

    def _score_pending(self, layer: RaggedLayer) -> None:
        """Give the pairs that came since the last eviction their scores.

        Policies that watch queries score all pairs of the layer here, and end like this one with none pending.
        """
        store = layer.store
        if store.pending_tokens() == 0:
            return
        keys, values, positions, real = store.pending_states()
        scores = self._checked_score(TokenStates(layer.layer_idx, keys, values, positions, real, layer.seen))
        store.score_pending(scores)

    def score_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which scores are held for a model of `dtype`: float32, but float64 where queries give them in float64."""
        return torch.float64 if self.watches_queries and dtype == torch.float64 else torch.float32

    def _checked_score(self, states: TokenStates) -> torch.Tensor:
        scores = self.score(states).to(self.score_dtype(states.keys.dtype))
        expected = states.keys.shape[:3]
        if scores.shape != expected:
            raise ValueError(
                f"{type(self).__name__}.score gave shape {tuple(scores.shape)} in layer {states.layer_idx}, "
                f"expected {tuple(expected)} (batch, key-value heads, tokens)."
            )
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(
                f"{type(self).__name__}.score gave values that are not finite in layer {states.layer_idx}: a key, a "
                "value or the policy's own parameters hold NaN or infinity."
            )
        return scores

    def _candidates(self, layer: RaggedLayer) -> Candidates:
        recent = [self.recent_of(budget) for budget in self._row_budgets.known()]
        return layer.candidates(self.sink_tokens, recent)

    def _select(self, candidates: list[Candidates]) -> list[torch.Tensor]:
        """Which candidates stay, one flat mask a layer, by `allocation`."""
        store = self.ragged_layers[0].store
        budgets = self._row_budgets.known()
        return select(candidates, budgets, store.heads, len(self.ragged_layers), self.allocation)

    # -- rolling back, copies, files --------------------------------------------------------------------------------

    @property
    def row_budgets(self) -> list[int] | None:
        """Pairs each row may keep, a layer and head on average; None before they are known."""
        return None if self._row_budgets.rows is None else list(self._row_budgets.rows)

    def restore_budgets(self, row_budgets: list[int] | None) -> None:
        """Set `row_budgets`; None derives them from the tokens seen."""
        layers = [layer for layer in self.ragged_layers if layer.is_initialized]
        if row_budgets is not None:
            self._row_budgets.rows = list(row_budgets)
        elif layers:
            self._row_budgets.set(layers[0].store.real_tokens)
        self._row_budgets.settled = self._row_budgets.rows is not None

    @property
    def _recording(self) -> bool:
        return any(layer.record_past for layer in self.ragged_layers)

    def activate_past_recording(self) -> None:
        """Evict no longer in a forward pass but in `crop`, or when the next pass begins: assisted decoding rolls back.

        A prompt that is prefilled in this mode is held in full until then.
        """
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens: `-n` for n of them, 0 for none.

        Args:
            tokens_to_remove: not positive.

        Raises:
            ValueError: a positive number; tokens that took part in an eviction, or that a sliding-window layer of a
                hybrid model can no longer give back (`activate_past_recording` before they come makes it keep them).
                Nothing has been removed then.
        """
        remove = -tokens_to_remove
        if remove < 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}.")
        for layer in self.layers:
            if isinstance(layer, RaggedLayer):
                layer.check_crop(remove)
            elif remove and layer.get_seq_length() >= layer.sliding_window and not layer.record_past:
                raise ValueError(
                    f"Cannot remove {remove} token(s): a sliding-window layer has let go of what lay before them. "
                    "Take a snapshot() before, or call activate_past_recording() before they come."
                )
        super().crop(tokens_to_remove)
        layers = [layer for layer in self.ragged_layers if layer.is_initialized]
        if self._recording and not self._held and layers:
            self._evict_when_due(layers[-1])

    def reset(self) -> None:
        """Empty the cache; its settings stay."""
        self.layers = self._make_layers()
        self._row_budgets.forget()
        self._pass.forget()
        self._held = False

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if (rows := self._row_budgets.rows) is not None:
            self._row_budgets.rows = [budget for budget in rows for _ in range(repeats)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        indices = indices.cpu()  # once, not layer by layer
        super().batch_select_indices(indices)
        if (rows := self._row_budgets.rows) is not None:
            chosen = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
            self._row_budgets.rows = [rows[row] for row in chosen.tolist()]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        beam_idx = beam_idx.cpu()  # once, not layer by layer
        super().reorder_cache(beam_idx)
        if (rows := self._row_budgets.rows) is not None:
            self._row_budgets.rows = [rows[row] for row in beam_idx.tolist()]

    def snapshot(self) -> CacheSnapshot:
        """A copy of the contents, to come back to with `restore`; it takes the bytes of the pairs unquantised."""
        copies: dict[int, torch.Tensor] = {}
        states = [copy_layer_state(layer, copies) for layer in self.layers]
        return CacheSnapshot(states, self.row_budgets, self._row_budgets.settled)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Put the contents back as they were when `snapshot` was taken; the snapshot can be used again."""
        if len(snapshot.layers) != len(self.layers):
            raise ValueError(
                f"The snapshot has {len(snapshot.layers)} layers, this cache {len(self.layers)}: "
                "it was taken from another model's cache."
            )
        copies: dict[int, torch.Tensor] = {}
        for layer, state in zip(self.layers, snapshot.layers, strict=True):
            put_layer_state(layer, state, copies=copies)
        self._row_budgets.rows = None if snapshot.row_budgets is None else list(snapshot.row_budgets)
        self._row_budgets.settled = snapshot.budgets_settled

    def __reduce__(self) -> Any:
        raise TypeError(
            f"A {type(self).__name__} belongs to its model's configuration object and cannot be pickled: use "
            "save_context() and load_context()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrunedCache":
        twin = self.__class__.__new__(self.__class__)
        # Settings, and a policy's own parameters, are shared: only the contents are copied.
        twin.__dict__.update(self.__dict__)
        memo[id(self)] = twin
        twin._held = False
        twin._pass = ForwardPass()
        twin.layers = twin._make_layers()
        copies: dict[int, torch.Tensor] = {}
        for layer, original in zip(twin.layers, self.layers, strict=True):
            put_layer_state(layer, copy_layer_state(original, copies), copy=False)
            layer.record_past = original.record_past
        twin._row_budgets = copy(self._row_budgets)
        return twin

    def settings(self) -> dict[str, Any]:
        """Constructor arguments that make an equal, empty cache (a policy adds its own)."""
        return {
            "budget": self.budget,
            "retention_ratio": self.retention_ratio,
            "sink_tokens": self.sink_tokens,
            "recent_tokens": self.recent_tokens,
            "allocation": self.allocation,
            "eviction_interval": self.eviction_interval,
            "quantization": self.quantization,
        }

    def save_context(self, path: str | Path) -> None:
        """Write the compressed context to one safetensors file, to be loaded in another process.

        The file is written beside and renamed.
        """
        if self.get_seq_length() == 0:
            raise ValueError("The cache is empty: there is no context to save.")
        write_context(Path(path), self)

    @classmethod
    def load_context(
        cls, path: str | Path, model_or_config: nn.Module | PreTrainedConfig, **options: Any
    ) -> "PrunedCache":
        """A cache with the contents of a file written by `save_context`.

        Args:
            path: the file.
            model_or_config: the same model, or another of the same shape.
            options: constructor arguments in place of the saved ones (a policy's prototypes, for instance).

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a file, another policy's, or another model's.
        """
        return read_context(Path(path), cls, model_or_config, options)

    def _make_layers(self) -> list[Any]:
        types = attention_types(self.config)
        window = getattr(self.config, "sliding_window", None)
        hybrid = "full_attention" in types
        layers: list[Any] = []
        for layer_idx, kind in enumerate(types):
            if kind == "full_attention":
                layers.append(RaggedLayer(self, layer_idx, None))
            elif hybrid:
                layers.append(WindowLayer(sliding_window=window))
            else:
                layers.append(RaggedLayer(self, layer_idx, window))
        pruned = [layer for layer in layers if isinstance(layer, RaggedLayer)]
        if pruned:
            pruned[0].is_first = pruned[-1].is_last = True
        return layers


def _added(real_tokens: list[int], valid: torch.Tensor | None, n: int) -> list[int]:
    counts = [n] * len(real_tokens) if valid is None else valid.sum(1).tolist()
    return [a + b for a, b in zip(real_tokens, counts, strict=True)]
