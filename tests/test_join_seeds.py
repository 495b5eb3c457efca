"""`benchmarks/join_seeds.py`: what several seeds show and what they do not."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SEEDS, BLOCKS, STEPS = 3, 40, (0, 10, 20, 30)
# Logarithms of the variants' perplexities beyond vanilla's: two that differ, and one that does not from another.
TRUTH = {"vanilla": 0.0, "dar-w0-d8": 0.08, "dar-w4-d8": 0.02, "dar-w16-d8": 0.0202, "uniform-d8": 0.15}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "join_seeds.py"
    spec = importlib.util.spec_from_file_location("join_seeds", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["join_seeds"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, seed: int, names: Any = tuple(TRUTH), **settings: Any) -> Path:
    """What train_dar.py would leave; seeds differ much, variants within a seed by a noise of 0.3 %."""
    random = np.random.default_rng(seed)
    level = 3 + 0.2 * random.standard_normal()
    blocks = 0.5 * random.standard_normal(BLOCKS)
    for name in names:
        end = level + TRUTH[name] + 0.003 * random.standard_normal()
        own = blocks + 0.01 * random.standard_normal(BLOCKS)
        rows = end + own - own.mean()
        lines = []
        for step in STEPS:
            loss = end + 3 * math.exp(-step / 5) if step < STEPS[-1] else end
            line = {"step": step, "tokens": 64 * step, "seconds": float(step)}
            lines.append({**line, "loss": {"held": loss}, "perplexity": {"held": math.exp(loss)}})
        shared = {"seed": seed, "steps": 30, "batch_size": 2, "block_tokens": 32, **settings}
        result = {**lines[-1], "parameters": 1000, "tokens_per_second": 64.0, "row_losses": {"held": rows.tolist()}}
        (folder / name).mkdir(parents=True)
        (folder / name / "run.json").write_text(json.dumps({"settings": shared, "result": result}))
        (folder / name / "perplexity.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_joined(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_run(tmp_path / str(seed), seed) for seed in range(SEEDS)]
    write_run(tmp_path / "1" / "unfinished", 1, ["vanilla"])  # one folder deeper: no variant of the run
    assert script.main([*map(str, folders), "--out", str(tmp_path / "out"), "--bootstrap", "200"]) == 0
    printed = capsys.readouterr().out
    assert "vanilla < " in printed
    assert " < dar-w0-d8 < uniform-d8" in printed
    joined = json.loads((tmp_path / "out" / "joined.json").read_text())
    assert joined["seeds"] == [0, 1, 2]
    assert "seed" not in joined["settings"]
    assert joined["neighbours_shown"] == [True, False, True, True]
    assert set(joined["order"][1:3]) == {"dar-w4-d8", "dar-w16-d8"}
    rows = {row["variant"]: row for row in joined["variants"]}
    assert list(rows)[:4] == ["vanilla", "dar-w0-d8", "dar-w4-d8", "dar-w16-d8"]
    for name, row in rows.items():
        share = row["percent"]
        assert share["mean"] == pytest.approx(100 * math.exp(TRUTH[name]), rel=0.006)
        if name == "vanilla":
            assert (share["half_width"], share["blocks"]) == (None, None)
            continue
        assert len(share["seeds"]) == SEEDS
        assert 0 < share["half_width"] < 2
        low, high = share["blocks"]
        assert low < min(share["seeds"]) < max(share["seeds"]) < high
        assert high - low < 3, "blocks differ by half, but alike for all variants"
    assert 0.1 < joined["noise"]["percent"] < 1
    assert joined["noise"]["freedom"] == 8
    assert len(joined["pairs"]) == 10
    for name in ("relative_perplexity.png", "windows.png"):
        assert (tmp_path / "out" / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "not shown" in (tmp_path / "out" / "joined.txt").read_text()


def test_one_seed_shows_nothing(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "0", 0, ["vanilla", "dar-w0-d8"])
    assert script.main([str(folder), "--out", str(tmp_path / "out"), "--baseline", "dar-w0-d8"]) == 0
    assert "vanilla ? dar-w0-d8" in capsys.readouterr().out
    joined = json.loads((tmp_path / "out" / "joined.json").read_text())
    assert joined["baseline"] == "dar-w0-d8"
    assert joined["noise"]["percent"] is None
    assert joined["pairs"][0]["shown"] is None
    assert not (tmp_path / "out" / "windows.png").exists()


def test_a_swept_window_as_the_baseline(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folders = [write_run(tmp_path / str(seed), seed) for seed in range(2)]
    command = [*map(str, folders), "--out", str(tmp_path / "out"), "--baseline", "dar-w4-d8", "--bootstrap", "20"]
    assert script.main(command) == 0
    assert (tmp_path / "out" / "windows.png").is_file()


def test_evaluation_sets_count_alike_whatever_their_size(script: ModuleType) -> None:
    few, many = [3.0, 3.0], [4.0] * 98
    low, high = script.bootstrap_interval({"a": [3.2] * 2, "b": many}, {"b": many, "a": few}, 10, 0)
    assert low == high == pytest.approx(100 * math.exp(0.1))


def test_curves_end_where_the_table_does(script: ModuleType) -> None:
    """The mean over evaluation sets is that of losses in both; steps at which one is not finite are left out."""

    def line(step: int, *losses: float | None) -> dict[str, Any]:
        return {"step": step, "tokens": 10 * step, "loss": dict(zip("xy", losses, strict=True))}

    logs = {"vanilla": [line(0, 9.0, 9.0), line(1, 3.0, None), line(2, 3.0, 4.0)]}
    logs["dar"] = [line(0, 9.0, 9.0), line(1, 3.6, 4.0), line(2, 3.6, 4.0), line(3, 3.0, 3.0)]
    results = {name: {"loss": lines[2]["loss"]} for name, lines in logs.items()}
    runs = [script.Run(Path(), {"seed": 0}, results, logs)]
    ((tokens, (value,)),) = script.curves(runs, "dar", "vanilla")
    table = script.log_perplexities(runs, ["vanilla", "dar"])
    assert tokens == 20 and value == pytest.approx(100 * math.exp(table[0, 1] - table[0, 0]))


def test_settings_that_older_runs_do_not_name(script: ModuleType, tmp_path: Path) -> None:
    """They are None, and not whatever a newer run has."""
    write_run(tmp_path / "a", 0, ["vanilla"])
    write_run(tmp_path / "a", 0, ["dar-w0-d8"], vocabulary=None)
    assert set(script.read_run(tmp_path / "a").results) == {"vanilla", "dar-w0-d8"}
    write_run(tmp_path / "b", 1, vocabulary=300)
    with pytest.raises(ValueError, match="more than their seed: vocabulary is None and 300"):
        script.read_runs([tmp_path / "a", tmp_path / "b"])


def test_students_t(script: ModuleType) -> None:
    for freedom, expected in ((1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423)):
        assert script.t_quantile(0.975, freedom) == pytest.approx(expected, abs=2e-4)
    with pytest.raises(ValueError, match="freedom at least 1"):
        script.t_quantile(0.975, 0)


@pytest.mark.parametrize(
    ("second", "more", "message"),
    [
        ({"seed": 0}, (), "have the same seed, 0"),
        ({"seed": 1, "steps": 40}, (), "more than their seed: steps is 30 and 40"),
        ({"seed": 1, "names": ["dar-w0-d8"]}, (), "the baseline vanilla or decoder is not among the variants"),
        ({"seed": 1}, ("--bootstrap", "0"), "--bootstrap must be at least 1, got 0"),
        (
            {"seed": 1},
            ("--without", "dar-w4"),
            "--without dar-w4: no run has a finished variant of that name; there are dar-w0-d8",
        ),
        ({"seed": 1, "names": []}, (), "holds no finished variant"),
    ],
)
def test_refused(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    second: dict[str, Any],
    more: tuple[str, ...],
    message: str,
) -> None:
    folders = [write_run(tmp_path / "a", 0), write_run(tmp_path / "b", **second)]
    with pytest.raises(SystemExit) as leaving:
        script.main([*map(str, folders), "--out", str(tmp_path / "out"), *more])
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
