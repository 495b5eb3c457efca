"""DARCache: prefill, chunks and decoding against one forward pass without cache; what it holds; what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dar_models import tiny_dar, tiny_dar_config
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM

from nearfar import DARCache, DARForCausalLM
from nearfar.modeling.cache_dar import DARCacheLayer
from nearfar.modeling.dar_attention import FarPairs
from nearfar.modeling.dar_cached_attention import absorbed_decode, far_rotary_keys
from nearfar.modeling.dar_decode_kernel import decode_kernel_available, fused_decode, fused_step, step_kernel_available
from nearfar.modeling.dar_plan import AttentionPlan, plan_attention
from nearfar.modeling.modeling_dar import DARForSequenceClassification
from nearfar.modeling.rotary_halves import rotate_halves

LENGTH = 33
CHUNKS = ([25] + [1] * 8, [1] * LENGTH, [6] * 5 + [3], [7] * 4 + [5], [8] * 4 + [1], [3, 1, 1, 20, 1, 7], [LENGTH])
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_ids(batch: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """As `generate` numbers tokens. Angles are float32, so that other numbers would differ by more than is tested."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def reference(model: DARForCausalLM, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits by the dense formula, without cache."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    logits = model(ids, use_cache=False, **options).logits
    model.set_attn_implementation(before)
    return logits


@torch.no_grad()
def through_cache(model: DARForCausalLM, ids: torch.Tensor, cache: DARCache, chunks: list[int]) -> torch.Tensor:
    outputs, start = [], 0
    for chunk in chunks:
        outputs.append(model(ids[:, start : start + chunk], past_key_values=cache).logits)
        start += chunk
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("far_cache", ["fast", "small"])
@pytest.mark.parametrize("window", [0, 1, 4, 7, 16, LENGTH - 1, LENGTH, 64])
@pytest.mark.parametrize("static", [False, True])
def test_cached_equals_uncached(far_cache: str, window: int, static: bool) -> None:
    model = tiny_dar(window_size=window)
    ids = random_ids()
    wanted = reference(model, ids)
    for chunks in CHUNKS:
        cache = DARCache(model, far_cache=far_cache, max_cache_len=40 if static else None)
        assert (through_cache(model, ids, cache, chunks) - wanted).abs().max() < 1e-10
        assert int(cache.get_seq_length()) == LENGTH


@pytest.mark.parametrize("far_cache", ["fast", "small"])
@pytest.mark.parametrize("rotary", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "sigmoid"])
def test_rotary_shares_and_biases(far_cache: str, rotary: float, bias: bool, activation: str | None) -> None:
    model = tiny_dar(rotary_pct=rotary, attention_bias=bias, bottleneck_activation=activation, far_cache=far_cache)
    ids = random_ids()
    for chunks in CHUNKS[:4]:
        found = through_cache(model, ids, DARCache(model), chunks)
        assert (found - reference(model, ids)).abs().max() < 1e-10


def test_uniform_is_a_window_of_nothing() -> None:
    uniform = tiny_dar(uniform_bottleneck=True)
    none = tiny_dar(window_size=0)
    ids = random_ids()
    assert torch.equal(reference(uniform, ids), reference(none, ids))
    assert (through_cache(uniform, ids, DARCache(uniform), CHUNKS[0]) - reference(uniform, ids)).abs().max() < 1e-10


