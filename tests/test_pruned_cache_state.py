"""Snapshots, copies, files, rows, roll-backs: what must not leak, and what is refused."""

import copy
import pickle

import pytest
import torch
from dense_oracle import Drive
from pruning_policies import EXACT, POLICIES, PlainCache, UnevenCache, left_padded, run_turns
from tiny_models import random_ids, tiny_model
from transformers import DynamicCache

from nearfar.modeling.cache_streaming_llm import StreamingLLMCache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.forward_pass import ForwardPass
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates
from nearfar.modeling.ragged_layer import RaggedLayer

# -- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_no_state_on_the_model(policy: type[PrunedCache]) -> None:
    model, ids = tiny_model(), random_ids(1, 30)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=policy(model, budget=8))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_two_caches_take_turns_on_one_model() -> None:
    model = tiny_model()
    drives = [Drive(model, UnevenCache(model, budget=8)), Drive(model, StreamingLLMCache(model, budget=8))]
    for seed in range(6):
        for drive in drives:
            drive.feed(random_ids(1, 9 if seed % 3 == 0 else 1, seed))
    assert all(drive.error() < EXACT for drive in drives)


def test_an_exception_inside_attention_leaves_the_model_usable() -> None:
    class Failing(UnevenCache):
        def score(self, states: TokenStates) -> torch.Tensor:
            raise ArithmeticError("no score")

    model, ids = tiny_model(), random_ids(1, 30)
    expected = model(ids).logits
    with pytest.raises(ArithmeticError), torch.no_grad():
        model(ids, **{cache_argument(model): Failing(model, budget=8)})
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_reset_then_another_prompt(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, budget=8, eviction_interval=3)
    Drive(model, cache).feed(random_ids(1, 60))
    cache.reset()
    assert cache.get_seq_length() == cache.kept_pairs() == cache.nbytes() == 0
    drive = run_turns(Drive(model, cache), batch=2, prompt=9)
    assert drive.error() < EXACT


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_snapshot_and_restore_answer_two_questions_alike(policy: type[PrunedCache], family: str) -> None:
    model = tiny_model(family)
    cache = policy(model, budget=9, eviction_interval=3)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 40))
    snapshot = cache.snapshot()
    first = [drive.feed(random_ids(1, 6, 1)), *(drive.feed(random_ids(1, 1, s)) for s in range(7))]
    cache.restore(snapshot)
    assert cache.get_seq_length() == 40
    again = Drive(model, cache, drive.ids[:, :40], drive.mask[:, :40])
    again.feed(random_ids(1, 9, 4))
    cache.restore(snapshot)
    third = Drive(model, cache, drive.ids[:, :40], drive.mask[:, :40])
    second = [third.feed(random_ids(1, 6, 1)), *(third.feed(random_ids(1, 1, s)) for s in range(7))]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", POLICIES)
def test_deepcopy_is_independent(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, budget=9, eviction_interval=3)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 40))
    twin = copy.deepcopy(cache)
    assert twin.config is cache.config
    assert all(layer.cache is twin for layer in twin.ragged_layers)
    drive.feed(random_ids(1, 12, 3))
    other = Drive(model, twin, drive.ids[:, :40], drive.mask[:, :40])
    assert torch.equal(other.feed(random_ids(1, 12, 3)), drive.logits[-1])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_a_saved_context_continues_the_same(policy: type[PrunedCache], family: str, tmp_path) -> None:
    model = tiny_model(family)
    cache = policy(model, budget=9, eviction_interval=3)
    drive = Drive(model, cache)
    drive.feed(*left_padded([40, 22]))
    for step in range(2):
        drive.feed(random_ids(2, 1, step))
    path = tmp_path / "context.safetensors"
    cache.save_context(path)
    assert [p.name for p in tmp_path.iterdir()] == ["context.safetensors"]
    loaded = policy.load_context(path, model)
    assert loaded.settings() == cache.settings()
    assert loaded.row_budgets == cache.row_budgets
    assert loaded.get_seq_length() == cache.get_seq_length()
    other = Drive(model, loaded, drive.ids, drive.mask)
    for ids in (random_ids(2, 6, 8), *(random_ids(2, 1, 60 + step) for step in range(7))):
        assert float((other.feed(ids) - drive.feed(ids)).abs().max()) < EXACT


