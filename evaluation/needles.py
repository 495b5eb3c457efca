"""Needle in a haystack: facts hidden in a long context, asked for after the context has been compressed.

    [chat header] [text ... The secret code for amber is 48213. ... text]   <- prefilled; the cache evicts here
    [\n\nWhat is the secret code for amber? + end of turn] [The secret code for amber is]   <- unseen when evicting
    [ 48213]   <- the answer; a hit when greedy decoding gives exactly these tokens

The question comes after eviction, so a policy has to keep a fact without knowing that it will be asked for.

`needle_trials` hides one needle in each of many contexts (for benchmarks), `multi_needle_context` hides many of
different wordings in one (one prefill, many questions). Both work with any causal language model's tokenizer, with or
without a chat template, and `ask_needles` with any transformers cache of batch 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nearfar.evaluation.restoring import eviction_held, restored
from nearfar.modeling.chat_frame import chat_frame
from nearfar.modeling.compat import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What a needle can be about.
KEYS = _words("""
    amber apple basil bronze canyon cedar cherry cobalt copper coral cotton crimson crystal dolphin ember falcon fern
    forest garnet ginger glacier granite harbor hazel indigo island ivory jade jasper lantern lemon lilac lotus maple
    marble meadow mercury nickel ocean olive opal orchid otter panther pearl pepper pine plum prairie quartz raven
    river ruby saffron sapphire silver sparrow summit thunder topaz tulip velvet violet walnut willow zephyr
""")
_NAMES = _words("""
    Anouk Chen Dmitri Felix Greta Hugo Ingrid Keiko Leila Maria Paolo Priya Rosa Samir Tomas Yusuf
""")
_THINGS = _words("""
    archive bakery bridge cabin clinic depot elevator ferry garage gallery hotel kitchen library lighthouse museum
    opera piano printer reactor safe server stadium studio telescope theater tower tunnel vault warehouse workshop
""")
_CITIES = _words("""
    Cairo Dublin Geneva Havana Jakarta Kyoto Lima Lisbon Manila Nairobi Oslo Porto Quito Riga
""")


@dataclass(frozen=True)
class Fact:
    """A kind of needle: `{statement} {five digits}.`, asked for by `question`; both name the `{key}` once."""

    statement: str
    question: str
    keys: tuple[str, ...]


SECRET_CODE = Fact("The secret code for {key} is", "What is the secret code for {key}?", KEYS)

# What `multi_needle_context` hides. Many needles of one wording in one context measure how well a model tells them
# apart (SmolLM2-135M with its full cache answers about 4 of 12), needles of different wordings what its cache holds
# (about 8 of 12).
FACTS: tuple[Fact, ...] = (
    SECRET_CODE,
    Fact("{key}'s phone number is", "What is {key}'s phone number?", _NAMES),
    Fact("The serial number of the {key} is", "What is the serial number of the {key}?", _THINGS),
    Fact("The password of the {key} is", "What is the password of the {key}?", _THINGS),
    Fact("The flight number to {key} is", "What is the flight number to {key}?", _CITIES),
    Fact("The PIN that opens the {key} is", "What is the PIN that opens the {key}?", _THINGS),
    Fact("The invoice number for the {key} is", "What is the invoice number for the {key}?", _THINGS),
    Fact("The postal code of {key} is", "What is the postal code of {key}?", _CITIES),
    Fact("The account number of the {key} is", "What is the account number of the {key}?", _THINGS),
    Fact("{key}'s passport number is", "What is {key}'s passport number?", _NAMES),
    Fact("The combination of the {key} is", "What is the combination of the {key}?", _THINGS),
    Fact("The license plate of the {key} is", "What is the license plate of the {key}?", _THINGS),
    Fact("The price of the {key} in dollars is", "What is the price of the {key} in dollars?", _THINGS),
    Fact("The tracking code of {key}'s parcel is", "What is the tracking code of {key}'s parcel?", _NAMES),
)


@dataclass(frozen=True)
class Needle:
    """One hidden fact and the question that asks for it.

    Attributes:
        key, value: the word that the fact is about, and its five digits.
        depth: where in the body it stands, 0 (start) to 1 (end), measured in characters.
        question_ids: what follows the body: the question, the template's end of turn, the start of the answer.
        answer_ids: the tokens that greedy decoding must give to count as found.
    """

    key: str
    value: str
    depth: float
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class NeedleContext:
    """A context with one or more needles in it.

    Attributes:
        prefix_ids: the chat template's header or the beginning-of-sequence token; may be empty.
        body_ids: the text with the needles inserted.
        needles: in the order in which they stand in the body.
        continuation_ids: what follows the body in the original text (for perplexity); may be empty.
    """

    prefix_ids: tuple[int, ...]
    body_ids: tuple[int, ...]
    needles: tuple[Needle, ...]
    continuation_ids: tuple[int, ...] = ()

    @property
    def context_ids(self) -> tuple[int, ...]:
        """What is prefilled: prefix and body."""
        return self.prefix_ids + self.body_ids


@dataclass(frozen=True)
class NeedleAnswer:
    """What the model answered: `hit`, and the answer's mean log-probability a token (natural logarithm)."""

    key: str
    depth: float
    hit: bool
    log_probability: float


