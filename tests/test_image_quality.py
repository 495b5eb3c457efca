"""Fréchet distances with a known value, the classifier, and what happens without torch-fidelity."""

import sys
import types
from pathlib import Path

import pytest
import torch
from image_models import tiny_digits
from torch import Tensor

from nearfar.evaluation.image_classifier import ImageClassifier
from nearfar.evaluation.image_data import load_images
from nearfar.evaluation.image_quality import classifier_scores, frechet_distance, inception_scores
from nearfar.training.classifier_training import shift_images, train_classifier


def with_moments(mean: Tensor, root: Tensor, count: int, seed: int) -> Tensor:
    """Features whose sample mean is `mean` and whose sample covariance is root rootᵀ, exactly."""
    x = torch.randn(count, len(mean), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = x - x.mean(0)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.mT @ x / (count - 1))).mT
    return mean + x @ root.mT


def test_frechet_distance_of_known_gaussians() -> None:
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    one, two = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([2.0, 0.5, 3.0]).double()
    first = with_moments(torch.zeros(3, dtype=torch.float64), one.diag(), 50, 0)
    second = with_moments(mean, two.diag(), 70, 1)
    # Covariances that commute: |Δμ|² + Σ (σ₁ - σ₂)².
    expected = (mean.square().sum() + (one - two).square().sum()).item()
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(first, first) == pytest.approx(0.0, abs=1e-10)
    # It does not change when both are turned.
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    assert frechet_distance(first @ turn, second @ turn) == pytest.approx(expected, rel=1e-9)
    # Covariances that do not commute, against the matrix root by eigenvalues of the product.
    other = with_moments(mean, torch.randn(3, 3, dtype=torch.float64), 70, 2)
    product = torch.cov(first.mT) @ torch.cov(other.mT)
    root = torch.linalg.eigvals(product).real.sqrt().sum()
    trace = torch.cov(first.mT).trace() + torch.cov(other.mT).trace() - 2 * root
    assert frechet_distance(first, other) == pytest.approx((mean.square().sum() + trace).item(), rel=1e-9)
    for bad in (first[:1], first[:, :2], first * float("nan")):
        with pytest.raises(ValueError, match=r"features must be"):
            frechet_distance(first, bad)


def test_shifts() -> None:
    image = torch.arange(25, dtype=torch.uint8).view(1, 1, 5, 5).expand(40, -1, -1, -1)
    found = shift_images(image, 1, torch.Generator().manual_seed(0))
    centres = {int(value) for value in found[:, 0, 2, 2]}
    assert centres == {5 * row + column for row in (1, 2, 3) for column in (1, 2, 3)}
    row = int(torch.nonzero(found[:, 0, 2, 2] == 18)[0])  # one down, one right
    assert found[row, 0].tolist() == [[min(r + 1, 4) * 5 + min(c + 1, 4) for c in range(5)] for r in range(5)]
    assert shift_images(image, 0) is image


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageClassifier, Path]:
    folder = tiny_digits(tmp_path_factory.mktemp("digits"))
    train, test = load_images(folder), load_images(folder, "test")
    found = train_classifier(train, test, steps=40, batch_size=32, width=4, shift=0, progress=False)
    return found, folder


def test_classifier(classifier: tuple[ImageClassifier, Path], tmp_path: Path) -> None:
    model, folder = classifier
    assert not model.training and model.record["test_accuracy"] == 1.0 and model.record["test_images"] == 48
    test = load_images(folder, "test")
    model.save(tmp_path)
    again = ImageClassifier.load(tmp_path)
    assert again.classes == ("0", "1", "2") and again.record == model.record
    for one, two in zip(model.judge(test.images), again.judge(test.images, batch_size=5), strict=True):
        assert torch.allclose(one.double(), two.double(), atol=1e-5)
    # Bytes and their values in -1 to 1 are the same; other sizes are scaled.
    assert torch.allclose(model.features(test.images), model.features(test.images.float() / 127.5 - 1), atol=1e-6)
    assert model.features(torch.zeros(2, 1, 16, 16)).shape == (2, 16)
    with pytest.raises(ValueError, match="reads images"):
        model.features(torch.zeros(2, 3, 8, 8))
    with pytest.raises(ValueError, match="holds no classifier"):
        ImageClassifier.load(tmp_path / "none")
    with pytest.raises(ValueError, match="at least 1"):
        ImageClassifier(1, [], (8, 8))


def test_scores(classifier: tuple[ImageClassifier, Path]) -> None:
    model, folder = classifier
    train, test = load_images(folder), load_images(folder, "test")
    assert train.labels is not None
    good = classifier_scores(model, train.images, train.labels, test.images)
    assert good.accuracy == 1.0 and good.class_accuracy == [1.0, 1.0, 1.0] and good.images == 96
    wrong = train.labels.clone()
    wrong[train.labels == 1] = 2
    found = classifier_scores(model, train.images, wrong, test.images)
    assert found.accuracy == pytest.approx(2 / 3) and found.class_accuracy is not None
    assert found.class_accuracy[:2] == [1.0, None] and found.class_accuracy[2] == pytest.approx(0.5)
    noise = torch.randint(0, 256, train.images.shape, dtype=torch.uint8)
    assert classifier_scores(model, noise, None, test.images).frechet_distance > 5 * good.frechet_distance
    with pytest.raises(ValueError, match="labels"):
        classifier_scores(model, train.images, wrong[:3], test.images)


def test_training_refuses(classifier: tuple[ImageClassifier, Path]) -> None:
    train = load_images(classifier[1])
    with pytest.raises(ValueError, match="images to test on"):
        train_classifier(train, load_images(classifier[1], "test", size=4))
    with pytest.raises(ValueError, match="classes to train on are 0, 1, 2, classes to test on 1, 2"):
        train_classifier(train, type(train)(train.images, train.labels, ("1", "2")))
    with pytest.raises(ValueError, match="with labels"):
        train_classifier(type(train)(train.images, None, ()), train)
    with pytest.raises(ValueError, match="at least 1"):
        train_classifier(train, train, steps=0)


def test_inception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(ImportError, match="classifier-feature Fréchet distance"):
        inception_scores(images, images)
    with pytest.raises(ValueError, match="must be uint8"):
        inception_scores(images.float(), images)
    with pytest.raises(ValueError, match="there is no file"):
        inception_scores(images, images, weights=tmp_path / "missing.pth")

    library = types.ModuleType("torch_fidelity")
    asked = {}

    def calculate_metrics(**options):  # type: ignore[no-untyped-def]
        asked.update(options)
        return {"frechet_inception_distance": 1.5, "inception_score_mean": 2.0, "inception_score_std": 0.1}

    library.calculate_metrics = calculate_metrics  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_fidelity", library)
    found = inception_scores(images, images)
    assert found == {"fid": 1.5, "inception_score": 2.0, "inception_score_deviation": 0.1}
    assert asked["input1"][3].shape == (3, 8, 8) and len(asked["input2"]) == 4 and not asked["cuda"]

    def offline(**options):  # type: ignore[no-untyped-def]
        raise OSError("no route")

    library.calculate_metrics = offline  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="--inception-weights"):
        inception_scores(images, images)
