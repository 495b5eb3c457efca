"""How good drawn images are: a classifier's opinion, Fréchet distances of features, FID and Inception Score.

FID and IS come from torch-fidelity, with the Inception network that defines them. Its weights are 91 MB and are
downloaded; without them there is the same distance over the features of a classifier of one's own. It is called
"classifier-feature Fréchet distance" here and is no FID: figures compare among one classifier's only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfar.evaluation.image_classifier import ImageClassifier

__all__ = ["ClassifierScores", "classifier_scores", "frechet_distance", "inception_scores"]


@dataclass(frozen=True)
class ClassifierScores:
    """What a classifier says of drawn images.

    Attributes:
        images: how many.
        accuracy: share that it sees the wanted class in; `None` without labels.
        class_accuracy: the same for each class; `None` for a class that was not asked for.
        frechet_distance: of its features, to those of the reference images.
    """

    images: int
    accuracy: float | None
    class_accuracy: list[float | None] | None
    frechet_distance: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def classifier_scores(
    classifier: ImageClassifier, images: Tensor, labels: Tensor | None, reference: Tensor
) -> ClassifierScores:
    """Judge drawn images.

    Args:
        classifier: trained on such images.
        images: `(n, channels, height, width)`, uint8 or -1 to 1.
        labels: `(n,)`, the classes that were asked for.
        reference: real images, which the classifier was not trained on.

    Raises:
        ValueError: fewer than two images, or labels of another number.
    """
    if labels is not None and labels.shape != images.shape[:1]:
        raise ValueError(f"{len(images)} images and {len(labels)} labels")
    features, seen = classifier.judge(images)
    known, _ = classifier.judge(reference)
    accuracy, by_class = None, None
    if labels is not None:
        right = (seen == labels.cpu()).double()
        accuracy = right.mean().item()
        parts = [right[labels.cpu() == index] for index in range(len(classifier.classes))]
        by_class = [part.mean().item() if len(part) else None for part in parts]
    return ClassifierScores(len(images), accuracy, by_class, frechet_distance(features, known))


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """|μ₁ - μ₂|² + tr(Σ₁ + Σ₂ - 2 (Σ₁ Σ₂)^½) of two sets of features, in float64.

    It is biased upwards for small sets: compare at equal numbers.

    Args:
        first, second: `(n, features)`.

    Raises:
        ValueError: shapes that do not fit, fewer than two rows, or values that are not finite.
    """
    for features in (first, second):
        if features.ndim != 2 or features.shape[0] < 2 or features.shape[1] != first.shape[1]:
            raise ValueError(
                f"features must be two tensors (n ≥ 2, features), got {tuple(first.shape)} and {tuple(second.shape)}"
            )
        if not bool(torch.isfinite(features).all()):
            raise ValueError("features must be finite")
    (mean1, covariance1), (mean2, covariance2) = (_moments(features) for features in (first, second))
    # (Σ₁ Σ₂)^½ has the trace of (Σ₁^½ Σ₂ Σ₁^½)^½, which is symmetric.
    values, vectors = torch.linalg.eigh(covariance1)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.mT
    product = root @ covariance2 @ root
    trace = torch.linalg.eigvalsh((product + product.mT) / 2).clamp_min(0).sqrt().sum()
    distance = (mean1 - mean2).square().sum() + covariance1.trace() + covariance2.trace() - 2 * trace
    return max(distance.item(), 0.0)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    exact = features.double().cpu()
    mean = exact.mean(0)
    centred = exact - mean
    return mean, centred.mT @ centred / (len(exact) - 1)


class _Bytes(torch.utils.data.Dataset[Tensor]):
    """Images as torch-fidelity reads them: uint8, three channels."""

    def __init__(self, images: Tensor) -> None:
        self.images = images.cpu()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image = self.images[index]
        return image.expand(3, -1, -1) if image.shape[0] == 1 else image


def inception_scores(
    images: Tensor, reference: Tensor, *, weights: str | Path | None = None, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """FID and Inception Score by torch-fidelity.

    Args:
        images, reference: `(n, 1 or 3, height, width)`, uint8.
        weights: its file of Inception weights (`weights-inception-2015-12-05-6726825d.pth`); `None`: downloaded, or
            taken from torch's hub folder.
        device: a GPU is used if this names one.

    Returns:
        `fid`, `inception_score`, `inception_score_deviation`.

    Raises:
        ImportError: torch-fidelity is not installed.
        OSError: its weights are neither here nor to be had.
        ValueError: images of another kind, or no such file.
    """
    for name, given in (("images", images), ("reference", reference)):
        if given.ndim != 4 or given.shape[1] not in (1, 3) or given.dtype != torch.uint8:
            raise ValueError(
                f"{name} must be uint8 of shape (n, 1 or 3, height, width), got {given.dtype} of {tuple(given.shape)}"
            )
    if weights is not None and not Path(weights).is_file():
        raise ValueError(f"there is no file {weights} with Inception weights")
    try:
        import torch_fidelity
    except ImportError as error:
        raise ImportError(
            "FID and Inception Score need torch-fidelity: pip install torch-fidelity. Without it there is the "
            "classifier-feature Fréchet distance (--classifier)."
        ) from error
    try:
        found = torch_fidelity.calculate_metrics(
            input1=_Bytes(images),
            input2=_Bytes(reference),
            fid=True,
            isc=True,
            cuda=torch.device(device).type == "cuda",
            cache=False,
            verbose=False,
            feature_extractor_weights_path=None if weights is None else str(weights),
        )
    except OSError as error:  # URLError is one
        raise OSError(
            "torch-fidelity could not get its Inception weights from the network: give their file as --inception-"
            f"weights, or use the classifier-feature Fréchet distance (--classifier). It said: {error}"
        ) from error
    return {
        "fid": float(found["frechet_inception_distance"]),
        "inception_score": float(found["inception_score_mean"]),
        "inception_score_deviation": float(found["inception_score_std"]),
    }