@pytest.mark.parametrize("far_cache", ["fast", "small"])
@pytest.mark.parametrize("window", [0, 1, 7, 64])
@pytest.mark.parametrize("static", [False, True])
def test_left_padding(far_cache: str, window: int, static: bool) -> None:
    """Rows of unequal lengths, prefilled at once or in chunks, decode as each would alone."""
    model = tiny_dar(window_size=window)
    ids = random_ids(3)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :17] = 0, 0
    for chunks in ([25] + [1] * 8, [9, 9, 9, 1, 1, 4]):
        cache = DARCache(model, far_cache=far_cache, max_cache_len=48 if static else None)
        outputs, start = [], 0
        for chunk in chunks:
            stop = start + chunk
            with torch.no_grad():
                seen = {"attention_mask": mask[:, :stop], "position_ids": positions_of(mask)[:, start:stop]}
                outputs.append(model(ids[:, start:stop], **seen, past_key_values=cache).logits)
            start = stop
        logits = torch.cat(outputs, 1)
        for row in range(3):
            real = mask[row].bool()
            alone = reference(model, ids[row : row + 1, real])
            assert (logits[row, real] - alone[0]).abs().max() < 1e-10


def test_eager_with_a_cache_is_the_same() -> None:
    """And returns the weights, of which each real token's sum to one."""
    model = tiny_dar()
    ids = random_ids()
    wanted = reference(model, ids)
    model.set_attn_implementation("eager")
    cache = DARCache(model)
    with torch.no_grad():
        first = model(ids[:, :20], past_key_values=cache)
        second = model(ids[:, 20:], past_key_values=cache, output_attentions=True)
    assert (torch.cat([first.logits, second.logits], 1) - wanted).abs().max() < 1e-10
    assert second.attentions[0].shape == (2, 4, 13, 33)
    assert torch.allclose(second.attentions[0].sum(-1), torch.ones(2, 4, 13, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------------------------
# generate
# ---------------------------------------------------------------------------------------------------------------------


def generate(model: DARForCausalLM, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(ids, **settings)


@pytest.mark.parametrize("far_cache", ["fast", "small"])
def test_generate_equals_generate_without_cache(far_cache: str) -> None:
    model = tiny_dar(far_cache=far_cache)
    ids = random_ids(2, 12)
    wanted = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids), wanted)
    assert torch.equal(generate(model, ids, past_key_values=DARCache(model)), wanted)
    for given in ("past_key_values", "cache"):
        cache = DARCache(model)
        model(ids[:, :10], past_key_values=cache)
        assert torch.equal(generate(model, ids, **{given: cache}), wanted)
    assert torch.equal(generate(model, ids, cache_implementation="static"), wanted)
    assert torch.equal(generate(model, ids, past_key_values=DARCache(model, max_cache_len=30)), wanted)


def test_generate_with_beams() -> None:
    model = tiny_dar()
    ids = random_ids(2, 12)
    for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        wanted = generate(model, ids, use_cache=False, **options)
        assert torch.equal(generate(model, ids, **options), wanted)
    small = tiny_dar(far_cache="small")
    assert torch.equal(generate(small, ids, num_beams=3), generate(small, ids, num_beams=3, use_cache=False))


def test_generate_with_left_padding() -> None:
    model = tiny_dar()
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    ids[0, :6], mask[0, :6] = 0, 0
    together = generate(model, ids, attention_mask=mask)
    assert torch.equal(together[0, 6:], generate(model, ids[:1, 6:])[0])
    assert torch.equal(together[1], generate(model, ids[1:])[0])
    static = generate(model, ids, attention_mask=mask, cache_implementation="static")
    assert torch.equal(static, together)


def test_assisted_generation() -> None:
    model, assistant = tiny_dar(), tiny_dar(seed=3)
    ids = random_ids(1, 25)
    wanted = generate(model, ids)
    assert torch.equal(generate(model, ids, assistant_model=assistant), wanted)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=4), wanted)


def test_continuing_a_conversation() -> None:
    model = tiny_dar()
    ids = random_ids(1, 40)
    cache = DARCache(model)
    first = generate(model, ids[:, :20], past_key_values=cache, max_new_tokens=5)
    longer = torch.cat([first, ids[:, 20:]], 1)
    assert torch.equal(generate(model, longer, past_key_values=cache), generate(model, longer, use_cache=False))


