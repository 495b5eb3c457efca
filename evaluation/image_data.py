"""Labelled images from idx files (MNIST's format), folders, or a dataset on the Hub, as one tensor of bytes."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

__all__ = ["ImageData", "load_images", "read_idx"]

RESIZE = ("scale", "pad")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
# Names under which a split goes in files and folders.
_SPLITS = {"train": ("train", "training"), "test": ("t10k", "test", "val", "valid", "validation")}
_IDX_DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(np.uint8), 0x09: np.dtype(np.int8), 0x0B: np.dtype(">i2"), 0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"), 0x0E: np.dtype(">f8"),
}  # fmt: skip
_CHUNK = 4096


@dataclass(frozen=True)
class ImageData:
    """Images and their classes.

    Attributes:
        images: `(n, channels, height, width)`, uint8.
        labels: `(n,)`, int64, or `None` where there are none.
        classes: names of the classes.
    """

    images: Tensor
    labels: Tensor | None
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> ImageData:
        """The same on a device."""
        labels = None if self.labels is None else self.labels.to(device)
        return ImageData(self.images.to(device), labels, self.classes)

    def part(self, count: int, seed: int = 0) -> ImageData:
        """`count` images drawn without replacement; all in their own order where there are no more."""
        if count >= len(self):
            return self
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        chosen = chosen.to(self.images.device)
        return ImageData(self.images[chosen], None if self.labels is None else self.labels[chosen], self.classes)


def load_images(
    source: str | Path,
    split: str = "train",
    *,
    size: Sequence[int] | int | None = None,
    channels: int | None = None,
    resize: str = "scale",
    max_images: int | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageData:
    """Read images.

    Args:
        source: one of: a folder with idx files such as `train-images-idx3-ubyte.gz` and `train-labels-idx1-ubyte.gz`
            (the test split's begin with `t10k` or `test`); a folder of images, in subfolders named after their
            classes, these perhaps in folders named after the splits; the id of a dataset, `owner/name` or
            `owner/name:config`, which needs the `datasets` package.
        split: `"train"` or `"test"`; of a dataset any of its splits.
        size: (height, width) of the result, or one number for both; `None`: as they are, all alike.
        channels: 1 or 3, converted if need be; `None`: as they are.
        resize: `"scale"`, by area and bilinear; or `"pad"`, zeros around images that are smaller.
        max_images: the first so many of a dataset or of idx files; of a folder as many of each class.
        image_column, label_column: of a dataset; `None`: found by name.

    Returns:
        The images, on the CPU.

    Raises:
        ValueError: nothing there that can be read, images of different sizes without `size`, arguments out of range.
        ImportError: `datasets` or Pillow is needed and missing.
    """
    if resize not in RESIZE:
        raise ValueError(f"resize must be one of {', '.join(RESIZE)}, got {resize!r}")
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if max_images is not None and max_images < 1:
        raise ValueError(f"max_images must be at least 1, got {max_images}")
    wanted = (size, size) if isinstance(size, int) else None if size is None else (size[0], size[1])
    if wanted is not None and min(wanted) < 1:
        raise ValueError(f"size must be at least 1 pixel, got {size}")
    scaled = wanted if resize == "scale" else None
    path = Path(source)
    if path.is_dir():
        found = _idx_folder(path, split, max_images)
        if found is None:
            found = _image_folder(path, split, scaled, channels, max_images)
    elif path.exists():
        raise ValueError(f"{path} is a file: give the folder that holds it")
    else:
        found = _dataset(str(source), split, scaled, channels, max_images, image_column, label_column)
    images = found.images
    if channels is not None and images.shape[1] != channels:
        images = _channels(images, channels)
    if wanted is not None and tuple(images.shape[2:]) != wanted:
        images = fit(images, wanted, resize)
    return ImageData(images, found.labels, found.classes)


def fit(images: Tensor, size: tuple[int, int], resize: str = "scale") -> Tensor:
    """Images `(n, channels, height, width)`, uint8, at another size; see `load_images`.

    Raises:
        ValueError: padding to less than they have.
    """
    if resize == "pad":
        rows, columns = size[0] - images.shape[2], size[1] - images.shape[3]
        if min(rows, columns) < 0:
            raise ValueError(f"images of {tuple(images.shape[2:])} cannot be padded to {size}: use resize='scale'")
        return F.pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return torch.cat([
        F.interpolate(part.float(), size=size, mode="bilinear", antialias=True, align_corners=False)
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
        for part in images.split(_CHUNK)
    ])  # fmt: skip


def _channels(images: Tensor, channels: int) -> Tensor:
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1).contiguous()
    if images.shape[1] != 3:
        raise ValueError(f"images of {images.shape[1]} channels cannot be made into {channels}")
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]  # ITU-R BT.601, as PIL's "L"
    return torch.cat([
        (part.float() * weights).sum(1, keepdim=True).round().clamp(0, 255).to(torch.uint8)
        for part in images.split(_CHUNK)
    ])  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# idx files
# ---------------------------------------------------------------------------------------------------------------------


def read_idx(path: str | Path, max_items: int | None = None) -> Tensor:
    """An array in MNIST's idx format, plain or .gz; only the first items if `max_items` is given.

    Raises:
        ValueError: not such a file, or one that ends too early.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_DTYPES or not head[3]:
                raise ValueError(f"{path} is not an idx file: it begins with {head.hex()}")
            shape = [int.from_bytes(file.read(4), "big") for _ in range(head[3])]
            if max_items is not None:
                shape[0] = min(shape[0], max_items)
            dtype = _IDX_DTYPES[head[2]]
            content = file.read(math.prod(shape) * dtype.itemsize)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is broken: {error}") from error
    if len(content) < math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{path} ends early: {shape} items of {dtype} announced, {len(content)} bytes there")
    array = np.frombuffer(content, dtype).reshape(shape)
    return torch.from_numpy(array.astype(dtype.newbyteorder("=")))


def _idx_folder(folder: Path, split: str, max_images: int | None) -> ImageData | None:
    names = _SPLITS.get(split, (split,))
    files = [file for file in sorted(folder.iterdir()) if "idx" in file.name and "ubyte" in file.name]
    if not files:
        return None
    chosen = [file for file in files if file.name.lower().startswith(names)]
    image_files = [file for file in chosen if "images" in file.name]
    if not image_files:
        raise ValueError(
            f"{folder} has no idx file of images for the split {split!r}: its files are "
            f"{', '.join(file.name for file in files)}"
        )
    images = read_idx(image_files[0], max_images)
    if images.ndim not in (3, 4) or images.dtype != torch.uint8:
        raise ValueError(f"{image_files[0]} must hold bytes of 3 or 4 dimensions, got {tuple(images.shape)}")
    images = images[:, None] if images.ndim == 3 else images
    label_files = [file for file in chosen if "labels" in file.name]
    if not label_files:
        return ImageData(images, None, ())
    labels = read_idx(label_files[0], max_images).long()
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{label_files[0]} has {len(labels)} labels for {len(images)} images")
    return ImageData(images, labels, tuple(str(name) for name in range(int(labels.max()) + 1)))


# ---------------------------------------------------------------------------------------------------------------------
# Folders of images, and datasets
# ---------------------------------------------------------------------------------------------------------------------


def _image_folder(
    folder: Path, split: str, size: tuple[int, int] | None, channels: int | None, max_images: int | None
) -> ImageData:
    inner = [child for child in sorted(folder.iterdir()) if child.is_dir()]
    known = [name for names in _SPLITS.values() for name in names]
    splits = [child for child in inner if child.name.lower() in known]
    if splits:
        wanted = [child for child in splits if child.name.lower() in _SPLITS.get(split, (split,))]
        if not wanted:
            raise ValueError(
                f"{folder} has no folder for the split {split!r}, only {', '.join(child.name for child in splits)}"
            )
        folder = wanted[0]
        inner = [child for child in sorted(folder.iterdir()) if child.is_dir()]
    elif split not in _SPLITS["train"]:
        raise ValueError(
            f"{folder} has no folders for splits, so that all of it is the split 'train', and there is no {split!r}"
        )
    groups = {child.name: _image_files(child) for child in inner}
    groups = {name: files for name, files in groups.items() if files}
    labelled = bool(groups)
    if not labelled:
        groups = {"": _image_files(folder)}
    if not any(groups.values()):
        raise ValueError(f"{folder} holds neither idx files nor images ({', '.join(_SUFFIXES)})")
    files, labels = [], []
    for label, found in enumerate(groups.values()):
        files += found[:max_images]
        labels += [label] * len(found[:max_images])
    opened = _pil()
    images = _stack(
        (opened.open(file) for file in tqdm(files, desc="images", leave=False, dynamic_ncols=True)), size, channels
    )
    return ImageData(images, torch.tensor(labels) if labelled else None, tuple(groups) if labelled else ())


def _image_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())


