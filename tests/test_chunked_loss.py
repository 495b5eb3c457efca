"""Chunked cross-entropy against torch's own: value, gradients, what stays alive, and dtypes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nearfar.modeling.chunked_loss import chunked_cross_entropy
from nearfar.modeling.next_token_loss import NextTokenLoss

POSITIONS, SIZE, VOCABULARY = 37, 6, 53


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States and a head as leaves, and labels of which a third is ignored."""
    hidden = torch.randn(POSITIONS, SIZE, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, SIZE, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (POSITIONS,))
    labels[::3] = -100
    return hidden, weight, labels


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes; views and in-place results are not made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.numel())
        return out


# 25 positions have labels.
@pytest.mark.parametrize("chunk", [1, 4, 5, 24, 25, 1000])
def test_value_and_gradients(chunk: int) -> None:
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk)
    reference = whole(hidden, weight, labels)
    assert loss.shape == () and loss.dtype == torch.float64
    assert (loss - reference).abs() <= 1e-10
    # A scale other than 1, as from a mean or an auxiliary weight.
    wanted = torch.autograd.grad(reference * 0.3, [hidden, weight])
    for gradient, reference_gradient in zip(torch.autograd.grad(loss * 0.3, [hidden, weight]), wanted, strict=True):
        assert (gradient - reference_gradient).abs().max() <= 1e-12
    assert not wanted[0][::3].any()


def test_gradients_by_finite_differences() -> None:
    hidden, weight, labels = inputs()
    few = [x[:8].detach().requires_grad_() for x in (hidden, weight)]
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, labels[:8].clamp(max=7), 3), few)


def test_backward_may_run_twice() -> None:
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, 7)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("wanted", ["hidden", "weight", "none", "no_grad"])
def test_only_wanted_gradients_are_kept(wanted: str) -> None:
    hidden, weight, labels = inputs()
    reference = whole(hidden, weight, labels).detach()
    hidden.requires_grad_(wanted in ("hidden", "no_grad"))
    weight.requires_grad_(wanted in ("weight", "no_grad"))
    with torch.set_grad_enabled(wanted != "no_grad"), LargestTensor() as mode:
        loss = chunked_cross_entropy(hidden, weight, labels, 1)
    assert (loss - reference).abs() <= 1e-10
    assert loss.requires_grad == (wanted in ("hidden", "weight"))
    if wanted in ("hidden", "weight"):
        loss.backward()
        assert (hidden.grad is not None, weight.grad is not None) == (wanted == "hidden", wanted == "weight")
    else:
        assert mode.largest < VOCABULARY * SIZE, "a gradient of the head was made for nothing"


def test_nothing_of_all_positions_times_the_vocabulary_is_alive() -> None:
    chunk = 8
    hidden, weight, labels = inputs()
    labelled = int((labels != -100).sum())
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), LargestTensor() as mode:
        loss = chunked_cross_entropy(hidden, weight, labels, chunk)
        loss.backward()
    assert max(saved) <= max(labelled * SIZE, VOCABULARY * SIZE)
    assert sum(saved) <= labelled * SIZE + VOCABULARY * SIZE + POSITIONS
    # Forward and backward: logits of one chunk, or the head.
    assert 0 < mode.largest <= VOCABULARY * max(chunk, SIZE) < VOCABULARY * labelled

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), LargestTensor() as plain:
        whole(hidden, weight, labels).backward()
    assert max(saved) == plain.largest == VOCABULARY * POSITIONS, "the check sees what plain cross-entropy keeps"


def test_ignored_positions_do_not_matter() -> None:
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, 4)
    changed = hidden.detach().clone()
    changed[::3] = float("nan")
    changed.requires_grad_()
    assert torch.equal(chunked_cross_entropy(changed, weight, labels, 4), loss)
    (gradient,) = torch.autograd.grad(chunked_cross_entropy(changed, weight, labels, 4), changed)
    assert torch.equal(gradient, torch.autograd.grad(loss, hidden)[0])


@pytest.mark.parametrize("positions", [0, 5])
def test_without_labels_the_loss_and_its_gradients_are_zero(positions: int) -> None:
    hidden = torch.randn(positions, SIZE, requires_grad=True)
    weight = torch.randn(VOCABULARY, SIZE, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.full((positions,), -100), 4)
    assert loss.item() == 0
    loss.backward()
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape and not hidden.grad.any()
    assert weight.grad is not None and weight.grad.shape == weight.shape and not weight.grad.any()


