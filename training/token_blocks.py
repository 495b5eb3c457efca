"""Text to blocks of token ids of one length, for language modelling: read in pieces, tokenised once, kept on disk.

Documents are joined by the end-of-text id and packed end to end; block i is tokens i·n to (i + 1)·n of that stream,
and what does not fill a last block is left out. On disk a token takes 2 bytes (4 with more than 65,536 ids) in a
`.npy` file that is mapped into memory rather than read::

    blocks = load_token_blocks("book.txt.xz", tokenizer, 2048, cache_dir="tokens")
    blocks[0]["input_ids"]  # (2048,), int64

A cache belongs to its machine. To tokenise on one and train on another, carry a token file, which is packed, knows its
tokenizer's vocabulary and takes a text's place::

    write_token_file("book.npz", blocks, tokenizer)
    load_token_blocks("book.npz", tokenizer, 2048)
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.lib import format as npy
from torch.utils.data import Dataset
from tqdm import tqdm

from nearfar.evaluation.file_lock import held_lock
from nearfar.modeling.atomic_file import write_beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "SEPARATOR_LINE",
    "TokenBlocks",
    "load_token_blocks",
    "text_documents",
    "text_files",
    "text_fragments",
    "write_token_file",
]

# A line of a plain text file that holds nothing else separates two documents.
SEPARATOR_LINE = "<|endoftext|>"

# Of a token file; see `write_token_file`.
TOKEN_SUFFIX = ".npz"

_PLAIN_SUFFIXES = (".txt", ".md")
_JSON_SUFFIXES = (".json", ".jsonl")
_UNPACKERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open}
# Characters handed to the tokenizer as one text, and in one call: pieces of a call are tokenised in parallel, and a
# call's results take some hundred bytes a token until they are in the array.
_PIECE = 1 << 18
_CALL = 1 << 22
# Part of each file's name: raise it when the same text would give other tokens, and older files are left unused.
_FORMAT = 1


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """A stream of token ids as blocks of equal length.

    An item is `{"input_ids": (block_tokens,) int64, "labels": the same}`: models shift the labels themselves.

    Args:
        tokens: integers of shape (n,), any unsigned type; n >= `block_tokens`. It is kept, not copied.
        block_tokens: tokens of a block, >= 2.

    Raises:
        ValueError: a shorter block, or fewer tokens than one block.
    """

    def __init__(self, tokens: np.ndarray, block_tokens: int) -> None:
        _check_block_tokens(block_tokens)
        if tokens.ndim != 1 or tokens.size < block_tokens:
            raise ValueError(
                f"one block takes {block_tokens} tokens in a row, got tokens of shape {tuple(tokens.shape)}"
            )
        self.block_tokens = block_tokens
        self._stream = tokens

    @property
    def tokens(self) -> np.ndarray:
        """All blocks end to end: shape (len(self) · block_tokens,), read-only where they are mapped from a file."""
        return self._stream[: len(self) * self.block_tokens]

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end that do not fill a block."""
        return self._stream.size % self.block_tokens

    def part(self, start: int, stop: int) -> TokenBlocks:
        """The blocks from `start` up to `stop`, over the same memory.

        Raises:
            ValueError: no block in that range, or a range beyond the blocks there are.
        """
        if not 0 <= start < stop <= len(self):
            raise ValueError(f"there are {len(self)} blocks, and {start} to {stop} is no range of them")
        return TokenBlocks(self._stream[start * self.block_tokens : stop * self.block_tokens], self.block_tokens)

    def __len__(self) -> int:
        return self._stream.size // self.block_tokens

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index % len(self) * self.block_tokens
        ids = torch.from_numpy(self._stream[start : start + self.block_tokens].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} blocks of {self.block_tokens:,} tokens)"


