"""`nearfar eval`: what it prints and writes, and one clear line for whatever is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from proxyformer_models import tiny_proxyformer
from tiny_texts import english, save_tiny_checkpoint
from transformers import AutoTokenizer

from nearfar import cli, cli_arguments, cli_loading, cli_texts

SMALL = ["--lengths", "500,600", "--documents", "1", "--needles", "10", "--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(english(400), encoding="utf-8")
    return str(path)


def test_help_has_examples_and_real_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--help"]) == 0
    assert "needles" in capsys.readouterr().out
    assert cli.main(["eval", "needles", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  nearfar eval needles my-proxyformer --lengths 8k,64k,1m" in shown
    assert "(default: 1k,2k,4k,8k)" in shown and "(default: 100)" in shown
    assert "default: None" not in shown and "default: False" not in shown


def test_lengths_are_numbers_with_units() -> None:
    assert cli_arguments.token_counts("1m, 8k,500,8192") == [500, 8192, 1 << 20]
    assert cli_arguments.token_count("64K") == 65_536


def test_needles_are_measured_kept_and_added_to(
    checkpoint: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["eval", "needles", checkpoint, *SMALL, "--text", text_file, "--out", str(out)]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "10 needles a document" in shown and "500" in shown and str(out / "needles.png") in shown
    data = json.loads((out / "needles.json").read_text())
    assert list(data["lengths"]) == ["500", "600"] and data["lengths"]["600"]["asked"] == 10
    assert data["command"].startswith("nearfar eval needles") and data["text"] == [text_file]
    assert data["settings"]["model"] == checkpoint and data["settings"]["dtype"] == "float32"
    assert (out / "needles.png").read_bytes().startswith(b"\x89PNG")

    assert cli.main([*command[:-2], "--out", str(out), "--documents", "2", "--lengths", "500"]) == 0
    again = json.loads((out / "needles.json").read_text())
    assert again["lengths"]["600"] == data["lengths"]["600"]
    first, second = (entry["lengths"]["500"]["documents"] for entry in (data, again))
    assert second["0"] == first["0"] and list(second) == ["0", "1"]

    capsys.readouterr()
    assert cli.main([*command, "--control"]) == 2
    assert "another control" in capsys.readouterr().err
    assert cli.main([*command, "--control", "--quick", "--held-out", "0.5", "--restart", "--span", "400"]) == 0
    shown = capsys.readouterr().out
    assert "control" in shown and "quick (exact, teacher-forced)" in shown
    data = json.loads((out / "needles.json").read_text())
    assert data["settings"]["control"] is True and data["settings"]["span"] == 400
    assert data["settings"]["background_tokens"] < again["settings"]["background_tokens"]


def test_without_text_the_demos_essays_are_read(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def essays(tokens: int) -> str:
        asked.append(tokens)
        return english(300)

    monkeypatch.setattr(cli_texts, "packaged_text", essays)
    command = ["eval", "needles", checkpoint, *SMALL, "--text-tokens", "1k", "--out", str(tmp_path)]
    assert cli.main(command) == 0 and asked == [1024]
    data = json.loads((tmp_path / "needles.json").read_text())
    assert data["settings"]["background_tokens"] == 1024 and data["text"] == "the demo's essays"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval"], "TEST"),
        (["eval", "needles"], "MODEL"),
        (["eval", "needles", "m", "--lengths", "8q"], "such as 8192, 8k or 1m, got '8q'"),
        (["eval", "needles", "m", "--lengths", "0"], "positive number of tokens, got 0"),
        (["eval", "needles", "m", "--lengths", ","], "names nothing"),
        (["eval", "needles", "m", "--documents", "0"], "positive number, got 0"),
        (["eval", "needles", "m", "--held-out", "1"], "between 0 and 1, got 1"),
        (["eval", "needles", "m", "--span", "2k"], "--span 2048 is longer than the shortest document, 1024 tokens"),
        (["eval", "needles", "m", "--text", "/nowhere.txt"], "no such file or folder: /nowhere.txt"),
        (["eval", "needles", "m", "--text", "TEXT", "--out", "TEXT"], "is a file"),
        (["eval", "needles", "m", "--text", "TEXT", "--device", "warp"], "unknown device 'warp'"),
        (["eval", "needles", "FOLDER", "--text", "TEXT"], "without config.json"),
        (["eval", "needles", "CHECKPOINT", "--text", "TEXT"], "--lengths 1024: 50 needles of up to 38 tokens take at"),
        (["eval", "needles", "CHECKPOINT", "--text", "TEXT", "--lengths", "2k", "--span", "500"], "--span 500: 50"),
        (
            ["eval", "needles", "CHECKPOINT", "--text", "TEXT", "--lengths", "2k,4k"],
            "more than the 4096 positions that the model was made for; give shorter --lengths, or --beyond-positions",
        ),
    ],
)
def test_wrong_input_is_told_before_the_model_is_loaded(
    arguments: list[str],
    message: str,
    checkpoint: str,
    text_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(cli_loading, "load_model", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    names = {"TEXT": text_file, "CHECKPOINT": checkpoint, "FOLDER": str(tmp_path / "folder")}
    assert cli.main([names.get(argument, argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err, err


def test_positions_may_be_left_behind(checkpoint: str, text_file: str, tmp_path: Path) -> None:
    command = ["eval", "needles", checkpoint, "--text", text_file, "--out", str(tmp_path), *SMALL, "--quick"]
    assert cli.main([*command, "--lengths", "4100", "--needles", "1", "--beyond-positions"]) == 0
    assert json.loads((tmp_path / "needles.json").read_text())["lengths"]["4100"]["asked"] == 1


def test_our_own_models_load_without_trusting_their_code(text_file: str, checkpoint: str, tmp_path: Path) -> None:
    """In a fresh process, where nothing has made transformers know them yet."""
    folder = tmp_path / "proxyformer"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocabulary = len(AutoTokenizer.from_pretrained(checkpoint))
    tiny_proxyformer(vocab_size=vocabulary, dtype=torch.float32).save_pretrained(folder)
    command = [sys.executable, "-m", "nearfar", "eval", "needles", str(folder), *SMALL, "--text", text_file, "--quick"]
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "needles.json").read_text())["lengths"]["600"]["asked"] == 10
