"""Caches by name, and counting what any transformers cache holds."""

import pytest
import torch
from tiny_models import random_ids, tiny_model
from tiny_prototypes import fit_tiny
from transformers import DynamicCache, StaticCache

from nearfar.modeling import cache_registry
from nearfar.modeling.cache_h2o import H2OCache
from nearfar.modeling.cache_iam import IAMCache, IAMScorer
from nearfar.modeling.cache_kvzip import KVzipCache
from nearfar.modeling.cache_proactive import ProactiveCache
from nearfar.modeling.cache_proxykv import ProxyKVCache
from nearfar.modeling.cache_random import RandomCache
from nearfar.modeling.cache_registry import CACHES, cache_kept_pairs, cache_nbytes, make_cache, register_cache
from nearfar.modeling.cache_snapkv import SnapKVCache
from nearfar.modeling.cache_streaming_llm import StreamingLLMCache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.kvzip_scores import RepeatPrompt

PROMPT = RepeatPrompt(prefix=(), first=(3,), later=(4,), suffix=(5,))


@pytest.fixture
def model():
    return tiny_model("llama", dtype=torch.float32)


def read(model, cache, ids):
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache}, use_cache=True)
    return cache


def test_the_entries():
    names = ["full", "streaming_llm", "random", "proactive", "snapkv", "h2o", "kvzip", "iam", "proxykv"]
    assert list(CACHES)[:9] == names
    for name, entry in CACHES.items():
        assert entry.name == name and entry.label and entry.description.endswith(".")
    assert [name for name, entry in CACHES.items() if entry.needs_prototypes] == ["proactive"]
    assert [name for name, entry in CACHES.items() if entry.needs_proxy] == ["iam", "proxykv"]
    assert [name for name, entry in CACHES.items() if entry.needs_mapper] == ["proxykv"]


def test_each_is_made_with_its_options(model):
    assert type(make_cache("full", model, budget=8)) is DynamicCache
    streaming = make_cache("streaming_llm", model, budget=32, sink_tokens=2)
    assert isinstance(streaming, StreamingLLMCache) and streaming.sink_tokens == 2 and streaming.budget == 32
    rand = make_cache("random", model, retention_ratio=0.5, seed=3)
    assert isinstance(rand, RandomCache) and rand.seed == 3 and rand.retention_ratio == 0.5
    proactive = make_cache("proactive", model, budget=32, prototypes=fit_tiny(model), head="mlp")
    assert isinstance(proactive, ProactiveCache) and proactive.head == "mlp"
    snapkv = make_cache("snapkv", model, budget=32, window_tokens=8, pooling="avg")
    assert isinstance(snapkv, SnapKVCache) and (snapkv.window_tokens, snapkv.pooling) == (8, "avg")
    assert isinstance(make_cache("h2o", model, budget=32, eviction_interval=1), H2OCache)
    assert isinstance(make_cache("kvzip", model, retention_ratio=0.3), KVzipCache)
    scorer = IAMScorer(tiny_model("llama", seed=1), PROMPT)
    for name, cls in (("iam", IAMCache), ("proxykv", ProxyKVCache)):
        cache = make_cache(name, model, retention_ratio=0.3, scorer=scorer)
        assert type(cache) is cls and cache.scorer is scorer


def test_the_full_cache_knows_sliding_layers():
    cache = make_cache("full", tiny_model("gemma3"))
    assert [layer.is_sliding for layer in cache.layers] == [True, True, False, False]


def test_bad_names_and_options(model):
    with pytest.raises(ValueError, match=r"Unknown cache 'fast'; known caches: full, streaming_llm"):
        make_cache("fast", model)
    with pytest.raises(TypeError, match="takes no option 'sink_tokens'; it has none"):
        make_cache("full", model, sink_tokens=4)
    with pytest.raises(ValueError, match="exactly one of budget"):
        make_cache("random", model)


def test_registering(monkeypatch, model):
    monkeypatch.setattr(cache_registry, "CACHES", dict(CACHES))

    class Mine(RandomCache):
        pass

    entry = register_cache("mine", Mine, label="Mine", description="Pairs I like.")
    assert cache_registry.CACHES["mine"] is entry and not entry.needs_prototypes
    assert isinstance(make_cache("mine", model, budget=16), Mine)
    with pytest.raises(ValueError, match="registered already"):
        register_cache("mine", RandomCache, label="", description="")
    register_cache("mine", RandomCache, label="Mine", description="Others.", overwrite=True)
    assert type(make_cache("mine", model, budget=16)) is RandomCache
    for name in ("", "my cache", "a-b"):
        with pytest.raises(ValueError, match="identifier"):
            register_cache(name, Mine, label="", description="")


def test_counting_a_full_cache(model):
    cache = make_cache("full", model)
    assert cache_nbytes(cache) == 0 and cache_kept_pairs(cache) == 0
    read(model, cache, random_ids(2, 20))
    pairs = 2 * 3 * 2 * 20  # rows, layers, heads, tokens
    assert cache_kept_pairs(cache) == pairs
    assert cache_nbytes(cache) == pairs * 2 * 8 * 4


def test_counting_sliding_layers():
    model = tiny_model("gemma3", dtype=torch.float32)
    cache = read(model, make_cache("full", model), random_ids(1, 20))
    full, window = 2 * 2 * 20, 2 * 2 * (9 - 1)
    assert cache_kept_pairs(cache) == full + window
    other = sum(layer._sliding_window_tensor.nbytes for layer in cache.layers if layer.is_sliding)
    assert cache_nbytes(cache) == (full + window) * 2 * 8 * 4 + other
    # A pruned cache that keeps all pairs of the full layers counts the same.
    pruned = read(model, make_cache("random", model, budget=64), random_ids(1, 20))
    assert cache_kept_pairs(pruned) == full + window
    assert cache_nbytes(pruned) == pruned.nbytes()


def test_counting_a_static_cache(model):
    cache = read(model, StaticCache(config=model.config, max_cache_len=32), random_ids(1, 20))
    assert cache_kept_pairs(cache) == 3 * 2 * 20
    assert cache_nbytes(cache) >= 3 * 2 * 32 * 2 * 8 * 4  # all of its places are allocated


def test_uncountable_layers_are_named(model):
    cache = read(model, make_cache("full", model), random_ids(1, 5))
    cache.layers[0].keys = cache.layers[0].keys.flatten()
    with pytest.raises(TypeError, match="DynamicLayer cannot be counted"):
        cache_kept_pairs(cache)
