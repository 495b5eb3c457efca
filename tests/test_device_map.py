"""Image models whose parts lie on several devices, or on disk (`device_map`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from fake_devices import alternate, spread
from image_models import tiny_autoencoder, tiny_image_model

from nearfar.modeling import modeling_proxyformer_image

COARSE = {
    "no_text": "cpu:0", "input_embedding": "cpu:0", "time_embedding": "cpu:0", "class_embedding": "cpu:1",
    "text_projection": "cpu:0", "stack": "cpu:1", "head": "cpu:0", "middle_head": "cpu:1",
}  # fmt: skip
COARSE_AUTOENCODER = {
    "encoder_embedding": "cpu:0", "encoder": "cpu:1", "latent_head": "cpu:0", "latent_norm": "cpu:1",
    "decoder_embedding": "cpu:1", "decoder": "cpu:0", "pixel_head": "cpu:1",
}  # fmt: skip


def image_model(**changes: Any) -> Any:
    return tiny_image_model(dtype=torch.float32, **changes, auxiliary_loss_weight=0.1, local_convolution=3)


def inputs() -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(2, 2, 6, 8),
        "time": torch.rand(2),
        "class_labels": torch.tensor([1, 4]),
        "text_states": torch.randn(2, 4, 7),
        "drop_condition": torch.tensor([False, True]),
    }


@pytest.mark.parametrize("devices", [2, None])
def test_an_image_model_on_several_devices(devices: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_proxyformer_image, "_values_are_seen", lambda x: False)  # fake ones have none
    model = image_model(text_hidden_size=7)
    device_map = COARSE if devices is None else alternate(model, devices)
    assert "stack" in device_map or "stack.layers.2" in device_map
    shapes = {name: (x.shape, x.dtype) for name, x in inputs().items()}
    with spread(model, device_map), torch.no_grad():
        given = {name: torch.zeros(shape, dtype=dtype, device="cpu:0") for name, (shape, dtype) in shapes.items()}
        for _ in range(2):  # nothing has been moved for good
            output = model(**given)
            assert output.sample.device == output.middle_sample.device == torch.device("cpu:0")
            assert model(given["pixel_values"], given["time"]).sample.shape == (2, 2, 6, 8)


@pytest.mark.parametrize("devices", [2, None])
def test_an_autoencoder_on_several_devices(devices: int | None) -> None:
    model = tiny_autoencoder(dtype=torch.float32)
    device_map = COARSE_AUTOENCODER if devices is None else alternate(model, devices)
    with spread(model, device_map), torch.no_grad():
        images = torch.zeros(2, 1, 8, 12, device="cpu:0")
        for _ in range(2):
            assert model(images).loss.device == torch.device("cpu:0")
            assert model.decode(model.encode(images)).shape == images.shape


def test_layers_on_disk(tmp_path: Path) -> None:
    """Each is read when it is called, and the result is that of a model in memory."""
    given = {name: x for name, x in inputs().items() if name != "text_states"}
    model = image_model()
    expected = model(**given)
    where = {"stack.layers.0": "disk", "stack.layers.1": "cpu", "stack.layers.2": "disk", "head": "disk"}
    rest = [name for name in COARSE if name not in ("no_text", "text_projection", "stack", "head")]
    placed = dispatch_model(
        model, {**dict.fromkeys(rest, "cpu"), **where}, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    assert all(weight.is_meta for weight in placed.stack.layers[0].parameters())
    output = placed(**given)
    assert torch.equal(output.sample, expected.sample)
    assert torch.equal(output.middle_sample, expected.middle_sample)
