"""StreamingLLM: which tokens stay, and where re-rotated sinks stand."""

import pytest
import torch
from dense_oracle import Drive
from tiny_models import random_ids, tiny_model

from nearfar.modeling.cache_random import RandomCache
from nearfar.modeling.cache_streaming_llm import StreamingLLMCache
from nearfar.modeling.compat import cache_argument


def test_sinks_and_the_newest_tokens_stay() -> None:
    model = tiny_model()
    cache = StreamingLLMCache(model, budget=10, sink_tokens=3, eviction_interval=4)
    drive = Drive(model, cache)
    drive.feed(random_ids(1, 30))
    for layer in range(3):
        assert cache.kept_columns(layer) == [[0, 1, 2, *range(23, 30)]] * 2
    for step in range(9):  # two evictions, then one token more
        drive.feed(random_ids(1, 1, step))
    assert cache.kept_columns(1) == [[0, 1, 2, *range(31, 39)]] * 2
    assert drive.error() < 1e-10


def test_rerotated_sinks_stand_before_the_window() -> None:
    """A query must see the sinks at the distances they have in the cache.

    Checked by a forward pass over the kept tokens alone with their places in the cache as positions: one layer, whose
    keys depend on nothing but the token and its position.
    """
    model = tiny_model()
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    ids = random_ids(2, 51)  # 21 decode steps: the last one comes right after the fifth eviction
    cache = StreamingLLMCache(model, budget=9, sink_tokens=3, eviction_interval=4, rerotate=True)
    for piece in (ids[:, :30], *(ids[:, i : i + 1] for i in range(30, 51))):
        with torch.no_grad():
            logits = model(piece, **{cache_argument(model): cache}).logits
    kept = torch.tensor(cache.kept_columns(0)[0])
    assert kept.tolist() == [0, 1, 2, *range(44, 51)]
    with torch.no_grad():
        expected = model(ids[:, kept]).logits[:, -1]
    assert float((logits[:, -1] - expected).abs().max()) < 1e-5


def test_rerotated_sinks_do_not_drift() -> None:
    """Many small moves end where one large move does."""
    model = tiny_model(dtype=torch.float32)
    often = StreamingLLMCache(model, budget=8, sink_tokens=2, eviction_interval=1, rerotate=True)
    ids = random_ids(1, 400)
    with torch.no_grad():
        for piece in (ids[:, :100], *(ids[:, i : i + 1] for i in range(100, 400))):
            model(piece, **{cache_argument(model): often})
    layer = often.ragged_layers[0]
    moved = layer.store.dense()[0][:, :, :2]
    columns = torch.tensor(often.kept_columns(0)[0])
    shift = (columns[2] - 2 + torch.arange(2)) - columns[:2]
    expected = often._rotation.rotate(layer.extra["sink_keys"], shift[None], 0)
    assert torch.allclose(moved, expected, atol=1e-6)


def test_rerotation_survives_row_changes_and_files(tmp_path) -> None:
    model = tiny_model()
    cache = StreamingLLMCache(model, budget=8, sink_tokens=2, eviction_interval=2, rerotate=True)
    drive = Drive(model, cache)
    drive.feed(random_ids(2, 30))
    cache.save_context(tmp_path / "c.safetensors")
    loaded = StreamingLLMCache.load_context(tmp_path / "c.safetensors", model)
    assert loaded.rerotate
    cache.batch_select_indices(torch.tensor([1, 0]))
    following = random_ids(2, 6, 3)
    for step in range(6):
        with torch.no_grad():
            a = model(following[:, step : step + 1], **{cache_argument(model): cache}).logits
            b = model(following[[1, 0], step : step + 1], **{cache_argument(model): loaded}).logits
    assert float((a - b[[1, 0]]).abs().max()) < 1e-12


def test_options_without_meaning_are_refused() -> None:
    model = tiny_model()
    for options, words in (
        ({"recent_tokens": 4}, "recent_tokens"),
        ({"allocation": "global"}, "allocation"),
        ({"rerotate": True, "sink_tokens": 0}, "sink"),
    ):
        with pytest.raises(ValueError, match=words):
            StreamingLLMCache(model, budget=16, **options)


def test_random_is_repeatable_and_depends_on_the_seed() -> None:
    model = tiny_model()
    kept = []
    for seed in (1, 1, 2):
        cache = RandomCache(model, budget=9, seed=seed)
        Drive(model, cache).feed(random_ids(1, 40))
        kept.append([cache.kept_columns(layer) for layer in range(3)])
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize("lengths", [[30, 2], [30, 17], [30, 4]])
def test_rerotated_rows_of_a_batch_do_not_depend_on_each_other(lengths: list[int]) -> None:
    """Short rows beside long ones, left padding, and padding between the turns."""
    model = tiny_model()
    longest = max(lengths)
    ids = random_ids(2, longest)
    mask = (torch.arange(longest)[None] >= longest - torch.tensor(lengths)[:, None]).long()
    turn, turn_mask = random_ids(2, 6, 5), torch.ones(2, 6, dtype=torch.long)
    turn_mask[1, :3] = 0
    steps = [random_ids(2, 1, 20 + step) for step in range(9)]

    def run(rows: list[int]) -> torch.Tensor:
        cache = StreamingLLMCache(model, budget=8, sink_tokens=3, eviction_interval=2, rerotate=True)
        drive = Drive(model, cache)
        if len(rows) == 1:  # alone, without any padding
            drive.feed(ids[rows][:, -lengths[rows[0]] :])
            drive.feed(turn[rows][:, turn_mask[rows[0]].bool()])
        else:
            drive.feed(ids * mask, mask)
            drive.feed(turn * turn_mask, turn_mask)
        for step in steps:
            drive.feed(step[rows])
        return torch.cat(drive.logits[-9:], 1)

    together = run([0, 1])
    for row in (0, 1):
        assert float((together[row] - run([row])[0]).abs().max()) < 1e-8
