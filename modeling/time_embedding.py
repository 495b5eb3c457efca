"""The time of a flow, between 0 (noise) and 1 (image), as a vector."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class TimeEmbedding(nn.Module):
    """Sines and cosines of the time, then a gated MLP (SwiGLU).

    Args:
        features: sines and cosines, even.
        size: width of the result.
    """

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.features = features
        self.gate_proj = nn.Linear(features, size, bias=False)
        self.up_proj = nn.Linear(features, size, bias=False)
        self.down_proj = nn.Linear(size, size, bias=False)

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        """`(batch,)` to `(batch, size)`."""
        half = self.features // 2
        exact = torch.promote_types(time.dtype, torch.float32)
        # Periods from 2 π / 1000 to 2 π · 10: the finest tells a thousandth apart.
        steps = torch.arange(half, dtype=exact, device=time.device) / half
        angles = time.to(exact)[:, None] * (1000.0 * torch.exp(-math.log(10_000.0) * steps))
        found = math.sqrt(2.0) * torch.cat([angles.cos(), angles.sin()], dim=-1)  # of mean square 1
        found = found.to(self.down_proj.weight.dtype)
        return self.down_proj(F.silu(self.gate_proj(found)) * self.up_proj(found))
