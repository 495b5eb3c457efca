"""How much attention key-value pairs receive, without holding the matrix of all queries and keys.

Scores that judge a pair by its use (KVzip, H2O, SnapKV) need the probabilities themselves, which fused attention
kernels do not give. They are computed here anew, for blocks of queries of at most `BLOCK_ELEMENTS` probabilities:
one more product of queries and keys, and a softmax. For KVzip's largest probabilities a GPU has a kernel, which holds
no block of them in memory.
"""

import math

import torch

from .attention_features_kernel import summed_attention_kernel, summed_attention_kernel_available

# Attention probabilities held at once: small enough for a CPU's caches, large enough to fill a GPU.
BLOCK_ELEMENTS = {"cpu": 1 << 22}
BLOCK_ELEMENTS_DEFAULT = 1 << 26
# Stands for the column of a place that holds no pair, or of a query that counts for nothing.
NO_COLUMN = (1 << 31) - 1


def received_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    columns: torch.Tensor,
    window: int | None = None,
    query_columns: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention probability that pairs receive from queries; a query sees the pairs of columns up to its own.

    Args:
        query: `(batch, query heads, q, head dim)`.
        keys: `(batch, key-value heads, n, head dim)`.
        scaling: factor on query-key products.
        columns: `(n,)`, `(batch, n)` or `(batch, key-value heads, n)`, int: each pair's index in the sequence,
            ascending; `NO_COLUMN` at places that hold none.
        window: how many tokens a query sees, itself included; None for all.
        query_columns: `(q,)` or `(batch, q)`, int: the queries' own indices, `NO_COLUMN` for those that count for
            nothing. By default the last q keys are the queries' own, and the others precede them all: what lies in a
            query's future is then not computed.

    Returns:
        The largest probability over queries and the query heads of the group, and the sum, both
        `(batch, key-value heads, n)`, in float32 (float64 for float64 queries).
    """
    batch, query_heads, q, dim = query.shape
    heads, total = keys.shape[1:3]
    before, group = total - q, query_heads // heads
    grouped, transposed = query.reshape(batch * heads, group, q, dim), keys.reshape(batch * heads, total, dim).mT
    if query.dtype in (torch.float16, torch.bfloat16) and not query.is_cuda:
        grouped, transposed = grouped.float(), transposed.float()
    tail = query_columns is None
    own_columns = columns[..., total - q :] if query_columns is None else query_columns
    if own_columns.ndim == 3:
        own_columns = own_columns[:, 0]
    # Both as (batch or 1, heads or 1, group or 1, queries, keys).
    theirs = columns[:, None] if columns.ndim == 2 else columns
    theirs = theirs.expand(1, 1, total) if columns.ndim == 1 else theirs
    theirs, own = theirs[:, :, None, None, :], own_columns.reshape(-1, 1, 1, q, 1)
    # Without a window only a block's own columns can lie in a query's future.
    ordered = tail and window is None and columns.ndim == 1

    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    highest = torch.zeros(batch, heads, total, dtype=dtype, device=query.device)
    mass = torch.zeros_like(highest)
    elements = BLOCK_ELEMENTS.get(query.device.type, BLOCK_ELEMENTS_DEFAULT)
    block = max(1, elements // max(1, batch * query_heads * total))
    for first in range(0, q, block):
        end = min(first + block, q)
        seen = before + end if tail else total
        logits = _products(grouped[:, :, first:end].reshape(batch * heads, -1, dim), transposed[..., :seen])
        logits = logits.mul_(scaling).view(batch, heads, group, end - first, seen)
        maybe_hidden = slice(before + first if ordered else 0, seen)
        here, there = own[..., first:end, :], theirs[..., maybe_hidden]
        hidden = there > here
        if window is not None:
            hidden |= there <= here - window
        logits[..., maybe_hidden].masked_fill_(hidden, -math.inf)
        probabilities = logits.softmax(-1)
        if not ordered:
            # A query without a column counts for nothing; one whose own pair is gone may see nothing at all.
            blind = (here == NO_COLUMN) | hidden.all(-1, keepdim=True)
            probabilities = probabilities.masked_fill_(blind, 0.0)
        highest[..., :seen] = torch.maximum(highest[..., :seen], probabilities.amax((2, 3)))
        mass[..., :seen] += probabilities.sum((2, 3))
    return highest, mass


def highest_attention(query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Largest causal probability that pairs receive, over queries and the query heads of the group.

    Args:
        query: `(batch, query heads, q, head dim)`.
        keys: `(batch, key-value heads, n, head dim)`; the last q are the queries' own, after all others.
        scaling: factor on query-key products.

    Returns:
        `(batch, key-value heads, n)`, in float32 (float64 for float64 queries).
    """
    if summed_attention_kernel_available(query, keys):
        return summed_attention_kernel(query, keys, scaling, largest=True).unflatten(1, (keys.shape[1], -1)).amax(2)
    return received_attention(query, keys, scaling, torch.arange(keys.shape[2], device=query.device))[0]


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`(…, rows, n)` in float32 (float64 stays); on CUDA half-precision inputs are not converted first."""
    if queries.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    return torch.bmm(queries, keys)
