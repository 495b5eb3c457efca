"""`examples/train_language_model.py` from end to end on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_texts import english, tiny_tokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from nearfar.training.perplexity_log import PerplexityLog, read_perplexity_log
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks

STEPS, BATCH, WINDOW, BLOCK = 6, 4, 32, 8
VARIANTS = ("decoder", "no_history", "history")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The example as a module; what it sets for its process is put back afterwards."""
    verbosity = transformers.logging.get_verbosity()
    path = Path(__file__).parent.parent / "examples" / "train_language_model.py"
    spec = importlib.util.spec_from_file_location("train_language_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_language_model"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_language_model"]
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and two texts."""
    folder = tmp_path_factory.mktemp("files")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    for name, words, seed in (("train", 500, 0), ("held", 60, 1)):
        (folder / f"{name}.txt").write_text(english(words, seed), encoding="utf-8")
    return folder


def arguments(files: Path, output: Path, *more: object) -> list[str]:
    """A run of 6 steps; what `more` says again wins."""
    common = (
        "--text", files / "train.txt", "--eval-text", f"held={files / 'held.txt'}",
        "--tokenizer", files / "tokenizer", "--output", output, "--cache-dir", files / "cache",
        "--hidden-size", 32, "--history-hidden-size", 8, "--layers", 2, "--heads", 4, "--compression-ratio", 4,
        "--block-tokens", BLOCK, "--window-tokens", WINDOW, "--batch-size", BATCH, "--per-device-batch-size", 2,
        "--steps", STEPS, "--eval-every", 2, "--eval-blocks", 5, "--learning-rate", 0.01, "--cpu", *more,
    )  # fmt: skip
    return [str(argument) for argument in common]


@pytest.fixture(scope="module")
def finished(script: ModuleType, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the three variants, trained without interruption."""
    output = tmp_path_factory.mktemp("finished")
    assert script.main(arguments(files, output)) == 0
    return output


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"]["held"] for line in read_perplexity_log(folder)}


# --- what is compared ------------------------------------------------------------------------------------------------


def test_blocks_of(script: ModuleType) -> None:
    ids = torch.arange(24).reshape(2, 12)
    read, labels = script.blocks_of(ids, 4, alone=False)
    alone, own = script.blocks_of(ids, 4, alone=True)
    assert read.tolist() == ids.tolist()
    assert alone.tolist() == ids.reshape(6, 4).tolist()
    predicted = [number for number in range(24) if number % 4]
    assert labels[:, 1:][labels[:, 1:] != -100].tolist() == predicted
    assert own[:, 1:][own[:, 1:] != -100].tolist() == predicted


def test_logged_loss_is_that_of_the_same_tokens(finished: Path, files: Path) -> None:
    """By hand, block by block: ProxyFormer is given the blocks before as its history, the others are given nothing."""
    tokenizer = tiny_tokenizer()
    windows = load_token_blocks(files / "held.txt", tokenizer, WINDOW).part(0, 5)
    ids = torch.stack([windows[index]["input_ids"] for index in range(len(windows))])
    for name in VARIANTS:
        model = AutoModelForCausalLM.from_pretrained(finished / name, dtype=torch.float32).eval()
        assert model.config.rope_parameters is None
        assert model.config.has_proxies == (name != "decoder")
        by_block = []
        for start in range(0, WINDOW, BLOCK):
            block = ids[:, start : start + BLOCK]
            history = {"history_ids": ids[:, :start]} if name == "history" and start else {}
            with torch.no_grad():
                logits = model(input_ids=block, **history, use_cache=False).logits
            by_block.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), block[:, 1:].flatten()).item())
        expected = sum(by_block) / len(by_block)
        assert losses(finished / name)[STEPS] == pytest.approx(expected, abs=5e-6), name
        result = json.loads((finished / name / "run.json").read_text())["result"]
        assert result["perplexity"]["held"] == pytest.approx(math.exp(expected), rel=1e-5)
        rows = result["row_losses"]["held"]
        assert len(rows) == 5
        assert sum(rows) / 5 == pytest.approx(expected, abs=5e-6)
        assert result["perplexity_by_block"]["held"] == pytest.approx([math.exp(loss) for loss in by_block], rel=1e-5)


