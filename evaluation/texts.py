"""Texts to evaluate on or to fit from: files, folders, or a `datasets` id. The same order on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class Text:
    """A document and where it came from (file name, or dataset id and row)."""

    name: str
    text: str


def read_text_file(path: str | Path) -> Text:
    """One UTF-8 file (a byte order mark is dropped).

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: as the file system says.
        ValueError: the file is not UTF-8 text, or holds white space only.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return Text(path.name, text)


def load_texts(paths: Iterable[str | Path]) -> list[Text]:
    """Files in the order given; of a folder its .txt and .md files, recursively, sorted by relative path.

    Empty files inside a folder are skipped (a collection may hold some); an empty file that was named is an error.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: no path given, a folder without any text, an empty file.
    """
    named = [Path(path) for path in paths]
    if not named:
        raise ValueError("no text files given")
    texts: list[Text] = []
    for path in named:
        if not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")
        if not path.is_dir():
            texts.append(read_text_file(path))
            continue
        files = sorted(
            (file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in TEXT_SUFFIXES),
            key=lambda file: file.relative_to(path).as_posix(),
        )
        found = [read_text_file(file) for file in files if file.read_bytes().strip()]
        if not found:
            raise ValueError(f"{path} holds no text ({' or '.join(TEXT_SUFFIXES)} files with something in them)")
        texts += found
    return texts


def load_dataset_texts(
    dataset: str,
    *,
    config: str | None = None,
    split: str = "train",
    column: str | None = None,
    max_documents: int | None = None,
) -> list[Text]:
    """The first documents of a dataset on the Hub or in a local folder, in the dataset's own order, streamed.

    Args:
        column: the column that holds the text; if `None`, "text", "content" or the only column of strings.

    Raises:
        ImportError: the `datasets` package is missing.
        ValueError: no such column, or no document with text in it.
    """
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents must be at least 1, got {max_documents}")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "reading a dataset needs the `datasets` package: pip install 'nearfar[eval]' (or 'nearfar[train]')"
        ) from error

    texts: list[Text] = []
    for index, row in enumerate(load_dataset(dataset, config, split=split, streaming=True)):
        if column is None:
            column = _text_column(row, dataset)
        if column not in row:
            raise ValueError(f"{dataset} has no column {column!r}; its columns are {', '.join(row)}")
        if isinstance(row[column], str) and row[column].strip():
            texts.append(Text(f"{dataset}:{split}:{index}", row[column]))
        if max_documents is not None and len(texts) == max_documents:
            break
    if not texts:
        raise ValueError(f"{dataset} (split {split}) holds no text in column {column!r}")
    return texts


def _text_column(row: dict[str, object], dataset: str) -> str:
    for name in ("text", "content"):
        if isinstance(row.get(name), str):
            return name
    strings = [name for name, value in row.items() if isinstance(value, str)]
    if len(strings) != 1:
        raise ValueError(f"which column of {dataset} holds the text? Name one of {', '.join(strings) or 'none found'}")
    return strings[0]


def join_texts(texts: Sequence[Text], separator: str = "\n\n") -> str:
    """One long text out of many, in the given order."""
    return separator.join(text.text.strip() for text in texts)