# --- building contexts -----------------------------------------------------------------------------------------------


def needle_trials(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    num_trials: int,
    context_tokens: int,
    seed: int = 0,
    *,
    continuation_tokens: int = 0,
    fact: Fact = SECRET_CODE,
) -> list[NeedleContext]:
    """One needle in each of `num_trials` contexts, trial i at relative depth (i + 0.5) / num_trials.

    Trial i reads a window of document i mod len(documents) that starts at a random token. Windows, keys and codes of a
    trial depend on `seed` and i only.

    Args:
        context_tokens: tokens of the window, before the needle is inserted.
        continuation_tokens: tokens after the window to return as `continuation_ids`.

    Raises:
        ValueError: no documents, a document shorter than context_tokens + continuation_tokens, or a count < 1.
    """
    if num_trials < 1:
        raise ValueError(f"num_trials must be at least 1, got {num_trials}")
    if isinstance(documents, str) or not documents:
        raise ValueError("documents must be a non-empty sequence of strings")
    tokens = [_encode(tokenizer, document) for document in documents]
    for index, ids in enumerate(tokens):
        _check_length(ids, context_tokens, continuation_tokens, f"document {index}")

    trials = []
    for trial in range(num_trials):
        rng = random.Random(f"{seed}/{trial}")
        ids = tokens[trial % len(tokens)]
        start = rng.randint(0, len(ids) - context_tokens - continuation_tokens)
        trials.append(
            hide_needles(
                tokenizer,
                ids[start:],
                context_tokens=context_tokens,
                continuation_tokens=continuation_tokens,
                depths=[(trial + 0.5) / num_trials],
                subjects=[(fact, rng.choice(fact.keys))],
                rng=rng,
            )
        )
    return trials


def multi_needle_context(
    tokenizer: PreTrainedTokenizerBase,
    document: str,
    num_needles: int = 12,
    context_tokens: int = 3072,
    seed: int = 0,
    *,
    continuation_tokens: int = 0,
    facts: Sequence[Fact] = FACTS,
) -> NeedleContext:
    """`num_needles` needles with distinct keys and codes in one context, spread evenly over its depth.

    Each of `facts` is used once before one is used again (with another key).

    Args:
        document: the haystack; its first `context_tokens` tokens are used, and the next `continuation_tokens`.
        num_needles: 0 gives the context without needles, for perplexity alone.

    Raises:
        ValueError: the document is too short, there are not enough distinct keys, or a count is out of range.
    """
    if num_needles < 0:
        raise ValueError(f"num_needles must be at least 0, got {num_needles}")
    ids = _encode(tokenizer, document)
    _check_length(ids, context_tokens, continuation_tokens, "the text")
    rng = random.Random(f"{seed}/multi")
    return hide_needles(
        tokenizer,
        ids,
        context_tokens=context_tokens,
        continuation_tokens=continuation_tokens,
        depths=[(index + 0.5) / num_needles for index in range(num_needles)],
        subjects=_distinct_subjects(facts, num_needles, rng),
        rng=rng,
    )