def _dataset(
    source: str,
    split: str,
    size: tuple[int, int] | None,
    channels: int | None,
    max_images: int | None,
    image_column: str | None,
    label_column: str | None,
) -> ImageData:
    if "/" not in source or source.count("/") > 1 or source.startswith(("/", ".")):
        raise ValueError(f"there is no folder {source}, and it is not the id of a dataset (owner/name)")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"there is no folder {source}; reading it as a dataset needs the `datasets` package: pip install datasets"
        ) from error
    _pil()
    name, _, config = source.partition(":")
    dataset = load_dataset(name, config or None, split=split)
    columns = list(dataset.features)
    image_column = _column(source, columns, image_column, ("image", "img", "pixel_values"))
    label = label_column or next((c for c in ("label", "labels", "fine_label", "class") if c in columns), None)
    if label_column is not None and label_column not in columns:
        raise ValueError(f"{source} has no column {label_column!r}; its columns are {', '.join(columns)}")
    if max_images is not None:
        dataset = dataset.select(range(min(max_images, len(dataset))))
    images = _stack(
        (row[image_column] for row in tqdm(dataset, desc="images", leave=False, dynamic_ncols=True)), size, channels
    )
    if label is None:
        return ImageData(images, None, ())
    labels = torch.tensor(dataset[label][:])
    names = getattr(dataset.features[label], "names", None) or [str(n) for n in range(int(labels.max()) + 1)]
    return ImageData(images, labels, tuple(names))


