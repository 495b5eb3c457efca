"""Images from idx files and folders; grids."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from image_models import tiny_digits, write_idx
from PIL import Image

from nearfar.evaluation.image_data import ImageData, fit, load_images, read_idx
from nearfar.evaluation.image_grid import image_grid, write_grid


def test_idx_files(tmp_path: Path) -> None:
    data = load_images(tiny_digits(tmp_path))
    assert data.images.shape == (96, 1, 8, 8) and data.images.dtype == torch.uint8
    assert data.labels is not None and data.labels[:4].tolist() == [0, 1, 2, 0] and data.classes == ("0", "1", "2")
    # The bars are where their labels say.
    bright = data.images[:, 0].float().mean(1) > 128
    bars = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1]]).bool()
    assert torch.equal(bright, bars[data.labels])
    test = load_images(tmp_path, "test", max_images=10)
    assert len(test) == 10
    array = np.arange(24).reshape(2, 3, 4)
    for name in ("plain-idx3-ubyte", "packed-idx3-ubyte.gz"):
        write_idx(tmp_path / name, array)
        assert torch.equal(read_idx(tmp_path / name), torch.from_numpy(array).to(torch.uint8))
    big = (
        bytes([0, 0, 0x0C, 1])
        + (2).to_bytes(4, "big")
        + (258).to_bytes(4, "big")
        + (-3).to_bytes(4, "big", signed=True)
    )
    (tmp_path / "ints").write_bytes(big)
    assert read_idx(tmp_path / "ints").tolist() == [258, -3]


def test_sizes_and_channels(tmp_path: Path) -> None:
    tiny_digits(tmp_path)
    padded = load_images(tmp_path, size=12, channels=3, resize="pad")
    plain = load_images(tmp_path)
    assert padded.images.shape == (96, 3, 12, 12)
    assert torch.equal(padded.images[:, 2, 2:10, 2:10], plain.images[:, 0])
    assert padded.images[:, :, :2].sum() == 0
    scaled = load_images(tmp_path, size=(16, 4)).images
    assert scaled.shape == (96, 1, 16, 4)
    assert abs(scaled.float().mean() - plain.images.float().mean()) < 2
    with pytest.raises(ValueError, match="cannot be padded"):
        fit(plain.images, (4, 8), "pad")


def test_a_folder_of_classes(tmp_path: Path) -> None:
    for split, number in (("train", 3), ("test", 2)):
        for label, colour in enumerate([(255, 0, 0), (0, 0, 255)]):
            folder = tmp_path / split / ("red", "zblue")[label]
            folder.mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (6 + 2 * index, 6), colour).save(folder / f"{index}.png")
    data = load_images(tmp_path, size=4)
    assert data.classes == ("red", "zblue") and data.labels is not None
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (data.images[:3] == torch.tensor([255, 0, 0])[:, None, None]).all()
    grey = load_images(tmp_path, "test", size=4, channels=1)
    assert grey.images.shape == (4, 1, 4, 4) and grey.images[0, 0, 0, 0] == 76
    assert len(load_images(tmp_path, size=4, max_images=1)) == 2
    with pytest.raises(ValueError, match="shapes"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match="no folder for the split 'other'"):
        load_images(tmp_path, "other", size=4)
    flat = load_images(tmp_path / "train" / "red", size=4)
    assert flat.labels is None and len(flat) == 3
    with pytest.raises(ValueError, match="no folders for splits"):
        load_images(tmp_path / "train", "test", size=4)


def test_folders_are_padded_and_16_bits_scaled(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 256], [32768, 65535]], dtype=np.uint16)).save(tmp_path / "grey.png")
    images = load_images(tmp_path, size=4, resize="pad").images
    assert images.tolist() == [[[[0, 0, 0, 0], [0, 0, 1, 0], [0, 128, 255, 0], [0, 0, 0, 0]]]]


def test_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [Image.new("L", (4, 4), 10 * n) for n in range(5)], "label": [0, 1, 1, 0, 1]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    made = datasets.Dataset.from_dict(rows, features=features)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or made)
    data = load_images("owner/name:config", "train", max_images=4)
    assert asked == [(("owner/name", "config"), {"split": "train"})]
    assert data.images[:, 0, 0, 0].tolist() == [0, 10, 20, 30] and data.classes == ("cat", "dog")
    assert data.labels is not None and data.labels.tolist() == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="no column 'picture'"):
        load_images("owner/name", image_column="picture")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        load_images("owner/name")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither idx files nor images"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        load_images(tmp_path / "missing")
    for name, content, message in (
        ("a", b"\1\2\3\4", "not an idx file"),
        ("b", bytes([0, 0, 8, 1]) + (9).to_bytes(4, "big") + b"abc", "ends early"),
        ("c.gz", gzip.compress(bytes([0, 0, 8, 1]) + (9).to_bytes(4, "big"))[:-12], "broken|ends early"),
        ("d.gz", b"plain", "broken"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_idx(tmp_path / name)
    with pytest.raises(ValueError, match="is a file"):
        load_images(tmp_path / "a")
    for options in ({"resize": "cut"}, {"channels": 2}, {"max_images": 0}, {"size": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            load_images(tmp_path, **options)  # type: ignore[arg-type]
    digits = tiny_digits(tmp_path / "digits")
    with pytest.raises(ValueError, match="no idx file of images for the split 'other'"):
        load_images(digits, "other")
    write_idx(digits / "train-labels-idx1-ubyte.gz", np.zeros(5))
    with pytest.raises(ValueError, match="5 labels for 96 images"):
        load_images(digits)


def test_parts() -> None:
    data = ImageData(torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1), torch.arange(10), ())
    part = data.part(4, seed=1)
    assert len(part) == 4 and part.labels is not None
    assert torch.equal(part.images.flatten().long(), part.labels)
    assert data.part(10) is data


def test_grid(tmp_path: Path) -> None:
    images = torch.full((5, 1, 2, 3), 7, dtype=torch.uint8)
    images[4] = 200
    grid = np.asarray(image_grid(images, columns=3, gap=1))
    assert grid.shape == (2 * 3 - 1, 3 * 4 - 1)
    assert grid[3, 4] == 200 and grid[0, 0] == 7 and grid[2, 0] == 128 and grid[4, 10] == 128
    path = write_grid(tmp_path / "new" / "grid.png", images, scale=2)
    with Image.open(path) as opened:
        assert opened.format == "PNG"
    video = torch.zeros(2, 3, 4, 5, 6, dtype=torch.uint8)
    assert image_grid(video, gap=0).size == (4 * 6, 2 * 5)
    with pytest.raises(ValueError, match="n > 0"):
        image_grid(images[:0])
    with pytest.raises(ValueError, match="at least 1"):
        image_grid(images, scale=0)
