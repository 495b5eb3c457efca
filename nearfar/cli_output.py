"""Folders that commands write into."""

from __future__ import annotations

from pathlib import Path

from nearfar.cli_messages import UserError


def check_out(out: Path, option: str = "--out") -> None:
    """Raise UserError unless files can be written in the folder `out`."""
    from nearfar.modeling.atomic_file import check_writable

    if out.exists() and not out.is_dir():
        raise UserError(f"{option} {out} is a file; give a folder")
    try:
        check_writable(out)
    except ValueError as error:
        raise UserError(f"{option} {error}") from None
