"""Rotary position embedding of part of a head's dimensions, first half against second half (GPT-NeoX's convention)."""

import torch


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first dimensions of `x` by given angles.

    Args:
        x: `(…, head dim)`.
        cos, sin: `(…, rotary dims)`, broadcastable to `x`'s leading dimensions, both halves alike.

    Returns:
        A tensor of `x`'s shape and dtype; dimensions behind the rotary ones are as they were.
    """
    rotary = cos.shape[-1]
    turning = x[..., :rotary]
    first, second = turning.chunk(2, dim=-1)
    turned = (turning * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    return turned if rotary == x.shape[-1] else torch.cat([turned, x[..., rotary:]], dim=-1)