def load_token_blocks(
    sources: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    block_tokens: int,
    *,
    split: str = "train",
    text_field: str = "text",
    max_tokens: int | None = None,
    cache_dir: str | Path | None = None,
    separator_token: str | None = None,
) -> TokenBlocks:
    """Tokenise text and pack it into blocks.

    Memory stays bounded whatever the size of a plain text or `.jsonl` file (a `.json` list is read whole). A document
    beyond some 250,000 characters is tokenised in pieces, cut before a line break: a GPT-2-like tokenizer gives the
    same tokens as in one go, one that joins text across line breaks may give another token at a cut.

    Args:
        sources: files, and folders searched recursively in the order of their names: plain text (`.txt`, `.md`, and
            any other file that is named itself), or `.jsonl` / `.json` with a text in `text_field` of each object;
            each also packed as `.xz` or `.gz`. A plain text file is one document, or several with a line
            `<|endoftext|>` between them; white space around a document is dropped. Or one string that names no file:
            a `datasets` id, `id` or `id:config`, streamed in its own order. Or one token file, `.npz`, which is read
            into memory and makes `cache_dir` and `separator_token` idle.
        tokenizer: its end-of-text token goes between documents; it adds no other special token.
        block_tokens: tokens of a block, >= 2; an incomplete last block is left out.
        split: of a `datasets` id.
        text_field: of JSON objects and `datasets` rows.
        max_tokens: read no more than so many tokens; `None` reads everything.
        cache_dir: folder for the tokens, made if missing; a later call with the same files (path, size, time),
            tokenizer and settings, of whatever `block_tokens`, finds them there. A `datasets` id is taken to stay as
            it was. Of several processes one tokenises and the others wait. With `None` the tokens stay in memory.
        separator_token: a token to put between documents instead of the end-of-text token.

    Raises:
        ValueError: no text, or too little for one block; a file that is no UTF-8 text, damaged, or without
            `text_field`; a separator that is not in the tokenizer's vocabulary, or a tokenizer without end-of-text
            token; a token file of another tokenizer or beside other sources; `block_tokens` or `max_tokens` out of
            range.
        FileNotFoundError: a file or folder that does not exist.
        ImportError: a `datasets` id without the `datasets` package.
    """
    _check_block_tokens(block_tokens)
    if max_tokens is not None and max_tokens < block_tokens:
        raise ValueError(f"max_tokens={max_tokens} does not fill one block of {block_tokens} tokens")
    named = [sources] if isinstance(sources, (str, Path)) else list(sources)
    if token_files := [str(source) for source in named if Path(source).suffix.lower() == TOKEN_SUFFIX]:
        if len(named) > 1:
            raise ValueError(f"{token_files[0]} is a token file, which stands for all text: give nothing beside it")
        tokens = _read_token_file(Path(token_files[0]).expanduser(), tokenizer)[:max_tokens]
        if tokens.size < block_tokens:
            raise ValueError(f"{token_files[0]}: {tokens.size} tokens do not fill one block of {block_tokens}")
        return TokenBlocks(tokens, block_tokens)
    separator = _separator_id(tokenizer, separator_token)
    found = _find_sources(sources, split, text_field)
    highest = max(max(tokenizer.get_vocab().values()), separator)
    dtype = np.dtype(np.uint16 if highest < 1 << 16 else np.uint32)

    def arrays() -> Iterator[np.ndarray]:
        total = sum(source.size for source in found) or None
        with tqdm(total=total, unit="B", unit_scale=True, desc="tokenising") as bar:
            fragments = chain.from_iterable(source.fragments(bar.update) for source in found)
            count = 0
            for array in _tokenise(_pieces(fragments), tokenizer, separator, dtype, max_tokens):
                yield array
                count += array.size
                bar.set_postfix_str(f"{count:,} tokens", refresh=False)

    if cache_dir is None:
        tokens = np.concatenate([np.empty(0, dtype), *arrays()])
        _check_tokens(tokens.size, found)
    else:
        settings = {"separator": separator, "max_tokens": max_tokens, "format": _FORMAT}
        key = [settings, [source.key() for source in found], _tokenizer_key(tokenizer)]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        path = Path(cache_dir).expanduser() / f"{found[0].label}-{digest[:24]}.npy"
        # Where the file system has no locks, two processes may do the same work; no harm is done.
        with held_lock(path.with_name(f"{path.name}.lock")):
            if not path.is_file():
                write_beside(path, lambda beside: _check_tokens(_write_npy(beside, arrays(), dtype), found))
        tokens = np.load(path, mmap_mode="r")
    if tokens.size < block_tokens:
        raise ValueError(
            f"{_names(found)}: {tokens.size} tokens do not fill one block of {block_tokens}; give more text or a "
            "smaller block_tokens"
        )
    return TokenBlocks(tokens, block_tokens)


