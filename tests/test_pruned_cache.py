"""The contract of `PrunedCache`, against the dense oracle in float64."""

import copy
import pickle

import pytest
import torch
from dense_oracle import Drive
from tiny_models import FAMILIES, random_ids, tiny_model
from transformers import DynamicCache

from nearfar.modeling.cache_random import RandomCache
from nearfar.modeling.cache_streaming_llm import StreamingLLMCache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.prunable_models import attention_types
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates
from nearfar.modeling.ragged_layer import RaggedLayer

EXACT = 1e-10


class UnevenCache(PrunedCache):
    """Scores that favour some heads and layers strongly, so that lengths differ a lot."""

    default_allocation = "global"

    def score(self, states: TokenStates) -> torch.Tensor:
        batch, heads, n = states.keys.shape[:3]
        noise = torch.sin(states.positions.double() * 12.9898 + states.layer_idx)[:, None].expand(batch, heads, n)
        favour = torch.arange(heads, device=states.keys.device, dtype=torch.float64)[None, :, None] * 0.7
        return noise + favour + 0.3 * states.layer_idx


class PlainCache(PrunedCache):
    """All tokens equal: ties everywhere."""

    def score(self, states: TokenStates) -> torch.Tensor:
        return states.keys.new_zeros(states.keys.shape[:3])


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(lengths)
    ids, mask = random_ids(len(lengths), longest, seed), torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : longest - length], mask[row, : longest - length] = 0, 0
    return ids, mask


def run_turns(drive: Drive, batch: int = 1, prompt: int = 37, decode: int = 11, turn: int = 7) -> Drive:
    """A prompt, some decode steps, a second turn, more decode steps."""
    drive.feed(random_ids(batch, prompt, 1))
    for step in range(decode):
        drive.feed(random_ids(batch, 1, 100 + step))
    drive.feed(random_ids(batch, turn, 2))
    for step in range(decode):
        drive.feed(random_ids(batch, 1, 200 + step))
    return drive


# -- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("allocation", ["uniform", "head", "global"])
def test_turns_agree_with_the_oracle(family: str, allocation: str, attention: str) -> None:
    model = tiny_model(family, attention=attention)
    cache = UnevenCache(model, budget=10, sink_tokens=2, recent_tokens=3, allocation=allocation, eviction_interval=4)
    drive = run_turns(Drive(model, cache))
    # transformers' eager attention takes its softmax in float32 whatever the model's dtype.
    assert drive.error() < (EXACT if attention == "sdpa" else 2e-5)
    assert cache.get_seq_length() == 37 + 11 + 7 + 11
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_unequal_batch_agrees_with_the_oracle(family: str) -> None:
    model = tiny_model(family)
    cache = UnevenCache(model, budget=8, sink_tokens=2, recent_tokens=2, eviction_interval=3)
    drive = Drive(model, cache)
    drive.feed(*left_padded([30, 17, 5]))
    for step in range(8):
        drive.feed(random_ids(3, 1, step))
    ids, mask = left_padded([6, 2, 4], seed=9)  # padding in the middle of the sequence
    drive.feed(ids, mask)
    for step in range(5):
        drive.feed(random_ids(3, 1, 50 + step))
    assert drive.error() < EXACT


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_flex_attention_and_its_block_masks(family: str) -> None:
    # Compiled flex kernels on CPU depend on the compiler at hand; what is tested here is the interface.
    with torch.compiler.set_stance("force_eager"):
        model = tiny_model(family, attention="flex_attention", dtype=torch.float32)
        cache = UnevenCache(model, budget=8, sink_tokens=2, eviction_interval=3)
        drive = Drive(model, cache)
        drive.feed(*left_padded([30, 17]))
        for step in range(4):
            drive.feed(random_ids(2, 1, step))
        drive.feed(random_ids(2, 5, 9))
        assert drive.error() < 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_cuda_in_half_precision(family: str, attention: str) -> None:
    """By relative norm against the float64 model on the CPU; eviction must choose the same pairs."""
    # Heads of 8 numbers are below what flex attention compiles for.
    with torch.compiler.set_stance("force_eager" if attention == "flex_attention" else "default"):
        _compare_with_cpu(family, attention)