@pytest.mark.parametrize("policy", POLICIES)
def test_crop_undoes_what_came_after_the_last_eviction(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, budget=10, eviction_interval=9)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 30))
    kept = [cache.kept_columns(layer) for layer in range(3)]
    expected = copy.deepcopy(cache)
    for step in range(5):
        drive.feed(random_ids(1, 1, step))
    cache.crop(-5)
    assert cache.get_seq_length() == 30
    assert [cache.kept_columns(layer) for layer in range(3)] == kept
    cache.crop(0)
    assert cache.get_seq_length() == 30
    following = random_ids(1, 4, 9)
    a = Drive(model, cache, drive.ids[:, :30], drive.mask[:, :30]).feed(following)
    b = Drive(model, expected, drive.ids[:, :30], drive.mask[:, :30]).feed(following)
    assert float((a - b).abs().max()) < EXACT


def test_crop_beyond_an_eviction_or_the_start_is_refused() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=10)
    Drive(model, cache).feed(random_ids(1, 30))
    with pytest.raises(ValueError, match="last eviction"):
        cache.crop(-1)
    fresh = UnevenCache(model, budget=64)
    Drive(model, fresh).feed(random_ids(1, 30))
    with pytest.raises(ValueError, match="30 seen"):
        fresh.crop(-31)
    fresh.crop(-12)
    assert fresh.get_seq_length() == 18
    assert fresh.kept_columns(2)[1] == list(range(18))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [{"budget": 9}, {"retention_ratio": 0.2}])
def test_chunks_inside_hold_eviction_equal_one_prefill(policy: type[PrunedCache], size: dict) -> None:
    model, ids = tiny_model("gemma3"), random_ids(1, 44)
    at_once, chunked = policy(model, **size), policy(model, **size)
    Drive(model, at_once).feed(ids)
    drive = Drive(model, chunked)
    with chunked.hold_eviction():
        for first in range(0, 44, 10):
            drive.feed(ids[:, first : first + 10])
    assert chunked.kept_pairs() == at_once.kept_pairs()
    for layer in (2, 3):
        assert chunked.kept_columns(layer) == at_once.kept_columns(layer)
    drive.feed(random_ids(1, 5, 3))
    assert drive.error() < EXACT


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("padded", [False, True])
def test_ingesting_a_full_cache_equals_a_prefill(family: str, padded: bool) -> None:
    model = tiny_model(family)
    ids, mask = left_padded([40, 40 - 15 * padded])
    full = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, **{cache_argument(model): full})
    direct, ingested = UnevenCache(model, budget=9), UnevenCache(model, budget=9)
    drive = Drive(model, direct)
    drive.feed(ids, mask)
    ingested.ingest(full, mask if padded else None)
    following = random_ids(2, 5, 4)
    other = Drive(model, ingested, drive.ids, drive.mask)
    assert float((other.feed(following) - drive.feed(following)).abs().max()) < EXACT
    assert full.get_seq_length() == 40


