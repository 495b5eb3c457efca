"""`examples/train_dar.py` from end to end on a tiny model, and the perplexity log that it writes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from tiny_texts import english, tiny_tokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

from nearfar import DARConfig
from nearfar.training import corpus_tokenizer
from nearfar.training.corpus_tokenizer import spread_pieces, train_corpus_tokenizer
from nearfar.training.perplexity_log import (
    PerplexityLog,
    plot_relative_perplexity,
    read_perplexity_log,
    relative_perplexity,
    tokens_per_second,
)
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "train_dar.py"
STEPS, BATCH, BLOCK = 8, 4, 32
VARIANTS = ("--variant", "vanilla", "--variant", "dar:w=8,d=4")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The example as a module; what it sets for its process is put back afterwards."""
    verbosity = transformers.logging.get_verbosity()
    spec = importlib.util.spec_from_file_location("train_dar", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_dar"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_dar"]
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and three texts."""
    folder = tmp_path_factory.mktemp("files")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    for name, words, seed in (("train", 700, 0), ("short", 60, 1), ("long", 200, 2)):
        (folder / f"{name}.txt").write_text(english(words, seed), encoding="utf-8")
    return folder


def arguments(files: Path, output: Path, *more: object) -> list[str]:
    """A run of 8 steps; what `more` says again wins."""
    common = (
        "--text", files / "train.txt", "--tokenizer", files / "tokenizer", "--output", output,
        "--eval-text", f"short={files / 'short.txt'}", "--eval-text", f"long={files / 'long.txt'}",
        "--hidden-size", 32, "--layers", 2, "--heads", 4, "--block-tokens", BLOCK, "--batch-size", BATCH,
        "--per-device-batch-size", 2, "--steps", STEPS, "--eval-every", 2, "--eval-blocks", 12,
        "--cache-dir", files / "cache", "--cpu", *more,
    )  # fmt: skip
    return [str(argument) for argument in common]


@pytest.fixture(scope="module")
def finished(script: ModuleType, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a sweep over two variants that ran without interruption."""
    output = tmp_path_factory.mktemp("finished")
    assert script.main(arguments(files, output, *VARIANTS)) == 0
    return output


def losses(folder: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line["loss"] for line in read_perplexity_log(folder)}


# --- what a sweep leaves ---------------------------------------------------------------------------------------------


def test_perplexity_log_of_a_run(finished: Path) -> None:
    for name in ("vanilla", "dar-w8-d4"):
        lines = read_perplexity_log(finished / name)
        assert [line["step"] for line in lines] == [0, 2, 4, 6, 8]
        assert [line["tokens"] for line in lines] == [step * BATCH * BLOCK for step in (0, 2, 4, 6, 8)]
        assert lines[0]["seconds"] == 0.0
        assert all(before["seconds"] < after["seconds"] for before, after in pairwise(lines))
        for line in lines:
            assert set(line["loss"]) == set(line["perplexity"]) == {"short", "long"}
            for key, loss in line["loss"].items():
                assert line["perplexity"][key] == pytest.approx(math.exp(loss))
        assert lines[0]["perplexity"]["long"] == pytest.approx(384, rel=0.1), "an untrained model knows nothing"
        assert lines[-1]["loss"]["long"] < lines[0]["loss"]["long"] - 0.01


