"""The benchmarks run end to end on a tiny model, and resume."""

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_pairs import add_states, write_pairs
from tiny_texts import english, save_tiny_checkpoint, save_tiny_proxy

from nearfar.evaluation.pruned_reading import Reading
from nearfar.evaluation.pruning_tables import beside_kvzip, machine_lines, shown_rows
from nearfar.modeling.cache_proxykv import ProxyKVCache
from nearfar.modeling.cache_registry import CACHES


def _script(name: str) -> ModuleType:
    """benchmarks/ is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


decode_scaling, pruning_quality = _script("decode_scaling"), _script("pruning_quality")
dar_attention, dar_training, dar_decode = (_script(f"dar_{name}") for name in ("attention", "training", "decode"))

mapper_ablation = _script("mapper_ablation")

MACHINE = ["--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "essays").mkdir()
    for index in range(2):
        (folder / "essays" / f"{index}.txt").write_text(english(150, seed=index))
    return str(save_tiny_checkpoint(folder / "model")), str(folder / "essays")


def _quality(tiny: tuple[str, str], out: Path, *more: str) -> int:
    model, essays = tiny
    return pruning_quality.main(
        ["--model", model, "--essays", essays, "--policies", "full,streaming_llm,random", "--trials", "2",
         "--context-tokens", "400", "--continuation-tokens", "20", "--ratios", "0.25,0.5", "--essay-trials", "1",
         "--essay-context", "300", "--essay-continuation", "30", "--essay-budget", "64", "--out", str(out),
         *MACHINE, *more]
    )  # fmt: skip


def test_pruning_quality_of_policies_that_read_the_context_themselves(
    tiny: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _quality(tiny, tmp_path, "--policies", "snapkv,h2o,kvzip", "--trials", "1", "--essay-trials", "0") == 0
    assert "KVzip" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()[1:]]
    full, *pruned = rows
    assert [row["variant"] for row in pruned] == ["SnapKV, uniform", "SnapKV, global", "H2O", "KVzip"] * 2
    for row in pruned:
        assert 0 <= row["kept_pairs"] - row["size"] * full["kept_pairs"] < 4
        assert 0 < row["scoring_share"] <= row["eviction_share"]


def test_pruning_quality_beside_kvzip(
    tiny: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One proxy's scores serve all ratios; the share of KVzip's scores that is kept is counted anew here."""
    proxy, mapper = save_tiny_proxy(tmp_path, Path(tiny[0]))
    reads: list[str] = []
    score_prompt = ProxyKVCache.score_prompt

    def counted(self: ProxyKVCache, *args: Any, **kwargs: Any) -> ProxyKVCache:
        reads.append(type(self).__name__)
        return score_prompt(self, *args, **kwargs)

    monkeypatch.setattr(ProxyKVCache, "score_prompt", counted)
    masses: dict[str, list[float]] = {}
    mass = Reading.kvzip_mass

    def by_hand(self: Any, cache: Any) -> float:
        repeated, _ = self._repeat()
        prefix = len(self.context.prefix_ids)
        kept = total = 0.0
        for layer, scores in repeated.scores.items():
            total += float(scores[0, :, prefix:].sum())
            for head, columns in enumerate(cache.kept_columns(layer)):
                kept += sum(float(scores[0, head, column]) for column in columns if column >= prefix)
        found: float = mass(self, cache)
        assert prefix > 0 and found == pytest.approx(kept / total, rel=1e-5)
        masses.setdefault(type(cache).__name__, []).append(found)
        return found

    monkeypatch.setattr(Reading, "kvzip_mass", by_hand)
    more = ["--policies", "streaming_llm,kvzip,iam,proxykv", "--trials", "1", "--essay-trials", "1"]
    more += ["--proxy", str(proxy), "--mapper", str(mapper)]
    assert _quality(tiny, tmp_path / "out", *more) == 0
    shown = capsys.readouterr().out
    # The warm-up, one needle context and one essay.
    assert sorted(reads) == ["IAMCache"] * 3 + ["ProxyKVCache"] * 3
    best = masses.pop("KVzipCache")
    assert set(masses) == {"StreamingLLMCache", "IAMCache", "ProxyKVCache"}
    for found in masses.values():
        assert len(found) == 2 and all(0 < one < most for one, most in zip(found, best, strict=True))
    table = shown[shown.index("Beside KVzip") :]
    rows = {line.split("  ")[0]: line.split() for line in table.splitlines()[2:]}
    assert set(rows) >= {"KVzip", "IAM", "ProxyKV", "StreamingLLM", "full"}
    expected = 100 * sum(mine / most for mine, most in zip(masses["ProxyKVCache"], best, strict=True)) / 2
    assert float(rows["ProxyKV"][-1]) == pytest.approx(expected, abs=0.06) and rows["KVzip"][-1] == "100.0"


