"""What a decode step over a pruned cache launches: hardly more than one over a full cache, and nothing that waits."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from pruning_policies import UnevenCache
from test_ragged_attention import queries, ragged_pairs
from tiny_models import random_ids, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from nearfar import H2OCache, RandomCache, SnapKVCache, StreamingLLMCache
from nearfar.modeling.append_plan import AppendPlan
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.ragged_attention import RaggedPairs, reference_attention
from nearfar.modeling.ragged_decode import padded_decode, segment_decode, varlen_decode
from nearfar.modeling.ragged_store import RaggedStore

# Operations that only look at a tensor in another way, or allocate: no kernel on a GPU.
VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select",
    "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
# What makes the host wait for a GPU.
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}


class Launches(TorchDispatchMode):
    """Counts what would be a kernel; a wait is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS:
            raise AssertionError(f"a decode step waits for {name}")
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise AssertionError("a decode step waits for the size of a mask")
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def model_of(layers: int) -> PreTrainedModel:
    config = tiny_config("llama")
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def launches(layers: int, make: Callable[[PreTrainedModel], Cache], batch: int) -> Counter[str]:
    """Of one step, some steps after the eviction of a prompt."""
    model = model_of(layers)
    cache = make(model)
    with torch.no_grad():
        for ids in (random_ids(batch, 40), random_ids(batch, 1), random_ids(batch, 1)):
            model(ids, **{cache_argument(model): cache})
        with Launches() as step:
            model(random_ids(batch, 1, 2), **{cache_argument(model): cache})
    return step.counts


def full(model: PreTrainedModel) -> Cache:
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("make", "more_a_layer", "more_a_step"),
    [
        (lambda model: StreamingLLMCache(model, budget=12), 0, 2),
        (lambda model: RandomCache(model, budget=12, allocation="uniform"), 0, 2),
        (lambda model: RandomCache(model, budget=60, allocation="uniform"), 0, 2),  # nothing evicted yet
        (lambda model: SnapKVCache(model, budget=36), 1, 6),
        (lambda model: H2OCache(model, budget=12), 1, 6),
    ],
    ids=["streaming_llm", "random", "not evicted", "snapkv", "h2o"],
)
def test_a_step_launches_what_a_full_cache_launches(
    make: Callable[[PreTrainedModel], Cache], more_a_layer: int, more_a_step: int, batch: int
) -> None:
    ours, theirs = ([launches(layers, m, batch).total() for layers in (2, 3)] for m in (make, full))
    assert (ours[1] - ours[0]) - (theirs[1] - theirs[0]) <= more_a_layer
    assert ours[0] - theirs[0] <= 2 * more_a_layer + more_a_step


def test_uneven_heads_are_written_without_bookkeeping() -> None:
    """On a CPU attention goes head by head; what is stored costs two writes a layer."""
    counts = launches(2, lambda model: UnevenCache(model, budget=12), 1)
    assert counts["index_copy_"] == 4
    attention = sum(count for name, count in counts.items() if "attention" in name)
    plain = launches(2, full, 1)
    # Each layer joins its heads' outputs, where a full cache joins keys, and values.
    assert counts.total() - attention <= plain.total() - 2 + 4


def test_flash_over_uneven_heads_is_one_launch() -> None:
    """On the meta device, which has shapes and no numbers to wait for."""
    pairs, plan = decode_pairs([7, 4, 9, 5, 5, 6], heads=2, device="meta")
    keys, values = pairs.keys.bfloat16(), pairs.values.bfloat16()
    query = torch.empty(3, 4, 1, 8, dtype=torch.bfloat16, device="meta")
    plan.offsets()  # the layout's, made once
    with Launches() as step:
        output = varlen_decode(query, keys, values, plan, 0.3)
    assert step.counts.total() == 1
    assert output.shape == (3, 1, 4, 8)


