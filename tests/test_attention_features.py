"""Column sums of a causal softmax against the full matrix, and a proxy's features against its eager attention."""

import math
import os

import pytest
import torch
from tiny_models import FAMILIES, random_ids, tiny_model
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nearfar.configuration.configuration_axial_mapper import state_size
from nearfar.modeling import attention_features
from nearfar.modeling.attention_features import (
    attention_and_column_sums,
    proxy_features,
    query_summed_attention,
    query_summed_attention_reference,
)
from nearfar.modeling.attention_features_kernel import summed_attention_kernel

EXACT = {"atol": 1e-10, "rtol": 0}
SCALING = 0.3


def probabilities(query, key, valid=None, window=None):
    """The whole matrix `(batch, query heads, q, n)`, and each query's log-sum-exp."""
    q, n = query.shape[2], key.shape[2]
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * SCALING
    distance = torch.arange(n - q, n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (n + 1 if window is None else window))
    seen = seen[None, None] if valid is None else seen & valid[:, None, None] & valid[:, None, n - q :, None]
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def states(batch, heads, key_heads, q, n, dim, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(batch, heads, q, dim, generator=generator, dtype=torch.float64)
    key = 2 * torch.randn(batch, key_heads, n, dim, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)


def padding(batch, n):
    """Left padding of different lengths, and one token missing in the middle of the last row."""
    valid = torch.ones(batch, n, dtype=torch.bool)
    for row in range(batch):
        valid[row, : 3 * row] = False
    valid[-1, n // 2] = False
    return valid


# -- one attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("q, n", [(41, 41), (7, 41), (1, 41)])
@pytest.mark.parametrize("elements", [1, 3000, 1 << 21])
def test_column_sums_are_those_of_the_matrix(window, padded, q, n, elements, monkeypatch):
    monkeypatch.setitem(attention_features.BLOCK_ELEMENTS, "cpu", elements)
    query, key = states(2, 4, 2, q, n, 8)
    value = torch.randn(2, 2, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    valid = padding(2, n) if padded else None
    matrix, lse = probabilities(query, key, valid, window)
    for given in (None, lse):
        sums = query_summed_attention(query, key, SCALING, valid, window, given)
        assert sums.dtype == torch.float64
        torch.testing.assert_close(sums, matrix.sum(2), **EXACT)
    out, sums = attention_and_column_sums(query, key, value, SCALING, valid, window)
    torch.testing.assert_close(out, matrix @ value.repeat_interleave(2, 1), **EXACT)
    torch.testing.assert_close(sums, matrix.sum(2), **EXACT)
    queries = torch.full((2,), q) if valid is None else valid[:, n - q :].sum(1)
    torch.testing.assert_close(sums.sum(2), queries[:, None].expand(2, 4).double(), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_float32_whatever_the_states(dtype):
    query, key = states(1, 2, 1, 20, 20, 8, dtype)
    sums = query_summed_attention(query, key, SCALING)
    assert sums.dtype == torch.float32
    expected = probabilities(query.double(), key.double())[0].sum(2)
    torch.testing.assert_close(sums.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"key": torch.ones(1, 2, 9, 4)}, "head dim"),
        ({"key": torch.ones(1, 3, 9, 8)}, "multiple of 3"),
        ({"key": torch.ones(1, 2, 4, 8)}, "only 4 keys"),
        ({"valid": torch.ones(1, 9)}, "valid must be bool"),
        ({"valid": torch.ones(1, 8, dtype=torch.bool)}, "valid must be bool"),
        ({"window": 0}, "window"),
        ({"lse": torch.ones(1, 4, 9)}, "lse"),
    ],
)
def test_shapes_that_do_not_fit(change, message):
    arguments = {"query": torch.ones(1, 4, 5, 8), "key": torch.ones(1, 2, 9, 8), "scaling": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        query_summed_attention(**arguments)


# -- the kernel -------------------------------------------------------------------------------------------------------


def check_kernel(device, dtype, shape, window, padded, with_lse, tolerance):
    query, key = (x.to(device) for x in states(*shape, dtype))
    valid = padding(shape[0], shape[4]) if padded else None
    _, lse = probabilities(query.cpu().double(), key.cpu().double(), valid, window)
    found = summed_attention_kernel(
        query,
        key,
        SCALING,
        None if valid is None else valid.to(device),
        window,
        lse.float().to(device) if with_lse else None,
    )
    expected = query_summed_attention_reference(query.cpu().double(), key.cpu().double(), SCALING, valid, window)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float16, 1e-3), (torch.bfloat16, 1e-3)])
