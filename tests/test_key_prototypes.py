"""Scoring against written-out formulas in float64, fitting against known answers, files, accepted models."""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from local_hub import LocalHub
from safetensors.torch import load_file, save_file
from tiny_models import random_ids, tiny_config, tiny_model
from tiny_prototypes import SMALL, CharacterTokenizer, fit_tiny, random_texts
from transformers import DynamicCache

from nearfar.modeling import key_prototypes, prototype_fitting
from nearfar.modeling.cache_proactive import ProactiveCache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.key_prototypes import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    KeyPrototypes,
    find_prototypes,
    packaged_prototypes,
)
from nearfar.modeling.prototype_fitting import FitSettings, LayerStatistics, cut_contexts, fit_layer, kmeans
from nearfar.modeling.prototype_kernel import fused_features_available
from nearfar.modeling.prototype_scoring import HEADS, FeatureMap, PrototypesConfig, States, feature_matrix
from nearfar.modeling.rotary import KeyRotation

ROOT = Path(__file__).resolve().parent.parent
LAYERS, KV_HEADS, DIM = 3, 2, 8


def llama_rotary() -> dict:
    config = tiny_config("llama")
    names = ("rope_parameters", "head_dim", "hidden_size", "num_attention_heads")
    return {name: getattr(config, name) for name in names}


def random_prototypes(seed: int = 0, **changes) -> KeyPrototypes:
    """Unfitted prototypes with random parameters, shaped for the tiny Llama."""
    config = PrototypesConfig(
        model_type="llama", model_name="tiny", layers=list(range(LAYERS)), num_key_value_heads=KV_HEADS,
        head_dim=DIM, value_dim=DIM, heads=list(HEADS), max_position=20, num_prototypes=6, mlp_hidden=5,
        cosine_prototypes=4, rotary=llama_rotary(), **changes,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in config.tensor_shapes().items()
    }
    tensors["features.scale"] = tensors["features.scale"].abs() + 0.1
    return KeyPrototypes(config, tensors)


def states(batch: int = 2, n: int = 31, seed: int = 1, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, KV_HEADS, n, DIM, generator=generator, dtype=torch.float64).to(dtype)
    return keys, values, torch.arange(n)[None] + torch.arange(batch)[:, None]


def slow_score(prototypes: KeyPrototypes, layer: int, keys, values, positions, head: str) -> torch.Tensor:
    """One row of keys `(heads, n, dim)`: the formulas of the module's first lines, with the whole feature matrix."""
    config = prototypes.config
    t = {name: tensor[layer].double() for name, tensor in prototypes.tensors.items()}
    if head == "cosine":
        score = torch.stack(
            [
                F.cosine_similarity(keys[h][:, None], t["cosine.centres"][h][None], dim=-1).amax(1)
                for h in range(len(keys))
            ]
        ).T
    else:
        plain = KeyRotation(tiny_config("llama")).unrotate(keys[None], positions[None], layer)[0]
        x = feature_matrix(plain, values, positions, config.max_position)
        x = (x - t["features.mean"]) / t["features.scale"]
        if head == "linear":
            score = x @ t["linear.weight"] + t["linear.bias"]
        elif head == "prototypes":
            p = x @ t["prototypes.projection"]
            tau = config.bandwidth * p.shape[1]
            distance = (p[:, None] - t["prototypes.centres"][None]).square().sum(-1)
            nearness = (-(distance - distance.amin(1, keepdim=True)) / (2 * tau)).exp()  # the nearest has weight 1
            score = nearness / nearness.sum(1, keepdim=True) @ t["prototypes.importance"] + t["prototypes.bias"]
        else:
            hidden = x @ t["mlp.weight_1"] + t["mlp.bias_1"]
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
            score = hidden @ t["mlp.weight_2"] + t["mlp.bias_2"]
    return (score * t[f"{head}.calibration_scale"] + t[f"{head}.calibration_shift"]).T


