"""Mano: each step against the paper's algorithm written out slice by slice, and what the formula implies."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nearfar.training import mano
from nearfar.training.mano import Mano

SHAPES = ((5, 7), (7, 5), (5, 7), (4, 4), (5, 7))


def _parameters(
    dtype: torch.dtype = torch.float64, shapes: tuple[tuple[int, int], ...] = SHAPES
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def _set_gradients(parameters: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (scale * gradient).to(parameter.dtype)


def _algorithm_1(
    weight: Tensor, gradients: list[Tensor], lr: float, momentum: float, weight_decay: float, nesterov: bool = False
) -> Tensor:
    """Algorithm 1 of the paper, one row or column at a time."""
    theta = weight.detach().clone()
    rows, columns = theta.shape
    running = torch.zeros_like(theta)
    for t, gradient in enumerate(gradients):
        running = momentum * running + gradient
        look = gradient + momentum * running if nesterov else running
        update = torch.zeros_like(theta)
        if t % 2 == 0:
            for j in range(columns):
                unit = theta[:, j] / theta[:, j].norm()
                tangent = look[:, j] - unit * torch.dot(look[:, j], unit)
                update[:, j] = 0.2 * math.sqrt(rows) * tangent / tangent.norm()
        else:
            for i in range(rows):
                unit = theta[i] / theta[i].norm()
                tangent = look[i] - unit * torch.dot(look[i], unit)
                update[i] = 0.2 * math.sqrt(columns) * tangent / tangent.norm()
        theta = theta - lr * (update + weight_decay * theta)
    return theta


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_follow_the_paper(nesterov: bool) -> None:
    parameters = _parameters()
    starts = [parameter.detach().clone() for parameter in parameters]
    optimizer = Mano(parameters, lr=0.03, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    gradients: list[list[Tensor]] = [[] for _ in parameters]
    for step in range(5):
        _set_gradients(parameters, step)
        for seen, parameter in zip(gradients, parameters, strict=True):
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())
        optimizer.step()
        for start, seen, parameter in zip(starts, gradients, parameters, strict=True):
            expected = _algorithm_1(start, seen, 0.03, 0.9, 0.1, nesterov)
            torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-12)
    other_kind = _algorithm_1(starts[0], gradients[0], 0.03, 0.9, 0.1, not nesterov)
    assert (parameters[0] - other_kind).abs().max() > 1e-3  # the two differ, so each test tells them apart


def test_stacks_do_not_depend_on_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = _parameters(), _parameters()
    for parameters, entries in ((whole, 1 << 26), (pieces, 71)):
        monkeypatch.setattr(mano, "STACK_ENTRIES", entries)
        optimizer = Mano(parameters, lr=0.1)
        for step in range(3):
            _set_gradients(parameters, step)
            optimizer.step()
    for one, other in zip(whole, pieces, strict=True):
        assert torch.equal(one, other)


def test_updates_are_tangent_and_of_known_size_on_columns_then_rows() -> None:
    (parameter,) = _parameters(shapes=((6, 9),))
    optimizer = Mano([parameter], lr=0.01, weight_decay=0.0)
    for step in range(4):
        before = parameter.detach().clone()
        _set_gradients([parameter], step)
        optimizer.step()
        update = (before - parameter.detach()) / 0.01
        along = step % 2
        assert (update * before).sum(along).abs().max() < 1e-12
        sizes = update.norm(dim=along)
        torch.testing.assert_close(sizes, torch.full_like(sizes, 0.2 * math.sqrt(before.shape[along])))
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-10)
        assert (update * before).sum(1 - along).abs().max() > 1e-2
    assert optimizer.param_groups[0]["step"] == 4


def test_size_of_gradients_and_weights_does_not_matter() -> None:
    def update(gradient_scale: float, weight_scale: float) -> Tensor:
        (parameter,) = _parameters(shapes=((6, 9),))
        with torch.no_grad():
            parameter.mul_(weight_scale)
        before = parameter.detach().clone()
        optimizer = Mano([parameter], lr=1.0, weight_decay=0.0)
        _set_gradients([parameter], 0, gradient_scale)
        optimizer.step()
        return before - parameter.detach()

    reference = update(1.0, 1.0)
    torch.testing.assert_close(update(1e-4, 1.0), reference)
    torch.testing.assert_close(update(1e4, 1.0), reference)
    torch.testing.assert_close(update(1.0, 30.0), reference)


def test_weights_as_they_are_follow_version_two() -> None:
    (parameter,) = _parameters(shapes=((6, 9),))
    before = parameter.detach().clone()
    optimizer = Mano([parameter], lr=1.0, weight_decay=0.0, normalize_weights=False)
    _set_gradients([parameter], 0)
    optimizer.step()
    assert parameter.grad is not None
    move = parameter.grad - before * (parameter.grad * before).sum(0)
    torch.testing.assert_close(before - parameter.detach(), 0.2 * math.sqrt(6) * move / move.norm(dim=0))


def test_zero_weights_and_zero_gradients_give_finite_steps() -> None:
    weight = nn.Parameter(torch.zeros(4, 6))
    optimizer = Mano([weight], lr=0.1)
    weight.grad = torch.zeros(4, 6)
    optimizer.step()
    assert torch.equal(weight, torch.zeros(4, 6))
    weight.grad = torch.randn(4, 6)
    weight.grad[2] = 0
    optimizer.step()  # on rows
    assert weight.isfinite().all()
    assert torch.equal(weight[2], torch.zeros(6))
    torch.testing.assert_close(weight[0].detach().norm(), torch.tensor(0.1 * 0.2 * math.sqrt(6)))


def test_parameters_without_gradient_stay() -> None:
    moved, kept = _parameters(shapes=((3, 4), (3, 4)))
    start = kept.detach().clone()
    optimizer = Mano([moved, kept], lr=0.1, weight_decay=0.5)
    _set_gradients([moved], 0)
    optimizer.step()
    assert torch.equal(kept, start)
    assert kept not in optimizer.state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_saved_state_goes_on_the_same(dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    optimizer = Mano(parameters, lr=0.05)
    for step in range(3):
        _set_gradients(parameters, step)
        optimizer.step()
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = Mano(copies, lr=1.0)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for one, other in zip(parameters, copies, strict=True):
        assert resumed.state[other]["momentum_buffer"].dtype == wide
        assert torch.equal(optimizer.state[one]["momentum_buffer"], resumed.state[other]["momentum_buffer"])
    for step in range(3, 6):
        for chosen, stepped in ((parameters, optimizer), (copies, resumed)):
            _set_gradients(chosen, step)
            stepped.step()
    for one, other in zip(parameters, copies, strict=True):
        assert torch.equal(one, other)


def test_loaded_state_is_a_copy() -> None:
    parameters = _parameters()
    optimizer = Mano(parameters)
    _set_gradients(parameters, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved["state"])
    other = Mano(_parameters())
    other.load_state_dict(saved)
    _set_gradients(other.param_groups[0]["params"], 1)
    other.step()
    for key, state in before.items():
        assert torch.equal(saved["state"][key]["momentum_buffer"], state["momentum_buffer"])


def test_learning_rate_as_a_tensor() -> None:
    numbers, tensors = _parameters(), _parameters()
    for parameters, lr in ((numbers, 0.05), (tensors, torch.tensor(0.05, dtype=torch.float64))):
        optimizer = Mano(parameters, lr=lr)
        for step in range(2):
            _set_gradients(parameters, step)
            optimizer.step()
    for one, other in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_norms_grow_by_the_update_alone() -> None:
    # Tangent slices: no step can shrink a matrix, and it grows by the square of the step only. So without weight decay
    # its norm stays near where it began.
    (parameter,) = _parameters(shapes=((6, 9),))
    optimizer = Mano([parameter], lr=0.05, weight_decay=0.0)
    for step in range(4):
        before = parameter.detach().square().sum().item()
        _set_gradients([parameter], step)
        optimizer.step()
        after = parameter.detach().square().sum().item()
        assert after - before == pytest.approx(0.05**2 * 0.2**2 * parameter.numel(), rel=1e-9)


def test_closure_and_learning() -> None:
    layer = nn.Linear(8, 6, bias=False)
    target = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    target *= layer.weight.detach().norm() / target.norm()  # see the test above: other norms are out of reach
    optimizer = Mano(layer.parameters(), lr=0.05, weight_decay=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (layer.weight - target).square().mean()
        loss.backward()
        return loss

    losses = []
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 400)
        losses.append(optimizer.step(closure).item())
    assert losses[-1] < 0.02 * losses[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1e-3}, "lr must be finite and 0 or more, got -0.001"),
        ({"lr": math.nan}, "lr must be finite"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"momentum": 1.0}, "momentum must be at least 0 and less than 1, got 1.0"),
        ({"momentum": -0.1}, "momentum must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"eps": 0.0}, "eps must be positive"),
    ],
)
def test_values_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mano(_parameters(), **arguments)


@pytest.mark.parametrize(
    "unfit",
    [
        torch.zeros(3),
        torch.zeros(3, 4, 5),
        torch.zeros(1, 4),
        torch.zeros(4, 1),
        torch.zeros(3, 4, dtype=torch.complex64),
    ],
)
def test_unfit_parameters(unfit: Tensor) -> None:
    with pytest.raises(ValueError, match="Mano is for real matrices with both sides above 1"):
        Mano([nn.Parameter(unfit)])
    optimizer = Mano(_parameters())
    with pytest.raises(ValueError, match="real matrices"):
        optimizer.add_param_group({"params": [nn.Parameter(unfit)]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    parameter.grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(ValueError, match="gradients must be dense"):
        Mano([parameter]).step()
