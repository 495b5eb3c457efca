"""Every example script runs; those that train have tests of their own."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tiny_texts import english, tiny_llama, tiny_tokenizer

from nearfar.modeling.cache_registry import CACHES

ROOT = Path(__file__).parent.parent


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_llama(torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_long_prompt(model_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "book.txt").write_text(english(100), encoding="utf-8")
    run_example(
        "long_prompt.py", monkeypatch, "--model", model_folder, "--prompt-file", tmp_path / "book.txt",
        "--budget", 64, "--max-new-tokens", 8,
    )  # fmt: skip
    assert re.search(r"\d+ tokens seen, \d+ pairs kept", capsys.readouterr().out)


@pytest.mark.parametrize("kvzip", [False, True])
def test_compress_once_ask_often(kvzip: bool, model_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "essay.txt").write_text(english(100), encoding="utf-8")
    arguments = (
        "--model", model_folder, "--document", tmp_path / "essay.txt", "--question", "Who?", "--question", "When?",
        "--save", tmp_path / "essay.context", "--max-new-tokens", 4, *(["--kvzip"] if kvzip else []),
    )  # fmt: skip
    run_example("compress_once_ask_often.py", monkeypatch, *arguments)
    first = capsys.readouterr().out
    run_example("compress_once_ask_often.py", monkeypatch, *arguments)  # from the file
    assert capsys.readouterr().out == first
    assert "Who?" in first
    assert "When?" in first


def test_own_policy(model_folder: Path, monkeypatch, capsys) -> None:
    try:
        run_example("own_policy.py", monkeypatch, "--model", model_folder, "--prompt", english(40), "--budget", 32)
    finally:
        CACHES.pop("longest_values", None)
    assert "LongestValuesCache(budget=32" in capsys.readouterr().out