def _compare_with_cpu(family: str, attention: str) -> None:
    reference = tiny_model(family)
    model = tiny_model(family, attention=attention).to("cuda", torch.bfloat16)
    drives = []
    for each, device in ((reference, "cpu"), (model, "cuda")):
        cache = UnevenCache(each, budget=10, sink_tokens=2, eviction_interval=4)
        drive = Drive(each, cache)
        ids, mask = left_padded([30, 17])
        drive.feed(ids.to(device), mask.to(device))
        for step in range(6):
            drive.feed(random_ids(2, 1, step).to(device))
        drive.feed(random_ids(2, 5, 9).to(device))
        drives.append(drive)
    full = attention_types(model.config).index("full_attention") if family == "gemma3" else 0
    assert drives[0].cache.kept_columns(full, 1) == drives[1].cache.kept_columns(full, 1)
    got, expected = (torch.cat(drive.logits, 1).double().cpu() for drive in reversed(drives))
    real = drives[0].mask.bool()
    assert float((got - expected)[real].norm() / expected[real].norm()) < 6e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_layers_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfar.modeling.pruned_cache.TRIM_BYTES", 0)  # layers compete before the last one too
    model = tiny_model(dtype=torch.float32)
    expected = run_turns(Drive(model, UnevenCache(model, budget=10, eviction_interval=4)))
    from accelerate import dispatch_model

    placed = dispatch_model(
        model, {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": "cpu",
                "model.layers.2": 0, "model.norm": 0, "lm_head": 0}, main_device=0)  # fmt: skip
    got = run_turns(Drive(placed, UnevenCache(placed, budget=10, eviction_interval=4)))
    difference = torch.cat(got.logits, 1).cpu() - torch.cat(expected.logits, 1)
    assert float(difference.abs().max()) < 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_offloading_on_cuda() -> None:
    model = tiny_model(dtype=torch.float32).cuda()
    drives = []
    for offloading in (False, True):
        drive = Drive(model, UnevenCache(model, budget=10, eviction_interval=4, offloading=offloading))
        drive.feed(random_ids(1, 30).cuda())
        for step in range(9):
            drive.feed(random_ids(1, 1, step).cuda())
        drives.append(drive)
    assert drives[1].cache.ragged_layers[0].store.pairs.keys.device.type == "cpu"
    assert float((drives[0].logits[-1] - drives[1].logits[-1]).abs().max()) < 1e-5


def test_right_padding_is_never_kept_nor_seen() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=8, sink_tokens=2, recent_tokens=3)
    drive = Drive(model, cache)
    ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    ids[1, 12:], mask[1, 12:] = 0, 0
    drive.feed(ids, mask)
    assert all(max(head) == 11 for head in cache.kept_columns(0, row=1))
    drive.feed(random_ids(2, 3))
    assert drive.error() < EXACT


@pytest.mark.parametrize("chunk", [1, 4, 9, 10, 11, 41])
def test_chunked_prefill_agrees_with_the_oracle(chunk: int) -> None:
    model, ids = tiny_model("mistral"), random_ids(1, 41)
    cache = UnevenCache(model, budget=10, sink_tokens=2, eviction_interval=4)
    drive = Drive(model, cache)
    for first in range(0, 41, chunk):
        drive.feed(ids[:, first : first + chunk])
    drive.feed(random_ids(1, 5, 3))
    assert drive.error() < EXACT


def test_one_layer_pruned_alone_then_a_multi_token_query() -> None:
    class OneLayer(UnevenCache):
        def score(self, states: TokenStates) -> torch.Tensor:
            return super().score(states) - (100.0 if states.layer_idx == 1 else 0.0)

    model = tiny_model()
    cache = OneLayer(model, retention_ratio=0.72, sink_tokens=2, recent_tokens=3)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 30))
    lengths = [[len(head) for head in cache.kept_columns(layer)] for layer in range(3)]
    assert lengths[0] == lengths[2] == [30, 30]
    assert sum(lengths[1]) == 22 * 6 - 4 * 30
    drive.feed(random_ids(1, 7, 5))
    assert drive.error() < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    exact, rounded = tiny_model(), tiny_model(dtype=dtype)
    drives = []
    for model in (exact, rounded):
        cache = StreamingLLMCache(model, budget=12, eviction_interval=4)
        drives.append(run_turns(Drive(model, cache)))
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    expected = torch.cat(drives[0].logits, 1)
    difference = torch.cat(drives[1].logits, 1).double() - expected
    assert float(difference.norm() / expected.norm()) < tolerance
    assert drives[1].cache.ragged_layers[0].store.pairs.keys.dtype == dtype


