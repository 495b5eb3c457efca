"""Drawing from a flow that was matched: Euler's steps from noise to an image, with guidance (Section 3.9)."""

from collections.abc import Callable

import torch

# Noisy images and the step's time, a 0-dimensional tensor, to estimates of the images.
Estimate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def guided(weak: torch.Tensor, strong: torch.Tensor, scale: float) -> torch.Tensor:
    """weak + scale · (strong - weak): the estimate of a stronger model than `strong`, for a scale above 1.

    For classifier-free guidance `weak` knows no condition; for mid-to-final guidance it is the middle head's.
    """
    return torch.lerp(weak, strong, scale)


def euler_step(x: torch.Tensor, estimate: torch.Tensor, step: int, steps: int) -> torch.Tensor:
    """x + (x̂ - x) / (N - i): one of N equal steps along the straight line to the estimate.

    The velocity is (x̂ - x) / (1 - t) with t = i / N, and the step 1 / N long; the last one arrives at the estimate.
    """
    return torch.lerp(x, estimate, 1.0 / (steps - step))


def euler_sample(
    estimate: Estimate, noise: torch.Tensor, steps: int, each_step: Callable[[int], object] | None = None
) -> torch.Tensor:
    """Images from noise.

    Args:
        estimate: x_t and t (float32, no dimensions) to the estimate of x.
        noise: x_0, standard normal.
        steps: N.
        each_step: called with the number of steps done.

    Returns:
        x_1, of the shape of the noise.

    Raises:
        ValueError: fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    times = torch.arange(steps, dtype=torch.float32, device=noise.device) / steps
    x = noise
    for step in range(steps):
        x = euler_step(x, estimate(x, times[step]), step, steps)
        if each_step is not None:
            each_step(step + 1)
    return x