def _distinct_subjects(facts: Sequence[Fact], count: int, rng: random.Random) -> list[tuple[Fact, str]]:
    """`count` facts, each with a key that no other one has."""
    subjects: list[tuple[Fact, str]] = []
    used: set[str] = set()
    while len(subjects) < count:
        before = len(subjects)
        for fact in rng.sample(list(facts), min(len(facts), count - len(subjects))):
            free = [key for key in fact.keys if key not in used]
            if free:
                subjects.append((fact, rng.choice(free)))
                used.add(subjects[-1][1])
        if len(subjects) == before:
            raise ValueError(f"{count} needles need as many distinct keys, {len(subjects)} were found")
    return subjects


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    # verbose=False: a haystack longer than the model's context is cut afterwards, no warning is due.
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _check_length(ids: Sequence[int], context_tokens: int, continuation_tokens: int, what: str) -> None:
    if context_tokens < 1 or continuation_tokens < 0:
        raise ValueError(
            f"context_tokens must be at least 1 and continuation_tokens at least 0, "
            f"got {context_tokens} and {continuation_tokens}"
        )
    if len(ids) < context_tokens + continuation_tokens:
        raise ValueError(
            f"{what} is too short: {len(ids)} tokens, {context_tokens + continuation_tokens} are needed "
            f"({context_tokens} of context, {continuation_tokens} of continuation); "
            "give a longer text or ask for fewer tokens"
        )


def hide_needles(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    *,
    context_tokens: int,
    continuation_tokens: int,
    depths: Sequence[float],
    subjects: Sequence[tuple[Fact, str]],
    rng: random.Random,
) -> NeedleContext:
    """The context of the first `context_tokens` ids with one needle for each depth.

    Args:
        ids: of the text, at least `context_tokens + continuation_tokens`.
        depths: 0 to 1, ascending.
        subjects: a fact and what it is about, for each depth.
        rng: draws the codes.

    Raises:
        ValueError: white space only, or a text too short for the needles.
    """
    stop = context_tokens
    text = tokenizer.decode(ids[:stop])
    while text.endswith("\ufffd") and stop > 1:  # the cut fell inside a character
        stop -= 1
        text = tokenizer.decode(ids[:stop])
    text = text.strip()
    if not text:
        raise ValueError("the context is empty or white space only; give a text with words in it")

    values: list[str] = []
    while len(values) < len(subjects):
        value = str(rng.randrange(10000, 100000))
        if value not in values and value not in text:
            values.append(value)
    spots = _insertion_spots(text, depths)
    prefix_ids, after_body = chat_frame(tokenizer)

    body, needles, done = "", [], 0
    for (spot, lead), (fact, key), value in zip(spots, subjects, values, strict=True):
        statement = fact.statement.format(key=key)
        body += f"{text[done:spot]}{lead}{statement} {value}. "
        done = spot
        question = f"\n\n{fact.question.format(key=key)}{after_body}{statement}"
        question_ids, answer_ids = _split_answer(tokenizer, question, " " + value)
        needles.append(Needle(key, value, spot / len(text), question_ids, answer_ids))
    body += text[done:]
    return NeedleContext(
        prefix_ids=prefix_ids,
        body_ids=_encode(tokenizer, body),
        needles=tuple(needles),
        continuation_ids=tuple(ids[stop : stop + continuation_tokens]),
    )