def write_token_file(path: str | Path, blocks: TokenBlocks, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write tokens as one packed file, about a byte a token, for `load_token_blocks` on any machine.

    Args:
        path: ends in `.npz`; written beside, then renamed.
        blocks: all of their stream is written, a last incomplete block with it.
        tokenizer: that the tokens are of. Its vocabulary's digest goes along.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    if path.suffix.lower() != TOKEN_SUFFIX:
        raise ValueError(f"a token file ends in {TOKEN_SUFFIX}, got {path}")

    def write(beside: Path) -> None:
        with open(beside, "wb") as file:  # by name, numpy would add an ending
            np.savez_compressed(file, tokens=blocks._stream, vocabulary=np.array(_vocabulary_key(tokenizer)))

    return write_beside(path, write)


def _read_token_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, vocabulary = file["tokens"], str(file["vocabulary"])
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is no token file, or damaged: {error}") from None
    if vocabulary != _vocabulary_key(tokenizer):
        raise ValueError(f"{path} holds tokens of a tokenizer with another vocabulary: write it anew with this one")
    return tokens


def _vocabulary_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of which id is which token: unlike `_tokenizer_key` it is the same in all versions of the libraries."""
    described = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
    return hashlib.sha256(described.encode()).hexdigest()


def text_documents(path: str | Path) -> Iterator[tuple[str, str]]:
    """The documents of a text file or of a folder of them, as (name, text), read as they are asked for.

    What `load_token_blocks` takes for files: text also as `.xz` or `.gz`, several documents in one with a line
    `<|endoftext|>` between them. A file's first document bears its name, the others `name:number`.

    Raises:
        FileNotFoundError, ValueError: as there.
    """
    for source in _find_sources([path], "", "text"):
        held: list[str] = []
        number = 0
        name = source.name.name if isinstance(source, _File) else source.name
        for fragment in source.fragments(lambda count: None):
            if fragment is not None:
                held.append(fragment)
                continue
            text = "".join(held).strip()
            held = []
            if text:
                yield (f"{name}:{number}" if number else name), text
                number += 1


def text_files(sources: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that `load_token_blocks` would read for these files and folders, in that order.

    Raises:
        FileNotFoundError, ValueError: as there.
    """
    named = [sources] if isinstance(sources, (str, Path)) else sources
    found = _find_sources([Path(source) for source in named], "", "text")  # a Path is no id of a dataset
    return [source.name for source in found if isinstance(source, _File)]


def text_fragments(
    sources: str | Path | Sequence[str | Path], *, split: str = "train", text_field: str = "text"
) -> Iterator[str]:
    """The text that `load_token_blocks` would tokenise, in parts as they are read, a line break after each document.

    Args:
        sources, split, text_field: as there, but no token file.

    Raises:
        FileNotFoundError, ImportError, ValueError: as there; a token file, which holds no text.
    """
    for source in _find_sources(sources, split, text_field):
        if isinstance(source, _File) and source.name.suffix.lower() == TOKEN_SUFFIX:
            raise ValueError(f"{source.name} is a token file, which holds no text")
        for fragment in source.fragments(lambda count: None):
            yield "\n" if fragment is None else fragment


def _check_block_tokens(block_tokens: int) -> None:
    if block_tokens < 2:
        raise ValueError(
            f"block_tokens must be at least 2 (one token to predict from, one to predict), got {block_tokens}"
        )


def _check_tokens(count: int, found: Sequence[_Source]) -> None:
    if not count:
        raise ValueError(f"{_names(found)}: no text")


def _names(found: Sequence[_Source]) -> str:
    names = [str(source.name) for source in found]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more files"


def _separator_id(tokenizer: PreTrainedTokenizerBase, token: str | None) -> int:
    if token is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end-of-text token to put between documents: set tokenizer.eos_token, or name a "
                "token of its vocabulary as separator_token"
            )
        return int(tokenizer.eos_token_id)
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        raise ValueError(f"separator_token={token!r} is not in the tokenizer's vocabulary")
    return int(vocabulary[token])


def _tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything that decides which ids a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: Any
    if backend is not None:
        content = json.loads(backend.to_str())
        # What an earlier call left behind, and each call sets anew.
        content.update(truncation=None, padding=None)
    else:
        content = [sorted(tokenizer.get_vocab().items()), sorted(map(str, tokenizer.all_special_tokens))]
    described = json.dumps([type(tokenizer).__name__, content], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def _write_npy(path: Path, arrays: Iterable[np.ndarray], dtype: np.dtype) -> int:
    """Write one-dimensional arrays end to end as one `.npy` file and return the number of elements.

    The length is known only at the end, so the header is written twice: numpy pads it so that a length of up to 21
    digits takes the same room.
    """
    count = 0

    def write_header(file: IO[bytes]) -> int:
        file.seek(0)
        header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        npy.write_array_header_1_0(file, header)
        return file.tell()

    with open(path, "wb") as file:
        room = write_header(file)
        for array in arrays:
            file.write(array.tobytes())
            count += array.size
        if write_header(file) != room:
            raise RuntimeError("numpy wrote a header of another length for the same kind of array")
    return count


# --- tokenising ------------------------------------------------------------------------------------------------------


def _pieces(fragments: Iterable[str | None]) -> Iterator[tuple[str, bool]]:
    """Put fragments together to texts of about `_PIECE` characters; `None` ends a document.

    Yields:
        A text, and whether a document begins with it.
    """
    held: list[str] = []
    size, begins = 0, True
    for fragment in chain(fragments, [None]):
        if fragment is None:
            text = "".join(held).rstrip()
            if text:
                yield text, begins
            held, size, begins = [], 0, True
            continue
        if begins and not held:
            fragment = fragment.lstrip()
        if not fragment:
            continue
        held.append(fragment)
        size += len(fragment)
        if size >= _PIECE:
            text = "".join(held)
            cut = _cut(text)
            yield text[:cut], begins
            held, size, begins = [text[cut:]], len(text) - cut, False


def _cut(text: str) -> int:
    """Where to cut a text: before its last line break, or else blank, that follows something other than white space.

    GPT-2-like tokenizers split there in any case.
    """
    for mark in ("\n", " "):
        cut = text.rfind(mark)
        while cut > 0 and text[cut - 1].isspace():
            cut = text.rfind(mark, 0, cut)
        if cut > 0:
            return cut
    return len(text)


def _calls(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    call: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        call.append(piece)
        size += len(piece[0])
        if size >= _CALL:
            yield call
            call, size = [], 0
    if call:
        yield call


def _tokenise(
    pieces: Iterable[tuple[str, bool]],
    tokenizer: PreTrainedTokenizerBase,
    separator: int,
    dtype: np.dtype,
    max_tokens: int | None,
) -> Iterator[np.ndarray]:
    taken = 0
    for call in _calls(pieces):
        texts = [text for text, _ in call]
        # verbose=False: a warning about the model's longest sequence would be wrong here.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        ids: list[int] = []
        for (_, begins), row in zip(call, cast("list[list[int]]", encoded), strict=True):
            if begins and (taken or ids):
                ids.append(separator)
            ids += row
        array = np.array(ids, dtype)
        if max_tokens is not None:
            array = array[: max_tokens - taken]
        taken += array.size
        yield array
        if taken == max_tokens:
            return


# --- sources ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A text file; `text_field` is None for plain text."""

    name: Path
    text_field: str | None

    @property
    def label(self) -> str:
        return self.name.name.partition(".")[0] or "tokens"

    @property
    def size(self) -> int:
        return self.name.stat().st_size

    def key(self) -> list[Any]:
        status = self.name.stat()
        return [str(self.name.resolve()), status.st_size, status.st_mtime_ns, self.text_field]

    def fragments(self, advance: Callable[[int], Any]) -> Iterator[str | None]:
        """The text in order, `None` after each document; `advance` is told the bytes of the file that were read."""
        seen = 0
        try:
            with open(self.name, "rb") as raw:
                for fragment in self._read(raw):
                    yield fragment
                    advance(raw.tell() - seen)
                    seen = raw.tell()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.name} is not UTF-8 text ({error.reason})") from None
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.name} is damaged: {error}") from None

    def _read(self, raw: IO[bytes]) -> Iterator[str | None]:
        unpack = _UNPACKERS.get(self.name.suffix.lower())
        with io.TextIOWrapper(
            unpack(raw) if unpack else raw, encoding="utf-8-sig"
        ) as lines:  # a byte order mark is dropped
            if self.text_field is None:
                # A line without an end in sight comes in parts.
                for line in iter(lambda: lines.readline(_PIECE), ""):
                    yield None if line.strip() == SEPARATOR_LINE else line
                yield None
            else:
                for number, row in self._rows(lines):
                    yield from _document(_field(row, self.text_field, f"{self.name}, entry {number}"))

    def _rows(self, lines: IO[str]) -> Iterator[tuple[int, Any]]:
        """Objects of a JSON list or, unless the file begins with a bracket, of its lines."""
        number = 0
        try:
            first = lines.read(1)
            while first.isspace():
                first = lines.read(1)
            if first == "[":
                yield from enumerate(json.loads(first + lines.read()), 1)
                return
            for number, line in enumerate(chain([first + lines.readline()], lines), 1):
                if line.strip():
                    yield number, json.loads(line)
        except json.JSONDecodeError as error:
            where = f"line {number}" if number else f"line {error.lineno}"
            raise ValueError(
                f"{self.name}, {where}: neither a list of JSON objects nor one a line ({error.msg})"
            ) from None


