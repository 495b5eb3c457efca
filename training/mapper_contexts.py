"""Texts as contexts for a mapper's pairs: where documents come from, and how they are cut, joined and given needles.

Sources are text files, datasets on the Hub, the mixture of the ProxyKV paper, and texts that are made here. Contexts
say which passages they share, so that none is trained on while another of the same text is held out::

    contexts = mixture_contexts(tokenizer, ["books/", "needles"], count=50)
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nearfar.evaluation.needles import hide_needles
from nearfar.evaluation.texts import load_dataset_texts
from nearfar.training.synthetic_contexts import SYNTHETIC, TRAINING_FACTS, synthetic_document
from nearfar.training.token_blocks import text_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "NEEDLES",
    "PAPER_MIXTURE",
    "SCBENCH_SUBSETS",
    "PairContext",
    "cut_documents",
    "ids_digest",
    "mixture_contexts",
    "needle_contexts",
    "read_documents",
]

# Shorter pieces of text say next to nothing about what a model repeats.
LEAST_TOKENS = 32
# More characters of a document than this for each token wanted are not handed to the tokenizer.
_CHARACTERS_A_TOKEN = 16
# Tokens that a hidden needle adds to its context, at most, and how many needles a context has, at most.
_NEEDLE_TOKENS, _MOST_NEEDLES = 48, 4
# Synthetic documents are some hundred tokens long: so many are written for each context.
_DOCUMENTS_A_CONTEXT = 40


@dataclass(frozen=True)
class PairContext:
    """Token ids of one context, without what stands before it (chat header or beginning-of-sequence token).

    Attributes:
        sources: digests of the passages that it was made from. Contexts that share one are either all trained on or
            all held out.
    """

    name: str
    ids: tuple[int, ...]
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class _HubSource:
    """A dataset of the mixture: where it is, and how a row becomes a document."""

    dataset: str
    config: str | None
    split: str
    document: Callable[[dict[str, Any]], str]


def _column(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: str(row[name])


# SCBench's RepoQA is left out of the paper's mixture: it is held out for zero-shot evaluation.
SCBENCH_SUBSETS = (
    "kv", "prefix_suffix", "vt", "qa_eng", "qa_chn", "choice_eng", "mf", "many_shot", "summary", "repoqa",
    "summary_with_needles", "repoqa_and_kv",
)  # fmt: skip
_NAMED: dict[str, _HubSource] = {
    "gsm8k": _HubSource(
        "openai/gsm8k", "main", "train", lambda row: f"Question: {row['question']}\nAnswer: {row['answer']}"
    ),
    "squad": _HubSource("rajpurkar/squad", None, "train", _column("context")),
    **{
        f"scbench:{subset}": _HubSource("microsoft/SCBench", f"scbench_{subset}", "test", _column("context"))
        for subset in SCBENCH_SUBSETS
    },
}
NEEDLES = "needles"
PAPER_MIXTURE = (
    "gsm8k", "squad", NEEDLES, "scbench:qa_eng", "scbench:summary", "scbench:kv", "scbench:many_shot",
    "scbench:choice_eng", "scbench:prefix_suffix",
)  # fmt: skip


def read_documents(
    source: str | Path, limit: int, *, split: str | None = None, column: str | None = None
) -> list[tuple[str, str]]:
    """Different documents of a source, as (name, text).

    Args:
        source: a name of the mixture (`gsm8k`, `squad`, `scbench:kv`, …), a text file or a folder of them (also `.xz`
            and `.gz`, documents separated by lines `<|endoftext|>`), or the id of a dataset, `owner/name` or
            `owner/name:config`.
        limit: most documents. Of files with more of them they are taken evenly spread, of datasets the first.
        split, column: of a dataset's id; by default "train" and what `load_dataset_texts` finds.

    Raises:
        FileNotFoundError: neither a name, nor a path, nor a dataset's id.
        ImportError: a dataset without the `datasets` package.
        ValueError: no text in it, or `limit` below 1.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    name = str(source)
    if name in _NAMED:
        return list(islice(_rows(name, _NAMED[name]), limit))
    if Path(source).exists():
        documents = list(text_documents(source))
        if not documents:
            raise ValueError(f"{name} holds no text")
        return documents[:: max(1, len(documents) // limit)][:limit]
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name) is None:
        known = ", ".join((*(_NAMED), NEEDLES, *SYNTHETIC))
        raise FileNotFoundError(
            f"{name!r} is neither a file or folder, nor the id of a dataset (owner/name), nor one of: {known}"
        )
    _need_datasets(name)
    dataset, _, config = name.partition(":")
    texts = load_dataset_texts(
        dataset, config=config or None, split=split or "train", column=column, max_documents=limit
    )
    return [(text.name, text.text) for text in texts]


def _need_datasets(name: str) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(
            f"{name} is read with the `datasets` package, which is missing: pip install 'nearfar[train]' (or name "
            "text files instead)"
        )


def _rows(name: str, source: _HubSource) -> Iterator[tuple[str, str]]:
    _need_datasets(name)
    from datasets import load_dataset

    seen: set[str] = set()  # rows may share a context: SQuAD has a row for each question
    rows = load_dataset(source.dataset, source.config, split=source.split, streaming=True)
    for number, row in enumerate(rows):
        try:
            text = source.document(row).strip()
        except KeyError as error:
            raise ValueError(f"{name} ({source.dataset}) has no column {error}; it has: {', '.join(row)}") from None
        if text and text not in seen:
            seen.add(text)
            yield f"{name}:{number}", text


def cut_documents(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[tuple[str, str]],
    count: int,
    *,
    context_tokens: int = 8192,
    join_tokens: int = 2048,
) -> list[PairContext]:
    """At most `count` contexts: the first piece of every long document, then the second pieces, and so on.

    Args:
        documents: names and texts.
        context_tokens: most tokens of a context.
        join_tokens: documents shorter than this are joined, with blank lines between, until they are as long.

    Raises:
        ValueError: sizes out of range, or no context of at least 32 tokens.
    """
    return _pieces(tokenizer, documents, count, context_tokens, join_tokens)[:count]


def _pieces(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[tuple[str, str]],
    count: int,
    context_tokens: int,
    join_tokens: int,
) -> list[PairContext]:
    """Passages without a common token, of which `cut_documents` takes the first ones."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if context_tokens < LEAST_TOKENS:
        raise ValueError(f"context_tokens must be at least {LEAST_TOKENS}, got {context_tokens}")
    join_tokens = min(join_tokens, context_tokens)
    blank = _encode(tokenizer, "\n\n")
    rounds: dict[int, list[PairContext]] = {}
    held: list[int] = []
    held_name = ""
    joined: dict[str, None] = {}
    for name, text in documents:
        ids = _encode(tokenizer, text.strip()[: count * context_tokens * _CHARACTERS_A_TOKEN])
        if len(ids) < join_tokens:
            held_name = held_name or name
            held += [*(blank if held else ()), *ids]
            joined[_source(ids)] = None
            if len(held) >= join_tokens:
                rounds.setdefault(0, []).append(PairContext(held_name, tuple(held[:context_tokens]), tuple(joined)))
                held, held_name, joined = [], "", {}
            continue
        for number, start in enumerate(range(0, len(ids), context_tokens)[:count]):
            piece = ids[start : start + context_tokens]
            if number == 0 or len(piece) >= join_tokens:
                label = name if number == 0 else f"{name}#{number}"
                rounds.setdefault(number, []).append(PairContext(label, tuple(piece), (_source(piece),)))
    if len(held) >= LEAST_TOKENS:
        rounds.setdefault(0, []).append(PairContext(held_name, tuple(held[:context_tokens]), tuple(joined)))
    contexts = [context for number in sorted(rounds) for context in rounds[number]]
    if not contexts:
        raise ValueError(f"the texts give no context of at least {LEAST_TOKENS} tokens; give longer ones")
    return contexts


def ids_digest(ids: Sequence[int], prefix: Sequence[int] = ()) -> str:
    """Names token ids, and what stands before them, by their content: 32 hexadecimal digits."""
    content = np.array([len(prefix), *prefix, *ids], dtype="<i8").tobytes()
    return hashlib.sha256(content).hexdigest()[:32]


def _source(ids: Sequence[int]) -> str:
    return ids_digest(ids)[:16]


def needle_contexts(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Sequence[str],
    count: int,
    *,
    context_tokens: int = 8192,
    join_tokens: int = 2048,
    seed: int = 0,
) -> list[PairContext]:
    """`count` passages with one to four facts of `TRAINING_FACTS` hidden in each, at random depths.

    A passage is a piece that `cut_documents` would make of the texts, or several short ones, so that contexts of
    different passages share no text, and those of the same one are known to (`PairContext.sources`).

    Args:
        haystack: texts to hide them in.
        context_tokens, join_tokens: see `cut_documents`.

    Raises:
        ValueError: no text to hide them in, or sizes out of range.
    """
    texts = [("haystack", text) for text in haystack if text.strip()]
    if not texts:
        raise ValueError("needles need a text to be hidden in")
    if context_tokens <= _NEEDLE_TOKENS:
        raise _too_short(context_tokens)
    pieces = _pieces(tokenizer, texts, count, context_tokens, join_tokens)
    return _hide(tokenizer, pieces, count, context_tokens, seed)


def _too_short(context_tokens: int) -> ValueError:
    return ValueError(
        f"needles need contexts of more than {_NEEDLE_TOKENS} tokens and a text as long; got "
        f"context_tokens={context_tokens}"
    )


def _hide(
    tokenizer: PreTrainedTokenizerBase, pieces: Sequence[PairContext], count: int, context_tokens: int, seed: int
) -> list[PairContext]:
    blank = _encode(tokenizer, "\n\n")
    passages: list[tuple[list[int], list[str]]] = []
    for piece in pieces:
        if passages and len(passages[-1][0]) + len(blank) + len(piece.ids) <= context_tokens:
            ids, sources = passages[-1]
            ids += [*blank, *piece.ids]
            sources += piece.sources
        else:
            passages.append(([*piece.ids], [*piece.sources]))
    passages = [passage for passage in passages if len(passage[0]) > _NEEDLE_TOKENS]
    if not passages:
        raise _too_short(context_tokens)
    contexts = []
    for number in range(count):
        rng = random.Random(f"training needles/{seed}/{number}")
        needles = max(1, min(rng.randint(1, _MOST_NEEDLES), (context_tokens - LEAST_TOKENS) // (2 * _NEEDLE_TOKENS)))
        (ids, sources), *_ = rng.choices(passages, [len(ids) for ids, _ in passages])
        length = min(len(ids) - _NEEDLE_TOKENS, context_tokens - needles * _NEEDLE_TOKENS)
        start = rng.randint(0, len(ids) - length)
        facts = rng.sample(TRAINING_FACTS, needles)
        hidden = hide_needles(
            tokenizer,
            ids[start:],
            context_tokens=length,
            continuation_tokens=0,
            depths=sorted(rng.random() for _ in facts),
            subjects=[(fact, rng.choice(fact.keys)) for fact in facts],
            rng=rng,
        )
        contexts.append(
            PairContext(f"{NEEDLES}:{seed}:{number}", hidden.body_ids[:context_tokens], tuple(dict.fromkeys(sources)))
        )
    return contexts


def mixture_contexts(
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str | Path],
    count: int,
    *,
    context_tokens: int = 8192,
    join_tokens: int = 2048,
    haystack: Sequence[str] | None = None,
    split: str | None = None,
    column: str | None = None,
    seed: int = 0,
) -> list[PairContext]:
    """Contexts from several sources, as many from each, in turns.

    Args:
        sources: what `read_documents` takes, "needles", and the kinds of `synthetic_contexts`.
        count: most contexts from each source.
        context_tokens, join_tokens: see `cut_documents`.
        haystack: what needles are hidden in; by default the texts of the other source that has most of it.
        split, column: of datasets named by their id.
        seed: of the needles and of what else is made.

    Raises:
        FileNotFoundError, ImportError, ValueError: as `read_documents`; a source named twice; "needles" with nothing
            to hide them in.
    """
    names = [str(source) for source in sources]
    if not names:
        raise ValueError("no texts: sources is empty")
    if len(set(names)) < len(names):
        raise ValueError(f"a source is named twice in {', '.join(names)}")
    for name in names:
        if name in _NAMED:
            _need_datasets(name)
    found: dict[str, list[PairContext]] = {name: [] for name in names}
    most, largest = 0, list[PairContext]()
    sizes = {"context_tokens": context_tokens, "join_tokens": join_tokens}
    for name in names:
        if name in SYNTHETIC:
            written = range(_DOCUMENTS_A_CONTEXT * count)
            documents = [(f"{name}:{seed}:{number}", synthetic_document(name, seed, number)) for number in written]
            found[name] = cut_documents(tokenizer, documents, count, **sizes)
        elif name != NEEDLES:
            # Short documents are joined, so more of them than contexts are read.
            documents = read_documents(name, 16 * count, split=split, column=column)
            pieces = _pieces(tokenizer, documents, count, **sizes)
            if (characters := sum(len(text) for _, text in documents)) > most:
                most, largest = characters, pieces
            found[name] = pieces[:count]
    if NEEDLES in names:
        if haystack:
            found[NEEDLES] = needle_contexts(tokenizer, haystack, count, **sizes, seed=seed)
        elif largest:
            found[NEEDLES] = _hide(tokenizer, largest, count, context_tokens, seed)
        else:
            raise ValueError("needles need a text to be hidden in: name another source too, or give a haystack")
    return [context for turn in itertools.zip_longest(*found.values()) for context in turn if context is not None]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