def test_all_variants_train_on_the_same_windows(
    script: ModuleType, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    get = TokenBlocks.__getitem__

    def note(self: TokenBlocks, index: int) -> dict[str, torch.Tensor]:
        item = get(self, index)
        seen.append(item["input_ids"].numpy().tobytes())
        return item

    monkeypatch.setattr(TokenBlocks, "__getitem__", note)
    more = ("--steps", 2, "--eval-every", 2, "--variant", "decoder", "--variant", "history")
    script.main(arguments(files, tmp_path, *more))
    half = len(seen) // 2
    assert half >= 2 * BATCH
    assert seen[:half] == seen[half:]


# --- what a run leaves -----------------------------------------------------------------------------------------------


def test_training(finished: Path) -> None:
    for name in VARIANTS:
        lines = read_perplexity_log(finished / name)
        assert [line["step"] for line in lines] == [0, 2, 4, 6]
        assert [line["tokens"] for line in lines] == [step * BATCH * WINDOW for step in (0, 2, 4, 6)]
        assert lines[-1]["loss"]["held"] < lines[0]["loss"]["held"] - 0.05
        assert not list((finished / name).glob("checkpoint-*"))


def test_summary(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["baseline"] == "decoder"
    assert list(summary["variants"]) == list(VARIANTS)
    assert summary["settings"]["optimizer"] == "muon"
    assert summary["settings"]["learning_rate"] == 0.01
    assert summary["predicted_tokens"] == {"held": 5 * (WINDOW // BLOCK) * (BLOCK - 1)}
    decoder, history = summary["variants"]["decoder"], summary["variants"]["history"]
    assert decoder["percent_of_baseline"] == 100
    assert history["percent_of_baseline"] == pytest.approx(
        100 * history["perplexity"]["held"] / decoder["perplexity"]["held"]
    )
    assert history["parameters"] == summary["variants"]["no_history"]["parameters"] > decoder["parameters"]
    assert (finished / "perplexity.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_finished_variants_are_skipped(
    finished: Path, script: ModuleType, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(script, "train_variant", refuse)
    path = finished / "decoder" / "run.json"
    run = json.loads(path.read_text())
    unset = [name for name, value in run["settings"].items() if value is None]
    run["settings"] = {name: value for name, value in run["settings"].items() if value is not None}
    path.write_text(json.dumps(run))  # as of a release that did not have these settings yet
    assert unset
    script.main(arguments(files, finished, "--variant", "history"))
    out = capsys.readouterr().out
    assert "history: finished already" in out
    assert [line.split()[0] for line in out.splitlines()[-4:-1]] == list(VARIANTS), "earlier ones are in the table"

    path = finished / "history" / "run.json"
    before = path.read_text()
    run = json.loads(before)
    run["settings"]["gone"] = 4  # a release that knew it trained another model
    path.write_text(json.dumps(run))
    with pytest.raises(SystemExit):
        script.main(arguments(files, finished, "--variant", "history"))
    assert "holds a run with gone = 4, and now it is None" in capsys.readouterr().err
    path.write_text(before)


def test_resume_gives_the_same_run(
    finished: Path, script: ModuleType, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    end = PerplexityLog.on_step_end

    def interrupt(self: PerplexityLog, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end(self, args, state, control, **kwargs)
        if state.global_step == 5:
            raise KeyboardInterrupt

    command = arguments(files, tmp_path, "--variant", "history", "--save-every", 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PerplexityLog, "on_step_end", interrupt)
        script.main(command)
    assert [path.name for path in (tmp_path / "history").glob("checkpoint-*")] == ["checkpoint-3"]
    with pytest.raises(SystemExit):
        script.main(command)
    assert "holds an unfinished run: add --resume" in capsys.readouterr().err
    script.main([*command, "--resume"])
    whole = losses(finished / "history")
    found = losses(tmp_path / "history")
    assert list(found) == list(whole)
    for step, loss in found.items():
        assert loss == pytest.approx(whole[step], abs=1e-6), step


@pytest.mark.slow
def test_resume_after_the_last_step(
    finished: Path, script: ModuleType, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted when all was trained and nothing yet saved but the last checkpoint."""
    command = arguments(files, tmp_path, "--variant", "no_history")

    def interrupt(lines: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "tokens_per_second", interrupt)
        script.main(command)
    script.main([*command, "--resume"])
    assert losses(tmp_path / "no_history") == losses(finished / "no_history")


@pytest.mark.slow
def test_two_processes(finished: Path, script: ModuleType, files: Path, tmp_path: Path) -> None:
    """They share the batch, so the losses are those of one process; blocks alone leave weights without gradient."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    more = ("--variant", "no_history", "--eval-blocks", 4)
    result = subprocess.run(
        [*command, str(root / "examples" / "train_language_model.py"), *arguments(files, tmp_path, *more)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["processes"] == 2
    # Two processes share four windows evenly; on these the model trained by one is evaluated here.
    windows = load_token_blocks(files / "held.txt", tiny_tokenizer(), WINDOW).part(0, 4)
    model = AutoModelForCausalLM.from_pretrained(finished / "no_history", dtype=torch.float32)
    expected = script.block_losses(model, windows, BLOCK, True, bf16=False).mean(0).exp().tolist()
    found = json.loads((tmp_path / "no_history" / "run.json").read_text())["result"]
    assert found["perplexity_by_block"]["held"] == pytest.approx(expected, rel=1e-3)
    mean = math.exp(sum(map(math.log, expected)) / len(expected))
    assert found["perplexity"]["held"] == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["mano", "adamw"])
def test_other_optimizers(script: ModuleType, files: Path, tmp_path: Path, optimizer: str) -> None:
    more = ("--optimizer", optimizer, "--variant", "decoder_history")
    assert script.main(arguments(files, tmp_path, *more)) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["settings"]["optimizer"] == optimizer
    found = losses(tmp_path / "decoder_history")
    assert found[STEPS] < found[0] - 0.02


def test_held_out_windows_are_not_trained_on(script: ModuleType, files: Path, tmp_path: Path) -> None:
    options = script.build_parser().parse_args(arguments(files, tmp_path))
    options.eval_text, options.processes = [], 1
    script.resolve(options)
    train, evaluation = script.load_data(options, tiny_tokenizer())
    everything = load_token_blocks(files / "train.txt", tiny_tokenizer(), WINDOW).tokens
    held_out = evaluation["held_out"].tokens
    assert held_out.tolist() == everything[-held_out.size :].tolist()
    assert train.tokens.tolist() == everything[: train.tokens.size].tolist()
    assert train.tokens.size <= everything.size - held_out.size
    assert len(train) % BATCH == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--dataset", "corpus"), "give --text or --dataset"),
        (("--eval-split", "test"), "--eval-split is a split of --dataset"),
        (("--eval-text", "novel"), "--eval-text must look like NAME=PATH, got 'novel'"),
        (("--eval-text", "held=a"), "two held-out texts have the same name: held, held"),
        (("--window-tokens", 36), "--window-tokens must be a multiple of --block-tokens"),
        (("--compression-ratio", 3), "generation_block_size must be a multiple of every compression ratio"),
        (("--per-device-batch-size", 3), "--per-device-batch-size 3 does not divide the 4 windows"),
        (("--steps", 0), "--steps must be at least 1, got 0"),
        (("--learning-rate", 0), "--learning-rate must be above 0, got 0"),
        (("--batch-size", 1000), "to train on are fewer than one batch of 1000"),
    ],
)
def test_bad_arguments(
    script: ModuleType, files: Path, tmp_path: Path, capsys: Any, more: tuple[object, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as leaving:
        script.main(arguments(files, tmp_path / "out", *more))
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "refused before any work"
