"""What a `PrunedCache` computes, against the dense oracle in float64 and against the full cache."""

from typing import Any

import pytest
import torch
from dense_oracle import Drive
from pruning_policies import EXACT, POLICIES, UnevenCache, left_padded, run_turns
from tiny_models import FAMILIES, random_ids, tiny_model

from nearfar.modeling.cache_random import RandomCache
from nearfar.modeling.cache_streaming_llm import StreamingLLMCache
from nearfar.modeling.prunable_models import attention_types
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates

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
@pytest.mark.parametrize("allocation", ["uniform", "head", "global"])
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_turns_of_policies_that_watch_queries(policy: type[PrunedCache], allocation: str, family: str) -> None:
    model = tiny_model(family)
    cache = policy(model, budget=10, sink_tokens=2, recent_tokens=3, allocation=allocation, eviction_interval=4)
    assert run_turns(Drive(model, cache), batch=2).error() < EXACT


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_unequal_batch_agrees_with_the_oracle(policy: type[PrunedCache], family: str) -> None:
    model = tiny_model(family)
    cache = policy(model, budget=8, sink_tokens=2, recent_tokens=2, eviction_interval=3)
    drive = Drive(model, cache)
    drive.feed(*left_padded([30, 17, 5]))
    for step in range(8):
        drive.feed(random_ids(3, 1, step))
    ids, mask = left_padded([6, 2, 4], seed=9)  # padding in the middle of the sequence
    drive.feed(ids, mask)
    for step in range(5):
        drive.feed(random_ids(3, 1, 50 + step))
    assert drive.error() < EXACT


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_flex_attention_and_its_block_masks(policy: type[PrunedCache], family: str) -> None:
    # Compiled flex kernels on CPU depend on the compiler at hand; what is tested here is the interface.
    with torch.compiler.set_stance("force_eager"):
        model = tiny_model(family, attention="flex_attention", dtype=torch.float32)
        cache = policy(model, budget=8, sink_tokens=2, eviction_interval=3)
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_layers_on_two_devices(policy: type[PrunedCache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfar.modeling.pruned_cache.TRIM_BYTES", 0)  # layers compete before the last one too
    model = tiny_model(dtype=torch.float32)
    expected = run_turns(Drive(model, policy(model, budget=10, eviction_interval=4)))
    from accelerate import dispatch_model

    placed = dispatch_model(
        model, {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": "cpu",
                "model.layers.2": 0, "model.norm": 0, "lm_head": 0}, main_device=0)  # fmt: skip
    got = run_turns(Drive(placed, policy(placed, budget=10, eviction_interval=4)))
    difference = torch.cat(got.logits, 1).cpu() - torch.cat(expected.logits, 1)
    assert float(difference.abs().max()) < 1e-3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_offloading_on_cuda(policy: type[PrunedCache]) -> None:
    model = tiny_model(dtype=torch.float32).cuda()
    drives = []
    for offloading in (False, True):
        drive = Drive(model, policy(model, budget=10, eviction_interval=4, offloading=offloading))
        drive.feed(random_ids(1, 30).cuda())
        for step in range(9):
            drive.feed(random_ids(1, 1, step).cuda())
        drives.append(drive)
    assert drives[1].cache.ragged_layers[0].store.pairs.keys.device.type == "cpu"
    assert float((drives[0].logits[-1] - drives[1].logits[-1]).abs().max()) < 1e-5


@pytest.mark.parametrize("policy", POLICIES)
def test_right_padding_is_never_kept_nor_seen(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, budget=8, sink_tokens=2, recent_tokens=3)
    drive = Drive(model, cache)
    ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    ids[1, 12:], mask[1, 12:] = 0, 0
    drive.feed(ids, mask)
    assert all(max(head) == 11 for head in cache.kept_columns(0, row=1))
    drive.feed(random_ids(2, 3))
    assert drive.error() < EXACT


def test_a_model_may_take_a_view_of_what_attention_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock functions give contiguous outputs, and some models count on it; lengths are uneven here."""
    outputs = []
    attend = PrunedCache.attend

    def noted(cache: PrunedCache, *args: Any) -> Any:
        outputs.append(attend(cache, *args)[0])
        return outputs[-1], None

    monkeypatch.setattr(PrunedCache, "attend", noted)
    model = tiny_model()
    run_turns(Drive(model, UnevenCache(model, budget=9)), prompt=20)
    assert outputs and all(output.is_contiguous() for output in outputs)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [1, 4, 9, 10, 11, 41])
def test_chunked_prefill_agrees_with_the_oracle(policy: type[PrunedCache], chunk: int) -> None:
    model, ids = tiny_model("mistral"), random_ids(1, 41)
    cache = policy(model, budget=10, sink_tokens=2, eviction_interval=4)
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
@pytest.mark.parametrize("policy", [StreamingLLMCache, RandomCache, *POLICIES])
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


@pytest.mark.parametrize("policy", POLICIES)
def test_left_padded_within_the_budget_it_is_the_full_cache(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    ids, mask = left_padded([20, 9])
    settings = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, past_key_values=policy(model, budget=64), **settings), expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
def test_beams(policy: type[PrunedCache], settings: dict) -> None:
    model = tiny_model()
    ids, mask = left_padded([15, 8])
    settings = {**settings, "attention_mask": mask, "max_new_tokens": 14, "do_sample": False}
    expected = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, past_key_values=policy(model, budget=64), **settings), expected)
    pruned = model.generate(ids, past_key_values=policy(model, budget=9, eviction_interval=3), **settings)
    assert pruned.shape[0] == expected.shape[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_reordered_rows_continue_as_if_they_had_been_there_all_along(policy: type[PrunedCache]) -> None:
    model, (ids, mask) = tiny_model(), left_padded([25, 19, 22])
    order = torch.tensor([2, 0, 0])
    drives = []
    for rows, real in ((ids, mask), (ids[order], mask[order])):
        cache = policy(model, budget=9, eviction_interval=3)
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


@pytest.mark.parametrize("policy", POLICIES)
def test_batch_repeat_and_select(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, budget=9)
    Drive(model, cache).feed(*left_padded([25, 14]))
    before = [cache.kept_columns(1, row) for row in range(2)]
    cache.batch_repeat_interleave(2)
    assert [cache.kept_columns(1, row) for row in range(4)] == [before[0], before[0], before[1], before[1]]
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert [cache.kept_columns(1, row) for row in range(2)] == [before[1], before[0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_assisted_decoding_as_target(policy: type[PrunedCache]) -> None:
    model, ids = tiny_model(), random_ids(1, 20)
    assistant = tiny_model(seed=3)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    cache = policy(model, budget=64)
    got = model.generate(ids, assistant_model=assistant, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, expected)
    pruned = policy(model, budget=10, eviction_interval=4)
    model.generate(ids, assistant_model=assistant, past_key_values=pruned, max_new_tokens=12, do_sample=False)
    assert pruned.kept_pairs() <= (10 + 4 + 8) * 6
