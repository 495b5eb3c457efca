"""Rotary position embedding for positions in the millions: angles are computed in double precision."""

from typing import Any

import torch

from .rotary_halves import rotate_halves


class RotaryAngles:
    """Cosines and sines of some positions.

    Args:
        parameters: `rope_parameters` of a configuration, of type `default` or `linear`.
        positions: `(batch or 1, tokens)`, whole numbers.
        head_dim: even.
        dtype: of the angles' cosines and sines.
    """

    def __init__(self, parameters: dict[str, Any], positions: torch.Tensor, head_dim: int, dtype: torch.dtype) -> None:
        self.positions = positions
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
        frequencies = float(parameters.get("rope_theta", 10000.0)) ** -exponents
        angles = positions[..., None].double() / float(parameters.get("factor", 1.0)) * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turn `(batch, heads, tokens, head dim)`."""
        return rotate_halves(x, self.cos.to(x.device), self.sin.to(x.device))

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`rotate`, for callers that also name the positions, which must be these."""
        assert positions is self.positions
        return self.rotate(x)
