"""Documents for the multi-needle test (ProxyFormer paper, Section 5.3), made as tensors: for training and evaluation.

    [background … The passkey_17 is 48213. Remember it. … background … The passkey_3 is 90125. Remember it. …]
    [ What is the passkey_3? The passkey_3 is]   <- one question a needle
    [ 90125]                                     <- its answer

The background keeps all of its tokens: needles are inserted, and the document has exactly the length asked for. It is
cut into as many equal segments as there are needles, and each segment holds one, whole, at a random offset.

How it is used::

    templates = NeedleTemplates(tokenizer)                       # ids 1 to 50; num_ids= for more
    background = load_background("train.txt.xz", tokenizer, max_tokens=20_000_000)
    train, held_out = split_background(background, 0.1)
    documents = NeedleDocuments(train, templates, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    batch = documents.sample(8, 8192, 50, 50, generator, constant_background=0.1, dense=0.2)

    batch.documents                        # (B, L) int64
    batch.input_ids, batch.labels          # (B, Q, T + A): question and answer, right-padded; labels are -100 except
                                           # on the answer (not shifted: models shift them themselves)
    model(batch.input_ids.flatten(0, 1), history_ids=batch.documents, labels=batch.labels.flatten(0, 1)).loss
    batch.as_one_text()                    # (input_ids, labels), each (B, L + T + A), for a model without histories
    batch.queries, batch.query_lengths     # (B, Q, T) right-padded, (B, Q); batch.query_mask (B, Q, T)
    batch.answer_ids, batch.answer_lengths # (B, Q, A) right-padded, (B, Q); batch.answer_mask (B, Q, A)
    batch.answers                          # "90125" as strings, Q lists for B documents
    batch.depths                           # (B, Q) in [0, 1): where the needle starts, as a share of the document

For tokenizers that encode a value apart from what stands around it (all byte-level BPE ones seen) sampling is a few
dozen tensor operations without a loop over needles and without waiting for the GPU, and all shapes depend on the
arguments alone. For any other tokenizer each needle's text is encoded as it is (`templates.exact_text` is then True).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nearfar.evaluation.text_pieces import find_text_files, gather_pieces, read_text_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "NeedleBatch",
    "NeedleDocuments",
    "NeedleTemplates",
    "encode_background",
    "find_text_files",
    "load_background",
    "split_background",
]

NEEDLE = " The passkey_{id} is {value}. Remember it."
QUERY = " What is the passkey_{id}? The passkey_{id} is"
VALUE_DIGITS = 5
_VALUES = 10**VALUE_DIGITS
DEFAULT_IDS = 50

# Needles follow other text. Some tokenizers mark the start of a text, so that one encoded alone would differ from the
# same one inside of a document: everything is encoded behind this and what this gives is taken off again.
_ANCHOR = "."
_PROBES, _VALUES_AT_ONCE = 512, 1000


@dataclass(frozen=True)
class NeedleBatch:
    """B documents of L tokens, and Q questions about each. All tensors int64 unless said, on one device.

    Attributes:
        documents: `(B, L)`.
        queries: `(B, Q, T)`, right-padded with the pad id; `query_lengths` `(B, Q)`.
        answer_ids: `(B, Q, A)`, the answer's tokens with what separates it from the question, right-padded;
            `answer_lengths` `(B, Q)`.
        input_ids: `(B, Q, T + A)`, question and answer without a gap, right-padded with the pad id.
        labels: `(B, Q, T + A)`, equal to `input_ids` on the answer and -100 elsewhere. Not shifted.
        ids, values: `(B, Q)`, the number in the passkey's name and the passkey.
        depths: `(B, Q)` float32 in [0, 1), where the needle starts as a share of the document.
        positions: `(B, Q)`, the token of the document at which the asked-for needle starts.
        needle_positions: `(B, N)`, the same of all needles, ascending.
    """

    documents: torch.Tensor
    queries: torch.Tensor
    query_lengths: torch.Tensor
    answer_ids: torch.Tensor
    answer_lengths: torch.Tensor
    input_ids: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    depths: torch.Tensor
    positions: torch.Tensor
    needle_positions: torch.Tensor

    @property
    def query_mask(self) -> torch.Tensor:
        """`(B, Q, T)` bool, True on the questions' tokens."""
        return torch.arange(self.queries.shape[-1], device=self.queries.device) < self.query_lengths[..., None]

    @property
    def answer_mask(self) -> torch.Tensor:
        """`(B, Q, A)` bool, True on the answers' tokens."""
        return torch.arange(self.answer_ids.shape[-1], device=self.queries.device) < self.answer_lengths[..., None]

    @property
    def attention_mask(self) -> torch.Tensor:
        """`(B, Q, T + A)` int64, 1 on what `input_ids` holds besides padding."""
        lengths = self.query_lengths + self.answer_lengths
        return (torch.arange(self.input_ids.shape[-1], device=lengths.device) < lengths[..., None]).long()

    @property
    def answers(self) -> list[list[str]]:
        """The values as strings of five digits, Q of each document. Waits for the GPU."""
        return [[f"{value:0{VALUE_DIGITS}d}" for value in row] for row in self.values.tolist()]

    def as_one_text(self, query: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Each document followed by one of its questions and the answer, for models that read a single text.

        Returns:
            Input ids and labels, `(B, L + T + A)`, right-padded; labels are -100 except on the answer.
        """
        ids = torch.cat((self.documents, self.input_ids[:, query]), 1)
        labels = torch.cat((torch.full_like(self.documents, -100), self.labels[:, query]), 1)
        return ids, labels


# --- templates -------------------------------------------------------------------------------------------------------


class NeedleTemplates:
    """Token ids of needles, questions and answers.

    Args:
        tokenizer: any tokenizer that can write digits.
        num_ids: passkeys are called 1 to `num_ids`; a document cannot hold more needles than that.
        needle: with `{id}` and `{value}` once each, the value behind a space.
        query: with `{id}`; the answer is a space and the value.

    Attributes:
        max_needle_tokens, max_query_tokens, max_answer_tokens: of the longest of each.
        single_digits: the tokenizer encodes each digit as one token.
        exact_text: how a value is encoded depends on what stands around it, so needles are encoded one by one when
            documents are sampled (slow), and the longest needle is an estimate that a sample may raise.
        pad_id: what pads questions and answers.

    Raises:
        ValueError: a template without its fields, `num_ids` < 1, or a tokenizer that loses digits.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_ids: int = DEFAULT_IDS,
        needle: str = NEEDLE,
        query: str = QUERY,
    ) -> None:
        if num_ids < 1:
            raise ValueError(f"num_ids must be at least 1, got {num_ids}")
        if (
            needle.count("{id}") != 1
            or needle.count(" {value}") != 1
            or needle.index("{id}") > needle.index("{value}")
        ):
            raise ValueError(f"a needle must hold {{id}} and behind it ' {{value}}', each once, got {needle!r}")
        if "{id}" not in query or "{value}" in query:
            raise ValueError(f"a query must hold {{id}} and not {{value}}, got {query!r}")
        self.tokenizer = tokenizer
        self.num_ids = num_ids
        self.needle, self.query = needle, query
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad_id = 0 if pad is None else int(pad)

        names = range(1, num_ids + 1)
        self._head_text, self._tail_text = needle.split(" {value}")
        heads = self._encode([self._head_text.format(id=name) for name in names])
        self._queries = self._encode([query.format(id=name) for name in names])
        self.max_query_tokens = max(map(len, self._queries))

        rng = random.Random(0)
        probes = [(name, rng.randrange(_VALUES)) for name in names]
        probes += [(rng.randint(1, num_ids), rng.randrange(_VALUES)) for _ in range(_PROBES)]
        probes += [(1 + digit % num_ids, digit * 11111) for digit in range(10)]
        needles = self._encode([self.needle_text(*probe) for probe in probes])
        asked = self._encode([query.format(id=name) + self.answer_text(value) for name, value in probes])
        for (name, value), ids in zip(probes, needles, strict=True):
            written = tokenizer.decode(ids)
            if f"{value:0{VALUE_DIGITS}d}" not in written or str(name) not in written:
                raise ValueError(
                    f"the tokenizer writes {self.needle_text(name, value)!r} as {written!r}: it has no tokens for "
                    "digits in a row, and passkeys need them"
                )

        self._tables: dict[torch.device, dict[str, torch.Tensor]] = {}
        self._values: list[list[int]] | None = None
        self._lead: list[int] = []
        self._digits: list[int] = []
        self.single_digits = False
        values = self._value_parts(probes, heads, needles, asked)
        self.exact_text = values is None
        if values is None:
            self._heads, self._tail = heads, []
            self.max_needle_tokens = max(map(len, needles))
            answers = [self._answer(name, value) for name, value in probes]
            self.max_answer_tokens = max(map(len, answers))
            return
        self._heads = heads
        self._tail = needles[0][len(heads[probes[0][0] - 1]) + len(values[0]) :]
        self._lead, self._digits = self._digit_tokens([value for _, value in probes], values)
        self.single_digits = bool(self._digits)
        if self.single_digits:
            self.max_answer_tokens = len(self._lead) + VALUE_DIGITS
        else:
            self._values = self._encode_values()
            self.max_answer_tokens = max(map(len, self._values))
            probed = [self._values[value] for _, value in probes]
            if probed != values:  # the short text that values are encoded behind is not what they follow here
                self.exact_text, self._values = True, None
        self.max_needle_tokens = max(map(len, heads)) + self.max_answer_tokens + len(self._tail)

    def needle_text(self, name: int, value: int) -> str:
        """The needle of passkey `name`."""
        return self.needle.format(id=name, value=f"{value:0{VALUE_DIGITS}d}")

    @staticmethod
    def answer_text(value: int) -> str:
        """What follows a question."""
        return f" {value:0{VALUE_DIGITS}d}"

    def min_length(self, needles: int) -> int:
        """The fewest tokens of a document, or a span, that holds `needles` needles."""
        return needles * self.max_needle_tokens

    # --- how the tokenizer cuts --------------------------------------------------------------------------------------

    def _encode(self, texts: Sequence[str], anchor: str = _ANCHOR) -> list[list[int]]:
        """Ids of texts as they are inside of a document."""

        def encode(batch: Sequence[str]) -> list[list[int]]:
            return [
                list(ids) for ids in self.tokenizer(list(batch), add_special_tokens=False, verbose=False).input_ids
            ]

        (before,) = encode([anchor])
        joined = encode([anchor + text for text in texts])
        alone = [index for index, ids in enumerate(joined) if ids[: len(before)] != before]
        result = [ids[len(before) :] for ids in joined]
        for index, ids in zip(alone, encode([texts[index] for index in alone]) if alone else [], strict=True):
            result[index] = ids
        return result

    def _value_parts(
        self,
        probes: list[tuple[int, int]],
        heads: list[list[int]],
        needles: list[list[int]],
        asked: list[list[int]],
    ) -> list[list[int]] | None:
        """The values' ids if every probed needle is head + value + tail and every answered question is question +
        value, with the same ids for a value in both; else None."""
        rests = []
        for (name, _), ids in zip(probes, needles, strict=True):
            head = heads[name - 1]
            if ids[: len(head)] != head:
                return None
            rests.append(ids[len(head) :])
        values = []
        for (name, _), ids in zip(probes, asked, strict=True):
            question = self._queries[name - 1]
            if ids[: len(question)] != question or len(ids) == len(question):
                return None
            values.append(ids[len(question) :])
        tail = rests[0][len(values[0]) :]
        whole = all(rest == value + tail for rest, value in zip(rests, values, strict=True))
        return values if whole else None

    @staticmethod
    def _digit_tokens(numbers: list[int], values: list[list[int]]) -> tuple[list[int], list[int]]:
        """What stands before the digits, and the ids of 0 to 9; ([], []) if digits are not single tokens."""
        lead = values[0][:-VALUE_DIGITS]
        digits: dict[str, int] = {}
        for number, ids in zip(numbers, values, strict=True):
            if len(ids) != len(lead) + VALUE_DIGITS or ids[: len(lead)] != lead:
                return [], []
            for digit, token in zip(f"{number:0{VALUE_DIGITS}d}", ids[len(lead) :], strict=True):
                if digits.setdefault(digit, token) != token:
                    return [], []
        if len(set(digits.values())) != 10:
            return [], []
        return lead, [digits[str(digit)] for digit in range(10)]

    def _encode_values(self) -> list[list[int]]:
        """Ids of all values, encoded behind the last word before them."""
        word = self._head_text.split()[-1] if self._head_text.split() else _ANCHOR
        word = _ANCHOR if "{id}" in word else word
        texts = [self.answer_text(value) for value in range(_VALUES)]
        # There are 100,000: many in one text are three times as fast, where values do not touch each other.
        if getattr(self.tokenizer, "is_fast", False):
            values: list[list[int]] = []
            for start in range(0, _VALUES, _VALUES_AT_ONCE):
                values += self._encode_row(word, texts[start : start + _VALUES_AT_ONCE])
            some = random.Random(1).sample(range(_VALUES), _PROBES)
            if self._encode([texts[value] for value in some], anchor=word) == [values[value] for value in some]:
                return values
        return self._encode(texts, anchor=word)

    def _encode_row(self, word: str, texts: list[str]) -> list[list[int]]:
        """Ids of texts of equal length that follow `word` one after the other, told apart by where tokens end."""
        encoded = self.tokenizer(
            word + "".join(texts), add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        rows: list[list[int]] = [[] for _ in texts]
        for token, (_, end) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
            if end > len(word):
                rows[(end - len(word) - 1) // len(texts[0])].append(token)
        return rows

    def _answer(self, name: int, value: int) -> list[int]:
        """An answer's ids, cut off the answered question where the tokenizer cuts the two."""
        question = self._queries[name - 1]
        (joined,) = self._encode([self.query.format(id=name) + self.answer_text(value)])
        if joined[: len(question)] == question and len(joined) > len(question):
            return joined[len(question) :]
        return self._encode([self.answer_text(value)])[0]

    # --- tensors -----------------------------------------------------------------------------------------------------

    def tables(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The lookup tables on `device`, made once."""
        if device not in self._tables:
            table: dict[str, torch.Tensor] = {}
            table["query"], table["query_length"] = _padded(self._queries, device, self.pad_id)
            if not self.exact_text:
                table["head"], table["head_length"] = _padded(self._heads, device)
                table["tail"] = torch.tensor(self._tail, dtype=torch.long, device=device)
            if self._values is not None:
                table["value"], table["value_length"] = _padded(self._values, device, self.pad_id)
            elif self.single_digits:
                table["lead"] = torch.tensor(self._lead, dtype=torch.long, device=device)
                table["digit"] = torch.tensor(self._digits, dtype=torch.long, device=device)
                table["power"] = 10 ** torch.arange(VALUE_DIGITS - 1, -1, -1, device=device)
            self._tables[device] = table
        return self._tables[device]

    def needle_ids(self, names: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Needles' ids `(…, n)`, right-padded, and their lengths `(…)`; `names` count from 1."""
        table = self.tables(names.device)
        if self.exact_text:
            encoded = self._encode(
                [
                    self.needle_text(*pair)
                    for pair in zip(names.flatten().tolist(), values.flatten().tolist(), strict=True)
                ]
            )
            self.max_needle_tokens = max(self.max_needle_tokens, *map(len, encoded))
            return _shaped(encoded, names, self.pad_id, self.max_needle_tokens)
        tail = table["tail"].expand(*names.shape, -1)
        parts = [
            (table["head"][names - 1], table["head_length"][names - 1]),
            self.answer_ids(names, values),
            (tail, torch.full_like(names, tail.shape[-1])),
        ]
        return _joined(parts, self.max_needle_tokens, self.pad_id)

    def query_ids(self, names: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Questions' ids `(…, T)`, right-padded, and their lengths `(…)`."""
        table = self.tables(names.device)
        return table["query"][names - 1], table["query_length"][names - 1]

    def answer_ids(self, names: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers' ids `(…, A)`, right-padded, and their lengths `(…)`."""
        table = self.tables(names.device)
        if self.exact_text:
            pairs = zip(names.flatten().tolist(), values.flatten().tolist(), strict=True)
            encoded = [self._answer(*pair) for pair in pairs]
            self.max_answer_tokens = max(self.max_answer_tokens, *map(len, encoded))
            return _shaped(encoded, names, self.pad_id, self.max_answer_tokens)
        if self.single_digits:
            digits = table["digit"][values[..., None] // table["power"] % 10]
            ids = torch.cat((table["lead"].expand(*values.shape, -1), digits), -1)
            return ids, torch.full_like(values, ids.shape[-1])
        return table["value"][values], table["value_length"][values]

    def __repr__(self) -> str:
        kind = "text" if self.exact_text else "single digits" if self.single_digits else "table of values"
        return (
            f"{type(self).__name__}({self.num_ids} ids, {kind}; at most {self.max_needle_tokens} tokens a needle, "
            f"{self.max_query_tokens} a question, {self.max_answer_tokens} an answer)"
        )


def _padded(
    rows: Sequence[Sequence[int]], device: torch.device, pad: int = 0, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max()) if width is None else width
    table = np.full((len(rows), width), pad, dtype=np.int64)
    table[np.arange(width) < lengths[:, None]] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return torch.from_numpy(table).to(device), torch.from_numpy(lengths).to(device)


def _shaped(
    rows: Sequence[Sequence[int]], like: torch.Tensor, pad: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, lengths = _padded(rows, like.device, pad, width)
    return ids.view(*like.shape, -1), lengths.view(like.shape)


def _joined(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], width: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded parts `(…, n)` with lengths `(…)`, one behind the other without gaps: `(…, width)` and `(…)`."""
    shape, device = parts[0][1].shape, parts[0][1].device
    joined = torch.full((*shape, width + 1), pad, dtype=torch.long, device=device)
    done = torch.zeros(shape, dtype=torch.long, device=device)
    for ids, lengths in parts:
        inside = torch.arange(ids.shape[-1], device=device)
        where = torch.where(inside < lengths[..., None], done[..., None] + inside, width)  # padding: thrown away
        joined.scatter_(-1, where, ids)
        done = done + lengths
    return joined[..., :width], done


# --- documents -------------------------------------------------------------------------------------------------------


class NeedleDocuments:
    """Random documents with needles over a stream of background tokens.

    Args:
        background: `(n,)`, token ids of any integer type.
        templates: of the tokenizer that the background was encoded with.
        device: where documents are made; the background's own by default.

    Raises:
        ValueError: a background that is not a non-empty vector of integers.
    """

    def __init__(
        self, background: torch.Tensor, templates: NeedleTemplates, device: torch.device | str | None = None
    ) -> None:
        if background.dim() != 1 or not len(background) or background.is_floating_point():
            raise ValueError(
                f"the background must be a non-empty vector of token ids, got {background.dtype} of shape "
                f"{tuple(background.shape)}"
            )
        if background.dtype not in (torch.int32, torch.int64):
            background = background.to(torch.int32)
        self.background = background.to(background.device if device is None else torch.device(device))
        self.templates = templates

    @property
    def device(self) -> torch.device:
        """Where documents are made."""
        return self.background.device

    def sample(
        self,
        batch: int,
        length: int,
        needles: int,
        queries: int | None = None,
        generator: torch.Generator | None = None,
        *,
        span: int | None = None,
        constant_background: float = 0.0,
        dense: float = 0.0,
    ) -> NeedleBatch:
        """`batch` documents of exactly `length` tokens.

        A document's background is one stretch of the stream. Where that is shorter than a document, it is read again
        and again, each time from another random token on.

        Args:
            needles: of each document, with different ids.
            queries: needles that are asked for, chosen at random; all of them in the order of the document if None.
            generator: of `device`; torch's own if None.
            span: all needles stand in a stretch of so many tokens at a random place; the segments divide that stretch.
            constant_background: share of documents, 0 to 1, whose background is one repeated token.
            dense: share of documents, 0 to 1, whose needles stand in a span of random length, log-uniform between the
                shortest possible one and `span` or the document.

        Raises:
            ValueError: a number out of range; a document or a span that cannot hold the needles (the message names
                the least length).
        """
        queries = needles if queries is None else queries
        self._check(batch, length, needles, queries, span, constant_background, dense)
        device, templates = self.device, self.templates

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=device)

        def below(bound: torch.Tensor | int, *shape: int) -> torch.Tensor:
            return torch.randint(0, 2**62, shape, generator=generator, device=device) % bound

        names = 1 + uniform(batch, templates.num_ids).argsort(1)[:, :needles]
        values = below(_VALUES, batch, needles)
        tokens, lengths = templates.needle_ids(names, values)
        least = templates.min_length(needles)
        if least > (span or length):  # only where the longest needle was an estimate
            self._check(batch, length, needles, queries, span, constant_background, dense)

        # Where needles start: segment i is tokens i·span/N to (i + 1)·span/N of the span.
        widest = length if span is None else span
        spans = torch.full((batch, 1), widest, dtype=torch.long, device=device)
        if dense > 0:
            short = (least * (widest / least) ** uniform(batch, 1)).long().clamp(least, widest)
            spans = torch.where(uniform(batch, 1) < dense, short, spans)
        first = below(length - spans + 1, batch, 1)
        segment = torch.arange(needles + 1, device=device)
        bounds = first + segment * spans // needles
        starts = bounds[:, :-1] + below(bounds[:, 1:] - bounds[:, :-1] - lengths + 1, batch, needles)

        inside = torch.arange(tokens.shape[-1], device=device)
        where = torch.where(inside < lengths[..., None], starts[..., None] + inside, length)
        placed = torch.full((batch, length + 1), -1, dtype=torch.long, device=device)
        placed = placed.scatter_(1, where.flatten(1), tokens.flatten(1))[:, :length]
        free = placed < 0
        background = self._background(free.cumsum(1).sub_(1).clamp_(min=0), below)
        if constant_background > 0:
            background = torch.where(uniform(batch, 1) < constant_background, background[:, :1], background)
        documents = torch.where(free, background, placed)

        positions = starts
        if queries < needles:
            chosen = uniform(batch, needles).argsort(1)[:, :queries]
            names, values, positions = (tensor.gather(1, chosen) for tensor in (names, values, starts))
        query_ids, query_lengths = templates.query_ids(names)
        answer_ids, answer_lengths = templates.answer_ids(names, values)
        width = query_ids.shape[-1] + answer_ids.shape[-1]
        input_ids, total = _joined([(query_ids, query_lengths), (answer_ids, answer_lengths)], width, templates.pad_id)
        column = torch.arange(width, device=device)
        answered = (column >= query_lengths[..., None]) & (column < total[..., None])
        return NeedleBatch(
            documents=documents,
            queries=query_ids,
            query_lengths=query_lengths,
            answer_ids=answer_ids,
            answer_lengths=answer_lengths,
            input_ids=input_ids,
            labels=torch.where(answered, input_ids, -100),
            ids=names,
            values=values,
            depths=positions / length,
            positions=positions,
            needle_positions=starts,
        )

    def _background(self, index: torch.Tensor, below: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Background tokens number `index` `(B, L)` of each document."""
        batch, length = index.shape
        available = len(self.background)
        if length <= available:
            return self.background[below(available - length + 1, batch, 1) + index].long()
        rounds = below(available, batch, -(-length // available))
        start = rounds.gather(1, index // available)
        return self.background[(start + index) % available].long()

    def _check(
        self, batch: int, length: int, needles: int, queries: int, span: int | None, constant: float, dense: float
    ) -> None:
        if batch < 1 or needles < 1:
            raise ValueError(f"batch and needles must be at least 1, got {batch} and {needles}")
        if not 1 <= queries <= needles:
            raise ValueError(f"queries must be between 1 and the {needles} needles, got {queries}")
        if needles > self.templates.num_ids:
            raise ValueError(
                f"{needles} needles need as many ids, the templates have {self.templates.num_ids}: "
                f"NeedleTemplates(tokenizer, num_ids={needles})"
            )
        for name, share in (("constant_background", constant), ("dense", dense)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {share}")
        least = self.templates.min_length(needles)
        if length < least:
            raise ValueError(
                f"a document of {length} tokens cannot hold {needles} needles of up to "
                f"{self.templates.max_needle_tokens} tokens, one in each of {needles} equal segments: it takes at "
                f"least {least} tokens"
            )
        if span is not None and not least <= span <= length:
            raise ValueError(
                f"span must be between {least} tokens, which {needles} needles take, and the document's {length}, "
                f"got {span}"
            )


# --- background ------------------------------------------------------------------------------------------------------


def split_background(background: torch.Tensor, held_out: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream without its end for training, and its end (that share of it) for evaluation; views, not copies.

    Raises:
        ValueError: a share outside (0, 1), or a stream too short to give both a token.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out}")
    cut = len(background) - round(len(background) * held_out)
    if not 0 < cut < len(background):
        raise ValueError(f"{len(background)} tokens of background are too few to hold out a share of {held_out}")
    return background[:cut], background[cut:]


def load_background(
    sources: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    *,
    split: str = "train",
    column: str | None = None,
) -> torch.Tensor:
    """A text as one stream of token ids, without special tokens.

    Read in pieces, so that only what `max_tokens` takes is read. Nothing is kept on disk.

    Args:
        sources: files, folders or a `datasets` id; see `nearfar.evaluation.text_pieces.read_text_pieces`.
        max_tokens: the first so many tokens; None for all.
        split, column: of a `datasets` id; the column is found by name if None.

    Returns:
        `(n,)` int32 on the CPU.

    Raises:
        FileNotFoundError: a file or folder that does not exist.
        ValueError: no text in them, text that is not UTF-8 or a damaged file, `max_tokens` < 1.
        ImportError: a `datasets` id without the `datasets` package.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    background = _encode_pieces(read_text_pieces(sources, split=split, column=column), tokenizer, max_tokens)
    if not len(background):
        named = [sources] if isinstance(sources, (str, Path)) else sources
        raise ValueError(f"there is no text in {', '.join(map(str, named))}")
    return background


def encode_background(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> torch.Tensor:
    """The same of a text at hand.

    Raises:
        ValueError: a blank text, `max_tokens` < 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    background = _encode_pieces(gather_pieces(text.splitlines(keepends=True)), tokenizer, max_tokens)
    if not len(background):
        raise ValueError("the text for the background is blank")
    return background


def _encode_pieces(pieces: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None) -> torch.Tensor:
    arrays = [np.zeros(0, dtype=np.int32)]
    count = 0
    for piece in pieces:
        ids = tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
        arrays.append(np.asarray(ids, dtype=np.int32))
        count += len(ids)
        if max_tokens is not None and count >= max_tokens:
            break
    return torch.from_numpy(np.concatenate(arrays)[:max_tokens])