# --- scoring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("block", [7, 2048])
def test_score_equals_the_formula(head, block, monkeypatch):
    monkeypatch.setattr(key_prototypes, "BLOCK_TOKENS", block)
    prototypes = random_prototypes()
    keys, values, positions = states()
    for layer in range(LAYERS):
        found = prototypes.score(layer, keys, values, positions, head)
        assert found.shape == keys.shape[:3] and found.dtype == torch.float64
        for row in range(len(keys)):
            expected = slow_score(prototypes, layer, keys[row], values[row], positions[row], head)
            torch.testing.assert_close(found[row], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_are_scored_in_float32(head, dtype):
    prototypes = random_prototypes()
    keys, values, positions = states(dtype=dtype)
    found = prototypes.score(1, keys, values, positions, head)
    exact = prototypes.score(1, keys.double(), values.double(), positions, head)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head", HEADS)
def test_cuda_agrees_with_the_cpu(head):
    prototypes = random_prototypes()
    keys, values, positions = states()
    expected = prototypes.score(1, keys, values, positions, head)
    exact = prototypes.score(1, keys.cuda(), values.cuda(), positions.cuda(), head)
    torch.testing.assert_close(exact.cpu(), expected, atol=1e-9, rtol=1e-9)
    half = prototypes.score(1, keys.cuda().bfloat16(), values.cuda().bfloat16(), positions.cuda(), head)
    rounded = prototypes.score(1, keys.bfloat16(), values.bfloat16(), positions, head)
    torch.testing.assert_close(half.cpu(), rounded, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "family, heads, dim, value_dim", [("llama", 2, 8, 8), ("gpt_neox", 4, 24, 40), ("gemma3", 1, 256, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_split_products(family, heads, dim, value_dim, dtype):
    if not fused_features_available(torch.empty(dim, device="cuda"), torch.empty(value_dim, device="cuda"), 5):
        pytest.skip("no Triton")
    model_config = tiny_config(family)
    model_config.head_dim = dim
    model_config.hidden_size, model_config.num_attention_heads = 4 * dim, 4
    rotation, layer = KeyRotation(model_config), 2
    config = PrototypesConfig(family, "", [layer], heads, dim, value_dim, ["linear"], max_position=60)
    count, outputs = config.num_features, 5
    scale = torch.rand(count) + 0.5
    fitted = (torch.randn(count), scale, torch.randn(count, outputs) * 0.1, torch.randn(outputs), config)
    features = FeatureMap(*fitted).to(torch.device("cuda"), torch.float32)
    keys = torch.randn(2, 77, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)  # as models lay them out
    values = torch.randn(2, heads, 77, value_dim, device="cuda", dtype=dtype)
    positions = 3 * torch.arange(77, device="cuda") + torch.tensor([[0], [20_000]], device="cuda")
    fused = features(States(keys, values, positions, rotation, layer))
    plain = rotation.unrotate(keys, positions, layer)
    split = features(States(plain, values, positions, None, layer))
    torch.testing.assert_close(fused, split, atol=1e-3, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fitting_on_a_gpu_is_repeatable_and_close_to_the_cpu():
    model = tiny_model("llama", dtype=torch.float32)
    on_cpu = fit_tiny(model)
    model = model.cuda()
    first, second = fit_tiny(model), fit_tiny(model)
    for name, tensor in first.tensors.items():
        assert not tensor.is_cuda and torch.equal(tensor, second.tensors[name]), name
    for name in ("linear.weight", "linear.bias", "features.mean"):
        torch.testing.assert_close(first.tensors[name], on_cpu.tensors[name], atol=1e-2, rtol=1e-2)


def test_positions_beyond_those_fitted_count_as_the_last():
    prototypes = random_prototypes()
    keys, values, _ = states(n=1)
    rotation = KeyRotation(tiny_config("llama"))
    scores = []
    for position in (20, 21, 5_000):  # the same key, cached at different positions
        place = torch.full((2, 1), position)
        scores.append(prototypes.score(0, rotation.rotate(keys, place, 0), values, place, "linear"))
    torch.testing.assert_close(scores[1], scores[0])
    torch.testing.assert_close(scores[2], scores[0])
    earlier = torch.full((2, 1), 10)
    assert not torch.allclose(prototypes.score(0, rotation.rotate(keys, earlier, 0), values, earlier), scores[0])


def test_one_row_of_positions_serves_a_batch():
    prototypes = random_prototypes()
    keys, values, _ = states()
    row = torch.arange(31)[None]
    torch.testing.assert_close(
        prototypes.score(0, keys, values, row), prototypes.score(0, keys, values, row.expand(2, 31))
    )


@pytest.mark.parametrize("head", HEADS)
def test_nan_stays_visible(head):
    keys, values, positions = states()
    keys[0, 0, 3, 2] = math.nan
    scores = random_prototypes().score(0, keys, values, positions, head)
    assert bool(scores[0, 0, 3].isnan()) and not bool(scores[1].isnan().any())


def test_score_refuses_what_was_not_fitted():
    prototypes = random_prototypes()
    keys, values, positions = states()
    with pytest.raises(ValueError, match="not fitted; these prototypes have linear"):
        prototypes.score(0, keys, values, positions, "median")
    with pytest.raises(ValueError, match="Layer 3 was not fitted"):
        prototypes.score(3, keys, values, positions)
    with pytest.raises(ValueError, match="States have 1 heads"):
        prototypes.score(0, keys[:, :1], values[:, :1], positions)


# --- features --------------------------------------------------------------------------------------------------------


def pre_rope_keys(model, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Keys as the model computes them before rotating, `(batch, heads, n, dim)`, by hooks on its own modules."""
    found: dict[int, torch.Tensor] = {}
    handles = []
    family = model.config.model_type
    layers = model.gpt_neox.layers if family == "gpt_neox" else model.model.layers
    for index, layer in enumerate(layers):
        attention = layer.attention if family == "gpt_neox" else layer.self_attn
        if family == "gpt_neox":
            source = attention.query_key_value
        else:
            source = getattr(attention, "k_norm", attention.k_proj)

        def hook(module, inputs, output, index=index):
            if family == "gpt_neox":  # heads outside, then query, key, value
                found[index] = output.view(*output.shape[:2], 4, 3, -1)[:, :, :, 1].transpose(1, 2)
            elif output.ndim == 3:
                found[index] = output.view(*output.shape[:2], -1, 8).transpose(1, 2)
            else:  # a normalised key: Gemma 3 normalises after the transpose, Qwen 3 before
                found[index] = output if output.shape[1] == 2 else output.transpose(1, 2)

        handles.append(source.register_forward_hook(hook))
    try:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            model(ids, **{cache_argument(model): cache})
    finally:
        for handle in handles:
            handle.remove()
    return {index: (keys, cache.layers[index].keys) for index, keys in found.items()}


@pytest.mark.parametrize("family, layers", [("llama", 3), ("qwen3", 3), ("gpt_neox", 3), ("gemma3", 2)])
def test_features_are_the_models_own_keys_before_rotation(family, layers):
    model = tiny_model(family)
    prototypes = fit_tiny(model, heads=("linear",))
    ids = random_ids(2, 17)
    states_by_layer = pre_rope_keys(model, ids)
    assert len(prototypes.config.layers) == layers
    for layer in prototypes.config.layers:
        before, cached = states_by_layer[layer]
        assert not torch.allclose(before, cached)
        found = prototypes.rotation.unrotate(cached, torch.arange(17)[None], layer)
        torch.testing.assert_close(found, before, atol=1e-5, rtol=1e-5)  # the model's cos and sin are float32


# --- fitting ---------------------------------------------------------------------------------------------------------


def synthetic(tokens: int = 900, seed: int = 0):
    """Statistics of one layer in which z is a known linear function of key and value dimensions."""
    generator = torch.Generator().manual_seed(seed)
    plain, values = torch.randn(2, KV_HEADS, tokens, DIM, generator=generator, dtype=torch.float64)
    plain = plain * 3.0 + 1.0
    positions = torch.arange(tokens)
    z = torch.stack([plain[0, :, 3] - 0.5 * values[1, :, 2], values[0, :, 0] + 0.2 * plain[1, :, 1]], dim=1) - 6.0
    cached = KeyRotation(tiny_config("llama")).rotate(plain[None], positions[None], 0)[0]
    attention = torch.cat([z + 0.1, 0.5 * z], dim=1)
    return LayerStatistics(cached, plain, values, positions, z, attention)


def settings(**changes) -> FitSettings:
    defaults = {"heads": HEADS, "contexts": 1, "context_tokens": 900, "chunk_tokens": 2000, "num_prototypes": 64,
                "cosine_prototypes": 4, "mlp_hidden": 16, "seed": 0}  # fmt: skip
    return FitSettings(**{**defaults, **changes})


def fitted_layer(statistics: LayerStatistics, **changes) -> tuple[KeyPrototypes, dict[str, float]]:
    chosen = settings(**changes)
    config = PrototypesConfig(
        model_type="llama", model_name="tiny", layers=[0], num_key_value_heads=KV_HEADS, head_dim=DIM, value_dim=DIM,
        heads=list(chosen.heads), max_position=int(statistics.positions.max()), num_prototypes=chosen.num_prototypes,
        mlp_hidden=chosen.mlp_hidden, cosine_prototypes=chosen.cosine_prototypes, rotary=llama_rotary(),
    )  # fmt: skip
    tensors, correlations = fit_layer(statistics, config, chosen)
    return KeyPrototypes(config, {name: tensor[None] for name, tensor in tensors.items()}), correlations


def test_known_importance_is_recovered(monkeypatch):
    monkeypatch.setattr(prototype_fitting, "MLP_BATCH", 16)  # so that few tokens still make a few hundred steps
    prototypes, correlations = fitted_layer(synthetic())
    fresh = synthetic(seed=7)
    for head, least in (("linear", 0.998), ("prototypes", 0.9), ("mlp", 0.9)):
        scores = prototypes.score(0, fresh.cached_keys[None], fresh.values[None], fresh.positions[None], head)[0].T
        both = torch.stack([scores.flatten(), fresh.importance.flatten()])
        assert torch.corrcoef(both)[0, 1] > least, head
        assert correlations[head] > least
    linear = prototypes.score(0, fresh.cached_keys[None], fresh.values[None], fresh.positions[None])[0].T
    assert (linear - fresh.importance).abs().mean() < 0.05
    assert correlations["cosine"] < 0.5


def test_calibration_gives_mean_and_spread_of_the_target():
    seen = synthetic()
    prototypes, _ = fitted_layer(seen)
    for head in HEADS:
        scores = prototypes.score(0, seen.cached_keys[None], seen.values[None], seen.positions[None], head)[0].T
        torch.testing.assert_close(scores.mean(0), seen.importance.mean(0), atol=1e-4, rtol=0)
        torch.testing.assert_close(scores.std(0), seen.importance.std(0), atol=1e-4, rtol=1e-4)


def test_importances_are_solved_for():
    """The prototype head's w minimises squared error plus a penalty: its gradient vanishes."""
    seen = synthetic()
    prototypes, _ = fitted_layer(seen, heads=("prototypes",))
    t = {name: tensor[0].double() for name, tensor in prototypes.tensors.items()}
    x = (feature_matrix(seen.plain_keys, seen.values, seen.positions, 10**6) - t["features.mean"]) / t[
        "features.scale"
    ]
    points = x @ t["prototypes.projection"]
    torch.testing.assert_close(points.std(0), torch.ones(3 * KV_HEADS, dtype=torch.float64), atol=1e-3, rtol=0)
    nearness = prototype_fitting.prototype_nearness(points, t["prototypes.centres"], 0.1 * 3 * KV_HEADS)
    z = seen.importance - seen.importance.mean(0)
    gradient = nearness.T @ (nearness @ t["prototypes.importance"] - z) + t["prototypes.importance"]
    assert gradient.abs().max() < 1e-3


def test_constant_features_and_targets_do_no_harm():
    seen = synthetic()
    seen.values[0] = 0.0  # zero vectors: their log norm is constant
    seen.plain_keys[..., 0] = 100.0
    seen.importance[:, 1] = -3.0
    prototypes, _ = fitted_layer(seen)
    for head in HEADS:
        scores = prototypes.score(0, seen.cached_keys[None], seen.values[None], seen.positions[None], head)
        assert bool(torch.isfinite(scores).all())
        torch.testing.assert_close(scores[0, 1], torch.full_like(scores[0, 1], -3.0), atol=1e-3, rtol=0)


def test_fit_is_repeatable_and_leaves_the_global_generator_alone():
    model = tiny_model("llama", dtype=torch.float32)
    state = torch.get_rng_state()
    first, second = fit_tiny(model), fit_tiny(model)
    assert torch.equal(torch.get_rng_state(), state)
    other = fit_tiny(model, seed=1)
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name
    assert not torch.equal(first.tensors["mlp.weight_1"], other.tensors["mlp.weight_1"])
    assert not torch.equal(first.tensors["cosine.centres"], other.tensors["cosine.centres"])


def test_fit_skips_the_chat_header_and_describes_itself():
    model = tiny_model("gemma3")
    prototypes = fit_tiny(model, heads=("linear", "cosine"), model_name="me/tiny")
    config = prototypes.config
    assert config.layers == [2, 3] and config.heads == ["linear", "cosine"]
    assert config.model_type == "gemma3_text" and config.model_name == "me/tiny"
    assert config.fit["tokens"] == 180 and config.fit["contexts"] == 3 and config.fit["dtype"] == "float64"
    assert config.max_position == len("<user>") + 60 - 1
    assert set(config.fit["correlation_with_importance"]) == {"linear", "cosine"}


def test_fit_statistics(monkeypatch):
    """What is gathered equals the reconstruction pass on prefix + context, without the prefix."""
    model, seen = tiny_model("llama"), []
    original = prototype_fitting._joined
    monkeypatch.setattr(prototype_fitting, "_joined", lambda *a: seen.append(original(*a)) or seen[-1])
    fit_tiny(model, contexts=1)
    tokenizer = CharacterTokenizer()
    prompt = prototype_fitting.RepeatPrompt.from_tokenizer(tokenizer)
    ids = [*prompt.prefix, *tokenizer(random_texts()[0]).input_ids[1:61]]
    found = prototype_fitting.reconstruction_scores(
        model, ids, prompt, prefix_length=6, sink_tokens=4, prefill_statistics=True
    )
    for layer, statistics in enumerate(seen):
        assert statistics.positions.tolist() == list(range(6, 66))
        torch.testing.assert_close(statistics.importance.exp(), found.scores[layer][0, :, 6:].T.clamp_min(1e-6))
        queries_that_saw = torch.arange(66, 0, -1)[6:] / 66
        mass = found.attention_mass[layer][0, :, 6:].T / queries_that_saw[:, None]
        torch.testing.assert_close(statistics.attention.exp()[:, 2:], mass.clamp_min(1e-6))
        torch.testing.assert_close(statistics.attention.exp()[:, :2], found.attention_max[layer][0, :, 6:].T)


def test_kmeans_finds_separate_clouds():
    generator = torch.Generator().manual_seed(0)
    truth = torch.tensor([[10.0, 0.0], [0.0, 10.0], [-10.0, 0.0], [0.0, -10.0]], dtype=torch.float64)
    points = (truth[:, None] + 0.1 * torch.randn(4, 200, 2, generator=generator, dtype=torch.float64)).reshape(
        1, -1, 2
    )
    for seed in range(20):  # a start with a point in every cloud leads to the clouds
        centres = kmeans(points, 4, torch.Generator().manual_seed(seed))[0]
        distance = torch.cdist(truth, centres).amin(1)
        if distance.max() < 0.1:
            break
    else:
        pytest.fail("k-means never found the four clouds")
    unit = F.normalize(points, dim=-1)
    norms = kmeans(torch.cat([unit, unit]), 4, generator, spherical=True).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_kmeans_uses_a_sample_of_many_points(monkeypatch):
    monkeypatch.setattr(prototype_fitting, "KMEANS_TOKENS", 50)
    centres = kmeans(torch.randn(2, 500, 3), 8, torch.Generator().manual_seed(0))
    assert centres.shape == (2, 8, 3) and bool(torch.isfinite(centres).all())


def test_contexts_take_turns_and_short_texts_are_joined():
    class Words:
        def __call__(self, text, add_special_tokens=True, verbose=True):
            return type("E", (), {"input_ids": [0] if text == "\n\n" else [int(word) for word in text.split()]})

    def numbers(start, count):
        return " ".join(str(start + i) for i in range(count))

    texts = [numbers(100, 17), numbers(200, 6), numbers(300, 8), numbers(400, 5), numbers(500, 6)]
    assert cut_contexts(Words(), texts, settings(contexts=5, context_tokens=8, heads=("linear",))) == [
        [*range(100, 108)],
        [*range(300, 308)],
        [*range(108, 116)],
        [*range(200, 206), 0, 400],
        [*range(401, 405), 0, *range(500, 503)],
    ]
    with pytest.raises(ValueError, match="give 8 tokens to fit on; at least 20"):
        cut_contexts(Words(), texts, settings(contexts=1, context_tokens=8, heads=("linear",)))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"heads": ("median",)}, ValueError, "heads must be some of"),
        ({"heads": ()}, ValueError, "heads must be some of"),
        ({"contexts": 0}, ValueError, "contexts"),
        ({"context_tokens": 2.5}, ValueError, "context_tokens"),
        ({"context_tokens": 400}, ValueError, "512 positions: use context_tokens of at most 2"),
        ({"texts": "one long string"}, TypeError, "list of strings"),
        ({"texts": [b"bytes"]}, TypeError, "list of strings"),
        ({"texts": []}, ValueError, "give 0 tokens"),
        ({"texts": ["short"]}, ValueError, "give 5 tokens"),
    ],
)
def test_fit_refuses_bad_input(change, error, message):
    arguments = {**SMALL, "texts": random_texts(length=500), **change}
    texts = arguments.pop("texts")
    with pytest.raises(error, match=message):
        KeyPrototypes.fit(tiny_model("llama"), CharacterTokenizer(), texts, **arguments)


def test_fit_refuses_a_model_with_nan():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"layer \d are not finite"):
        fit_tiny(model)


# --- files -----------------------------------------------------------------------------------------------------------


def test_save_and_load_are_identical(tmp_path):
    prototypes = fit_tiny(tiny_model("llama"))
    prototypes.save_pretrained(tmp_path / "p")
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [WEIGHTS_FILE, CONFIG_FILE]
    loaded = KeyPrototypes.from_pretrained(tmp_path / "p")
    assert loaded.config == prototypes.config and loaded.source == str(tmp_path / "p")
    keys, values, positions = states()
    for head in HEADS:
        assert torch.equal(
            loaded.score(1, keys, values, positions, head), prototypes.score(1, keys, values, positions, head)
        )
    loaded.save_pretrained(tmp_path / "q")
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        assert (tmp_path / "p" / name).read_bytes() == (tmp_path / "q" / name).read_bytes()
    # Over an older set: replaced, and nothing else is left behind.
    fit_tiny(tiny_model("llama"), heads=("linear",)).save_pretrained(tmp_path / "p")
    assert KeyPrototypes.from_pretrained(str(tmp_path / "p")).config.heads == ["linear"]
    assert len(list((tmp_path / "p").iterdir())) == 2


def test_an_interrupted_save_leaves_the_old_files(tmp_path, monkeypatch):
    prototypes = random_prototypes()
    prototypes.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(key_prototypes, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        random_prototypes(1).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_damaged_files_are_refused(tmp_path):
    prototypes = random_prototypes()
    prototypes.save_pretrained(tmp_path)
    whole = load_file(tmp_path / WEIGHTS_FILE)

    def refuse(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            KeyPrototypes.from_pretrained(tmp_path)

    save_file({**whole, "linear.bias": whole["linear.bias"] * math.nan}, tmp_path / WEIGHTS_FILE)
    refuse("'linear.bias' holds NaN")
    save_file({name: tensor for name, tensor in whole.items() if name != "linear.bias"}, tmp_path / WEIGHTS_FILE)
    refuse("lack the tensor 'linear.bias'")
    save_file({**whole, "linear.bias": whole["linear.bias"][:1].clone()}, tmp_path / WEIGHTS_FILE)
    refuse("'linear.bias' has shape")
    (tmp_path / WEIGHTS_FILE).write_bytes(b"\x00" * 40)
    refuse("damaged")
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=WEIGHTS_FILE):
        KeyPrototypes.from_pretrained(tmp_path)
    save_file(whole, tmp_path / WEIGHTS_FILE)
    content = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**content, "format": "other"}))
    refuse("not of format")
    (tmp_path / CONFIG_FILE).write_text("{")
    refuse("not valid JSON")
    del content["layers"]
    (tmp_path / CONFIG_FILE).write_text(json.dumps(content))
    refuse("damaged.*layers")


