"""The far path's projections as single matrices: W_up W_K and W_up W_V, from the bottleneck to keys and values."""

from typing import Any

import torch
from torch import nn

FarWeights = tuple[torch.Tensor, torch.Tensor | None]


def is_plain(module: nn.Module) -> bool:
    """Whether a projection is its weight matrix and nothing else: no adapter, no quantised or partitioned weight."""
    weight = getattr(module, "weight", None)
    return (
        type(module) is nn.Linear
        and isinstance(weight, torch.Tensor)
        and type(weight.data) is torch.Tensor
        and not weight.is_meta
        and tuple(weight.shape) == (module.out_features, module.in_features)
    )


def fuse_far_weights(query_key_value: nn.Linear, up: nn.Linear, heads: int) -> FarWeights:
    """From the weights themselves; differentiable.

    Args:
        query_key_value: GPT-NeoX's fused projection, rows `[heads, 3, head dim]`.
        up: from the bottleneck to the hidden size, without bias.
        heads: attention heads.

    Returns:
        `(heads, 2 · head dim, bottleneck size)`, and biases `(heads, 2 · head dim)` or `None`; keys first.
    """
    weight = query_key_value.weight
    bias: Any = query_key_value.bias  # `None` without, which torch's annotation leaves out
    dim = weight.shape[0] // (3 * heads)
    # The queries' rows too, which are dropped: cheaper than gathering the others, and under autocast the product takes
    # the copy in half precision that the projection itself uses.
    far = (weight @ up.weight).view(heads, 3 * dim, -1)[:, dim:]
    if bias is None:
        return far, None
    return far, bias.view(heads, 3 * dim)[:, dim:].to(far.dtype)


def probe_far_weights(
    query_key_value: nn.Module, up: nn.Module, size: int, head_dim: int, like: torch.Tensor
) -> FarWeights:
    """The same from modules of any kind that are affine (adapters, quantised weights), by feeding them unit vectors.

    Args:
        query_key_value, up: the modules.
        size: of the bottleneck.
        head_dim: of a head.
        like: gives device and dtype.

    Returns:
        As `fuse_far_weights`; biases are always there.
    """
    # Long unit vectors: the bias, which is added and taken off again, must not drown the weights in its rounding.
    length = 64.0 if like.dtype == torch.float16 else 1024.0
    unit = torch.eye(size, dtype=like.dtype, device=like.device) * length
    rows = torch.cat([like.new_zeros(1, size), unit])
    pairs = query_key_value(up(rows[None]))[0].unflatten(-1, (-1, 3 * head_dim))[..., head_dim:]
    bias, weight = pairs[0], ((pairs[1:] - pairs[:1]) / length).permute(1, 2, 0)
    return weight, bias
