"""Training of the small classifier by which drawn images are judged."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from nearfar.evaluation.image_classifier import ImageClassifier
from nearfar.evaluation.image_data import ImageData

__all__ = ["shift_images", "train_classifier"]


def shift_images(images: Tensor, pixels: int, generator: torch.Generator | None = None) -> Tensor:
    """Each image moved by up to `pixels` along both sides; what comes in from outside repeats the border.

    Args:
        images: `(n, channels, height, width)`.
        pixels: 0 or more.
        generator: on the device of `images`.
    """
    if not pixels:
        return images
    count, _, height, width = images.shape
    found = images
    for dim, size in ((2, height), (3, width)):
        offset = torch.randint(-pixels, pixels + 1, (count, 1), generator=generator, device=images.device)
        place = (torch.arange(size, device=images.device) + offset).clamp(0, size - 1)
        index = place[:, None, :, None] if dim == 2 else place[:, None, None, :]
        found = torch.gather(found, dim, index.expand_as(found))
    return found


def train_classifier(
    data: ImageData,
    test: ImageData,
    *,
    steps: int = 1500,
    seconds: float | None = None,
    batch_size: int = 512,
    learning_rate: float = 3e-3,
    width: int = 32,
    shift: int = 2,
    seed: int = 0,
    device: torch.device | str = "cpu",
    bf16: bool = False,
    progress: bool = True,
) -> ImageClassifier:
    """Train a classifier: AdamW, one cycle of the learning rate, images shifted by a few pixels.

    Args:
        data: to train on, with labels.
        test: of the same classes; how many of them are recognised goes into the classifier's record.
        steps: of training.
        seconds: a limit; the learning rate follows the steps or the time, whichever is further on.
        batch_size: images a step.
        learning_rate: highest.
        width: see `ImageClassifier`.
        shift: pixels.
        seed: of weights and batches.
        device: where.
        bf16: autocast to bfloat16.
        progress: show a progress bar.

    Returns:
        The classifier, in eval mode, on the device.

    Raises:
        ValueError: no labels, other classes in the test, or images of two kinds.
    """
    if data.labels is None or test.labels is None:
        raise ValueError("a classifier is trained and tested on images with labels")
    if test.classes != data.classes[: len(test.classes)]:  # idx files name no more classes than their labels have
        raise ValueError(
            f"classes to train on are {', '.join(data.classes)}, classes to test on {', '.join(test.classes)}"
        )
    if data.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"images to train on are {tuple(data.images.shape[1:])}, images to test on {tuple(test.images.shape[1:])}"
        )
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps and batch_size must be at least 1, got {steps} and {batch_size}")
    if not 0 < learning_rate < float("inf"):
        raise ValueError(f"learning_rate must be above 0, got {learning_rate}")
    device = torch.device(device)
    torch.manual_seed(seed)
    channels, *size = data.images.shape[1:]
    model = ImageClassifier(channels, data.classes, size, width).to(device)
    data, test = data.to(device), test.to(device)
    assert data.labels is not None and test.labels is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.05)
    generator = torch.Generator(device).manual_seed(seed)
    began, done, taken = time.perf_counter(), 0.0, 0
    bar = tqdm(total=steps, unit="step", dynamic_ncols=True, leave=False, disable=None if progress else True)
    with bar:
        while done < 1:
            factor = min(done / 0.2, (1 - done) / 0.8)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * max(factor, 0.01)
            chosen = torch.randint(len(data), (batch_size,), generator=generator, device=device)
            images = shift_images(data.images[chosen], shift, generator)
            with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
                logits = model(images)
            loss = F.cross_entropy(logits.float(), data.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            taken += 1
            bar.update()
            done = taken / steps
            if seconds is not None:
                if device.type == "cuda" and taken % 20 == 0:
                    torch.cuda.synchronize(device)
                done = max(done, (time.perf_counter() - began) / seconds)
    model.eval()
    _, seen = model.judge(test.images)
    record: dict[str, Any] = {
        "steps": taken,
        "seconds": round(time.perf_counter() - began, 2),
        "test_images": len(test),
        "test_accuracy": (seen == test.labels.cpu()).double().mean().item(),
    }
    model.record = record
    return model
