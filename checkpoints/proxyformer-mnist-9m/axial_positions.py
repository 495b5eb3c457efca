"""Positions in one, two or three dimensions: a rotary embedding whose frequencies the dimensions share, and sines."""

from collections.abc import Sequence

import torch

from .rotary_halves import rotate_halves


def grid_positions(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """`(m_1 · … · m_D, D)`, float32: the place of each cell of a grid, the last dimension running fastest."""
    axes = [torch.arange(count, dtype=torch.float32, device=device) for count in counts]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


class AxialRotary:
    """Turns queries and keys of the cells of a grid.

    Pair i of the D · f pairs of a head that turn, f = head_dim / 2 / D rounded down, belongs to dimension i mod D, and
    turns by the cell's place along it times a frequency between 1 and 1 / base. Pairs that are left over do not turn.

    Args:
        counts: `(m_1, …, m_D)`, sizes of the grid.
        head_dim: even or odd; at least 2 D.
        base: of the frequencies, which fall from 1 towards 1 / base.
        device, dtype: of what will be turned.
    """

    def __init__(
        self, counts: Sequence[int], head_dim: int, base: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        dims, pairs = len(counts), head_dim // 2
        shared = pairs // dims
        steps = torch.arange(shared, dtype=torch.float32, device=device) / shared
        frequencies = torch.pow(float(base), -steps)
        places = grid_positions(counts, device)
        angles = (places[:, None, :] * frequencies[:, None]).flatten(1)  # (cells, f, D)
        angles = torch.nn.functional.pad(angles, (0, pairs - angles.shape[1]))
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn `(batch, heads, cells, head dim)`."""
        return rotate_halves(x, self.cos.to(x), self.sin.to(x))


def sinusoidal_grid(
    counts: Sequence[int], width: int, device: torch.device, dtype: torch.dtype, base: float = 100.0
) -> torch.Tensor:
    """Sines and cosines of the places of a grid's cells, `(m_1 · … · m_D, width)`; the dimensions share the width.

    Columns that do not make a pair for every dimension are 0.
    """
    dims = len(counts)
    pairs = width // (2 * dims)
    steps = torch.arange(pairs, dtype=torch.float32, device=device) / max(pairs, 1)
    angles = (grid_positions(counts, device)[:, :, None] * torch.pow(base, -steps)).flatten(1)
    found = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return torch.nn.functional.pad(found, (0, width - found.shape[1])).to(dtype)
