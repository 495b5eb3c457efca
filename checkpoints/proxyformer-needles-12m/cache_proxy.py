"""The cache of a ProxyFormer: proxies of the blocks that are finished, raw keys and values of the current one.

A token's keys and values are held while its block is the current one (or one of `retained_blocks` before it). Once a
block is full and a later token needs it, its token ids run through the history stream, its proxies are appended, and
its raw keys and values make room (Section 3.8 and Eq. 21 of the paper).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from .proxy_buffers import RaggedBuffer
from .proxy_reading import ProxyLevel
from .released_features import ReleasedFeatures

Change = Callable[[torch.Tensor], torch.Tensor]


class ProxyCacheLayer(CacheLayerMixin):
    """One layer's part.

    Attributes:
        raw_keys, raw_values: `(batch, heads, (retained + 1) · block, head dim)`: those retained, then the current.
        levels: keys and values of proxies that the generation stream reads, the finest level first; coarser ones as
            `distance_ratios` say.
        interaction: what attention among proxies keeps of them: their keys and values.
        hidden: what a recurrence among proxies keeps: `(batch, d_proxy)`.
        unmerged: proxies that wait for a coarser level's group to be full, `(batch, 1, n, d_proxy)`.
        before: local features that the next block's compression also reads, `(batch, overlap, d_h)`.
    """

    is_croppable = False

    def __init__(self, config: Any, cache: "ProxyCache") -> None:
        super().__init__()
        # A proxy's keys and values lie beside each other in one buffer.
        self.levels = [RaggedBuffer() for _ in range(1 + len(config.distance_ratios or ()))]
        self.interaction = RaggedBuffer()
        self.unmerged = RaggedBuffer()
        self.hidden: torch.Tensor | None = None
        self.before: torch.Tensor | None = None
        self.raw_keys: torch.Tensor | None = None
        self.raw_values: torch.Tensor | None = None
        self._count = cache.counter

    # --- what the attention reads -----------------------------------------------------------------------------------

    def proxy_levels(self, groups: list[int]) -> list[ProxyLevel] | None:
        """Keys and values of all proxies, or `None` before the first."""
        if self.levels[0].data is None:
            return None
        found = []
        for buffer, group in zip(self.levels, groups, strict=True):
            pair = buffer.view()
            if pair is None:
                like = self.levels[0].data
                pair = like.new_zeros(like.shape[0], like.shape[1], 0, like.shape[3])
            key, value = pair.chunk(2, dim=-1)
            found.append(ProxyLevel(key, value, group, buffer.start))
        return found

    def interaction_past(self) -> tuple[torch.Tensor | None, ...] | None:
        """What the interaction keeps of earlier proxies, each row its own."""
        if self.hidden is not None:
            return (self.hidden,)
        self.interaction.own_rows()
        pair = self.interaction.view()
        if pair is None:
            return None
        key, value = pair.chunk(2, dim=-1)
        return key, value, self.interaction.valid()

    # --- transformers' interface ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise TypeError("A ProxyCacheLayer is filled by its model, not by `update`.")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "A ProxyCache keeps proxies, which only a ProxyFormer model has; use DynamicCache (the default) with "
            "other models."
        )

    def get_seq_length(self) -> int:
        return self._count.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._count.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def buffers(self) -> list[RaggedBuffer]:
        return [*self.levels, self.interaction, self.unmerged]

    def map(self, change: Change) -> None:
        """Replace every plain tensor of the layer."""
        for name in ("raw_keys", "raw_values", "hidden", "before"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def reset(self) -> None:
        """Forget this layer's part."""
        for buffer in self.buffers():
            buffer.clear()
        self.raw_keys = self.raw_values = self.hidden = self.before = None

    def _move(self, device: torch.device | str) -> None:
        for buffer in self.buffers():
            buffer.map(lambda tensor: tensor.to(device, non_blocking=True))
        self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def offload(self) -> None:
        if self.raw_keys is not None:
            self._home = self.raw_keys.device
            self._move("cpu")

    def prefetch(self) -> None:
        home = getattr(self, "_home", None)
        if home is not None:
            self._move(home)

    def crop(self, *args: Any) -> None:
        raise ValueError(
            "A ProxyCache cannot take tokens back: blocks that have been compressed are gone. Use copy.deepcopy of it "
            "before, or a model that drafts without cropping."
        )

    def activate_past_recording(self) -> None:
        raise ValueError("A ProxyCache cannot take tokens back, so assisted decoding cannot use it as the target's.")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise TypeError("Reorder the whole ProxyCache, not a layer of it.")

    batch_repeat_interleave = batch_select_indices = reorder_cache

    def nbytes(self) -> int:
        """Bytes of the layer's tensors, spare room included."""
        plain = (self.raw_keys, self.raw_values, self.hidden, self.before)
        return sum(buffer.nbytes() for buffer in self.buffers()) + sum(x.nbytes for x in plain if x is not None)


class _Counter:
    """Columns of input that a cache has seen, padding included; shared with its layers."""

    columns = 0