@pytest.mark.parametrize("policy", POLICIES)
def test_offloaded_layers_compute_the_same(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    drives = [
        run_turns(Drive(model, policy(model, budget=9, eviction_interval=4, offloading=offloading)))
        for offloading in (False, True)
    ]
    assert torch.equal(torch.cat(drives[0].logits, 1), torch.cat(drives[1].logits, 1))


def test_stock_attention_is_used_while_lengths_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    import nearfar.modeling.pruned_cache as module

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("the ragged path was used for uniform lengths")

    monkeypatch.setattr(module, "ragged_attention", forbidden)
    model = tiny_model()
    cache = StreamingLLMCache(model, budget=12, eviction_interval=4)
    drive = Drive(model, cache)
    drive.feed(random_ids(2, 30))
    for step in range(12):
        drive.feed(random_ids(2, 1, step))
    assert drive.error() < EXACT


def test_memory_is_freed_with_the_cache() -> None:
    import weakref

    model = tiny_model()
    cache = UnevenCache(model, budget=8)
    Drive(model, cache).feed(random_ids(1, 30))
    keys = weakref.ref(cache.ragged_layers[0].store.pairs.keys)
    del cache
    assert keys() is None  # no cycle holds it


# -- rows, roll-backs and settings that must not leak ---------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_restoring_brings_back_bytes_and_budgets(policy: type[PrunedCache], quantization: str | None) -> None:
    if quantization:
        pytest.importorskip("torchao")
    model = tiny_model(dtype=torch.float32)
    cache = policy(model, retention_ratio=0.4, sink_tokens=2, eviction_interval=4, quantization=quantization)
    drive = Drive(model, cache)
    drive.feed(*left_padded([60, 30]))
    before, budgets, snapshot = cache.nbytes(), cache.row_budgets, cache.snapshot()
    assert budgets == [24, 12]
    drive.feed(random_ids(2, 40, 3))
    assert cache.row_budgets == [40, 28]
    cache.restore(snapshot)
    assert cache.nbytes() == before
    assert cache.row_budgets == budgets
    again = Drive(model, cache, drive.ids[:, :60], drive.mask[:, :60])
    for step in range(9):
        again.feed(random_ids(2, 1, step))
    assert cache.nbytes() < 1.3 * before


@pytest.mark.parametrize("policy", POLICIES)
def test_budgets_follow_their_rows(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, retention_ratio=0.4, sink_tokens=2)
    Drive(model, cache).feed(*left_padded([60, 30]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.row_budgets == [12, 24]
    cache.batch_repeat_interleave(2)
    assert cache.row_budgets == [12, 12, 24, 24]
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    assert cache.row_budgets == [12, 24]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_turn_after_assisted_decoding_is_pruned_again(policy: type[PrunedCache]) -> None:
    model, assistant = tiny_model(), tiny_model(seed=3)
    cache = policy(model, budget=10, eviction_interval=4)
    ids = model.generate(random_ids(1, 20), assistant_model=assistant, past_key_values=cache, max_new_tokens=12)

    def go_on(tokens: int) -> torch.Tensor:
        # All of it is text, also where a random model says the padding token's id.
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=tokens, do_sample=False)

    for turn in range(3):
        ids = torch.cat([ids, random_ids(1, 40, turn)], 1)
        ids = go_on(6)
        assert cache.kept_pairs() <= (10 + 4 + 40 + 6) * 6
    for _ in range(8):
        ids = go_on(3)
    assert cache.kept_pairs() <= (10 + 8) * 6


def test_sinks_and_recent_tokens_are_counted_in_real_tokens() -> None:
    """Padding inside the sequence must not use up a row's sinks or its newest tokens."""
    model = tiny_model()
    kept = []
    for padded in (True, False):
        cache = UnevenCache(model, budget=9, sink_tokens=4, recent_tokens=4, eviction_interval=3)
        drive = Drive(model, cache)
        short, long = random_ids(1, 2, 1), random_ids(1, 12, 2)
        first = torch.cat([torch.zeros(1, 6, dtype=torch.long), short], 1)
        second = torch.cat([long[:, :5], torch.zeros(1, 4, dtype=torch.long), long[:, 5:]], 1)
        if padded:
            drive.feed(first, (first > 0).long())
            drive.feed(second, (second > 0).long())
        else:
            drive.feed(short)
            drive.feed(long)
        for step in range(3):
            drive.feed(random_ids(1, 1, step))
        assert drive.error() < EXACT
        places = drive.mask.cumsum(1)[0] - 1
        kept.append([[[int(places[c]) for c in head] for head in cache.kept_columns(layer)] for layer in range(3)])
    assert kept[0] == kept[1]
    assert all({0, 1, 2, 3, 13, 14, 15, 16} <= set(head) for layer in kept[0] for head in layer)


def test_sinks_of_sliding_layers_end_with_the_window() -> None:
    class Newest(UnevenCache):
        def score(self, states: TokenStates) -> torch.Tensor:
            return states.positions[:, None].expand(states.keys.shape[:3]).double()

    model = tiny_model("mistral")  # window 12
    cache = Newest(model, budget=6, sink_tokens=3, recent_tokens=1, eviction_interval=2)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 30))
    for step in range(6):
        drive.feed(random_ids(1, 1, step))
    assert all(head == list(range(30, 36)) for layer in range(3) for head in cache.kept_columns(layer))