@pytest.mark.parametrize(
    "shape", [(2, 8, 2, 700, 700, 64), (1, 4, 4, 130, 1000, 128), (2, 2, 1, 300, 300, 80), (1, 2, 1, 257, 257, 256)]
)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("padded, with_lse", [(False, False), (True, False), (False, True), (True, True)])
def test_kernel_on_a_gpu(dtype, tolerance, shape, window, padded, with_lse):
    check_kernel("cuda", dtype, shape, window, padded, with_lse, tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_attention_hands_over_its_log_sum_exp():
    for window in (None, 100):
        query, key = (x.cuda() for x in states(1, 8, 2, 200, 700, 64, torch.bfloat16))
        value = torch.randn_like(key)
        out, sums = attention_and_column_sums(query, key, value, SCALING, None, window)
        matrix, _ = probabilities(query.double().cpu(), key.double().cpu(), None, window)
        torch.testing.assert_close(sums.double().cpu(), matrix.sum(2), atol=1e-3, rtol=1e-3)
        expected = matrix @ value.double().cpu().repeat_interleave(4, 1)
        torch.testing.assert_close(out.double().cpu(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float16, 1e-4)])  # no bf16 products there
@pytest.mark.parametrize("shape", [(2, 4, 2, 150, 150, 24), (1, 2, 2, 33, 170, 8), (1, 2, 1, 1, 70, 16)])
@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("padded, with_lse", [(False, False), (True, False), (True, True)])
def test_kernel_interpreted(dtype, tolerance, shape, window, padded, with_lse):
    pytest.importorskip("triton")
    check_kernel("cpu", dtype, shape, window, padded, with_lse, tolerance)
    query, key = states(*shape, dtype)
    valid = padding(shape[0], shape[4]) if padded else None
    found = summed_attention_kernel(query, key, SCALING, valid, window, largest=True)
    matrix, _ = probabilities(query.double(), key.double(), valid, window)
    torch.testing.assert_close(found.double(), matrix.amax(2), atol=tolerance, rtol=tolerance)


# -- a proxy's prefill ------------------------------------------------------------------------------------------------


def eager_sums(model, ids, mask):
    """Column sums `(layers, batch, query heads, n)` of the model's own attention, recorded from the registry.

    transformers' eager function takes its softmax in float32 whatever the dtype; this one stays in float64.
    """
    found = {}

    def record(module, query, key, value, attention_mask, scaling=None, **kwargs):
        group = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(group, 1).mT * scaling + attention_mask
        weights = logits.softmax(-1)
        found[module.layer_idx] = (weights * mask[:, None, :, None]).sum(2)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("test_sums", record)
    ALL_MASK_ATTENTION_FUNCTIONS.register("test_sums", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    model.config._attn_implementation = "test_sums"
    try:
        with torch.no_grad():
            model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False)
    finally:
        model.config._attn_implementation = before
    return torch.stack([found[layer] for layer in range(len(found))])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 100])
def test_features_are_those_of_eager_attention(family, padded, chunk_tokens):
    model = tiny_model(family)
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    if padded:
        mask[1, :9] = 0
    found = proxy_features(model, ids, mask if padded else None, chunk_tokens)
    assert found.shape == (model.config.num_hidden_layers, 2, 4, 40) and found.dtype == torch.float64
    torch.testing.assert_close(found, eager_sums(model, ids, mask), **EXACT)
    torch.testing.assert_close(found.sum(-1), mask.sum(1)[None, :, None].expand(found.shape[:3]).double(), **EXACT)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 100])
