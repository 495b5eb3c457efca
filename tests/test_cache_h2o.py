"""H2O against its definition: every probability that a pair has ever been given, added up one at a time."""

import copy

import pytest
import torch
from dense_oracle import Drive
from eviction_reference import _moment, accumulated, check_every_eviction
from pruning_policies import EXACT, left_padded
from test_cache_snapkv import conversation
from tiny_models import FAMILIES, random_ids, tiny_model

from nearfar.modeling import cache_h2o, received_attention
from nearfar.modeling.cache_h2o import H2OCache
from nearfar.modeling.compat import cache_argument


def check_sums(drive: Drive) -> None:
    """All scores held, to 1e-10, after the queries so far have been added."""
    drive.oracle()
    for layer in drive.cache.ragged_layers:
        with layer.awake():
            drive.cache._score_pending(layer)
        store, stop = layer.store, drive.ids.shape[1]
        for row in range(store.batch):
            real = drive.mask[row].nonzero()[:, 0].tolist()
            for head, held in enumerate(drive.cache.kept_columns(layer.layer_idx, row)):
                expected = accumulated(_moment(drive, layer.layer_idx, row, head, stop, real, held))
                start = int(store.pairs.starts[row * store.heads + head])
                found = store.scores[start : start + len(held)].tolist()
                assert max(abs(a - expected[c]) for a, c in zip(found, held, strict=True)) < 1e-10


