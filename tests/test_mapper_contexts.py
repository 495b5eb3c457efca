"""Texts as contexts of mapper pairs: sources, cutting and joining, needles, and which contexts share text."""

from __future__ import annotations

import importlib.util
import itertools
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_texts import english, tiny_tokenizer

from nearfar.evaluation.needles import FACTS
from nearfar.training.mapper_contexts import (
    PAPER_MIXTURE,
    cut_documents,
    mixture_contexts,
    needle_contexts,
    read_documents,
)
from nearfar.training.synthetic_contexts import SYNTHETIC, TRAINING_FACTS, synthetic_document

TOKENIZER = tiny_tokenizer()


def test_documents_are_cut_and_joined() -> None:
    long, short = "abcdefghij" * 20, "klm" * 5  # 200 and 15 tokens
    documents = [("long", long), ("s1", short), ("longer", long * 2), ("s2", short), ("s3", short), ("s4", short)]
    found = cut_documents(TOKENIZER, documents, 9, context_tokens=90, join_tokens=40)
    assert [(context.name, len(context.ids)) for context in found] == [
        ("long", 90), ("longer", 90), ("s1", 49), ("long#1", 90), ("longer#1", 90), ("longer#2", 90), ("longer#3", 90),
        ("longer#4", 40),
    ]  # fmt: skip
    assert TOKENIZER.decode(found[2].ids) == f"{short}\n\n{short}\n\n{short}"
    assert TOKENIZER.decode(found[0].ids) + TOKENIZER.decode(found[3].ids) == long[:180]
    assert [context.name for context in cut_documents(TOKENIZER, documents, 2, context_tokens=90, join_tokens=40)] == [
        "long", "longer",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no context of at least 32 tokens"):
        cut_documents(TOKENIZER, [("s", "abc")], 3)
    with pytest.raises(ValueError, match="context_tokens must be at least 32"):
        cut_documents(TOKENIZER, documents, 3, context_tokens=8)


def test_needles_are_hidden() -> None:
    text = english(300)
    found = needle_contexts(TOKENIZER, [text], 3, context_tokens=300)
    assert len({context.name for context in found}) == 3
    hidden = set()
    for context in found:
        assert len(context.ids) <= 300
        decoded = TOKENIZER.decode(context.ids)
        names = [fact.statement.split("{key}") for fact in TRAINING_FACTS]
        told = [number for number, parts in enumerate(names) if all(part.strip() in decoded for part in parts)]
        assert told and re.search(r"\d{5}", decoded)
        hidden |= set(told)
    assert len(hidden) > 1
    assert found == needle_contexts(TOKENIZER, [text], 3, context_tokens=300)
    assert found != needle_contexts(TOKENIZER, [text], 3, context_tokens=300, seed=1)
    with pytest.raises(ValueError, match="a text to be hidden in"):
        needle_contexts(TOKENIZER, ["  "], 3)
    with pytest.raises(ValueError, match="more than 48 tokens"):
        needle_contexts(TOKENIZER, [text], 3, context_tokens=48)


def test_sources_tell_which_contexts_share_text(tmp_path: Path) -> None:
    """Of needles too: two contexts without a common source have no 60 characters in common."""
    for name in range(3):
        (tmp_path / f"{name}.txt").write_text(english(250, seed=name), encoding="utf-8")
    for name in range(3, 8):
        (tmp_path / f"{name}.txt").write_text(english(10, seed=name), encoding="utf-8")  # joined with others
    found = mixture_contexts(TOKENIZER, [tmp_path, "needles"], 12, context_tokens=400, join_tokens=200)
    assert sum(context.name.startswith("needles") for context in found) == 12
    texts = [TOKENIZER.decode(context.ids) for context in found]
    together = 0
    for one, other in itertools.combinations(range(len(found)), 2):
        shared = any(texts[one][at : at + 60] in texts[other] for at in range(len(texts[one]) - 59))
        if set(found[one].sources) & set(found[other].sources):
            together += 1
        else:
            assert not shared, (found[one].name, found[other].name)
    assert 0 < together < 50


def test_what_is_measured_is_not_trained_for() -> None:
    """Neither the wordings nor the words of the needles that `evaluation` hides."""
    theirs = {key for fact in FACTS for key in fact.keys}
    mine = {key for fact in TRAINING_FACTS for key in fact.keys}
    assert len(mine) > 50 and not {key.lower() for key in mine} & {key.lower() for key in theirs}
    assert not {fact.statement for fact in TRAINING_FACTS} & {fact.statement for fact in FACTS}
    for kind in SYNTHETIC:
        texts = [synthetic_document(kind, 0, number) for number in range(40)]
        assert len(set(texts)) == 40 and texts[3] == synthetic_document(kind, 0, 3) != synthetic_document(kind, 1, 3)
        assert all(len(text) > 150 and re.search(r"\d", text) for text in texts) or kind == "many_shot"
        words = set(re.findall(r"[a-z]+", " ".join(texts).lower()))
        assert not words & {key.lower() for key in theirs} - {"key"}, words & {key.lower() for key in theirs}
    with pytest.raises(ValueError, match="unknown kind 'song'; known: dialogue"):
        synthetic_document("song", 0, 0)


def test_documents_of_one_packed_file_are_taken_evenly(tmp_path: Path) -> None:
    text = "\n<|endoftext|>\n".join(f"document {number}" for number in range(10))
    (tmp_path / "many.txt.xz").write_bytes(lzma.compress(text.encode()))
    found = read_documents(tmp_path / "many.txt.xz", 3)
    assert found == [("many.txt.xz", "document 0"), ("many.txt.xz:3", "document 3"), ("many.txt.xz:6", "document 6")]


def test_mixture_of_files_and_needles(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(english(80, seed=ord(name)), encoding="utf-8")
    found = mixture_contexts(TOKENIZER, [tmp_path, "needles"], 2, context_tokens=200, join_tokens=100)
    assert [context.name for context in found] == ["a.txt", "needles:0:0", "b.txt", "needles:0:1"]
    made = mixture_contexts(TOKENIZER, ["dialogue", "records"], 2, context_tokens=400, join_tokens=300, seed=3)
    assert [context.name.split(":")[0] for context in made] == ["dialogue", "records"] * 2
    assert all(len(context.ids) >= 300 for context in made)
    only = mixture_contexts(TOKENIZER, ["needles"], 1, context_tokens=200, haystack=[english(80)])
    assert [context.name for context in only] == ["needles:0:0"]
    with pytest.raises(ValueError, match="name another source too"):
        mixture_contexts(TOKENIZER, ["needles"], 1)
    with pytest.raises(ValueError, match="named twice"):
        mixture_contexts(TOKENIZER, ["needles", "needles"], 1)
    with pytest.raises(ValueError, match="sources is empty"):
        mixture_contexts(TOKENIZER, [], 1)
    with pytest.raises(FileNotFoundError, match=r"'gsm' is neither a file .* nor one of: gsm8k, squad, scbench:kv"):
        mixture_contexts(TOKENIZER, ["gsm"], 1)


@pytest.mark.parametrize("source", ["gsm8k", "scbench:kv", "owner/name"])
def test_missing_datasets_is_told(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "datasets" else find(name))
    with pytest.raises(ImportError, match=rf"{source} is read with the `datasets` package, which is missing: pip"):
        read_documents(source, 1)


def test_datasets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        asked.append((name, config, split, streaming))
        if "gsm8k" in name:
            return iter([{"question": "How many?", "answer": "Two. #### 2"}] * 2 + [{"question": "?", "answer": "1"}])
        return iter([{"context": "a passage"}, {"context": " a passage"}, {"context": "another"}])

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    fake.__spec__ = importlib.util.spec_from_loader("datasets", loader=None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = read_documents("gsm8k", 5)
    assert found == [("gsm8k:0", "Question: How many?\nAnswer: Two. #### 2"), ("gsm8k:2", "Question: ?\nAnswer: 1")]
    assert read_documents("squad", 1) == [("squad:0", "a passage")]
    assert read_documents("scbench:many_shot", 5)[1] == ("scbench:many_shot:2", "another")
    assert read_documents("owner/name:part", 2, split="test")[0] == ("owner/name:test:0", "a passage")
    assert asked == [
        ("openai/gsm8k", "main", "train", True),
        ("rajpurkar/squad", None, "train", True),
        ("microsoft/SCBench", "scbench_many_shot", "test", True),
        ("owner/name", "part", "test", True),
    ]
    for name in PAPER_MIXTURE:
        assert name == "needles" or read_documents(name, 1)
    assert "scbench:repoqa" not in PAPER_MIXTURE, "held out in the paper"
    with pytest.raises(ValueError, match="limit must be at least 1"):
        read_documents("gsm8k", 0)
