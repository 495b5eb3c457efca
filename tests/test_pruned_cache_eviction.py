"""What a `PrunedCache` keeps, what it costs, and how it is stored."""

import pytest
import torch
from dense_oracle import Drive
from pruning_policies import EXACT, POLICIES, PlainCache, UnevenCache, left_padded
from tiny_models import random_ids, tiny_model
from transformers import DynamicCache

from nearfar.modeling.compat import cache_argument
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates

# -- what is kept, and what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("allocation", ["uniform", "head", "global"])
def test_the_budget_is_met_exactly_after_prefill(policy: type[PrunedCache], allocation: str) -> None:
    model = tiny_model()
    cache = policy(model, budget=10, sink_tokens=2, recent_tokens=3, allocation=allocation)
    Drive(model, cache).feed(random_ids(1, 50))
    lengths = torch.tensor([[len(head) for head in cache.kept_columns(layer)] for layer in range(3)])
    assert lengths.sum() == cache.kept_pairs() == 10 * 3 * 2
    if allocation == "uniform":
        assert (lengths == 10).all()
    else:
        assert len(set(lengths.flatten().tolist())) > 1
        assert (lengths.sum(1) == 20).all() or allocation == "global"
    if policy is UnevenCache and allocation == "global":
        assert len(set(lengths.sum(1).tolist())) > 1
    for layer in range(3):
        for head in cache.kept_columns(layer):
            assert head == sorted(head)
            assert {0, 1, 47, 48, 49} <= set(head)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trim_bytes", [0, 1 << 30])
def test_layer_by_layer_eviction_keeps_the_global_best(
    policy: type[PrunedCache], trim_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trimming while the prefill goes on must end with the top K over all layers and heads."""
    monkeypatch.setattr("nearfar.modeling.pruned_cache.TRIM_BYTES", trim_bytes)
    model, budget = tiny_model(), 11
    cache = policy(model, budget=budget, sink_tokens=1, recent_tokens=1)
    Drive(model, cache).feed(random_ids(1, 40))
    held = policy(model, budget=budget, sink_tokens=1, recent_tokens=1)
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


@pytest.mark.parametrize("policy", POLICIES)
def test_sliding_layers_of_a_hybrid_model_do_not_hold_on_to_the_prompt(policy: type[PrunedCache]) -> None:
    model = tiny_model("gemma3")  # window 9
    cache = policy(model, budget=10)
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


@pytest.mark.parametrize("policy", POLICIES)
def test_sliding_layers_drop_what_left_the_window(policy: type[PrunedCache]) -> None:
    model = tiny_model("mistral")  # window 12
    cache = policy(model, budget=20, sink_tokens=2)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 30))
    assert all(head == list(range(19, 30)) for layer in range(3) for head in cache.kept_columns(layer))
    drive.feed(random_ids(1, 5, 2))
    assert drive.error() < EXACT


@pytest.mark.parametrize("policy", POLICIES)
def test_retention_ratio_follows_each_row(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    cache = policy(model, retention_ratio=0.25, sink_tokens=2, allocation="uniform")
    Drive(model, cache).feed(*left_padded([40, 20]))
    assert [len(head) for head in cache.kept_columns(0, 0)] == [10, 10]
    assert [len(head) for head in cache.kept_columns(0, 1)] == [5, 5]


def test_ties_go_to_the_earlier_token() -> None:
    model = tiny_model()
    cache = PlainCache(model, budget=8, sink_tokens=2, recent_tokens=3)
    Drive(model, cache).feed(random_ids(1, 20))
    assert cache.kept_columns(0)[0] == [0, 1, 2, 3, 4, 17, 18, 19]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_keeps_what_single_rows_keep(policy: type[PrunedCache]) -> None:
    model = tiny_model()
    ids, mask = left_padded([30, 18, 24])
    batched = policy(model, budget=9, sink_tokens=2)
    Drive(model, batched).feed(ids, mask)
    for row in range(3):
        alone = policy(model, budget=9, sink_tokens=2)
        length = int(mask[row].sum())
        Drive(model, alone).feed(ids[row : row + 1, -length:])
        shift = 30 - length
        for layer in range(3):
            expected = [[column + shift for column in head] for head in alone.kept_columns(layer)]
            assert batched.kept_columns(layer, row) == expected


# -- quantised storage ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("policy", POLICIES)
def test_quantised_pairs_outlive_evictions_while_decoding(
    policy: type[PrunedCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens since the last eviction are held apart, exactly; the next one must put them among the others."""
    pytest.importorskip("torchao")
    from nearfar.modeling import ragged_store

    def poisoned(rows: torch.Tensor, target: torch.Tensor, slots: int) -> torch.Tensor:
        buffer = rows.new_full((slots, *rows.shape[1:]), float("nan") if rows.is_floating_point() else -1)
        return buffer.index_copy_(0, target, rows)

    monkeypatch.setattr(ragged_store, "_scattered", poisoned)  # spare places hold anything
    model = tiny_model(dtype=torch.float32)
    cache = policy(model, budget=9, sink_tokens=2, eviction_interval=3, quantization="int8")
    drive = Drive(model, cache)
    drive.feed(*left_padded([34, 21]))
    for piece in (random_ids(2, 5, 3), *(random_ids(2, 1, 20 + step) for step in range(10))):
        drive.feed(piece)
    assert drive.error() < 0.5  # logits lie between -4 and 4; the oracle's pairs are exact
    cache.batch_select_indices(torch.tensor([1, 0]))
    for step in range(7):
        with torch.no_grad():
            logits = model(random_ids(2, 1, step), **{cache_argument(model): cache}).logits
        assert torch.isfinite(logits).all()


def test_an_unknown_quantisation() -> None:
    with pytest.raises(ValueError, match="int8 or int4"):
        UnevenCache(tiny_model(), budget=8, quantization="int3")
