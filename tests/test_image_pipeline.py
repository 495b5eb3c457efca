"""The pipeline: guidance, reproducible noise, what comes out, saving and loading, also where nearfar is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import tiny_autoencoder, tiny_image_model
from local_hub import LocalHub
from proxyformer_models import tiny_proxyformer
from test_remote_code import HIDE, finish, start
from transformers import AutoModel

from nearfar import FlowMatchingPipeline, ProxyFormerImageModel
from nearfar.modeling.flow_sampling import euler_sample
from nearfar.modeling.pipeline_flow_matching import to_pil, to_uint8


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latent_pipeline(dtype: torch.dtype = torch.float64) -> FlowMatchingPipeline:
    return FlowMatchingPipeline(
        tiny_image_model(image_size=[4, 6], in_channels=4, latent=True, dtype=dtype), tiny_autoencoder(dtype=dtype)
    )


# --- drawing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier_free", "middle"])
def test_guidance_is_two_estimates(kind: str) -> None:
    model = tiny_image_model()
    labels, steps, scale = torch.tensor([1, 4, 0]), 4, 2.5
    noise = torch.randn(3, 2, 6, 8, generator=seeded(), dtype=torch.float64)

    def estimate(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        output = model(x, time.expand(3), labels)
        weak = model(x, time.expand(3)).sample if kind == "classifier_free" else output.middle_sample
        return weak + scale * (output.sample - weak)

    with torch.no_grad():
        expected = euler_sample(estimate, noise, steps)
    pipe = FlowMatchingPipeline(model)
    given: dict[str, Any] = {"steps": steps, "output_type": "pt"}
    found = pipe(3, labels, guidance=scale, guidance_kind=kind, generator=seeded(), **given)
    assert (found - expected).abs().max() < 1e-10
    plain = pipe(3, labels, generator=seeded(), **given)
    assert (found - plain).abs().max() > 1e-2


def test_noise_does_not_depend_on_the_batch() -> None:
    pipe = FlowMatchingPipeline(tiny_image_model())
    whole = pipe(5, [0, 1, 2, 3, 4], steps=3, guidance=1.5, generator=seeded(1), output_type="pt")
    parts = pipe(5, [0, 1, 2, 3, 4], steps=3, guidance=1.5, generator=seeded(1), output_type="pt", batch_size=2)
    assert (whole - parts).abs().max() < 1e-10
    assert (whole - pipe(5, [0, 1, 2, 3, 4], steps=3, generator=seeded(2), output_type="pt")).abs().max() > 0.1


def test_counts_and_defaults() -> None:
    pipe = FlowMatchingPipeline(tiny_image_model(sampling_steps=2, guidance_scale=2.0))
    assert pipe(output_type="pt").shape == (1, 2, 6, 8)  # without a class there is nothing to be guided to
    assert pipe(class_labels=[3, 3, 1], output_type="uint8").shape == (3, 2, 6, 8)
    one = pipe(2, 3, generator=seeded(), output_type="pt")
    assert torch.equal(one, pipe(2, [3, 3], steps=2, guidance=2.0, generator=seeded(), output_type="pt"))
    assert pipe(1, 0, image_size=(5, 11), output_type="pt").shape == (1, 2, 5, 11)
    assert pipe(1, 0, image_size=5, output_type="pt").shape == (1, 2, 5, 5)


def test_text() -> None:
    pipe = FlowMatchingPipeline(tiny_image_model(num_classes=None, text_hidden_size=10, sampling_steps=2))
    states = torch.randn(2, 3, 10, dtype=torch.float64)
    found = pipe(text_states=states, guidance=3.0, generator=seeded(), output_type="pt", batch_size=1)
    assert found.shape == (2, 2, 6, 8)
    assert pipe(text_states=states.float(), steps=1, output_type="pt").shape == (2, 2, 6, 8)
    assert (found - pipe(text_states=-states, guidance=3.0, generator=seeded(), output_type="pt")).abs().max() > 1e-2


def test_pil_images() -> None:
    grey = FlowMatchingPipeline(tiny_image_model(in_channels=1))(2, 1, steps=2)
    assert [(image.mode, image.size) for image in grey] == [("L", (8, 6))] * 2
    colour = FlowMatchingPipeline(tiny_image_model(in_channels=3))
    images = colour(2, 1, steps=2, generator=seeded())
    assert images[0].mode == "RGB"
    raw = colour(2, 1, steps=2, generator=seeded(), output_type="uint8")
    assert torch.equal(torch.tensor(list(images[1].tobytes())).view(6, 8, 3).permute(2, 0, 1), raw[1].long())
    video = FlowMatchingPipeline(tiny_image_model(in_channels=3, image_size=[3, 4, 6], patch_size=2))(2, 1, steps=1)
    assert [len(frames) for frames in video] == [3, 3] and video[1][2].size == (6, 4)
    assert to_uint8(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])).tolist() == [0, 0, 128, 255, 255]
    with pytest.raises(ValueError, match="1 or 3 channels"):
        to_pil(torch.zeros(1, 2, 4, 4, dtype=torch.uint8))


def test_latents_are_decoded() -> None:
    pipe = latent_pipeline()
    found = pipe(3, 2, steps=3, generator=seeded(), output_type="pt")
    assert found.shape == (3, 1, 8, 12)
    noise = torch.randn(3, 4, 4, 6, generator=seeded(), dtype=torch.float64)
    with torch.no_grad():
        drawn = euler_sample(lambda x, t: pipe.model(x, t.expand(3), torch.full((3,), 2)).sample, noise, 3)
        expected = pipe.autoencoder.decode(drawn)
    assert (found - expected).abs().max() < 1e-10
    assert pipe(1, image_size=(9, 7), steps=1, output_type="pt").shape == (1, 1, 9, 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"guidance": 2.0}, "steers towards class_labels"),
        ({"guidance": -1.0, "class_labels": 1}, "0 or more"),
        ({"guidance_kind": "none"}, "guidance_kind"),
        ({"class_labels": 5}, "between 0 and 4"),
        ({"class_labels": [-1]}, "between 0 and 4"),
        ({"class_labels": [0.5]}, "whole number"),
        ({"num_images": 3, "class_labels": [0, 1]}, "one for all or 3"),
        ({"num_images": 0}, "num_images"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"output_type": "numpy"}, "output_type"),
        ({"image_size": (4,)}, "2 sizes"),
        ({"text_states": torch.zeros(1, 2, 3)}, "without text"),
        ({"cuda_graph": True}, "needs a GPU"),
    ],
)
def test_bad_arguments(given: dict[str, Any], message: str) -> None:
    pipe = FlowMatchingPipeline(tiny_image_model(dtype=torch.float32))
    with pytest.raises(ValueError, match=message):
        pipe(**{"steps": 2, **given})


def test_models_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="give its autoencoder"):
        FlowMatchingPipeline(tiny_image_model(latent=True, in_channels=4))
    with pytest.raises(ValueError, match="which no autoencoder decodes"):
        FlowMatchingPipeline(tiny_image_model(), tiny_autoencoder())
    with pytest.raises(ValueError, match="4 channels, the model draws 2"):
        FlowMatchingPipeline(tiny_image_model(latent=True), tiny_autoencoder())
    with pytest.raises(ValueError, match="not loaded from"):
        tiny_image_model(latent=True, in_channels=4).pipeline()
    without = FlowMatchingPipeline(tiny_image_model(auxiliary_loss_weight=0))
    with pytest.raises(ValueError, match="no middle head"):
        without(1, 1, guidance=2.0, guidance_kind="middle")
    with pytest.raises(ValueError, match="without classes"):
        FlowMatchingPipeline(tiny_image_model(num_classes=None))(1, 1)


# --- saving and loading ----------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    pipe = latent_pipeline(torch.float32)
    pipe.save_pretrained(tmp_path / "saved")
    again = FlowMatchingPipeline.from_pretrained(tmp_path / "saved")
    wanted: dict[str, Any] = {"class_labels": [1, 2], "steps": 2, "output_type": "pt"}
    expected = pipe(generator=seeded(), **wanted)
    assert torch.equal(again(generator=seeded(), **wanted), expected)
    model = AutoModel.from_pretrained(tmp_path / "saved")
    assert type(model) is ProxyFormerImageModel
    assert torch.equal(model.pipeline()(generator=seeded(), **wanted), expected)
    half = FlowMatchingPipeline.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert half.model.dtype == half.autoencoder.dtype == torch.bfloat16
    assert (half(generator=seeded(), **wanted) - expected).abs().mean() < 0.1
    other = FlowMatchingPipeline.from_pretrained(tmp_path / "saved", sampling_steps=3)
    assert other.model.config.sampling_steps == 3
    tiny_proxyformer().save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="model of type 'proxyformer'"):
        FlowMatchingPipeline.from_pretrained(tmp_path / "text")


READ = """
import torch
from transformers import AutoModel

