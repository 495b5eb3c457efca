"""DAR attention with a `DARCache`: decoding on the bottlenecks themselves, and prefill in chunks.

Decoding absorbs the projections into the query and the output, as multi-head latent attention does: for a far token
with bottleneck c, q · (A_K c + b_K) = (A_Kᵀ q) · c + q · b_K on the dimensions without rotary embedding, and the sum
of p (A_V c + b_V) over far tokens is A_V (Σ p c) + b_V Σ p. Far keys and values are never made; only the rotated part
of the keys is kept (fast mode) or computed anew (small mode).
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from .attention_with_lse import causal_attention, full_attention, merge, statistics_dtype, window_attention
from .cache_dar import DARCacheLayer
from .dar_attention import FarPairs, dar_attention, project_far
from .dar_decode_kernel import decode_kernel_available, fused_decode
from .dar_plan import AttentionPlan
from .dar_reference import dense_dar_attention
from .rotary_halves import rotate_halves

logger = logging.get_logger(__name__)

# Numbers that a step makes at once: far rotary keys in the small mode, far keys and values in chunked prefill.
CHUNK_NUMBERS = 2**25


@dataclass
class FarAngles:
    """Cosines and sines of all stored tokens, `(batch or 1, tokens, rotary dims)`, for the small mode."""

    cos: torch.Tensor
    sin: torch.Tensor

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "FarAngles":
        """The angles on another device: layers of one model may lie on several."""
        return FarAngles(*(x.to(device, non_blocking=non_blocking) for x in (self.cos, self.sin)))


def cached_dar_attention(
    layer: DARCacheLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far: FarPairs,
    scaling: float,
    plan: AttentionPlan,
    angles: FarAngles | None,
) -> torch.Tensor:
    """Store new tokens and let them attend to all stored ones.

    Args:
        layer: the layer's cache.
        query, key, value: of the new tokens, `(batch, heads, new, head dim)`, rotated.
        far: where their far pairs come from; `weight` must be given.
        scaling: multiplies the scores.
        plan: which of the new tokens are real.
        angles: of all tokens including the new ones, in the small mode.

    Returns:
        `(batch, heads, new, head dim)`; what stands at padding has no meaning.
    """
    if torch.is_grad_enabled() and query.requires_grad and layer.count and not torch.compiler.is_compiling():
        logger.warning_once("Gradients stop at a DARCache: none reaches cached tokens or a decoded one's own pair.")
    # A first token alone is a prompt, with exact gradients; a static layer's is decoded, by the shape of its step.
    if query.shape[2] == 1 and (layer.is_static or layer.count):
        _append(layer, key, value, far, plan)
        if decode_kernel_available(layer, query, far):
            return fused_decode(layer, query, far, scaling)
        return absorbed_decode(layer, query, far, scaling, angles)
    if not _has_tokens(layer):
        _append(layer, key, value, far, plan)
        return dar_attention(query, key, value, far, layer.window, scaling, plan)
    out = _attend_chunk(layer, query, key, value, far, scaling, plan, angles)
    _append(layer, key, value, far, plan)
    return out


def _has_tokens(layer: DARCacheLayer) -> bool:
    if not layer.is_initialized:
        return False
    # A static layer counts on the device. When compiled, one that has begun is taken to hold tokens.
    return torch.compiler.is_compiling() or bool(layer.columns)


def _append(layer: DARCacheLayer, key: torch.Tensor, value: torch.Tensor, far: FarPairs, plan: AttentionPlan) -> None:
    rotary = far_rotary_keys(far.bottleneck, far, far.cos, far.sin) if layer.fast else None
    layer.append(key, value, far.bottleneck, rotary, plan)


def far_rotary_keys(bottleneck: torch.Tensor, far: FarPairs, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotated part of far keys, `(batch, tokens, heads, rotary dims)`, from bottlenecks `(batch, tokens, …)`."""
    assert far.weight is not None
    rotary = cos.shape[-1]
    heads = far.weight.shape[0]
    weight = far.weight[:, :rotary].flatten(0, 1)
    bias = None if far.bias is None else far.bias[:, :rotary].flatten()
    turning = torch.nn.functional.linear(bottleneck, weight, bias)
    turning = turning.view(*bottleneck.shape[:2], heads, rotary)
    return rotate_halves(turning, cos[:, :, None], sin[:, :, None])


