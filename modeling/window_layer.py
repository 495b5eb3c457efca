"""The sliding-window layers of hybrid models: transformers' own, without the memory it leaves behind."""

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer


class WindowLayer(DynamicSlidingWindowLayer):
    """transformers' sliding-window layer, which keeps the window as a view of the whole prompt; here as a copy."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.keys.untyped_storage().nbytes() > 2 * self.keys.nbytes:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return keys, values
