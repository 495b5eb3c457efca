"""Folders of training runs: `run.json`, with a run's settings and what came of it, and a trainer's checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearfar.modeling.atomic_file import check_writable, write_beside

__all__ = [
    "RUN_NAME",
    "check_run",
    "checkpoint_step",
    "last_checkpoint",
    "read_run",
    "replaced_folder",
    "same_settings",
    "whole_checkpoints",
    "write_json",
    "write_run",
]

RUN_NAME = "run.json"
# What the Trainer of Transformers writes last into a checkpoint.
_TRAINER_STATE = "trainer_state.json"


def write_json(path: str | Path, content: Any) -> Path:
    """JSON with an indent of 2; written beside, then renamed."""
    text = json.dumps(content, indent=2) + "\n"
    return write_beside(path, lambda file: file.write_text(text, encoding="utf-8"))


def write_run(folder: str | Path, run: dict[str, Any]) -> Path:
    """What a folder is to say about itself: at least `settings`, and `result`, which is None until the run ends."""
    return write_json(Path(folder) / RUN_NAME, run)


def read_run(folder: str | Path) -> dict[str, Any] | None:
    """What `write_run` wrote; None where there is no run."""
    file = Path(folder) / RUN_NAME
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def same_settings(run: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a run has these settings; those that it does not name are None."""
    return not _changed(run, settings)


def _changed(run: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """The settings that differ: those of now first, then those that only the run names."""
    before = run["settings"]
    return [name for name in {**settings, **before} if before.get(name) != settings.get(name)]


def check_run(folder: str | Path, settings: dict[str, Any], resume: bool) -> bool:
    """Whether the run in a folder is finished.

    Args:
        settings: that it must have, see `same_settings`.
        resume: whether an unfinished one is to be gone on with.

    Raises:
        ValueError: it has other settings, or is unfinished and not to be resumed; no folder that can be written.
    """
    check_writable(folder)
    run = read_run(folder)
    if run is None:
        return False
    changed = _changed(run, settings)
    if changed:
        name = changed[0]
        raise ValueError(
            f"{folder} holds a run with {name} = {run['settings'].get(name)!r}, and now it is {settings.get(name)!r}: "
            "choose another --output, or delete that folder"
        )
    if run["result"] is None and not resume:
        raise ValueError(f"{folder} holds an unfinished run: add --resume to go on with it, or delete that folder")
    return run["result"] is not None


@contextmanager
def replaced_folder(path: str | Path) -> Iterator[Path]:
    """A new folder to fill, which then takes the place of `path`.

    When filling it fails, what stood at `path` stays, and the next call deletes what there is of the new one.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    shutil.rmtree(path, ignore_errors=True)
    beside.replace(path)


def last_checkpoint(folder: str | Path, state_name: str = _TRAINER_STATE) -> Path | None:
    """The newest of `whole_checkpoints`, or None."""
    return max(whole_checkpoints(folder, state_name), key=checkpoint_step, default=None)


def whole_checkpoints(folder: str | Path, state_name: str = _TRAINER_STATE) -> list[Path]:
    """The folders `checkpoint-<step>` that hold a file of that name, which a trainer writes last; in no order."""
    return [file.parent for file in Path(folder).glob(f"checkpoint-*/{state_name}")]


def checkpoint_step(checkpoint: Path) -> int:
    """The step after which it was written, as its name has it."""
    return int(checkpoint.name.rpartition("-")[2])