def test_extreme_logits() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = chunked_cross_entropy(hidden * 1e4, weight, labels, 4)
    assert loss.isfinite()
    assert loss.item() == pytest.approx(whole(hidden * 1e4, weight, labels).item(), rel=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss, [hidden, weight]))


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16(how: str) -> None:
    """Products in bfloat16, everything behind them in float32; gradients in the dtypes of what was given."""
    hidden, weight, labels = inputs(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    reference = whole(*exact, labels)
    wanted = torch.autograd.grad(reference, exact)
    if how == "autocast":
        hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        loss = chunked_cross_entropy(hidden, weight, labels, 4)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference.item(), rel=5e-3)
    loss.backward()
    for x, reference_gradient in zip((hidden, weight), wanted, strict=True):
        assert x.grad is not None and x.grad.dtype == x.dtype
        error = (x.grad.double() - reference_gradient).norm() / reference_gradient.norm()
        assert error < 2e-2


def test_autocast_uses_its_dtype() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = chunked_cross_entropy(hidden, weight, labels, 4)
    assert rounded.item() != chunked_cross_entropy(hidden, weight, labels, 4).item()


def test_a_mixed_head_without_autocast() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = chunked_cross_entropy(hidden.bfloat16(), weight, labels, 4)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_labels_of_32_bits() -> None:
    hidden, weight, labels = inputs()
    assert torch.equal(
        chunked_cross_entropy(hidden, weight, labels.int(), 4), chunked_cross_entropy(hidden, weight, labels, 4)
    )


def test_shapes_that_do_not_fit() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"hidden must be \(N, d\)"):
        chunked_cross_entropy(hidden[None], weight, labels)
    with pytest.raises(ValueError, match=r"weight \(V, d\)"):
        chunked_cross_entropy(hidden, weight[:, 1:], labels)
    with pytest.raises(ValueError, match="labels must have shape"):
        chunked_cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        chunked_cross_entropy(hidden, weight, labels, 0)


class Headed(NextTokenLoss):
    """A head that is called rather than taken apart, two labels at a time."""

    training = True

    def __init__(self, weight: torch.Tensor) -> None:
        self.config = SimpleNamespace(loss_chunk_tokens=2)
        self.lm_head = torch.nn.Linear(SIZE, VOCABULARY, bias=False, dtype=torch.float64)
        self.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
        self.calls: list[int] = []
        self.lm_head.register_forward_pre_hook(lambda module, args: self.calls.append(len(args[0])))


def test_every_process_calls_a_sharded_head_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with fewer labels, or none, would leave the others waiting for its shard of the weights."""
    hidden, weight, labels = inputs()
    labels[5:] = -100  # of the first five three are left: two calls
    headed = Headed(weight)
    loss = headed._sum_of_losses(hidden, labels)
    assert headed.calls == [2, labels.ne(-100).sum().item() - 2]

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        tensor.clamp_(min=4)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    headed.calls.clear()
    headed._sum_of_losses(hidden, labels)
    assert len(headed.calls) == 2  # weights that are whole need no other process
    headed.lm_head.weight.ds_id = 0  # as ZeRO-3 marks them
    headed.calls.clear()
    again = headed._sum_of_losses(hidden, labels)
    again.backward()
    assert headed.calls[:4] == [2, labels.ne(-100).sum().item() - 2, 0, 0] and torch.equal(again, loss)

    headed.calls.clear()
    headed.lm_head.weight.grad = None
    nothing = headed._sum_of_losses(hidden, torch.full_like(labels, -100))
    nothing.backward()
    assert nothing == 0 and headed.calls[:4] == [0, 0, 0, 0]
    assert headed.lm_head.weight.grad is not None and not headed.lm_head.weight.grad.any()


def test_a_sharded_head_is_called_for_nothing() -> None:
    """Once for FSDP2's sake; a bias of its own adds nothing to the loss, nor to its gradient."""

    class FSDPModule:
        pass

    class ShardedLinear(torch.nn.Linear, FSDPModule):
        pass

    found = []
    hidden, weight, labels = inputs()
    for kind in (torch.nn.Linear, ShardedLinear):
        headed = Headed(weight)
        headed._auxiliary_weight = lambda: 0.0  # type: ignore[method-assign]
        headed.lm_head = kind(SIZE, VOCABULARY, dtype=torch.float64)
        headed.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
        torch.nn.init.ones_(headed.lm_head.bias)
        loss = headed._loss(hidden[None], None, labels[None], None, None)
        loss.backward()
        found.append((loss, headed.lm_head.weight.grad, headed.lm_head.bias.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