def _column(source: str, columns: list[str], given: str | None, usual: Sequence[str]) -> str:
    found = given or next((name for name in usual if name in columns), None)
    if found is None or found not in columns:
        raise ValueError(f"{source} has no column {given or usual[0]!r}; its columns are {', '.join(columns)}")
    return found


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading image files needs Pillow: pip install pillow") from error
    return Image


def _stack(opened: Any, size: tuple[int, int] | None, channels: int | None) -> Tensor:
    """PIL images as one tensor; larger or other shapes are cut to the middle and scaled to `size`."""
    image_class = _pil()
    found: list[np.ndarray] = []
    for image in opened:
        if image.mode.startswith("I;16"):  # which PIL would cut off at 255
            image = image_class.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        mode = {1: "L", 3: "RGB"}.get(channels or (1 if image.mode in ("1", "L") else 3), "RGB")
        image = image.convert(mode)
        if size is not None and (image.height, image.width) != size:
            scale = max(size[0] / image.height, size[1] / image.width)
            inner = [min(length, round(side / scale)) for length, side in
                     ((image.width, size[1]), (image.height, size[0]))]  # fmt: skip
            left, top = (image.width - inner[0]) // 2, (image.height - inner[1]) // 2
            box = (left, top, left + inner[0], top + inner[1])
            image = image.resize((size[1], size[0]), image_class.Resampling.BICUBIC, box=box)
        array = np.asarray(image)
        found.append(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))
    shapes = {array.shape for array in found}
    if len(shapes) > 1:
        raise ValueError(
            f"the images have {len(shapes)} shapes, such as {sorted(shapes)[:3]}: give a size and channels"
        )
    return torch.from_numpy(np.stack(found))
