"""An exponential moving average of a model's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WeightAverage"]


class WeightAverage:
    """Keeps θ̄ ← δ θ̄ + (1 - δ) θ beside a model, with a smaller δ at the start.

    In step n, from 1, δ is at most (1 + n) / (10 + n), so that the random weights of the start are soon forgotten.

    Args:
        model: whose floating-point parameters and buffers are averaged; other buffers are copied.
        decay: δ.

    Raises:
        ValueError: a decay out of range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1, got {decay}")
        self.decay, self.step = decay, 0
        self._model = model
        self._average = [tensor.detach().clone() for tensor in self._own()]

    def _own(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present weights in."""
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        pairs = list(zip(self._average, self._own(), strict=True))
        real = [(mean, now.detach()) for mean, now in pairs if mean.is_floating_point()]
        torch._foreach_lerp_([mean for mean, _ in real], [now for _, now in real], 1 - decay)
        for mean, now in pairs:
            if not mean.is_floating_point():
                mean.copy_(now)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, now in zip(self._average, self._own(), strict=True):
            held = now.detach().clone()
            now.copy_(mean)
            mean.copy_(held)

    def model(self) -> Any:
        """A copy of the model with the averaged weights, in eval mode."""
        found = copy.deepcopy(self._model).eval()
        with torch.no_grad():
            for mean, own in zip(self._average, [*found.parameters(), *found.buffers()], strict=True):
                own.copy_(mean)
        return found

    def state_dict(self) -> dict[str, Any]:
        """To be given to `load_state_dict`."""
        return {"step": self.step, "average": [tensor.clone() for tensor in self._average]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave, for the same model.

        Raises:
            ValueError: of other tensors.
        """
        given = state["average"]
        if [tuple(x.shape) for x in given] != [tuple(x.shape) for x in self._average]:
            raise ValueError("the saved average is of another model: its tensors have other shapes")
        self.step = state["step"]
        for mean, saved in zip(self._average, given, strict=True):
            mean.copy_(saved)
