"""Leave a cache as it was found: several measurements on one prefilled context.

A prefilled context is expensive, a question about it is cheap. Everything in this folder that reads a cache (needles,
perplexity, decode speed) runs inside `restored(cache)`, so that measurements never see each other's tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

# `update` of these two builds new tensors and never writes into the old ones, so keeping references is a snapshot.
_GROWS_BY_CONCATENATION = (DynamicLayer, DynamicSlidingWindowLayer)


@contextmanager
def restored(cache: Cache) -> Iterator[Cache]:
    """Run a block that may append to `cache`; afterwards the same object holds what it held before.

    Cost: nearly nothing for a `DynamicCache`, whatever `snapshot()` costs for a cache that has `snapshot()` and
    `restore()` (`PrunedCache`), one full copy of the cache for any other kind.
    """
    if hasattr(cache, "snapshot") and hasattr(cache, "restore"):
        snapshot = cache.snapshot()
        try:
            yield cache
        finally:
            cache.restore(snapshot)
        return

    saved: dict[str, Any]
    if all(type(layer) in _GROWS_BY_CONCATENATION for layer in cache.layers):
        saved = dict(vars(cache), layers=[copy.copy(layer) for layer in cache.layers])
    else:
        saved = copy.deepcopy(vars(cache))
    try:
        yield cache
    finally:
        vars(cache).clear()
        vars(cache).update(saved)


def eviction_held(cache: Cache) -> AbstractContextManager[Any]:
    """`cache.hold_eviction()` where the cache evicts, a context manager that does nothing where it does not.

    While eviction is held, what a query sees is the compressed context plus every token read since: the result does
    not depend on how the tokens were cut into forward passes.
    """
    hold = getattr(cache, "hold_eviction", None)
    return nullcontext(cache) if hold is None else hold()
