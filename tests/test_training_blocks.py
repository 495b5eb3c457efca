"""What training examples share: how blocks are divided up, whose error it is, and how variants are compared."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_texts import english, tiny_tokenizer
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from nearfar.training.comparison_report import compared_with, comparison_figure, comparison_table
from nearfar.training.loss_bar import LossBar, show_loss_bar
from nearfar.training.main_process import in_main_process, run_main
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks
from nearfar.training.training_blocks import blocks_at_once, even_shares, load_training_blocks


def token_blocks(count: int) -> TokenBlocks:
    return TokenBlocks(np.arange(4 * count, dtype=np.uint16), 4)


@pytest.mark.parametrize(
    ("batch", "processes", "wanted", "expected"),
    [(256, 1, None, 8), (256, 8, None, 8), (36, 4, None, 3), (11, 1, None, 1), (32, 2, 16, 16)],
)
def test_blocks_at_once(batch: int, processes: int, wanted: int | None, expected: int) -> None:
    assert blocks_at_once(batch, processes, wanted) == expected


def test_blocks_at_once_refuses() -> None:
    with pytest.raises(ValueError, match="--batch-size 10 cannot be shared by 4 processes"):
        blocks_at_once(10, 4)
    for wanted in (0, 3):
        with pytest.raises(ValueError, match=f"--per-device-batch-size {wanted} does not divide the 4 windows that"):
            blocks_at_once(8, 2, wanted, kind="windows")


@pytest.mark.parametrize(
    ("processes", "expected"), [(1, {"a": 10, "b": 3}), (2, {"a": 8, "b": 3}), (5, {"a": 10, "b": 3})]
)
def test_even_shares(processes: int, expected: dict[str, int]) -> None:
    """At most 10 of each; two processes with two at once share 8 of 10, five 10, and 3 cannot be shared."""
    shared = even_shares({"a": token_blocks(12), "b": token_blocks(3)}, 10, 2, processes)
    assert {name: len(blocks) for name, blocks in shared.items()} == expected
    assert shared["a"].tokens[0] == 0


def test_training_blocks(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(english(700), encoding="utf-8")
    (tmp_path / "other.txt").write_text(english(60, 1), encoding="utf-8")
    source, tokenizer = tmp_path / "train.txt", tiny_tokenizer()
    everything = load_token_blocks(source, tokenizer, 16)
    train, evaluation = load_training_blocks(
        source, tokenizer, 16, batch_size=7, evaluation_texts={"other": tmp_path / "other.txt"}
    )
    assert len(train) == len(everything) // 7 * 7 and list(evaluation) == ["other"]
    assert (
        evaluation["other"].tokens.tolist() == load_token_blocks(tmp_path / "other.txt", tokenizer, 16).tokens.tolist()
    )
    with pytest.raises(ValueError, match="one block and no more"):
        load_training_blocks(source, tokenizer, 16, batch_size=1, max_tokens=20, single_block="one block and no more")
    with pytest.raises(ValueError, match="fewer than one batch of 5000"):
        load_training_blocks(source, tokenizer, 16, batch_size=5000)


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_main(lambda: 3) == 3
    assert run_main(interrupted) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_errors_of_the_main_process() -> None:
    done: list[int] = []
    in_main_process(lambda: done.append(1))
    assert done == [1]

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(ValueError, match="no such file"):
        in_main_process(lambda: fail(OSError("no such file")))
    with pytest.raises(ValueError, match="ImportError"):
        in_main_process(lambda: fail(ImportError()))
    with pytest.raises(KeyError):
        in_main_process(lambda: fail(KeyError("a")))


def test_variants_side_by_side(tmp_path: Path) -> None:
    results: dict[str, dict[str, Any]] = {
        "plain": {"parameters": 1200, "perplexity": {"a": 10.0}, "tokens_per_second": 1500.0, "row_losses": [1.0]},
        "other": {"parameters": 900, "perplexity": {"a": None}, "tokens_per_second": None},
        "third": {"parameters": 900, "perplexity": {"a": 9.0}, "tokens_per_second": 2.0},
    }
    compared = compared_with("plain", results)
    assert [result["percent_of_baseline"] for result in compared.values()] == [100.0, None, pytest.approx(90.0)]
    assert "row_losses" in results["plain"] and "row_losses" not in compared["plain"]
    table = comparison_table(compared, "plain", ["ppl a"], lambda result: [result["perplexity"]["a"]], rule=False)
    assert [line.split() for line in table.splitlines()] == [
        ["variant", "parameters", "ppl", "a", "%", "of", "plain", "tokens/s"],
        ["plain", "1,200", "10.000", "100.00", "1,500"],
        ["other", "900", "–", "–", "–"],
        ["third", "900", "9.000", "90.00", "2"],
    ]
    with pytest.raises(ValueError, match="no variant is called 'else'; there are plain, other, third"):
        compared_with("else", results)
    (note,) = comparison_figure({"plain": tmp_path}, tmp_path / "figure.png", baseline="else", title="")
    assert note.startswith("no figure: ")


def test_loss_bar() -> None:
    calls: list[Any] = []
    trainer: Any = SimpleNamespace(remove_callback=calls.append, add_callback=calls.append)
    show_loss_bar(trainer, "dar")
    assert calls[:2] == [PrinterCallback, ProgressCallback]
    bar = calls[2]
    assert isinstance(bar, LossBar)
    state = SimpleNamespace(is_world_process_zero=True, max_steps=3)
    bar.on_train_begin(None, state, None)
    assert bar.training_bar.desc.startswith("dar")
    bar.on_log(None, state, None, logs={"loss": "1.23456"})
    bar.on_log(None, state, None, logs={"eval_loss": 2.0})
    assert bar.training_bar.postfix == "loss=1.235"
    bar.training_bar.close()
