"""The flow-matching loss of a model that predicts the image (ProxyFormer, Section 3.9 and 5.1).

x_t = (1 - t) ε + t x with t from 0 (noise) to 1 (image); the model estimates x from x_t and t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nearfar.modeling.modeling_proxyformer_image import ProxyFormerImageModel

__all__ = ["FlowMatchingLoss", "draw_times", "flow_matching_loss", "noisy_images"]

TIMES = ("uniform", "logit_normal")
WEIGHTINGS = ("image", "velocity")
# A velocity is (x̂ - x_t) / (1 - t): near t = 1 its weight, 1 / (1 - t)², is held at that of this distance.
_CLOSEST = 0.05
# Mean and standard deviation of logit(t) for "logit_normal": more of the noisy times.
_LOGIT_MEAN, _LOGIT_DEVIATION = -0.8, 0.8


@dataclass
class FlowMatchingLoss:
    """Attributes are scalars: `loss`, what is trained on; the mean squared errors of the last and the middle head."""

    loss: Tensor
    error: Tensor
    middle_error: Tensor | None


def draw_times(
    count: int, kind: str = "uniform", *, device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Tensor:
    """Times `(count,)`, float32, between 0 and 1.

    Args:
        count: how many.
        kind: `"uniform"`, or `"logit_normal"`, more of the noisy ones.
        device: of the times.
        generator: on that device.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in TIMES:
        raise ValueError(f"times must be one of {', '.join(TIMES)}, got {kind!r}")
    if kind == "uniform":
        return torch.rand(count, device=device, generator=generator)
    normal = torch.randn(count, device=device, generator=generator)
    return torch.sigmoid(_LOGIT_MEAN + _LOGIT_DEVIATION * normal)


def noisy_images(images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """x_t = (1 - t) ε + t x, for times `(batch,)`."""
    t = time.to(images.dtype).reshape(-1, *[1] * (images.ndim - 1))
    return torch.lerp(noise, images, t)


def flow_matching_loss(
    model: ProxyFormerImageModel,
    images: Tensor,
    class_labels: Tensor | None = None,
    text_states: Tensor | None = None,
    text_attention_mask: Tensor | None = None,
    *,
    condition_dropout: float = 0.1,
    weighting: str = "image",
    times: str = "uniform",
    middle_weight: float | None = None,
    time: Tensor | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> FlowMatchingLoss:
    """Mean squared error of the estimated image, plus that of the middle head's.

    Args:
        model: a `ProxyFormerImageModel`, or a module with its forward pass and a `config`.
        images: `(batch, channels, N_1, …, N_D)`, -1 to 1, or latents of variance 1.
        class_labels, text_states, text_attention_mask: see the model.
        condition_dropout: share of images whose condition is left out, which classifier-free guidance needs.
        weighting: `"image"`, |x̂ - x|²; or `"velocity"`, that over (1 - t)², which is |v̂ - v|².
        times: distribution of t; see `draw_times`.
        middle_weight: of the middle head's loss; `None` stands for the configuration's.
        time: `(batch,)`, instead of drawn ones.
        noise: of the shape of `images`, instead of drawn one.
        generator: on the device of `images`, for what is drawn.

    Returns:
        The loss and its parts; the parts are without weights and carry no gradient.

    Raises:
        ValueError: a value out of range, or what the model raises.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting must be one of {', '.join(WEIGHTINGS)}, got {weighting!r}")
    if not 0 <= condition_dropout <= 1:
        raise ValueError(f"condition_dropout must be between 0 and 1, got {condition_dropout}")
    batch, device = images.shape[0], images.device
    if time is None:
        time = draw_times(batch, times, device=device, generator=generator)
    if noise is None:
        noise = torch.randn(images.shape, device=device, dtype=images.dtype, generator=generator)
    drop = None
    if condition_dropout and (class_labels is not None or text_states is not None):
        drop = torch.rand(batch, device=device, generator=generator) < condition_dropout
    output = model(
        noisy_images(images, noise, time),
        time,
        class_labels=class_labels,
        text_states=text_states,
        text_attention_mask=text_attention_mask,
        drop_condition=drop,
    )
    weight = None
    if weighting == "velocity":
        weight = (1 - time).clamp_min(_CLOSEST).pow(-2)

    def error(estimate: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(estimate.dtype, torch.float32)
        squares = (estimate.to(exact) - images.to(exact)).square().flatten(1).mean(1)
        return squares.mean().detach(), (squares if weight is None else squares * weight).mean()

    found, loss = error(output.sample)
    middle_found = None
    share = float(model.config.auxiliary_loss_weight) if middle_weight is None else middle_weight
    if share and output.middle_sample is not None:
        middle_found, middle_loss = error(output.middle_sample)
        loss = loss + share * middle_loss
    return FlowMatchingLoss(loss, found, middle_found)