def test_values_follow_the_column_sums(family, padded, chunk_tokens):
    """Head by head; 0 for padding."""
    model = tiny_model(family)
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    if padded:
        mask[1, :9] = 0
    given = mask if padded else None
    sums, both = (proxy_features(model, ids, given, chunk_tokens, states) for states in ("none", "values"))
    layers, size = model.config.num_hidden_layers, state_size(model.config)
    assert both.shape == (layers, 2, 4 + size, 40) and torch.equal(both[:, :, :4], sums)
    cache = DynamicCache()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model.base_model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    for layer in range(layers):
        wanted = cache.layers[layer].values.permute(0, 1, 3, 2).flatten(1, 2) * mask[:, None]
        torch.testing.assert_close(both[layer, :, 4:], wanted, **EXACT)


def test_values_of_another_size_than_said_are_refused(monkeypatch):
    model, ids = tiny_model("llama"), random_ids(1, 5)
    with pytest.raises(ValueError, match="states must be one of none, values, got 'keys'"):
        proxy_features(model, ids, states="keys")
    for size, message in ((12, "layer 0 have 16 numbers a token and the config.* 12"), (None, "different sizes")):
        monkeypatch.setattr(attention_features, "state_size", lambda config, size=size: size)
        with pytest.raises(ValueError, match=message):
            proxy_features(model, ids, states="values")
        assert proxy_features(model, ids).shape == (3, 1, 4, 5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_features_of_transformers_own_weights(attention):
    """The weights that `output_attentions` returns, whose softmax is in float32."""
    model = tiny_model("llama", attention=attention)
    ids = random_ids(1, 30)
    found = proxy_features(model, ids, chunk_tokens=8)
    eager = tiny_model("llama", attention="eager")
    with torch.no_grad():
        weights = eager(ids, output_attentions=True, use_cache=False).attentions
    torch.testing.assert_close(found, torch.stack(weights).sum(3).double(), atol=1e-4, rtol=0)


def test_model_works_as_before_and_a_base_model_serves():
    model = tiny_model("llama")
    ids = random_ids(1, 12)
    with torch.no_grad():
        before = model(ids).logits
        features = proxy_features(model, ids, chunk_tokens=5)
        assert torch.equal(model(ids).logits, before)
    torch.testing.assert_close(proxy_features(model.model, ids), features, **EXACT)
    assert not features.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_of_other_dtypes_are_float32(dtype):
    model = tiny_model("llama", dtype=dtype)
    features = proxy_features(model, random_ids(1, 20), chunk_tokens=6)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.sum(-1), torch.full(features.shape[:3], 20.0), atol=1e-3, rtol=0)


def test_only_what_is_needed_is_held(monkeypatch):
    """A sliding layer holds its window, a full one a single buffer, and one chunk needs no buffer at all."""
    made = []
    original = attention_features._make_layers
    monkeypatch.setattr(attention_features, "_make_layers", lambda reading: made.append(original(reading)) or made[-1])
    model = tiny_model("gemma3")  # window 9 in the first two layers
    proxy_features(model, random_ids(1, 60), chunk_tokens=20)
    assert [layer.keys.shape[2] for layer in made[0]] == [8, 8, 60, 60]
    assert all(layer.keys.untyped_storage().nbytes() == layer.keys.nbytes for layer in made[0])
    proxy_features(model, random_ids(1, 60), chunk_tokens=60)
    assert not any(layer.is_initialized for layer in made[1])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input_ids": torch.ones(5, dtype=torch.long)}, "input_ids"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "input_ids"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_bad_prompts(change, message):
    with pytest.raises(ValueError, match=message):
        proxy_features(tiny_model("llama"), **{"input_ids": random_ids(1, 5), **change})


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match="eval"):
        proxy_features(tiny_model("llama").train(), random_ids(1, 5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, math.inf)])
def test_features_on_a_gpu(family, dtype, tolerance):
    model = tiny_model(family)
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    expected = proxy_features(model, ids, mask)
    model = model.to("cuda", dtype)
    for given, rows in ((mask, slice(0, 2)), (None, slice(0, 1))):
        found = proxy_features(model, ids[rows], given, chunk_tokens=16)
        assert found.is_cuda and found.dtype == torch.float32
        difference = (found.cpu().double() - expected[:, rows]).abs()
        assert float(difference.max()) <= tolerance
        assert float(difference.mean()) <= 0.1  # bfloat16 activations move single probabilities
