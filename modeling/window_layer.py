"""The sliding-window layers of hybrid models: transformers' own, without the memory it leaves behind."""

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from .new_states import check_batch_and_dtype


class WindowLayer(DynamicSlidingWindowLayer):
    """transformers' sliding-window layer, which keeps the window as a view of the whole prompt; here as a copy."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_initialized and self.keys.numel():  # `early_initialization` leaves them empty, of one dimension
            check_batch_and_dtype(key_states, self.keys.shape[0], self.keys.dtype)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.keys.untyped_storage().nbytes() > 2 * self.keys.nbytes:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """As in transformers, but nothing to remove is no error once the window is full."""
        if tokens_to_remove != 0 or self.record_past:
            super().crop(tokens_to_remove)
