"""Cross-entropy of a language-modelling head without all logits at once, on labelled positions only."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

IGNORED = -100


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int = 4096
) -> torch.Tensor:
    """Sum of the cross-entropy of `hidden @ weight.T` against labels, a chunk of positions at a time.

    Gradients are computed along with the loss and kept (the shapes of `hidden`'s labelled part and of `weight`), so
    logits are made once and at most `(chunk, V)` of them are alive. Positions without a label cost nothing.

    Args:
        hidden: `(N, d)`; the position's state that predicts `labels` at the same index (shifting is up to the caller).
        weight: `(V, d)`, of the head. Products are in autocast's dtype where it is on, else in `hidden`'s.
        labels: `(N,)`, integers; -100 is ignored.
        chunk: positions at a time.

    Returns:
        A float32 scalar, float64 for float64 states. It is 0, with zero gradients, where no position has a label.

    Raises:
        ValueError: shapes that do not fit, or a chunk below 1.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (N, d) and weight (V, d), got shapes {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if tuple(labels.shape) != (hidden.shape[0],):
        raise ValueError(
            f"labels must have shape ({hidden.shape[0]},), one a row of hidden, got {tuple(labels.shape)}."
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, got {chunk}.")
    chosen = (labels != IGNORED).nonzero()[:, 0]
    keep_gradients = torch.is_grad_enabled()
    return _ChunkedCrossEntropy.apply(hidden[chosen], weight, labels[chosen].long(), chunk, keep_gradients)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int, keep_gradients: bool
    ) -> torch.Tensor:
        wants_hidden, wants_weight = (keep_gradients and wanted for wanted in ctx.needs_input_grad[:2])
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        exact = torch.promote_types(dtype, torch.float32)
        head = weight.to(dtype)
        loss = torch.zeros((), device=hidden.device, dtype=exact)
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        # Products stay in the dtype chosen above: autocast would copy the head for each chunk.
        with torch.autocast(device, enabled=False):
            for start in range(0, hidden.shape[0], chunk):
                states = hidden[start : start + chunk].to(dtype)
                wanted = labels[start : start + chunk, None]
                # In place from here on: logits, their exponentials, probabilities and gradient share one buffer.
                scores = F.linear(states, head).to(exact)
                scores -= scores.amax(dim=1, keepdim=True)
                right = scores.gather(1, wanted)
                total = scores.exp_().sum(dim=1, keepdim=True)
                loss += (total.log() - right).sum()
                if not (wants_hidden or wants_weight):
                    continue
                scores /= total
                scores.scatter_add_(1, wanted, torch.full_like(right, -1.0))
                gradient = scores.to(dtype)
                if hidden_gradient is not None:
                    hidden_gradient[start : start + chunk] = gradient @ head
                if weight_gradient is not None:
                    weight_gradient += gradient.T @ states
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [None if x is None else (x * upstream).to(x.dtype) for x in ctx.saved_tensors]
        return (*scaled, None, None, None)
