"""DAR attention as its paper writes it (Eq. 3 and 4): every score computed, one softmax. Slow, and the definition."""

import torch
from torch.nn import functional as F

from .attention_with_lse import statistics_dtype


def dense_dar_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far_key: torch.Tensor,
    far_value: torch.Tensor,
    window: int,
    scaling: float,
    *,
    ranks: torch.Tensor | None = None,
    query_ranks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that sees near tokens through one pair of keys and values, far ones through another.

    Args:
        query: `(batch, heads, queries, head dim)`, rotated.
        key, value: `(batch, heads, tokens, head dim)`, from the full hidden states, keys rotated.
        far_key, far_value: of the same shape, from the bottleneck.
        window: a token is near if it lies fewer than `window` tokens before the query.
        scaling: multiplies the scores.
        ranks: `(batch or 1, tokens)`, each token's place in its sequence; by default its column.
        query_ranks: `(batch or 1, queries)`, the same for the queries; by default they are the last of the tokens.
        visible: bool, broadcastable to `(batch, heads, queries, tokens)`: what may be seen, on top of causality.
        bias: added to the scores, broadcastable to `(batch, heads, queries, tokens)`.
        dropout: probability of dropping an attention weight.

    Returns:
        The output `(batch, heads, queries, head dim)` and the weights `(batch, heads, queries, tokens)`. A query that
        may see nothing gets zeros.
    """
    queries, tokens = query.shape[2], key.shape[2]
    if ranks is None:
        ranks = torch.arange(tokens, device=query.device)[None]
    if query_ranks is None:
        query_ranks = ranks[:, tokens - queries :]
    distance = (query_ranks[:, :, None] - ranks[:, None, :])[:, None]
    near = distance < window
    dtype = statistics_dtype(query)
    scores = torch.where(near, query @ key.mT, query @ far_key.mT).to(dtype) * scaling
    if bias is not None:
        scores = scores + bias.to(dtype)
    allowed = distance >= 0 if visible is None else (distance >= 0) & visible
    scores = scores.masked_fill(~allowed, -torch.inf)
    # Softmax of a row that sees nothing would be NaN, in its gradient too.
    scores = scores.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    weights = (scores.softmax(-1) * allowed).to(query.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    return (weights * near) @ value + (weights * ~near) @ far_value, weights
