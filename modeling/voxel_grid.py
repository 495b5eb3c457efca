"""Point clouds as voxel grids, which three-dimensional blocks partition (ProxyFormer, Section 3.2), and back."""

from collections.abc import Sequence

import torch


def voxelise(
    points: torch.Tensor,
    grid: Sequence[int],
    features: torch.Tensor | None = None,
    bounds: tuple[Sequence[float], Sequence[float]] | None = None,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Points into the cells of a grid.

    Args:
        points: `(batch, n, D)`, coordinates, floating-point.
        grid: `(N_1, …, N_D)` cells.
        features: `(batch, n, channels)` of the points; a cell holds the mean of its points'.
        bounds: lowest and highest corner of the grid; `None` stands for each cloud's own. Points outside are left out.
        valid: `(batch, n)`, bool; other points are left out.

    Returns:
        `(batch, 1 + channels, N_1, …, N_D)` in the dtype of `points`: how many points are in a cell, divided by how
        many there are, then the mean features, 0 where no point is; and `(batch, n)`, int64, each point's cell as a
        flat index, -1 where it was left out, for `read_voxels`.

    Raises:
        TypeError: points that are not floating-point.
        ValueError: shapes that do not fit, or bounds without room between them.
    """
    if not points.is_floating_point():
        raise TypeError(f"points must be floating-point, got {points.dtype}: use points.float().")
    grid = tuple(grid)
    if points.ndim != 3 or points.shape[2] != len(grid) or not grid or min(grid) < 1:
        raise ValueError(
            f"points must have shape (batch, n, {len(grid)}) for a grid of {grid} cells, got {tuple(points.shape)}."
        )
    batch, count, _ = points.shape
    for name, given in (("features", features), ("valid", valid)):
        if given is not None and given.shape[:2] != (batch, count):
            raise ValueError(f"{name} must begin with (batch, n) = ({batch}, {count}), got {tuple(given.shape)}.")
    kept = torch.ones(batch, count, dtype=torch.bool, device=points.device) if valid is None else valid.bool()
    cells = torch.tensor(grid, device=points.device)
    if bounds is None:
        infinity = float("inf")
        low = torch.where(kept[..., None], points, infinity).amin(1, keepdim=True)
        high = torch.where(kept[..., None], points, -infinity).amax(1, keepdim=True)
    else:
        low, high = (torch.as_tensor(corner, dtype=points.dtype, device=points.device) for corner in bounds)
        if low.shape != (len(grid),) or high.shape != (len(grid),) or not bool((high > low).all()):
            raise ValueError(f"bounds must be two corners of {len(grid)} numbers, the second higher, got {bounds}.")
        kept = kept & ((points >= low) & (points <= high)).all(-1)
    extent = torch.where(high > low, high - low, 1.0)
    scaled = torch.where(kept[..., None], (points - low) / extent, 0.0) * cells
    # The highest corner belongs to the last cell.
    place = torch.minimum(scaled.floor().long(), cells - 1)
    index = torch.zeros(batch, count, dtype=torch.long, device=points.device)
    for dim, size in enumerate(grid):
        index = index * size + place[..., dim]
    total = int(cells.prod())
    # One cell more takes what is left out.
    target = torch.where(kept, index, total)
    ones = torch.ones(batch, count, 1, dtype=points.dtype, device=points.device)
    values = ones if features is None else torch.cat([ones, features.to(points.dtype)], dim=-1)
    sums = torch.zeros(batch, total + 1, values.shape[-1], dtype=points.dtype, device=points.device)
    sums = sums.scatter_add(1, target[..., None].expand_as(values), values)[:, :-1]
    number = sums[..., :1]
    means = sums[..., 1:] / number.clamp_min(1)
    share = number / kept.sum(1)[:, None, None].clamp_min(1)
    voxels = torch.cat([share, means], dim=-1).movedim(-1, 1).unflatten(2, grid)
    return voxels, torch.where(kept, index, -1)


def read_voxels(voxels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Back from cells to points: each point gets its cell's numbers.

    Args:
        voxels: `(batch, channels, N_1, …, N_D)`.
        index: `(batch, n)`, as `voxelise` returned it.

    Returns:
        `(batch, n, channels)`, 0 for points that were left out.
    """
    flat = voxels.flatten(2).transpose(1, 2)
    found = torch.gather(flat, 1, index.clamp_min(0)[..., None].expand(-1, -1, flat.shape[2]))
    return found * (index >= 0)[..., None].to(found.dtype)
