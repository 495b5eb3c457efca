"""Text to blocks of tokens: every token once and in order, whatever the files, the pieces and the cache."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_texts import english, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nearfar.evaluation import file_lock
from nearfar.training import token_blocks
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks, text_fragments, write_token_file

EOS = 256  # of the tiny tokenizer, whose other ids are bytes


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Splits text as GPT-2's does, and has tokens of several bytes, runs of white space among them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = english(2000).replace(". ", ".\n\n  ") + "\n\n\n\t\t" * 200
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([text], trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def ids(tokenizer: PreTrainedTokenizerFast, *documents: str) -> list[int]:
    """The stream that documents should become."""
    stream: list[int] = []
    for number, document in enumerate(documents):
        stream += [tokenizer.eos_token_id] * bool(number) + tokenizer(document, add_special_tokens=False)["input_ids"]
    return stream


def test_packing(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    texts = [english(30, seed) for seed in range(3)]
    files = [write(tmp_path / f"{index}.txt", f"\n {text}\n\n") for index, text in enumerate(texts)]
    expected = ids(tokenizer, *texts)
    assert expected.count(EOS) == 2
    blocks = load_token_blocks(files, tokenizer, 50)
    assert len(blocks) == len(expected) // 50
    assert blocks.dropped_tokens == len(expected) % 50 > 0
    assert blocks.tokens.tolist() == expected[: len(blocks) * 50]
    items = [blocks[index] for index in range(len(blocks))]
    assert torch.cat([item["input_ids"] for item in items]).tolist() == blocks.tokens.tolist()
    for item in items:
        assert set(item) == {"input_ids", "labels"}
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].shape == (50,)
        assert torch.equal(item["input_ids"], item["labels"])
        assert item["input_ids"].data_ptr() != item["labels"].data_ptr()
    assert torch.equal(blocks[-1]["labels"], items[-1]["labels"])
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_parts_share_memory(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    blocks = load_token_blocks(write(tmp_path / "a.txt", english(60)), tokenizer, 20)
    part = blocks.part(2, 5)
    assert len(part) == 3
    assert part.dropped_tokens == 0
    assert np.shares_memory(part.tokens, blocks.tokens)
    assert torch.equal(part[0]["input_ids"], blocks[2]["input_ids"])
    for start, stop in ((-1, 2), (3, 3), (0, len(blocks) + 1)):
        with pytest.raises(ValueError, match="no range"):
            blocks.part(start, stop)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_separator_line(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, newline: str) -> None:
    text = "one\ntwo\n\n<|endoftext|>\n\n  \n<|endoftext|>\nthree <|endoftext|> three\n <|endoftext|> \n\nfour\n"
    blocks = load_token_blocks(write(tmp_path / "a.txt", text.replace("\n", newline)), tokenizer, 2)
    expected = ids(tokenizer, "one\ntwo", "three <|endoftext|> three", "four")
    assert blocks.tokens.tolist() == expected[: len(expected) // 2 * 2]


def test_separator_is_one_token(merging_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """With a tokenizer that knows the separator's text, as GPT-NeoX's does, it comes once between documents."""
    text = "one\n\n<|endoftext|>\n\ntwo"
    blocks = load_token_blocks(write(tmp_path / "a.txt", text), merging_tokenizer, 2)
    expected = ids(merging_tokenizer, "one<|endoftext|>two")  # of which it makes the same
    assert expected == ids(merging_tokenizer, "one", "two")
    assert blocks.tokens.tolist() == expected[: len(expected) // 2 * 2]


def test_separator_token(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    files = [write(tmp_path / name, name) for name in ("a.txt", "b.txt")]
    blocks = load_token_blocks(files, tokenizer, 11, separator_token="<|user|>")
    assert blocks.tokens[5] == tokenizer.convert_tokens_to_ids("<|user|>")


def pieces_given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make pieces and calls small; the list fills with the texts that the tokenizer is given."""
    monkeypatch.setattr(token_blocks, "_PIECE", 64)
    monkeypatch.setattr(token_blocks, "_CALL", 200)
    given: list[str] = []
    call = PreTrainedTokenizerFast.__call__

    def note(self: PreTrainedTokenizerFast, text: list[str], **kwargs: Any) -> Any:
        given.extend(text)
        return call(self, text, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", note)
    return given


@pytest.mark.parametrize("kind", ["prose", "random", "one line", "one word", "white space"])
def test_pieces_change_no_token(
    merging_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rng = random.Random(0)
    text = {
        "prose": english(500).replace(". ", ".\n\n  "),
        "random": "x" + "".join(rng.choice("ab.,'1é \n\n\t") for _ in range(4000)) + "x",
        "one line": english(500),
        "one word": "a" * 1000,
        "white space": "a" + " \n" * 500 + "b",
    }[kind]
    documents = [text, "second\ndocument"]
    expected = ids(merging_tokenizer, *documents)
    given = pieces_given(monkeypatch)
    written = write(tmp_path / "a.txt", "\n<|endoftext|>\n".join(documents))
    packed = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": document}) + "\n" for document in documents))
    for file in (written, packed):
        given.clear()
        blocks = load_token_blocks(file, merging_tokenizer, 2)
        assert "".join(given) == "".join(documents)
        assert len(given) > 5
        assert max(map(len, given)) <= 2 * 64, "memory must stay bounded"
        if kind in ("prose", "random", "one line"):  # there is a place to cut within any two pieces
            assert blocks.tokens.tolist() == expected[: len(expected) // 2 * 2]


def test_kinds_of_files(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Packed or not, as text or as JSON: the same documents give the same tokens."""
    documents = ["Übung macht\nden Meister", "second", "third – one"]
    text = "\n<|endoftext|>\n".join(documents).encode()
    rows: list[dict[str, Any]] = [{"id": index, "body": document} for index, document in enumerate(documents)]
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    contents = {
        "a.txt": text,
        "a.md": b"\xef\xbb\xbf" + text,
        "a.text": text,
        "a.txt.xz": lzma.compress(text),
        "a.TXT.gz": gzip.compress(text, mtime=0),
        "a.jsonl": lines,
        "a.jsonl.xz": lzma.compress(lines + b"\n\n"),
        "lines.json": lines,
        "a.json": json.dumps(rows, indent=1).encode(),
        "a.json.gz": gzip.compress(b"\n" + json.dumps(rows).encode()),
    }
    expected = ids(tokenizer, *documents)
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        blocks = load_token_blocks(tmp_path / name, tokenizer, 3, text_field="body")
        assert blocks.tokens.tolist() == expected[: len(expected) // 3 * 3], name


def test_half_a_surrogate_pair(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "a\\ud800b"}\n')
    assert tokenizer.decode(load_token_blocks(file, tokenizer, 3).tokens.tolist()) == "a?b"


def test_folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "c.txt.gz", "ignored.py", "ignored.bin.xz"):
        file = write(tmp_path / "corpus" / name, name)
        if name.endswith(".gz"):
            file.write_bytes(gzip.compress(name.encode(), mtime=0))
    blocks = load_token_blocks([str(tmp_path / "corpus")], tokenizer, 2)
    expected = ids(tokenizer, "a/z.md", "b.txt", "c.txt.gz")
    assert blocks.tokens.tolist() == expected[: len(expected) // 2 * 2]


def test_max_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = english(200)
    expected = ids(tokenizer, text)[:100]
    given = pieces_given(monkeypatch)
    blocks = load_token_blocks(write(tmp_path / "a.txt", text), tokenizer, 10, max_tokens=105)
    assert blocks.tokens.tolist() == expected
    assert blocks.dropped_tokens == 5
    assert sum(map(len, given)) < 400 < len(text), "the rest need not be tokenised"


def test_wide_ids(tmp_path: Path) -> None:
    vocabulary = {f"w{index}": index for index in range(70_000)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1")
    file = write(tmp_path / "a.txt", "w69999 w65536 w2 w3")
    for cache_dir in (None, tmp_path):
        blocks = load_token_blocks(file, tokenizer, 4, cache_dir=cache_dir)
        assert blocks.tokens.dtype == np.uint32
        assert blocks[0]["input_ids"].tolist() == [69999, 65536, 2, 3]


# --- cache -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever text is tokenised."""
    made: list[int] = []
    tokenise = token_blocks._tokenise

    def note(*arguments: Any) -> Iterator[np.ndarray]:
        made.append(1)
        return tokenise(*arguments)

    monkeypatch.setattr(token_blocks, "_tokenise", note)
    return made


def test_cache_is_used_again(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, calls: list[int]) -> None:
    file, cache = write(tmp_path / "a.txt", english(100)), tmp_path / "deep" / "cache"
    in_memory = load_token_blocks(file, tokenizer, 10)
    first = load_token_blocks(file, tokenizer, 10, cache_dir=cache)
    assert first.tokens.tolist() == in_memory.tokens.tolist()
    assert first.tokens.dtype == np.uint16
    assert isinstance(first.part(1, 3).tokens, np.memmap)
    assert len(calls) == 2
    again = load_token_blocks(str(file), tiny_tokenizer(), 33, cache_dir=str(cache))
    assert len(calls) == 2, "another block length reads the same file"
    assert again.tokens.tolist() == first.tokens.tolist()[: len(again) * 33]
    (npy,) = cache.glob("*.npy")
    assert npy.name.startswith("a-")
    assert npy.stat().st_size < 2 * in_memory.tokens.size + 200
    assert [path.suffix for path in cache.iterdir() if path != npy] in ([], [".lock"])


def test_cache_is_not_used_for_anything_else(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, calls: list[int]
) -> None:
    file, cache = write(tmp_path / "a.txt", english(100)), tmp_path / "cache"
    rows = write(tmp_path / "a.jsonl", json.dumps({"text": "x" * 50, "body": "y" * 50}))

    def made(path: Path = file, with_tokenizer: PreTrainedTokenizerFast = tokenizer, **options: Any) -> int:
        before = len(calls)
        load_token_blocks(path, with_tokenizer, 10, cache_dir=cache, **options)
        load_token_blocks(path, with_tokenizer, 10, cache_dir=cache, **options)
        return len(calls) - before

    assert made() == 1
    assert made(max_tokens=50) == 1
    assert made(separator_token="<|user|>") == 1
    other = tiny_tokenizer()
    other.add_tokens(["nest"])
    assert made(with_tokenizer=other) == 1
    assert made(rows) == 1
    assert made(rows, text_field="body") == 1
    write(file, english(100, seed=1))
    os.utime(file, ns=(1, 1))
    assert made() == 1
    os.utime(file, ns=(2, 2))
    assert made() == 1
    assert made() == 0


def test_processes_wait_for_each_other(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.txt", english(3000))
    monkeypatch.setattr(token_blocks, "_CALL", 1000)
    monkeypatch.setattr(token_blocks, "_PIECE", 100)
    with ThreadPoolExecutor(3) as pool:
        loaded = list(pool.map(lambda _: load_token_blocks(file, tokenizer, 10, cache_dir=tmp_path), range(3)))
    assert len(calls) == 1
    assert all(np.array_equal(blocks.tokens, loaded[0].tokens) for blocks in loaded)


def test_tokens_are_written_under_the_lock_of_other_shared_folders(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is tested with them: `evaluation.file_lock`."""
    held: list[tuple[str, int, int]] = []

    @contextmanager
    def watched(path: Path) -> Iterator[bool]:
        with file_lock.held_lock(path) as is_held:
            before = len(list(path.parent.glob("*.npy")))
            yield is_held
            held.append((path.name, before, len(list(path.parent.glob("*.npy")))))

    monkeypatch.setattr(token_blocks, "held_lock", watched)
    file, cache = write(tmp_path / "a.txt", english(100)), tmp_path / "new" / "cache"
    load_token_blocks(file, tokenizer, 10, cache_dir=cache)
    (tokens,) = cache.glob("*.npy")
    assert held == [(f"{tokens.name}.lock", 0, 1)]


def test_nothing_half_done_stays(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = write(tmp_path / "a.txt", english(100)), tmp_path / "cache"

    def fail(*arguments: Any) -> Iterator[np.ndarray]:
        yield np.zeros(100, np.uint16)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(token_blocks, "_tokenise", fail)
        load_token_blocks(file, tokenizer, 10, cache_dir=cache)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]
    assert load_token_blocks(file, tokenizer, 10, cache_dir=cache)[0]["input_ids"][0] != 0


# --- datasets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_datasets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for the `datasets` package, which need not be installed; the list fills with its calls."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return [{"text": "first row", "url": "u"}, {"text": " "}, {"text": "second row"}]

    module = types.ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_dataset(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, fake_datasets: list[tuple[Any, ...]]) -> None:
    blocks = load_token_blocks("someone/corpus:en", tokenizer, 5, split="validation", cache_dir=tmp_path)
    assert blocks.tokens.tolist() == ids(tokenizer, "first row", "second row")
    assert fake_datasets == [("someone/corpus", "en", "validation", True)]
    load_token_blocks(["someone/corpus:en"], tokenizer, 4, split="validation", cache_dir=tmp_path)
    assert len(fake_datasets) == 1
    load_token_blocks("corpus", tokenizer, 5, cache_dir=tmp_path)
    assert fake_datasets[1:] == [("corpus", None, "train", True)]
    with pytest.raises(ValueError, match=r"corpus, row 1 has no text in 'body' \(it has: text, url\)"):
        load_token_blocks("corpus", tokenizer, 5, text_field="body")


def test_dataset_without_the_package(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"no file or folder 'someone/corpus'.*datasets.*pip install"):
        load_token_blocks("someone/corpus", tokenizer, 5)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "name", "options", "message"),
    [
        ("some text", "a.txt", {"block_tokens": 1}, "block_tokens must be at least 2"),
        ("some text", "a.txt", {"block_tokens": 10}, "9 tokens do not fill one block of 10"),
        ("some text", "a.txt", {"block_tokens": 5, "max_tokens": 4}, "max_tokens=4 does not fill"),
        ("some text", "a.txt", {"separator_token": "<|none|>"}, "'<|none|>' is not in the tokenizer's vocabulary"),
        (" \n<|endoftext|>\n\n", "a.txt", {}, "a.txt: no text"),
        ("", "a.txt", {}, "a.txt: no text"),
        (b"abc\xff\xfeabc", "a.txt", {}, "a.txt is not UTF-8 text"),
        (b"no xz file", "a.txt.xz", {}, "a.txt.xz is damaged"),
        (lzma.compress(b"text" * 5000)[:40], "a.txt.xz", {}, "a.txt.xz is damaged"),
        (b"no gz file", "a.txt.gz", {}, "a.txt.gz is damaged"),
        (gzip.compress(b"text" * 5000, mtime=0)[:40], "a.txt.gz", {}, "a.txt.gz is damaged"),
        ('{"text": "a"}\n{"text"\n', "a.jsonl", {}, r"a.jsonl, line 2: neither a list"),
        ('[{"text": "a"},\n', "a.json", {}, r"a.json, line 2: neither a list"),
        ('{"text": "a"}\n{"body": "a"}\n', "a.jsonl", {}, r"a.jsonl, entry 2 has no text in 'text' \(it has: body\)"),
        ('["a"]', "a.json", {}, r"a.json, entry 1 has no text in 'text' \(it has: str\)"),
        ('{"text": null}', "a.jsonl", {}, "no text in 'text'"),
        ("", "empty.jsonl", {}, "empty.jsonl: no text"),
        ("some text", "corpus/notes.pdf", {"source": "corpus"}, r"corpus holds no text \(.txt, .md"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cached", [False, True])
def test_bad_input(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    content: str | bytes,
    name: str,
    options: dict[str, Any],
    message: str,
    cached: bool,
) -> None:
    file = write(tmp_path / name, "")
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    options = {"block_tokens": 2, "cache_dir": tmp_path / "cache" if cached else None, **options}
    source = tmp_path / options.pop("source", name)
    with pytest.raises(ValueError, match=message.replace("<|", r"<\|").replace("|>", r"\|>")):
        load_token_blocks(source, tokenizer, **options)
    if cached and "fill one block of 10" not in message:
        assert not list(tmp_path.glob("cache/*.npy"))


def test_bad_sources(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "some text")
    with pytest.raises(ValueError, match="sources is empty"):
        load_token_blocks([], tokenizer, 2)
    missing: Any
    for missing in ("corpus.txt", "corpus.jsonl.xz", "./corpus", Path("corpus"), [file, "corpus"], "a/b/c"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            load_token_blocks(missing, tokenizer, 2)
    without_end = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no end-of-text token"):
        load_token_blocks(file, without_end, 2)
    assert len(load_token_blocks(file, without_end, 2, separator_token="<|end|>")) == 4


def test_fragments_are_the_text_of_documents_not_of_their_files(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\n<|endoftext|>\ntwo")
    write(tmp_path / "b.jsonl", '{"body": "three"}\n{"body": "four"}\n')
    assert "".join(text_fragments(tmp_path, text_field="body")) == "one\n\ntwo\nthree\nfour\n"
    (tmp_path / "c.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"c\.npz is a token file, which holds no text"):
        next(text_fragments([tmp_path / "c.npz"]))


def test_token_file(
    tokenizer: PreTrainedTokenizerFast, merging_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    text = write(tmp_path / "a.txt", english(100))
    blocks = load_token_blocks(text, tokenizer, 9)
    assert blocks.dropped_tokens
    file = write_token_file(tmp_path / "tokens" / "a.npz", blocks, tokenizer)
    again = load_token_blocks([file], tokenizer, 5, cache_dir=tmp_path / "cache")
    assert again.tokens.dtype == np.uint16
    assert np.array_equal(again.tokens, load_token_blocks(text, tokenizer, 5).tokens)
    assert len(load_token_blocks(file, tokenizer, 5, max_tokens=12)) == 2
    assert not (tmp_path / "cache").exists(), "there is nothing to keep"
    with pytest.raises(ValueError, match="another vocabulary"):
        load_token_blocks(file, merging_tokenizer, 5)
    with pytest.raises(ValueError, match="nothing beside it"):
        load_token_blocks([file, text], tokenizer, 5)
    with pytest.raises(ValueError, match="do not fill one block of 100000"):
        load_token_blocks(file, tokenizer, 100_000)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_token_blocks(tmp_path / "b.npz", tokenizer, 5)
    with pytest.raises(ValueError, match="a token file ends in"):
        write_token_file(tmp_path / "a.npy", blocks, tokenizer)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is no token file, or damaged"):
        load_token_blocks(file, tokenizer, 5)


def test_blocks_of_an_array() -> None:
    with pytest.raises(ValueError, match="one block takes 5 tokens"):
        TokenBlocks(np.zeros(4, np.uint16), 5)
    with pytest.raises(ValueError, match=r"shape \(4, 5\)"):
        TokenBlocks(np.zeros((4, 5), np.uint16), 5)
    with pytest.raises(ValueError, match="at least 2"):
        TokenBlocks(np.zeros(4, np.uint16), 1)
    assert repr(TokenBlocks(np.zeros(4100, np.uint16), 4)) == "TokenBlocks(1,025 blocks of 4 tokens)"