@pytest.mark.parametrize("lengths", [[7, 4, 9, 5, 5, 6], [3, 3, 3, 3, 3, 1]])
def test_decode_over_uneven_heads_agrees_with_the_definition(lengths: list[int]) -> None:
    pairs, plan = decode_pairs(lengths, heads=2)
    query, columns = queries(pairs, 3, 1), torch.tensor([1000])
    expected = reference_attention(query, pairs, 0.3, columns)
    for path in (segment_decode, padded_decode):
        got = path(query, pairs.keys, pairs.values, plan, 0.3)
        assert got.shape == expected.shape
        assert float((got - expected).abs().max()) < 1e-12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dim", [64, 128])
def test_decode_over_uneven_heads_on_cuda(dim: int) -> None:
    pairs, plan = decode_pairs([700, 90, 64, 1300, 333, 65], heads=3, dim=dim, device="cuda")
    pairs.keys, pairs.values = pairs.keys.bfloat16(), pairs.values.bfloat16()
    query = queries(pairs, 4, 1).bfloat16()
    exact = RaggedPairs(**{**vars(pairs), "keys": pairs.keys.double(), "values": pairs.values.double()})
    expected = reference_attention(query.double(), exact, dim**-0.5, torch.tensor([5000], device="cuda"))
    for path in (varlen_decode, padded_decode):
        got = path(query, pairs.keys, pairs.values, plan, dim**-0.5)
        assert float((got.double() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_bookkeeping_written_late_is_the_same(outside: bool) -> None:
    """One store is asked for its columns after every token, one at the end; inference mode may end between."""
    generator = torch.Generator().manual_seed(0)
    stores = []
    for ask in (True, False):
        generator.manual_seed(0)
        states = torch.randn(9, 2, 2, 1, 4, generator=generator)
        with torch.inference_mode():
            store = RaggedStore.empty(2, 2, states[0], states[0])
            store.append(states[0], states[0], 0, torch.zeros(2, 1, dtype=torch.int64), None, 3)
            uneven = torch.ones(2, 1, dtype=torch.bool)
            uneven[1] = False
            store.append(states[1], states[1], 1, torch.ones(2, 1, dtype=torch.int64), uneven, 3)
        with torch.inference_mode(not outside), torch.no_grad():
            for token in range(2, 9):
                store.append(states[token], states[token], token, torch.full((2, 1), token), None, 3)
                if ask:
                    assert int(store.pairs.lengths.sum()) == store.kept == int(store.pairs.host_lengths.sum())
            store.crop(7, 2)
        stores.append(store)
    for store in stores:
        assert store.pairs.host_lengths.tolist() == store.pairs.lengths.tolist() == [7, 7, 6, 6]
        assert store.kept == 26 and store.longest == 7 and store.real_tokens == [7, 6]
        starts = store.pairs.starts.tolist()
        assert [store.pairs.columns[s : s + 6].tolist() for s in starts] == [[0, 1, 2, 3, 4, 5]] * 2 + [
            [0, 2, 3, 4, 5, 6]
        ] * 2
        assert [store.places[s : s + 6].tolist() for s in starts] == [[0, 1, 2, 3, 4, 5]] * 4
    filled = stores[0].filled()
    assert torch.equal(filled, stores[1].filled())
    assert torch.equal(stores[0].pairs.keys[filled], stores[1].pairs.keys[filled])


def decode_pairs(lengths: list[int], heads: int, dim: int = 8, device: str = "cpu") -> tuple[RaggedPairs, AppendPlan]:
    """Uneven segments, and their plan as it is after the newest token has been appended."""
    pairs, _ = ragged_pairs(lengths, heads, 1, dim=dim, device=device)
    before = RaggedPairs(**{**vars(pairs), "lengths": pairs.lengths - 1, "host_lengths": pairs.host_lengths - 1})
    plan = AppendPlan(before, pairs.host_lengths + 2)
    plan.slots_ahead(1)
    plan.used += 1
    return pairs, plan
