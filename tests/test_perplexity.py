"""Perplexity of a continuation is that of one long forward pass, however it is cut, and leaves the cache alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import random_ids, tiny_model
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel

from nearfar.evaluation.perplexity import Perplexity, continuation_perplexity
from nearfar.modeling.cache_registry import cache_kept_pairs
from nearfar.modeling.cache_streaming_llm import StreamingLLMCache
from nearfar.modeling.compat import cache_argument

CONTEXT, CONTINUATION = random_ids(1, 40), random_ids(1, 33, seed=1)


def _prefilled(family: str, make: Callable[[PreTrainedModel], Cache] | None = None) -> tuple[PreTrainedModel, Cache]:
    model = tiny_model(family)
    cache = DynamicCache(config=model.config) if make is None else make(model)
    with torch.no_grad():
        model(CONTEXT, **{cache_argument(model): cache})
    return model, cache


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 32, 1000])
def test_equal_to_one_forward_pass_without_a_cache(family: str, chunk_tokens: int) -> None:
    model, cache = _prefilled(family)
    with torch.no_grad():
        logits = model(torch.cat([CONTEXT, CONTINUATION], 1)).logits[0]
    # The token at 41 is the first that is scored: the one at 40 is only read.
    expected = F.cross_entropy(logits[40:-1], CONTINUATION[0, 1:]).item()
    found = continuation_perplexity(model, cache, CONTINUATION, chunk_tokens=chunk_tokens)
    assert found.tokens == 32
    assert found.nats == pytest.approx(expected, abs=1e-5)  # logits are read in float32
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


@pytest.mark.parametrize("form", [lambda ids: ids, lambda ids: ids[0], lambda ids: ids[0].tolist()])
def test_every_form_of_ids_counts_the_same(form: Callable[[torch.Tensor], Any]) -> None:
    model, cache = _prefilled("llama")
    assert continuation_perplexity(model, cache, form(CONTINUATION)) == continuation_perplexity(
        model, cache, CONTINUATION
    )


def test_the_context_matters_and_the_cache_is_restored() -> None:
    model, cache = _prefilled("llama")
    first = continuation_perplexity(model, cache, CONTINUATION)
    assert cache.get_seq_length() == 40
    assert continuation_perplexity(model, cache, CONTINUATION) == first
    assert continuation_perplexity(model, DynamicCache(config=model.config), CONTINUATION).nats != first.nats


def test_a_pruned_cache_is_scored_as_it_was_after_prefill() -> None:
    """While eviction is held, chunks make no difference; where it is not, the cache loses pairs on the way."""
    model, cache = _prefilled("llama", lambda model: StreamingLLMCache(model, budget=16, eviction_interval=4))
    kept = cache_kept_pairs(cache)
    whole = continuation_perplexity(model, cache, CONTINUATION)
    chunks = continuation_perplexity(model, cache, CONTINUATION, chunk_tokens=5)
    evicting = continuation_perplexity(model, cache, CONTINUATION, chunk_tokens=5, hold_eviction=False)
    assert chunks.nats == pytest.approx(whole.nats, abs=1e-6)
    assert abs(evicting.nats - whole.nats) > 1e-4
    assert (cache_kept_pairs(cache), cache.get_seq_length()) == (kept, 40)

    # Against a mask over the full context: what the budget keeps are 4 sinks and the 12 newest tokens.
    model, full = _prefilled("llama")
    visible = torch.ones(1, 40, dtype=torch.bool)
    visible[:, 4:28] = False
    new = CONTINUATION.shape[1] - 1
    mask = torch.cat([visible.expand(new, 40), torch.ones(new, new, dtype=torch.bool).tril()], 1)[None, None]
    with torch.no_grad():
        logits = model(CONTINUATION[:, :-1], attention_mask=mask, **{cache_argument(model): full}).logits[0]
    assert whole.nats == pytest.approx(F.cross_entropy(logits, CONTINUATION[0, 1:]).item(), abs=1e-5)


def test_overflow_is_infinity() -> None:
    assert Perplexity(nats=800.0, tokens=1).perplexity == math.inf


@pytest.mark.parametrize(
    ("ids", "chunk_tokens", "message"),
    [
        ([5], 4, "at least 2"),
        ([], 4, "at least 2"),
        (torch.ones(2, 5, dtype=torch.long), 4, r"\(2, 5\)"),
        (torch.ones(1, 2, 5, dtype=torch.long), 4, r"\(1, 2, 5\)"),
        ([5, 6], 0, "chunk_tokens"),
    ],
)
def test_bad_input_is_refused_before_the_cache_is_touched(ids: Any, chunk_tokens: int, message: str) -> None:
    model, cache = _prefilled("llama")
    with pytest.raises(ValueError, match=message):
        continuation_perplexity(model, cache, ids, chunk_tokens=chunk_tokens)
    assert cache.get_seq_length() == 40
