"""The comparison measures every policy on the same thing, survives one that fails, and says only what it saw."""

import dataclasses
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_texts import english, tiny_llama, tiny_tokenizer
from torch.nn import functional as F
from transformers import DynamicCache

from nearfar.cli_demo import _found_most
from nearfar.evaluation import comparison
from nearfar.evaluation.comparison import (
    CacheResult,
    aligned_table,
    compare_caches,
    draw_figure,
    format_bytes,
    format_table,
    held_equal,
    number_or_dash,
    plain_words,
    prepare_contexts,
    write_figure,
    write_json,
)
from nearfar.evaluation.machine import choose_threads, machine_report
from nearfar.evaluation.needles import NeedleAnswer
from nearfar.modeling.cache_registry import CACHES, register_cache

TEXT = english(400)
SIZES: dict[str, Any] = dict(
    budget=64, needles=4, context_tokens=300, continuation_tokens=40, decode_tokens=4, progress=False
)


@pytest.fixture
def broken() -> Iterator[str]:
    """A registered policy that fails in the middle of its prefill."""

    class Broken(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            if layer_idx == 1:
                raise RuntimeError("out of cheese")
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    register_cache(
        "broken", lambda model, **_: Broken(config=model.config), label="Broken", description="Fails.", overwrite=True
    )
    yield "broken"
    del CACHES["broken"]


# --- measuring -------------------------------------------------------------------------------------------------------


def test_one_policy_that_fails_hides_no_other(broken: str) -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    results = compare_caches(model, tokenizer, TEXT, ["full", broken, "streaming_llm"], **SIZES)
    assert [result.name for result in results] == ["full", "broken", "streaming_llm"]
    full, failed, pruned = results
    assert failed.error == "RuntimeError: out of cheese"
    assert full.error is None and pruned.error is None

    (context,) = prepare_contexts(tokenizer, TEXT, needles=4, context_tokens=300, continuation_tokens=40, seed=0)
    length = len(context.context_ids)
    assert full.context_tokens == pruned.context_tokens == length
    # 2 layers of 2 heads; keys and values of 8 numbers of 8 bytes. The budget is what a head keeps.
    assert full.kept_pairs == 4 * length and full.cache_bytes == 4 * length * 16 * 8
    assert pruned.kept_pairs == 4 * 64 and pruned.cache_bytes < full.cache_bytes
    assert len(full.answers) == full.needles_asked == 4
    assert full.prefill_seconds > 0 and (full.decode_tokens_per_second or 0) > 0

    with torch.no_grad():
        logits = model(torch.tensor([context.context_ids + context.continuation_ids])).logits[0]
    expected = F.cross_entropy(logits[length:-1], torch.tensor(context.continuation_ids[1:])).exp().item()
    assert len(context.continuation_ids) == 41
    assert full.perplexity == pytest.approx(expected, rel=1e-4)
    assert pruned.perplexity != pytest.approx(expected, rel=1e-3)


def test_a_budget_larger_than_the_context_changes_nothing() -> None:
    sizes = {**SIZES, "budget": 5000}
    full, pruned = compare_caches(tiny_llama(), tiny_tokenizer(), TEXT, ["full", "random"], **sizes)
    assert pruned.kept_pairs == full.kept_pairs
    assert pruned.perplexity == pytest.approx(full.perplexity, rel=1e-6)
    assert "nothing had to be evicted" in "\n".join(plain_words([full, pruned]))


def test_several_texts_are_averaged() -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    other = english(400, seed=9)
    (both,) = compare_caches(model, tokenizer, [TEXT, other], ["streaming_llm"], seed=3, **SIZES)
    (first,) = compare_caches(model, tokenizer, TEXT, ["streaming_llm"], seed=3, **SIZES)
    (second,) = compare_caches(model, tokenizer, other, ["streaming_llm"], seed=4, **SIZES)
    assert both.answers == first.answers + second.answers and both.needles_asked == 8
    assert both.perplexity == pytest.approx(math.sqrt((first.perplexity or 0) * (second.perplexity or 0)))
    assert both.kept_pairs == (first.kept_pairs + second.kept_pairs) / 2


def test_parts_can_be_left_out() -> None:
    sizes = {**SIZES, "needles": 0, "continuation_tokens": 0, "decode_tokens": 0}
    results = compare_caches(tiny_llama(), tiny_tokenizer(), TEXT, ["full", "random"], **sizes)
    assert all(result.perplexity is None and result.decode_tokens_per_second is None for result in results)
    assert all(result.error is None and result.answers == [] for result in results)
    assert format_table(results).count("-  ") > 3
    assert "needles" not in " ".join(plain_words(results))


def test_options_reach_their_policy() -> None:
    results = compare_caches(
        tiny_llama(), tiny_tokenizer(), TEXT, ["random", "streaming_llm"], options={"random": {"sauce": 1}}, **SIZES
    )
    assert "sauce" in (results[0].error or "") and results[1].error is None


@pytest.mark.parametrize(
    ("names", "changes", "error", "message"),
    [
        (["nope"], {}, ValueError, r"unknown cache 'nope'; choose from full, .*streaming_llm"),
        (["full", "full"], {}, ValueError, "twice"),
        ([], {}, ValueError, "no cache"),
        ("full", {}, TypeError, "sequence"),
        (["full"], {"budget": 0}, ValueError, "at least 1 token, got 0"),
        (["full"], {"budget": -3}, ValueError, "at least 1"),
        (["full"], {"budget": None}, ValueError, "exactly one"),
        (["full"], {"retention_ratio": 0.5}, ValueError, "exactly one"),
        (["full"], {"budget": None, "retention_ratio": 1.5}, ValueError, r"\(0, 1\], got 1.5"),
        (["full"], {"budget": None, "retention_ratio": 0.0}, ValueError, r"\(0, 1\]"),
        (["full"], {"context_tokens": 10**6}, ValueError, "too short"),
        (["full"], {"needles": -1}, ValueError, "needles"),
        (["full"], {"decode_tokens": -1}, ValueError, "decode_tokens"),
        (["full"], {"continuation_tokens": -1}, ValueError, "continuation_tokens"),
        (["full"], {"options": {"nope": {}}}, ValueError, "unknown cache"),
    ],
)
def test_bad_requests_are_refused_before_the_model_runs(
    names: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was run")

    model = tiny_llama()
    model.forward = never
    with pytest.raises(error, match=message):
        compare_caches(model, tiny_tokenizer(), TEXT, names, **{**SIZES, **changes})


# --- telling ---------------------------------------------------------------------------------------------------------


def _result(name: str, found: int = 0, perplexity: float | None = 20.0, **changes: Any) -> CacheResult:
    result = CacheResult(
        name=name,
        label=name.title(),
        context_tokens=3000,
        context_digest="d",
        continuation_tokens=256,
        decode_tokens=32,
        budget=512,
        retention_ratio=None,
        needles_asked=12,
        kept_pairs=46080,
        cache_bytes=27e6,
        perplexity=perplexity,
        answers=[NeedleAnswer(str(i), i / 12, i < found, -0.5) for i in range(12)],
        prefill_seconds=1.5,
        decode_tokens_per_second=9.87,
    )
    return dataclasses.replace(result, **changes)


def test_the_demo_names_all_that_found_most() -> None:
    results = [_result("alpha", 3), _result("beta", 9), _result("gamma", 9), _result("delta", 9)]
    assert _found_most(results) == "; Beta, Gamma and Delta found most: 9 of 12 needles in 27.0 MB"
    assert _found_most(results[:2]) == "; Beta found most: 9 of 12 needles in 27.0 MB"
    assert _found_most([]) == _found_most([_result("alpha", needles_asked=0, answers=[])]) == ""


FULL = _result("full", 11, 26.0, kept_pairs=276480, cache_bytes=135e6)


def test_what_was_held_equal_is_checked() -> None:
    conditions = held_equal([FULL, _result("a")])
    assert conditions["budget"] == 512 and conditions["context_digest"] == "d" and len(conditions) == 7
    for change in ({"context_digest": "e"}, {"budget": 256}, {"needles_asked": 3}):
        with pytest.raises(ValueError, match=next(iter(change))):
            held_equal([FULL, _result("a", **change)])


def test_the_table_is_aligned_and_complete() -> None:
    results = [FULL, _result("pruned", 3, 1234.5), _result("bad", error="ValueError: no")]
    lines = format_table(results).splitlines()
    header, rule, *rows, failure = lines
    assert [len(part) for part in rule.split("  ")] and len(rows) == 3
    ends = [i for i, c in enumerate(rule + " ") if c == " " and rule[i - 1] == "-"]
    for row in [header, *rows]:
        # Right-aligned: every column's text ends where its rule ends.
        assert all(row.ljust(len(rule))[end - 1] != " " for end in ends[1:])
    assert rows[0].split() == ["Full", "276,480", "135.0", "MB", "26.00", "11", "of", "12", "1.50", "9.9"]
    assert "1234.50" in rows[1] and "3 of 12" in rows[1]
    assert "failed" in rows[2] and failure == "Bad failed: ValueError: no"


def test_aligned_table_without_a_rule() -> None:
    assert aligned_table(["a", "b"], [["x", number_or_dash(2.346, ".2f")], ["y", number_or_dash(None, ".2f")]],
        rule=False).splitlines() == ["a     b", "x  2.35", "y     –"]  # fmt: skip


def test_aligned_table_takes_any_cells() -> None:
    assert aligned_table(["a", "b"], [["long name", "1"], ["x", "22"]]).splitlines() == [
        "a           b",
        "---------  --",
        "long name   1",
        "x          22",
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (150359040, "150.4 MB"), (2.5e9, "2.50 GB")]
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_words_follow_the_figures() -> None:
    words = "\n".join(plain_words([FULL, _result("near", 9, 27.3), _result("far", 2, 26.52)]))
    assert "16.7 % of the full cache's pairs, 20.0 % of its bytes" in words
    assert "9 of 12 needles found" in words and "perplexity 27.30 (+5.0 %)" in words and "(+2.0 %)" in words
    assert "Most needles among the pruned caches: Near, 9 of 12; fewest: 2." in words
    assert "Lowest perplexity among them: Far, 26.52; highest: Near, 27.30." in words
    assert "missed 1 of 12" in words and "may be chance" not in words

    # The same policies with their figures exchanged: the words change sides.
    words = "\n".join(plain_words([FULL, _result("near", 2, 26.52), _result("far", 9, 27.3)]))
    assert "caches: Far, 9 of 12; fewest: 2." in words and "them: Near, 26.52; highest: Far, 27.30." in words


def test_words_about_ties_chance_and_failures() -> None:
    tie = "\n".join(plain_words([_result("a", 4), _result("b", 4)]))
    assert "All pruned caches found equally many needles, 4 of 12." in tie and "perplexities are equal (20.00)" in tie
    close = "\n".join(plain_words([FULL, _result("a", 4), _result("b", 6)]))
    assert "a difference of 2 may be chance" in close
    apart = "\n".join(plain_words([FULL, _result("a", 4), _result("b", 7)]))
    assert "fewest: 4" in apart and "chance" not in apart
    several = "\n".join(plain_words([_result("a", 6), _result("b", 6), _result("c", 1)]))
    assert "A and B, 6 of 12" in several
    failed = plain_words([_result("a", error="ValueError: no"), FULL])
    assert failed[0] == "A could not be measured (ValueError: no)."
    better = "\n".join(plain_words([FULL, _result("a", 12, 25.0)]))
    assert "(-3.8 %)" in better
    same = "\n".join(
        plain_words([dataclasses.replace(FULL, answers=_result("x", 12).answers), _result("a", 12, 26.0)])
    )
    assert "as with the full cache" in same and "missed" not in same


# --- files -----------------------------------------------------------------------------------------------------------


def test_json_says_what_is_needed_to_repeat_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "comparison.json"
    results = [FULL, _result("a", 3, math.inf)]
    assert write_json(path, results, model="m", seed=7, command="nearfar demo", text="essay.txt") == path
    record = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert (record["seed"], record["command"], record["model"], record["text"]) == (
        7,
        "nearfar demo",
        "m",
        "essay.txt",
    )
    assert record["held_equal"]["budget"] == 512
    assert {"cpu", "cores", "threads", "device", "versions"} <= set(record["machine"])
    assert {"python", "torch", "transformers", "nearfar"} == set(record["machine"]["versions"])
    full, other = record["results"]
    assert full["needles_found"] == 11 and full["kept_pairs"] == 276480 and len(full["answers"]) == 12
    assert other["perplexity"] == "inf"
    assert [file.name for file in path.parent.iterdir()] == ["comparison.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "comparison.json"
    path.write_text("old")

    def fail(source: Path, target: Path) -> None:
        assert json.loads(Path(source).read_text())["model"] == "m"  # complete before it is renamed
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, [FULL], model="m")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_files_get_the_permissions_of_any_other_file(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", [FULL], model="m")
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(os.stat(path).st_mode) == stat.S_IMODE(os.stat(plain).st_mode)


def test_the_figure_is_readable(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [FULL, *[_result(f"policy {i}", i, 26 + i / 100) for i in range(6)], _result("x", error="no")]
    path = write_figure(tmp_path / "figure.png", results, "A title")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and list(tmp_path.iterdir()) == [path]

    figure = draw_figure(results, "A title")
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(texts) == 7 and texts[0] == "Full: 135.0 MB, perplexity 26.00, 11 of 12 needles"
    # Nothing overlaps: title, panels with their labels, legend, and the legend's lines.
    boxes: list[Any] = [axis.get_tightbbox(renderer) for axis in figure.axes]
    boxes += [legend.get_window_extent(renderer), figure._suptitle.get_window_extent(renderer)]  # type: ignore[attr-defined]
    boxes_of_lines: list[Any] = [text.get_window_extent(renderer) for text in legend.get_texts()]
    for group in (boxes, boxes_of_lines):
        for index, box in enumerate(group):
            assert not any(box.overlaps(other) for other in group[index + 1 :])
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    # Each marker stands where its figures say.
    perplexity, needles = figure.axes
    assert np.asarray(perplexity.lines[0].get_xydata()).tolist() == [[135.0, 26.0]]
    assert np.asarray(needles.lines[3].get_xydata()).tolist() == [[27.0, 2.0]]


def test_a_figure_without_one_of_its_panels() -> None:
    pytest.importorskip("matplotlib")
    assert len(draw_figure([_result("a", perplexity=None)]).axes) == 1
    assert len(draw_figure([_result("a", needles_asked=0, answers=[])]).axes) == 1
    assert draw_figure([FULL, _result("a", perplexity=500.0)]).axes[0].get_yscale() == "log"
    assert draw_figure([FULL, _result("a", perplexity=math.inf)]).axes
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_figure([_result("a", error="no")])


# --- machine ---------------------------------------------------------------------------------------------------------


def test_threads_are_chosen_by_what_they_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that runs as told: two threads twice as fast, then two threads ten times slower."""
    before = torch.get_num_threads()
    small = torch.zeros(2, 2)
    monkeypatch.setattr(torch, "randn", lambda *shape: small)  # the work itself does not matter here
    for speed, expected in ((2.0, 2), (0.01, 1), (1.05, 1)):
        now = [0.0]

        def clock(now: list[float] = now, speed: float = speed) -> float:
            now[0] += 1.0 if torch.get_num_threads() == 1 else 1.0 / speed
            return now[0]

        monkeypatch.setattr(time, "perf_counter", clock)
        assert choose_threads(2) == expected
        assert torch.get_num_threads() == before
    monkeypatch.setattr("nearfar.evaluation.machine.available_cores", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("one thread needs no probe"))
    assert choose_threads() == 1
    with pytest.raises(ValueError, match="max_threads"):
        choose_threads(0)


def test_the_machine_report_is_json() -> None:
    report = machine_report()
    assert json.loads(json.dumps(report)) == report and report["threads"] == torch.get_num_threads()


def test_the_public_functions_are_documented() -> None:
    for name in ("compare_caches", "write_json", "write_figure", "plain_words"):
        assert getattr(comparison, name).__doc__
