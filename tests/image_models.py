"""Tiny random image models, and tiny images."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar import (
    ProxyFormerAutoencoder,
    ProxyFormerAutoencoderConfig,
    ProxyFormerImageConfig,
    ProxyFormerImageModel,
)


def tiny_image_model(*, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> ProxyFormerImageModel:
    """Three layers of 2 heads of 12 dimensions over patches of 2, with 5 classes, in eval mode."""
    options: dict[str, Any] = {
        "image_size": [6, 8], "in_channels": 2, "patch_size": 2, "local_hidden_size": 8, "hidden_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "num_classes": 5, "class_tokens": 2,
        "condition_size": 12, "time_features": 16, "initializer_range": 0.5, **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = ProxyFormerImageModel(ProxyFormerImageConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def tiny_autoencoder(*, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> ProxyFormerAutoencoder:
    """One layer on each side, in eval mode."""
    options: dict[str, Any] = {
        "image_size": [8, 12], "in_channels": 1, "encoder_local_size": 8, "encoder_hidden_size": 16,
        "decoder_local_size": 8, "decoder_hidden_size": 24, "num_encoder_layers": 1, "num_decoder_layers": 1,
        "head_dim": 8, **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    return ProxyFormerAutoencoder(ProxyFormerAutoencoderConfig(**options)).to(dtype).eval()


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write bytes in MNIST's format, compressed if the name ends in .gz."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def tiny_digits(folder: Path, count: int = 96, side: int = 8) -> Path:
    """idx files of three classes, a bright bar at the left, in the middle or at the right, with noise."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for prefix, number in (("train", count), ("t10k", count // 2)):
        labels = np.arange(number) % 3
        images = random.integers(0, 40, (number, side, side))
        for label in range(3):
            start = label * (side - 2) // 2
            images[labels == label, :, start : start + 2] = random.integers(200, 255, (1, side, 2))
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)
    return folder
