"""The mapper's training loop and `nearfar train-mapper` from end to end, on tiny mappers, pairs and models."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_pairs import SMALL, add_states, write_pairs
from tiny_texts import english, save_tiny_checkpoint
from transformers import AutoModel

from nearfar import HybridAxialMapper, cli, cli_loading, cli_train
from nearfar.training import mapper_contexts, mapper_pairs, mapper_training
from nearfar.training.mapper_batches import ResidentPairs
from nearfar.training.mapper_losses import MapperLoss
from nearfar.training.mapper_pairs import MapperPairs
from nearfar.training.mapper_report import LOG_NAME, PLOT_NAME, context_mass_reconstruction, read_log
from nearfar.training.mapper_training import MapperTrainer, MapperTraining, Plateau, last_checkpoint, new_mapper

ROOT = Path(__file__).parent.parent
LOSS = MapperLoss(samples=64)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> MapperPairs:
    return write_pairs(tmp_path_factory.mktemp("pairs"), [70, 20, 64, 50, 90, 33])


def trainer(
    pairs: MapperPairs, folder: Path, *, mapper: dict[str, Any] | None = None, **options: Any
) -> MapperTrainer:
    settings = MapperTraining(
        **{"batch_size": 4, "warmup_steps": 5, "log_every": 2, "save_every": 2, "epochs": 2, "epoch_steps": 6,
           "learning_rate": 2e-3, "loss": LOSS, "validation": 0.2, **options}
    )  # fmt: skip
    return MapperTrainer(
        new_mapper(pairs, **{**SMALL, **(mapper or {})}), pairs, folder, settings, cpu=True, progress=False
    )


def figures(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock says."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(folder)]


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["layer", "context"])
def test_a_tiny_mapper_learns_a_mapping(pairs: MapperPairs, tmp_path: Path, scope: Any) -> None:
    run = trainer(
        pairs, tmp_path, epochs=4, epoch_steps=45, log_every=15, save_every=None, mass_ratios=(0.1, 0.3),
        loss=MapperLoss(samples=64, scope=scope), mapper={"dropout": 0.0},
    )  # fmt: skip
    untrained = context_mass_reconstruction(run.mapper.eval(), pairs, run.validation_contexts)
    result = run.train()
    assert result["steps"] == 180 and result["epochs"] == 4
    first, last = result["untrained"], result["last"]
    assert (first["step"], first["epoch"], last["epoch"]) == (0, 0.0, 4.0)
    assert last["validation_loss"] < 0.6 * first["validation_loss"]
    for ratio in ("0.1", "0.3"):
        assert last["relative_mass_reconstruction"][ratio] > 0.9
        assert last["mass_reconstruction"][ratio] > first["mass_reconstruction"][ratio] + 0.15
    trained = context_mass_reconstruction(run.mapper, pairs, run.validation_contexts)
    assert trained["0.1"]["relative"] > untrained["0.1"]["relative"] + 0.3
    assert trained["0.3"]["relative"] > 0.9 > untrained["0.3"]["relative"]
    lines = read_log(tmp_path)
    assert [line["step"] for line in lines if line["kind"] == "epoch"] == [0, 45, 90, 135, 180]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(15, 181, 15))
    assert set(lines[-1]["terms"]) == {"binary", "mse", "fine", "boundary", "cosine"}
    weights = run.options.loss.to_dict()
    assert lines[-1]["loss"] == pytest.approx(
        sum(weights[name] * v for name, v in lines[-1]["terms"].items()), rel=1e-5
    )


def test_the_best_weights_are_kept(pairs: MapperPairs, tmp_path: Path) -> None:
    run = trainer(pairs, tmp_path, epochs=3)
    result = run.train()
    epochs = [line for line in read_log(tmp_path) if line["kind"] == "epoch" and line["step"]]
    masses = {line["step"]: sum(line["mass_reconstruction"].values()) / 2 for line in epochs}
    best = max(masses, key=lambda step: masses[step])
    assert result["best"] == {"mass": masses[best], "step": best}
    saved = AutoModel.from_pretrained(tmp_path / "model")
    assert isinstance(saved, HybridAxialMapper) and saved.config.target_name == "large"
    assert (tmp_path / "model" / "modeling_axial_mapper.py").is_file(), "it carries its code"
    assert f"trained {best:,} steps" in (tmp_path / "model" / "README.md").read_text()
    again = trainer(pairs, tmp_path / "again")
    again.mapper.load_state_dict(saved.state_dict())
    found = again.validate()["mass_reconstruction"]
    assert sum(found.values()) / 2 == pytest.approx(masses[best], abs=1e-6)
    pytest.importorskip("matplotlib")
    assert (tmp_path / PLOT_NAME).read_bytes().startswith(b"\x89PNG")


# --- the same run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [4, 6, 10])  # inside an epoch, at its end, inside the second
def test_resumed_run_is_the_uninterrupted_one(pairs: MapperPairs, tmp_path: Path, end: int) -> None:
    whole = trainer(pairs, tmp_path / "whole")
    whole.train()
    folder = tmp_path / "cut"
    cut = trainer(pairs, folder)
    save = cut.save_checkpoint

    def stop() -> Path:
        path = save()
        if cut.step == end:
            raise KeyboardInterrupt
        return path

    cut.save_checkpoint = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    with open(folder / LOG_NAME, "a") as file:  # what was logged after the checkpoint is dropped
        file.write(json.dumps({"kind": "step", "step": end + 1}) + "\n")
    checkpoint = last_checkpoint(folder)
    assert checkpoint is not None and checkpoint.name == f"checkpoint-{end}"
    torch.manual_seed(99)
    resumed = trainer(pairs, folder)
    with torch.no_grad():
        for parameter in resumed.mapper.parameters():
            parameter.zero_()
    resumed.train(checkpoint)
    for name, tensor in whole.mapper.state_dict().items():
        assert torch.equal(tensor, resumed.mapper.state_dict()[name]), name
    assert figures(folder) == figures(tmp_path / "whole")
    for name in ("model.safetensors", "config.json", "README.md"):
        assert (folder / "model" / name).read_bytes() == (tmp_path / "whole" / "model" / name).read_bytes()
    assert [file.name for file in folder.glob("checkpoint-*")] == ["checkpoint-12"]


def test_a_short_run_goes_on(pairs: MapperPairs, tmp_path: Path) -> None:
    whole = trainer(pairs, tmp_path / "whole", epochs=1)
    whole.train()
    short = trainer(pairs, tmp_path / "short", steps=3)
    assert short.train()["steps"] == 3
    longer = trainer(pairs, tmp_path / "short", steps=6)
    longer.train(last_checkpoint(tmp_path / "short"))
    for name, tensor in whole.mapper.state_dict().items():
        assert torch.equal(tensor, longer.mapper.state_dict()[name]), name


def test_a_run_of_an_older_release_goes_on(pairs: MapperPairs, tmp_path: Path) -> None:
    """Its checkpoint does not name the mapper's later fields, which are at what they were without them."""
    trainer(pairs, tmp_path, steps=2).train()
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    state = torch.load(checkpoint / "training_state.pt", weights_only=True)
    del state["mapper"]["proxy_states"], state["mapper"]["proxy_state_size"]
    torch.save(state, checkpoint / "training_state.pt")
    assert trainer(pairs, tmp_path, steps=4).train(checkpoint)["steps"] == 4


