"""Proactive Cache on tiny models: which pairs it keeps, and that it behaves as every pruned cache must."""

import pytest
import torch
from tiny_models import random_ids, tiny_model
from tiny_prototypes import fit_tiny
from transformers import DynamicCache

from nearfar.modeling.budgets import keep_top_k_reference
from nearfar.modeling.cache_proactive import ProactiveCache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.prototype_scoring import HEADS
from nearfar.modeling.pruned_cache import TokenStates
from nearfar.modeling.rotary import KeyRotation


@pytest.fixture(scope="module")
def llama():
    model = tiny_model("llama")
    return model, fit_tiny(model)


@torch.no_grad()
def read(model, cache, ids, mask=None):
    more = {} if mask is None else {"attention_mask": mask}
    return model(ids, **{cache_argument(model): cache}, use_cache=True, **more).logits


def generate(model, cache, ids, tokens=12, **options):
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options
    )


def kept(cache: ProactiveCache, row: int = 0) -> list[list[list[int]]]:
    return [cache.kept_columns(layer.layer_idx, row) for layer in cache.ragged_layers]


# --- what it keeps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["uniform", "head", "global"])
@pytest.mark.parametrize("head", HEADS)
def test_keeps_the_pairs_with_the_highest_scores(llama, head, allocation):
    model, prototypes = llama
    n, budget, sinks, recent = 40, 16, 2, 5
    cache = ProactiveCache(
        model, prototypes=prototypes, budget=budget, head=head, allocation=allocation, sink_tokens=sinks,
        recent_tokens=recent,
    )  # fmt: skip
    ids = random_ids(1, n)
    read(model, cache, ids)
    full = DynamicCache()
    read(model, full, ids)
    scores = torch.stack(
        [
            prototypes.score(index, layer.keys, layer.values, torch.arange(n)[None], head)[0].float()
            for index, layer in enumerate(full.layers)
        ]
    )
    scores[..., :sinks] = torch.inf
    scores[..., n - recent :] = torch.inf
    layers, heads, _ = scores.shape
    if allocation == "uniform":
        expected = keep_top_k_reference(scores.view(-1, n), [budget] * (layers * heads))
    elif allocation == "head":
        expected = keep_top_k_reference(scores.view(layers, -1), [budget * heads] * layers)
    else:
        expected = keep_top_k_reference(scores.view(1, -1), [budget * heads * layers])
    expected = expected.view(layers, heads, n)
    assert kept(cache) == [[row.nonzero()[:, 0].tolist() for row in layer] for layer in expected]


def test_default_allocation_follows_the_head(llama):
    model, prototypes = llama
    for head, allocation in (("linear", "global"), ("prototypes", "global"), ("mlp", "global"), ("cosine", "uniform")):
        assert ProactiveCache(model, prototypes=prototypes, budget=16, head=head).allocation == allocation
    assert (
        ProactiveCache(model, prototypes=prototypes, budget=16, head="cosine", allocation="head").allocation == "head"
    )


def test_new_pairs_are_scored_when_decode_evicts(llama):
    """Fed token by token, pairs compete with those of the prompt at their own scores and true positions."""
    model, prototypes = llama
    ids = random_ids(1, 40)
    cache = ProactiveCache(
        model, prototypes=prototypes, budget=12, allocation="uniform", recent_tokens=2, eviction_interval=5
    )
    read(model, cache, ids[:, :20])
    for column in range(20, 25):
        read(model, cache, ids[:, column : column + 1])
    full = DynamicCache()
    read(model, full, ids[:, :25])
    layer = full.layers[0]  # the first layer's states do not depend on what was evicted
    scores = prototypes.score(0, layer.keys, layer.values, torch.arange(25)[None])[0].float()
    store = cache.ragged_layers[0].store
    for head, columns in enumerate(cache.kept_columns(0)):
        assert len(columns) == 12
        start = int(store.pairs.starts[head])
        torch.testing.assert_close(store.scores[start : start + 12], scores[head, columns])


# --- as every pruned cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_neox"])
def test_a_prompt_within_the_budget_generates_as_the_full_cache(family):
    model = tiny_model(family)
    cache = ProactiveCache(model, prototypes=fit_tiny(model, context_tokens=40), budget=64)
    ids = random_ids(2, 20)
    expected = generate(model, DynamicCache(config=model.config), ids)
    assert torch.equal(generate(model, cache, ids), expected)
    assert cache.get_seq_length() == 31


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_every_family_decodes_from_a_pruned_prompt(family, head):
    model = tiny_model(family)
    cache = ProactiveCache(model, prototypes=fit_tiny(model, heads=(head,)), budget=12, head=head, eviction_interval=4)
    out = generate(model, cache, random_ids(1, 50))
    assert out.shape == (1, 62) and cache.get_seq_length() == 61
    layers, heads = len(cache.ragged_layers), cache.ragged_layers[0].store.heads
    held = sum(layer.store.kept for layer in cache.ragged_layers)
    assert held <= (12 + 4) * layers * heads


@pytest.mark.parametrize("head", HEADS)
def test_left_padding_changes_nothing(llama, head):
    model, prototypes = llama
    lengths = (30, 22, 9)
    rows = [random_ids(1, length, seed=length) for length in lengths]
    padded = torch.zeros(3, 30, dtype=torch.long)
    mask = torch.zeros(3, 30, dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, 30 - row.shape[1] :] = row
        mask[index, 30 - row.shape[1] :] = 1
    settings = {"prototypes": prototypes, "budget": 12, "head": head, "allocation": "uniform"}
    batch = ProactiveCache(model, **settings)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(padded, attention_mask=mask, position_ids=positions, **{cache_argument(model): batch}, use_cache=True)
    for index, row in enumerate(rows):
        single = ProactiveCache(model, **settings)
        read(model, single, row)
        offset = 30 - row.shape[1]
        expected = [[[column + offset for column in head] for head in layer] for layer in kept(single)]
        assert kept(batch, index) == expected