@pytest.mark.parametrize(
    ("family", "allocation"), [("llama", "uniform"), ("llama", "head"), *((family, "global") for family in FAMILIES)]
)
def test_every_eviction_keeps_what_the_definition_says(family, allocation) -> None:
    model = tiny_model(family)
    budget = 8 if family == "mistral" else 12  # whose window is 12
    cache = H2OCache(model, budget=budget, sink_tokens=2, eviction_interval=3, allocation=allocation)
    drive = conversation(Drive(model, cache))
    assert check_every_eviction(drive, accumulated, lambda budget: budget // 2) >= 12
    check_sums(drive)
    assert drive.error() < EXACT


@pytest.mark.parametrize(("interval", "held_queries", "block"), [(1, 1, 1 << 22), (5, 4, 500), (1, 64, 1), (5, 64, 1)])
def test_when_queries_are_added_does_not_matter(interval, held_queries, block, monkeypatch) -> None:
    """Within the budget, beyond it, in any blocks: the sums are those of a sum after every step."""
    monkeypatch.setitem(received_attention.BLOCK_ELEMENTS, "cpu", block)
    monkeypatch.setattr(cache_h2o, "HELD_QUERIES", held_queries)
    model = tiny_model("gemma3")
    cache = H2OCache(model, budget=30, sink_tokens=2, eviction_interval=interval)
    drive = Drive(model, cache)
    drive.feed(*left_padded([22, 13]))
    for step in range(14):
        drive.feed(random_ids(2, 1, step))
    check_sums(drive)
    drive.feed(random_ids(2, 25, 40))
    drive.feed(random_ids(2, 1, 70))
    check_sums(drive)
    assert check_every_eviction(drive, accumulated, lambda budget: 15) >= 2


def test_column_sums_of_a_prompt() -> None:
    model = tiny_model(attention="eager", dtype=torch.float32)
    ids = random_ids(1, 40)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
        cache = H2OCache(model, budget=10, sink_tokens=0)
        model(ids, **{cache_argument(model): cache})
    for layer, probabilities in enumerate(weights):
        sums = probabilities[0].sum(1).view(2, 2, 40).sum(1)
        for head in range(2):
            best = sums[head, :35].topk(5).indices.sort().values.tolist()
            assert cache.kept_columns(layer)[head] == [*best, *range(35, 40)]


@pytest.mark.parametrize("offloading", [False, True])
def test_sums_go_with_their_pairs(offloading, tmp_path) -> None:
    """Rows repeated, chosen and reordered, a copy, a snapshot, a file: all go on as if nothing had happened."""
    model = tiny_model()
    options = {"budget": 10, "sink_tokens": 2, "eviction_interval": 4, "allocation": "global"}
    ids, mask = left_padded([25, 19])
    order = torch.tensor([1, 0, 1])

    def start(rows: list[int]) -> Drive:
        drive = Drive(model, H2OCache(model, offloading=offloading, **options))
        drive.feed(ids[rows], mask[rows])
        for step in range(6):
            drive.feed(random_ids(1, 1, step).expand(len(rows), 1))
        return drive

    moved = start([0, 1])
    moved.cache.batch_repeat_interleave(2)
    moved.cache.batch_select_indices(torch.tensor([0, 2]))
    moved.cache.reorder_cache(order)
    moved.cache.save_context(tmp_path / "context")
    snapshot = moved.cache.snapshot()
    loaded = H2OCache.load_context(tmp_path / "context", model, offloading=offloading)
    twin = copy.deepcopy(moved.cache)
    expected = start(order.tolist())
    following = [random_ids(3, 9, 80), *(random_ids(3, 1, 90 + step) for step in range(9))]
    before = expected.ids, expected.mask
    for piece in following:
        expected.feed(piece)
    check_sums(expected)
    for cache in (moved.cache, loaded, twin, None):
        if cache is None:
            moved.cache.restore(snapshot)
        drive = Drive(model, cache or moved.cache, *before)
        for piece in following:
            drive.feed(piece)
        assert float((torch.cat(drive.logits, 1) - torch.cat(expected.logits[-10:], 1)).abs().max()) < EXACT
        for layer in drive.cache.ragged_layers:
            other = expected.cache.ragged_layers[layer.layer_idx]
            with layer.awake(), other.awake():
                drive.cache._score_pending(layer)
                expected.cache._score_pending(other)
            filled = layer.store.filled()
            assert torch.equal(filled, other.store.filled())
            difference = (layer.store.scores - other.store.scores)[filled]
            assert float(difference.abs().max()) < EXACT
        for layer in range(3):
            for row in range(3):
                assert drive.cache.kept_columns(layer, row) == expected.cache.kept_columns(layer, row)


def test_crop_takes_back_what_the_tokens_gave() -> None:
    model = tiny_model()
    drive = Drive(model, H2OCache(model, budget=20, eviction_interval=100))
    drive.feed(random_ids(1, 40))
    for step in range(9):
        drive.feed(random_ids(1, 1, step))
    drive.cache.crop(-6)
    again = Drive(model, H2OCache(model, budget=20, eviction_interval=100))
    again.feed(random_ids(1, 40))
    for step in range(3):
        again.feed(random_ids(1, 1, step))
    other = Drive(model, drive.cache, again.ids, again.mask)
    for each in (other, again):
        for step in range(5):
            each.feed(random_ids(1, 1, 30 + step))
    for layer, expected in zip(other.cache.ragged_layers, again.cache.ragged_layers, strict=True):
        other.cache._score_pending(layer)
        again.cache._score_pending(expected)
        filled = layer.store.filled()
        assert torch.equal(layer.store.scores[filled], expected.store.scores[filled])
    check_sums(again)


def test_crop_beyond_the_held_queries_is_refused() -> None:
    model = tiny_model()
    cache = H2OCache(model, budget=400, eviction_interval=2)
    Drive(model, cache).feed(random_ids(1, 200))
    with pytest.raises(ValueError, match="newest 64"):
        cache.crop(-65)
    with pytest.raises(ValueError, match="minus"):
        cache.crop(3)
    assert cache.get_seq_length() == 200
    cache.crop(-64)
    assert cache.get_seq_length() == 136 and cache.kept_columns(0)[0] == list(range(136))
    cache.crop(0)


def test_half_precision_sums_in_float32() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    cache = H2OCache(model, budget=12, eviction_interval=4)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 60))
    for step in range(9):
        drive.feed(random_ids(1, 1, step))
    scores = cache.ragged_layers[0].store.scores
    assert scores.dtype == torch.float32
    assert bool(torch.isfinite(scores[cache.ragged_layers[0].store.filled()]).all())


def test_every_probability_is_counted_once() -> None:
    """Nothing evicted: the sums of a head are the number of its group's queries."""
    model = tiny_model()
    drive = Drive(model, H2OCache(model, budget=1000))
    drive.feed(random_ids(1, 300))
    for step in range(40):
        drive.feed(random_ids(1, 1, step))
    for layer in drive.cache.ragged_layers:
        assert layer.extra["queries"].shape[2] <= 128
        drive.cache._score_pending(layer)
        scores = layer.store.scores.view(2, -1)[:, :340]
        assert torch.allclose(scores.sum(1), torch.full((2,), 2 * 340.0, dtype=torch.float64))