def test_pruning_quality_leaves_out_what_it_has_no_models_for(
    tiny: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = pruning_quality.parse(["--model", tiny[0], "--proxy", "p"])
    assert "iam" in args.policies and "proxykv" not in args.policies
    for policy, lacking in (("iam", "--proxy"), ("proxykv", "--proxy")):
        with pytest.raises(SystemExit):
            pruning_quality.parse(["--model", tiny[0], "--policies", policy])
        assert f"{policy} needs {lacking}" in capsys.readouterr().err
    more = ["--policies", "full", "--seconds", "1e-9", "--trials", "3"]
    assert _quality(tiny, tmp_path, *more) == 0  # nothing is begun, and that is said
    assert "0 of 4 trials so far" in capsys.readouterr().out


def test_pruning_quality(
    tiny: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _quality(tiny, tmp_path) == 0
    first = capsys.readouterr().out
    file = tmp_path / "measurements.jsonl"
    settings, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    # Two needle trials: full once, two policies at two ratios; one essay: full and two policies at one budget.
    assert len(rows) == 2 * (1 + 2 * 2) + (1 + 2)
    lengths = {row["trial"]: row["kept_pairs"] for row in rows if row["variant"] == "full" and row["kind"] == "needle"}
    for row in rows:
        if row["kind"] == "needle" and row["variant"] != "full":
            # 2 layers of 2 heads; each head keeps its share, rounded up.
            assert 0 <= row["kept_pairs"] - row["size"] * lengths[row["trial"]] < 4
    assert [row["kept_pairs"] for row in rows if row["kind"] == "essay"] == [1200, 256, 256]
    assert "StreamingLLM" in first and "0/2" in first and "seed 0" in first
    assert settings["settings"]["context_tokens"] == 400

    # A run that was killed in the middle of a line goes on with what is missing, and no more.
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:8]) + lines[8][:20])
    calls: list[dict[str, Any]] = []
    measured = pruning_quality.measure

    def counted(*args: Any) -> Iterator[dict[str, Any]]:
        for row in measured(*args):
            calls.append(row)
            yield row

    monkeypatch.setattr(pruning_quality, "measure", counted)
    assert _quality(tiny, tmp_path) == 0
    assert len(calls) == len(rows) - 7
    again = capsys.readouterr().out

    def quality(shown: str) -> list[str]:  # times differ, hits and perplexities must not
        return [line[: line.rindex("  ")].rsplit("  ", 1)[0].rstrip() for line in shown.splitlines()[-3:]]

    assert quality(again)[0] == quality(first)[0]
    calls.clear()
    assert _quality(tiny, tmp_path) == 0
    assert calls == [] and capsys.readouterr().out.splitlines()[-3:] == again.splitlines()[-3:]
    assert _quality(tiny, tmp_path, "--seed", "1") == 2
    assert "another seed" in capsys.readouterr().err