# -- against the full cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [StreamingLLMCache, RandomCache, UnevenCache])
def test_within_the_budget_it_is_the_full_cache(family: str, policy: type[PrunedCache]) -> None:
    model, ids = tiny_model(family), random_ids(2, 21)
    cache = policy(model, budget=64)
    settings = {"max_new_tokens": 12, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **settings)
    got = model.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.scores, expected.scores, strict=True):
        assert float((a - b).abs().max()) < EXACT
    assert cache.get_seq_length() == got.sequences.shape[1] - 1


def test_left_padded_within_the_budget_it_is_the_full_cache() -> None:
    model = tiny_model()
    ids, mask = left_padded([20, 9])
    settings = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, past_key_values=UnevenCache(model, budget=64), **settings), expected)


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
def test_beams(settings: dict) -> None:
    model = tiny_model()
    ids, mask = left_padded([15, 8])
    settings = {**settings, "attention_mask": mask, "max_new_tokens": 14, "do_sample": False}
    expected = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, past_key_values=UnevenCache(model, budget=64), **settings), expected)
    pruned = model.generate(ids, past_key_values=UnevenCache(model, budget=9, eviction_interval=3), **settings)
    assert pruned.shape[0] == expected.shape[0]


def test_reordered_rows_continue_as_if_they_had_been_there_all_along() -> None:
    model, (ids, mask) = tiny_model(), left_padded([25, 19, 22])
    order = torch.tensor([2, 0, 0])
    drives = []
    for rows, real in ((ids, mask), (ids[order], mask[order])):
        cache = UnevenCache(model, budget=9, eviction_interval=3)
        drive = Drive(model, cache)
        drive.feed(rows, real)
        for step in range(2):
            drive.feed(random_ids(1, 1, step).expand(3, 1))
        drives.append(drive)
    drives[0].cache.reorder_cache(order)
    drives[0].mask = drives[0].mask[order]
    following = random_ids(3, 5, 7)
    for drive in drives:
        drive.feed(following)
        for step in range(6):
            drive.feed(random_ids(3, 1, 20 + step))
    assert float((drives[0].logits[-1] - drives[1].logits[-1]).abs().max()) < EXACT
    for layer in range(3):
        for row in range(3):
            assert drives[0].cache.kept_columns(layer, row) == drives[1].cache.kept_columns(layer, row)


def test_batch_repeat_and_select() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=9)
    Drive(model, cache).feed(*left_padded([25, 14]))
    before = [cache.kept_columns(1, row) for row in range(2)]
    cache.batch_repeat_interleave(2)
    assert [cache.kept_columns(1, row) for row in range(4)] == [before[0], before[0], before[1], before[1]]
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert [cache.kept_columns(1, row) for row in range(2)] == [before[1], before[0]]


def test_assisted_decoding_as_target() -> None:
    model, ids = tiny_model(), random_ids(1, 20)
    assistant = tiny_model(seed=3)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    cache = UnevenCache(model, budget=64)
    got = model.generate(ids, assistant_model=assistant, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, expected)
    pruned = UnevenCache(model, budget=10, eviction_interval=4)
    model.generate(ids, assistant_model=assistant, past_key_values=pruned, max_new_tokens=12, do_sample=False)
    assert pruned.kept_pairs() <= (10 + 4 + 8) * 6


# -- what is kept, and what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["uniform", "head", "global"])
def test_the_budget_is_met_exactly_after_prefill(allocation: str) -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=10, sink_tokens=2, recent_tokens=3, allocation=allocation)
    Drive(model, cache).feed(random_ids(1, 50))
    lengths = torch.tensor([[len(head) for head in cache.kept_columns(layer)] for layer in range(3)])
    assert lengths.sum() == cache.kept_pairs() == 10 * 3 * 2
    if allocation == "uniform":
        assert (lengths == 10).all()
    else:
        assert len(set(lengths[1].tolist())) > 1
        assert (lengths.sum(1) == 20).all() == (allocation == "head")
    for layer in range(3):
        for head in cache.kept_columns(layer):
            assert head == sorted(head)
            assert {0, 1, 47, 48, 49} <= set(head)