def test_what_is_no_folder_and_no_id_is_refused(tmp_path):
    for name in (tmp_path / "missing", str(tmp_path / "missing"), "no-such-set", "./a/b"):
        with pytest.raises(FileNotFoundError, match="neither a folder"):
            KeyPrototypes.from_pretrained(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        random_prototypes().save_pretrained(tmp_path / "file")


HUB_ROUND_TRIP = """
import sys
import torch
from nearfar.modeling.key_prototypes import KeyPrototypes
prototypes = KeyPrototypes.from_pretrained(sys.argv[1])
print(prototypes.push_to_hub("protos", token="t"))
loaded = KeyPrototypes.from_pretrained("me/protos", revision="main")
assert loaded.source == "me/protos" and loaded.config == prototypes.config
assert all(torch.equal(tensor, prototypes.tensors[name]) for name, tensor in loaded.tensors.items())
prototypes.push_to_hub("me/protos", token="t")  # into a repository that is there
try:
    KeyPrototypes.from_pretrained("me/other")
except OSError as error:
    print(type(error).__name__)
"""


def test_hub(tmp_path):
    """The real client against a Hub on this machine; in its own process, as the client reads its settings once."""
    random_prototypes().save_pretrained(tmp_path / "saved")
    with LocalHub() as hub:
        environment = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
        environment |= {
            "HF_ENDPOINT": hub.url,
            "NO_PROXY": "127.0.0.1",
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(ROOT),
        }
        result = subprocess.run(
            [sys.executable, "-c", HUB_ROUND_TRIP, str(tmp_path / "saved")],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        url, error = result.stdout.split()
        assert "/me/protos/commit/" in url and error == "RepositoryNotFoundError"
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            assert hub.files("me/protos")[name] == (tmp_path / "saved" / name).read_bytes()


# --- which model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_neox", "mistral"])
def test_another_shape_is_refused(family):
    prototypes = fit_tiny(tiny_model("llama"), heads=("cosine",))
    with pytest.raises(ValueError, match=r"fitted on 'llama' with .*this model has .*fit-prototypes"):
        prototypes.check_compatible(tiny_model(family), allow_other_model=True)


def test_other_weights_are_refused_unless_allowed():
    prototypes = fit_tiny(tiny_model("llama"), heads=("linear",))
    other = tiny_model("llama", seed=1)
    with pytest.raises(ValueError, match=r"other weights.*allow_other_model=True"):
        prototypes.check_compatible(other)
    prototypes.check_compatible(other, allow_other_model=True)
    prototypes.check_compatible(other.config)  # a configuration only tells the shape


@pytest.mark.parametrize("change", ["bfloat16", "float16", "noise", "resized"])
def test_casts_and_light_changes_of_the_model_pass(change):
    model = tiny_model("llama")
    prototypes = fit_tiny(model, heads=("linear",))
    if change == "noise":  # as 4-bit quantisation leaves it
        weight = model.get_input_embeddings().weight
        with torch.no_grad():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    elif change != "resized":
        model = model.to(getattr(torch, change))
    prototypes.check_compatible(model)


def test_not_a_model():
    with pytest.raises(TypeError, match="transformers model"):
        random_prototypes().check_compatible(torch.nn.Linear(2, 2))


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A stand-in for the package's folder of prototypes, holding those of one tiny model."""
    model = tiny_model("llama")
    fit_tiny(model, heads=("linear",)).save_pretrained(tmp_path / "tiny-llama")
    monkeypatch.setattr(key_prototypes, "_packaged", lambda: {"tiny-llama": tmp_path / "tiny-llama"})
    key_prototypes._load_packaged.cache_clear()
    yield model
    key_prototypes._load_packaged.cache_clear()


def test_packaged_prototypes_are_found_by_the_model(packaged):
    assert packaged_prototypes() == ["tiny-llama"]
    found = find_prototypes(packaged)
    assert found.source == "tiny-llama" and KeyPrototypes.from_pretrained("tiny-llama") is found
    assert find_prototypes(packaged.to(torch.bfloat16)) is found
    with pytest.raises(ValueError, match=r"pass the model itself, or prototypes='tiny-llama'"):
        find_prototypes(packaged.config)
    for other in (tiny_model("llama", seed=1), tiny_model("qwen3")):
        with pytest.raises(ValueError, match=r"No prototypes come with the package.*tiny-llama.*fit-prototypes"):
            find_prototypes(other)


def test_the_shipped_prototypes_are_whole_and_small():
    assert "smollm2-135m-instruct" in packaged_prototypes()
    prototypes = KeyPrototypes.from_pretrained("smollm2-135m-instruct")
    config = prototypes.config
    assert config.heads == list(HEADS) and config.layers == list(range(30))
    assert (config.num_key_value_heads, config.head_dim) == (3, 64)
    folder = key_prototypes._packaged()["smollm2-135m-instruct"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 5_000_000
    assert config.fingerprint and config.model_name == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_prototypes_can_be_pickled_after_use() -> None:
    model = tiny_model()
    prototypes = fit_tiny(model)
    cache = ProactiveCache(model, prototypes=prototypes, budget=8)
    with torch.no_grad():
        model(random_ids(1, 20), **{cache_argument(model): cache})
    again = pickle.loads(pickle.dumps(prototypes))
    keys, values = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    positions = torch.arange(5)[None]
    assert torch.equal(again.score(1, keys, values, positions), prototypes.score(1, keys, values, positions))
