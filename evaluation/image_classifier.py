"""A small convolutional classifier, by which images that a model has drawn are judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from nearfar.modeling.atomic_file import write_beside

__all__ = ["ImageClassifier"]

_WEIGHTS, _CONFIG = "classifier.safetensors", "classifier.json"


class ImageClassifier(nn.Module):
    """Three stages of two 3 × 3 convolutions each, the mean over places, and a linear layer.

    Args:
        channels: of the images.
        classes: their names.
        size: (height, width) it was trained on; others are scaled to it.
        width: channels of the first stage; the features have four times as many.
        record: of its training, kept in the configuration file.

    Raises:
        ValueError: numbers out of range.
    """

    def __init__(
        self,
        channels: int,
        classes: Sequence[str],
        size: Sequence[int],
        width: int = 32,
        record: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if min(channels, len(classes), width, *size) < 1:
            raise ValueError(
                f"channels, classes, width and size must be at least 1, got {channels}, {len(classes)}, {width} and "
                f"{tuple(size)}"
            )
        self.channels, self.classes, self.size, self.width = channels, tuple(classes), tuple(size), width
        self.record = dict(record or {})
        layers: list[nn.Module] = []
        inputs = channels
        for outputs in (width, 2 * width, 4 * width):
            for _ in range(2):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.stages = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.25)
        self.output = nn.Linear(inputs, len(classes))

    def features(self, images: Tensor) -> Tensor:
        """What the last layer reads.

        Args:
            images: `(n, channels, height, width)`, uint8, or floating-point in -1 to 1.

        Returns:
            `(n, 4 · width)`.

        Raises:
            ValueError: other channels or dimensions.
        """
        if images.ndim != 4 or images.shape[1] != self.channels:
            raise ValueError(
                f"the classifier reads images (n, {self.channels}, height, width), got {tuple(images.shape)}"
            )
        x = images.to(self.output.weight.dtype) / 127.5 - 1 if images.dtype == torch.uint8 else images
        if tuple(x.shape[2:]) != self.size:
            x = F.interpolate(x, size=self.size, mode="bilinear", antialias=True, align_corners=False)
        return self.stages(x).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, classes)`; arguments as in `features`."""
        return self.output(self.dropout(self.features(images)))

    @torch.no_grad()
    def judge(self, images: Tensor, batch_size: int = 1024) -> tuple[Tensor, Tensor]:
        """Features `(n, 4 · width)` and most likely classes `(n,)` of many images, on the CPU."""
        training = self.training
        self.eval()
        device = self.output.weight.device
        features, classes = [], []
        for part in images.split(batch_size):
            found = self.features(part.to(device))
            features.append(found.cpu())
            classes.append(self.output(found).argmax(1).cpu())
        self.train(training)
        return torch.cat(features), torch.cat(classes)

    def save(self, folder: str | Path) -> None:
        """Write weights and configuration into a folder."""
        folder = Path(folder)
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        write_beside(folder / _WEIGHTS, lambda file: save_file(state, file))
        config = {
            "channels": self.channels, "classes": self.classes, "size": self.size, "width": self.width,
            "record": self.record,
        }  # fmt: skip
        text = json.dumps(config, indent=2) + "\n"
        write_beside(folder / _CONFIG, lambda file: file.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, folder: str | Path) -> ImageClassifier:
        """Read what `save` wrote, in eval mode.

        Raises:
            ValueError: no classifier there.
        """
        folder = Path(folder)
        if not (folder / _CONFIG).is_file():
            raise ValueError(
                f"{folder} holds no classifier ({_CONFIG}); train one with examples/train_image_classifier.py"
            )
        found = cls(**json.loads((folder / _CONFIG).read_text(encoding="utf-8")))
        found.load_state_dict(load_file(folder / _WEIGHTS))
        return found.eval()
