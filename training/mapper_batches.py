"""Batches for a mapper: crops of pairs, from disk or held on a device, padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearfar.configuration.configuration_axial_mapper import HybridAxialMapperConfig
from nearfar.training.mapper_losses import MapperLoss
from nearfar.training.mapper_pairs import MapperPairs

__all__ = ["ALL_LAYERS", "Crop", "MapperBatch", "ResidentPairs", "read_crops"]


@dataclass
class MapperBatch:
    """Crops of several layer pairs, padded to the longest.

    Where a mapper reads all proxy layers at once, a crop has rows of all target layers: `targets = rows * L_l`,
    otherwise `targets = rows`.

    Attributes:
        features: `(rows, input channels, tokens)`, float32.
        target: `(targets, H_l, tokens)`, float32.
        mask: `(rows, tokens)`, False at padding; None where there is none.
        valid: `(targets, tokens)`, False where nothing is learned: padding and what stands before the text.
        layers: `(rows,)`, the place of each row's target layer among those scored.
        thresholds: `(targets, ratios)`, see `MapperLoss`.
    """

    features: Tensor
    target: Tensor
    mask: Tensor | None
    valid: Tensor
    layers: Tensor
    thresholds: Tensor

    def to(self, device: torch.device) -> MapperBatch:
        return MapperBatch(
            features=self.features.to(device),
            target=self.target.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            valid=self.valid.to(device),
            layers=self.layers.to(device),
            thresholds=self.thresholds.to(device),
        )


# Context, place of the target layer (ALL_LAYERS for all of them), first token, tokens.
Crop = tuple[int, int, int, int]
ALL_LAYERS = -1


class ResidentPairs:
    """Pairs held whole on a device: nothing is read or sent while a mapper trains.

    Args:
        pairs: where they come from.
        device: where they go.
        layer_channels: how many channels of a proxy layer are read, the mapper's `config.layer_channels`; the others
            are left out. None: all.
    """

    def __init__(self, pairs: MapperPairs, device: torch.device, layer_channels: int | None = None) -> None:
        self.contexts, self.mapper_fields, self.device = pairs.contexts, pairs.mapper_fields, device

        def held(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.array(array)).to(device)

        self._features = [held(pairs.features(context)[:, :layer_channels]) for context in range(len(pairs))]
        self._scores = [held(pairs.scores(context)) for context in range(len(pairs))]
        self._thresholds: dict[tuple[int, tuple[float, ...]], Tensor] = {}

    @staticmethod
    def nbytes(pairs: MapperPairs, layer_channels: int | None = None) -> int:
        """What all pairs take, with so many channels of a proxy layer."""
        fields = pairs.mapper_fields
        channels = pairs.channels if layer_channels is None else min(layer_channels, pairs.channels)
        numbers = fields["proxy_num_layers"] * channels
        numbers += len(fields["target_layers"]) * fields["target_num_heads"]
        tokens = sum(context.tokens for context in pairs.contexts)
        return tokens * numbers * np.dtype(pairs.settings["storage"]).itemsize

    def features(self, context: int) -> Tensor:
        """See `MapperPairs.features`; those channels that are held."""
        return self._features[context]

    def scores(self, context: int) -> Tensor:
        """See `MapperPairs.scores`."""
        return self._scores[context]

    def thresholds(self, context: int, ratios: Sequence[float]) -> Tensor:
        """See `MapperPairs.thresholds`."""
        key = (context, tuple(ratios))
        if key not in self._thresholds:
            prefix = self.contexts[context].prefix_tokens
            scores = self._scores[context][:, :, prefix:].flatten().float().sort(descending=True).values
            places = [min(max(int(ratio * len(scores) + 0.5), 1), len(scores)) - 1 for ratio in ratios]
            self._thresholds[key] = scores[places]
        return self._thresholds[key]


def read_crops(
    pairs: MapperPairs | ResidentPairs, crops: Sequence[Crop], config: HybridAxialMapperConfig, loss: MapperLoss
) -> MapperBatch:
    """The crops of a batch for a mapper, from disk or from where pairs are held."""
    device = getattr(pairs, "device", torch.device("cpu"))
    longest, prefixes = max(length for *_, length in crops), [pairs.contexts[crop[0]].prefix_tokens for crop in crops]
    together, layer_pairs, scored = crops[0][1] == ALL_LAYERS, config.layer_pairs, config.target_num_heads
    channels = config.layer_channels  # column sums come first, so pairs may also hold values that are not read
    per_crop = len(layer_pairs) if together else 1
    features = torch.zeros(len(crops), config.input_channels, longest, device=device)
    target = torch.zeros(len(crops), per_crop, scored, longest, device=device)
    thresholds = torch.zeros(len(crops), len(loss.threshold_ratios), device=device)
    mask, valid = (np.zeros((len(crops), longest), bool) for _ in range(2))
    for row, (context, place, start, length) in enumerate(crops):
        tokens = slice(start, start + length)
        x, y = pairs.features(context)[:, :channels, tokens], pairs.scores(context)[..., tokens]
        x, y = (x.reshape(-1, length), y) if together else (x[layer_pairs[place]], y[place][None])
        features[row, :, :length] = torch.as_tensor(x) if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
        target[row, :, :, :length] = torch.as_tensor(y) if isinstance(y, Tensor) else torch.from_numpy(np.array(y))
        mask[row, :length] = True
        valid[row, max(0, prefixes[row] - start) : length] = True
        if loss.scope == "context":
            thresholds[row] = torch.as_tensor(pairs.thresholds(context, loss.threshold_ratios))
    return MapperBatch(
        features=features,
        target=target.flatten(0, 1),
        mask=None if mask.all() else torch.from_numpy(mask),
        valid=torch.from_numpy(valid).repeat_interleave(per_crop, 0),
        layers=torch.tensor([place for _, place, _, _ in crops]),
        thresholds=thresholds.repeat_interleave(per_crop, 0),
    )