def test_other_caches_are_refused() -> None:
    model = tiny_dar()
    with pytest.raises(TypeError, match="DARCache"):
        model(random_ids(), past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="offloaded"):
        generate(model, random_ids(), cache_implementation="offloaded")
    with pytest.raises(TypeError, match="DAR model"):
        DARCache(GPTNeoXConfig())
    with pytest.raises(ValueError, match="window_size=None"):
        DARCache(tiny_dar_config(window_size=None))
    with pytest.raises(ValueError, match="far_cache"):
        DARCache(model, far_cache="medium")
    with pytest.raises(ValueError, match="max_cache_len"):
        DARCache(model, max_cache_len=0)
    with pytest.raises(ValueError, match="holds 20 tokens"), torch.no_grad():
        model(random_ids(), past_key_values=DARCache(model, max_cache_len=20))


# ---------------------------------------------------------------------------------------------------------------------
# Rows and roll-back
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far_cache", ["fast", "small"])
@pytest.mark.parametrize("static", [False, True])
def test_rows_can_be_chosen_and_repeated(far_cache: str, static: bool) -> None:
    model = tiny_dar(far_cache=far_cache)
    ids = random_ids(3)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cache = DARCache(model, max_cache_len=40 if static else None)
    with torch.no_grad():
        positions = positions_of(mask)
        model(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions[:, :30], past_key_values=cache)
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 2, 1])), [2, 2, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        chosen = copy.deepcopy(cache)
        change(chosen)
        with torch.no_grad():
            steps = [(ids[rows, t : t + 1], positions[rows, t : t + 1]) for t in (30, 31, 32)]
            found = [model(step, position_ids=place, past_key_values=chosen).logits for step, place in steps]
        logits = torch.cat(found, 1)
        for place, row in enumerate(rows):
            wanted = reference(model, ids[row : row + 1, mask[row].bool()])[0, -3:]
            assert (logits[place] - wanted).abs().max() < 1e-10


@pytest.mark.parametrize("window", [0, 1, 7, 64])
@pytest.mark.parametrize("far_cache", ["fast", "small"])
def test_crop_takes_back_what_was_recorded(window: int, far_cache: str) -> None:
    model = tiny_dar(window_size=window, far_cache=far_cache)
    ids, other = random_ids(), random_ids(seed=5)
    cache = DARCache(model)
    through_cache(model, ids[:, :20], cache, [20])
    cache.activate_past_recording()
    for remove in (0, 1, 5, 9):  # each time nine wrong tokens, of which some are taken back and some were right
        wrong = torch.cat([ids[:, 20 : 29 - remove], other[:, :remove]], 1)
        through_cache(model, wrong, cache, [4, 1, 4])
        cache.crop(-remove)
        found = through_cache(model, ids[:, 29 - remove :], copy.deepcopy(cache), [1] * (LENGTH - 29 + remove))
        assert (found - reference(model, ids)[:, 29 - remove :]).abs().max() < 1e-10
        cache.crop(-(9 - remove))


def test_crop_refuses_what_is_gone() -> None:
    model = tiny_dar(window_size=7)
    ids = random_ids()
    cache = DARCache(model)
    through_cache(model, ids, cache, [LENGTH])
    before = cache.layers[0].count
    for wrong, message in ((-2, "activate_past_recording"), (-50, "has seen 33"), (3, "crop takes minus")):
        with pytest.raises(ValueError, match=message):
            cache.crop(wrong)
    assert cache.layers[0].count == before
    cache.crop(0)
    static = DARCache(model, max_cache_len=40)
    through_cache(model, ids, static, [LENGTH])
    with pytest.raises(ValueError, match="static"):
        static.crop(-1)
    with pytest.raises(ValueError, match="static"):
        static.activate_past_recording()


def test_crop_refuses_padding() -> None:
    """Rows that got padding in the columns to be removed would lose real tokens instead."""
    model = tiny_dar()
    ids, mask = random_ids(2, 24), torch.ones(2, 24, dtype=torch.long)
    cache = DARCache(model)
    through_cache(model, ids[:, :20], cache, [20])
    cache.activate_past_recording()
    mask[1, 22:] = 0
    with torch.no_grad():
        model(ids[:, 20:], attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="padding"):
        cache.crop(-2)
    through_cache(model, ids[:, :3], cache, [3])
    cache.crop(-3)
    with pytest.raises(ValueError, match="padding"):
        cache.crop(-1)


@pytest.mark.parametrize("far_cache", ["fast", "small"])
def test_a_static_cache_refuses_what_does_not_fit(far_cache: str) -> None:
    model = tiny_dar(far_cache=far_cache)
    ids = random_ids()
    cache = DARCache(model, max_cache_len=20)
    found = through_cache(model, ids[:, :20], cache, [14] + [1] * 6)
    assert (found - reference(model, ids[:, :20])).abs().max() < 1e-10
    with pytest.raises(ValueError, match="holds 20 tokens"), torch.no_grad():
        model(ids[:, 20:21], past_key_values=cache)
    with pytest.raises(ValueError, match="may need"):
        generate(model, ids[:, :12], past_key_values=DARCache(model, max_cache_len=17))


@pytest.mark.parametrize("far_cache", ["fast", "small"])
def test_padding_takes_no_room_in_a_static_cache(far_cache: str) -> None:
    """Full to the last column, a row's padding must not write over a real token."""
    model = tiny_dar(far_cache=far_cache)
    ids, mask = random_ids(2, 16), torch.ones(2, 16, dtype=torch.long)
    mask[0, 14:], mask[1, 6:10] = 0, 0
    results = []
    for room in (None, 14):
        cache, start, outputs = DARCache(model, max_cache_len=room), 0, []
        for chunk in (6, 6, 1, 1, 1, 1):
            seen = slice(start, start + chunk)
            options = {"attention_mask": mask[:, : start + chunk], "position_ids": positions_of(mask)[:, seen]}
            with torch.no_grad():
                outputs.append(model(ids[:, seen], past_key_values=cache, **options).logits)
            start += chunk
        results.append(torch.cat(outputs, 1)[mask[:, :start].bool()])
    assert (results[0] - results[1]).abs().max() < 1e-10


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("far_cache", ["fast", "small"])
def test_inference_mode_and_no_grad_can_take_turns(static: bool, far_cache: str) -> None:
    model = tiny_dar(far_cache=far_cache)
    ids = random_ids()
    cache = DARCache(model, max_cache_len=40 if static else None)
    outputs, start = [], 0
    for index, chunk in enumerate([20, 1, 5, 1, 1, 5]):
        with torch.inference_mode() if index % 2 == 0 else torch.no_grad():
            outputs.append(model(ids[:, start : start + chunk], past_key_values=cache).logits)
            cache.reorder_cache(torch.tensor([0, 1]))
        start += chunk
    assert (torch.cat(outputs, 1) - reference(model, ids)).abs().max() < 1e-10


def test_no_tokens_are_refused() -> None:
    model, cache = tiny_dar(), DARCache(tiny_dar())
    with pytest.raises(ValueError, match=r"shape \(1, 0\) and must have at least one token"):
        model(torch.zeros(1, 0, dtype=torch.long))
    model.generate(random_ids(1, 20), past_key_values=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
    with pytest.raises(ValueError, match=r"reset\(\) the cache before another text"):
        model.generate(random_ids(1, 7), past_key_values=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)


def test_a_cache_of_another_model_is_refused() -> None:
    model = tiny_dar(window_size=3)
    with pytest.raises(ValueError, match="window 7"):
        model(random_ids(), past_key_values=DARCache(tiny_dar_config(window_size=7)))
    with pytest.raises(ValueError, match="2 layers"):
        model(random_ids(), past_key_values=DARCache(tiny_dar_config(window_size=3, num_hidden_layers=2)))


def test_a_first_token_alone_has_exact_gradients() -> None:
    model = tiny_dar()
    weight = model.gpt_neox.layers[0].attention.query_key_value.weight
    ids = random_ids(2, 1)
    found, wanted = (
        torch.autograd.grad(model(ids, use_cache=use).logits.square().sum(), weight)[0] for use in (True, False)
    )
    assert wanted.abs().max() > 0
    assert (found - wanted).abs().max() < 1e-10


@pytest.mark.parametrize("static", [False, True])
def test_reset_forgets_text_and_weights(static: bool) -> None:
    model = tiny_dar()
    ids = random_ids()
    cache = DARCache(model, max_cache_len=40 if static else None)
    through_cache(model, random_ids(seed=4), cache, [LENGTH])
    cache.reset()
    with torch.no_grad():  # a step of training between two prompts
        for layer in model.gpt_neox.layers:
            layer.attention.bottleneck_up.weight.mul_(0.5)
    assert (through_cache(model, ids, cache, CHUNKS[0]) - reference(model, ids)).abs().max() < 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# What it holds
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("far_cache", "share"), [("fast", 4), ("small", 8)])
def test_bytes_of_a_far_token(far_cache: str, share: int) -> None:
    """A quarter of the width and a quarter of the dimensions rotary: 1/4 or 1/8 of keys and values."""
    model = tiny_dar(hidden_size=64, bottleneck_size=None, rotary_pct=0.25, dtype=torch.bfloat16, far_cache=far_cache)
    cache = DARCache(model)
    ordinary = 3 * 2 * 64 * 2  # layers, keys and values, width, bytes
    through_cache(model, random_ids(1, 200), cache, [200])
    positions = 4 if far_cache == "small" else 0  # one number for all layers
    assert cache.bytes_per_far_token() == ordinary / share + positions
    held, before = cache.layers[0].capacity, cache.nbytes()
    with torch.no_grad():
        model(random_ids(1, 2000), past_key_values=cache)
    grown = cache.layers[0].capacity - held
    # The buffers grew by nothing but far tokens; positions have a room of their own.
    assert cache.nbytes() - before == pytest.approx(grown * cache.bytes_per_far_token(), rel=0.02)
    with pytest.raises(ValueError, match="empty"):
        DARCache(model).bytes_per_far_token()


def test_static_buffers_stay_where_they_are() -> None:
    model = tiny_dar(far_cache="small")
    cache = DARCache(model, max_cache_len=40)
    through_cache(model, random_ids(), cache, [20])
    tensors = [x for layer in cache.layers for x in layer.tensors()] + [cache.positions]
    before = [x.data_ptr() for x in tensors]
    through_cache(model, random_ids(), cache, [1] * 5)
    cache.reset()
    through_cache(model, random_ids(), cache, [9, 1])
    after = [x for layer in cache.layers for x in layer.tensors()] + [cache.positions]
    assert [x.data_ptr() for x in after] == before
    assert cache.is_compileable


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_noted_step_counts_as_an_appended_one(static: bool, padded: bool) -> None:
    """What a kernel stores is counted as `append` counts it, and finds as much room."""
    mask = torch.ones(2, 12)
    mask[1, :5] = 0
    plan = plan_attention(mask if padded else None, None, 2, 12)
    layers = [DARCacheLayer(4, True, 30 if static else None) for _ in range(2)]
    key, bottleneck, rotary = torch.randn(2, 3, 12, 8), torch.randn(2, 12, 5), torch.randn(2, 12, 3, 2)
    for layer in layers:
        layer.append(key, key, bottleneck, rotary, plan)
    for _ in range(3):
        layers[0].note_step()
        layers[1].append(key[:, :, :1], key[:, :, :1], bottleneck[:, :1], rotary[:, :1], AttentionPlan())
    for name in ("count", "columns", "overwritten", "unpadded", "uncropped", "lengths", "longest", "capacity"):
        first, second = (getattr(layer, name) for layer in layers)
        assert str(first) == str(second), name
    if static:
        for _ in range(15):
            layers[0].note_step()
        with pytest.raises(ValueError, match="larger max_cache_len"):
            layers[0].note_step()


def test_gradients_are_not_kept() -> None:
    model = tiny_dar()
    cache = DARCache(model)
    model(random_ids(), past_key_values=cache)
    assert not any(x.requires_grad for layer in cache.layers for x in layer.tensors())
    assert model.train()(random_ids()).past_key_values is None


# ---------------------------------------------------------------------------------------------------------------------
# GPT-NeoX
# ---------------------------------------------------------------------------------------------------------------------


def as_neox(model: DARForCausalLM) -> GPTNeoXForCausalLM:
    """transformers' model with the same weights."""
    fields = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**fields)).to(model.dtype).eval()
    weights = {name: value for name, value in model.state_dict().items() if "bottleneck" not in name}
    neox.load_state_dict(weights)
    return neox


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 7, 64])
def test_identity_bottleneck_is_gpt_neox(dtype: torch.dtype, window: int) -> None:
    """With d_down = d and unit matrices nothing is lost; bf16 to its rounding."""
    model = tiny_dar(bottleneck_size=32, window_size=window)
    for layer in model.gpt_neox.layers:
        for projection in (layer.attention.bottleneck_down, layer.attention.bottleneck_up):
            projection.weight.data.copy_(torch.eye(32))
    model = model.to(dtype)
    ids = random_ids()
    with torch.no_grad():
        wanted = as_neox(model)(ids).logits
        found = [model(ids, use_cache=False).logits, through_cache(model, ids, DARCache(model), CHUNKS[0])]
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for logits in found:
        assert ((logits - wanted).norm() / wanted.norm()).item() < limit


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_vanilla_is_gpt_neox(attention: str) -> None:
    model = tiny_dar(window_size=None, attention=attention)
    assert not any("bottleneck" in name for name, _ in model.named_parameters())
    neox = as_neox(model)
    neox.set_attn_implementation(attention)
    ids = random_ids()
    mask = torch.ones_like(ids)
    if attention == "sdpa":  # transformers' eager attention makes NaN of padding in float64
        mask[0, :4] = 0
    with torch.no_grad():
        found, wanted = (which(ids, attention_mask=mask).logits[mask.bool()] for which in (model, neox))
    assert torch.equal(found, wanted)
    assert torch.equal(generate(model, ids), generate(neox, ids))