@pytest.mark.parametrize("trim_bytes", [0, 1 << 30])
def test_layer_by_layer_eviction_keeps_the_global_best(trim_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trimming while the prefill goes on must end with the top K over all layers and heads."""
    monkeypatch.setattr("nearfar.modeling.pruned_cache.TRIM_BYTES", trim_bytes)
    model, budget = tiny_model(), 11
    cache = UnevenCache(model, budget=budget, sink_tokens=1, recent_tokens=1)
    Drive(model, cache).feed(random_ids(1, 40))
    held = UnevenCache(model, budget=budget, sink_tokens=1, recent_tokens=1)
    with held.hold_eviction():
        Drive(model, held).feed(random_ids(1, 40))
        assert held.kept_pairs() == 40 * 6
    for layer in range(3):
        assert cache.kept_columns(layer) == held.kept_columns(layer)


def test_prefill_never_holds_more_than_kept_and_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfar.modeling.pruned_cache.TRIM_BYTES", 0)
    model, held = tiny_model(), []

    class Watched(UnevenCache):
        def score(self, states: TokenStates) -> torch.Tensor:
            held.append(self.kept_pairs())  # before this layer's arrivals are stored
            return super().score(states)

    cache = Watched(model, budget=10)
    Drive(model, cache).feed(random_ids(1, 200))
    assert max(held) <= 10 * 6 * 1.08
    assert cache.kept_pairs() == 10 * 6


def test_bytes_are_those_of_the_kept_pairs() -> None:
    model = tiny_model()
    full, cache = DynamicCache(config=model.config), UnevenCache(model, budget=100, eviction_interval=8)
    ids = random_ids(1, 400)
    with torch.no_grad():
        model(ids, **{cache_argument(model): full})
        model(ids, **{cache_argument(model): cache})
    pair = 2 * 8 * 8  # keys and values, head dimension 8, float64
    kept = cache.kept_pairs()
    assert kept == 100 * 6
    assert kept * pair <= cache.nbytes() <= (kept + 8 * 6) * (pair + 12) + 1000
    assert cache.nbytes() < 0.35 * sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)


def test_sliding_layers_of_a_hybrid_model_do_not_hold_on_to_the_prompt() -> None:
    model = tiny_model("gemma3")  # window 9
    cache = UnevenCache(model, budget=10)
    Drive(model, cache).feed(random_ids(1, 300))
    for layer in cache.layers[:2]:
        assert layer.keys.shape[2] == 8
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


def test_decode_is_bounded_and_positions_go_on() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=12, sink_tokens=2, eviction_interval=5)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 30))
    sizes, kept = set(), []
    for step in range(40):
        drive.feed(random_ids(1, 1, step))
        pending = {id(piece.positions): piece.positions for la in cache.ragged_layers for piece in la.store.pending}
        sizes.add(cache.nbytes() - sum(positions.nbytes for positions in pending.values()))
        kept.append(cache.kept_pairs())
        assert cache.get_seq_length() == 31 + step
    assert len(sizes) == 1
    assert max(kept) <= (12 + 5) * 6
    assert min(kept) == 12 * 6
    assert drive.error() < EXACT


def test_sliding_layers_drop_what_left_the_window() -> None:
    model = tiny_model("mistral")  # window 12
    cache = UnevenCache(model, budget=20, sink_tokens=2)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 30))
    assert all(head == list(range(19, 30)) for layer in range(3) for head in cache.kept_columns(layer))
    drive.feed(random_ids(1, 5, 2))
    assert drive.error() < EXACT


def test_retention_ratio_follows_each_row() -> None:
    model = tiny_model()
    cache = UnevenCache(model, retention_ratio=0.25, sink_tokens=2, allocation="uniform")
    Drive(model, cache).feed(*left_padded([40, 20]))
    assert [len(head) for head in cache.kept_columns(0, 0)] == [10, 10]
    assert [len(head) for head in cache.kept_columns(0, 1)] == [5, 5]


def test_ties_go_to_the_earlier_token() -> None:
    model = tiny_model()
    cache = PlainCache(model, budget=8, sink_tokens=2, recent_tokens=3)
    Drive(model, cache).feed(random_ids(1, 20))
    assert cache.kept_columns(0)[0] == [0, 1, 2, 3, 4, 17, 18, 19]


def test_a_batch_keeps_what_single_rows_keep() -> None:
    model = tiny_model()
    ids, mask = left_padded([30, 18, 24])
    batched = UnevenCache(model, budget=9, sink_tokens=2)
    Drive(model, batched).feed(ids, mask)
    for row in range(3):
        alone = UnevenCache(model, budget=9, sink_tokens=2)
        length = int(mask[row].sum())
        Drive(model, alone).feed(ids[row : row + 1, -length:])
        shift = 30 - length
        for layer in range(3):
            expected = [[column + shift for column in head] for head in alone.kept_columns(layer)]
            assert batched.kept_columns(layer, row) == expected


# -- state ----------------------------------------------------------------------------------------------------------


def test_no_state_on_the_model() -> None:
    model, ids = tiny_model(), random_ids(1, 30)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=UnevenCache(model, budget=8))
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


def test_reset_then_another_prompt() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=8, eviction_interval=3)
    Drive(model, cache).feed(random_ids(1, 60))
    cache.reset()
    assert cache.get_seq_length() == cache.kept_pairs() == cache.nbytes() == 0
    drive = run_turns(Drive(model, cache), batch=2, prompt=9)
    assert drive.error() < EXACT


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_snapshot_and_restore_answer_two_questions_alike(family: str) -> None:
    model = tiny_model(family)
    cache = UnevenCache(model, budget=9, eviction_interval=3)
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


def test_deepcopy_is_independent() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=9, eviction_interval=3)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 40))
    twin = copy.deepcopy(cache)
    assert twin.config is cache.config
    assert all(layer.cache is twin for layer in twin.ragged_layers)
    drive.feed(random_ids(1, 12, 3))
    other = Drive(model, twin, drive.ids[:, :40], drive.mask[:, :40])
    assert torch.equal(other.feed(random_ids(1, 12, 3)), drive.logits[-1])


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_a_saved_context_continues_the_same(family: str, tmp_path) -> None:
    model = tiny_model(family)
    cache = UnevenCache(model, budget=9, eviction_interval=3)
    drive = Drive(model, cache)
    drive.feed(*left_padded([40, 22]))
    for step in range(2):
        drive.feed(random_ids(2, 1, step))
    path = tmp_path / "context.safetensors"
    cache.save_context(path)
    assert [p.name for p in tmp_path.iterdir()] == ["context.safetensors"]
    loaded = UnevenCache.load_context(path, model)
    assert loaded.settings() == cache.settings()
    assert loaded.row_budgets == cache.row_budgets
    assert loaded.get_seq_length() == cache.get_seq_length()
    other = Drive(model, loaded, drive.ids, drive.mask)
    for ids in (random_ids(2, 6, 8), *(random_ids(2, 1, 60 + step) for step in range(7))):
        assert float((other.feed(ids) - drive.feed(ids)).abs().max()) < EXACT


def test_crop_undoes_what_came_after_the_last_eviction() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=10, eviction_interval=9)
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


@pytest.mark.parametrize("size", [{"budget": 9}, {"retention_ratio": 0.2}])
def test_chunks_inside_hold_eviction_equal_one_prefill(size: dict) -> None:
    model, ids = tiny_model("gemma3"), random_ids(1, 44)
    at_once, chunked = UnevenCache(model, **size), UnevenCache(model, **size)
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


def test_offloaded_layers_compute_the_same() -> None:
    model = tiny_model()
    drives = [
        run_turns(Drive(model, UnevenCache(model, budget=9, eviction_interval=4, offloading=offloading)))
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


# -- quantised storage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_storage(quantization: str, dtype: torch.dtype, tmp_path) -> None:
    pytest.importorskip("torchao")
    model = tiny_model(dtype=dtype)
    exact, small = (
        UnevenCache(model, budget=100, eviction_interval=4, quantization=choice) for choice in (None, quantization)
    )
    drives = [Drive(model, cache) for cache in (exact, small)]
    for drive in drives:
        drive.feed(*left_padded([300, 220]))
    pairs = exact.kept_pairs()
    assert small.kept_pairs() == pairs
    # Per key and value of 8 numbers: 8 codes of 8 or 4 bits, a 4-byte scale and a 2-byte zero point.
    saved = 8 * dtype.itemsize - (8 if quantization == "int8" else 4) - 4 - 2
    assert exact.nbytes() - small.nbytes() > 2 * pairs * saved
    for step in range(2):
        for drive in drives:
            drive.feed(random_ids(2, 1, step))
    layer, other = exact.ragged_layers[0], small.ragged_layers[0]
    with other.awake():
        for name in ("keys", "values"):
            a, b = getattr(layer.store.pairs, name).float(), getattr(other.store.pairs, name).float()
            filled = layer.store.filled()
            step_size = (a.amax(1) - a.amin(1)) / (2 ** int(quantization.removeprefix("int")) - 1)
            error = (a - b).abs().amax(1)
            assert bool((error <= step_size + 0.01 * a.abs().amax(1))[filled].all())
            slots, _, _ = layer.store.pending_slots()
            assert torch.equal(a[slots], b[slots])  # first layer, same tokens: what came since is exact
            assert float(error[filled].max()) > 0
    for drive in drives:
        assert torch.isfinite(drive.feed(random_ids(2, 5, 50))).all()
    small.batch_select_indices(torch.tensor([1, 0]))
    small.batch_select_indices(torch.tensor([1, 0]))
    small.save_context(tmp_path / "small")
    loaded = UnevenCache.load_context(tmp_path / "small", model)
    assert loaded.quantization == quantization
    with loaded.ragged_layers[1].awake(), small.ragged_layers[1].awake():
        a, b = (cache.ragged_layers[1].store for cache in (loaded, small))
        a, b = a.pairs.keys[a.filled()].float(), b.pairs.keys[b.filled()].float()
        assert float((a - b).norm() / b.norm()) < 0.01


def test_an_unknown_quantisation() -> None:
    with pytest.raises(ValueError, match="int8 or int4"):
        UnevenCache(tiny_model(), budget=8, quantization="int3")


# -- rows, roll-backs and settings that must not leak -----------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_restoring_brings_back_bytes_and_budgets(quantization: str | None) -> None:
    if quantization:
        pytest.importorskip("torchao")
    model = tiny_model(dtype=torch.float32)
    cache = UnevenCache(model, retention_ratio=0.4, sink_tokens=2, eviction_interval=4, quantization=quantization)
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


def test_budgets_follow_their_rows() -> None:
    model = tiny_model()
    cache = UnevenCache(model, retention_ratio=0.4, sink_tokens=2)
    Drive(model, cache).feed(*left_padded([60, 30]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.row_budgets == [12, 24]
    cache.batch_repeat_interleave(2)
    assert cache.row_budgets == [12, 12, 24, 24]
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    assert cache.row_budgets == [12, 24]


def test_a_second_turn_after_assisted_decoding_is_pruned_again() -> None:
    model, assistant = tiny_model(), tiny_model(seed=3)
    cache = UnevenCache(model, budget=10, eviction_interval=4)
    ids = model.generate(random_ids(1, 20), assistant_model=assistant, past_key_values=cache, max_new_tokens=12)
    for turn in range(3):
        ids = torch.cat([ids, random_ids(1, 40, turn)], 1)
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
        assert cache.kept_pairs() <= (10 + 4 + 40 + 6) * 6
    for _ in range(8):
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
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


def test_a_ratio_without_a_prefill_grows_with_the_text() -> None:
    model = tiny_model()
    cache = UnevenCache(model, retention_ratio=0.25, sink_tokens=2, eviction_interval=8)
    drive = Drive(model, cache)
    for step in range(120):
        drive.feed(random_ids(1, 1, step))
    assert 25 * 6 <= cache.kept_pairs() <= (30 + 8) * 6


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode(inside: bool) -> None:
    model, ids = tiny_model(), random_ids(1, 24)
    expected = run_turns(Drive(model, UnevenCache(model, budget=9, eviction_interval=3)), prompt=24)
    cache = UnevenCache(model, budget=9, eviction_interval=3)
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


def test_a_copy_made_while_eviction_is_held_is_not_held() -> None:
    model = tiny_model()
    cache = UnevenCache(model, budget=10)
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
    assert cache._mask_memo is None
    assert cache._positions_memo is None