def test_seeds_matter(pairs: MapperPairs, tmp_path: Path) -> None:
    runs = [trainer(pairs, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    assert runs[0]._crops(0) != runs[1]._crops(0)
    assert runs[0]._crops(0) == trainer(pairs, tmp_path / "x")._crops(0)
    assert runs[0]._crops(0) != runs[0]._crops(6), "another epoch has another order"
    state = torch.random.get_rng_state()
    first, again, other = (new_mapper(pairs, seed, **SMALL) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.heads.queries, again.heads.queries)
    assert not torch.equal(first.heads.queries, other.heads.queries)


def test_another_run_is_not_gone_on_with(pairs: MapperPairs, tmp_path: Path) -> None:
    trainer(pairs, tmp_path, epochs=1, epoch_steps=1).train()
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    for options, message in (
        ({"learning_rate": 1e-3}, "learning_rate = 0.002, and now it is 0.001"),
        ({"mapper": {"dropout": 0.2}}, r"dropout = 0.1, and now it is 0.2"),
        ({"loss": MapperLoss(samples=65)}, "loss = "),
        ({"seed": 1}, "seed = 0, and now it is 1"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(pairs, tmp_path, epochs=2, **{"epoch_steps": 1, **options}).train(checkpoint)
    other = write_pairs(tmp_path / "pairs", [40, 50], seed=1)
    with pytest.raises(ValueError, match="pairs = "):
        trainer(other, tmp_path, epochs=2, epoch_steps=1).train(checkpoint)


# --- parts -----------------------------------------------------------------------------------------------------------


def test_plateau_is_torchs() -> None:
    values = [5.0, 4.0, 4.1, 4.0, 3.9999, 4.2, 4.3, 3.0, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 2.0, 2.0]
    for patience in (0, 1, 3):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience)
        mine = Plateau(0.5, patience)
        for value in values:
            theirs.step(value)
            mine.update(value)
            assert mine.scale == optimizer.param_groups[0]["lr"]
        assert mine.scale < 1


def test_learning_rate_warms_up_and_is_halved(pairs: MapperPairs, tmp_path: Path) -> None:
    run = trainer(
        pairs, tmp_path, epochs=4, epoch_steps=2, log_every=1, save_every=None, warmup_steps=4, plateau_patience=0
    )
    run.plateau.best = -1.0  # nothing will be better
    run.train()
    rates = [line["learning_rate"] / 2e-3 for line in read_log(tmp_path) if line["kind"] == "step"]
    assert rates == pytest.approx([0.25, 0.5, 0.375, 0.5, 0.25, 0.25, 0.125, 0.125])


def test_an_epoch_shows_every_layer_as_often_as_windows(pairs: MapperPairs, tmp_path: Path) -> None:
    run = trainer(pairs, tmp_path, epoch_steps=None, batch_size=1)
    windows = {70: 4, 20: 1, 64: 3, 50: 3, 90: 5, 33: 2}
    assert run.epoch_steps == sum(4 * windows[pairs.contexts[index].tokens] for index in run.train_contexts)
    seen: dict[tuple[int, int], int] = {}
    starts = set()
    for step in range(run.epoch_steps):
        ((context, place, start, length),) = run._crops(step)
        assert context not in run.validation_contexts
        assert 0 <= start <= pairs.contexts[context].tokens - length and length <= 32
        seen[context, place] = seen.get((context, place), 0) + 1
        starts.add(start)
    assert all(seen[c, p] == windows[pairs.contexts[c].tokens] for c in run.train_contexts for p in range(4))
    assert len(starts) > 20, "crops start anywhere"


def test_states_are_read_by_mappers_that_want_them(pairs: MapperPairs, tmp_path: Path) -> None:
    """Pairs that hold states serve mappers with and without; without them the run is that of pairs without states."""
    shutil.copytree(pairs.folder, tmp_path / "pairs")
    with_states = add_states(tmp_path / "pairs")
    read_all = {"proxy_layers": "all", "layer_queries": True}

    reading = trainer(with_states, tmp_path / "reading", mapper=read_all, epochs=1, epoch_steps=2)
    assert reading.mapper.config.proxy_states == "values" and reading.mapper.config.input_channels == 14
    reading.train()
    assert bool((reading.mapper.state_norm.running_mean != 0).any())
    best = AutoModel.from_pretrained(tmp_path / "reading" / "model", trust_remote_code=True).eval()
    assert context_mass_reconstruction(best, with_states, [0])["0.3"]["share"] > 0

    without = trainer(
        with_states, tmp_path / "a", mapper={**read_all, "proxy_states": "none"}, epochs=1, epoch_steps=2
    )
    plain = trainer(pairs, tmp_path / "b", mapper=read_all, epochs=1, epoch_steps=2)
    without.train(), plain.train()
    for mine, other in zip(without.mapper.parameters(), plain.mapper.parameters(), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ValueError, match="proxy_states='values', and the pairs were computed with 'none'"):
        trainer(pairs, tmp_path / "c", mapper={**read_all, "proxy_states": "values", "proxy_state_size": 3})
    with pytest.raises(ValueError, match="proxy_state_size = 2 and the pairs have 3"):
        trainer(with_states, tmp_path / "c", mapper={**read_all, "proxy_state_size": 2})
    other = new_mapper(with_states, **SMALL, **read_all)
    with pytest.raises(ValueError, match="compute pairs with proxy_states='values'"):
        MapperTrainer(other, pairs, tmp_path / "c", cpu=True)
    assert "(proxy layers, 7 channels, tokens)" in (tmp_path / "reading" / "model" / "README.md").read_text()
    assert "Maps the attention and values of" in (tmp_path / "reading" / "model" / "README.md").read_text()


@pytest.mark.slow
def test_a_mapper_of_all_layers_learns(pairs: MapperPairs, tmp_path: Path) -> None:
    run = trainer(
        pairs, tmp_path, mapper={"proxy_layers": "all", "layer_queries": True}, epochs=6, epoch_steps=20,
        loss=MapperLoss(samples=64, scope="context"), schedule="cosine", save_dtype="bfloat16",
    )  # fmt: skip
    result = run.train()
    first, last = result["untrained"]["mass_reconstruction"], result["last"]["mass_reconstruction"]
    assert last["0.1"] > first["0.1"] + 0.1
    rates = [line["learning_rate"] for line in read_log(tmp_path) if line["kind"] == "step"]
    assert max(rates) <= 2e-3 and rates[-1] < 0.01 * max(rates)
    saved = HybridAxialMapper.from_pretrained(tmp_path / "model")
    assert saved.dtype == torch.bfloat16 and run.mapper.dtype == torch.float32
    whole = context_mass_reconstruction(saved.float().eval(), pairs, run.validation_contexts)
    assert whole["0.3"]["share"] > 0.5


def test_held_on_a_device_or_read_from_disk_it_is_the_same_run(pairs: MapperPairs, tmp_path: Path) -> None:
    runs = [trainer(pairs, tmp_path / name) for name in ("a", "b")]
    runs[1]._source = ResidentPairs(pairs, torch.device("cpu"))
    for run in runs:
        run.train()
    assert figures(tmp_path / "a") == figures(tmp_path / "b")


def test_seconds_end_a_run(pairs: MapperPairs, tmp_path: Path) -> None:
    run = trainer(pairs, tmp_path, epochs=100_000, seconds=0.5, schedule="cosine")
    result = run.train()
    assert 0 < result["steps"] < 100_000 and result["last"]["step"] == result["steps"]
    assert last_checkpoint(tmp_path) == tmp_path / f"checkpoint-{result['steps']}"
    assert (tmp_path / "model" / "config.json").is_file()
    with pytest.raises(ValueError, match="seconds must be above 0"):
        MapperTraining(seconds=0)
    with pytest.raises(ValueError, match="'plateau' or 'cosine'"):
        MapperTraining(schedule="linear")
    with pytest.raises(ValueError, match="'float32' or 'bfloat16'"):
        MapperTraining(save_dtype="float16")


def test_layer_queries_tell_layers_apart(tmp_path: Path) -> None:
    folder = tmp_path / "pairs"
    write_pairs(folder, [60, 60, 60])
    scores = np.load(folder / "shard-0-00000.scores.npy")
    scores[1::2] = scores[1::2, ::-1]  # every second layer has its heads in the other order
    np.save(folder / "shard-0-00000.scores.npy", scores)
    pairs = MapperPairs(folder)
    found = {}
    for queries in (False, True):
        run = trainer(
            pairs, tmp_path / str(queries), epochs=1, epoch_steps=120, log_every=40, save_every=None,
            mapper={"layer_queries": queries, "dropout": 0.0},
        )  # fmt: skip
        run.train()
        found[queries] = run.validate()["relative_mass_reconstruction"]["0.1"]
    assert found[True] > found[False] + 0.1


@pytest.mark.parametrize(("options", "message"), [
    ({"epochs": 0}, "epochs must be at least 1"), ({"steps": 0}, "steps must be at least 1"),
    ({"clip": -1}, "clip must be 0 or more"), ({"learning_rate": 0}, "learning_rate must be above 0"),
    ({"validation": 1}, "validation must be between 0 and 1"), ({"mass_ratios": (0,)}, "retention ratios"),
    ({"save_every": 75}, "multiple of log_every, 50, got 75"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MapperTraining(**options)


def test_defaults_are_the_papers() -> None:
    options = MapperTraining()
    assert (options.learning_rate, options.weight_decay, options.warmup_steps, options.clip) == (2e-4, 1e-4, 1000, 1)
    assert (options.plateau_factor, options.plateau_patience, options.batch_size) == (0.5, 3, 8)
    assert (options.epochs, options.validation) == (30, 0.05)


def test_a_mapper_of_other_sizes_is_refused(pairs: MapperPairs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="proxy_num_heads = 5 and the pairs have 4"):
        trainer(pairs, tmp_path, mapper={"proxy_num_heads": 5})


def test_a_loss_that_is_not_finite_ends_the_run(pairs: MapperPairs, tmp_path: Path) -> None:
    run = trainer(pairs, tmp_path, learning_rate=1e30, clip=0)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        run.train()


# --- the command -----------------------------------------------------------------------------------------------------

TINY = ["--hidden-size", "16", "--layers", "1", "--heads", "2", "--head-dim", "4", "--crop-tokens", "64",
        "--batch-size", "2", "--warmup-steps", "2", "--log-every", "1", "--save-every", "1", "--validation", "0.3",
        "--device", "cpu", "--threads", "1"]  # fmt: skip


def test_help_has_examples_and_real_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train-mapper", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  nearfar train-mapper --proxy small --target large --sources gsm8k squad" in shown
    assert "(default: 30)" in shown and "(default: 0.0002)" in shown
    assert "default: None" not in shown and "default: False" not in shown


def test_the_command_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nearfar.modeling.attention_features")
    model = str(save_tiny_checkpoint(tmp_path / "tiny"))
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(english(40, seed=number), encoding="utf-8")
    out = tmp_path / "run"
    command = [
        "train-mapper", "--proxy", model, "--target", model, "--sources", str(tmp_path / "texts"), "needles",
        "--contexts", "2", "--context-tokens", "200", "--join-tokens", "100", "--chunk-tokens", "150",
        "--out", str(out), *TINY,
    ]  # fmt: skip
    assert cli.main([*command, "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "mass reconstruction at" in shown and str(out / "model") in shown
    run = json.loads((out / "run.json").read_text())
    assert run["command"].startswith("nearfar train-mapper --proxy") and run["result"]["steps"] == 2
    assert run["contexts"] == {"train": 3, "validation": 1} and set(run["result"]["whole_contexts"]) == {"0.1", "0.3"}
    pairs = MapperPairs(out / "pairs")
    assert [entry.name for entry in pairs.contexts] == ["0.txt", "1.txt", "needles:0:0", "needles:0:1"]  # sorted
    saved = AutoModel.from_pretrained(out / "model")
    assert saved.config.target_name == Path(model).name and saved.config.window_stride == 32

    assert cli.main([*command, "--steps", "4"]) == 2
    assert "holds a run already: add --resume" in capsys.readouterr().err

    def never(*args: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(cli_loading, "load_model", never)
    monkeypatch.setattr(
        sys, "argv", ["x", "--pairs", str(out / "pairs"), "--out", str(out), "--resume", "--steps", "4", *TINY]
    )
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(ROOT / "examples" / "train_mapper.py"), run_name="__main__")
    assert leaving.value.code == 0
    assert [line["step"] for line in read_log(out) if line["kind"] == "step"] == [1, 2, 3, 4]


def test_pairs_with_values_ask_for_a_mapper_that_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path / "pairs", [40, 50])
    add_states(tmp_path / "pairs")
    command = ["train-mapper", "--pairs", str(tmp_path / "pairs"), "--steps", "1", *TINY, "--out"]
    assert cli.main([*command, str(tmp_path / "a")]) == 2
    assert "holds the proxy's values" in capsys.readouterr().err and not (tmp_path / "a").exists()
    for more, states in (
        (["--proxy-states", "none"], "none"),
        (["--proxy-layers", "all", "--layer-queries"], "values"),
    ):
        assert cli.main([*command, str(tmp_path / states), *more]) == 0
        assert AutoModel.from_pretrained(tmp_path / states / "model").config.proxy_states == states


def test_more_pairs_hold_the_states_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded for pairs that would be refused."""
    folder, computed = tmp_path / "pairs", []
    monkeypatch.setattr(cli_train.gc, "collect", lambda: 0)  # takes its time in a process of many tests
    monkeypatch.setattr(cli_loading, "load_tokenizer", lambda source: None)
    monkeypatch.setattr(cli_loading, "load_model", lambda source, *args: None)
    monkeypatch.setattr(mapper_contexts, "mixture_contexts", lambda *args, **kwargs: [])
    monkeypatch.setattr(
        mapper_pairs, "compute_pairs", lambda *args, **kwargs: computed.append(args[5].proxy_states) and 0
    )
    command = ["train-mapper", "--proxy", "o/small", "--target", "o/large", "--sources", "a.txt"]
    command += ["--pairs", str(folder), "--storage", "float32", "--device", "cpu", "--threads", "1"]
    only, read_all = [*command, "--pairs-only"], ["--proxy-layers", "all", "--layer-queries"]

    assert cli.main(only) == 2 and computed.pop() == "none"  # no pairs came of it
    assert cli.main([*only, "--proxy-states", "values"]) == 2 and computed.pop() == "values"
    write_pairs(folder, [40, 50])
    assert cli.main(only) == 0 and computed.pop() == "none"
    capsys.readouterr()
    assert cli.main([*only, "--proxy-states", "values"]) == 2 and not computed
    assert "give --proxy-states none, or another --pairs" in capsys.readouterr().err

    add_states(folder)
    for more in ([], ["--proxy-states", "values"]):
        assert cli.main([*only, *more]) == 0 and computed.pop() == "values"
    monkeypatch.setattr(cli_train, "_train", lambda args, out, pairs, *more, **kwargs: 0)
    assert cli.main([*command, *read_all, "--out", str(tmp_path / "a")]) == 0 and computed.pop() == "values"
    capsys.readouterr()
    for options, message in (
        ([*only, "--proxy-states", "none"], "with --proxy-states values, and now it is none: give --proxy-states val"),
        ([*command, "--out", str(tmp_path / "b")], "which a mapper reads with --proxy-layers all: give that"),
    ):
        assert cli.main(options) == 2 and not computed
        assert message in capsys.readouterr().err


def test_more_pairs_have_the_settings_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was loaded")

    for name in ("model_source", "load_tokenizer", "load_model"):
        monkeypatch.setattr(cli_loading, name, never)
    folder = tmp_path / "pairs"
    write_pairs(folder, [40, 50])
    before = (folder / "index-0.json").read_text()
    command = ["train-mapper", "--proxy", "o/small", "--target", "o/large", "--sources", "a.txt"]
    command += ["--pairs", str(folder), "--pairs-only", "--device", "cpu"]
    for options, message in (
        (["--storage", "float32", "--chunk-tokens", "150"], "--chunk-tokens 2000, and now it is 150: give --chunk-"),
        ([], "computed with --storage float32, and now it is float16: give --storage float32, or another --pairs"),
    ):
        assert cli.main([*command, *options]) == 2
        assert message in capsys.readouterr().err and (folder / "index-0.json").read_text() == before
    (folder / "index-0.json").write_text(before.replace('"storage": "float32"', '"storage": "int3"'))
    assert cli.main(command) == 2
    assert "unknown settings" in capsys.readouterr().err


def test_pairs_only(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(tmp_path / "pairs", [40, 50])
    assert cli.main(["train-mapper", "--pairs", str(tmp_path / "pairs"), "--pairs-only", "--device", "cpu"]) == 0
    assert "2 contexts, 90 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "give --out"),
    (["--out", "FILE"], "is a file"),
    (["--out", "NEW"], "holds no pairs yet: give --proxy and --target"),
    (["--out", "NEW", "--proxy", "p"], "give both --proxy and --target"),
    (["--out", "NEW", "--sources", "squad"], "give --proxy and --target too"),
    (["--out", "NEW", "--pairs", "PAIRS", "--dtype", "float16"], "trained in float32 or bfloat16"),
    (["--out", "NEW", "--pairs", "PAIRS", "--save-every", "75"], "multiple of log_every"),
    (["--out", "NEW", "--pairs", "PAIRS", "--learning-rate", "-1"], "learning_rate must be above 0"),
    (["--out", "NEW", "--pairs", "PAIRS", "--loss-scope", "model"], "invalid choice"),
    (["--out", "NEW", "--epochs", "0"], "positive number"),
    (["--out", "NEW", "--pairs", "PAIRS", "--seconds", "0"], "seconds must be above 0"),
    (["--out", "NEW", "--pairs", "PAIRS", "--pairs-seconds", "-1"], "must be positive, got -1"),
    (["--out", "NEW", "--pairs", "PAIRS", "--proxy-layers", "all"], "needs --layer-queries"),
])  # fmt: skip
def test_wrong_input_is_told(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    write_pairs(tmp_path / "pairs", [40, 50])
    names = {"FILE": tmp_path / "file", "NEW": tmp_path / "new", "PAIRS": tmp_path / "pairs"}
    monkeypatch.setattr(mapper_training.MapperTrainer, "train", None)
    capsys.readouterr()
    assert cli.main(["train-mapper", *(str(names.get(argument, argument)) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
