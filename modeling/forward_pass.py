"""`ForwardPass`: what the layers of one forward pass over a pruned cache share."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .new_token_padding import new_tokens_valid


class ForwardPass:
    """Computed by the first layer that needs it, and dropped with `forget` after the last."""

    def __init__(self) -> None:
        self._mask: tuple[Any, torch.Tensor | None] | None = None
        self._positions: tuple[Any, torch.Tensor] | None = None
        self._shared: dict[Hashable, tuple[tuple[Any, ...], torch.Tensor]] = {}

    def forget(self) -> None:
        self._mask = self._positions = None
        self._shared = {}

    def validity(self, mask: Any, batch: int, n: int) -> torch.Tensor | None:
        """`(batch, n)`, bool: which new tokens are real; None when all are. Read off the model's own mask."""
        if mask is None:
            return None
        # All layers of a forward pass share the mask; reading it costs a synchronisation on a GPU.
        if self._mask is None or self._mask[0] is not mask:
            self._mask = (mask, new_tokens_valid(mask, batch, n))
        return self._mask[1]

    def positions(
        self,
        position_ids: torch.Tensor | None,
        valid: torch.Tensor | None,
        batch: int,
        n: int,
        device: torch.device,
        real_tokens: list[int],
    ) -> torch.Tensor:
        """Rotary positions of the new tokens: what the model says, or the count of real tokens before.

        Args:
            position_ids: the model's, `(batch or 1, n)`; anything else is passed over.
            valid: see `validity`.
            device: where they are needed.
            real_tokens: of each row, before this pass.

        Returns:
            `(batch, n)`, int64.
        """
        if position_ids is not None and position_ids.ndim == 2 and position_ids.shape[1] == n:
            known = self._positions
            if known is None or known[0] is not position_ids or known[1].device != device:
                # A copy: they are needed until the next eviction, and the caller may count his own on in place.
                copied = position_ids.detach().to(device, torch.int64, copy=True).expand(batch, n)
                self._positions = known = (position_ids, copied)
            return known[1]

        def counted() -> torch.Tensor:
            before = torch.tensor(real_tokens, device=device)[:, None]
            steps = torch.arange(n, device=device).expand(batch, n) if valid is None else valid.cumsum(1) - 1
            return (before + steps).clamp(min=0)

        return self.once(("positions", tuple(real_tokens), n, device), counted, valid)

    def once(self, name: Hashable, make: Callable[[], torch.Tensor], *sources: Any) -> torch.Tensor:
        """See `PrunedCache.once`."""
        known = self._shared.get(name)
        if known is None or any(a is not b for a, b in zip(known[0], sources, strict=True)):
            self._shared[name] = known = (sources, make())
        return known[1]
