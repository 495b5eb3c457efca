"""The cache of a DAR model: full keys and values for the window, the bottleneck for every token.

Of the last `window` tokens of a sequence it keeps keys and values, in a ring; of every token the bottleneck h W_down,
written in the same step, so that a token is already there when it leaves the window. In the "fast" mode it also keeps
the rotated part of each token's far keys, which decoding would otherwise compute anew in every step ("small" mode).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ..configuration.configuration_dar import LENGTH_DEPENDENT_ROPE
from .dar_plan import AttentionPlan

# A growing buffer gets this share of its tokens as room, and at least so many.
GROWTH, SMALLEST_GROWTH = 16, 64


def ordinary_tensors() -> AbstractContextManager[Any]:
    """What is made inside may be written to later by a pass outside inference mode, too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class DARCacheLayer(CacheLayerMixin):
    """One layer's part. Rows are compact: padding is never stored, and row b's token t lies in column t.

    Buffers (`None` before the first tokens): `bottlenecks` `(batch, capacity, bottleneck size)`; `far_rotary`
    `(batch, capacity, heads, rotary dims)`, in the fast mode; `near_keys`, `near_values` `(batch, heads, ring, head
    dim)`, position p in slot p mod ring.

    Args:
        window: of the model, in tokens.
        fast: whether the rotated part of far keys is kept.
        max_tokens: a fixed capacity, for buffers whose addresses and shapes never change; `None` lets them grow.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, window: int, fast: bool, max_tokens: int | None = None) -> None:
        super().__init__()
        self.window, self.fast, self.max_tokens = window, fast, max_tokens
        self.is_compileable = max_tokens is not None
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.bottlenecks: torch.Tensor | None = None
        self.far_rotary: torch.Tensor | None = None
        self.near_keys: torch.Tensor | None = None
        self.near_values: torch.Tensor | None = None
        # The far path's fused projections, made with the first tokens; see `dar_far_weights`.
        self.far_weights: tuple[torch.Tensor, torch.Tensor | None] | None = None
        # Tokens of the longest row; a static layer's are counted on the device alone.
        self.count = 0
        # Tokens of each row `(batch,)`; `None` while all rows are equally long.
        self.lengths: torch.Tensor | None = None
        # Columns of the input seen, padding included.
        self.columns: int | torch.Tensor = 0
        # While recording: columns since the last `crop`, all of whose keys and values are held in full.
        self.uncropped = 0
        # Columns since the last that held padding; `None` while none has.
        self.unpadded: int | None = None
        # A static layer: no row is longer than this, by what has passed through Python.
        self.longest = 0
        # Tokens of the longest row whose slot in the ring has gone to a later one.
        self.overwritten = 0
        self.is_initialized = False

    @property
    def is_static(self) -> bool:
        """Whether all shapes and addresses are fixed."""
        return self.max_tokens is not None

    @property
    def batch(self) -> int:
        """Rows, 0 before the first tokens."""
        return 0 if self.near_keys is None else self.near_keys.shape[0]

    @property
    def ring(self) -> int:
        """Slots of the ring of full keys and values, tokens."""
        return self.window if self.near_keys is None else self.near_keys.shape[2]

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return 0 if self.bottlenecks is None else self.bottlenecks.shape[1] - self.is_static

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise TypeError("A DARCacheLayer is filled by `append`, not by `update`.")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "A DARCache keeps bottlenecks besides keys and values, which only a DAR model has; use DynamicCache (the "
            "default) with other models."
        )

    def check_dtype_and_device(self, bottleneck: torch.Tensor) -> None:
        """Raise a `ValueError` unless new bottlenecks are of the dtype (but for autocast) and device of those held."""
        held = self.bottlenecks
        if held is None:
            return
        if held.dtype != bottleneck.dtype and not torch.is_autocast_enabled(bottleneck.device.type):
            raise ValueError(
                f"The cache holds {held.dtype} and the model computes in {bottleneck.dtype}: use the model in the "
                "dtype the context was read in."
            )
        if held.device != bottleneck.device:
            raise ValueError(
                f"The cache lies on {held.device} and the model computes on {bottleneck.device}: read the context "
                "with the model where it is now."
            )

    def append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        bottleneck: torch.Tensor,
        far_rotary: torch.Tensor | None,
        plan: AttentionPlan,
    ) -> None:
        """Store new tokens, without their gradients.

        Args:
            key, value: `(batch, heads, new, head dim)`, keys rotated.
            bottleneck: `(batch, new, bottleneck size)`.
            far_rotary: `(batch, new, heads, rotary dims)`, rotated; `None` in the small mode.
            plan: which of the new tokens are real.

        Raises:
            ValueError: more tokens than a static layer holds.
        """
        key, value, bottleneck = key.detach(), value.detach(), bottleneck.detach()
        far_rotary = None if far_rotary is None else far_rotary.detach()
        new = key.shape[2]
        if not self.is_initialized:
            with ordinary_tensors():
                self._start(key, value, bottleneck, far_rotary)
        if plan.order is not None:  # real tokens first
            row = torch.arange(key.shape[0], device=key.device)[:, None]
            key, value = (x.transpose(1, 2)[row, plan.order].transpose(1, 2) for x in (key, value))
            bottleneck = bottleneck[row, plan.order]
            if far_rotary is not None:
                far_rotary = far_rotary[row, plan.order]
            if self.lengths is None:
                self.lengths = torch.full((key.shape[0],), self.count, device=key.device)
        if self.is_static:
            self._append_static(key, value, bottleneck, far_rotary, plan)
        elif self.lengths is None:
            self._append_even(key, value, bottleneck, far_rotary)
        else:
            self._append_ragged(key, value, bottleneck, far_rotary, plan)
        self._note(new, padded=plan.counts is not None)

    def _note(self, new: int, padded: bool) -> None:
        """Count `new` columns that have been stored."""
        self.columns = self.columns + new if not isinstance(self.columns, torch.Tensor) else self.columns.add_(new)
        if self.is_static:
            return  # it takes nothing back, and numbers that grow would have a compiler make its graph anew
        self.uncropped += new
        if padded:
            self.unpadded = 0
        elif self.unpadded is not None:
            self.unpadded += new
        self.overwritten = max(self.overwritten, self.count - self.ring)

    def note_step(self) -> None:
        """Make room for one more token in every row and count it; the caller stores it, as `append` would.

        Raises:
            ValueError: a static layer is full.
        """
        if self.is_static:
            assert self.lengths is not None
            self._check_static(1, 1)
            self.lengths.add_(1)
        else:
            self._make_room(self.count + 1)
            self.count += 1
            self.lengths = None if self.lengths is None else self.lengths + 1
        self._note(1, padded=False)

    def _start(
        self, key: torch.Tensor, value: torch.Tensor, bottleneck: torch.Tensor, far_rotary: torch.Tensor | None
    ) -> None:
        batch, heads, _, dim = key.shape
        # A static layer's last column takes what must not be kept: padding, for its shapes cannot leave it out.
        capacity = 0 if self.max_tokens is None else self.max_tokens + 1
        self.device, self.dtype = key.device, key.dtype
        self.bottlenecks = bottleneck.new_zeros(batch, capacity, bottleneck.shape[-1])
        if far_rotary is not None:
            self.far_rotary = far_rotary.new_zeros(batch, capacity, *far_rotary.shape[2:])
        self.near_keys = key.new_zeros(batch, heads, self.window, dim)
        self.near_values = value.new_zeros(batch, heads, self.window, dim)
        if self.is_static:
            self.lengths = torch.zeros(batch, dtype=torch.long, device=key.device)
            self.columns = torch.zeros((), dtype=torch.long, device=key.device)
            if not torch.compiler.is_compiling():
                for tensor in self.tensors():
                    torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def _make_room(self, tokens: int) -> None:
        """Let `tokens` fit."""
        assert self.bottlenecks is not None
        if tokens <= self.capacity:
            return
        # What comes first is usually a prompt that fills most of what will ever be needed.
        more = tokens + max(SMALLEST_GROWTH, tokens // GROWTH)
        for name in ("bottlenecks", "far_rotary"):
            old = getattr(self, name)
            if old is not None:
                with ordinary_tensors():
                    wide = old.new_empty(old.shape[0], more, *old.shape[2:])
                wide[:, : self.count] = old[:, : self.count]
                wide[:, self.count :] = 0  # never read as a number, but NaN · 0 would be NaN
                setattr(self, name, wide)

    def _widen_ring(self, slots: int) -> None:
        """Give the ring at least `slots` slots, keeping what it holds."""
        assert self.near_keys is not None and self.near_values is not None
        if slots <= self.ring:
            return
        position = torch.arange(self.ring, device=self.near_keys.device)
        last = self.row_lengths()[:, None] - 1
        held = last - (last - position) % max(self.ring, 1)  # the position in each slot; negative: none
        for name in ("near_keys", "near_values"):
            old = getattr(self, name)
            with ordinary_tensors():
                wide = old.new_zeros(*old.shape[:2], slots, old.shape[3])
            target = torch.where(held >= 0, held % slots, slots - 1)
            source = old * (held >= 0)[:, None, :, None]
            wide.scatter_add_(2, target[:, None, :, None].expand_as(old), source)
            setattr(self, name, wide)

    def row_lengths(self) -> torch.Tensor:
        """Tokens of each row, `(batch,)`."""
        assert self.near_keys is not None
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.near_keys.shape[0],), self.count, device=self.near_keys.device)

    def _append_even(
        self, key: torch.Tensor, value: torch.Tensor, bottleneck: torch.Tensor, far_rotary: torch.Tensor | None
    ) -> None:
        """Every row gets as many tokens, and all are equally long."""
        assert self.bottlenecks is not None and self.near_keys is not None and self.near_values is not None
        start, stop = self.count, self.count + key.shape[2]
        self._make_room(stop)
        if self.record_past:
            self._widen_ring(self.window + self.uncropped + key.shape[2])
        self.bottlenecks[:, start:stop] = bottleneck
        if self.far_rotary is not None and far_rotary is not None:
            self.far_rotary[:, start:stop] = far_rotary
        if self.ring:
            kept = min(self.ring, stop - start)
            slot, first = (stop - kept) % self.ring, key.shape[2] - kept
            straight = min(kept, self.ring - slot)  # up to the ring's end; the rest begins again at slot 0
            for ring, states in ((self.near_keys, key), (self.near_values, value)):
                ring[:, :, slot : slot + straight] = states[:, :, first : first + straight]
                ring[:, :, : kept - straight] = states[:, :, first + straight :]
        self.count = stop

    def _append_ragged(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        bottleneck: torch.Tensor,
        far_rotary: torch.Tensor | None,
        plan: AttentionPlan,
    ) -> None:
        """Rows of unequal lengths, or that get unequally many tokens (the real ones first)."""
        assert self.lengths is not None
        new = key.shape[2]
        self._make_room(self.count + new)
        if self.record_past:
            self._widen_ring(self.window + self.uncropped + new)
        counts = torch.full_like(self.lengths, new) if plan.counts is None else plan.counts
        self._scatter(key, value, bottleneck, far_rotary, counts)
        self.lengths = self.lengths + counts
        self.count = int(self.lengths.max())

    def _append_static(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        bottleneck: torch.Tensor,
        far_rotary: torch.Tensor | None,
        plan: AttentionPlan,
    ) -> None:
        """In place, without a look at any value, so that a compiled or captured step can be replayed."""
        assert self.lengths is not None
        new = key.shape[2]
        counts = torch.full_like(self.lengths, new) if plan.counts is None else plan.counts
        self._check_static(new, counts)
        self._scatter(key, value, bottleneck, far_rotary, counts)
        self.lengths += counts

    def _check_static(self, new: int, counts: torch.Tensor | int) -> None:
        """Refuse what does not fit.

        Steps that are compiled or captured cannot look, and their replays do not pass here.
        """
        assert self.lengths is not None and self.max_tokens is not None
        capturing = self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()
        if torch.compiler.is_compiling() or capturing:
            return
        self.longest += new
        if new == 1 and self.longest <= self.max_tokens:
            return  # without a look at the device
        tokens = self.longest = int((self.lengths + counts).max())
        if tokens > self.max_tokens:
            raise ValueError(
                f"This static DARCache holds {self.max_tokens} tokens a row, and {tokens} were asked for: make it "
                "with a larger max_cache_len."
            )

    def _scatter(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        bottleneck: torch.Tensor,
        far_rotary: torch.Tensor | None,
        counts: torch.Tensor,
    ) -> None:
        """Write row b's first `counts[b]` new tokens behind its `lengths[b]` old ones."""
        assert self.bottlenecks is not None and self.lengths is not None
        assert self.near_keys is not None and self.near_values is not None
        batch, _, new, _ = key.shape
        row = torch.arange(batch, device=key.device)[:, None]
        # What stands behind a row's new length has no meaning and is overwritten by the next tokens.
        rank = torch.arange(new, device=key.device)
        column = self.lengths[:, None] + rank
        if self.is_static:
            column = torch.where(rank < counts[:, None], column, self.capacity).clamp_(max=self.capacity)
        self.bottlenecks.index_put_((row, column), bottleneck)
        if self.far_rotary is not None and far_rotary is not None:
            self.far_rotary.index_put_((row, column), far_rotary)
        if not self.ring:
            return
        # The newest position that belongs in each slot, and whether it is one of the new tokens.
        last = (self.lengths + counts - 1)[:, None]
        slot = torch.arange(self.ring, device=key.device)[None]
        offset = last - (last - slot) % self.ring - self.lengths[:, None]
        source = offset.clamp(0, new - 1)[:, None, :, None]
        fresh = (offset >= 0)[:, None, :, None]
        for ring, states in ((self.near_keys, key), (self.near_values, value)):
            taken = states.gather(2, source.expand(-1, states.shape[1], -1, states.shape[3]))
            ring.copy_(torch.where(fresh, taken, ring))

    def recent(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the last `tokens` tokens in their order; rows must be equally long."""
        assert self.near_keys is not None and self.near_values is not None
        position = torch.arange(self.count - tokens, self.count, device=self.near_keys.device)
        slots = position % max(self.ring, 1)
        return self.near_keys[:, :, slots], self.near_values[:, :, slots]

    def row(self, index: int) -> "DARCacheLayer":
        """A view of one row, to read from; its `count` is that row's length."""
        view = DARCacheLayer(self.window, self.fast)
        for name in ("bottlenecks", "far_rotary", "near_keys", "near_values"):
            tensor = getattr(self, name)
            setattr(view, name, None if tensor is None else tensor[index : index + 1])
        view.count = self.count if self.lengths is None else int(self.lengths[index])
        view.is_initialized = True
        return view

    def tensors(self) -> list[torch.Tensor]:
        """Everything the layer holds."""
        held = (self.bottlenecks, self.far_rotary, self.near_keys, self.near_values, self.lengths, self.columns)
        return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]

    def get_seq_length(self) -> int:
        """Columns seen, padding included; a tensor `()` on the device for a static layer that has begun."""
        return self.columns  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.columns) + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.max_tokens is None else self.max_tokens

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget all tokens; a static layer keeps its buffers."""
        if not self.is_static or not self.is_initialized:
            self._clear()
            return
        for tensor in self.tensors():
            tensor.zero_()
        self.far_weights, self.longest, self.unpadded = None, 0, None

    def activate_past_recording(self) -> None:
        """From now on keep full keys and values of all tokens since the last `crop`.

        So they can be taken back.
        """
        if self.is_static:
            raise ValueError(
                "A static DARCache cannot take tokens back, which assisted decoding needs: use DARCache without "
                "max_cache_len."
            )
        self.record_past, self.uncropped = True, 0

    def check_crop(self, tokens: int) -> None:
        """Raise a `ValueError` if the last `tokens` tokens cannot be taken back."""
        if tokens and self.is_static:
            raise ValueError(
                "A static DARCache cannot take tokens back: use DARCache without max_cache_len, or reset()."
            )
        if tokens > int(self.columns):
            raise ValueError(f"Cannot remove {tokens} tokens from a cache that has seen {self.columns}.")
        if self.unpadded is not None and tokens > self.unpadded:
            raise ValueError(
                f"Cannot remove {tokens} token(s): padding is among them, which the cache has not stored."
            )
        # The next token must find the window before it in full.
        if tokens and self.window and max(self.count - tokens - self.window + 1, 0) < self.overwritten:
            raise ValueError(
                f"Cannot remove {tokens} token(s): full keys and values of the {self.window} tokens before them are "
                "no longer held. Call activate_past_recording() before they come."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}.")
        remove = -tokens_to_remove
        self.check_crop(remove)
        self.uncropped = 0
        if not remove or not self.is_initialized:
            return
        self.columns = int(self.columns) - remove
        self.unpadded = None if self.unpadded is None else self.unpadded - remove
        self.count -= remove
        if self.lengths is not None:
            self.lengths = (self.lengths - remove).clamp_(min=0)
            self.count = int(self.lengths.max())

    def _per_row(self, change: Any) -> None:
        if not self.is_initialized:
            return
        for name in ("bottlenecks", "far_rotary", "near_keys", "near_values", "lengths"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            with ordinary_tensors(), torch.no_grad():
                changed = change(tensor)
            if self.is_static and changed.shape == tensor.shape:
                tensor.copy_(changed)
            else:
                setattr(self, name, changed)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._per_row(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._per_row(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self._per_row(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move everything back to the layer's device."""
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for name in ("bottlenecks", "far_rotary", "near_keys", "near_values", "lengths"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.to(device, non_blocking=True))


