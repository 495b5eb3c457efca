"""Many images in one, to be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.pipeline_flow_matching import to_pil

__all__ = ["image_grid", "write_grid"]


def image_grid(images: Tensor, columns: int | None = None, gap: int = 2, scale: int = 1) -> Any:
    """A PIL image of images in rows.

    Args:
        images: `(n, channels, height, width)`, uint8, 1 or 3 channels; of videos `(n, channels, frames, height,
            width)` each gets a row of its frames.
        columns: images in a row; `None` stands for about the root of their number.
        gap: pixels between them, grey.
        scale: pixels that each pixel becomes, along each side.

    Raises:
        ValueError: no images, or numbers out of range.
    """
    if images.ndim == 5:
        columns = images.shape[2]
        images = images.transpose(1, 2).flatten(0, 1)
    if images.ndim != 4 or not len(images):
        raise ValueError(f"images must have shape (n, channels, height, width) with n > 0, got {tuple(images.shape)}")
    columns = columns or max(1, round(len(images) ** 0.5))
    if columns < 1 or gap < 0 or scale < 1:
        raise ValueError(f"columns and scale must be at least 1, gap at least 0, got {columns}, {scale} and {gap}")
    rows = -(-len(images) // columns)
    count, channels, height, width = images.shape
    full = torch.full((rows * columns, channels, height + gap, width + gap), 128, dtype=torch.uint8)
    full[:count, :, :height, :width] = images.cpu()
    joined = full.view(rows, columns, channels, height + gap, width + gap).permute(2, 0, 3, 1, 4)
    joined = joined.reshape(channels, rows * (height + gap), columns * (width + gap))
    joined = joined[:, : joined.shape[1] - gap, : joined.shape[2] - gap]
    joined = joined.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)
    return to_pil(joined[None])[0]


def write_grid(path: str | Path, images: Tensor, columns: int | None = None, gap: int = 2, scale: int = 1) -> Path:
    """Write `image_grid` to a file, whose name says the format: .png, .jpg, …"""
    grid = image_grid(images, columns, gap, scale)
    return write_beside(path, grid.save)
