"""SnapKV against its definition, one pair at a time."""

import pytest
import torch
from dense_oracle import LOGITS, SEEN, Drive
from eviction_reference import Moment, check_every_eviction, observed
from pruning_policies import EXACT, left_padded
from tiny_models import random_ids, tiny_model

from nearfar.modeling import received_attention as module
from nearfar.modeling.cache_snapkv import SnapKVCache
from nearfar.modeling.compat import cache_argument

SIZES = {"budget": 12, "sink_tokens": 2, "eviction_interval": 3}


def conversation(drive: Drive) -> Drive:
    """Rows of unequal length, decode steps, a padded turn that is shorter than the window, more steps."""
    drive.feed(*left_padded([31, 18, 9]))
    for step in range(7):
        drive.feed(random_ids(3, 1, step))
    turn, mask = random_ids(3, 6, 50), torch.ones(3, 6, dtype=torch.long)
    mask[0, 4:], mask[1, :3] = 0, 0
    drive.feed(turn * mask, mask)
    for step in range(7):
        drive.feed(random_ids(3, 1, 60 + step))
    return drive


@pytest.mark.parametrize(
    ("family", "window", "kernel", "pooling", "allocation"),
    [
        ("llama", 4, 3, "max", "uniform"),
        ("llama", 4, 3, "avg", "head"),
        ("llama", 7, 7, "avg", "uniform"),
        ("llama", 7, 7, "max", "global"),
        ("gpt_neox", 5, 1, "max", "global"),
        ("gemma3", 8, 5, "max", "head"),
        ("mistral", 3, 3, "avg", "global"),
        ("llama", 64, 7, "max", "uniform"),  # a window longer than the budget
    ],
)
def test_every_eviction_keeps_what_the_definition_says(family, window, kernel, pooling, allocation) -> None:
    model = tiny_model(family)
    sizes = {**SIZES, "budget": 8 if family == "mistral" else 12}  # Mistral's window is 12
    cache = SnapKVCache(
        model, window_tokens=window, pooling_kernel=kernel, pooling=pooling, allocation=allocation, **sizes
    )
    drive = conversation(Drive(model, cache))
    recent = min(window, sizes["budget"] - 2)
    evictions = check_every_eviction(drive, observed(window, kernel, pooling == "avg"), lambda budget: recent)
    assert evictions >= 12
    assert drive.error() < EXACT


@pytest.mark.parametrize(
    ("family", "layer", "pooling", "block"),
    [("llama", 1, "max", 1), ("gemma3", 2, "avg", 300), ("gpt_neox", 0, "max", 1 << 22)],
)
def test_scores_of_a_prompt(family, layer, pooling, block, monkeypatch) -> None:
    """To 1e-10 from explicit probabilities, however the queries are cut into blocks, padded or not."""
    monkeypatch.setitem(module.BLOCK_ELEMENTS, "cpu", block)
    model = tiny_model(family)
    cache = SnapKVCache(model, budget=20, window_tokens=6, pooling_kernel=5, pooling=pooling)
    scored: dict[int, torch.Tensor] = {}
    checked = cache._checked_score
    monkeypatch.setattr(cache, "_checked_score", lambda s: scored.setdefault(s.layer_idx, checked(s)))
    drive = Drive(model, cache)
    drive.feed(*left_padded([33, 21]))
    check_every_eviction(drive, observed(6, 5, pooling == "avg"), lambda budget: 6)
    heads = SEEN[layer].shape[1]
    group = LOGITS[layer].shape[1] // heads
    for row, length in ((0, 33), (1, 21)):
        real = list(range(33 - length, 33))
        for head in range(heads):
            logits = LOGITS[layer][row, head * group : (head + 1) * group]
            moment = Moment(logits, SEEN[layer][row, head], real, real, None)
            expected = observed(6, 5, pooling == "avg")(moment)
            for column in real:
                assert abs(float(scored[layer][row, head, column]) - expected[column]) < 1e-10
    assert scored[layer].dtype == torch.float64


def test_without_pooling_a_window_of_one_is_the_last_querys_attention() -> None:
    model = tiny_model(attention="eager", dtype=torch.float32)
    ids = random_ids(1, 30)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
        cache = SnapKVCache(model, budget=9, window_tokens=1, pooling_kernel=1, sink_tokens=0)
        model(ids, **{cache_argument(model): cache})
    for layer, probabilities in enumerate(weights):
        given = probabilities[0, :, -1].view(2, 2, 30).mean(1)
        for head in range(2):
            best = given[head, :-1].topk(8).indices.sort().values.tolist()
            assert cache.kept_columns(layer)[head] == [*best, 29]


def test_chunks_are_evicted_by_their_own_ends_unless_eviction_is_held() -> None:
    model, ids = tiny_model(), random_ids(1, 48)
    kept = []
    for chunks, held in (((48,), False), ((16, 16, 16), True), ((16, 16, 16), False)):
        cache = SnapKVCache(model, window_tokens=4, pooling_kernel=3, **SIZES)
        drive = Drive(model, cache)
        pieces = ids.split(chunks, dim=1)
        if held:
            with cache.hold_eviction():
                for piece in pieces:
                    drive.feed(piece)
        else:
            for piece in pieces:
                drive.feed(piece)
            assert check_every_eviction(drive, observed(4, 3, False), lambda budget: 4) == len(chunks)
        kept.append([cache.kept_columns(layer) for layer in range(3)])
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"window_tokens": 0}, ValueError, "window_tokens"),
        ({"window_tokens": 2.0}, TypeError, "window_tokens"),
        ({"pooling_kernel": 4}, ValueError, "odd"),
        ({"pooling_kernel": -1}, ValueError, "pooling_kernel"),
        ({"pooling_kernel": True}, TypeError, "pooling_kernel"),
        ({"pooling": "sum"}, ValueError, "max or avg"),
    ],
)
def test_bad_options(options, error, words) -> None:
    with pytest.raises(error, match=words):
        SnapKVCache(tiny_model(), budget=16, **options)


def test_a_full_cache_has_no_queries_to_judge_by() -> None:
    from transformers import DynamicCache

    model = tiny_model()
    with pytest.raises(ValueError, match="read the prompt with this cache"):
        SnapKVCache(model, budget=16).ingest(DynamicCache(config=model.config))


def test_the_queries_of_a_pass_are_not_held_on_to() -> None:
    model = tiny_model()
    cache = SnapKVCache(model, budget=16, window_tokens=5)
    Drive(model, cache).feed(random_ids(1, 200))
    for layer in cache.ragged_layers:
        queries = layer.extra["window_queries"]
        assert queries.shape == (1, 4, 5, 8)
        assert queries.untyped_storage().nbytes() == queries.nbytes
    assert cache.nbytes() < 3 * (16 + 64) * 2 * (2 * 64 + 16) + 3 * 5 * 4 * 64 + 3000
