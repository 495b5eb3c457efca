"""One layer of ProxyFormer's generation stream (Eq. 19 and 20), and of the plain decoder of the same size."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .cache_proxy import ProxyCacheLayer
from .proxy_block import AttentionBlock
from .proxy_buffers import rows_tensor
from .proxy_grid import Grid
from .proxy_merge import ProxyMerge
from .proxy_reading import (
    ProxyLevel,
    Visibility,
    attend_own_block,
    attend_retained_blocks,
    read_proxies,
)
from .proxy_rotary import RotaryAngles
from .rms_norm import RMSNorm


@dataclass
class GenerationView:
    """What all layers of one pass share about the generation stream's tokens.

    Args:
        grid: where they lie.
        block: tokens of a generation block.
        retained: raw blocks before its own that a token sees.
        angles: of the tokens' positions, for a rotary embedding among raw tokens; `None` without.
        turns_proxies: whether queries are also turned where they read proxies.
        visible: which proxies they see, for each compression ratio there is.
        fill, known: for each row, raw tokens and blocks before that a cache holds.
        last: each row's last block.
        step: whether each row has one new token, which is all there is to compute.
        recomputes: whether what is read of the proxies is computed again in the backward pass.
    """

    grid: Grid
    block: int
    retained: int
    angles: RotaryAngles | None
    turns_proxies: bool
    visible: dict[int, Visibility]
    fill: list[int]
    known: list[int]
    last: list[int]
    step: bool = False
    recomputes: bool = False
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        """One of the lists on a device, `(batch,)`; made once a pass."""
        key = f"{name} {device}"
        if key not in self._tensors:
            self._tensors[key] = rows_tensor(getattr(self, name), device)
        return self._tensors[key]


class ProxyFormerLayer(GradientCheckpointingLayer):
    """Causal attention to raw tokens, gated attention of the same queries to proxies, and a SwiGLU.

    Args:
        config: a `ProxyFormerConfig`.
        layer_idx: which layer.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        heads, dim, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        scale = 1.0 / math.sqrt(2 * config.num_hidden_layers)
        self.block = AttentionBlock(config.hidden_size, heads, dim, config.intermediate_size, eps, scale)
        self.has_proxies = config.has_proxies
        if not self.has_proxies:
            return
        self.ratio = config.ratios[layer_idx]
        self.proxy_gate = nn.Linear(config.hidden_size, heads)
        self.has_own_projections = config.separate_proxy_kv
        if self.has_own_projections:
            size = config.proxy_size
            self.proxy_norm = RMSNorm(size, eps=eps)
            self.proxy_k_proj = nn.Linear(size, heads * dim, bias=False)
            self.proxy_v_proj = nn.Linear(size, heads * dim, bias=False)
            self.proxy_k_norm = RMSNorm(dim, eps=eps)
        pairs = config.distance_ratios or []
        self.distances = [distance // self.ratio for distance, _ in pairs]
        self.groups = [1, *(ratio // self.ratio for _, ratio in pairs)]
        self.merges = nn.ModuleList([ProxyMerge(group, config.proxy_size) for group in self.groups[1:]])
        self.config = config

    def forward(
        self,
        hidden_states: torch.Tensor,
        proxies: torch.Tensor | None,
        view: GenerationView | None,
        cache: Any = None,
        mask: torch.Tensor | None = None,
        angles: RotaryAngles | None = None,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states: `(batch, tokens of the grid, hidden size)`.
            proxies: H̄ of this layer's history, `(histories, proxies, d_proxy)`, where there is no cache.
            view: of the tokens; `None` in a plain decoder.
            cache: this model's cache.
            mask, angles: a plain decoder's causal mask and rotary angles.

        Returns:
            `(batch, tokens of the grid, hidden size)`.
        """
        normed, query, key, value = self.block.project(hidden_states)
        if view is None:
            attended = self._plain(query, key, value, cache, mask, angles)
            return self.block.finish(hidden_states, attended.transpose(1, 2).flatten(2))
        layer: ProxyCacheLayer | None = None if cache is None else cache.layers[self.layer_idx]
        turned_query, turned_key = query, key
        if view.angles is not None:
            turned_query, turned_key = view.angles.rotate(query), view.angles.rotate(key)
        if view.step and layer is not None:
            attended = _attend_stored(turned_query, turned_key, value, view, layer)
        else:
            attended = _attend_grid(turned_query, turned_key, value, view, layer)

        question = (turned_query if view.turns_proxies else query) * float(self.config.proxy_query_scale)
        told = self._read(question, proxies, view, layer)
        if told is not None:
            gate = self.proxy_gate(F.silu(normed)).transpose(1, 2)[..., None]  # (batch, heads, tokens, 1)
            attended = attended + gate * told
        return self.block.finish(hidden_states, attended.transpose(1, 2).flatten(2))

    def _plain(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: Cache | None,
        mask: torch.Tensor | None,
        angles: RotaryAngles | None,
    ) -> torch.Tensor:
        """Full causal attention, as in any decoder."""
        if angles is not None:
            query, key = angles.rotate(query), angles.rotate(key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        causal = mask is None and query.shape[2] > 1
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)

    # --- proxies ----------------------------------------------------------------------------------------------------

    def _read(
        self, query: torch.Tensor, proxies: torch.Tensor | None, view: GenerationView, layer: ProxyCacheLayer | None
    ) -> torch.Tensor | None:
        seen = view.visible[self.ratio]
        if layer is not None:
            levels = layer.proxy_levels(self.groups)
            if levels is None:
                return None
            return read_proxies(query, levels, seen, view.grid.width, self.distances, self.config.proxy_sharpen_from)
        if proxies is None:
            return None
        if view.recomputes and torch.is_grad_enabled():
            # Keys and values of proxies would be twice what is kept of the history.
            found = checkpoint(self._read_new, query, proxies, seen, view.grid.width, use_reentrant=False)
            assert isinstance(found, torch.Tensor)
            return found
        return self._read_new(query, proxies, seen, view.grid.width)

    def _read_new(self, query: torch.Tensor, proxies: torch.Tensor, seen: Visibility, width: int) -> torch.Tensor:
        levels = []
        for index, group in enumerate(self.groups):
            if index == 0:
                merged = proxies
            else:
                whole = proxies.shape[1] // group * group
                merged = self.merges[index - 1](proxies[:, :whole])
            levels.append(ProxyLevel(*self.project_proxies(merged, group), group))
        return read_proxies(query, levels, seen, width, self.distances, self.config.proxy_sharpen_from)

    def project_proxies(
        self, proxies: torch.Tensor, group: int = 1, start: torch.Tensor | int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the generation stream reads of proxies.

        Args:
            proxies: H̄, `(batch, proxies, d_proxy)`.
            group: proxies of the finest level that one of these stands for.
            start: index of the first one in its row, a number or `(batch, 1)`.

        Returns:
            Two tensors `(batch, heads, proxies, head dim)`.
        """
        block = self.block
        if self.has_own_projections:
            normed = self.proxy_norm(proxies)
            key = self.proxy_k_norm(block.split_heads(self.proxy_k_proj(normed)))
            value = block.split_heads(self.proxy_v_proj(normed))
        else:
            normed = block.input_norm(proxies)
            key = block.k_norm(block.split_heads(block.k_proj(normed)))
            value = block.split_heads(block.v_proj(normed))
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if self.config.proxy_rope:
            place = torch.arange(proxies.shape[1], device=proxies.device)[None] + start
            positions = (place + 1) * group * self.ratio - 1
            key = RotaryAngles(self.config.rope_parameters, positions, key.shape[-1], key.dtype).rotate(key)
        return key, value

    def store_proxies(self, proxies: torch.Tensor, counts: list[int], layer: ProxyCacheLayer) -> None:
        """Append proxies to a cache: the first `counts[row]` of H̄ `(batch, proxies, d_proxy)`."""
        proxies = proxies.to(self.proxy_gate.weight.device)  # a model's two streams may lie on several
        finest = layer.levels[0]
        finest.own_rows()
        begin = finest.counts or [0] * len(counts)
        start: torch.Tensor | int = begin[0]
        if len(set(begin)) > 1:
            start = rows_tensor(begin, proxies.device)[:, None]
        finest.append(torch.cat(self.project_proxies(proxies, 1, start), dim=-1), counts)
        if len(self.groups) == 1:
            return
        waiting = layer.unmerged
        waiting.append(proxies[:, None], counts)
        for index, group in enumerate(self.groups[1:], start=1):
            self._store_merged(index, group, layer)
        # What no coarser level waits for any more, and what no reader from this pass on sees.
        merged = [
            min(count * group for count in layer.levels[index].counts)
            for index, group in enumerate(self.groups[1:], start=1)
        ]
        waiting.trim(min(merged))
        shortest = min(begin)
        for index, (group, distance) in enumerate(zip(self.groups[1:], self.distances, strict=True)):
            end = max(0, shortest - distance) // group * group
            layer.levels[index].trim(end // self.groups[index])

    def _store_merged(self, index: int, group: int, layer: ProxyCacheLayer) -> None:
        """Append to a coarser level what has become whole groups of it."""
        level, waiting = layer.levels[index], layer.unmerged
        assert waiting.data is not None
        batch, size = waiting.data.shape[0], waiting.data.shape[3]
        if level.data is None:
            heads, width = self.block.heads, 2 * self.block.head_dim
            level.append(waiting.data.new_zeros(batch, heads, 0, width))
        level.own_rows()
        added = [have // group - done for have, done in zip(waiting.counts, level.counts, strict=True)]
        if not any(added):
            return
        start = rows_tensor(level.counts, waiting.data.device)[:, None]
        # Rows that get fewer groups than others read on behind their end, and what comes of it is not counted.
        place = start * group - waiting.start + torch.arange(max(added) * group, device=start.device)
        place = place.clamp(0, waiting.data.shape[2] - 1)[..., None].expand(-1, -1, size)
        fresh = waiting.data[:, 0].gather(1, place)
        pair = self.project_proxies(self.merges[index - 1](fresh), group, start)
        level.append(torch.cat(pair, dim=-1), added)


# ---------------------------------------------------------------------------------------------------------------------
# Raw tokens
# ---------------------------------------------------------------------------------------------------------------------


def _attend_grid(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: GenerationView,
    layer: ProxyCacheLayer | None,
) -> torch.Tensor:
    """Attention of a grid's tokens to raw ones; with a cache, keep the last blocks' keys and values."""
    grid, width, retained = view.grid, view.grid.width, view.retained
    before = retained * view.block
    if layer is not None:
        _make_raw(layer, key, view)
        assert layer.raw_keys is not None and layer.raw_values is not None
        if any(view.fill):
            current = slice(before, before + width)
            key = _with_stored(key, layer.raw_keys[:, :, current], view)
            value = _with_stored(value, layer.raw_values[:, :, current], view)
    if retained == 0:
        out = attend_own_block(query, key, value, width)
    else:
        if layer is None:
            key, value = (F.pad(x, (0, 0, before, 0)) for x in (key, value))
            known = torch.zeros(1, dtype=torch.long, device=key.device)
        else:
            assert layer.raw_keys is not None and layer.raw_values is not None
            key = torch.cat([layer.raw_keys[:, :, :before].to(key.dtype), key], dim=2)
            value = torch.cat([layer.raw_values[:, :, :before].to(value.dtype), value], dim=2)
            known = view.tensor("known", key.device)
            assert grid.first is not None
            # Blocks that a pass leaves out are not there for those behind, which nobody asked for.
            begins = rows_tensor([int(first == 0) for first in grid.first], key.device)
            known = known * begins
        out = attend_retained_blocks(query, key, value, width, retained, known)
    if layer is not None:
        _keep_last(layer, key, value, view)
    return out


def _make_raw(layer: ProxyCacheLayer, like: torch.Tensor, view: GenerationView) -> None:
    if layer.raw_keys is None:
        batch, heads, _, dim = like.shape
        slots = (view.retained + 1) * view.block
        layer.raw_keys = like.new_zeros(batch, heads, slots, dim)
        layer.raw_values = like.new_zeros(batch, heads, slots, dim)
        layer.is_initialized = True


def _with_stored(new: torch.Tensor, stored: torch.Tensor, view: GenerationView) -> torch.Tensor:
    """`new` with what a cache holds of the current block in place of its first tokens."""
    grid, width = view.grid, view.grid.width
    place = torch.arange(width, device=new.device)
    numbers = grid.numbers[:, :1].to(new.device)
    there = (place < view.tensor("fill", new.device)[:, None]) & (numbers == 0)
    first = torch.where(there[:, None, :, None], stored[:, :, :width].to(new.dtype), new[:, :, :width])
    return torch.cat([first, new[:, :, width:]], dim=2)


def _keep_last(layer: ProxyCacheLayer, key: torch.Tensor, value: torch.Tensor, view: GenerationView) -> None:
    """Keep raw keys and values of each row's last block and the retained ones before it."""
    grid, block = view.grid, view.block
    assert layer.raw_keys is not None and layer.raw_values is not None
    if grid.blocks == 1:  # it is the current block still
        for stored, fresh in ((layer.raw_keys, key), (layer.raw_values, value)):
            stored[:, :, : fresh.shape[2]] = fresh.detach().to(stored.dtype)
        return
    last = last_on_grid(view.grid, view.last)
    span = (view.retained + 1) * block
    if len(set(last)) == 1:
        window = slice(last[0] * block, last[0] * block + span)
        layer.raw_keys, layer.raw_values = key[:, :, window].detach().clone(), value[:, :, window].detach().clone()
        return
    start = rows_tensor(last, key.device)[:, None] * block
    index = (start + torch.arange(span, device=key.device))[:, None, :, None].expand(-1, *_middle(key, span))
    layer.raw_keys, layer.raw_values = key.detach().gather(2, index), value.detach().gather(2, index)


def _middle(x: torch.Tensor, span: int) -> tuple[int, int, int]:
    return x.shape[1], span, x.shape[3]


def last_on_grid(grid: Grid, last: list[int]) -> list[int]:
    """Where each row's last block lies among the grid's blocks."""
    if grid.complete:
        return last
    return [row.index(number) for row, number in zip(grid.numbers.tolist(), last, strict=True)]


def _attend_stored(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: GenerationView,
    layer: ProxyCacheLayer,
) -> torch.Tensor:
    """One new token a row: store it, and attend to what is stored."""
    _make_raw(layer, key, view)
    keys, values = layer.raw_keys, layer.raw_values
    assert keys is not None and values is not None
    before, block = view.retained * view.block, view.block
    moved = [index for index, last in enumerate(view.last) if last > 0]
    if moved and view.retained:  # their block has become the last of the retained ones
        rows: Any = slice(None) if len(moved) == len(view.last) else moved
        for stored in (keys, values):
            stored[rows, :, :before] = stored[rows][:, :, block : block + before].clone()
    slots = [before + (0 if last > 0 else fill) for fill, last in zip(view.fill, view.last, strict=True)]
    if len(set(slots)) == 1:
        keys[:, :, slots[0]], values[:, :, slots[0]] = key[:, :, 0].detach(), value[:, :, 0].detach()
    else:
        index = rows_tensor(slots, key.device)[:, None, None, None].expand_as(key)
        keys.scatter_(2, index, key.detach().to(keys.dtype))
        values.scatter_(2, index, value.detach().to(values.dtype))
    begins = [
        before - block * min(view.retained, known + last) for known, last in zip(view.known, view.last, strict=True)
    ]
    if len(set(slots)) == 1 and len(set(begins)) == 1:
        part = slice(begins[0], slots[0] + 1)
        return F.scaled_dot_product_attention(
            query, keys[:, :, part].to(query.dtype), values[:, :, part].to(query.dtype)
        )
    place = torch.arange(keys.shape[2], device=key.device)
    low, high = (rows_tensor(x, key.device)[:, None] for x in (begins, slots))
    mask = ((place >= low) & (place <= high))[:, None, None]
    return F.scaled_dot_product_attention(query, keys.to(query.dtype), values.to(query.dtype), attn_mask=mask)
