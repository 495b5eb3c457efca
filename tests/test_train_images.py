"""The training scripts and commands for images, end to end on tiny ones; the loop goes on where it was interrupted."""

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from image_models import tiny_autoencoder, tiny_digits, tiny_image_model
from PIL import Image

from nearfar import FlowMatchingPipeline, ProxyFormerAutoencoder
from nearfar.cli import main as nearfar
from nearfar.evaluation.image_data import ImageData, load_images
from nearfar.training.image_training import LOG_NAME, ImageTrainer, ImageTraining, last_checkpoint, settle_latents

ROOT = Path(__file__).parent.parent


def _script(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


train_images, train_classifier = _script("examples", "train_images"), _script("examples", "train_image_classifier")
image_throughput = _script("benchmarks", "image_throughput")

SMALL = ["--hidden-size", "32", "--local-hidden-size", "8", "--layers", "2", "--heads", "2", "--cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of pixels, an autoencoder, a model of its latents, a classifier."""
    folder = tmp_path_factory.mktemp("runs")
    data = ["--data", str(digits), "--batch-size", "32", "--ema", "0.9", "--warmup-steps", "5"]
    grids = ["--sampling-steps", "6", "--log-every", "20"]
    pixels = [*data, *SMALL, *grids, "--steps", "120", "--output", str(folder / "pixels"), "--patch-size", "4"]
    assert train_images.main(pixels) == 0
    encoder = [*data, *SMALL, "--log-every", "20", "--steps", "60", "--output", str(folder / "encoder")]
    assert train_images.main([*encoder, "--stage", "autoencoder"]) == 0
    latents = ["--autoencoder", str(folder / "encoder" / "model"), "--output", str(folder / "latents")]
    assert train_images.main([*data, *SMALL, *grids, *latents, "--steps", "40", "--save-dtype", "bfloat16"]) == 0
    classifier = ["--data", str(digits), "--steps", "40", "--batch-size", "32", "--width", "4", "--shift", "0"]
    classifier += ["--output", str(folder / "classifier"), "--device", "cpu", "--threads", "1"]
    assert train_classifier.main(classifier) == 0
    return folder


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG_NAME).read_text().splitlines()]