torch.set_num_threads(1)
saved, again, result = sys.argv[1:]
found = []
for source in (saved, again, "me/digits"):
    model = AutoModel.from_pretrained(source, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    pipe = model.pipeline()
    wanted = dict(class_labels=[1, 2], steps=2, guidance=2.0, generator=torch.Generator().manual_seed(0))
    found.append(pipe(output_type="pt", **wanted))
    assert [image.size for image in pipe(2, steps=1)] == [(12, 8), (12, 8)]
    if source != "me/digits":
        autoencoder = AutoModel.from_pretrained(source + "/autoencoder", trust_remote_code=True)
        assert autoencoder.encode(torch.zeros(1, 1, 8, 12)).shape == (1, 4, 4, 6)
    if source == saved:
        pipe.save_pretrained(again)
        pipe.push_to_hub("me/digits")
torch.save(found, result)
"""


def test_a_checkpoint_carries_its_code(tmp_path: Path) -> None:
    """Saved, saved again by a process without nearfar, and through the Hub."""
    pipe = latent_pipeline(torch.float32)
    pipe.save_pretrained(tmp_path / "model")
    with LocalHub() as hub:
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_TOKEN": "hf_x"}
        folders = (tmp_path / "model", tmp_path / "again", tmp_path / "result.pt")
        finish(start(HIDE + READ, *folders, cwd=tmp_path, **online))
        pushed = hub.files("me/digits")
    expected = pipe(class_labels=[1, 2], steps=2, guidance=2.0, generator=seeded(), output_type="pt")
    drawn = torch.load(tmp_path / "result.pt")
    assert len(drawn) == 3
    for found in drawn:
        assert (found - expected).abs().max() < 1e-5
    for inner in ("", "autoencoder/"):
        first, second = (
            {file.name: file.read_bytes() for file in (tmp_path / name / inner).iterdir() if file.is_file()}
            for name in ("model", "again")
        )
        assert first.keys() == second.keys()
        for name, content in first.items():
            assert content == second[name] or name == "config.json", name
            assert inner + name in pushed
        assert json.loads(first["config.json"]) == json.loads(second["config.json"])