def test_bytes_do_not_grow_while_decoding(llama):
    model, prototypes = llama
    cache = ProactiveCache(model, prototypes=prototypes, budget=16, eviction_interval=8)
    read(model, cache, random_ids(1, 60))
    sizes = []
    for step in range(100):
        read(model, cache, random_ids(1, 1, seed=step))
        sizes.append(cache.nbytes())
    first_cycle, later = sizes[:24], sizes[24:]
    assert max(later) <= max(first_cycle)
    assert cache.get_seq_length() == 160 and cache.kept_pairs() <= (16 + 8) * 2 * 3
    exact = cache.kept_pairs() * (2 * 8 * 8 + 8)  # float64, dimension 8, and 8 bytes beside
    assert cache.nbytes() < 3 * exact


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_held_chunks_equal_one_pass(llama, allocation):
    model, prototypes = llama
    ids = random_ids(1, 48)
    settings = {"prototypes": prototypes, "budget": 12, "allocation": allocation}
    whole, chunked = ProactiveCache(model, **settings), ProactiveCache(model, **settings)
    read(model, whole, ids)
    with chunked.hold_eviction():
        for part in ids.split(13, dim=1):
            read(model, chunked, part)
    assert kept(chunked) == kept(whole)
    next_token = random_ids(1, 1, seed=9)
    torch.testing.assert_close(read(model, chunked, next_token), read(model, whole, next_token))


def test_ingest_equals_prefill(llama):
    model, prototypes = llama
    ids, full = random_ids(2, 48), DynamicCache()
    read(model, full, ids)
    settings = {"prototypes": prototypes, "retention_ratio": 0.3}
    own, ingested = ProactiveCache(model, **settings), ProactiveCache(model, **settings).ingest(full)
    read(model, own, ids)
    assert kept(own) == kept(ingested) and kept(own, 1) == kept(ingested, 1)


def test_saved_context(llama, tmp_path):
    model, prototypes = llama
    prototypes.save_pretrained(tmp_path / "prototypes")
    cache = ProactiveCache(model, prototypes=str(tmp_path / "prototypes"), budget=12, head="mlp")
    read(model, cache, random_ids(1, 40))
    cache.save_context(tmp_path / "context.safetensors")
    loaded = ProactiveCache.load_context(tmp_path / "context.safetensors", model)
    assert loaded.settings() == cache.settings() and loaded.head == "mlp"
    ids = random_ids(1, 3, seed=4)
    assert torch.equal(read(model, loaded, ids), read(model, cache, ids))
    # Prototypes that were never saved have to be given again.
    cache = ProactiveCache(model, prototypes=prototypes, budget=12)
    read(model, cache, random_ids(1, 40))
    cache.save_context(tmp_path / "context.safetensors")
    with pytest.raises(ValueError, match="not saved: pass prototypes"):
        ProactiveCache.load_context(tmp_path / "context.safetensors", model)
    loaded = ProactiveCache.load_context(tmp_path / "context.safetensors", model, prototypes=prototypes)
    assert torch.equal(read(model, loaded, ids), read(model, cache, ids))


# --- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_before_any_work(llama, tmp_path):
    model, prototypes = llama
    with pytest.raises(ValueError, match="head must be one of linear"):
        ProactiveCache(model, prototypes=prototypes, budget=16, head="median")
    with pytest.raises(ValueError, match="budget must be at least 1"):
        ProactiveCache(model, prototypes=prototypes, budget=0)
    with pytest.raises(TypeError, match="prototypes must be"):
        ProactiveCache(model, prototypes=3, budget=16)
    with pytest.raises(FileNotFoundError, match="neither a folder"):
        ProactiveCache(model, prototypes=tmp_path / "missing", budget=16)
    with pytest.raises(ValueError, match=r"No prototypes come with the package.*fit-prototypes"):
        ProactiveCache(model, budget=16)
    linear = fit_tiny(model, heads=("linear",))
    with pytest.raises(ValueError, match="'mlp' was not fitted; these prototypes have linear"):
        ProactiveCache(model, prototypes=linear, budget=16, head="mlp")


def test_prototypes_of_another_model_are_refused(llama):
    _, prototypes = llama
    with pytest.raises(ValueError, match="this model has"):
        ProactiveCache(tiny_model("qwen3"), prototypes=prototypes, budget=16)
    other = tiny_model("llama", seed=1)
    with pytest.raises(ValueError, match="other weights"):
        ProactiveCache(other, prototypes=prototypes, budget=16)
    cache = ProactiveCache(other, prototypes=prototypes, budget=16, allow_other_model=True)
    assert cache.settings()["allow_other_model"] is True


def test_states_with_nan_are_refused(llama):
    _, prototypes = llama
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite in layer"):
        read(model, ProactiveCache(model, prototypes=prototypes, budget=12), random_ids(1, 40))


def test_the_models_own_rotary_scaling_is_used(llama):
    """A model whose rotary embedding was scaled after the fit: its keys are un-rotated as it rotates them."""
    _, prototypes = llama
    scaled = tiny_model("llama")
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    cache = ProactiveCache(scaled, prototypes=prototypes, budget=16)
    plain, values = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    positions = torch.arange(5)[None]
    as_scaled = KeyRotation(scaled.config).rotate(plain, positions, 0)
    as_fitted = prototypes.rotation.rotate(plain, positions, 0)
    assert not torch.allclose(as_scaled, as_fitted)
    found = cache.score(TokenStates(0, as_scaled, values, positions, None, 5))
    torch.testing.assert_close(found, prototypes.score(0, as_fitted, values, positions))