# ---------------------------------------------------------------------------------------------------------------------
# One new token a row
# ---------------------------------------------------------------------------------------------------------------------


def absorb_query(query: torch.Tensor, far: FarPairs, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a query asks of bottlenecks on the dimensions without rotary embedding.

    Args:
        query: `(batch, heads, 1, head dim)`.
        far: with `weight`.
        rotary: rotary dimensions, the first of a head.

    Returns:
        A_Kᵀ q `(batch, heads, bottleneck size)` and q · b_K `(batch, heads)`.
    """
    assert far.weight is not None
    dim = query.shape[-1]
    still = query[:, :, 0, rotary:]
    absorbed = torch.einsum("bhd,hdr->bhr", still, far.weight[:, rotary:dim])
    if far.bias is None:
        return absorbed, torch.zeros_like(absorbed[..., 0])
    return absorbed, (still * far.bias[:, rotary:dim]).sum(-1)


def release_values(summed: torch.Tensor, mass: torch.Tensor, far: FarPairs) -> torch.Tensor:
    """A_V (Σ p c) + b_V Σ p: `(batch, heads, bottleneck size)` and `(batch, heads)` to `(batch, heads, head dim)`."""
    assert far.weight is not None
    dim = far.weight.shape[1] // 2
    out = torch.einsum("bhr,hdr->bhd", summed, far.weight[:, dim:])
    return out if far.bias is None else out + mass[..., None].to(out.dtype) * far.bias[:, dim:]


def absorbed_decode(
    layer: DARCacheLayer, query: torch.Tensor, far: FarPairs, scaling: float, angles: FarAngles | None
) -> torch.Tensor:
    """One query a row over everything stored, its own token included: `(batch, heads, 1, head dim)`."""
    assert layer.bottlenecks is not None and layer.near_keys is not None and layer.near_values is not None
    rotary, dtype = far.cos.shape[-1], statistics_dtype(query)
    even = layer.lengths is None
    lengths = None if even else layer.lengths[:, None]  # type: ignore[index]
    tokens = layer.capacity if layer.is_static else layer.count
    far_tokens = tokens if not even else max(tokens - layer.window, 0)
    stored = layer.bottlenecks[:, :far_tokens]

    absorbed, constant = absorb_query(query, far, rotary)
    far_scores = (absorbed @ stored.mT).to(dtype) + constant[..., None]
    far_scores = (far_scores + _rotary_scores(layer, query, far, far_tokens, angles).to(dtype)) * scaling
    near_scores = (query @ layer.near_keys.mT)[:, :, 0].to(dtype) * scaling
    position = torch.arange(layer.ring, device=query.device)
    if not even:
        column = torch.arange(far_tokens, device=query.device)
        assert lengths is not None
        far_scores = far_scores.masked_fill((column >= lengths - layer.window)[:, None], -torch.inf)
    last: Any = (tokens if lengths is None else lengths) - 1
    if not even or layer.ring > layer.window or tokens < layer.ring:
        # The distance of the newest position that belongs in each slot.
        distance = (last - position) % max(layer.ring, 1)
        held = (distance < layer.window) & (distance <= last)
        near_scores = near_scores.masked_fill(~(held if held.ndim == 1 else held[:, None]), -torch.inf)
    weights = torch.cat([far_scores, near_scores], dim=-1).softmax(-1)
    far_weights, near_weights = weights.split([far_tokens, layer.ring], dim=-1)
    summed = far_weights.to(query.dtype) @ stored
    out = release_values(summed, far_weights.sum(-1), far)
    out = out + (near_weights.to(query.dtype)[:, :, None] @ layer.near_values)[:, :, 0]
    return out[:, :, None]


def _rotary_scores(
    layer: DARCacheLayer, query: torch.Tensor, far: FarPairs, far_tokens: int, angles: FarAngles | None
) -> torch.Tensor:
    """q · k' on the rotary dimensions, `(batch, heads, far tokens)`."""
    rotary = far.cos.shape[-1]
    turning = query[..., :rotary]
    if layer.far_rotary is not None:
        return (turning @ layer.far_rotary[:, :far_tokens].permute(0, 2, 3, 1))[:, :, 0]
    assert angles is not None and layer.bottlenecks is not None
    batch, heads = query.shape[:2]
    if rotary == 0 or far_tokens == 0:
        return query.new_zeros(batch, heads, far_tokens)
    step = max(1, CHUNK_NUMBERS // (batch * heads * rotary))
    parts = []
    for start in range(0, far_tokens, step):
        stop = min(start + step, far_tokens)
        cos, sin = angles.cos[:, start:stop], angles.sin[:, start:stop]
        turned = far_rotary_keys(layer.bottlenecks[:, start:stop], far, cos, sin)
        parts.append((turning @ turned.permute(0, 2, 3, 1))[:, :, 0])
    return torch.cat(parts, dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Several new tokens after stored ones
# ---------------------------------------------------------------------------------------------------------------------


def _attend_chunk(
    layer: DARCacheLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far: FarPairs,
    scaling: float,
    plan: AttentionPlan,
    angles: FarAngles | None,
) -> torch.Tensor:
    if layer.lengths is None and plan.order is None:
        return _attend_row(layer, query, key, value, far, scaling, angles)
    # Rows of unequal lengths, one by one.
    out = torch.zeros_like(query)
    batch = query.shape[0]
    for row in range(batch):
        columns: slice | torch.Tensor = slice(None)
        if plan.real is not None:
            columns = plan.real[row].nonzero()[:, 0]
            if len(columns) == 0:
                continue
        view = layer.row(row)
        one = slice(row, row + 1)
        far_row = FarPairs(
            bottleneck=far.bottleneck[one][:, columns],
            weight=far.weight,
            bias=far.bias,
            cos=far.cos.expand(batch, -1, -1)[one][:, columns],
            sin=far.sin.expand(batch, -1, -1)[one][:, columns],
        )
        if angles is not None:
            stop = view.count + far_row.bottleneck.shape[1]
            angles_row = FarAngles(*(x.expand(batch, -1, -1)[one, :stop] for x in (angles.cos, angles.sin)))
        query_row, key_row, value_row = (x[one][:, :, columns] for x in (query, key, value))
        out[one, :, columns] = _attend_row(
            view, query_row, key_row, value_row, far_row, scaling, angles_row if angles is not None else None
        )
    return out


def _attend_row(
    layer: DARCacheLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far: FarPairs,
    scaling: float,
    angles: FarAngles | None,
) -> torch.Tensor:
    """New tokens after `layer.count` stored ones, in every row as many. Nothing is stored."""
    past, new, window = layer.count, query.shape[2], layer.window
    if past == 0:
        return dar_attention(query, key, value, far, window, scaling)
    if window:
        before = min(past, window - 1)
        old_key, old_value = layer.recent(before)
        near_key, near_value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        out, lse = window_attention(query, near_key, near_value, window, scaling)
    else:
        out = torch.zeros_like(query)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=statistics_dtype(query))
    # Query i sees far tokens up to past + i - window. All queries see those up to past - window …
    common = min(max(past - window + 1, 0), past)
    step = max(1, CHUNK_NUMBERS // (query.shape[0] * query.shape[1] * query.shape[3] * 2))
    for start in range(0, common, step):
        pairs = _stored_pairs(layer, far, start, min(start + step, common), angles)
        out, lse = merge(out, lse, *full_attention(query, *pairs, scaling))
    # … and query `first` + j sees j + 1 of those that follow: square causal attention.
    first = max(window - past, 1 if window else 0)
    if first < new:
        stop = past + new - window
        from_past = _stored_pairs(layer, far, common, max(min(stop, past), common), angles)
        from_new = far.pairs()
        rest = max(stop - past, 0)
        far_key, far_value = (torch.cat([a, b[:, :, :rest]], dim=2) for a, b in zip(from_past, from_new, strict=True))
        tail, tail_lse, _ = causal_attention(query[:, :, first:], far_key, far_value, scaling, training=False)
        merged, merged_lse = merge(out[:, :, first:], lse[:, :, first:], tail, tail_lse)
        out = torch.cat([out[:, :, :first], merged], dim=2)
        lse = torch.cat([lse[:, :, :first], merged_lse], dim=2)
    return out


def _stored_pairs(
    layer: DARCacheLayer, far: FarPairs, start: int, stop: int, angles: FarAngles | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Far keys, rotated, and values of stored tokens `start` … `stop` - 1, `(batch, heads, tokens, head dim)`."""
    assert layer.bottlenecks is not None and far.weight is not None
    key, value = project_far(layer.bottlenecks[:, start:stop], far.weight, far.bias)
    if layer.far_rotary is not None:
        turned = layer.far_rotary[:, start:stop].transpose(1, 2)
        return torch.cat([turned, key[..., turned.shape[-1] :]], dim=-1), value
    assert angles is not None
    return rotate_halves(key, angles.cos[:, None, start:stop], angles.sin[:, None, start:stop]), value


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------


def dense_cached_attention(
    layer: DARCacheLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far: FarPairs,
    scaling: float,
    plan: AttentionPlan,
    angles: FarAngles | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cached_dar_attention` with every far pair made and one softmax; also returns the weights.

    Returns:
        The output `(batch, heads, new, head dim)`, and weights `(batch, heads, new, tokens)` over tokens in the order
        the cache keeps them, real ones only.
    """
    batch, _, new, _ = query.shape
    past_lengths = layer.row_lengths().clone() if layer.is_initialized else query.new_zeros(batch, dtype=torch.long)
    # Near keys and values of all tokens, zero where the ring no longer holds them: those are far from every query.
    longest = int(past_lengths.max()) if batch else 0
    full_key, full_value = (x.new_zeros(batch, x.shape[1], longest, x.shape[3]) for x in (key, value))
    for row in range(batch if longest else 0):
        view = layer.row(row)
        held = min(view.count, view.window)
        view_key, view_value = view.recent(held)
        full_key[row, :, view.count - held : view.count] = view_key[0]
        full_value[row, :, view.count - held : view.count] = view_value[0]
    ranks = torch.arange(longest, device=query.device).expand(batch, -1)
    real = ranks < past_lengths[:, None]
    if longest:
        old = _stored_pairs(layer, far, 0, longest, angles)
    else:
        old = (full_key, full_value)
    new_pairs = far.pairs()
    _append(layer, key, value, far, plan)
    fresh_real = torch.ones(batch, new, dtype=torch.bool, device=query.device) if plan.real is None else plan.real
    fresh_ranks = past_lengths[:, None] + (fresh_real.cumsum(1) - 1)
    out, weights = dense_dar_attention(
        query,
        torch.cat([full_key, key], dim=2),
        torch.cat([full_value, value], dim=2),
        torch.cat([old[0], new_pairs[0]], dim=2),
        torch.cat([old[1], new_pairs[1]], dim=2),
        layer.window,
        scaling,
        ranks=torch.cat([ranks, fresh_ranks], dim=1),
        query_ranks=fresh_ranks,
        visible=torch.cat([real, fresh_real], dim=1)[:, None, None],
    )
    return out, weights
