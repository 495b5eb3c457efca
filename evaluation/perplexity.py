"""Perplexity of a text's continuation, given a context that a cache already holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from nearfar.evaluation.restoring import eviction_held, restored
from nearfar.modeling.compat import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Perplexity:
    """`nats`: mean negative log-likelihood of a token, natural logarithm. `tokens`: how many were scored."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nats); infinity where that overflows."""
        return math.exp(self.nats) if self.nats < 700 else math.inf


@torch.no_grad()
def continuation_perplexity(
    model: PreTrainedModel,
    cache: Cache,
    continuation_ids: torch.Tensor | Sequence[int],
    *,
    chunk_tokens: int = 256,
    hold_eviction: bool = True,
) -> Perplexity:
    """Score `continuation_ids` token by token after the context in `cache`; the cache is restored afterwards.

    The first token is read but not scored (its logits belong to the context's last token, which is not run again), so
    n ids give n - 1 scored tokens.

    Args:
        model: a causal language model.
        cache: any transformers cache with batch 1, prefilled with the context.
        continuation_ids: integer tensor of shape (n,) or (1, n), or a list of n ids; n >= 2.
        chunk_tokens: tokens a forward pass; the logits held at once are (chunk_tokens, vocabulary) in float32.
        hold_eviction: keep the cache from evicting between chunks, so that the result is that of one long forward
            pass whatever `chunk_tokens` is: what the compressed context is worth. With `False` the cache evicts after
            every chunk, as it would while text streams in.

    Raises:
        ValueError: fewer than 2 ids, more than one row, or `chunk_tokens` < 1.
    """
    ids = torch.as_tensor(continuation_ids, dtype=torch.long)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"continuation_ids must have shape (n,) or (1, n), got {tuple(ids.shape)}")
    if ids.shape[1] < 2:
        raise ValueError(f"a continuation needs at least 2 tokens to score one, got {ids.shape[1]}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")

    ids = ids.to(model.get_input_embeddings().weight.device)
    inputs, targets = ids[:, :-1], ids[0, 1:]
    name = cache_argument(model)
    total = 0.0
    with restored(cache), eviction_held(cache) if hold_eviction else nullcontext():
        for start in range(0, inputs.shape[1], chunk_tokens):
            stop = start + chunk_tokens
            logits = model(inputs[:, start:stop], **{name: cache}, use_cache=True).logits[0].float()
            total += F.cross_entropy(logits, targets[start:stop].to(logits.device), reduction="sum").item()
    return Perplexity(nats=total / targets.shape[0], tokens=targets.shape[0])
