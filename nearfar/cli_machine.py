"""Device, dtype and threads: their arguments, and what comes of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nearfar.cli_arguments import positive_int
from nearfar.cli_messages import UserError

if TYPE_CHECKING:
    import torch


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda, cuda:1, …")
    group.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
        help="auto is float32 on a CPU, bfloat16 on a GPU",
    )  # fmt: skip
    group.add_argument(
        "--threads",
        type=positive_int,
        default=None,
        metavar="N",
        help="CPU threads (default: what a short probe finds fastest, leaving a core to others)",
    )
    group.add_argument("--traceback", action="store_true", help="on an error show where it came from")


def find_device(args: argparse.Namespace) -> torch.device:
    import torch

    if args.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise UserError(f"unknown device {args.device!r}; try cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"there is no device {args.device}: {torch.cuda.device_count()} CUDA devices were found")
    if device.type not in ("cpu", "cuda"):  # one that this torch may not have been built for, or meta
        try:
            torch.ones(1, device=device).item()
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            raise UserError(f"--device {args.device} does not work here ({error}); try cpu or cuda") from error
    return device


def find_dtype(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    import torch

    if args.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, args.dtype)
    return dtype


def set_threads(args: argparse.Namespace, device: torch.device) -> None:
    import torch

    from nearfar.evaluation.machine import choose_threads

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    elif device.type == "cpu":
        torch.set_num_threads(choose_threads())


def used_threads() -> int:
    import torch

    return torch.get_num_threads()