def test_positions_are_copied_from_the_caller() -> None:
    model = tiny_model()
    seen = []

    class Watching(UnevenCache):
        def score(self, states: TokenStates) -> torch.Tensor:
            seen.append(states.positions[0].tolist())
            return super().score(states)

    cache = Watching(model, budget=8, eviction_interval=4)
    with torch.no_grad():
        model(random_ids(1, 20), **{cache_argument(model): cache})
        seen.clear()
        position = torch.tensor([[20]])
        for step in range(4):
            model(random_ids(1, 1, step), position_ids=position, **{cache_argument(model): cache})
            position += 1
    assert seen == [[20, 21, 22, 23]] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_ratio_without_a_prefill_grows_with_the_text(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, retention_ratio=0.25, sink_tokens=2, eviction_interval=8)
    drive = Drive(model, cache)
    for step in range(120):
        drive.feed(random_ids(1, 1, step))
    assert 25 * 6 <= cache.kept_pairs() <= (30 + 8) * 6


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode(policy: type[PrunedCache], inside: bool) -> None:
    model, ids = tiny_model(), random_ids(1, 24)
    expected = run_turns(Drive(model, policy(model, budget=9, eviction_interval=3)), prompt=24)
    cache = policy(model, budget=9, eviction_interval=3)
    drive = Drive(model, cache)
    with torch.inference_mode():
        drive.feed(random_ids(1, 24, 1))
    with torch.inference_mode(inside):
        for step in range(4):
            drive.feed(random_ids(1, 1, 100 + step))
    assert torch.equal(drive.logits[-1], expected.logits[4])
    del ids


def test_gradients_through_a_cache_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="no_grad"):
        model(random_ids(1, 5), **{cache_argument(model): UnevenCache(model, budget=8)})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_made_while_eviction_is_held_is_not_held(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, budget=10)
    with cache.hold_eviction():
        Drive(model, cache).feed(random_ids(1, 40))
        twin = copy.deepcopy(cache)
    twin.compress()
    assert twin.kept_pairs() == cache.kept_pairs() == 60
    with pytest.raises(TypeError, match="save_context"):
        pickle.dumps(cache)


def test_growth_within_the_budget_is_amortised() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=1000, eviction_interval=1)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 100))
    store = cache.ragged_layers[0].store
    before = store.layout
    with torch.no_grad():
        for step in range(200):
            model(random_ids(1, 1, step), **{cache_argument(model): cache})
    assert store.layout - before <= 15  # by an eighth each time: log(3) / log(9/8) and a few
    assert len(store.pending) <= 65
    assert int(store.capacities.max()) <= 300 * 9 // 8 + 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_crop_removes_everywhere_or_nowhere(family: str) -> None:
    model = tiny_model(family)
    cache = UnevenCache(model, budget=10, eviction_interval=20)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 40))
    for step in range(3):
        drive.feed(random_ids(1, 1, step))
    lengths = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(ValueError, match="Cannot remove 4"):
        cache.crop(-4)
    if family == "gemma3":  # the sliding layers have forgotten what lay before these tokens
        with pytest.raises(ValueError, match="sliding-window"):
            cache.crop(-2)
    with pytest.raises(ValueError, match="minus"):
        cache.crop(5)
    assert [layer.get_seq_length() for layer in cache.layers] == lengths


