"""Folders of training runs: which are finished, which may be gone on with, and that all examples mean the same."""

import ast
from pathlib import Path
from typing import Any

import pytest

from nearfar.evaluation.machine import machine_name
from nearfar.training import (
    comparison_report,
    corpus_tokenizer,
    loss_bar,
    main_process,
    run_folder,
    training_blocks,
)
from nearfar.training.run_folder import (
    check_run,
    checkpoint_step,
    last_checkpoint,
    read_run,
    replaced_folder,
    same_settings,
    whole_checkpoints,
    write_run,
)

ROOT = Path(__file__).parent.parent


def test_finished_unfinished_or_another_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 8, "text": ["a"], "seed": None}
    folder = tmp_path / "new" / "run"
    assert read_run(folder) is None and not check_run(folder, settings, resume=False)
    write_run(folder, {"settings": {"steps": 8, "text": ["a"]}, "result": None})  # an older one, without seeds
    with pytest.raises(ValueError, match="run holds an unfinished run: add --resume to go on with it, or delete"):
        check_run(folder, settings, resume=False)
    assert not check_run(folder, settings, resume=True)
    write_run(folder, {"settings": settings, "result": {"loss": 1.0}})
    assert check_run(folder, settings, resume=False) and check_run(folder, settings, resume=True)
    for change, message in (({"steps": 9}, "steps = 8, and now it is 9"), ({"width": 2}, "width = None, and now")):
        with pytest.raises(ValueError, match=message):
            check_run(folder, {**settings, **change}, resume=True)
    write_run(folder, {"settings": {**settings, "gone": 4, "unset": None}, "result": {"loss": 1.0}})
    with pytest.raises(ValueError, match="holds a run with gone = 4, and now it is None: choose another --output"):
        check_run(folder, settings, resume=True)
    write_run(folder, {"settings": {**settings, "unset": None}, "result": {"loss": 1.0}})
    assert check_run(folder, settings, resume=True)
    assert [file.name for file in folder.iterdir()] == ["run.json"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"cannot be written: .*file is a file; give another folder"):
            check_run(folder, {}, resume=False)
    with pytest.raises(ValueError, match=r"/proc takes no files .*; give another folder"):
        check_run("/proc/nothing/run", {}, resume=False)
    assert not check_run(tmp_path / "new" / "run", {}, resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing was left behind


def test_earlier_runs_without_the_newer_settings_are_still_theirs() -> None:
    assert same_settings({"settings": {"steps": 8}}, {"steps": 8, "vocabulary": None, "tie_embeddings": None})
    assert not same_settings({"settings": {"steps": 8, "vocabulary": 300}}, {"steps": 8})


def test_half_written_checkpoints_are_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step, whole in ((9, True), (10, True), (100, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    found = last_checkpoint(str(tmp_path))
    assert found == tmp_path / "checkpoint-10" and checkpoint_step(found) == 10
    assert last_checkpoint(tmp_path, "own.pt") is None
    (tmp_path / "checkpoint-100" / "own.pt").touch()
    assert last_checkpoint(tmp_path, "own.pt") == tmp_path / "checkpoint-100"
    assert len(whole_checkpoints(tmp_path)) == 2 and last_checkpoint(tmp_path) == found


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    with replaced_folder(folder) as beside:
        (beside / "a").write_text("first")
        assert not folder.exists()

    with pytest.raises(KeyError), replaced_folder(folder) as beside:
        (beside / "half").write_text("of the second")
        raise KeyError
    assert [file.name for file in folder.iterdir()] == ["a"]
    with replaced_folder(str(folder)) as beside:
        (beside / "b").write_text("third")
    assert [file.name for file in folder.iterdir()] == ["b"] and list(folder.parent.iterdir()) == [folder]


def test_names_of_machines() -> None:
    assert machine_name({"device": "NVIDIA H200", "cpu": "x86"}) == "NVIDIA H200"
    assert machine_name({"device": "cpu", "cpu": "x86"}) == "x86" and machine_name({"device": "cpu"}) == "cpu"
    assert machine_name({}) == "an unknown machine"


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_no_example_has_a_copy_of_its_own(script: Path) -> None:
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = {node.name for node in ast.parse(script.read_text("utf-8")).body if isinstance(node, kinds)}
    shared = (run_folder, comparison_report, corpus_tokenizer, loss_bar, main_process, training_blocks)
    assert not defined & {"machine_name", *(name for module in shared for name in module.__all__)}
