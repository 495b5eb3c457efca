"""The prefill benchmark runs end to end on tiny models."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache


def script():
    """benchmarks/ is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("prefill", Path(__file__).parent.parent / "benchmarks/prefill.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["prefill"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


prefill = script()
TINY = ["--shape", "tiny", "--lengths", "96,128", "--repeats", "1", "--device", "cpu", "--threads", "1"]


def test_a_tiny_run(tmp_path, capsys):
    assert prefill.main([*TINY, "--chunk-tokens", "50", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    rows = json.loads((tmp_path / "prefill.json").read_text())["rows"]
    there = ["full", "snapkv", "kvzip", "sequential", "two_streams"]
    found = {(row["tokens"], row["system"]): row for row in rows}
    assert {key for key in found if "kvpress" not in key[1]} == {(n, name) for n in (96, 128) for name in there}
    for (_, name), row in found.items():
        assert row["seconds"] > 0
        assert (row["mapper_share"] is not None) == (name in ("sequential", "two_streams"))
        if name in there:
            assert row["kept"] == 1 if name == "full" else row["kept"] == pytest.approx(0.3, abs=0.01)
    assert "second GPU" in err and "Held equal" in out and "ProxyKV, two streams" in out


def test_a_mapper_that_reads_states(capsys):
    assert prefill.main([*TINY, "--systems", "sequential", "--proxy-states", "values"]) == 0
    assert "the mapper also reads the proxy's values" in capsys.readouterr().out


def test_rows_are_kept_and_gone_on_with(tmp_path, capsys, monkeypatch):
    """One file over several commands; what is there is not measured again, and other settings are refused."""
    command = ["--shape", "tiny", "--repeats", "1", "--device", "cpu", "--threads", "1", "--out", str(tmp_path)]
    assert prefill.main([*command, "--lengths", "96", "--systems", "full,kvzip"]) == 0
    before = json.loads((tmp_path / "prefill.json").read_text())["rows"]
    measured, measure = [], prefill.measure

    def counted(*args):
        measured.append(args)
        if len(measured) == 2:
            raise RuntimeError("interrupted")
        return measure(*args)

    monkeypatch.setattr(prefill, "measure", counted)
    with pytest.raises(RuntimeError, match="interrupted"):
        prefill.main([*command, "--lengths", "96,128", "--systems", "full,sequential,kvzip"])
    capsys.readouterr()
    rows = json.loads((tmp_path / "prefill.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["full", "kvzip", "sequential"]
    assert [row for row in rows if row["system"] != "sequential"] == before
    assert prefill.main([*command, "--lengths", "96,128", "--systems", "full", "--seconds", "1e-9"]) == 0
    shown = capsys.readouterr()
    assert "not begun" in shown.err and "1.00 x" in shown.out and len(measured) == 2
    assert prefill.main([*command, "--retention-ratio", "0.5"]) == 2
    assert "measured with retention_ratio = 0.3, now it is 0.5" in capsys.readouterr().err


def test_a_long_run_is_run_once(capsys):
    assert prefill.main([*TINY, "--systems", "full", "--long-seconds", "0", "--repeats", "3"]) == 0
    runs = []
    row = prefill.measure(lambda ids: runs.append(ids) or prefill.Prefill(DynamicCache()), torch.ones(1, 1), 3, 1, 9.0)
    assert len(runs) == 5 and row["runs"] == 3  # one of a short prompt, and one of this, do not count


def test_what_is_not_installed_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(prefill, "find", lambda module, name: (_ for _ in ()).throw(prefill.Unavailable("gone")))
    assert prefill.main([*TINY, "--systems", "full,kvzip,sequential"]) == 0
    out, err = capsys.readouterr()
    assert "KVzip is left out: gone" in err and "sequential is left out: gone" in err and "full cache" in out


def test_bad_arguments(capsys):
    for arguments in (["--systems", "h2o"], ["--retention-ratio", "0"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            prefill.main([*TINY, *arguments])
    assert prefill.main([*TINY, "--lengths", "10"]) != 0
    assert "64 tokens" in capsys.readouterr().err


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(prefill.__file__).parent))
    spec = importlib.util.spec_from_file_location("pruned_decode", Path(prefill.__file__).parent / "pruned_decode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_decoding_looks_at_its_file_before_it_makes_a_model(decode, tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(decode, "make_model", lambda *args: made.append(args))
    (tmp_path / "pruned_decode.json").write_text('{"rows": 3}')
    arguments = ["--shape", "tiny", "--lengths", "64", "--out", str(tmp_path), "--device", "cpu", "--threads", "1"]
    assert decode.main(arguments) == 2
    assert "does not hold rows" in capsys.readouterr().err and not made


@pytest.mark.slow
def test_decoding_after_pruning(decode, tmp_path, capsys, monkeypatch):
    arguments = ["--shape", "tiny", "--lengths", "2000", "--batches", "1,3", "--steps", "2", "--out", str(tmp_path)]
    arguments += ["--device", "cpu", "--threads", "1"]
    assert decode.main(arguments) == 0
    rows = json.loads((tmp_path / "pruned_decode.json").read_text())["rows"]
    found = {(row["system"], row["batch"]): row for row in rows}
    assert set(found) == {(name, batch) for name in decode.SYSTEMS for batch in (1, 3)}
    assert found["full", 3]["kept"] == 1 and found["full", 3]["bytes"] == 3 * found["full", 1]["bytes"]
    for name in ("even", "ragged"):
        for batch in (1, 3):
            assert found[name, batch]["kept"] == pytest.approx(0.3, abs=0.01)
        assert found[name, 3]["bytes"] < 0.6 * found["full", 3]["bytes"]
    table = capsys.readouterr().out.split("Held equal")[1]
    # What is there is not measured again, and other settings are refused.
    measure, measured = decode.measure, []
    monkeypatch.setattr(decode, "measure", lambda *key: measured.append(key[:4]) or measure(*key))
    assert decode.main(arguments) == 0
    assert not measured and capsys.readouterr().out.split("Held equal")[1] == table
    assert decode.main([*arguments, "--batches", "1,2", "--systems", "full"]) == 0
    assert [(system, batch) for system, _, _, batch in measured] == [("full", 2)]
    assert decode.main([*arguments, "--retention-ratio", "0.5"]) == 2
    assert "measured with retention_ratio = 0.3, now it is 0.5" in capsys.readouterr().err
    assert decode.main([*arguments, "--lengths", "10"]) == 2