# ---------------------------------------------------------------------------------------------------------------------
# Configuration and classification
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bottleneck_size": 0}, "bottleneck_size"),
        ({"bottleneck_size": -3}, "bottleneck_size"),
        ({"bottleneck_size": 33}, "hidden_size = 32"),
        ({"window_size": -1}, "window_size"),
        ({"bottleneck_activation": "relu"}, "sigmoid"),
        ({"uniform_bottleneck": True, "window_size": None}, "uniform_bottleneck"),
        ({"hidden_size": 34}, "num_attention_heads"),
        ({"far_cache": "small", "rope_parameters": DYNAMIC}, "dynamic"),
    ],
)  # fmt: skip
def test_wrong_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_dar_config(**changes)


def test_bottleneck_is_a_quarter_by_default() -> None:
    assert tiny_dar_config(bottleneck_size=None).bottleneck_size == 8


@pytest.mark.parametrize("side", ["left", "right"])
def test_classification_reads_the_last_token(side: str) -> None:
    torch.manual_seed(0)
    config = tiny_dar_config(num_labels=3)
    model = DARForSequenceClassification(config).double().eval()
    ids = random_ids(2, 15)
    padding = torch.zeros(1, 5, dtype=torch.long)
    short = torch.cat([padding, ids[1:, :10]] if side == "left" else [ids[1:, :10], padding], 1)
    batch = torch.cat([ids[:1], short])
    with torch.no_grad():
        logits = model(batch, attention_mask=(batch != 0).long()).logits
        assert (logits[0] - model(ids[:1]).logits[0]).abs().max() < 1e-10
        assert (logits[1] - model(ids[1:, :10]).logits[0]).abs().max() < 1e-10
    config.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id"):
        model(batch)


