"""DAR attention for training and prefill: exact, at about the cost of one ordinary causal attention.

The far keys of query i are those at j <= i - w. So the far path is an ordinary *square causal* attention of queries
w … L-1 over the far keys 0 … L-w-1, and the near path a sliding window of width w; their log-sum-exps say how to merge
the two into the one softmax of the paper's Eq. 4. In the backward pass each path's own kernel is given the merged
output and log-sum-exp, which makes its gradients exact. The far keys and values are made from the bottleneck inside,
and made again in the backward pass: of the far pairs only the bottleneck is kept for it, `bottleneck_size` numbers a
token (with adapters or quantised weights, the pairs themselves). Making them again is about 1 % of a training step;
kept, they would take as much memory as all keys and values.

`projected_dar_attention` is the same from the fused projection on, rotary embedding included, so that the gradients of
queries, keys and values are written where the projection's backward pass reads them.

The slow counterpart, and the definition, is `dar_reference`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .attention_with_lse import (
    causal_attention,
    causal_attention_backward,
    has_kernels,
    masked_reference,
    merge,
    window_attention,
    window_attention_backward,
    window_visible,
)
from .dar_near_kernel import near_kernel_available, near_merged_backward, near_merged_forward
from .dar_plan import AttentionPlan
from .dar_rotary_kernel import join_pair_gradients, rotary_kernel_available, turn_in_place, turned_queries_and_keys
from .rotary_halves import rotate_halves


@dataclass
class FarPairs:
    """Where far keys and values come from.

    Args:
        bottleneck: `(batch, tokens, bottleneck size)`.
        weight: `(heads, 2 · head dim, bottleneck size)`, W_up W_K above W_up W_V for each head; `None` where the
            projections are not plain matrices (adapters, quantised or partitioned weights).
        bias: `(heads, 2 · head dim)` or `None`.
        cos, sin: `(batch or 1, tokens, rotary dims)`.
        key, value: `(batch, heads, tokens, head dim)`, keys rotated; given instead of `weight`.
    """

    bottleneck: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Far keys, rotated, and values of all tokens, `(batch, heads, tokens, head dim)`; differentiable."""
        if self.key is not None and self.value is not None:
            return self.key, self.value
        assert self.weight is not None
        key, value = project_far(self.bottleneck, self.weight, self.bias)
        return rotate_halves(key, self.cos[:, None], self.sin[:, None]), value