def test_pruning_quality_at_budgets_in_shards(
    tiny: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes' parts are the whole; what is complete is printed without a model."""
    more = ["--budgets", "32,64", "--policies", "full,random"]
    for shard in ("0/2", "1/2"):
        assert _quality(tiny, tmp_path, *more, "--shard", shard) == 0
    assert "shard 1/2: 1 of 1 trials" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()[1:]]
    # Two needle contexts and an essay; each once in full and at both budgets, in 4 heads.
    assert len({(row["kind"], row["trial"], row["size"]) for row in rows}) == len(rows) == 3 * 3
    assert all(row["size"] is None or row["kept_pairs"] == 4 * row["size"] for row in rows)
    assert {row["trial"]: row["shard"] for row in rows if row["kind"] == "needle"} == {0: [0, 2], 1: [1, 2]}

    monkeypatch.setattr(pruning_quality.cli, "load_model", None)
    assert _quality(tiny, tmp_path, *more) == 0
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.startswith(("policy", "full", "Random"))]
    assert table[0].split() == (
        [
            "policy",
            "hits",
            "32",
            "log-prob",
            "ppl",
            "hits",
            "64",
            "log-prob",
            "ppl",
            "essays",
            "32",
            "essays",
            "64",
            "scoring",
            "%",
            "eviction",
            "%",
        ]
    )
    assert "times of a shared machine" in shown and "so far" not in shown and "budget 32, 64" in shown
    essays = {row["size"]: row["nats"] for row in rows if row["kind"] == "essay"}
    assert table[2].split()[7:9] == [f"{math.exp(essays[budget]):.2f}" for budget in (32, 64)]
    assert pruning_quality.main(["--out", str(tmp_path), "--table"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == shown.splitlines()[-3:]
    assert pruning_quality.main(["--out", str(tmp_path / "none"), "--table"]) == 2
    assert "nothing has been measured" in capsys.readouterr().err and not (tmp_path / "none").exists()
    for wrong in (["--shard", "2/2"], ["--shard", "1"], ["--budgets", "0"], ["--table"]):
        with pytest.raises(SystemExit):
            pruning_quality.parse(wrong)


def test_records_of_several_processes(tmp_path: Path) -> None:
    """Nobody's lines are lost, torn or counted twice, and all begin with the same settings."""
    settings = {"seed": 0, "essay": [1, 2]}

    def write(number: int) -> int:
        records = pruning_quality.open_records(tmp_path, settings)
        for trial in range(50):
            row = {"kind": "needle", "trial": trial, "variant": f"v{number % 3}", "size": 0.5, "text": "x" * 500}
            records.add(row)
        return len(records.refresh())

    with ThreadPoolExecutor(6) as pool:
        assert max(pool.map(write, range(6))) == 150
    with (tmp_path / "measurements.jsonl").open("a") as file:
        file.write('{"kind": "nee')  # a process was killed
    row = {"kind": "essay", "trial": 0, "variant": "full", "size": None}
    pruning_quality.open_records(tmp_path, settings).add(row)
    assert len(pruning_quality.open_records(tmp_path, settings).rows) == 151
    with pytest.raises(ValueError, match="another seed"):
        pruning_quality.open_records(tmp_path, {**settings, "seed": 1})


def test_tables_say_which_machines_their_rows_are_of(
    tiny: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an older file, whose rows name none, is gone on with elsewhere."""
    more = ["--policies", "full", "--essay-trials", "0", "--trials", "3"]
    report = pruning_quality.machine_report
    monkeypatch.setattr(pruning_quality, "machine_report", lambda device: {**report(device), "cpu": "one"})
    assert _quality(tiny, tmp_path, *more) == 0
    assert '3 measurements in float32 on {"cpu": "one"' in capsys.readouterr().out
    file = tmp_path / "measurements.jsonl"
    header, *lines = file.read_text().splitlines()
    first, second, _ = map(json.loads, lines)
    assert first["machine"]["cpu"] == "one" and first["machine"]["versions"]["torch"]
    del first["machine"]
    file.write_text("".join(f"{line}\n" for line in (header, json.dumps(first), json.dumps(second))))
    monkeypatch.setattr(pruning_quality, "machine_report", lambda device: {**report(device), "cpu": "two"})
    assert _quality(tiny, tmp_path, *more) == 0
    again = capsys.readouterr().out
    assert pruning_quality.main(["--out", str(tmp_path), "--table"]) == 0
    for shown in (again, capsys.readouterr().out):
        assert shown.count("measurement in float32 on") == 3
        assert '1 measurement in float32 on a machine that was not noted; the file was begun on {"cpu": "one"' in shown
        assert '1 measurement in float32 on {"cpu": "one"' in shown
        assert '1 measurement in float32 on {"cpu": "two"' in shown
    # Of what is not shown nothing is said.
    assert machine_lines(shown_rows([second], ["other"], [], []), "float32", None) == []


def test_records_after_a_beginning_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"seed": 0, "essay": [1, 2]}
    file = tmp_path / "measurements.jsonl"
    for left in ("", '{"settings": {"se'):
        file.write_text(left)
        assert pruning_quality.main(["--out", str(tmp_path), "--table"]) == 2
        assert "nothing has been measured" in capsys.readouterr().err and file.read_text() == left
        for _ in range(2):
            assert pruning_quality.open_records(tmp_path, settings).settings == settings
        assert file.read_text().count("settings") == 1 + bool(left)


def test_kvzip_s_mass_is_compared_on_the_same_trials() -> None:
    """Of the two trials one was measured without KVzip beside it."""
    kvzip, row = CACHES["kvzip"].label, {"kind": "needle", "size": 0.5, "hit": True}
    rows = [{**row, "trial": trial, "variant": kvzip, "kvzip_mass": mass} for trial, mass in enumerate((0.2, 0.8))]
    rows += [{**row, "trial": 0, "variant": "other", "kvzip_mass": 0.1}, {**row, "trial": 1, "variant": "other"}]
    table = beside_kvzip(rows, [kvzip, "other"], [0.5])
    assert table is not None and table.splitlines()[-1].split() == ["other", "100.0", "50.0", "100.0", "50.0"]


def test_pruning_quality_refuses_texts_that_are_too_short(
    tiny: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _quality(tiny, tmp_path, "--context-tokens", "100000") == 2
    assert "no text has the 100021 tokens" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_decode_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--layers", "2", "--hidden-size", "32", "--heads", "4", "--kv-heads", "2", "--budget", "64"]
    arguments += ["--min-tokens", "128", "--max-tokens", "512", "--steps", "3", "--out", str(tmp_path), *MACHINE]
    assert decode_scaling.main(arguments) == 0
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "decode_scaling.json").read_text())["rows"]
    assert (tmp_path / "decode_scaling.png").read_bytes()[:4] == b"\x89PNG"
    held = {(row["cache"], row["tokens"]): row["bytes"] for row in rows}
    assert len(held) == 15
    # 2 layers of 2 heads; keys and values of 8 float32; 4 untimed steps and 3 timed ones.
    assert held["full", 512] == (512 + 7) * 4 * 16 * 4
    # After the first lengths H2O also holds queries that are not in its sums yet; they are bounded.
    assert held["h2o", 256] == held["h2o", 512] < held["full", 512]
    for name in ("streaming_llm", "snapkv"):
        assert held[name, 128] == held[name, 256] == held[name, 512] < held["full", 512]
    # A layer whose heads hold unequal numbers of pairs has a table of the next slots: 64 tokens, 2 heads, 12 bytes.
    proactive = [held["proactive", tokens] for tokens in (128, 256, 512)]
    assert max(proactive) - min(proactive) in (0, 64 * 2 * 12, 2 * 64 * 2 * 12)
    assert max(proactive) < held["full", 512]
    assert "4 times the tokens, 1.00 times the bytes" in shown
    assert decode_scaling.main(["--min-tokens", "64", "--max-tokens", "64", "--budget", "0", *MACHINE]) == 2
    assert "error:" in capsys.readouterr().err


def test_decode_scaling_keeps_its_rows_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--layers", "1", "--hidden-size", "16", "--heads", "2", "--kv-heads", "1", "--budget", "64"]
    arguments += ["--min-tokens", "96", "--max-tokens", "384", "--steps", "2", "--caches", "snapkv,full", *MACHINE]
    whole, kept = tmp_path / "whole", tmp_path / "kept" / "decode_scaling.json"

    def rows(file: Path) -> list[tuple[str, int, int]]:
        return [(row["cache"], row["tokens"], row["bytes"]) for row in json.loads(file.read_text())["rows"]]

    assert decode_scaling.main([*arguments, "--out", str(whole)]) == 0
    uninterrupted = capsys.readouterr().out
    arguments += ["--out", str(kept.parent)]
    measured, decode = [], decode_scaling.decode

    def interrupted(*args: Any) -> dict[str, float]:
        measured.append(args)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return decode(*args)

    monkeypatch.setattr(decode_scaling, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decode_scaling.main(arguments)
    assert "192  SnapKV  " in capsys.readouterr().out
    before = kept.read_text()
    assert [row[:2] for row in rows(kept)] == [("snapkv", 96), ("snapkv", 192)]

    # Nothing more is begun, and what is there is shown.
    assert decode_scaling.main([*arguments, "--seconds", "1e-9"]) == 0
    shown = capsys.readouterr()
    assert "SnapKV at 384: not begun" in shown.err and "Full cache at 96, 192, 384: not begun" in shown.err
    assert "2 times the tokens" in shown.out and kept.read_text() == before and len(measured) == 3
    assert (kept.parent / "decode_scaling.png").is_file()

    # The rest gives what a run that goes through gives, and is not measured again.
    for _ in range(2):
        assert decode_scaling.main(arguments) == 0
        assert len(measured) == 3 + 4 and rows(kept) == rows(whole / "decode_scaling.json")
    assert uninterrupted.split("Held equal")[1].split("ms/step")[0] in capsys.readouterr().out

    # What another process with the same file has measured meanwhile is not measured again either.
    finished = kept.read_text()
    kept.unlink()

    def overtaken(*args: Any) -> dict[str, float]:
        kept.write_text(finished)
        return interrupted(*args)

    monkeypatch.setattr(decode_scaling, "decode", overtaken)
    assert decode_scaling.main(arguments) == 0 and len(measured) == 3 + 4 + 1 and kept.read_text() == finished
    capsys.readouterr()

    for name, before, now in (("steps", 2, 3), ("min-tokens", 96, 192)):
        assert decode_scaling.main([*arguments, f"--{name}", str(now)]) == 2
        message = f"measured with {name.replace('-', '_')} = {before}, now it is {now}: give another --out"
        assert message in capsys.readouterr().err
    # Older releases did not name the default; a row of another machine is told.
    data = json.loads(kept.read_text())
    assert data.pop("min_tokens") == 96
    data["rows"][0]["machine"]["cpu"] = "elsewhere"
    kept.write_text(json.dumps(data))
    assert decode_scaling.main(arguments) == 2
    assert "measured with min_tokens = 1024, now it is 96" in capsys.readouterr().err
    kept.write_text(json.dumps({**data, "min_tokens": 96}))
    assert decode_scaling.main(arguments) == 0
    shown = capsys.readouterr().out
    assert '1 row measured on {"cpu": "elsewhere"' in shown and "5 rows measured on" in shown
    kept.write_text('{"rows": 3}')
    assert decode_scaling.main(arguments) == 2
    assert "does not hold rows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        decode_scaling.main([*arguments, "--seconds", "0"])


def test_mapper_ablation(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    write_pairs(tmp_path / "pairs", [40, 30, 30, 40])
    out = tmp_path / "out"
    tiny = ["--hidden-size", "16", "--layers", "1", "--heads", "2", "--head-dim", "4", "--crop-tokens", "16"]
    tiny += ["--rank-samples", "16", "--batch-size", "2", "--validation", "0.3"]
    tiny += ["--steps", "4", "--epoch-steps", "4", *MACHINE]
    command = ["--pairs", str(tmp_path / "pairs"), "--out", str(out), *tiny]
    with monkeypatch.context() as quick:
        quick.setattr(mapper_ablation, "draw", lambda path, results: path.write_text(""))
        assert mapper_ablation.main([*command, "--variants", "whole,no-binary", "--seeds", "0,1"]) == 0
        (seeds_apart,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("without")]
        assert "±" in seeds_apart
    assert mapper_ablation.main([*command, "--variants", "no-encoder"]) == 0
    shown = capsys.readouterr().out
    names = ["no-binary-seed0", "no-binary-seed1", "no-encoder-seed0", "whole-seed0", "whole-seed1"]
    assert [path.stem for path in sorted(out.glob("*.json"))] == names
    results = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert all(result["trained_steps"] == 4 for result in results.values())
    assert results["no-encoder-seed0"]["parameters"] < results["whole-seed0"]["parameters"]
    assert results["no-binary-seed0"]["parameters"] == results["whole-seed0"]["parameters"]
    cells = next(line for line in shown.splitlines() if line.startswith("without the encoder")).split()[3:]
    mass = [results[name]["mass"]["context"]["0.3"]["relative"] for name in ("no-encoder-seed0", "whole-seed0")]
    assert cells[-2:] == [f"{100 * mass[0]:.2f}", f"{100 * (mass[0] - mass[1]):+.2f}"]
    assert (out / "mapper_ablation.png").read_bytes()[:4] == b"\x89PNG" and not list((out / "runs").iterdir())
    monkeypatch.setattr(mapper_ablation, "draw", lambda path, results: path.write_text(""))

    # What is there is not trained again, and only under the same settings.
    monkeypatch.setattr(mapper_ablation, "train", None)
    assert mapper_ablation.main([*command, "--variants", "whole"]) == 0
    assert mapper_ablation.main(["--out", str(out), "--table"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == shown.splitlines()[-3:]
    assert mapper_ablation.main([*command, "--variants", "whole", "--learning-rate", "1"]) == 2
    assert "another learning_rate (learning_rate was 0.0005, is now 1.0); give" in capsys.readouterr().err
    # Nor is something else trained into the same table.
    assert mapper_ablation.main([*command, "--variants", "no-heads", "--seeds", "7", "--learning-rate", "1"]) == 2
    assert "another learning_rate" in capsys.readouterr().err
    assert mapper_ablation.main(["--out", str(tmp_path / "none"), "--table"]) == 2
    with pytest.raises(SystemExit):
        mapper_ablation.parse([*command, "--variants", "no-luck"])

    # Pairs without states have no variant without them; with states it is the mapper that reads attention alone.
    monkeypatch.undo()
    monkeypatch.setattr(mapper_ablation, "draw", lambda path, results: path.write_text(""))
    assert mapper_ablation.main([*command, "--variants", "no-states"]) == 0
    assert "no-states" not in mapper_ablation.read_results(out)
    add_states(tmp_path / "pairs")
    other = ["--pairs", str(tmp_path / "pairs"), "--out", str(tmp_path / "states"), *tiny]
    assert mapper_ablation.main([*other, "--variants", "whole,no-states"]) == 0
    parameters = {
        name: seeds[0]["parameters"] for name, seeds in mapper_ablation.read_results(tmp_path / "states").items()
    }
    assert parameters["whole"] - parameters["no-states"] == 3 * 2 * 3 * 16  # of the first convolution


def test_mapper_ablation_goes_on_only_under_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is finished yet: a checkpoint alone would be gone on with for other steps."""
    write_pairs(tmp_path / "pairs", [40, 30])
    command = ["--pairs", str(tmp_path / "pairs"), "--out", str(tmp_path / "out"), "--variants", "whole", *MACHINE]
    command += ["--epoch-steps", "2", "--steps"]

    def interrupted(*args: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(mapper_ablation, "train", interrupted)
    with pytest.raises(RuntimeError):
        mapper_ablation.main([*command, "4"])
    with pytest.raises(RuntimeError):
        mapper_ablation.main([*command, "4"])
    for others in (["8"], ["8", "--variants", "no-heads"]):
        assert mapper_ablation.main([*command, *others]) == 2
        shown = capsys.readouterr().err
        assert "another steps (steps was 4, is now 8); give another --out" in shown and "whole-seed0" in shown


def test_mapper_ablation_refuses_what_it_cannot_go_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments that no mapper can have leave no folder behind that asks for them again."""
    write_pairs(tmp_path / "pairs", [40, 30])
    out = tmp_path / "out"
    command = ["--pairs", str(tmp_path / "pairs"), "--out", str(out), "--variants", "whole", *MACHINE]
    command += ["--steps", "4", "--layers", "1", "--head-dim", "4", "--hidden-size", "16", "--heads"]
    assert mapper_ablation.main([*command, "3"]) == 2
    assert "16" in capsys.readouterr().err and not list((out / "runs").glob("*"))

    # A checkpoint of an older release does not say what it was begun with.
    folder = out / "runs" / "no-heads-seed3"
    (folder / "checkpoint-2").mkdir(parents=True)
    (folder / "checkpoint-2" / "training_state.pt").touch()
    monkeypatch.setattr(mapper_ablation, "train", lambda *args: {"variant": "whole", "seed": 0})
    monkeypatch.setattr(mapper_ablation, "read_results", lambda out: {})
    assert mapper_ablation.main([*command, "2"]) == 2
    assert f"{folder} is of a training that is not finished and does not say" in capsys.readouterr().err
    assert not (out / "whole-seed0.json").exists()
    (out / "no-heads-seed3.json").touch()  # its process is about to delete the folder
    mapper_ablation.main([*command, "2"])
    assert json.loads((out / "whole-seed0.json").read_text())["seed"] == 0


def test_dar_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shapes", "1x80x2x16", "--window", "16", "--repeats", "2", "--calls", "1", "--out", str(tmp_path)]
    assert dar_attention.main([*arguments, *MACHINE]) == 0
    rows = json.loads((tmp_path / "dar_attention.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["SDPA flash", "DAR", "DAR with bottleneck"]
    assert rows[0]["relative"] == 1.0
    assert dar_attention.main(["--shapes", "1x80x2", *MACHINE]) == 2
    assert "a shape is" in capsys.readouterr().err


def test_dar_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--shapes",
        "2x32x2",
        "--batch-size",
        "1",
        "--block-tokens",
        "48",
        "--window",
        "16",
        "--vocabulary",
        "61",
    ]
    arguments += ["--rounds", "1", "--steps", "1", "--modes", "eager", "--out", str(tmp_path)]
    assert dar_training.main([*arguments, *MACHINE]) == 0
    rows = json.loads((tmp_path / "dar_training.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["GPT-NeoX", "DAR"]
    assert rows[1]["parameters"] - rows[0]["parameters"] == 2 * 2 * 32 * 8  # layers, down and up, widths
    assert dar_training.main(["--shapes", "2x32", *MACHINE]) == 2
    assert "a shape is" in capsys.readouterr().err


def test_dar_decode(tmp_path: Path) -> None:
    arguments = ["--layers", "2", "--hidden-size", "64", "--heads", "2", "--vocabulary", "61", "--tokens", "200"]
    arguments += ["--batches", "1,2", "--steps", "2", "--window", "16", "--out", str(tmp_path)]
    assert dar_decode.main([*arguments, *MACHINE]) == 0
    record = json.loads((tmp_path / "dar_decode.json").read_text())
    # A quarter of keys and values in float32; an eighth, and one position of 4 bytes.
    ordinary = 2 * 64 * 2 * 4
    assert record["bytes_per_far_token"] == {
        "GPT-NeoX, DynamicCache": ordinary, "DAR fast": ordinary // 4, "DAR small": ordinary // 8 + 4
    }  # fmt: skip
    assert len(record["rows"]) == 3 * 2