# ---------------------------------------------------------------------------------------------------------------------
# A GPU
# ---------------------------------------------------------------------------------------------------------------------


DECODE_SHAPES = [(8, 64, 128, 16), (12, 64, 192, 16), (16, 128, 512, 32), (3, 40, 40, 10), (32, 64, 256, 16)]


def filled_layer(
    heads: int, dim: int, size: int, rotary: int, window: int, lengths: list[int], static: bool
) -> tuple[DARCacheLayer, torch.Tensor, FarPairs]:
    """A bf16 layer on the GPU that holds `lengths` random tokens a row, a query, and its far projections."""
    batch, longest = len(lengths), max(lengths)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    layer = DARCacheLayer(window, True, longest + 50 if static else None)
    real = torch.arange(longest, device="cuda") >= longest - torch.tensor(lengths, device="cuda")[:, None]
    plan = plan_attention(real, None, batch, longest, seen=0)
    states = (draw(batch, heads, longest, dim), draw(batch, heads, longest, dim), draw(batch, longest, size))
    layer.append(*states, draw(batch, longest, heads, rotary), plan)
    angles = torch.ones(1, 1, rotary, device="cuda", dtype=torch.bfloat16)
    weight = draw(heads, 2 * dim, size) * size**-0.5
    return layer, draw(batch, heads, 1, dim), FarPairs(states[2], weight, draw(heads, 2 * dim), angles, angles)


