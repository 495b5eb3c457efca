"""Texts of any length as a stream of pieces: files (packed ones too), folders, or a `datasets` id.

Only what is asked for is read, nothing is kept on disk, and the order is the same on every machine.
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from nearfar.evaluation.texts import TEXT_SUFFIXES

__all__ = ["find_text_files", "gather_pieces", "read_text_pieces"]

# Characters of a piece; a line of its own that separates documents in a text file.
_PIECE = 1 << 17
_SEPARATOR = "<|endoftext|>"
_UNPACKERS: dict[str, Callable[..., IO[Any]]] = {".xz": lzma.open, ".gz": gzip.open}


def read_text_pieces(
    sources: str | Path | Sequence[str | Path],
    max_characters: int | None = None,
    *,
    split: str = "train",
    column: str | None = None,
) -> Iterator[str]:
    """Texts in pieces of some thousand whole lines, none of them empty.

    Args:
        sources: plain text files, also packed as `.xz` or `.gz`; folders of them (`.txt` and `.md`, recursively, in
            the order of their names); or one string that names neither: a `datasets` id, `id` or `id:config`,
            streamed. Lines `<|endoftext|>` in files are taken for separators of documents and become blank lines, and
            a blank line follows each file.
        max_characters: of all pieces together; None for everything. Little more than that is read.
        split, column: of a `datasets` id; the column is found by name if None.

    Raises:
        FileNotFoundError: a file or folder that does not exist.
        ValueError: no source, a folder without texts, text that is not UTF-8 or a damaged file, no such column.
        ImportError: a `datasets` id without the `datasets` package.
    """
    files = find_text_files(sources)
    if files is None:
        name = str(sources if isinstance(sources, (str, Path)) else sources[0])
        lines = _dataset_lines(name, split, column)
    else:
        lines = (line for file in files for line in _file_lines(file))
    left = max_characters
    for piece in gather_pieces(lines):
        if left is not None:
            piece = piece[:left]
            left -= len(piece)
        if piece:
            yield piece
        if left == 0:
            return


def find_text_files(sources: str | Path | Sequence[str | Path]) -> list[Path] | None:
    """The files that `read_text_pieces` would read, without reading them; None for a `datasets` id.

    Raises:
        FileNotFoundError, ValueError: as `read_text_pieces` does.
    """
    named = [sources] if isinstance(sources, (str, Path)) else list(sources)
    if not named:
        raise ValueError("no text was given: name files, folders or a `datasets` id")
    if len(named) == 1 and _may_be_dataset(named[0]):
        return None
    return [file for name in named for file in _text_files(Path(name))]


def gather_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """Texts joined up to some size, blank ones left out; a piece beyond that size is cut."""
    waiting: list[str] = []
    size = 0
    for piece in pieces:
        for start in range(0, len(piece), _PIECE):
            waiting.append(piece[start : start + _PIECE])
            size += len(waiting[-1])
            if size >= _PIECE:
                yield "".join(waiting)
                waiting, size = [], 0
    if "".join(waiting).strip():
        yield "".join(waiting)


def _may_be_dataset(name: str | Path) -> bool:
    """A Hub id, with a config behind a colon or without, rather than a path."""
    if isinstance(name, Path) or Path(name).exists() or name.startswith((".", "/", "~")):
        return False
    stem = name.partition(":")[0]
    return stem.count("/") <= 1 and not stem.lower().endswith((*TEXT_SUFFIXES, ".xz", ".gz"))


def _text_files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if not path.is_dir():
        return [path]
    endings = tuple(suffix + packed for suffix in TEXT_SUFFIXES for packed in ("", ".xz", ".gz"))
    files = [file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(endings)]
    if not files:
        raise ValueError(f"{path} holds no text files ({', '.join(endings)})")
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def _file_lines(path: Path) -> Iterator[str]:
    try:
        with _UNPACKERS.get(path.suffix.lower(), open)(path, "rt", encoding="utf-8-sig") as stream:
            while line := stream.readline(_PIECE):  # or a piece of a very long one
                yield "\n" if line.strip() == _SEPARATOR else line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from None
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    yield "\n\n"


def _dataset_lines(name: str, split: str, column: str | None) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{name} is no file or folder here, and reading it as a dataset needs the `datasets` package: "
            "pip install 'nearfar[eval]'"
        ) from error
    identifier, _, config = name.partition(":")
    for row in load_dataset(identifier, config or None, split=split, streaming=True):
        if column is None:
            strings = [key for key, value in row.items() if isinstance(value, str)]
            column = next((key for key in ("text", "content") if key in strings), strings[0] if strings else None)
        if column is None or column not in row:
            raise ValueError(f"{name} has no column {column or 'of text'!r}; its columns are {', '.join(row)}")
        yield row[column]
        yield "\n"
