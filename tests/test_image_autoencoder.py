"""The autoencoder: sizes, normalised latents, noise while training, gradients, errors."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import tiny_autoencoder

from nearfar import ProxyFormerAutoencoder, ProxyFormerAutoencoderConfig
from nearfar.training.image_training import encode_images, settle_latents


@pytest.mark.parametrize(
    ("sizes", "latent"), [([11], (6,)), ([8, 12], (4, 6)), ([7, 9], (4, 5)), ([3, 6, 5], (2, 3, 3))], ids=str
)
def test_sizes(sizes: list[int], latent: tuple[int, ...]) -> None:
    model = tiny_autoencoder(image_size=sizes, in_channels=3)
    images = torch.randn(2, 3, *sizes, dtype=torch.float64)
    output = model(images)
    assert model.config.latent_sizes == latent
    assert output.latents.shape == (2, 4, *latent)
    assert output.sample.shape == images.shape
    assert output.loss.item() == pytest.approx((output.sample - images).abs().mean().item())
    # The decoder knows the configuration's sizes, and cuts to others when told.
    assert torch.equal(model.decode(output.latents), output.sample)
    smaller = tuple(2 * size - 1 for size in latent)
    assert torch.equal(
        model.decode(output.latents, smaller), model.decode(output.latents, tuple(2 * s for s in latent))[
            (..., *(slice(size) for size in smaller))
        ],
    )  # fmt: skip


def test_latents_are_normalised_a_channel() -> None:
    model = tiny_autoencoder().train()
    latents = model.encode(torch.randn(5, 1, 8, 12, dtype=torch.float64))
    flat = latents.transpose(0, 1).flatten(1)
    assert flat.mean(1).abs().max() < 1e-10
    assert (flat.var(1, unbiased=False) - 1).abs().max() < 1e-3


def test_noise_while_training_only() -> None:
    model = tiny_autoencoder()
    images = torch.randn(3, 1, 8, 12, dtype=torch.float64)
    assert torch.equal(model(images).sample, model(images).sample)
    model.train()
    assert (model(images).sample - model(images).sample).abs().max() > 1e-6
    model.config.latent_noise = 0.0
    assert torch.equal(model(images).sample, model(images).sample)


def test_gradients_reach_all_parameters() -> None:
    model = tiny_autoencoder().train()
    model(torch.randn(3, 1, 8, 12, dtype=torch.float64)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_statistics_are_measured_and_saved(tmp_path: Path) -> None:
    model = tiny_autoencoder(dtype=torch.float32)
    images = torch.randint(0, 256, (64, 1, 8, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = encode_images(model, images, nullcontext)
    settle_latents(model, images, nullcontext)
    latents = encode_images(model, images, nullcontext)
    assert not model.training and model.latent_norm.momentum == 0.01
    flat = latents.transpose(0, 1).flatten(1)
    assert flat.mean(1).abs().max() < 1e-4 and (flat.var(1) - 1).abs().max() < 2e-2
    assert (before - latents).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    again = ProxyFormerAutoencoder.from_pretrained(tmp_path).eval()
    assert torch.equal(encode_images(again, images, nullcontext), latents)


def test_training_lowers_the_loss() -> None:
    model = tiny_autoencoder(dtype=torch.float32).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    images = torch.rand(16, 1, 1, 1).expand(-1, 1, 8, 12) * 2 - 1
    first = last = 0.0
    for step in range(40):
        optimizer.zero_grad()
        loss = model(images).loss
        loss.backward()
        optimizer.step()
        first, last = (loss.item() if step == 0 else first), loss.item()
    assert last < 0.4 * first


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.zeros(1, 2, 8, 12), ValueError, "1 channels, got 2"),
        (torch.zeros(1, 1, 8), ValueError, "2 sizes"),
        (torch.zeros(1, 1, 8, 12, dtype=torch.uint8), TypeError, "floating-point"),
    ],
)
def test_bad_input(images: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny_autoencoder(dtype=torch.float32)(images)


def test_bad_sizes_and_arguments() -> None:
    model = tiny_autoencoder(dtype=torch.float32)
    with pytest.raises(ValueError, match="blocks"):
        model.decode(torch.zeros(1, 4, 4, 6), (20, 20))
    with pytest.raises(TypeError, match="unexpected"):
        model(torch.zeros(1, 1, 8, 12), labels=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 48}, "multiple of head_dim"),
        ({"downsampling": 0}, "downsampling"),
        ({"patch_size": [2, 2, 2]}, "2 numbers"),
        ({"latent_noise": -1.0}, "latent_noise"),
        ({"rope_base": 0.5}, "rope_base"),
        ({"image_size": []}, "one to three"),
    ],
)
def test_bad_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxyFormerAutoencoderConfig(**options)
