"""What conversions share: where they run, what they say, the output's folder and unfinished work.

An output is written beside its place and renamed when it is complete. Work that takes long lies in `<output>.partial`
meanwhile, with the settings it was begun with, so that the same call goes on with it and another call is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from nearfar.modeling.atomic_file import check_writable, write_beside
from nearfar.training.token_blocks import TokenBlocks

__all__ = [
    "Precision",
    "Sources",
    "UnfinishedWork",
    "check_output",
    "find_device",
    "publish",
    "round_weights",
    "source_names",
    "speaker",
    "text_digest",
]

Sources = str | Path | Sequence[str | Path]


class Precision:
    """Where forward passes run in bfloat16.

    Args:
        device: of the model.
        autocast: bfloat16 autocast or not; `None` for that on a GPU.
    """

    def __init__(self, device: torch.device, autocast: bool | None) -> None:
        self.device = device
        self.autocast = device.type == "cuda" if autocast is None else autocast

    def context(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()


def find_device(device: str | torch.device | None, state: PartialState) -> torch.device:
    """`device`, or a GPU if there is one; of several processes each has its own."""
    if device is not None:
        return torch.device(device)
    if state.num_processes > 1:
        return state.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def speaker(quiet: bool) -> Callable[[str], None]:
    """Prints a line to standard error, or nothing."""

    def say(text: str) -> None:
        if not quiet:
            print(f"nearfar: {text}", file=sys.stderr, flush=True)

    return say


def round_weights(model: nn.Module, dtype: torch.dtype, only: str = "") -> None:
    """Round to what `dtype` can hold the parameters that have `only` in their names; their own dtype stays."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.copy_(parameter.to(dtype))


def text_digest(blocks: TokenBlocks) -> str:
    return hashlib.sha256(blocks.tokens.tobytes()).hexdigest()[:16]


def source_names(sources: Sources) -> list[str]:
    """Sources in a record. Of files only the names: where they lay is nobody else's business."""
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    return [Path(name).name if Path(name).exists() else str(name) for name in named]


# --- the output ------------------------------------------------------------------------------------------------------


def check_output(output: Path, source: str, overwrite: bool) -> None:
    """Raise ValueError unless a checkpoint may be written there."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"the output {output} is a file: give a folder")
    if Path(source).is_dir() and output.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise ValueError(f"the output {output} is or holds the source {source}: give another folder")
    check_writable(output.parent)
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"the output folder {output} is not empty: give another one, or overwrite it")
    if not (output / "config.json").is_file():
        raise ValueError(f"{output} holds something other than a checkpoint (no config.json): it is not overwritten")


# What is older than this was left by a process that was killed.
LEFT_OVER_SECONDS = 24 * 3600


def publish(write: Callable[[Path], None], output: Path, overwrite: bool) -> None:
    """Let `write` fill a hidden folder beside `output`, then rename it, so that nobody ever sees half a checkpoint."""
    output.parent.mkdir(parents=True, exist_ok=True)
    own = re.compile(rf"\.{re.escape(output.name)}\.\w{{8}}\.unfinished")  # not of an output named after this one
    for left_over in output.parent.iterdir():
        # Of a process that was killed; another one may be writing the same output just now.
        if own.fullmatch(left_over.name) and time.time() - left_over.stat().st_mtime > LEFT_OVER_SECONDS:
            shutil.rmtree(left_over, ignore_errors=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".unfinished", dir=output.parent))
    try:
        new, old = hidden / "new", hidden / "old"
        new.mkdir()
        write(new)
        if output.is_dir() and any(output.iterdir()):
            check_output(output, "", overwrite)  # something may have come there meanwhile
            output.rename(old)
        elif output.is_dir():
            output.rmdir()
        try:
            new.rename(output)
        except OSError:
            if old.is_dir():
                old.rename(output)
            raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


# --- unfinished work -------------------------------------------------------------------------------------------------


class UnfinishedWork:
    """The folder of work that is under way.

    Args:
        output: where the conversion will be.
        work_dir: where the folder lies; `None` for beside the output.
        settings: what must be equal for unfinished work to be gone on with; JSON-ready.
        restart: throw away what is there.
        kept: whether there is anything worth keeping at all.
        state: of the processes; the main one writes.

    Raises:
        ValueError: there is unfinished work with other settings.
    """

    def __init__(
        self,
        output: Path,
        work_dir: str | Path | None,
        settings: dict[str, Any],
        restart: bool,
        kept: bool,
        state: PartialState,
    ) -> None:
        self.folder = (output.parent if work_dir is None else Path(work_dir)) / f"{output.name}.partial"
        self.kept, self.state = kept, state
        if kept:
            check_writable(self.folder.parent)
        file = self.folder / "settings.json"
        wanted = json.loads(json.dumps(settings))
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() and not restart else None
        if found is not None and found != wanted:
            name = next(name for name in wanted if found.get(name) != wanted[name])
            raise ValueError(
                f"{self.folder} holds an unfinished conversion with {name} = {found.get(name)!r}, and now it is "
                f"{wanted[name]!r}: restart, which throws it away, or choose another output"
            )
        if self.folder.is_dir() and found is None and not restart and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} holds something other than an unfinished conversion: move it away")
        state.wait_for_everyone()  # all have seen what is there before it is changed
        if restart:
            self.delete()
        if kept and state.is_main_process:
            text = json.dumps(wanted, indent=2) + "\n"
            write_beside(file, lambda path: path.write_text(text, encoding="utf-8"))
        state.wait_for_everyone()

    def delete(self) -> None:
        """Throw the folder away."""
        if self.state.is_main_process and (self.folder / "settings.json").is_file():
            shutil.rmtree(self.folder)