class ProxyCache(Cache):
    """Cache of a ProxyFormer, for `generate(…, past_key_values=ProxyCache(model))`; the model makes one by itself.

    Args:
        model_or_config: a ProxyFormer or its configuration.
        released_features: what becomes of a block's local features once it is compressed, by default the
            configuration's: `"drop"`; `"keep"`; `"offload"`, to the CPU; `"quantize"`, to 8 bits. See `released`.

    Attributes:
        fill: for each row, how many raw tokens its current block holds.
        retained: for each row, how many blocks before the current one are there raw.
        lengths: for each row, tokens it has seen, padding not counted.
        pending: `(batch, block)`, ids of the current block's tokens.
        context: `(batch, stem)`, ids of the tokens before, which the history's stem looks back at; -1 for none.
        released: local features of compressed blocks, where they are kept.

    Raises:
        TypeError: no ProxyFormer.
        ValueError: a plain decoder, or an unknown `released_features`.
    """

    layers: list[ProxyCacheLayer]
    # A checkpoint's code and an installed library have different classes of this name, so models look for this.
    keeps_proxies = True

    def __init__(self, model_or_config: nn.Module | PreTrainedConfig, released_features: str | None = None) -> None:
        config: Any = getattr(model_or_config, "config", model_or_config)
        if getattr(config, "model_type", None) != "proxyformer":
            kind = getattr(config, "model_type", None) or type(model_or_config).__name__
            raise TypeError(f"ProxyCache needs a ProxyFormer or its configuration, got {kind!r}.")
        if not config.has_proxies:
            raise ValueError(
                "compression_ratio=None: a plain decoder without proxies; use transformers' DynamicCache."
            )
        self.counter = _Counter()
        super().__init__(layers=[ProxyCacheLayer(config, self) for _ in range(config.num_hidden_layers)])
        self.released = ReleasedFeatures(config.released_features if released_features is None else released_features)
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.counter.columns = 0
        self.fill: list[int] = []
        self.retained: list[int] = []
        self.lengths: list[int] = []
        self.pending: torch.Tensor | None = None
        self.context: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Rows, 0 before the first tokens."""
        return len(self.fill)

    def start(self, batch: int, block: int, stem: int, device: torch.device) -> None:
        """Make room for `batch` rows, if there are none yet.

        Raises:
            ValueError: the cache holds another number of rows.
        """
        if not self.fill:
            self.fill, self.retained, self.lengths = [0] * batch, [0] * batch, [0] * batch
            self.pending = torch.zeros(batch, block, dtype=torch.long, device=device)
            self.context = torch.full((batch, stem), -1, dtype=torch.long, device=device)
        if self.batch != batch:
            raise ValueError(
                f"The cache holds {self.batch} rows and the input has {batch}: repeat it with "
                "cache.batch_repeat_interleave, or use another cache."
            )

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, *args: Any) -> None:
        """Refused.

        Raises:
            ValueError: always: blocks that have been compressed are gone.
        """
        self.layers[0].crop()

    def activate_past_recording(self) -> None:
        """Refused, as `crop`.

        Raises:
            ValueError: always.
        """
        self.layers[0].activate_past_recording()

    def num_proxies(self, layer_idx: int = 0) -> list[int]:
        """Proxies of each row in a layer, those that coarser ones have replaced included."""
        buffer = self.layers[layer_idx].levels[0]
        return [count for count in buffer.counts for _ in range(buffer.repeats)] or [0] * self.batch

    def nbytes(self) -> int:
        """Bytes of all tensors the cache holds, spare room included, features kept of compressed blocks not."""
        plain = (self.pending, self.context)
        return sum(layer.nbytes() for layer in self.layers) + sum(x.nbytes for x in plain if x is not None)

    def reset(self) -> None:
        """Forget all tokens."""
        for layer in self.layers:
            layer.reset()
        self.released.clear()
        self._forget_rows()

    def _choose(self, rows: list[int]) -> None:
        """Let row i become what row `rows[i]` was."""
        if not self.fill:
            return
        for name in ("fill", "retained", "lengths"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        for name in ("pending", "context"):
            setattr(self, name, getattr(self, name)[rows])
        for layer in self.layers:
            for buffer in layer.buffers():
                buffer.select(rows)
            layer.map(lambda tensor: tensor[rows])
        self.released.select(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i become what row `beam_idx[i]` was."""
        self._choose(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows only, in this order; or those that a mask `(batch,)`, bool, marks."""
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._choose(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; what is kept of the history is stored once for all of them.

        Raises:
            ValueError: `repeats` below 1.
        """
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}.")
        if not self.fill:
            return
        for name in ("fill", "retained", "lengths"):
            setattr(self, name, [value for value in getattr(self, name) for _ in range(repeats)])
        for name in ("pending", "context"):
            setattr(self, name, getattr(self, name).repeat_interleave(repeats, dim=0))
        for layer in self.layers:
            for buffer in layer.buffers():
                buffer.repeat(repeats)
            layer.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        self.released.repeat(repeats)
