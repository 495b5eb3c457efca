"""Caches by name: how commands, benchmarks and comparisons make one, and how any cache is measured.

A policy joins all of them by one call::

    register_cache("mine", MyCache, label="My policy", description="What it keeps.")
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from .cache_h2o import H2OCache
from .cache_iam import IAMCache
from .cache_kvzip import KVzipCache
from .cache_proactive import ProactiveCache
from .cache_proxykv import ProxyKVCache
from .cache_random import RandomCache
from .cache_snapkv import SnapKVCache
from .cache_streaming_llm import StreamingLLMCache
from .prunable_models import text_config
from .pruned_cache import PrunedCache


@dataclass(frozen=True)
class CacheEntry:
    """A cache that can be made by name.

    Attributes:
        name: identifier, as typed on a command line.
        label: the name people use.
        description: one line on what it keeps.
        factory: called as `factory(model, budget=…, retention_ratio=…, **options)`; returns an empty cache.
        needs_prototypes: takes `prototypes=` (fitted `KeyPrototypes`, a folder or a Hub id).
        needs_proxy: takes `scorer=`, a `PromptScorer`, that is a smaller model which reads each prompt too.
        needs_mapper: that scorer has a trained mapper.
    """

    name: str
    label: str
    description: str
    factory: Callable[..., Cache]
    needs_prototypes: bool = False
    needs_proxy: bool = False
    needs_mapper: bool = False


CACHES: dict[str, CacheEntry] = {}


def register_cache(
    name: str,
    factory: Callable[..., Cache],
    *,
    label: str,
    description: str,
    needs_prototypes: bool = False,
    needs_proxy: bool = False,
    needs_mapper: bool = False,
    overwrite: bool = False,
) -> CacheEntry:
    """Make a cache known by name; see `CacheEntry` for the arguments.

    Args:
        overwrite: replace an entry of the same name.

    Raises:
        ValueError: the name is empty or not an identifier, or is taken.
    """
    if not name.isidentifier():
        raise ValueError(f"A cache's name must be an identifier such as streaming_llm, got {name!r}.")
    if name in CACHES and not overwrite:
        raise ValueError(f"A cache named {name!r} is registered already; pass overwrite=True to replace it.")
    CACHES[name] = CacheEntry(name, label, description, factory, needs_prototypes, needs_proxy, needs_mapper)
    return CACHES[name]


def make_cache(
    name: str, model: nn.Module, *, budget: int | None = None, retention_ratio: float | None = None, **options: Any
) -> Cache:
    """An empty cache for `model`.

    Args:
        name: one of `CACHES`.
        budget, retention_ratio: see `PrunedCache`; "full" keeps everything and takes no notice of them.
        options: further arguments of that cache.

    Raises:
        ValueError: an unknown name; whatever the cache itself refuses.
        TypeError: an option that this cache does not take.
    """
    if name not in CACHES:
        raise ValueError(f"Unknown cache {name!r}; known caches: {', '.join(CACHES)}.")
    check_options(name, options)
    return CACHES[name].factory(model, budget=budget, retention_ratio=retention_ratio, **options)


def check_options(name: str, options: Iterable[str]) -> None:
    """Raise TypeError, naming those there are, if the cache `name` does not take one of `options`."""
    known = option_names(name)
    for option in options:
        if known is not None and option not in known:
            there = f"its options are {', '.join(known)}" if known else "it has none"
            raise TypeError(f"The {name} cache takes no option {option!r}; {there}.")


def option_names(name: str) -> list[str] | None:
    """The options a registered cache takes beside its budget; None if it takes any."""
    factory = CACHES[name].factory
    signatures = [inspect.signature(factory)]
    if isinstance(factory, type) and issubclass(factory, PrunedCache):  # a policy hands what it does not know upwards
        signatures = [inspect.signature(cls) for cls in factory.__mro__ if issubclass(cls, PrunedCache)]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signatures[-1].parameters.values()):
        return None
    parameters = [parameter for signature in signatures for parameter in signature.parameters.values()]
    keywords = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    return sorted(keywords - {"budget", "retention_ratio"})


def _full_cache(model: nn.Module, *, budget: int | None = None, retention_ratio: float | None = None) -> DynamicCache:
    return DynamicCache(config=text_config(model))


def cache_nbytes(cache: Cache) -> int:
    """Bytes of all tensors that any transformers cache holds."""
    nbytes = getattr(cache, "nbytes", None)
    if callable(nbytes):
        return int(nbytes())
    held = {id(tensor): tensor for layer in cache.layers for tensor in _tensors(vars(layer))}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def cache_kept_pairs(cache: Cache) -> int:
    """Key-value pairs that any transformers cache holds, over rows, layers and key-value heads.

    Raises:
        TypeError: a layer whose keys are not `(batch, heads, tokens, dim)`, so that heads cannot be counted.
    """
    kept_pairs = getattr(cache, "kept_pairs", None)
    if callable(kept_pairs):
        return int(kept_pairs())
    total = 0
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        if layer.keys is None or layer.keys.ndim != 4:
            raise TypeError(f"The pairs of a {type(layer).__name__} cannot be counted: its keys are not (b, h, n, d).")
        batch, heads, places, _ = layer.keys.shape
        tokens = int(layer.get_seq_length())  # those seen; a sliding layer holds fewer
        total += batch * heads * (min(places, tokens) if layer.is_sliding else tokens)
    return total


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a value, inside containers too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


register_cache("full", _full_cache, label="Full cache", description="Every pair of every token.")
register_cache(
    "streaming_llm",
    StreamingLLMCache,
    label="StreamingLLM",
    description="The first few tokens and the newest ones.",
)
register_cache(
    "random",
    RandomCache,
    label="Random",
    description="Pairs chosen at random, beside the first few tokens and the newest ones.",
)
register_cache(
    "proactive",
    ProactiveCache,
    label="Proactive",
    description="Pairs that fitted prototypes predict to be needed, chosen while the prompt is read.",
    needs_prototypes=True,
)
register_cache(
    "snapkv",
    SnapKVCache,
    label="SnapKV",
    description="Pairs that the last tokens of the prompt attend to.",
)
register_cache(
    "h2o",
    H2OCache,
    label="H2O",
    description="Pairs that have received most attention so far, and the newest ones.",
)
register_cache(
    "kvzip",
    KVzipCache,
    label="KVzip",
    description="Pairs that the model attends to while it repeats its context, which costs further passes over it.",
)
register_cache(
    "iam",
    IAMCache,
    label="IAM",
    description="Pairs that a smaller model, repeating the context itself, attends to, by a fixed matching of heads.",
    needs_proxy=True,
)
register_cache(
    "proxykv",
    ProxyKVCache,
    label="ProxyKV",
    description="Pairs that a mapper predicts to be needed from the attention of a smaller model.",
    needs_proxy=True,
    needs_mapper=True,
)
