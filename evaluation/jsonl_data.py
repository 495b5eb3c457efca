"""Rows of a benchmark: from a local folder of JSONL files, or one file of a data set on the Hub."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The first rows of a file, one JSON object a line; empty lines are passed over.

    Raises:
        ValueError: a line is something else, or there is none.
    """
    path = Path(path)
    with path.open(encoding="utf-8") as lines:
        return _rows(lines, str(path), limit)


def find_jsonl(folder: str | Path, name: str) -> Path:
    """`name.jsonl` in a folder, or in its subfolder `data`.

    Raises:
        FileNotFoundError: neither is there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    for path in (folder / f"{name}.jsonl", folder / "data" / f"{name}.jsonl"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no {name}.jsonl in {folder}")


def hub_jsonl(
    repository: str, filename: str, member: str | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Rows of a file in a data set's repository; `member` is a file inside, where that is a zip archive.

    Raises:
        OSError: the Hub cannot be reached, or the file is not there.
        ValueError: see `read_jsonl`.
    """
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(repository, filename, repo_type="dataset")
    except Exception as error:  # offline, no such file, no access: the client has many kinds
        raise OSError(
            f"cannot load {filename} of the data set {repository} from the Hub (or give local files with --data-dir): "
            f"{error}"
        ) from error
    if member is None:
        return read_jsonl(path, limit)
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        return _rows((line.decode("utf-8") for line in file), f"{repository}/{member}", limit)


def _rows(lines: Iterable[str], source: str, limit: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in _numbered(lines):
        if limit is not None and len(rows) >= limit:
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{source}, line {number}: not a JSON object")
        rows.append(row)
    if not rows:
        raise ValueError(f"{source} holds no row")
    return rows


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())