class DARCache(Cache):
    """Cache of a DAR model, for `generate(..., past_key_values=DARCache(model))`; a DAR model makes one by itself.

    A token beyond the window costs `bottleneck_size` numbers a layer, and `hidden_size · rotary share` more in the
    fast mode, against `2 · hidden_size` for keys and values.

    Args:
        model_or_config: a DAR model or its configuration.
        far_cache: `"fast"` or `"small"`, by default the configuration's; see `DARConfig`.
        max_cache_len: tokens a row. Makes a static cache: buffers of that size from the start, whose addresses and
            shapes never change, for `torch.compile` and CUDA graphs.

    Raises:
        TypeError: the model is no DAR model.
        ValueError: a DAR model without bottleneck, an unknown `far_cache`, or `max_cache_len` < 1.
    """

    layers: list[DARCacheLayer]
    # A checkpoint's code and an installed library have different classes of this name, so models look for this
    # instead.
    keeps_bottlenecks = True

    def __init__(
        self,
        model_or_config: nn.Module | PreTrainedConfig,
        far_cache: str | None = None,
        max_cache_len: int | None = None,
    ) -> None:
        config: Any = getattr(model_or_config, "config", model_or_config)
        if getattr(config, "model_type", None) != "dar":
            kind = getattr(config, "model_type", None) or type(model_or_config).__name__
            raise TypeError(f"DARCache needs a DAR model or its configuration, got {kind!r}.")
        if config.window_size is None:
            raise ValueError("This DAR model has window_size=None and no bottleneck: use transformers' DynamicCache.")
        far_cache = config.far_cache if far_cache is None else far_cache
        if far_cache not in ("fast", "small"):
            raise ValueError(f"far_cache must be 'fast' or 'small', got {far_cache!r}.")
        rope_type = config.rope_parameters.get("rope_type", "default")
        if far_cache == "small" and rope_type in LENGTH_DEPENDENT_ROPE:
            raise ValueError(f"far_cache='small' cannot follow the changing frequencies of rope_type={rope_type!r}.")
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len must be at least 1 token, got {max_cache_len}.")
        self.far_cache, self.max_tokens = far_cache, max_cache_len
        window = config.near_window
        super().__init__(
            layers=[DARCacheLayer(window, far_cache == "fast", max_cache_len) for _ in range(config.num_hidden_layers)]
        )
        # Positions `(batch, capacity)` of the stored tokens for the small mode, int32, shared by all layers.
        self.positions: torch.Tensor | None = None

    def note_positions(self, position_ids: torch.Tensor, plan: AttentionPlan, batch: int) -> torch.Tensor:
        """Remember the new tokens' positions (before any layer appends them); returns those of all tokens.

        Args:
            position_ids: `(batch or 1, new)`.
            plan: which of the new tokens are real.
            batch: rows.

        Returns:
            `(batch, tokens)`, or `(batch, capacity + 1)` of a static cache.
        """
        layer, new = self.layers[0], position_ids.shape[1]
        ids = position_ids.to(torch.int32).expand(batch, new)
        if plan.order is not None:
            ids = ids.gather(1, plan.order)
        if self.positions is None:
            capacity = 0 if layer.max_tokens is None else layer.max_tokens + 1  # the last for padding
            with ordinary_tensors():
                self.positions = ids.new_zeros(batch, capacity)
        if layer.is_static:
            start = layer.lengths if layer.lengths is not None else ids.new_zeros(batch, dtype=torch.long)
        else:
            needed = layer.count + new
            if needed > self.positions.shape[1]:
                with ordinary_tensors():
                    wide = ids.new_zeros(batch, needed + max(SMALLEST_GROWTH, needed // GROWTH))
                wide[:, : layer.count] = self.positions[:, : layer.count]
                self.positions = wide
            if layer.lengths is None:
                self.positions[:, layer.count : needed] = ids
                return self.positions[:, :needed]
            start = layer.lengths
        rank = torch.arange(new, device=ids.device)
        column = start[:, None] + rank
        if layer.is_static:
            spare = self.positions.shape[1] - 1
            column = column.clamp_(max=spare)
            if plan.counts is not None:
                column = torch.where(rank < plan.counts[:, None], column, spare)
        self.positions.scatter_(1, column, ids)
        return self.positions if layer.is_static else self.positions[:, : layer.count + new]

    def nbytes(self) -> int:
        """Bytes of all tensors the cache holds, room for coming tokens and the fused projections included."""
        tensors = [tensor for layer in self.layers for tensor in layer.tensors()]
        tensors += [tensor for layer in self.layers for tensor in layer.far_weights or () if tensor is not None]
        if self.positions is not None:
            tensors.append(self.positions)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def bytes_per_far_token(self) -> int:
        """Bytes that one more token beyond the window costs, all layers together.

        Raises:
            ValueError: the cache is empty, so that its dtype is not known.
        """
        if not self.layers[0].is_initialized:
            raise ValueError("The cache is empty: its dtype is known once tokens have been stored.")
        total = 0 if self.positions is None else self.positions.element_size()
        for layer in self.layers:
            assert layer.bottlenecks is not None
            total += layer.bottlenecks.shape[2] * layer.bottlenecks.element_size()
            if layer.far_rotary is not None:
                total += layer.far_rotary.shape[2] * layer.far_rotary.shape[3] * layer.far_rotary.element_size()
        return total

    @property
    def is_croppable(self) -> bool:
        return self.max_tokens is None

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back.

        Raises:
            ValueError: a positive number, a static cache, or tokens before which the window is no longer held in full
                (`activate_past_recording` before they come keeps it). Nothing has been removed then.
        """
        if tokens_to_remove < 0:
            for layer in self.layers:
                layer.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        if self.max_tokens is None:
            self.positions = None

    def _change_positions(self, change: Any) -> None:
        if self.positions is not None:
            with ordinary_tensors(), torch.no_grad():
                changed = change(self.positions)
            if self.max_tokens is not None and changed.shape == self.positions.shape:
                self.positions.copy_(changed)
            else:
                self.positions = changed

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._change_positions(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change_positions(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._change_positions(lambda tensor: tensor[indices.to(tensor.device)])
