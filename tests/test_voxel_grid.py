"""Point clouds into voxels and back, and through a model of three dimensions."""

import pytest
import torch
from image_models import tiny_image_model

from nearfar.modeling.voxel_grid import read_voxels, voxelise


def test_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(2, 40, 3, generator=generator, dtype=torch.float64) * 4 - 2
    features = torch.randn(2, 40, 2, generator=generator, dtype=torch.float64)
    grid, low, high = (3, 4, 5), (-1.5, -2.0, -1.0), (2.0, 1.0, 2.0)
    voxels, index = voxelise(points, grid, features, (low, high))
    expected = torch.zeros(2, 3, *grid, dtype=torch.float64)
    for row in range(2):
        cells: dict[tuple[int, ...], list[int]] = {}
        for n, point in enumerate(points[row].tolist()):
            if all(a <= x <= b for x, a, b in zip(point, low, high, strict=True)):
                place = tuple(
                    min(int((x - a) / (b - a) * size), size - 1)
                    for x, a, b, size in zip(point, low, high, grid, strict=True)
                )
                cells.setdefault(place, []).append(n)
                assert index[row, n] == (place[0] * 4 + place[1]) * 5 + place[2]
            else:
                assert index[row, n] == -1
        total = sum(map(len, cells.values()))
        assert 0 < total < 40
        for place, inside in cells.items():
            expected[row, 0][place] = len(inside) / total
            expected[row, 1:][(slice(None), *place)] = features[row, inside].mean(0)
    assert (voxels - expected).abs().max() < 1e-10
    back = read_voxels(voxels, index)
    kept = index >= 0
    assert (back[~kept] == 0).all()
    assert (back[kept][:, 0] > 0).all()


def test_own_bounds_and_invalid_points() -> None:
    points = torch.tensor([[[0.0, 0.0], [4.0, 2.0], [99.0, 99.0]]])
    valid = torch.tensor([[True, True, False]])
    voxels, index = voxelise(points, (4, 2), valid=valid)
    assert index.tolist() == [[0, 7, -1]]
    assert voxels[0, 0, 0, 0] == voxels[0, 0, 3, 1] == 0.5 and voxels.sum() == 1
    # A cloud of one place, and one without any points.
    assert voxelise(torch.ones(1, 3, 2), (2, 2))[0].tolist() == [[[[1.0, 0.0], [0.0, 0.0]]]]
    assert voxelise(points, (4, 2), valid=torch.zeros_like(valid))[0].abs().sum() == 0


def test_points_reach_a_model() -> None:
    model = tiny_image_model(
        image_size=[4, 4, 4], patch_size=[2, 2, 2], in_channels=3, num_classes=None, dtype=torch.float64
    )
    features = torch.randn(1, 30, 2, dtype=torch.float64, requires_grad=True)
    voxels, index = voxelise(torch.rand(1, 30, 3, dtype=torch.float64), (4, 4, 4), features)
    found = read_voxels(model(voxels, torch.tensor([0.5])).sample, index)
    assert found.shape == (1, 30, 3)
    found.square().sum().backward()
    assert features.grad is not None and (features.grad.abs().amax(-1) > 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": (2, 2)}, "for a grid of"),
        ({"grid": (2, 0, 2)}, "for a grid of"),
        ({"features": torch.zeros(1, 4, 2)}, "features must begin"),
        ({"valid": torch.ones(2, 5)}, "valid must begin"),
        ({"bounds": ((0, 0, 0), (1, 0, 1))}, "second higher"),
    ],
)
def test_bad_input(changes: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        voxelise(**{"points": torch.zeros(1, 5, 3), "grid": (2, 2, 2), **changes})


def test_whole_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"floating-point, got torch.int64"):
        voxelise(torch.zeros(1, 5, 3, dtype=torch.long), (2, 2, 2))
