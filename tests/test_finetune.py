"""`examples/finetune.py` in one process: both of nearfar's models and an ordinary one, from start to saved folder."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from finetune_files import BATCH, BLOCK, IDS, STEPS, command, curve, make_files
from safetensors.torch import load_file
from tiny_texts import tiny_tokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from nearfar.training.perplexity_log import PerplexityLog, read_perplexity_log
from nearfar.training.token_blocks import load_token_blocks

ROOT = Path(__file__).parent.parent
OURS = ("dar", "proxyformer")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The example as a module; what it sets for its process is put back afterwards."""
    verbosity = transformers.logging.get_verbosity()
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples" / "finetune.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["finetune"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["finetune"]
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def finished(script: ModuleType, files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output folder of an uninterrupted run of each model; a batch is read at once."""
    folder = tmp_path_factory.mktemp("finished")
    for name in (*OURS, "llama"):
        script.main([*command(files, name), "--output", str(folder / name)])
    return {name: folder / name for name in (*OURS, "llama")}


def held_loss(folder: Path, files: Path) -> float:
    """Of a saved model, by hand, over the blocks that were evaluated on."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    blocks = load_token_blocks(files / "held.txt", AutoTokenizer.from_pretrained(folder), BLOCK).part(0, 8)
    ids = torch.stack([blocks[index]["input_ids"] for index in range(len(blocks))])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


# --- what a run leaves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OURS, "llama"])
def test_a_run_leaves_the_model_it_trained(name: str, finished: dict[str, Path], files: Path) -> None:
    folder = finished[name]
    losses = curve(folder)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
    lines = read_perplexity_log(folder)
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert lines[-1]["loss"]["held"] == pytest.approx(held_loss(folder, files), abs=2e-6)
    result = json.loads((folder / "run.json").read_text())["result"]
    assert (result["step"], result["kept_step"], result["processes"]) == (STEPS, STEPS, 1)
    assert result["perplexity"]["held"] < result["perplexity_before"]["held"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.use_cache
    if name in OURS:
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert (folder / f"modeling_{name}.py").is_file()
    assert not list(folder.glob("checkpoint-*"))
    if importlib.util.find_spec("tensorboard"):
        assert list(folder.glob("runs/*/events*"))


@pytest.mark.parametrize("name", OURS)
def test_accumulation_and_checkpointing_change_nothing(
    name: str, finished: dict[str, Path], script: ModuleType, files: Path, tmp_path: Path
) -> None:
    arguments = ("--per-device-batch-size", BATCH // 4, "--gradient-checkpointing")
    script.main([*command(files, name, *arguments), "--output", str(tmp_path / "out")])
    assert curve(tmp_path / "out") == pytest.approx(curve(finished[name]), abs=2e-5)
    # Not the weights: where a gradient is nothing but rounding (biases of keys), Adam steps by its sign.
    assert held_loss(tmp_path / "out", files) == pytest.approx(held_loss(finished[name], files), abs=2e-5)


class Rows(torch.utils.data.Dataset):
    """Rows with labels of very different number."""

    def __init__(self) -> None:
        self.ids = torch.randint(3, 256, (8, 24), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: 3 * index] = -100
        return {"input_ids": self.ids[index], "labels": labels}


@pytest.mark.parametrize("name", OURS)
def test_accumulation_is_exact_whatever_the_labels(name: str, files: Path, tmp_path: Path) -> None:
    """The Trainer counts the labels of all parts of a step, and the model divides by that: 1 part against 4."""
    found = []
    for parts in (1, 4):
        model = AutoModelForCausalLM.from_pretrained(files / name, dtype=torch.float64)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=8 // parts, learning_rate=0.1,
            gradient_accumulation_steps=parts, optim="sgd", use_cpu=True, report_to=[], save_strategy="no",
            logging_steps=1, disable_tqdm=True, max_grad_norm=0.0, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Rows())
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        found.append((losses, {key: value.detach() for key, value in model.named_parameters()}))
    (one, weights), (four, others) = found
    assert one == pytest.approx(four, abs=1e-5)  # the Trainer adds losses up in single precision
    assert one[0] != one[-1]
    for key, value in weights.items():
        assert (value - others[key]).abs().max() < 1e-10, key


@pytest.mark.parametrize("name", OURS)
def test_bfloat16(name: str, finished: dict[str, Path], script: ModuleType, files: Path, tmp_path: Path) -> None:
    script.main([*command(files, name, "--precision", "bfloat16", "--steps", 2), "--output", str(tmp_path / "out")])
    found, exact = curve(tmp_path / "out"), curve(finished[name])[:2]
    assert found == pytest.approx(exact, abs=0.05)
    assert found != exact
    assert {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("name", OURS)
def test_predictions_hold_no_caches(name: str, files: Path, tmp_path: Path) -> None:
    """`keys_to_ignore_at_inference`: predictions are logits alone, though the model fills a cache."""
    model = AutoModelForCausalLM.from_pretrained(files / name, dtype=torch.float32)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, use_cache=True)
    with torch.no_grad():
        assert len(model(Rows()[0]["input_ids"][None])) == 2  # logits and the cache
    predictions = Trainer(model, arguments).predict(Rows()).predictions
    assert predictions.shape == (8, 24, IDS["vocab_size"])


# --- interrupting and stopping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_resume_gives_the_same_curve(
    name: str,
    finished: dict[str, Path],
    script: ModuleType,
    files: Path,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    end = PerplexityLog.on_step_end

    def interrupt(self: PerplexityLog, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end(self, args, state, control, **kwargs)
        if state.global_step == 3:
            raise KeyboardInterrupt

    arguments = [*command(files, name), "--output", str(tmp_path)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PerplexityLog, "on_step_end", interrupt)
        script.main(arguments)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert "holds an unfinished run: add --resume" in capsys.readouterr().err

    (tmp_path / "checkpoint-3").mkdir()  # as if the process had been killed while saving
    script.main([*arguments, "--resume"])
    assert curve(tmp_path) == pytest.approx(curve(finished[name]), abs=1e-6)
    logged = [[line["loss"]["held"] for line in read_perplexity_log(folder)] for folder in (tmp_path, finished[name])]
    assert logged[0] == pytest.approx(logged[1], abs=1e-6)
    script.main(arguments)
    assert "finished already" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main([*arguments, "--seed", "1"])
    assert "a run with seed = 0, and now it is 1" in capsys.readouterr().err


def test_nothing_is_trained_after_the_last_step(
    finished: dict[str, Path], script: ModuleType, files: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """A run that was interrupted between its last step and its end is only brought to that end."""
    steps: list[int] = []
    train_step = transformers.Trainer.training_step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.state.global_step)
        return train_step(self, *args, **kwargs)

    monkeypatch.setattr(transformers.Trainer, "training_step", counted)

    def interrupted(arguments: list[str], attribute: str) -> None:
        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(script, attribute, interrupt)
            script.main(arguments)
        assert steps
        steps.clear()
        script.main([*arguments, "--resume"])

    interrupted([*command(files, "llama"), "--output", str(tmp_path / "all")], "save")
    assert steps == [] and curve(tmp_path / "all") == curve(finished["llama"])
    weights = [load_file(folder / "model.safetensors") for folder in (tmp_path / "all", finished["llama"])]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())

    early = ("--learning-rate", 1.0, "--warmup", 3, "--eval-every", 1, "--steps", 30, "--patience", 2)
    whole, resumed = (
        [*command(files, "llama", *early), "--output", str(tmp_path / name)] for name in ("early", "resumed")
    )
    script.main(whole)
    interrupted(resumed, "save")
    assert steps == []
    results = [json.loads((tmp_path / name / "run.json").read_text())["result"] for name in ("early", "resumed")]
    for name in ("step", "kept_step", "perplexity", "perplexity_before"):
        assert results[0][name] == results[1][name]


def test_patience_counts_over_an_interruption(
    script: ModuleType, files: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    early = ("--learning-rate", 1.0, "--warmup", 3, "--eval-every", 1, "--steps", 30, "--patience", 2)
    whole, resumed = ([*command(files, "llama", *early), "--output", str(tmp_path / name)] for name in "ab")
    script.main(whole)
    result = json.loads((tmp_path / "a" / "run.json").read_text())["result"]
    begin = PerplexityLog.on_step_begin

    def interrupt(self: PerplexityLog, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        begin(self, args, state, control, **kwargs)
        if state.global_step == result["kept_step"] + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PerplexityLog, "on_step_begin", interrupt)
        script.main(resumed)
    script.main([*resumed, "--resume"])
    again = json.loads((tmp_path / "b" / "run.json").read_text())["result"]
    assert (again["step"], again["kept_step"]) == (result["step"], result["kept_step"])


def test_early_stopping_keeps_the_best(script: ModuleType, files: Path, tmp_path: Path) -> None:
    arguments = ("--learning-rate", 1.0, "--warmup", 3, "--eval-every", 1, "--steps", 30, "--patience", 2)
    script.main([*command(files, "llama", *arguments), "--output", str(tmp_path)])
    result = json.loads((tmp_path / "run.json").read_text())["result"]
    losses = {line["step"]: line["loss"]["held"] for line in read_perplexity_log(tmp_path)}
    assert result["step"] < 30
    assert result["kept_step"] == result["step"] - 2
    assert losses[result["kept_step"]] == min(losses[step] for step in losses if step)
    assert held_loss(tmp_path, files) == pytest.approx(losses[result["kept_step"]], abs=2e-6)


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_adapter(name: str, script: ModuleType, files: Path, tmp_path: Path) -> None:
    """The adapter alone is saved; with --merge, the model it makes."""
    peft = pytest.importorskip("peft")
    alone, merged = tmp_path / "alone", tmp_path / "merged"
    script.main([*command(files, name, "--lora", "--steps", 2), "--output", str(alone)])
    script.main([*command(files, name, "--lora", "--steps", 2, "--merge"), "--output", str(merged)])
    assert curve(alone) == curve(merged)
    assert (alone / "adapter_model.safetensors").is_file()
    assert not (alone / "model.safetensors").exists()
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(alone, dtype=torch.float32).eval()
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    ids = torch.randint(3, 256, (2, 30))
    with torch.no_grad():
        assert (loaded(ids).logits - whole(ids).logits).abs().max() < 1e-4
        with loaded.disable_adapter():
            assert (loaded(ids).logits - whole(ids).logits).abs().max() > 1e-2
    assert whole.config.use_cache
    assert not (merged / "adapter_config.json").exists()


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--batch-size", 6, "--per-device-batch-size", 4), "does not divide the 6 blocks"),
        (("--dataset", "some/id"), "give --text or --dataset"),
        (("--eval-split", "test"), "--eval-split is a split of --dataset"),
        (("--eval-text", "nothing"), "NAME=PATH"),
        (("--merge",), "go with --lora"),
        (("--patience", 2, "--save-every", 3), "a multiple of --eval-every"),
        (("--steps", 0), "--steps must be at least 1"),
        (("--epochs", 0), "--epochs must be above 0"),
        (("--learning-rate", "nan"), "--learning-rate must be above 0, got nan"),
        (("--weight-decay", -1), "--weight-decay must be 0 or more, got -1.0"),
        (("--warmup", -1), "--warmup must be 0 or more, got -1"),
        (("--seed", -1), "--seed must be 0 or more"),
        (("--threads", 0), "--threads must be at least 1, got 0"),
        (("--schedule", "straight"), "straight is not a valid"),
        (("--lora", "--lora-dropout", 1), "--lora-dropout must be in [0, 1), got 1.0"),
        (("--lora", "--lora-targets", "nothing"), "{'nothing'} not found"),
        (("--model", "no/such-model"), "--model no/such-model: "),
        (("--block-tokens", 5000), "is made for at most 4096 tokens"),
    ],
)
def test_refusals(more: tuple[object, ...], message: str, script: ModuleType, files: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        script.main([*command(files, "llama", *more), "--output", str(files / "refused")])
    assert message in capsys.readouterr().err
    assert not (files / "refused").exists()


def test_held_out_part_and_epochs(script: ModuleType, files: Path, tmp_path: Path) -> None:
    """Without --eval-text the last hundredth of the blocks is kept for it; an epoch reads all the others once."""
    arguments = command(files, "llama")
    at = arguments.index("--eval-text")
    del arguments[at : at + 2]
    at = arguments.index("--steps")
    del arguments[at : at + 2]
    script.main([*arguments, "--output", str(tmp_path)])
    blocks = len(load_token_blocks(files / "train.txt", tiny_tokenizer(), BLOCK))
    result = json.loads((tmp_path / "run.json").read_text())["result"]
    assert result["step"] == (blocks - max(1, blocks // 100)) // BATCH
    assert set(result["perplexity"]) == {"held_out"}
