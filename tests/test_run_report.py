"""Reports: what is compared with what, averages over what all have, charts that hold the figures, damaged files."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_texts import english, save_tiny_checkpoint

from nearfar import cli
from nearfar.evaluation import run_charts, run_lines, run_tables
from nearfar.evaluation.benchmark_runs import BenchmarkRun
from nearfar.evaluation.multi_needle import NeedleResults
from nearfar.evaluation.run_report import (
    compare,
    draw_latency,
    draw_score_against_ratio,
    draw_score_against_time,
    draw_task_heat_map,
    find_runs,
    wilson_interval,
    write_report,
)

pytest.importorskip("matplotlib")

CACHES = (("full", None), *((name, ratio) for name in ("snapkv", "kvzip") for ratio in (0.1, 0.3, 0.5)))


def made_up(
    cache: str, ratio: float | None, *, benchmark: str = "ruler", model: str = "my/model", tasks: int = 3,
    lengths: tuple[int | None, ...] = (1024,), **settings: Any,
) -> BenchmarkRun:  # fmt: skip
    """Scores that follow from the arguments: 1 for a full cache, ratio of SnapKV, a little more of KVzip."""
    score = 1.0 if ratio is None else ratio if cache == "snapkv" else min(1.0, ratio + 0.25)
    samples = {}
    for task in range(tasks):
        for length in lengths:
            for number in range(2):
                name = f"task_{task}"
                samples[f"{name}/{length}/{number}"] = {
                    "task": name,
                    "length": length,
                    "score": None if benchmark == "latency" else max(0.0, score - 0.1 * task),
                    "tokens": 10,
                    "kept_pairs": 1000 * (ratio or 1.0),
                    "cache_bytes": 4e6 * (ratio or 1.0),
                    "prefill_seconds": (2.0 if cache == "kvzip" else 1.0) * (length or 1000) / 1000,
                    "answer_seconds": 0.5 + (ratio or 1.0),
                    **({"seconds_per_token": 0.01 * (1 + (ratio or 1.0))} if benchmark == "latency" else {}),
                }
    common = {"model": model, "dtype": "float32", "seed": 0}
    sizes = {"cache": cache, "budget": None, "retention_ratio": ratio, "cache_options": {}}
    record = {"machine": {"device": "cpu"}}
    return BenchmarkRun(benchmark, {**common, **sizes, **settings}, samples, record)


def all_runs(**changes: Any) -> list[BenchmarkRun]:
    return [made_up(cache, ratio, **changes) for cache, ratio in CACHES]


def test_times_beside_other_processes_are_told() -> None:
    runs = all_runs()
    (comparison,) = compare(runs)
    assert not any("folder" in line for line in run_tables.notes(comparison))
    next(iter(runs[0].samples.values()))["shared"] = True
    next(iter(runs[1].samples.values()))["shared"] = False
    assert "Times: 1 of 42 samples were measured while other processes" in run_tables.notes(comparison)[-1]
    assert [entry.get("shared") for entry in runs[0].scores()] == [1, None, None]


def test_runs_are_compared_where_only_the_cache_differs() -> None:
    runs = [*all_runs(), *all_runs(model="other"), *all_runs(seed=1), *all_runs(benchmark="latency")]
    found = compare(list(reversed(runs)))
    assert sorted(comparison.name for comparison in found) == [
        "latency-model",
        "ruler-model",
        "ruler-model-2",
        "ruler-other",
    ]
    for comparison in found:
        labels = ["full", *(f"{name} {ratio}" for name in ("kvzip", "snapkv") for ratio in (0.1, 0.3, 0.5))]
        assert [run.label for run in comparison.runs] == labels


def test_runs_of_other_data_are_not_compared() -> None:
    runs = [made_up("full", None), made_up("snapkv", 0.3), made_up("full", None), made_up("snapkv", 0.1, tasks=1)]
    for number, run in enumerate(runs):
        for sample in run.samples.values():
            sample["data"] = str(number % 2)
    assert [comparison.runs for comparison in compare(runs)] == [[runs[0], runs[2]], [runs[3], runs[1]]]


def test_no_two_comparisons_have_one_name() -> None:
    """Their charts are files of that name."""
    models = ("llama-2", "llama", "llama", "llama-2-chat")
    runs = [made_up("full", None, model=model, seed=seed) for seed, model in enumerate(models)]
    names = [comparison.name for comparison in compare(runs)]
    assert names == ["ruler-llama-2", "ruler-llama", "ruler-llama-3", "ruler-llama-2-chat"]


def test_averages_are_over_what_all_have() -> None:
    (comparison,) = compare([made_up("full", None), made_up("snapkv", 0.5, tasks=2)])
    assert comparison.cells == [("task_0", 1024), ("task_1", 1024)]
    # Task 1 scores 0.1 less than task 0.
    assert [comparison.average(run) for run in comparison.runs] == pytest.approx([95.0, 45.0])
    assert comparison.seconds(comparison.runs[1]) == pytest.approx(1.024 + 1.0)
    nats = [made_up(cache, ratio, benchmark="perplexity", tasks=1) for cache, ratio in CACHES[:2]]
    (comparison,) = compare(nats)
    assert comparison.average(comparison.runs[0]) == pytest.approx(2.718281828)


def test_charts_hold_the_figures() -> None:
    (comparison,) = compare(all_runs(lengths=(1024, 2048)))
    figure = draw_score_against_ratio(comparison)
    average, *tasks = figure.axes
    assert average.get_title() == "average" and [axis.get_title() for axis in tasks] == ["task_0", "task_1", "task_2"]
    lines = [(line.get_xdata(), line.get_ydata()) for line in average.get_lines()]
    assert list(lines[0][1]) == pytest.approx([90.0, 90.0])  # full: 100, 90 and 80
    kvzip, snapkv = lines[1:]
    assert list(kvzip[0]) == list(snapkv[0]) == [0.1, 0.3, 0.5]
    assert list(kvzip[1]) == pytest.approx([25.0, 45.0, 65.0])
    assert list(snapkv[1]) == pytest.approx([(10 + 0 + 0) / 3, 20.0, 40.0])

    axis = draw_score_against_time(comparison).axes[0]
    assert sorted(text.get_text() for text in axis.texts) == ["", "0.1", "0.1", "0.3", "0.3", "0.5", "0.5"]
    assert list(axis.get_lines()[0].get_xdata()) == pytest.approx([1.536 + 1.5])

    axis = draw_task_heat_map(comparison).axes[0]
    assert [text.get_text() for text in axis.get_yticklabels()][:2] == ["task_0, 1K", "task_0, 2K"]
    assert [text.get_text() for text in axis.texts][:7] == ["100", "35", "55", "75", "10", "30", "50"]

    (comparison,) = compare(all_runs(benchmark="latency", lengths=(1024, 4096), tasks=1))
    prefill, decode, size = draw_latency(comparison).axes
    assert list(prefill.get_lines()[0].get_ydata()) == pytest.approx([1.024, 4.096])
    assert list(decode.get_lines()[0].get_ydata()) == pytest.approx([20.0, 20.0])
    assert list(size.get_lines()[1].get_ydata()) == pytest.approx([0.4, 0.4])


def test_a_report_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index, run in enumerate(
        [*all_runs(), *all_runs(benchmark="latency"), *all_runs(benchmark="perplexity", tasks=1)]
    ):
        run.write(tmp_path / "runs" / str(index) / "run.json")
    made_up("snapkv", 0.7, tasks=2).write(tmp_path / "runs" / "more.json")
    (tmp_path / "runs" / "other.json").write_text('{"some": "thing"}')
    (tmp_path / "runs" / "list.json").write_text("[1]")
    (tmp_path / "runs" / "damaged.json").write_text("{")
    damaged = {**made_up("h2o", 0.5).to_dict(), "samples": {"a/0": {"task": "a"}}}
    (tmp_path / "runs" / "lacking.json").write_text(json.dumps(damaged))
    checkpoint, text = save_tiny_checkpoint(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(english(400))
    needles = ["eval", "needles", str(checkpoint), "--lengths", "500", "--documents", "1", "--needles", "5", "--quick"]
    needles += ["--device", "cpu", "--threads", "1", "--text", str(text), "--out", str(tmp_path / "runs" / "needles")]
    assert cli.main(needles) == 0
    capsys.readouterr()

    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert "damaged.json: not JSON" in err and "lacking.json: KeyError" in err and "other.json" not in err
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "latency-model-time.png",
        "needles-model.png",
        "perplexity-model-heat-map.png",
        "perplexity-model-score-ratio.png",
        "perplexity-model-score-time.png",
        "report.md",
        "ruler-model-heat-map.png",
        "ruler-model-score-ratio.png",
        "ruler-model-score-time.png",
    ]
    assert sorted(Path(line).name for line in out.split()) == names
    report = (tmp_path / "out" / "report.md").read_text()
    assert all(f"]({name})" in report for name in names if name.endswith("png"))
    assert (
        "| task | full | kvzip 0.1 | kvzip 0.3 | kvzip 0.5 | snapkv 0.1 | snapkv 0.3 | snapkv 0.5 | snapkv 0.7 |"
        in report
    )
    assert "| task_0 | 100.0 | 35.0 | 55.0 | 75.0 | 10.0 | 30.0 | 50.0 | 70.0 |" in report
    assert "| task_2 | 80.0 | 15.0 | 35.0 | 55.0 | 0.0 | 10.0 | 30.0 | – |" in report
    assert "| **average** | **95.0** | **30.0** |" in report
    assert "Averages are over the 2 of 3 tasks and lengths that all have." in report
    assert "Samples of each task and length: 2." in report and "different numbers" not in report
    assert "| decode, ms/token, 1K | 20.00 |" in report


def test_averages_by_ratio_beside_kvzip(tmp_path: Path) -> None:
    for index, run in enumerate([*all_runs(), made_up("snapkv", 0.7)]):
        run.write(tmp_path / f"{index}.json")
    report = write_report(find_runs(tmp_path), tmp_path / "out")[0].read_text()
    table = report[report.index("| average score") :].splitlines()
    assert table[0] == "| average score by share of pairs kept | 0.1 | 0.3 | 0.5 | 0.7 | mean | % of KVzip's |"
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in table[2:5]}
    assert [label.removeprefix("| ") for label in rows] == ["Full cache", "KVzip", "SnapKV"]
    # Tasks score 0, 0.1 and 0.2 less than KVzip's ratio + 0.25; the mean is over the ratios that both have.
    scores = [cell.split(" ")[0] for cell in rows["| KVzip"]]
    assert scores == ["25.0", "45.0", "65.0", "–", "45.0", "100.0"]
    scores = [cell.split(" ")[0] for cell in rows["| SnapKV"]]
    assert scores[:5] == ["3.3", "20.0", "40.0", "60.0", "21.1"] and scores[5] == f"{100 * 21.111 / 45:.1f}"
    assert "Means are over 0.1, 0.3, 0.5." in report


def test_intervals_of_averages() -> None:
    # 50 % of 100: Wilson's interval by the textbook; a mean over tasks counts all of their samples.
    assert wilson_interval(50.0, 100) == pytest.approx((40.38, 59.62), abs=0.01)
    assert wilson_interval(0.0, 10)[0] == 0.0 and wilson_interval(100.0, 10)[1] == pytest.approx(100.0)
    (comparison,) = compare(all_runs())
    snapkv = comparison.runs[-1]
    assert snapkv.label == "snapkv 0.5" and comparison.interval(snapkv) == wilson_interval(40.0, 6)
    (comparison,) = compare([made_up("full", None, benchmark="perplexity", tasks=1)])
    assert comparison.interval(comparison.runs[0]) is None


def test_different_numbers_of_samples_are_told(tmp_path: Path) -> None:
    few = made_up("snapkv", 0.5)
    few.samples = {key: sample for key, sample in few.samples.items() if key != "task_0/1024/1"}
    for index, run in enumerate([made_up("full", None), few]):
        run.write(tmp_path / f"{index}.json")
    report = write_report(find_runs(tmp_path), tmp_path / "out")[0].read_text()
    assert "1 to 2." in report and "different numbers of samples" in report


def test_a_cache_goes_by_its_name(tmp_path: Path) -> None:
    """Its arguments are named where they tell runs apart, and stand below the table."""
    proxykv = {"mapper": "/long/path/mapm", "proxy": "/long/path/prox"}
    runs = [made_up("full", None), made_up("kvzip", 0.3, cache_options={"chunk_tokens": 64})]
    runs += [made_up("proxykv", ratio, cache_options=proxykv) for ratio in (0.1, 0.3)]
    for index, run in enumerate(runs):
        run.write(tmp_path / "runs" / f"{index}.json")
    report = write_report(find_runs(tmp_path / "runs"), tmp_path / "out")[0].read_text()
    assert "| task | full | kvzip 0.3 | proxykv 0.1 | proxykv 0.3 |" in report
    assert "\n| ProxyKV | " in report and "ProxyKV (" not in report
    assert "- KVzip: `chunk_tokens=64`\n- ProxyKV: `mapper=/long/path/mapm`, `proxy=/long/path/prox`\n" in report
    assert "% of KVzip's" in report  # found by its name
    (comparison,) = compare(runs)
    assert [line.label for line in run_lines.cache_lines(comparison)] == ["Full cache", "KVzip", "ProxyKV"]

    runs += [made_up("proxykv", ratio, cache_options={**proxykv, "mapper": "/other/new/mapm"}) for ratio in (0.1, 0.3)]
    (comparison,) = compare(runs[::-1])
    lines = run_lines.cache_lines(comparison)
    assert [line.label for line in lines[2:]] == ["ProxyKV (mapper=path/mapm)", "ProxyKV (mapper=new/mapm)"]
    # Runs of one line stand together, by size.
    assert [run for line in lines for run in line.runs] == comparison.runs
    assert lines[2].run_label(lines[2].runs[0]) == "proxykv 0.1 (mapper=path/mapm)"
    (comparison,) = compare([made_up("snapkv", 0.3, cache_options=options) for options in ({}, {"window": 8})])
    assert [line.label for line in run_lines.cache_lines(comparison)] == ["SnapKV", "SnapKV (window=8)"]
    assert run_tables.cache_arguments(comparison)[2:4] == ["- SnapKV: no arguments", "- SnapKV (window=8): `window=8`"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["/a/b/c", "/a/d"], ["c", "d"]),
        (["/a/b/c/", "/a/d/c"], ["b/c", "d/c"]),
        (["org/one", "one"], ["org/one", "one"]),
        (["/a/b", "/a/b/"], ['"/a/b"', '"/a/b/"']),
        ([1, "1"], ["1", '"1"']),
        ([0.5, None], ["0.5", "None"]),
    ],
)
def test_paths_are_as_short_as_they_differ(values: list[Any], shown: list[str]) -> None:
    assert run_lines._short_values(values) == shown


def test_the_heat_map_keeps_a_cache_together() -> None:
    (comparison,) = compare(all_runs())
    axis = draw_task_heat_map(comparison).axes[0]
    # A gap of a fifth of a column between caches.
    assert list(axis.get_xticks()) == pytest.approx([0.5, 1.7, 2.7, 3.7, 4.9, 5.9, 6.9])
    assert [text.get_text() for text in axis.get_xticklabels()] == ["", *["0.1", "0.3", "0.5"] * 2]
    (above,) = axis.child_axes
    assert [text.get_text() for text in above.get_xticklabels()] == ["Full\ncache", "KVzip", "SnapKV"]
    assert [text.get_position()[0] for text in axis.texts[:7]] == pytest.approx(list(axis.get_xticks()))


def test_sizes_are_written_where_there_is_room() -> None:
    """Of runs that all score and take the same, one has its ratio beside its point for each way to put it."""
    runs = [made_up("snapkv", 0.5) for _ in range(9)]
    for number, run in enumerate(runs):
        run.settings["retention_ratio"] = (number + 1) / 10
    axis = draw_score_against_time(compare(runs)[0]).axes[0]
    assert [text.get_text() for text in axis.texts][:2] == ["0.1", "0.9"] and len(axis.texts) == 4


def test_intervals_stand_beside_each_other() -> None:
    """Points of the average lie at their ratios, and are drawn a few points beside them, bars with them."""
    (comparison,) = compare(all_runs())
    average, task, *_ = draw_score_against_ratio(comparison).axes
    _, kvzip, snapkv = average.get_lines()
    exact, half = average.transData.transform((0.3, 50.0)), 1.5 * average.figure.dpi / 72
    for drawn, shift in zip((kvzip, snapkv, *average.collections), (-half, half) * 2, strict=True):
        place = drawn.get_transform().transform((0.3, 50.0))
        assert list(place) == pytest.approx([exact[0] + shift, exact[1]])
    assert all(line.get_transform() == task.transData for line in task.get_lines()[1:])
    # Many ratios leave less room: a line's points stay nearer to their own ratio than to the next.
    runs = [made_up(name, ratio / 50) for name in ("snapkv", "kvzip", "h2o", "random") for ratio in range(1, 50)]
    lines = run_lines.cache_lines(compare(runs)[0])
    places = list(run_charts._dodges(lines, 300.0).values())
    assert places == sorted(places) and places[-1] == -places[0] and 0 < places[-1] < 300 / 50 / 2


def test_nothing_to_report_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "no runs were found" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    made_up("full", None).write(tmp_path / "run.json")
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 0 and (tmp_path / "report" / "report.md").is_file()


def test_needles_without_answers_do_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a run leaves them that was interrupted before its first answer."""
    made_up("full", None).write(tmp_path / "full.json")
    (tmp_path / "needles.json").write_text(json.dumps(NeedleResults({"model": "m"}).to_dict()))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "needles.json: no question has been asked yet" in capsys.readouterr().err
