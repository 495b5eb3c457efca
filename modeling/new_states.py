"""Refusing new keys and values that do not go with those which a cache holds."""

import torch


def check_batch_and_dtype(key_states: torch.Tensor, batch: int, dtype: torch.dtype) -> None:
    """Refuse new states, `(rows, …)`, that do not go with the `batch` rows of `dtype` which a cache holds.

    Raises:
        ValueError: another number of rows, or another dtype.
    """
    if key_states.shape[0] != batch:
        raise ValueError(
            f"The cache holds {batch} row(s) and got {key_states.shape[0]}: call reset() before another batch, or "
            "batch_repeat_interleave / batch_select_indices to change the rows."
        )
    if key_states.dtype != dtype:
        raise ValueError(
            f"The cache holds {dtype} and the model computes in {key_states.dtype}: use the model in the dtype the "
            "context was read in."
        )
