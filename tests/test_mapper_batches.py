"""Batches of a mapper's training: crops of pairs, padded and masked, from disk and from a device alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_pairs import SMALL, add_states, write_pairs

from nearfar.training.mapper_batches import ALL_LAYERS, ResidentPairs, read_crops
from nearfar.training.mapper_losses import MapperLoss
from nearfar.training.mapper_pairs import MapperPairs
from nearfar.training.mapper_training import new_mapper


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> MapperPairs:
    return write_pairs(tmp_path_factory.mktemp("pairs"), [70, 20, 64, 50, 90, 33])


def test_batches_are_padded_and_masked(pairs: MapperPairs) -> None:
    names = [context.tokens for context in pairs.contexts]
    short, long = names.index(20), names.index(70)
    loss, config = MapperLoss(scope="context"), new_mapper(pairs, **SMALL).config
    batch = read_crops(pairs, [(short, 3, 0, 20), (long, 1, 1, 32), (long, 1, 30, 32)], config, loss)
    assert batch.features.shape == (3, 4, 32) and batch.target.shape == (3, 2, 32)
    assert batch.mask is not None and batch.mask.sum(1).tolist() == [20, 32, 32]
    assert batch.valid.sum(1).tolist() == [17, 30, 32] and not batch.valid[0, :3].any()
    assert np.array_equal(batch.features[0, :, :20], pairs.features(short)[1])
    assert np.array_equal(batch.target[1], pairs.scores(long)[1, :, 1:33])
    assert np.array_equal(batch.thresholds[1], pairs.thresholds(long, loss.threshold_ratios))
    assert batch.layers.tolist() == [3, 1, 1]
    assert read_crops(pairs, [(long, 0, 4, 32)], config, loss).mask is None


def test_crops_of_all_layers(pairs: MapperPairs) -> None:
    """Rows of all target layers of a crop, as they would be read one by one; the same from a device."""
    names = [context.tokens for context in pairs.contexts]
    short, long = names.index(20), names.index(70)
    loss, paired = MapperLoss(scope="context"), new_mapper(pairs, **SMALL).config
    config = new_mapper(pairs, **SMALL, proxy_layers="all", layer_queries=True).config
    crops = [(short, 0, 20), (long, 1, 32)]
    for source in (pairs, ResidentPairs(pairs, torch.device("cpu"))):
        batch = read_crops(source, [(c, ALL_LAYERS, s, n) for c, s, n in crops], config, loss)
        assert batch.features.shape == (2, 8, 32) and batch.target.shape == (8, 2, 32)
        assert batch.mask is not None and batch.mask.sum(1).tolist() == [20, 32]
        for row, (context, start, length) in enumerate(crops):
            single = read_crops(pairs, [(context, place, start, length) for place in range(4)], paired, loss)
            rows = slice(4 * row, 4 * row + 4)
            for name in ("target", "valid", "thresholds"):
                mine = getattr(batch, name)[rows]
                assert torch.equal(mine[..., :length] if name != "thresholds" else mine, getattr(single, name)), name
            x = batch.features[row].view(2, 4, 32)[..., :length]
            assert torch.equal(x[[0, 1]], single.features[[0, 2]])
    bytes_held = sum(context.tokens for context in pairs.contexts) * (2 * 4 + 4 * 2) * 4
    assert ResidentPairs.nbytes(pairs) == bytes_held


def test_values_that_are_not_read_are_not_held(tmp_path: Path) -> None:
    write_pairs(tmp_path, [40, 30])
    pairs, device, loss = add_states(tmp_path), torch.device("cpu"), MapperLoss()
    options = {**SMALL, "proxy_layers": "all", "layer_queries": True}
    for states, channels in (("none", 4), ("values", 7)):
        config = new_mapper(pairs, **options, proxy_states=states).config
        held = ResidentPairs(pairs, device, config.layer_channels)
        tensors = [held.features(context) for context in range(2)]
        assert [tensor.shape[1] for tensor in tensors] == [channels, channels]
        tensors += [held.scores(context) for context in range(2)]
        held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert ResidentPairs.nbytes(pairs, config.layer_channels) == held_bytes
        crops = [(0, ALL_LAYERS, 2, 20), (1, ALL_LAYERS, 0, 30)]
        assert torch.equal(
            read_crops(held, crops, config, loss).features, read_crops(pairs, crops, config, loss).features
        )