@torch.no_grad()
def test_a_crop_of_nothing_behind_a_full_window() -> None:
    """Nothing is lost, so nothing is refused; sliding layers that do not record go on as they were."""
    model, ids = tiny_model("gemma3"), random_ids(1, 33)
    cache = UnevenCache(model, budget=12)
    argument = cache_argument(model)
    model(ids[:, :30], **{argument: cache})
    twin = copy.deepcopy(cache)
    cache.crop(0)
    assert cache.get_seq_length() == 30
    found, wanted = (model(ids[:, 30:], **{argument: one}).logits for one in (cache, twin))
    assert torch.equal(found, wanted)


@torch.no_grad()
def test_layers_initialised_in_advance() -> None:
    """What transformers' export does; their keys are empty until something is read."""
    model, ids = tiny_model("gemma3"), random_ids(2, 9)
    config, argument = model.config.get_text_config(), cache_argument(model)
    early, lazy = UnevenCache(model, budget=12), UnevenCache(model, budget=12)
    early.early_initialization(2, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    found, wanted = (model(ids, **{argument: cache}).logits for cache in (early, lazy))
    assert torch.equal(found, wanted)


def test_a_context_loaded_with_other_settings(tmp_path) -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=12, sink_tokens=2, eviction_interval=3)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 50))
    cache.save_context(tmp_path / "c")
    for options, most in (({"budget": 6}, 6), ({"retention_ratio": 0.1}, 6), ({"allocation": "uniform"}, 12)):
        loaded = UnevenCache.load_context(tmp_path / "c", model, **options)
        other = Drive(model, loaded, drive.ids, drive.mask)
        for step in range(4):
            other.feed(random_ids(1, 1, step))
        lengths = [[len(head) for head in loaded.kept_columns(layer)] for layer in range(3)]
        assert sum(map(sum, lengths)) <= (most + 3) * 6
        if "allocation" in options:
            assert max(map(max, lengths)) <= most + 3
    with pytest.raises(ValueError, match="float64"), torch.no_grad():
        rounded = tiny_model(dtype=torch.bfloat16)
        loaded = UnevenCache.load_context(tmp_path / "c", rounded)
        rounded(random_ids(1, 1), **{cache_argument(rounded): loaded})


def test_ingest_honours_held_eviction_and_lets_go_of_the_graph() -> None:
    model = tiny_model()
    full = DynamicCache(config=model.config)
    model(random_ids(1, 40), **{cache_argument(model): full})  # with gradients
    before = [layer.keys.clone() for layer in full.layers]
    cache = UnevenCache(model, budget=9)
    with cache.hold_eviction():
        cache.ingest(full)
        assert cache.kept_pairs() == 40 * 6
    assert cache.kept_pairs() == 9 * 6
    assert not cache.ragged_layers[0].store.pairs.keys.requires_grad
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(full.layers, before, strict=True))


def test_offloaded_layers_are_put_away_after_use(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[int, str]] = []
    monkeypatch.setattr(RaggedLayer, "_move", lambda self, device: moves.append((self.layer_idx, device.type)))
    model = tiny_model()
    cache = UnevenCache(model, budget=9, offloading=True)
    Drive(model, cache).feed(random_ids(1, 5))
    assert moves == [(0, "cpu"), (0, "cpu"), (1, "cpu"), (1, "cpu"), (2, "cpu"), (2, "cpu")]