@cuda
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("heads", "dim", "size", "rotary"), DECODE_SHAPES)
@pytest.mark.parametrize(
    ("window", "lengths"), [(40, [1000]), (128, [700, 700]), (128, [900, 3, 128, 129]), (1, [65, 64])]
)
def test_decode_kernel_on_cuda(
    heads: int, dim: int, size: int, rotary: int, window: int, lengths: list[int], static: bool
) -> None:
    """Against ordinary operations in float64 on the same stored numbers."""
    layer, query, far = filled_layer(heads, dim, size, rotary, window, lengths, static)
    assert decode_kernel_available(layer, query, far)
    found = fused_decode(layer, query, far, dim**-0.5)
    exact = copy.copy(layer)
    for name in ("bottlenecks", "far_rotary", "near_keys", "near_values"):
        setattr(exact, name, getattr(layer, name).double())
    in_double = [x.double() for x in (far.bottleneck, far.weight, far.bias, far.cos, far.sin)]
    wanted = absorbed_decode(exact, query.double(), FarPairs(*in_double), dim**-0.5, None)
    for row in range(len(lengths)):
        assert ((found[row] - wanted[row]).norm() / wanted[row].norm()).item() < 1e-2


@cuda
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("heads", "dim", "size", "rotary"), DECODE_SHAPES)
@pytest.mark.parametrize(("window", "lengths"), [(40, [1000]), (128, [900, 3, 128, 129]), (1, [65, 64])])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_step_on_cuda(
    heads: int, dim: int, size: int, rotary: int, window: int, lengths: list[int], static: bool, bias: bool
) -> None:
    """Rotating, storing and attending in one go, against ordinary operations in float64, for several tokens."""
    layer, _, far = filled_layer(heads, dim, size, rotary, window, lengths, static)
    exact = copy.deepcopy(layer)
    for name in ("bottlenecks", "far_rotary", "near_keys", "near_values"):
        setattr(exact, name, getattr(exact, name).double())
    batch = len(lengths)
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(4):
        states = torch.randn(batch, 1, heads * 3 * dim, generator=generator, device="cuda").bfloat16()
        bottleneck = torch.randn(batch, 1, size, generator=generator, device="cuda").bfloat16()
        angles = torch.rand(batch if step % 2 else 1, 1, rotary // 2, generator=generator, device="cuda") * 6
        angles = torch.cat([angles, angles], -1)
        source = FarPairs(bottleneck, far.weight, far.bias if bias else None, angles.cos(), angles.sin())
        assert step_kernel_available(layer, states, source)
        found = fused_step(layer, states, source, dim**-0.5, {})
        wide = [None if x is None else x.double() for x in (bottleneck, source.weight, source.bias)]
        cos, sin = source.cos.double(), source.sin.double()
        far_exact = FarPairs(*wide, cos, sin)
        query, key, value = states.double().view(batch, 1, heads, 3, dim).transpose(1, 2).unbind(3)
        query, key = (rotate_halves(x, cos[:, None], sin[:, None]) for x in (query, key))
        exact.append(key, value, wide[0], far_rotary_keys(wide[0], far_exact, cos, sin), AttentionPlan())
        wanted = absorbed_decode(exact, query, far_exact, dim**-0.5, None)
        for row in range(batch):
            assert ((found[row, 0] - wanted[row].flatten()).norm() / wanted[row].norm()).item() < 1e-2
        for name in ("bottlenecks", "far_rotary", "near_keys", "near_values"):
            mine, theirs = (getattr(x, name) for x in (layer, exact))
            kept = min(mine.shape[1], theirs.shape[1]) if name in ("bottlenecks", "far_rotary") else mine.shape[1]
            assert ((mine[:, :kept] - theirs[:, :kept]).norm() / theirs.norm()).item() < 4e-3, name
    counted = ("count", "columns", "overwritten", "unpadded", "lengths")
    assert all(str(getattr(layer, name)) == str(getattr(exact, name)) for name in counted)


@cuda
@pytest.mark.parametrize("static", [False, True])
def test_decoding_on_cuda_is_as_exact_as_without_a_cache(static: bool) -> None:
    """A bf16 model's cached steps are no further from float64 than its own forward pass."""
    model = tiny_dar(
        hidden_size=512, num_attention_heads=8, bottleneck_size=128, window_size=40, rotary_pct=0.25,
        num_hidden_layers=2, dtype=torch.bfloat16,
    ).cuda()  # fmt: skip
    for parameter in model.parameters():  # scores of ordinary size: a saturated softmax magnifies any rounding
        parameter.data.mul_(0.2 if parameter.ndim == 2 else 1.0)
    ids = random_ids(2, 200).cuda()
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(ids, use_cache=False).logits[:, 180:]
        uncached = model(ids, use_cache=False).logits[:, 180:]
        cache = DARCache(model, max_cache_len=300 if static else None)
        cached = through_cache(model, ids, cache, [180] + [1] * 20)[:, 180:]
    errors = [((x.double() - wanted).norm() / wanted.norm()).item() for x in (cached, uncached)]
    assert errors[0] < 1.3 * errors[1] < 0.03


@cuda
def test_a_captured_step_can_be_replayed() -> None:
    model = tiny_dar(
        hidden_size=256, bottleneck_size=64, window_size=20, rotary_pct=0.25, dtype=torch.bfloat16
    ).cuda()  # fmt: skip
    ids = random_ids(1, 60).cuda()
    with torch.no_grad():
        plain = DARCache(model)
        wanted = through_cache(model, ids, plain, [30] + [1] * 30)[:, 31:]
        cache = DARCache(model, max_cache_len=64)
        model(ids[:, :30], past_key_values=cache)
        token = ids[:, 30:31].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(token, past_key_values=cache)  # kernels are built before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(token, past_key_values=cache).logits
        found = []
        for t in range(31, 60):
            token.copy_(ids[:, t : t + 1])
            graph.replay()
            found.append(logits.clone())
    found = torch.cat(found, 1)
    assert ((found - wanted).float().norm() / wanted.float().norm()).item() < 3e-2