def project_far(
    bottleneck: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys before rotation, and values, each `(batch, heads, tokens, head dim)`, from the bottleneck."""
    key, value = _project(bottleneck, weight, bias).transpose(1, 2).chunk(2, dim=-1)
    return key, value


def _project(bottleneck: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Keys and values side by side, `(batch, tokens, heads, 2 · head dim)`."""
    heads, both, _ = weight.shape
    pairs = F.linear(bottleneck, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return pairs.view(*bottleneck.shape[:2], heads, both)


def dar_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far: FarPairs,
    window: int,
    scaling: float,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attention of new tokens among themselves, near ones in full, far ones through the bottleneck (Eq. 3 and 4).

    Args:
        query, key, value: `(batch, heads, tokens, head dim)`, rotated.
        far: where far keys and values come from.
        window: w, tokens, the query's own included; 0 or more.
        scaling: multiplies the scores.
        plan: padding and packing of the tokens.

    Returns:
        `(batch, heads, tokens, head dim)`; what stands at padding has no meaning.
    """
    if plan is None or plan.sequences is None:
        return _rows_attention(query, key, value, far, window, scaling)
    sequences, outputs = plan.sequences, []
    cos, sin = (x.expand(query.shape[0], -1, -1) for x in (far.cos, far.sin))
    for group in sequences.groups:
        rows = FarPairs(
            bottleneck=sequences.gather(far.bottleneck, group, 1),
            weight=far.weight,
            bias=far.bias,
            cos=sequences.gather(cos, group, 1),
            sin=sequences.gather(sin, group, 1),
            key=None if far.key is None else sequences.gather(far.key, group, 2),
            value=None if far.value is None else sequences.gather(far.value, group, 2),
        )
        query_rows, key_rows, value_rows = (sequences.gather(x, group, 2) for x in (query, key, value))
        outputs.append(_rows_attention(query_rows, key_rows, value_rows, rows, window, scaling))
    return sequences.scatter(outputs)


def _rows_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, far: FarPairs, window: int, scaling: float
) -> torch.Tensor:
    """`dar_attention` where every row is one sequence from its first column on."""
    tokens = query.shape[2]
    if tokens <= window:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        if not torch.is_grad_enabled() or not far.bottleneck.requires_grad:
            return out
        # All tokens are near, and the bottleneck's gradient is zero rather than missing: data-parallel training waits
        # for the gradient of every parameter.
        return _zero_gradients(out, far)
    if not has_kernels(query):
        return _merged_reference(query, key, value, *far.pairs(), window, scaling)
    visible = tokens - window  # as far tokens, to some query
    if far.weight is None:
        far_key, far_value = far.pairs()
        return _TwoPaths.apply(query, key, value, far_key[:, :, :visible], far_value[:, :, :visible], window, scaling)
    return _BottleneckPaths.apply(
        query, key, value, far.bottleneck, far.weight, far.bias, far.cos, far.sin, window, scaling
    )


def projects_itself(states: torch.Tensor, far: FarPairs, window: int) -> bool:
    """Whether `projected_dar_attention` serves: kernels for this device and dtype, and tokens beyond the window."""
    if far.weight is None or not rotary_kernel_available(states) or not 0 < window < states.shape[1]:
        return False
    dim = far.weight.shape[1] // 2
    return dim % 8 == 0 and dim <= 256 and far.bottleneck.dtype == far.weight.dtype == states.dtype


def projected_dar_attention(states: torch.Tensor, far: FarPairs, window: int, scaling: float) -> torch.Tensor:
    """`dar_attention` from the fused projection on, where `projects_itself` and every row is one sequence.

    Args:
        states: `(batch, tokens, heads · 3 · head dim)`, queries and keys not rotated yet.
        far: with `weight`; its angles are also those of queries and keys.
        window, scaling: as in `dar_attention`.

    Returns:
        `(batch, heads, tokens, head dim)`.
    """
    return _ProjectedPaths.apply(states, far.bottleneck, far.weight, far.bias, far.cos, far.sin, window, scaling)


def _zero_gradients(out: torch.Tensor, far: FarPairs) -> torch.Tensor:
    zero = sum((x * 0).sum() for x in (far.bottleneck, far.weight, far.key, far.value) if x is not None)
    return out + torch.as_tensor(zero).to(out.dtype)


def _merged_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far_key: torch.Tensor,
    far_value: torch.Tensor,
    window: int,
    scaling: float,
) -> torch.Tensor:
    """Both paths by ordinary operations, for devices and dtypes without kernels; memory grows with tokens²."""
    tokens = query.shape[2]
    visible = tokens - window
    causal = window_visible(visible, visible, visible, query.device)
    far, far_lse = masked_reference(
        query[:, :, window:], far_key[:, :, :visible], far_value[:, :, :visible], causal, scaling
    )
    if window == 0:
        return far
    near, near_lse = window_attention(query, key, value, window, scaling)
    tail, _ = merge(near[:, :, window:], near_lse[:, :, window:], far, far_lse)
    return torch.cat([near[:, :, :window], tail], dim=2)


# ---------------------------------------------------------------------------------------------------------------------
# Both paths by kernels: forward and backward
# ---------------------------------------------------------------------------------------------------------------------

_Saved = tuple[Any, ...]


def _paths_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far_key: torch.Tensor,
    far_value: torch.Tensor,
    window: int,
    scaling: float,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor, _Saved]:
    """Output, log-sum-exp of the merged attention, and what the far path's backward pass needs."""
    far, far_lse, saved = causal_attention(query[:, :, window:], far_key, far_value, scaling, training)
    if window == 0:
        return far, far_lse, saved
    if near_kernel_available(query):
        out, lse = near_merged_forward(query, key, value, far, far_lse, window, scaling)
        return out, lse, saved
    out, lse = window_attention(query, key, value, window, scaling)
    tail, tail_lse = merge(out[:, :, window:], lse[:, :, window:], far, far_lse)
    out = torch.cat([out[:, :, :window], tail], dim=2)
    return out, torch.cat([lse[:, :, :window], tail_lse], dim=2), saved


def _paths_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far_key: torch.Tensor,
    far_value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    saved: _Saved,
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, near keys and values, far keys and values."""
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()
    dq_far, dk_far, dv_far = causal_attention_backward(
        gradient[:, :, window:], query[:, :, window:], far_key, far_value, out[:, :, window:],
        lse[:, :, window:].contiguous(), saved, scaling,
    )  # fmt: skip
    if window == 0:
        return dq_far, torch.zeros_like(key), torch.zeros_like(value), dk_far, dv_far
    if near_kernel_available(query):
        found = near_merged_backward(gradient, query, key, value, out, lse, dq_far, window, scaling)
        dq, dk, dv = found.transpose(1, 2).unbind(3)
    else:
        dq, dk, dv = window_attention_backward(gradient, query, key, value, out, lse, window, scaling)
        dq[:, :, window:] += dq_far
    return dq, dk, dv, dk_far, dv_far


class _TwoPaths(torch.autograd.Function):
    """Both paths over far keys and values that are given, `(batch, heads, tokens - window, head dim)`."""

    @staticmethod
    def forward(ctx: Any, query, key, value, far_key, far_value, window, scaling):  # type: ignore[no-untyped-def]
        training = any(ctx.needs_input_grad)
        out, lse, saved = _paths_forward(query, key, value, far_key, far_value, window, scaling, training)
        ctx.constants = (window, scaling)
        _save(ctx, (query, key, value, far_key, far_value, out, lse), saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor):  # type: ignore[no-untyped-def]
        (query, key, value, far_key, far_value, out, lse), saved = _saved(ctx, 7)
        found = _paths_backward(gradients[0], query, key, value, far_key, far_value, out, lse, saved, *ctx.constants)
        return *found, None, None


class _BottleneckPaths(torch.autograd.Function):
    """Both paths over far pairs that are made from the bottleneck, here and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query, key, value, bottleneck, weight, bias, cos, sin, window, scaling):  # type: ignore[no-untyped-def]
        training = any(ctx.needs_input_grad)
        far_key, far_value = _far_pairs(bottleneck, weight, bias, cos, sin, query.shape[2] - window)
        out, lse, saved = _paths_forward(query, key, value, far_key, far_value, window, scaling, training)
        ctx.constants = (window, scaling)
        ctx.has_bias = bias is not None
        tensors = (query, key, value, bottleneck, weight, cos, sin, out, lse)
        _save(ctx, tensors if bias is None else (*tensors, bias), saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor):  # type: ignore[no-untyped-def]
        tensors, saved = _saved(ctx, 9 + ctx.has_bias)
        query, key, value, bottleneck, weight, cos, sin, out, lse = tensors[:9]
        bias = tensors[9] if ctx.has_bias else None
        far_key, far_value = _far_pairs(bottleneck, weight, bias, cos, sin, query.shape[2] - ctx.constants[0])
        dq, dk, dv, dk_far, dv_far = _paths_backward(
            gradients[0], query, key, value, far_key, far_value, out, lse, saved, *ctx.constants
        )
        needed = (*ctx.needs_input_grad[3:5], ctx.has_bias and ctx.needs_input_grad[5])
        found = _far_backward(dk_far, dv_far, bottleneck, weight, cos, sin, needed)
        return dq, dk, dv, *found, None, None, None, None


class _ProjectedPaths(torch.autograd.Function):
    """`_BottleneckPaths` from the fused projection on; kernels only."""

    @staticmethod
    def forward(ctx: Any, states, bottleneck, weight, bias, cos, sin, window, scaling):  # type: ignore[no-untyped-def]
        training = any(ctx.needs_input_grad)
        query, key = turned_queries_and_keys(states, weight.shape[0], cos, sin)
        far_key, far_value = _far_pairs(bottleneck, weight, bias, cos, sin, query.shape[2] - window)
        value = _values(states, weight)
        out, lse, saved = _paths_forward(query, key, value, far_key, far_value, window, scaling, training)
        ctx.constants = (window, scaling)
        ctx.has_bias = bias is not None
        tensors = (states, query, key, bottleneck, weight, cos, sin, out, lse)
        _save(ctx, tensors if bias is None else (*tensors, bias), saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor):  # type: ignore[no-untyped-def]
        tensors, saved = _saved(ctx, 9 + ctx.has_bias)
        states, query, key, bottleneck, weight, cos, sin, out, lse = tensors[:9]
        bias = tensors[9] if ctx.has_bias else None
        window, scaling = ctx.constants
        gradient = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        far_key, far_value = _far_pairs(bottleneck, weight, bias, cos, sin, query.shape[2] - window)
        dq_far, dk_far, dv_far = causal_attention_backward(
            gradient[:, :, window:], query[:, :, window:], far_key, far_value, out[:, :, window:],
            lse[:, :, window:].contiguous(), saved, scaling,
        )  # fmt: skip
        value = _values(states, weight)
        d_states = near_merged_backward(gradient, query, key, value, out, lse, dq_far, window, scaling)
        d_states = turn_in_place(d_states, 2, cos, sin, backwards=True).flatten(2)
        needed = (*ctx.needs_input_grad[1:3], ctx.has_bias and ctx.needs_input_grad[3])
        found = _far_backward(dk_far, dv_far, bottleneck, weight, cos, sin, needed)
        return d_states, *found, None, None, None, None


def _values(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The values in a fused projection, `(batch, heads, tokens, head dim)`, a view."""
    heads, both, _ = weight.shape
    return states.view(*states.shape[:2], heads, 3 * both // 2)[..., both:].transpose(1, 2)


def _far_pairs(
    bottleneck: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    visible: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, rotated, and values of the first `visible` tokens; no gradient is recorded here."""
    if rotary_kernel_available(bottleneck):
        # Of all tokens: the last are not needed, but leaving them out takes a copy.
        pairs = turn_in_place(_project(bottleneck, weight, bias).unflatten(3, (2, -1)), 1, cos, sin)
        key, value = pairs.transpose(1, 2)[:, :, :visible].unbind(3)
        return key, value
    key, value = project_far(bottleneck[:, :visible], weight, bias)
    turning = key[..., : cos.shape[-1]]
    turning.copy_(rotate_halves(turning, cos[:, None, :visible], sin[:, None, :visible]))
    return key, value


def _far_backward(
    d_key: torch.Tensor,
    d_value: torch.Tensor,
    bottleneck: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    needed: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of bottleneck, weight and bias from those of the far keys, rotated, and values that are seen."""
    heads, both, _ = weight.shape
    visible, tokens = d_key.shape[2], bottleneck.shape[1]
    if rotary_kernel_available(d_key):
        pairs = join_pair_gradients(d_key, d_value, tokens, cos, sin).flatten(2)
        visible = tokens
    else:
        # The rotation is orthogonal up to a factor, and its transpose turns the other way.
        d_key = rotate_halves(d_key, cos[:, None, :visible], -sin[:, None, :visible])
        pairs = torch.cat([d_key, d_value], dim=-1).transpose(1, 2).flatten(2)  # (batch, tokens, heads · 2 · head dim)
    d_bottleneck = None
    if needed[0]:
        d_bottleneck = pairs @ weight.flatten(0, 1)
        if visible < tokens:
            d_bottleneck = F.pad(d_bottleneck, (0, 0, 0, tokens - visible))
    rows = pairs.flatten(0, 1)
    d_weight = (rows.T @ bottleneck[:, :visible].flatten(0, 1)).view_as(weight) if needed[1] else None
    d_bias = rows.sum(0).view(heads, both) if needed[2] else None
    return d_bottleneck, d_weight, d_bias


def _save(ctx: Any, tensors: tuple[torch.Tensor, ...], saved: _Saved) -> None:
    """Keep tensors where checkpointing and offloading hooks see them, and the rest of `saved` beside them."""
    ctx.template = [None if isinstance(x, torch.Tensor) else x for x in saved]
    ctx.is_tensor = [isinstance(x, torch.Tensor) for x in saved]
    ctx.save_for_backward(*tensors, *(x for x in saved if isinstance(x, torch.Tensor)))


def _saved(ctx: Any, count: int) -> tuple[tuple[torch.Tensor, ...], _Saved]:
    tensors = ctx.saved_tensors
    rest = iter(tensors[count:])
    saved = tuple(next(rest) if here else x for here, x in zip(ctx.is_tensor, ctx.template, strict=True))
    return tensors[:count], saved