@dataclass(frozen=True)
class _HubDataset:
    name: str
    split: str
    text_field: str
    size: int = 0  # unknown

    @property
    def label(self) -> str:
        return re.sub(r"\W+", "-", self.name)

    def key(self) -> list[Any]:
        return [self.name, self.split, self.text_field]

    def fragments(self, advance: Callable[[int], Any]) -> Iterator[str | None]:
        from datasets import load_dataset

        dataset, _, config = self.name.partition(":")
        rows = load_dataset(dataset, config or None, split=self.split, streaming=True)
        for number, row in enumerate(rows, 1):
            text = _field(row, self.text_field, f"{self.name}, row {number}")
            yield from _document(text)
            advance(len(text))


_Source = _File | _HubDataset


def _document(text: str) -> Iterator[str | None]:
    for start in range(0, len(text), _PIECE):
        # JSON may hold halves of surrogate pairs, which no tokenizer takes.
        yield text[start : start + _PIECE].encode("utf-8", "replace").decode("utf-8")
    yield None


def _field(row: Any, name: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(name), str):
        held = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no text in {name!r} (it has: {held}); name its field as text_field")
    return row[name]


def _find_sources(sources: str | Path | Sequence[str | Path], split: str, text_field: str) -> list[_Source]:
    named = [sources] if isinstance(sources, (str, Path)) else list(sources)
    if not named:
        raise ValueError("no text: sources is empty")
    found: list[_Source] = []
    for source in named:
        path = Path(source).expanduser()
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.is_file() and _is_text(file))
            files = sorted(inside, key=lambda file: file.relative_to(path).as_posix())
            if not files:
                kinds = ", ".join((*_PLAIN_SUFFIXES, *_JSON_SUFFIXES))
                raise ValueError(f"{path} holds no text ({kinds}, also as .xz or .gz)")
            found += [_file(file, text_field) for file in files]
        elif path.exists():
            found.append(_file(path, text_field))
        elif len(named) == 1 and isinstance(source, str) and _may_be_dataset(source):
            if importlib.util.find_spec("datasets") is None:
                raise ImportError(
                    f"there is no file or folder {source!r}, and to read it as a dataset of the Hub takes the "
                    "`datasets` package: pip install 'nearfar[train]'"
                )
            found.append(_HubDataset(source, split, text_field))
        else:
            raise FileNotFoundError(f"no such file or folder: {source}")
    return found


def _file(path: Path, text_field: str) -> _File:
    return _File(path, text_field if _suffix(path) in _JSON_SUFFIXES else None)


def _suffix(path: Path) -> str:
    """Ending of the name, without that of a packed file, in small letters."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _UNPACKERS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _is_text(path: Path) -> bool:
    return _suffix(path) in (*_PLAIN_SUFFIXES, *_JSON_SUFFIXES)


def _may_be_dataset(name: str) -> bool:
    return re.fullmatch(r"[\w.-]*\w(/[\w.-]+)?(:[\w.-]+)?", name) is not None and not _is_text(Path(name))
