"""Work that one of several processes does for all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

__all__ = ["in_main_process", "run_main"]


def run_main(main: Callable[[], int]) -> int:
    """What `main` returns; 130, with one line in place of a traceback, where it is interrupted (Ctrl-C)."""
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on from the last checkpoint, if any", file=sys.stderr)
        return 130


def in_main_process(work: Callable[[], Any]) -> None:
    """Do it in the main process, while the others wait; all have to call this.

    Raises:
        ValueError: in every process, with the message of the ValueError, OSError or ImportError that `work` ended in.
            Any other error is the main process's own.
    """
    problem = [""]
    if PartialState().is_main_process:
        try:
            work()
        except (ValueError, OSError, ImportError) as error:
            problem = [str(error) or type(error).__name__]
    broadcast_object_list(problem)
    if problem[0]:
        raise ValueError(problem[0])