def test_nothing_of_a_forward_pass_is_held_on_to() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=9)
    Drive(model, cache).feed(*left_padded([40, 20]))
    assert vars(cache._pass) == vars(ForwardPass())


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"budget": 0}, ValueError, "at least 1"),
        ({"budget": -3}, ValueError, "at least 1"),
        ({"budget": 2.5}, TypeError, "whole number"),
        ({"budget": True}, TypeError, "whole number"),
        ({}, ValueError, "exactly one"),
        ({"budget": 5, "retention_ratio": 0.5}, ValueError, "exactly one"),
        ({"retention_ratio": 0.0}, ValueError, r"\(0, 1\]"),
        ({"retention_ratio": 1.5}, ValueError, r"\(0, 1\]"),
        ({"retention_ratio": float("nan")}, ValueError, r"\(0, 1\]"),
        ({"retention_ratio": "half"}, TypeError, "number"),
        ({"budget": 8, "sink_tokens": 4, "recent_tokens": 5}, ValueError, "do not fit"),
        ({"budget": 4, "sink_tokens": 4}, ValueError, "do not fit"),
        ({"budget": 8, "sink_tokens": -1}, ValueError, "negative"),
        ({"budget": 8, "recent_tokens": 0}, ValueError, "at least 1"),
        ({"budget": 8, "allocation": "layer"}, ValueError, "uniform, head, global"),
        ({"budget": 8, "eviction_interval": 0}, ValueError, "eviction_interval"),
    ],
)
def test_bad_options(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        UnevenCache(tiny_model(), **options)


def test_models_that_cannot_be_pruned() -> None:
    from transformers import Gemma2Config, MambaConfig, T5Config

    with pytest.raises(ValueError, match="encoder-decoder"):
        UnevenCache(T5Config(), budget=8)
    with pytest.raises(ValueError, match=r"no attention layers|layers of type"):
        UnevenCache(MambaConfig(), budget=8)
    with pytest.raises(ValueError, match="softcapping"):
        UnevenCache(Gemma2Config(), budget=8)
    with pytest.raises(TypeError, match="transformers model"):
        UnevenCache(torch.nn.Linear(2, 2), budget=8)


def test_training_mode_is_refused() -> None:
    model = tiny_model().train()
    with pytest.raises(ValueError, match="eval"):
        model(random_ids(1, 5), **{cache_argument(model): UnevenCache(model, budget=8)})


def test_a_copied_configuration_is_refused_when_used() -> None:
    model = tiny_model()
    cache = UnevenCache(copy.deepcopy(model.config), budget=8)
    with pytest.raises(RuntimeError, match="copy of the model's configuration"):
        model(random_ids(1, 5), **{cache_argument(model): cache})


def test_scores_that_are_not_finite_or_of_another_shape() -> None:
    class Broken(PlainCache):
        def score(self, states: TokenStates) -> torch.Tensor:
            return super().score(states) + float("nan")

    class Short(PlainCache):
        def score(self, states: TokenStates) -> torch.Tensor:
            return super().score(states)[:, :1]

    model = tiny_model()
    for policy, words in ((Broken, "not finite"), (Short, "expected")):
        with pytest.raises(ValueError, match=words), torch.no_grad():
            model(random_ids(1, 20), **{cache_argument(model): policy(model, budget=8)})


def test_another_batch_size_needs_a_reset() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=8)
    Drive(model, cache).feed(random_ids(1, 20))
    with pytest.raises(ValueError, match="reset"):
        model(random_ids(2, 3), **{cache_argument(model): cache})


def test_loading_what_is_not_a_context(tmp_path) -> None:
    model = tiny_model()
    with pytest.raises(FileNotFoundError):
        UnevenCache.load_context(tmp_path / "none", model)
    (tmp_path / "half").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ValueError, match="safetensors"):
        UnevenCache.load_context(tmp_path / "half", model)
    cache = UnevenCache(model, budget=8)
    with pytest.raises(ValueError, match="empty"):
        cache.save_context(tmp_path / "empty")
    Drive(model, cache).feed(random_ids(1, 20))
    cache.save_context(tmp_path / "good")
    with pytest.raises(ValueError, match="UnevenCache"):
        StreamingLLMCache.load_context(tmp_path / "good", model)
    with pytest.raises(ValueError, match=r"another|shape"):
        UnevenCache.load_context(tmp_path / "good", tiny_model("qwen3"))


def test_the_base_class_has_no_policy() -> None:
    model = tiny_model()
    with pytest.raises(TypeError, match="base class"), torch.no_grad():
        model(random_ids(1, 20), **{cache_argument(model): PrunedCache(model, budget=8)})
    assert isinstance(PrunedCache(model, budget=8).layers[0], RaggedLayer)