def _insertion_spots(text: str, depths: Sequence[float]) -> list[tuple[int, str]]:
    """For each depth (ascending) the nearest free boundary: (character offset, what to write before the needle).

    Sentence starts if there are enough of them, else word starts, else any character (scripts without spaces).
    """
    candidates = (
        ([match.end() for match in re.finditer(r"[.!?][\"')\]]*\s+", text)], ""),
        ([match.end() for match in re.finditer(r"\s+", text)], ""),
        (list(range(1, len(text))), " "),
    )
    for offsets, lead in candidates:
        free = [offset for offset in offsets if 0 < offset < len(text)]
        if len(free) < len(depths):
            continue
        spots = []
        for index, depth in enumerate(depths):
            # Ascending and distinct: each needle takes a boundary behind the last one and leaves enough for the rest.
            choices = free[: len(free) - (len(depths) - index - 1)]
            spot = min(choices, key=lambda offset: abs(offset - depth * len(text)))
            free = [offset for offset in free if offset > spot]
            spots.append((spot, lead))
        return spots
    raise ValueError(f"the text is too short for {len(depths)} needles: {len(text)} characters")


def _split_answer(
    tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of the question and of the answer, cut where the tokenizer itself cuts the two joined.

    Encoding the answer alone would be wrong for tokenizers that mark the start of a text; where the cut falls inside a
    token of the joined text, the two are encoded apart.
    """
    question_ids = _encode(tokenizer, question)
    joined = _encode(tokenizer, question + answer)
    if joined[: len(question_ids)] == question_ids and len(joined) > len(question_ids):
        return question_ids, joined[len(question_ids) :]
    return question_ids, _encode(tokenizer, answer)


# --- asking ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def ask_needle(model: PreTrainedModel, cache: Cache, needle: Needle, *, hold_eviction: bool = True) -> NeedleAnswer:
    """Ask one question on a prefilled cache, in one forward pass; the cache is restored afterwards.

    Greedy decoding gives exactly the answer's tokens if and only if, with the answer fed in (teacher forcing), each of
    its tokens is the arg max where it stands: up to the first difference both read the same tokens.

    Args:
        cache: batch 1, holding the context that the needle belongs to.
        hold_eviction: see `continuation_perplexity`; with eviction held the equivalence above is exact.
    """
    device = model.get_input_embeddings().weight.device
    answer = torch.tensor(needle.answer_ids, device=device)
    inputs = torch.tensor([needle.question_ids + needle.answer_ids[:-1]], device=device)
    with restored(cache), eviction_held(cache) if hold_eviction else nullcontext():
        output = model(inputs, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=len(answer))
    logits = output.logits[0, -len(answer) :].float()
    log_probabilities = logits.log_softmax(-1).gather(1, answer.to(logits.device)[:, None])
    return NeedleAnswer(
        key=needle.key,
        depth=needle.depth,
        hit=bool((logits.argmax(-1).cpu() == answer.cpu()).all()),
        log_probability=log_probabilities.mean().item(),
    )


def ask_needles(
    model: PreTrainedModel, cache: Cache, needles: Sequence[Needle], *, hold_eviction: bool = True
) -> list[NeedleAnswer]:
    """Ask the questions one after the other on one prefilled cache; no question sees another one or its answer."""
    return [ask_needle(model, cache, needle, hold_eviction=hold_eviction) for needle in needles]


@torch.no_grad()
def greedy_answer(model: PreTrainedModel, cache: Cache, needle: Needle, *, hold_eviction: bool = True) -> list[int]:
    """The slow reference for `ask_needle`: decode as many tokens as the answer has, one forward pass each."""
    device = model.get_input_embeddings().weight.device
    name = cache_argument(model)
    generated: list[int] = []
    with restored(cache), eviction_held(cache) if hold_eviction else nullcontext():
        inputs = torch.tensor([needle.question_ids], device=device)
        for _ in needle.answer_ids:
            logits = model(inputs, **{name: cache}, use_cache=True, logits_to_keep=1).logits
            generated.append(int(logits[0, -1].argmax()))
            inputs = torch.tensor([[generated[-1]]], device=device)
    return generated
