"""A tokenizer of one's own for a training text: `train_digit_tokenizer` on pieces from all over it, kept in a folder.

Beside it stands `trained_on.json`, what it was trained on: the same call again finds it, another one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from nearfar.evaluation.text_pieces import gather_pieces, read_text_pieces
from nearfar.training.digit_tokenizer import train_digit_tokenizer
from nearfar.training.run_folder import write_json
from nearfar.training.token_blocks import text_files, text_fragments

__all__ = ["RECORD_NAME", "spread_pieces", "train_corpus_tokenizer"]

RECORD_NAME = "trained_on.json"
# Of the text, spread over files, or over the first so many times as much of a dataset.
_CHARACTERS, _DATASET_SPREAD = 20_000_000, 10


def spread_pieces(pieces: Iterable[str], characters: int) -> list[str]:
    """Every n-th piece, with the smallest power of two for which they have no more than so many characters in all.

    A text that begins with one author or one subject would give a tokenizer for that.

    Args:
        pieces: gone through once; no more than those that stay are held.
        characters: at most so many, unless the first piece alone has more.
    """
    kept: list[str] = []
    size, stride = 0, 1
    for index, piece in enumerate(pieces):
        if index % stride:
            continue
        kept.append(piece)
        size += len(piece)
        while size > characters and len(kept) > 1:
            kept, stride = kept[::2], 2 * stride
            size = sum(map(len, kept))
    return kept


def train_corpus_tokenizer(
    folder: str | Path,
    vocabulary: int,
    *,
    text: Sequence[str | Path] | None = None,
    dataset: str | None = None,
    split: str = "train",
    text_field: str = "text",
) -> None:
    """Train a tokenizer on a text and write it into a folder, unless it is there.

    Args:
        folder: of the tokenizer; made if it is missing.
        vocabulary: tokens at most.
        text: files and folders, as `load_token_blocks` reads them.
        dataset: a `datasets` id in their place, `id` or `id:config`.
        split: of the dataset.
        text_field: of JSON files and of the dataset.

    Raises:
        ValueError: the tokenizer that is there is of another text or size; neither a text nor a dataset, or both; what
            `train_digit_tokenizer` refuses.
        ImportError: a dataset without the `datasets` package.
    """
    if (text is None) == (dataset is None):
        raise ValueError(f"give either text or dataset, got {text!r} and {dataset!r}")
    folder = Path(folder)
    record = folder / RECORD_NAME
    wanted = {
        "vocabulary": vocabulary,
        "text": dataset if text is None else [str(path) for path in text],
        "split": split if text is None else None,
        "text_field": text_field,
        "bytes": None if text is None else {str(file): file.stat().st_size for file in text_files(text)},
    }
    if record.is_file():
        found = json.loads(record.read_text(encoding="utf-8"))
        # Older records have the first two only.
        differing = [name for name in wanted if name in found and found[name] != wanted[name]]
        if differing:
            raise ValueError(
                f"{folder} was trained with another --vocabulary or text ({', '.join(differing)}): choose another "
                "--output"
            )
        return
    if text is None:
        assert dataset is not None
        read = read_text_pieces(dataset, _CHARACTERS * _DATASET_SPREAD, split=split, column=text_field)
    else:
        read = gather_pieces(text_fragments([Path(path) for path in text], text_field=text_field))
    pieces = spread_pieces(read, _CHARACTERS)
    train_digit_tokenizer(pieces, vocabulary, sentences=()).save_pretrained(folder)
    write_json(record, wanted)
