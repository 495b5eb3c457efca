"""Mano, the manifold-normalised optimiser of Gu and Xie (arXiv 2601.23000, Algorithm 1), for weight matrices.

With θ an m×n weight, g its gradient, t the steps taken so far, k = t mod 2 and η, λ, μ learning rate, weight decay and
momentum:

    M ← μ M + g
    θ̂ = θ / |θ|_k                      each slice along dimension k to length 1
    v = M - θ̂ ⟨M, θ̂⟩_k                 the part of each slice at right angles to the weight's
    v̂ = v / |v|_k
    θ ← θ - η (0.2 √n_k v̂ + λ θ)        n_0 = m, n_1 = n

The 1st, 3rd, 5th … step therefore works on columns (k = 0), the 2nd, 4th … on rows (section 4.2). The entries of
0.2 √n_k v̂ have a root mean square of 0.2 whatever the gradient's size, which is AdamW's, so that learning rates and
schedules carry over (section 4.3). Every step is at right angles to the weight, so |θ|² gains 0.04 η² mn a step
whatever the gradients, and loses by weight decay alone: without decay and at small η, norms stay as initialised.

The paper trains at 3e-4 to 6e-4 with λ = 0.1, μ = 0.95 and a cosine to a tenth, and finds Mano slower than Muon at
first and better after some thousand steps (sections 5.1 and 5.2, appendix B).

Embeddings, heads and vectors go to AdamW; `nearfar.training.matrix_optimizer.make_optimizer` sorts them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Mano", "StackedMatrixOptimizer"]

# Entries of the matrices that are updated as one stack. Enough for a GPU to be busy; the temporary copies, up to a
# dozen bytes an entry, stay below a gigabyte whatever the size of the model.
STACK_ENTRIES = 1 << 26


class StackedMatrixOptimizer(Optimizer):
    """Base of optimisers whose step direction depends on a whole matrix and its momentum.

    Matrices of one shape are stacked and updated together, so a step launches a few kernels for each shape and not for
    each matrix. It never waits for the GPU. Learning rates may be numbers or tensors of one element; a CUDA graph
    wants the latter, on the GPU.

    State: `momentum_buffer` of each matrix, float32 (float64 for float64 weights) also where weights are bfloat16.
    Each group counts its steps in `step`.

    Each process needs whole matrices: DDP works, sharded weights do not.

    Args:
        params: 2-D parameters, or groups of them.
        defaults: `lr`, `momentum` and `weight_decay`, and what the subclass adds.

    Raises:
        ValueError: a parameter that is not a real matrix with both sides above 1, or a value out of range.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "step": 0})

    @abstractmethod
    def _directions(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, float]:
        """Directions `(matrices, rows, columns)` of parameters of one shape, free to overwrite, and their factor."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as `torch.optim.Optimizer` does; a `ValueError` refuses unfit parameters and values."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr as a tensor must have one element, got shape {tuple(lr.shape)}")
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr must be finite and 0 or more, got {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and 0 or more, got {weight_decay}")
        if not group["eps"] > 0:
            raise ValueError(f"eps must be positive, got {group['eps']}")
        for param in group["params"]:
            # A slice of one entry has no direction at right angles to it, and nothing for Muon to orthogonalise.
            if param.ndim != 2 or min(param.shape) < 2 or not param.is_floating_point():
                raise ValueError(
                    f"{name} is for real matrices with both sides above 1, got a parameter of shape "
                    f"{tuple(param.shape)}, {param.dtype}; give that to AdamW (make_optimizer does)"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient stay as they are, momentum included.

        Args:
            closure: computes the loss anew, with its gradients.

        Returns:
            What `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type == "cpu":
                lr = float(lr)
            for params in _stacks(group["params"]):
                grads = [param.grad.to(_state_dtype(param)) for param in params if param.grad is not None]
                directions, factor = self._directions(group, params, grads)
                if group["weight_decay"]:
                    torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
                torch._foreach_sub_(params, list(directions.mul_(lr * factor).unbind(0)))
            group["step"] += 1
        return loss

    def _momenta(self, params: list[Tensor]) -> list[Tensor]:
        """The momentum buffers, zeros where there are none yet."""
        buffers = []
        for param in params:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param, dtype=_state_dtype(param))
            buffers.append(state["momentum_buffer"])
        return buffers

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, and keep momenta in their own precision."""
        super().load_state_dict(state_dict)
        keep_momentum_precision(self, state_dict)


class Mano(StackedMatrixOptimizer):
    """Mano (arXiv 2601.23000, Algorithm 1); see the module's docstring for the formula.

    Args:
        params: matrices with both sides above 1, or groups of them. Not embeddings or heads.
        lr: learning rate; one step moves the entries by 0.2 · `lr` in root mean square.
        momentum: μ.
        weight_decay: λ, decoupled: weights shrink by `lr · weight_decay` a step.
        nesterov: look one step ahead, g + μM in place of M. The paper's results are without it; it reports that large
            models may gain and small ones lose (appendix B.2).
        normalize_weights: project with θ̂, as the paper does. False projects with θ as it is, as version 2 of the
            authors' code does (March 2026), and is no longer a projection.
        eps: shortest length that a slice is divided by.

    Raises:
        ValueError: a parameter that is not such a matrix, or a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = False,
        normalize_weights: bool = True,
        eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov,
            "normalize_weights": normalize_weights, "eps": eps,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _directions(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, float]:
        momentum, eps = group["momentum"], group["eps"]
        buffers = self._momenta(params)
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)
        moves = torch.stack(buffers)
        if group["nesterov"]:
            moves = torch.stack(grads).add_(moves, alpha=momentum)
        along = 1 + group["step"] % 2  # dimension 0 of the stack counts the matrices
        weights = torch.stack(params).to(moves.dtype)
        if group["normalize_weights"]:
            weights /= torch.linalg.vector_norm(weights, dim=along, keepdim=True).clamp_(min=eps)
        moves -= weights * (moves * weights).sum(along, keepdim=True)
        moves /= torch.linalg.vector_norm(moves, dim=along, keepdim=True).clamp_(min=eps)
        return moves, 0.2 * math.sqrt(moves.shape[along])


def keep_momentum_precision(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """After `load_state_dict`, put back momenta as they were saved: torch casts them to the parameters' dtype."""
    saved_groups = state_dict["param_groups"]
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            saved = state_dict["state"].get(key, {}).get("momentum_buffer")
            if saved is not None:
                # A copy: the optimiser writes into its momenta, and the caller may load the same state twice.
                momentum = saved.detach().to(device=param.device, dtype=_state_dtype(param), copy=True)
                optimizer.state[param]["momentum_buffer"] = momentum


def _state_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def _stacks(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that have a gradient, in lists of one shape, dtype and device, none larger than `STACK_ENTRIES`."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
    for param in params:
        if param.grad is None:
            continue
        if param.grad.layout != torch.strided:
            raise ValueError(
                f"gradients must be dense, got {param.grad.layout} for a parameter of shape {tuple(param.shape)}"
            )
        alike.setdefault((param.shape, param.dtype, param.device), []).append(param)
    for same in alike.values():
        size = max(1, STACK_ENTRIES // same[0].numel())
        for first in range(0, len(same), size):
            yield same[first : first + size]
