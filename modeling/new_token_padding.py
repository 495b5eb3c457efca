"""Telling padding from tokens among the new tokens of a forward pass."""

from typing import Any

import torch


def new_tokens_valid(mask: Any, batch: int, n: int) -> torch.Tensor | None:
    """`(batch, n)`, bool, from any mask transformers builds: a real token sees itself, whatever the pattern."""
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        valid = mask[:, -n:].bool()
    elif isinstance(mask, torch.Tensor):
        own = mask[:, 0].diagonal(offset=mask.shape[-1] - n, dim1=-2, dim2=-1)
        valid = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    elif hasattr(mask, "mask_mod"):
        device = mask.kv_num_blocks.device
        rows = torch.arange(batch, device=device)[:, None]
        queries = torch.arange(n, device=device)[None, :]
        valid = mask.mask_mod(rows, torch.zeros_like(queries), queries, queries + mask.seq_lengths[1] - n)
    else:
        raise TypeError(f"Unknown kind of attention mask: {type(mask).__name__}.")
    valid = valid.expand(batch, n)
    return None if bool(valid.all()) else valid
