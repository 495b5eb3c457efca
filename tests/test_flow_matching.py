"""The flow-matching loss, Euler's method and guidance where the answer is known; averaged weights."""

import copy
import math

import pytest
import torch
from image_models import tiny_image_model
from torch import nn

from nearfar.modeling.flow_sampling import euler_sample, euler_step, guided
from nearfar.training.flow_matching import draw_times, flow_matching_loss, noisy_images
from nearfar.training.weight_average import WeightAverage


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_knowing_the_image_draws_it(steps: int) -> None:
    image, noise = torch.randn(2, 3, 4, 4, dtype=torch.float64), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    seen: list[float] = []

    def estimate(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        seen.append(float(time))
        # On the straight line at every step.
        assert (x - torch.lerp(noise, image, len(seen) / steps - 1 / steps)).abs().max() < 1e-10
        return image

    done: list[int] = []
    assert torch.equal(euler_sample(estimate, noise, steps, done.append), image)
    assert seen == pytest.approx([index / steps for index in range(steps)])
    assert done == list(range(1, steps + 1))


def test_a_step_is_the_velocity_times_its_length() -> None:
    x, estimate = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    step, steps = 3, 10
    velocity = (estimate - x) / (1 - step / steps)
    assert (euler_step(x, estimate, step, steps) - (x + velocity / steps)).abs().max() < 1e-12


def test_a_gaussian_is_drawn() -> None:
    """Of N(μ, s²) the best estimate is known, and the flow carries noise z to μ + s z."""
    mean, deviation = 0.7, 0.4

    def estimate(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        t = time.double()
        gain = t * deviation**2 / ((1 - t) ** 2 + t**2 * deviation**2)
        return mean + gain * (x - t * mean)

    noise = torch.randn(1000, dtype=torch.float64)
    exact = mean + deviation * noise
    gaps = [(euler_sample(estimate, noise, steps) - exact).abs().max().item() for steps in (50, 100, 200)]
    assert gaps[2] < 0.03
    # Euler's error falls with the number of steps.
    assert 1.7 < gaps[0] / gaps[1] < 2.3 and 1.7 < gaps[1] / gaps[2] < 2.3


def test_guidance_is_a_line_through_both() -> None:
    weak, strong = torch.randn(2, 9, dtype=torch.float64)
    assert torch.equal(guided(weak, strong, 1.0), strong)
    assert torch.equal(guided(weak, strong, 0.0), weak)
    assert (guided(weak, strong, 2.5) - (weak + 2.5 * (strong - weak))).abs().max() < 1e-12
    with pytest.raises(ValueError, match="at least 1"):
        euler_sample(lambda x, t: x, weak, 0)


# --- loss ------------------------------------------------------------------------------------------------------------


class Known(nn.Module):
    """Answers with what it was told, and remembers what it was asked."""

    def __init__(self, sample: torch.Tensor, middle: torch.Tensor | None) -> None:
        super().__init__()
        self.sample, self.middle = sample, middle
        self.config = tiny_image_model().config

    def forward(self, x, time, **condition):  # type: ignore[no-untyped-def]
        self.asked = (x, time, condition)
        return type("Output", (), {"sample": self.sample, "middle_sample": self.middle})()


def test_loss_is_the_errors_of_both_heads() -> None:
    images, sample, middle, noise = torch.randn(4, 3, 2, 5, 5, dtype=torch.float64)
    time = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    model = Known(sample, middle)
    found = flow_matching_loss(model, images, time=time, noise=noise)  # type: ignore[arg-type]
    error, middle_error = (sample - images).square().mean(), (middle - images).square().mean()
    assert found.loss.item() == pytest.approx((error + 0.5 * middle_error).item(), rel=1e-12)
    assert found.error.item() == pytest.approx(error.item(), rel=1e-12)
    asked = model.asked[0]
    assert torch.equal(asked[0], noise[0]) and torch.equal(asked[2], images[2])
    assert (asked[1] - (0.75 * noise[1] + 0.25 * images[1])).abs().max() < 1e-12
    single = flow_matching_loss(model, images, time=time, noise=noise, middle_weight=0.0)  # type: ignore[arg-type]
    assert single.loss.item() == pytest.approx(error.item(), rel=1e-12) and single.middle_error is None


def test_velocity_weighting_is_the_error_of_the_velocity() -> None:
    images, sample, noise = torch.randn(3, 3, 2, 5, 5, dtype=torch.float64)
    time = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    found = flow_matching_loss(
        Known(sample, None), images, time=time, noise=noise, weighting="velocity"  # type: ignore[arg-type]
    )  # fmt: skip
    t = time.view(-1, 1, 1, 1)
    estimated = (sample - noisy_images(images, noise, time)) / (1 - t)
    assert found.loss.item() == pytest.approx((estimated - (images - noise)).square().mean().item(), rel=1e-10)
    # Where it would be infinite it is held.
    late = torch.ones(3, dtype=torch.float64)
    held = flow_matching_loss(
        Known(sample, None), images, time=late, noise=noise, weighting="velocity"  # type: ignore[arg-type]
    )  # fmt: skip
    assert held.loss.item() == pytest.approx(400 * (sample - images).square().mean().item(), rel=1e-5)


def test_conditions_are_dropped_at_random() -> None:
    images = torch.zeros(2000, 1, 1, 1)
    model = Known(images, None)
    generator = torch.Generator().manual_seed(0)
    labels = torch.zeros(2000, dtype=torch.long)
    flow_matching_loss(model, images, labels, condition_dropout=0.25, generator=generator)  # type: ignore[arg-type]
    condition = model.asked[2]
    assert torch.equal(condition["class_labels"], labels)
    assert abs(condition["drop_condition"].double().mean().item() - 0.25) < 0.03
    flow_matching_loss(model, images, labels, condition_dropout=0.0)  # type: ignore[arg-type]
    assert model.asked[2]["drop_condition"] is None
    for options in ({"condition_dropout": 1.5}, {"weighting": "noise"}, {"times": "cosine"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            flow_matching_loss(model, images, **options)  # type: ignore[arg-type]


def test_times() -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = draw_times(20_000, generator=generator)
    early = draw_times(20_000, "logit_normal", generator=generator)
    for times in (uniform, early):
        assert times.min() >= 0 and times.max() <= 1
    assert abs(uniform.mean().item() - 0.5) < 0.01 and abs(uniform.std().item() - 1 / math.sqrt(12)) < 0.01
    assert abs(early.median().item() - 1 / (1 + math.exp(0.8))) < 0.01


def test_training_lowers_the_loss() -> None:
    model = tiny_image_model(dtype=torch.float32, image_size=8, in_channels=1, num_classes=2, initializer_range=0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    labels = torch.arange(32) % 2
    images = torch.where(labels.bool()[:, None, None, None], 0.8, -0.8).expand(-1, 1, 8, 8)

    def loss() -> float:
        with torch.no_grad():
            found = flow_matching_loss(
                model, images, labels, condition_dropout=0.0, generator=torch.Generator().manual_seed(1)
            )
        return found.error.item()

    before = loss()
    for _ in range(40):
        optimizer.zero_grad()
        flow_matching_loss(model, images, labels).loss.backward()
        optimizer.step()
    assert loss() < 0.3 * before


# --- averaged weights ------------------------------------------------------------------------------------------------


def test_weight_average() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = WeightAverage(model, decay=0.9)
    expected = [p.detach().clone().double() for p in model.parameters()]
    for step in range(1, 30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model[1].num_batches_tracked += 1
        average.update()
        decay = min(0.9, (1 + step) / (10 + step))
        expected = [
            decay * mean + (1 - decay) * p.detach().double()
            for mean, p in zip(expected, model.parameters(), strict=True)
        ]
    copied = average.model()
    assert not copied.training and model.training
    own = [p.detach().clone() for p in model.parameters()]
    for mean, wanted in zip(copied.parameters(), expected, strict=True):
        assert (mean.double() - wanted).abs().max() < 1e-5
    assert copied[1].num_batches_tracked == 29
    with average.applied():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), own, strict=True))

    again = WeightAverage(copy.deepcopy(model), decay=0.9)
    again.load_state_dict(average.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.model().parameters(), copied.parameters(), strict=True))
    assert again.step == 29
    with pytest.raises(ValueError, match="another model"):
        WeightAverage(nn.Linear(4, 4)).load_state_dict(average.state_dict())
    with pytest.raises(ValueError, match="decay"):
        WeightAverage(model, decay=1.0)