def test_saved_model_has_the_logged_loss(finished: Path, files: Path) -> None:
    """By hand, over the blocks that were evaluated on."""
    for name in ("vanilla", "dar-w8-d4"):
        model = AutoModelForCausalLM.from_pretrained(finished / name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(finished / name)
        assert model.config.use_cache
        assert model.config.eos_token_id == tokenizer.eos_token_id
        assert model.config.has_bottleneck == (name != "vanilla")
        blocks = load_token_blocks(files / "long.txt", tokenizer, BLOCK).part(0, 12)
        ids = torch.stack([blocks[index]["input_ids"] for index in range(len(blocks))])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
        assert losses(finished / name)[STEPS]["long"] == pytest.approx(expected, abs=2e-6)
        rows = json.loads((finished / name / "run.json").read_text())["result"]["row_losses"]["long"]
        assert rows == pytest.approx(
            [F.cross_entropy(row[:-1], wanted[1:]).item() for row, wanted in zip(logits, ids, strict=True)], abs=5e-6
        )
        assert not list((finished / name).glob("checkpoint-*"))


def test_summary(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["baseline"] == "vanilla"
    assert summary["settings"]["learning_rate"] == 1e-3
    assert summary["settings"]["steps"] == STEPS
    assert set(summary["variants"]) == {"vanilla", "dar-w8-d4"}
    vanilla, dar = summary["variants"]["vanilla"], summary["variants"]["dar-w8-d4"]
    assert vanilla["percent_of_baseline"] == 100
    ratios = [dar["perplexity"][name] / vanilla["perplexity"][name] for name in ("short", "long")]
    assert dar["percent_of_baseline"] == pytest.approx(50 * sum(ratios))
    assert dar["parameters"] - vanilla["parameters"] == 2 * 2 * 32 * 4
    assert dar["tokens"] == STEPS * BATCH * BLOCK
    assert dar["tokens_per_second"] > 0
    assert (finished / "perplexity.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (finished / "perplexity.png").stat().st_size > 10_000


def test_token_files_and_no_weights(script: ModuleType, files: Path, finished: Path, tmp_path: Path) -> None:
    """Text that was tokenised elsewhere gives the same run; without weights and checkpoints, figures are left."""
    spec = importlib.util.spec_from_file_location("write_tokens", ROOT / "examples" / "write_tokens.py")
    assert spec is not None and spec.loader is not None
    write_tokens = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_tokens)
    texts = [f"{name}={files / name}.txt" for name in ("train", "short", "long")]
    assert write_tokens.main([*texts, "--tokenizer", str(files / "tokenizer"), "--out", str(tmp_path)]) == 0
    with pytest.raises(SystemExit):
        write_tokens.main(["train.txt", "--tokenizer", str(files / "tokenizer"), "--out", str(tmp_path)])
    more = (
        "--text", tmp_path / "train.npz", "--variant", "dar:w=8,d=4", "--no-keep-weights", "--save-every", STEPS + 1,
    )  # fmt: skip
    options = arguments(files, tmp_path / "runs", *more)
    options = [option.replace(str(files / "long.txt"), str(tmp_path / "long.npz")) for option in options]
    assert script.main(options) == 0
    assert losses(tmp_path / "runs" / "dar-w8-d4") == losses(finished / "dar-w8-d4")
    left = {file.name for file in (tmp_path / "runs" / "dar-w8-d4").iterdir()} - {"runs"}
    assert left == {"run.json", "perplexity.jsonl", "log_history.json"}


def test_finished_variants_are_skipped(
    finished: Path,
    script: ModuleType,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(script, "train_variant", refuse)
    script.main(arguments(files, finished, *VARIANTS))
    out = capsys.readouterr().out
    assert "vanilla: finished already" in out
    table = out.splitlines()[-3:]
    assert table[0].split() == [
        "variant",
        "parameters",
        "ppl",
        "short",
        "ppl",
        "long",
        "%",
        "of",
        "vanilla",
        "tokens/s",
    ]
    assert re.fullmatch(r"vanilla +[\d,]+ +[\d.]+ +[\d.]+ +100\.00 +[\d,]+", table[1])
    assert re.fullmatch(r"dar-w8-d4 +[\d,]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d,]+", table[2])
    # One variant alone is compared with what earlier commands have left.
    script.main(arguments(files, finished, "--variant", "dar:d=4,w=8"))
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]} == {"vanilla", "dar-w8-d4"}


def test_all_variants_see_the_same_blocks(
    script: ModuleType, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    get = TokenBlocks.__getitem__

    def note(self: TokenBlocks, index: int) -> dict[str, torch.Tensor]:
        item = get(self, index)
        seen.append(item["input_ids"].numpy().tobytes())
        return item

    monkeypatch.setattr(TokenBlocks, "__getitem__", note)
    options = ("--steps", 2, "--eval-every", 2, "--eval-blocks", 1)
    script.main(
        arguments(
            files, tmp_path, *options, "--variant", "vanilla", "--variant", "uniform", "--variant", "control:w=4"
        )
    )
    third = len(seen) // 3
    assert len(seen) == 3 * third
    assert third >= 2 * BATCH
    assert seen[:third] == seen[third : 2 * third] == seen[2 * third :]
    configs = {name: DARConfig.from_pretrained(tmp_path / name) for name in ("uniform-d8", "control-w4")}
    assert configs["uniform-d8"].uniform_bottleneck
    assert configs["control-w4"].window_size == 4
    assert configs["control-w4"].bottleneck_size == 32


def test_all_variants_start_alike(script: ModuleType, files: Path, tmp_path: Path) -> None:
    options = script.build_parser().parse_args(arguments(files, tmp_path))
    options.processes = 1
    script.resolve(options)
    variants = [script.parse_variant(text, 32) for text in ("vanilla", "dar:w=4", "uniform:d=4")]
    configs = [script.make_config(options, variant, tiny_tokenizer()) for variant in variants]
    vanilla, *others = [script.make_model(options, config).state_dict() for config in configs]
    for other, config in zip(others, configs[1:], strict=True):
        assert config.has_bottleneck
        assert all(torch.equal(weight, other[name]) for name, weight in vanilla.items())
        added = {name: weight for name, weight in other.items() if name not in vanilla}
        assert len(added) == 4
        assert all(weight.std() == pytest.approx(0.02, rel=0.3) for weight in added.values())


def test_held_out_text_is_not_trained_on(script: ModuleType, files: Path, tmp_path: Path) -> None:
    options = script.build_parser().parse_args(arguments(files, tmp_path))
    options.eval_text, options.processes = [], 1
    script.resolve(options)
    train, evaluation = script.load_data(options, tiny_tokenizer())
    everything = load_token_blocks(files / "train.txt", tiny_tokenizer(), BLOCK).tokens
    held_out = evaluation["held_out"].tokens
    assert len(train) % BATCH == 0
    assert held_out.tolist() == everything[-held_out.size :].tolist()
    assert held_out.size == everything.size // BLOCK // 100 * BLOCK
    assert train.tokens.size <= everything.size - held_out.size
    assert train.tokens.tolist() == everything[: train.tokens.size].tolist()


# --- interrupting ----------------------------------------------------------------------------------------------------


def test_resume_gives_the_same_run(
    finished: Path, script: ModuleType, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    end = PerplexityLog.on_step_end

    def interrupt(self: PerplexityLog, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end(self, args, state, control, **kwargs)
        if state.global_step == 5 and "dar" in args.output_dir:
            raise KeyboardInterrupt

    command = arguments(files, tmp_path, *VARIANTS, "--save-every", 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PerplexityLog, "on_step_end", interrupt)
        script.main(command)
    folder = tmp_path / "dar-w8-d4"
    assert [line["step"] for line in read_perplexity_log(folder)] == [0, 2, 4]
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    assert not (tmp_path / "summary.json").exists()

    capsys.readouterr()
    with pytest.raises(SystemExit):
        script.main(command)
    assert "dar-w8-d4 holds an unfinished run: add --resume" in capsys.readouterr().err

    (folder / "checkpoint-5").mkdir()  # as if the process had been killed while saving
    script.main([*command, "--resume"])
    assert "vanilla: finished already" in capsys.readouterr().out
    lines = read_perplexity_log(folder)
    assert [line["step"] for line in lines] == [0, 2, 4, 6, 8]
    assert all(before["seconds"] < after["seconds"] for before, after in pairwise(lines))
    whole = losses(finished / "dar-w8-d4")
    for step, loss in losses(folder).items():
        assert loss == pytest.approx(whole[step], abs=1e-6), step
    assert not list(folder.glob("checkpoint-*"))
    assert (tmp_path / "summary.json").is_file()


@pytest.mark.slow
def test_resume_after_the_last_step(
    finished: Path, script: ModuleType, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted when all was trained and nothing yet saved but the last checkpoint."""
    command = arguments(files, tmp_path, "--variant", "vanilla")

    def interrupt(lines: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "tokens_per_second", interrupt)
        script.main(command)
    assert [path.name for path in (tmp_path / "vanilla").glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    script.main([*command, "--resume"])
    assert losses(tmp_path / "vanilla") == losses(finished / "vanilla")


def test_other_settings_are_refused(finished: Path, script: ModuleType, files: Path, capsys: Any) -> None:
    for change, message in (
        (("--steps", 9), "a run with steps = 8, and now it is 9"),
        (("--seed", 1, "--resume"), "a run with seed = 0, and now it is 1"),
    ):
        with pytest.raises(SystemExit):
            script.main(arguments(files, finished, "--variant", "vanilla", *change))
        assert message in capsys.readouterr().err


# --- other ways of starting ------------------------------------------------------------------------------------------


def test_from_a_checkpoint(finished: Path, script: ModuleType, files: Path, tmp_path: Path, capsys: Any) -> None:
    """From an ordinary GPT-NeoX, and from a DAR model: the first evaluation is that of the checkpoint."""
    config = GPTNeoXConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        rotary_pct=0.5,
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    shape = ("--hidden-size", "--layers", "--heads")
    command = arguments(files, tmp_path / "out", "--steps", 2, "--eval-every", 2)
    for flag in shape:
        at = command.index(flag)
        del command[at : at + 2]
    script.main([*command, "--model", str(tmp_path / "neox"), "--variant", "vanilla", "--variant", "dar:w=8"])
    trained = DARConfig.from_pretrained(tmp_path / "out" / "dar-w8-d8")
    assert (trained.vocab_size, trained.intermediate_size, trained.bottleneck_size) == (300, 64, 8)
    assert trained.rotary_dims == 4

    start = finished / "dar-w8-d4"
    command[command.index("--output") + 1] = str(tmp_path / "more")
    script.main([*command, "--model", str(start), "--variant", "dar:w=8,d=4"])
    assert losses(tmp_path / "more" / "dar-w8-d4")[0] == pytest.approx(losses(start)[STEPS], abs=1e-6)
    with pytest.raises(SystemExit):
        script.main([*command, "--model", str(start), "--variant", "dar:w=8,d=16"])
    assert "has a bottleneck of 4 numbers, dar-w8-d16 wants 16" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes(finished: Path, files: Path, tmp_path: Path) -> None:
    """They share the batch, so the losses are those of one process; one of them writes and prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*map(str, command), *arguments(files, tmp_path, *VARIANTS)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("% of vanilla") == 1
    assert json.loads((tmp_path / "summary.json").read_text())["processes"] == 2
    for name in ("vanilla", "dar-w8-d4"):
        whole = losses(finished / name)
        for step, loss in losses(tmp_path / name).items():
            assert loss == pytest.approx(whole[step], abs=1e-4), (name, step)


# --- small checkpoints -----------------------------------------------------------------------------------------------


def test_a_small_checkpoint_with_its_own_tokenizer(
    script: ModuleType, files: Path, tmp_path: Path, capsys: Any
) -> None:
    """A trained vocabulary, tied embeddings, bfloat16, and a card that names no path of this machine."""
    command = arguments(files, tmp_path, "--steps", 2, "--eval-every", 2, "--eval-blocks", 2)
    at = command.index("--tokenizer")
    del command[at : at + 2]
    command += ["--vocabulary", "280", "--tie-embeddings", "--save-dtype", "bfloat16", "--license", "apache-2.0"]
    assert script.main([*command, "--card-name", "dar-tiny", *VARIANTS]) == 0
    folder = tmp_path / "dar-w8-d4"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 280 and model.config.vocab_size == 384
    assert tokenizer.decode(tokenizer(text := "as 123 it was\n").input_ids) == text
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.gpt_neox.embed_in.weight
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert sum("embed" in name or "lm_head" in name for name in file.keys()) == 1  # noqa: SIM118

    record = json.loads((folder / "training.json").read_text())
    vanilla = json.loads((tmp_path / "vanilla" / "training.json").read_text())
    assert record["vanilla"]["perplexity"] == vanilla["perplexity"] and vanilla["vanilla"] is None
    assert record["evaluation"]["text"] == {"short": "short.txt", "long": "long.txt"}
    assert record["text"] == ["train.txt"] and record["trained_on_tokens"] == 2 * BATCH * BLOCK
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and "\nlicense: apache-2.0\n" in card and "# dar-tiny\n" in card
    for perplexities in (record["perplexity"], vanilla["perplexity"]):
        assert all(f"{value:.3f}" in card for value in perplexities.values())
    assert str(tmp_path) not in card + json.dumps(record) and str(files) not in card + json.dumps(record)

    script.main([*command, "--variant", "vanilla"])  # finds its tokenizer again
    assert "vanilla: finished already" in capsys.readouterr().out
    command[command.index("280")] = "290"
    with pytest.raises(SystemExit):
        script.main([*command, "--variant", "vanilla"])
    assert "another --vocabulary or text" in capsys.readouterr().err


def test_the_tokenizer_is_trained_on_what_is_trained_on(tmp_path: Path) -> None:
    """On the texts in JSON files, not on the files."""
    rows = [json.dumps({"body": english(3, seed=seed), "zzzz": "zzzz"}) for seed in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    train_corpus_tokenizer(tmp_path / "tokenizer", 300, text=[tmp_path / "rows.jsonl"], text_field="body")
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "tokenizer").get_vocab()
    assert "zz" not in vocabulary and '":' not in vocabulary and len(vocabulary) == 300


def test_the_tokenizer_s_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that decides what it is trained on; older records tell less, and are taken all the same."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "b.txt").write_text(english(30), encoding="utf-8")
    (folder / "a.jsonl").write_text(json.dumps({"body": "Ann."}), encoding="utf-8")
    options: dict[str, Any] = {"text": [str(folder)], "text_field": "body"}

    def train(folder: str = "tokenizer", **changed: Any) -> None:
        train_corpus_tokenizer(tmp_path / folder, 280, **{**options, **changed})

    train()
    file = tmp_path / "tokenizer" / "trained_on.json"
    record = json.loads(file.read_text())
    assert record == {
        "vocabulary": 280,
        "text": [str(folder)],
        "split": None,
        "text_field": "body",
        "bytes": {str(folder / name): (folder / name).stat().st_size for name in ("a.jsonl", "b.txt")},
    }
    monkeypatch.setattr(corpus_tokenizer, "train_digit_tokenizer", None)  # it is there
    train()
    with pytest.raises(ValueError, match=r"another --vocabulary or text \(text_field\)"):
        train(text_field="text")
    (folder / "b.txt").write_text(english(60), encoding="utf-8")
    with pytest.raises(ValueError, match=r"another --vocabulary or text \(bytes\)"):
        train()
    file.write_text(json.dumps({"vocabulary": 280, "text": [str(folder)]}))
    train()
    dataset = {"text": None, "dataset": "someone/corpus", "split": "validation"}
    with pytest.raises(ValueError, match=r"another --vocabulary or text \(text\)"):
        train(**dataset)
    monkeypatch.setattr(corpus_tokenizer, "read_text_pieces", lambda *args, **kwargs: iter(["Ann."]))
    monkeypatch.setattr(corpus_tokenizer, "train_digit_tokenizer", lambda *args, **kwargs: tiny_tokenizer())
    train("other", **dataset)
    record = json.loads((tmp_path / "other" / "trained_on.json").read_text())
    assert (record["text"], record["split"], record["bytes"]) == ("someone/corpus", "validation", None)
    with pytest.raises(ValueError, match="give either text or dataset"):
        train("neither", text=None)


def test_cards_of_what_earlier_commands_have_left(script: ModuleType, files: Path, tmp_path: Path) -> None:
    """None where no weights were kept, and otherwise of the machine that trained them."""
    command = arguments(files, tmp_path, "--steps", 2, "--eval-every", 2, "--eval-blocks", 1)
    script.main([*command, "--variant", "dar:w=8,d=4", "--no-keep-weights"])
    script.main([*command, "--variant", "vanilla"])
    assert not (tmp_path / "dar-w8-d4" / "training.json").exists()
    file = tmp_path / "vanilla" / "run.json"
    run = json.loads(file.read_text())
    run["machine"] = {**run["machine"], "device": "a GPU elsewhere"}
    file.write_text(json.dumps(run))
    script.main([*command, "--variant", "vanilla"])
    assert json.loads((tmp_path / "vanilla" / "training.json").read_text())["machine"] == "a GPU elsewhere"


def test_the_tokenizer_reads_all_over_the_text() -> None:
    pieces = [f"{number:04d}" for number in range(1000)]
    assert spread_pieces(pieces, 4000) == pieces
    assert spread_pieces(iter(pieces), 3999) == pieces[::2]
    assert spread_pieces(iter(pieces), 100) == pieces[::64]
    assert spread_pieces(["long"], 3) == ["long"]


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "fields"),
    [
        ("vanilla", "vanilla", (None, None, None, False)),
        ("dar", "dar-w128-d128", (128, 128, None, False)),
        ("dar:w=0", "dar-w0-d128", (0, 128, None, False)),
        ("dar:d=64,w=16,activation=sigmoid", "dar-w16-d64-sigmoid", (16, 64, "sigmoid", False)),
        ("dar:activation=linear", "dar-w128-d128", (128, 128, None, False)),
        ("uniform:d=64", "uniform-d64", (128, 64, None, True)),
        ("control", "control-w128", (128, 512, None, False)),
    ],
)
def test_variant(script: ModuleType, text: str, name: str, fields: tuple[Any, ...]) -> None:
    variant = script.parse_variant(text, 512)
    names = ("window_size", "bottleneck_size", "bottleneck_activation", "uniform_bottleneck")
    assert variant.name == name
    assert tuple(variant.fields.get(name) for name in names) == fields


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mamba", "'mamba' is none of vanilla, dar, uniform, control"),
        ("", "'' is none of vanilla"),
        ("dar:", "'' is not understood; dar takes w=… and d=… and activation=…"),
        ("dar:w", "'w' is not understood"),
        ("dar:w=", "'w=' is not understood"),
        ("dar:w=4,", "'' is not understood"),
        ("dar:window=4", "'window=4' is not understood"),
        ("dar:w=4,w=5", "w is given twice"),
        ("dar:w=four", "w must be a whole number, got 'four'"),
        ("dar:d=-1", "d must be a whole number, got '-1'"),
        ("vanilla:w=4", "vanilla takes nothing"),
        ("uniform:w=4", "uniform takes d=… and activation=…"),
        ("control:d=4", "control takes w=…"),
    ],
)
def test_variant_errors(script: ModuleType, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        script.parse_variant(text, 512)


def test_sweeps(script: ModuleType, files: Path, tmp_path: Path) -> None:
    def names(*more: object) -> list[str]:
        options = script.build_parser().parse_args(arguments(files, tmp_path, *more))
        options.processes = 1
        script.resolve(options)
        return [variant.name for variant in script.chosen_variants(options)]

    assert names("--sweep", "windows") == ["vanilla", *(f"dar-w{w}-d8" for w in (0, 1, 4, 16, 64, 128, 256))]
    assert names("--sweep", "bottlenecks", "--variant", "dar:d=4") == [
        "dar-w128-d4", "vanilla", "dar-w128-d16", "dar-w128-d8", "uniform-d16", "uniform-d8", "uniform-d4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "name a --variant or a --sweep"),
        (("--variant", "dar:w=32"), "dar-w32-d8: with --block-tokens 32 no token is ever farther away"),
        (("--variant", "dar:d=64,w=4"), "bottleneck_size must lie between 1 and hidden_size = 32, got 64"),
        (("--variant", "dar:w=4,activation=relu"), "bottleneck_activation must be None (linear) or 'sigmoid'"),
        (("--size", "pythia-70m"), "give --size, or --hidden-size"),
        (("--model", "somewhere"), "give --size, or --hidden-size"),
        (("--vocabulary", 300), "--vocabulary trains a tokenizer"),
        (("--dataset", "corpus"), "give --text or --dataset"),
        (("--heads", 0), "--heads must be at least 1, got 0"),
        (("--steps", 0), "--steps must be at least 1, got 0"),
        (("--per-device-batch-size", 3), "--per-device-batch-size 3 does not divide the 4 blocks"),
        (("--eval-text", "novel"), "--eval-text must look like NAME=PATH, got 'novel'"),
        (("--eval-text", "long=a"), "--eval-text long=… is given twice"),
        (("--text", "nowhere.txt"), "no such file or folder: nowhere.txt"),
        (("--text", "nowhere"), "no such file or folder: nowhere"),
        (("--batch-size", 1000), "to train on are fewer than one batch of 1000"),
        (("--block-tokens", 1), "block_tokens must be at least 2"),
    ],
)  # fmt: skip
def test_bad_arguments(
    script: ModuleType, files: Path, tmp_path: Path, capsys: Any, more: tuple[object, ...], message: str
) -> None:
    needs_variant = more and "--variant" not in more
    with pytest.raises(SystemExit) as leaving:
        script.main(arguments(files, tmp_path / "out", *more, *(["--variant", "vanilla"] if needs_variant else [])))
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "refused before any work"


# --- the log's functions ---------------------------------------------------------------------------------------------


def line(step: int, seconds: float = 0.0, **perplexity: float | None) -> dict[str, Any]:
    return {"step": step, "tokens": 10 * step, "seconds": seconds, "loss": {}, "perplexity": perplexity}


def write_log(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "perplexity.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines), encoding="utf-8")
    return folder


def test_relative_perplexity() -> None:
    baseline = line(4, a=10.0, b=20.0)
    assert relative_perplexity(line(4, a=11.0, b=21.0), baseline) == pytest.approx(107.5)
    assert relative_perplexity(line(4, a=11.0, b=21.0), baseline, "b") == pytest.approx(105)
    assert relative_perplexity(line(4, a=11.0, b=None), baseline) is None
    assert relative_perplexity(line(4, a=11.0), baseline) is None
    assert relative_perplexity(line(4, a=11.0), baseline, "a") == pytest.approx(110)


def test_tokens_per_second() -> None:
    assert tokens_per_second([]) is None
    assert tokens_per_second([line(0)]) is None
    assert tokens_per_second([line(0), line(2, 10.0)]) == 2
    assert tokens_per_second([line(0), line(2, 10.0), line(4, 11.0)]) == 20, "the first stretch is left out"


def test_log_of_a_single_set_and_of_a_loss_that_is_no_number(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    log = PerplexityLog(100)
    state, control = transformers.TrainerState(is_world_process_zero=True), transformers.TrainerControl()
    log.on_train_begin(arguments, state, control)
    for step, loss in ((0, 2.0), (5, math.nan), (10, 800.0)):
        state.global_step = step
        log.on_evaluate(arguments, state, control, metrics={"eval_loss": loss, "eval_runtime": 1.0, "epoch": 1.0})
    assert [entry["perplexity"] for entry in read_perplexity_log(tmp_path)] == [
        {"eval": math.exp(2.0)}, {"eval": None}, {"eval": None},
    ]  # fmt: skip
    with pytest.raises(ValueError, match="tokens_per_step must be at least 1"):
        PerplexityLog(0)


@pytest.mark.parametrize("text", ["no json", "[1]", '{"step": 1}', '{"step": "1", "perplexity": {}}', "{}"])
def test_no_perplexity_log(tmp_path: Path, text: str) -> None:
    (tmp_path / "perplexity.jsonl").write_text(json.dumps(line(0, a=1.0)) + "\n" + text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"perplexity.jsonl, line 2: no entry"):
        read_perplexity_log(tmp_path)


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[list[float], list[float], str]] = []
    plot = Axes.plot

    def note(self: Axes, x: Any, y: Any, **kwargs: Any) -> Any:
        drawn.append((list(x), list(y), kwargs["label"]))
        return plot(self, x, y, **kwargs)

    monkeypatch.setattr(Axes, "plot", note)
    runs = {
        "vanilla": write_log(tmp_path / "v", line(0, a=50.0), line(2, a=40.0), line(4, a=20.0)),
        "dar": write_log(tmp_path / "d", line(0, a=51.0), line(2, a=44.0), line(3, a=9.0), line(4, a=19.0)),
        "diverged": write_log(tmp_path / "n", line(2, a=None), line(4, a=None)),
    }
    path = plot_relative_perplexity(runs, tmp_path / "new" / "figure.png", title="title")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert drawn == [([20, 40], pytest.approx([110, 95]), "dar: 95.00 %")]
    drawn.clear()
    plot_relative_perplexity(runs, path, baseline="dar", against="step", eval_set="a")
    assert drawn[0][:2] == ([2, 4], pytest.approx([100 / 1.1, 100 / 0.95]))
    with pytest.raises(ValueError, match="no run is called 'base'"):
        plot_relative_perplexity(runs, path, baseline="base")
    with pytest.raises(ValueError, match="no evaluation of any run can be compared"):
        plot_relative_perplexity(runs, path, baseline="diverged")
    with pytest.raises(ValueError, match="against must be"):
        plot_relative_perplexity(runs, path, against="time")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        plot_relative_perplexity({**runs, "none": tmp_path / "none"}, path)
