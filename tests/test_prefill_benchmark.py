"""The prefill benchmark runs end to end on tiny models."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest


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
    assert {key for key in found if key[1] != "kvpress_snapkv"} == {(n, name) for n in (96, 128) for name in there}
    for (_, name), row in found.items():
        assert row["seconds"] > 0
        assert (row["mapper_share"] is not None) == (name in ("sequential", "two_streams"))
        assert row["kept"] == 1 if name == "full" else row["kept"] == pytest.approx(0.3, abs=0.01)
    assert "second GPU" in err and "Held equal" in out and "ProxyKV, two streams" in out


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
