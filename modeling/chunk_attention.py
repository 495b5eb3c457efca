"""Attention of a chunk of new tokens behind a long cache, without a mask.

Given a mask, torch's `scaled_dot_product_attention` takes a slow kernel, repeats grouped heads and widens the mask to
the states' dtype. A chunk needs none: its tokens see all of the past and each other causally. Both parts have fast
kernels, which also return their log-sum-exps, and merging by these is exact. Nor are the past and the chunk joined in
one tensor first.
"""

import torch

from .attention_with_lse import aten, causal_attention, full_attention, has_kernels, merge

CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Keys of the past from which on cuDNN's kernel, made for Hopper as FlashAttention 2 is not, is worth the 0.1 s that it
# takes to plan it for a new shape.
CUDNN_PAST_TOKENS = 16_384
# Older versions read beyond the end of sequences that are no multiple of 128.
CUDNN_VERSION = 91_501


def chunk_attention_available(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `chunk_attention` has kernels for states of this device, dtype and size of heads."""
    if query.shape[-1] != value.shape[-1] or query.dtype != value.dtype:
        return False
    if query.device.type == "cpu":
        return query.dtype in CPU_DTYPES
    return query.is_cuda and has_kernels(query) and torch.cuda.get_device_capability(query.device)[0] >= 8


def chunk_attention(
    query: torch.Tensor,
    past_keys: torch.Tensor,
    past_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    many: bool = False,
) -> torch.Tensor:
    """Each new token sees all of the past, and of the new tokens those up to itself. Forward only.

    Args:
        query: `(batch, query heads, q, head dim)`.
        past_keys, past_values: `(batch, key-value heads, n, head dim)`, n of any size; query heads are a multiple of
            key-value heads.
        keys, values: `(batch, key-value heads, q, head dim)`, of the new tokens.
        scaling: factor on query-key products.
        many: the same shapes come time and again, so a kernel may be planned for them.

    Returns:
        `(batch, query heads, q, head dim)`, in the queries' dtype.
    """
    own, own_lse, _ = causal_attention(query, keys, values, scaling, training=False)
    if not past_keys.shape[2]:
        return own
    past = _past_attention(query, past_keys, past_values, scaling, many)
    return merge(own, own_lse, *past)[0]


def _past_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, many: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of attention to all keys."""
    if not (many and _cudnn_serves(query, key)):
        return full_attention(query, key, value, scaling)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, False, False, scale=scaling
    )
    return out, lse.squeeze(-1)


def _cudnn_serves(query: torch.Tensor, key: torch.Tensor) -> bool:
    return (
        query.is_cuda
        and key.shape[2] >= CUDNN_PAST_TOKENS
        and query.shape[-1] <= 128
        and torch.cuda.get_device_capability(query.device)[0] in (9, 10)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION
    )