def test_pixels(runs: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log(runs / "pixels")
    assert [line["step"] for line in lines] == [20, 40, 60, 80, 100, 120]
    assert lines[-1]["error"] < 0.4 * lines[0]["error"] and lines[-1]["middle_error"] < lines[0]["middle_error"]
    run = json.loads((runs / "pixels" / "run.json").read_text())
    assert run["result"]["steps"] == 120 and run["classes"] == ["0", "1", "2"]
    assert [file.name for file in (runs / "pixels" / "samples").iterdir()] == ["step-0000120.png"]
    card = (runs / "pixels" / "model" / "README.md").read_text()
    assert "120 steps of 32 images" in card and "trust_remote_code=True" in card
    # The bars are where the labels say.
    pipe = FlowMatchingPipeline.from_pretrained(runs / "pixels" / "model")
    images = pipe(30, [0, 1, 2] * 10, steps=10, generator=torch.Generator().manual_seed(0), output_type="uint8")
    brightest = images[:, 0].float().mean(1).unfold(1, 2, 1).mean(-1).argmax(1)
    assert (brightest == torch.tensor([0, 3, 6] * 10)).double().mean() > 0.8
    # Once finished, the same command does nothing.
    again = ["--data", str(digits), "--output", str(runs / "pixels"), "--patch-size", "4", *SMALL]
    again += ["--steps", "120", "--batch-size", "32"]
    assert train_images.main(again) == 0
    assert "finished already" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train_images.main([*again, "--seed", "3"])
    assert "seed = 0, and now it is 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_images.main([*again, "--learning-rate", "1e-4"])
    assert "learning_rate = 0.003, and now it is 0.0001" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_images.main([*again, "--autoencoder", str(runs / "pixels" / "model")])
    assert "a model of type 'proxyformer_image', not 'proxyformer_autoencoder'" in capsys.readouterr().err


def test_latents(runs: Path) -> None:
    lines = log(runs / "encoder")
    assert lines[-1]["error"] < 0.7 * lines[0]["error"]
    autoencoder = ProxyFormerAutoencoder.from_pretrained(runs / "encoder" / "model")
    assert autoencoder.config.encoder_hidden_size == 32
    assert len(list((runs / "encoder" / "samples").iterdir())) == 1
    pipe = FlowMatchingPipeline.from_pretrained(runs / "latents" / "model")
    assert pipe.model.config.latent and pipe.model.dtype == torch.bfloat16
    assert pipe.model.config.sizes == (4, 4) and pipe.model.config.in_channels == 4
    assert [image.size for image in pipe(2, 1)] == [(8, 8), (8, 8)]
    assert log(runs / "latents")[-1]["error"] < log(runs / "latents")[0]["error"]


def test_commands(runs: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--device", "cpu", "--threads", "1"]
    grid = tmp_path / "grid.png"
    pixels = str(runs / "pixels" / "model")
    assert nearfar(["sample-images", "--model", pixels, "--out", str(grid), "--steps", "2", *machine]) == 0
    assert grid.read_bytes()[:4] == b"\x89PNG"
    latents = str(runs / "latents" / "model")
    chosen = ["--classes", "2,0", "--num-images", "4", "--guidance", "2", "--guidance-kind", "middle"]
    assert nearfar(["sample-images", "--model", latents, "--out", str(grid), "--steps", "2", *chosen, *machine]) == 0
    assert "4 images" in capsys.readouterr().out

    out = tmp_path / "eval"
    asked = ["eval", "images", pixels, "--data", str(digits), "--classifier", str(runs / "classifier"), "--num-images"]
    assert nearfar([*asked, "30", "--steps", "10", "--out", str(out), *machine]) == 0
    shown = capsys.readouterr().out
    assert "classifier-feature Fréchet distance" in shown and "train images" in shown
    record = json.loads((out / "images.json").read_text())
    assert record["scores"]["samples"]["images"] == 30 and record["scores"]["samples"]["accuracy"] > 0.6
    assert record["scores"]["train images"]["accuracy"] == 1.0
    assert record["scores"]["train images"]["frechet_distance"] < record["scores"]["samples"]["frechet_distance"]
    assert record["steps"] == 10 and record["classifier"]["test_accuracy"] == 1.0
    assert (out / "images.png").is_file()

    def refused(*arguments: str) -> str:
        assert nearfar([*arguments, *machine]) == 2
        return capsys.readouterr().err

    assert "give --classifier, --fid" in refused("eval", "images", pixels, "--data", str(digits))
    assert "must name a file" in refused("sample-images", "--model", pixels, "--out", str(tmp_path))
    assert "not a saved model" in refused("sample-images", "--model", str(digits), "--out", str(grid))
    assert "between 0 and 2" in refused("sample-images", "--model", pixels, "--out", str(grid), "--classes", "3")
    assert "holds no classifier" in refused(*asked[:-3], "--classifier", str(digits))


# --- the loop --------------------------------------------------------------------------------------------------------


def trainer(folder: Path, autoencoder: bool = False, **options: Any) -> ImageTrainer:
    images = torch.randint(0, 256, (40, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    data = ImageData(images, torch.arange(40) % 5, tuple("abcde"))
    model: Any = tiny_image_model(image_size=8, in_channels=1, dtype=torch.float32, sampling_steps=1)
    if autoencoder:
        model = tiny_autoencoder(image_size=8, dtype=torch.float32)
        data = ImageData(data.images, None, ())
    chosen = {"batch_size": 4, "log_every": 2, "save_every": 2, "warmup_steps": 2, **options}
    return ImageTrainer(model, data, folder, ImageTraining(**chosen), cpu=True, progress=False)


@pytest.mark.parametrize("autoencoder", [False, True])
def test_going_on_is_the_same_run(autoencoder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trainer(tmp_path / "whole", autoencoder, steps=6, flip=True)
    whole.train()

    first = trainer(tmp_path / "parts", autoencoder, steps=6, flip=True)
    saved = first.save_checkpoint

    def interrupted() -> Path:
        saved()
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "save_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    checkpoint = last_checkpoint(tmp_path / "parts")
    assert checkpoint is not None and checkpoint.name == "checkpoint-2"
    second = trainer(tmp_path / "parts", autoencoder, steps=6, flip=True)
    result = second.train(checkpoint)
    for one, two in (
        (whole.model.state_dict(), second.model.state_dict()),
        (whole.averaged().state_dict(), second.averaged().state_dict()),
    ):
        assert all(torch.equal(one[name], two[name]) for name in one)
    errors = [[line["error"] for line in log(tmp_path / name)] for name in ("whole", "parts")]
    assert errors[0] == errors[1] and len(errors[0]) == 3
    assert [path.name for path in (tmp_path / "parts").glob("checkpoint-*")] == ["checkpoint-6"]
    # A run that was interrupted between its last checkpoint and its end.
    ended = trainer(tmp_path / "parts", autoencoder, steps=6, flip=True)
    assert ended.train(tmp_path / "parts" / "checkpoint-6") == result and result["ended"] == "6 steps"
    other = trainer(tmp_path / "parts", autoencoder, steps=6, flip=True, seed=1)
    with pytest.raises(ValueError, match="run with seed = 0, this one has 1"):
        other.train(tmp_path / "parts" / "checkpoint-6")


def test_the_objective_is_given_an_argument(tmp_path: Path) -> None:
    """DistributedDataParallel with a device cannot move an empty tuple of arguments."""
    made = trainer(tmp_path, steps=1)
    seen: list[Any] = []
    made.objective.register_forward_pre_hook(lambda _, given: seen.append(given))
    made.train()
    assert seen == [(None,)]


def test_divergence_keeps_the_last_checkpoint(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ImageTrainer.save_checkpoint

    def diverging(self: ImageTrainer) -> Path:
        path = save(self)
        with torch.no_grad():
            next(self.model.parameters()).fill_(float("nan"))
        return path

    monkeypatch.setattr(ImageTrainer, "save_checkpoint", diverging)
    arguments = ["--data", str(digits), "--output", str(tmp_path / "run"), "--steps", "4", "--batch-size", "4"]
    assert train_images.main([*arguments, "--log-every", "2", "--save-every", "2", *SMALL]) == 1
    assert "the loss is not finite at step 4" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["result"] is None
    checkpoint = last_checkpoint(tmp_path / "run")
    assert checkpoint is not None and checkpoint.name == "checkpoint-2"


@pytest.mark.parametrize("count", [1, 5, 11])
def test_a_grid_of_few_images(count: int, tmp_path: Path) -> None:
    made = trainer(tmp_path, autoencoder=True, steps=1)
    made.data = ImageData(made.data.images[:count], None, ())
    made._tracked = False  # TensorBoard's files are begun by train()
    with Image.open(made.write_grid()) as grid:
        # 64 pixels an image and 16 between two.
        assert grid.size == (80 * min(8, count) - 16, 144)


def test_latents_are_settled_over_all_images() -> None:
    model = tiny_autoencoder(image_size=8, dtype=torch.float32).eval()
    images = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    images[32:] = torch.arange(64, dtype=torch.uint8).view(8, 8) * 4
    settle_latents(model, images, nullcontext, count=32)
    # The first half alone has no variance.
    assert float(model.latent_norm.running_var.mean()) > 1e-6


def test_training_by_time(tmp_path: Path) -> None:
    result = trainer(tmp_path, seconds=0.5, log_every=1000, save_every=None).train()
    assert result["ended"] == "0.5 seconds" and result["steps"] >= 1
    assert 0.5 <= result["seconds"] < 5


def test_what_the_trainer_refuses(tmp_path: Path) -> None:
    model = tiny_image_model(image_size=8, in_channels=1, dtype=torch.float32)
    options = ImageTraining(steps=1)
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    for data, message in (
        (ImageData(images.expand(-1, 3, -1, -1), torch.zeros(4).long(), ()), "3 channels"),
        (ImageData(images, None, ()), "have no labels"),
        (ImageData(images, torch.tensor([0, 1, 2, 5]), ()), "between 0 and 4, got 0 to 5"),
        (ImageData(images[..., None], torch.zeros(4).long(), ()), "do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageTrainer(model, data, tmp_path, options, cpu=True)
    with pytest.raises(ValueError, match="goes with a model of latents"):
        ImageTrainer(
            model, ImageData(images, torch.zeros(4).long(), ()), tmp_path, options, cpu=True,
            autoencoder=tiny_autoencoder(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give steps or seconds"),
        ({"steps": 5, "seconds": 1.0}, "give steps or seconds"),
        ({"steps": 0}, "steps must be"),
        ({"seconds": -1.0}, "seconds must be"),
        ({"steps": 5, "save_every": 7}, "multiple of log_every"),
        ({"steps": 5, "learning_rate": 0.0}, "learning_rate"),
        ({"steps": 5, "decay": 2.0}, "decay and final"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageTraining(**options)


def test_bad_arguments(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--data", str(digits), "--output", str(tmp_path / "run"), *SMALL]
    for extra, message in (
        (["--steps", "1", "--seconds", "1"], "give steps or seconds"),
        (["--stage", "autoencoder", "--autoencoder", "x"], "--stage autoencoder makes one"),
        (["--patch-size", "0"], "--patch-size must be at least 1"),
        (["--split", "other"], "no idx file of images"),
        (["--condition-dropout", "2", "--steps", "1"], "condition_dropout must be between 0 and 1"),
    ):
        with pytest.raises(SystemExit):
            train_images.main([*common, *extra])
        assert message in capsys.readouterr().err
    assert load_images(digits).classes == ("0", "1", "2")


# --- the benchmark ---------------------------------------------------------------------------------------------------


def test_image_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shapes", "8:4:2", "--hidden-size", "16", "--layers", "1", "--heads", "2", "--repeats", "1"]
    arguments += ["--calls", "1", "--local-hidden-size", "8", "--out", str(tmp_path), "--device", "cpu"]
    assert image_throughput.main([*arguments, "--threads", "1"]) == 0
    rows = json.loads((tmp_path / "image_throughput.json").read_text())["rows"]
    assert [(row["system"], row["tokens"]) for row in rows] == [
        ("ProxyFormer, patch 4", 4), ("plain, patch 4", 4), ("plain, patch 2", 16), ("plain, patch 1", 64)
    ]  # fmt: skip
    assert all(row["drawn_per_second"] > 0 and row["trained_per_second"] > 0 for row in rows)
    assert "1.00 x" in capsys.readouterr().out
    finer = {**rows[0], "patch": 2, "system": "ProxyFormer, patch 2"}
    assert image_throughput.our_row([*rows, finer], {**rows[1], "patch": 2}) is finer
    assert image_throughput.our_row(rows[1:], rows[1]) is None
    assert image_throughput.times_as_fast(None, rows[1], "drawn_per_second") == "–"
    assert image_throughput.main(["--shapes", "9:4", "--device", "cpu"]) == 2
    assert "a patch that divides the size" in capsys.readouterr().err


def test_the_plain_transformer_reads_images() -> None:
    """Its patches come back where they were taken from, and every pixel reaches every other one."""
    model = image_throughput.PlainTransformer(2, 3, 16, 1, 2, 24).double()
    pixels = torch.randn(1, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    sample = model(pixels, torch.tensor([0.3]), torch.tensor([1])).sample
    assert sample.shape == pixels.shape
    (gradient,) = torch.autograd.grad(sample[0, 1, 3, 5], pixels)
    assert (gradient[0].abs().amax(0) > 0).all()
    # One patch changed changes its own tokens most where attention is left out.
    for block in model.blocks:
        torch.nn.init.zeros_(block.output.weight)
    (gradient,) = torch.autograd.grad(model(pixels, torch.tensor([0.3]), torch.tensor([1])).sample[0, 1, 3, 5], pixels)
    reached = gradient[0].abs().amax(0) > 0
    assert reached[2:, 4:].all() and reached.sum() == 4
