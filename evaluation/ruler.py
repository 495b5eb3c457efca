"""RULER's 13 tasks (Hsieh et al., 2024), generated here: no download, any length, the same samples for the same seed.

Written from the paper: Section 3 and its appendices on task configurations and prompt templates. Four families:

- needles in a haystack (`niah_*`): sentences "One of the special magic numbers for KEY is: VALUE." in a text. Single
  needles in repeated noise, in essays, and with a UUID as the value; multi-key, with distracting needles, up to a
  haystack that is nothing but needles; four values of one key; four keys asked for at once.
- variable tracking (`vt`): a chain of four assignments `VAR B = VAR A` in noise, after one worked example.
- aggregation: the ten common words of a numbered list (`cwe`, after one worked example), and the three most frequent
  coded words of a text whose frequencies follow a Zeta distribution (`fwe`).
- question answering (`qa_1` SQuAD, `qa_2` HotpotQA): the paragraphs that answer it among others of the same data set.

A sample of length L is the largest whose prompt, chat template and room for the answer included, takes at most L
tokens of the model's tokenizer. Scores are shares of the answers that appear in the prediction (`match_all`), in
question answering whether any does (`match_any`).

Differences from the paper's own script, to be kept in mind when its figures are compared: shorter worked examples; in
`cwe` fewer repetitions where 30 of each common word do not fit (below some 3 K tokens); words from `wonderwords` where
that is installed and otherwise from the haystack.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nearfar.evaluation.task_samples import PromptFrame, Question, Sample, check_tasks

NIAH_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
)
QA_TASKS = ("qa_1", "qa_2")
RULER_TASKS = (*NIAH_TASKS, "vt", "cwe", "fwe", *QA_TASKS)

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NIAH_TOKENS, VT_TOKENS, CWE_TOKENS, FWE_TOKENS, QA_TOKENS = 128, 30, 120, 50, 32
_NEEDLES = 4  # values, queries and keys of the multi-needle tasks
_HOPS = 4
_COMMON_WORDS = 10
# Times that a common and an uncommon word stand in the list, the paper's first.
_FREQUENCIES = ((30, 3), (10, 1), (5, 1), (3, 1))
_ZETA_2 = math.pi**2 / 6

# Makes a context of a size and its question; the least size, and the largest one where there is one.
_Builder = tuple[Callable[[int], tuple[str, Question]], int, int | None]


@dataclass(frozen=True)
class Passages:
    """Questions with the passages that answer them, for `qa_1` and `qa_2`.

    Attributes:
        documents: all passages, without repetitions.
        questions: (question, accepted answers, indices of the passages that answer it).
    """

    documents: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...]

    @classmethod
    def collect(cls, entries: Iterable[tuple[str, Sequence[str], Sequence[str], Sequence[str]]]) -> Passages:
        """From (question, answers, passages that answer it, other passages)."""
        index: dict[str, int] = {}
        questions = []
        for question, answers, wanted, others in entries:
            for document in (*wanted, *others):
                index.setdefault(document, len(index))
            answers = tuple(dict.fromkeys(answer for answer in answers if answer.strip()))
            if answers:
                questions.append((question, answers, tuple(dict.fromkeys(index[document] for document in wanted))))
        return cls(tuple(index), tuple(questions))


def squad_passages(data: dict[str, Any]) -> Passages:
    """A SQuAD file (1.1 or 2.0) as loaded from JSON; questions without an answer are left out."""

    def entries() -> Iterable[tuple[str, Sequence[str], Sequence[str], Sequence[str]]]:
        for article in data["data"]:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    if not qa.get("is_impossible"):
                        yield qa["question"], [a["text"] for a in qa["answers"]], [paragraph["context"]], []

    return Passages.collect(entries())


def hotpot_passages(data: Iterable[dict[str, Any]]) -> Passages:
    """HotpotQA (distractor) as loaded from its JSON file, or rows of the data set on the Hub."""

    def entries() -> Iterable[tuple[str, Sequence[str], Sequence[str], Sequence[str]]]:
        for row in data:
            context, facts = row["context"], row["supporting_facts"]
            if isinstance(context, dict):  # the Hub's columns
                context = list(zip(context["title"], context["sentences"], strict=True))
                titles = set(facts["title"])
            else:
                titles = {title for title, _ in facts}
            documents = [(title, f"{title}\n{''.join(sentences)}") for title, sentences in context]
            wanted = [text for title, text in documents if title in titles]
            yield row["question"], [row["answer"]], wanted, [text for title, text in documents if title not in titles]

    return Passages.collect(entries())


def find_passages(data_dir: str | Path | None) -> dict[str, Path]:
    """The question answering tasks whose data lies in a folder: the first `squad*.json`, the first `hotpot*.json`."""
    if data_dir is None:
        return {}
    folder = Path(data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    found = {}
    for task, pattern in (("qa_1", "squad*.json"), ("qa_2", "hotpot*.json")):
        files = sorted(folder.glob(pattern))
        if files:
            found[task] = files[0]
    return found


def load_passages(task: str, path: str | Path | None = None) -> Passages:
    """The data of `qa_1` or `qa_2`, from its official JSON file, or from the Hub if no file is given.

    Raises:
        ValueError: the file is not of that format, or holds no question.
        ImportError: the `datasets` package is missing.
    """
    if path is None:
        return _passages_of_the_hub(task)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        passages = squad_passages(data) if task == "qa_1" else hotpot_passages(data)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        kind = "SQuAD" if task == "qa_1" else "HotpotQA"
        raise ValueError(f"{path} is not a {kind} file: {type(error).__name__} {error}") from None
    if not passages.questions:
        raise ValueError(f"{path} holds no question with an answer")
    return passages


def _passages_of_the_hub(task: str) -> Passages:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"the data of {task} needs the datasets package: pip install 'nearfar[eval]'") from error
    if task == "qa_2":
        return hotpot_passages(load_dataset("hotpotqa/hotpot_qa", "distractor", split="validation"))
    rows = load_dataset("rajpurkar/squad", split="validation")
    return Passages.collect((row["question"], row["answers"]["text"], [row["context"]], []) for row in rows)


# --- words -----------------------------------------------------------------------------------------------------------


def word_pools(haystack: str) -> tuple[list[str], list[str], str]:
    """Adjectives, nouns, and where they come from: `wonderwords` if installed, else words of the haystack for both."""
    try:
        from wonderwords import RandomWord
    except ImportError:
        words = sorted(set(re.findall(r"\b[a-z]{4,10}\b", haystack)))
        if len(words) < 40:
            raise ValueError(
                f"the haystack holds {len(words)} different words of 4 to 10 letters, 40 are needed: give a longer "
                "text, or install wonderwords"
            ) from None
        return words, words, "haystack"
    words = RandomWord()
    adjectives, nouns = (
        sorted({word.lower() for word in words.filter(include_categories=[kind]) if word.isalpha()})
        for kind in ("adjective", "noun")
    )
    return adjectives, nouns, "wonderwords"


# --- generator -------------------------------------------------------------------------------------------------------


class RulerTasks:
    """Generates samples for one tokenizer and one haystack.

    Args:
        frame: the tokenizer, and whether prompts are put into its chat template.
        haystack: a long text; it is repeated where it is too short.
        passages: data of `qa_1` and `qa_2`, for those that are to be generated.
        seed: of everything.

    Raises:
        ValueError: the haystack is too short to take words and sentences from.
    """

    def __init__(
        self, frame: PromptFrame, haystack: str, *, passages: dict[str, Passages] | None = None, seed: int = 0
    ) -> None:
        self.frame, self.seed = frame, seed
        self.passages = dict(passages or {})
        self.haystack = " ".join(haystack.split())
        self.adjectives, self.nouns, self.word_source = word_pools(self.haystack)
        self._sizes: dict[tuple[str, int], int] = {}

    @property
    def tasks(self) -> list[str]:
        """Those that can be generated."""
        return [task for task in RULER_TASKS if task not in QA_TASKS or task in self.passages]

    def samples(self, tasks: Sequence[str], lengths: Sequence[int], count: int) -> list[Sample]:
        """`count` samples of each task and length, the same ones whatever else is asked for.

        Raises:
            ValueError: an unknown task, one without data, or a length too short for a task.
        """
        chosen = check_tasks(tasks, RULER_TASKS, "RULER") if tasks else self.tasks
        return [self.sample(task, length, n) for task in chosen for length in lengths for n in range(count)]

    def sample(self, task: str, length: int, number: int) -> Sample:
        """One sample, as long as fits into `length` tokens, the answer included.

        Raises:
            ValueError: see `samples`.
        """
        check_tasks([task], RULER_TASKS, "RULER")
        if task in QA_TASKS and task not in self.passages:
            raise ValueError(f"{task} needs its data: a squad*.json or hotpot*.json in --data-dir")
        name = f"{self.seed}/{task}/{length}/{number}"
        if task in NIAH_TASKS:
            build, least, most = self._needles(task, name)
        elif task in QA_TASKS:
            build, least, most = self._questions(task, name)
        else:
            make = {"vt": self._variables, "cwe": self._common_words, "fwe": self._frequent_words}[task]
            build, least, most = make(name, length)

        def sample(size: int) -> Sample:
            context, question = build(size)
            return Sample(task, number, context, (question,), length)

        size = self._largest(sample, least, most, length, self._sizes.get((task, length)))
        if size is None:
            raise ValueError(
                f"{task} does not fit into {length} tokens: the shortest takes {self.frame.tokens(sample(least))}"
            )
        self._sizes.setdefault((task, length), size)
        return sample(size)

    def _largest(
        self, sample: Callable[[int], Sample], least: int, most: int | None, limit: int, guess: int | None
    ) -> int | None:
        """The largest size whose sample takes at most `limit` tokens; tokens grow with the size, nearly evenly."""

        def fits(size: int) -> bool:
            return self.frame.tokens(sample(size)) <= limit

        if not fits(least):
            return None
        low, high = least, None if most is None else most + 1  # low fits, high does not
        step = max(least, 8)
        if guess is not None and low < guess and (high is None or guess < high):
            step = max(1, guess // 50)
            if fits(guess):
                low = guess
            else:
                high = guess
                while high - step > low:  # downwards from the guess
                    if fits(high - step):
                        low = high - step
                        break
                    high, step = high - step, 2 * step
        while high is None or low + step < high:  # upwards in growing steps
            if not fits(low + step):
                high = low + step
                break
            low, step = low + step, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # -- needles ----------------------------------------------------------------------------------------------------

    def _needles(self, task: str, name: str) -> _Builder:
        draw = random.Random(f"{name}/needles")
        uuids_as_keys, kind = (
            task == "niah_multikey_3",
            "uuids" if task.endswith(("single_3", "multikey_3")) else "numbers",
        )
        keys, values = (
            _Distinct(draw, self._uuid if uuids_as_keys else self._word_pair),
            _Distinct(draw, self._uuid if kind == "uuids" else self._number),
        )
        queries = _NEEDLES if task == "niah_multiquery" else 1
        asked = [keys.next() for _ in range(queries)]
        of_each = _NEEDLES if task == "niah_multivalue" else 1
        facts = [(key, values.next()) for key in asked for _ in range(of_each)]
        answers = tuple(value for _, value in facts)
        if task == "niah_multikey_1":
            facts += [(keys.next(), values.next()) for _ in range(_NEEDLES - 1)]
        draw.shuffle(facts)

        def needle(key: str, value: str) -> str:
            return f"One of the special magic {kind} for {key} is: {value}."

        places = [draw.random() for _ in facts]
        offset = draw.randrange(len(self._sentences))
        only_needles = task in ("niah_multikey_2", "niah_multikey_3")
        others: list[str] = []

        def build(size: int) -> tuple[str, Question]:
            if task == "niah_single_1":
                units, joint = [NOISE] * size, "\n"
            elif only_needles:
                while len(others) < size:
                    others.append(needle(keys.next(), values.next()))
                units, joint = others[:size], " "
            else:
                units, joint = self._essay(offset, size), " "
            text = joint.join(_insert(units, [needle(*fact) for fact in facts], places))
            if len(asked) == 1 and of_each == 1:  # one answer: the template in the singular
                thing, article = kind[:-1], "A"
                intro = f"{article} special magic {thing} is hidden within the following text."
                ask = f"What is the special magic {thing} for {asked[0]} mentioned in the provided text?"
                start = f"The special magic {thing} for {asked[0]} mentioned in the provided text is"
            else:
                wanted = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
                intro, thing = f"Some special magic {kind} are hidden within the following text.", kind
                ask = f"What are all the special magic {kind} for {wanted} mentioned in the provided text?"
                start = f"The special magic {kind} for {wanted} mentioned in the provided text are"
            context = f"{intro} Make sure to memorize it. I will quiz you about the {thing} afterwards.\n{text}\n"
            return context, Question(ask, answers, "match_all", NIAH_TOKENS, f" {start}")

        return build, 1, None

    def _word_pair(self, draw: random.Random) -> str:
        return f"{draw.choice(self.adjectives)}-{draw.choice(self.nouns)}"

    def _number(self, draw: random.Random) -> str:
        number = str(draw.randrange(10**6, 10**7))
        return number if number not in self.haystack else self._number(draw)

    @staticmethod
    def _uuid(draw: random.Random) -> str:
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))

    @cached_property
    def _sentences(self) -> list[str]:
        return [part for part in re.split(r"(?<=[.!?])\s+", self.haystack) if part]

    def _essay(self, offset: int, size: int) -> list[str]:
        """`size` sentences from number `offset` on, around the end."""
        count = len(self._sentences)
        return [self._sentences[(offset + index) % count] for index in range(size)]

    # -- variables --------------------------------------------------------------------------------------------------

    def _variables(self, name: str, length: int) -> _Builder:
        draw = random.Random(f"{name}/variables")
        variables = _Distinct(draw, lambda rng: "".join(rng.choices(string.ascii_uppercase, k=5)))
        example, chain = ([variables.next() for _ in range(_HOPS + 1)] for _ in range(2))
        numbers = _Distinct(draw, lambda rng: str(rng.randrange(10_000, 100_000)))
        values = [numbers.next() for _ in range(2)]
        places = [sorted(draw.random() for _ in range(_HOPS + 1)) for _ in range(2)]
        intro = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"

        def text(which: list[str], value: str, at: list[float], size: int) -> str:
            lines = [f"VAR {which[0]} = {value}"]
            lines += [f"VAR {after} = VAR {before}" for before, after in itertools.pairwise(which)]
            return "\n".join(_insert([NOISE] * size, lines, at))

        def ask(value: str) -> tuple[str, str]:
            count = _HOPS + 1
            return (
                f"Question: Find all variables that are assigned the value {value} in the text above.",
                f" Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
                f"assigned the value {value}, they are:",
            )

        shown = "".join(ask(values[0]))
        worked = f"{intro}{text(example, values[0], places[0], 3)}\n{shown} {' '.join(example)}\n\n"

        def build(size: int) -> tuple[str, Question]:
            question, start = ask(values[1])
            context = f"{worked}{intro}{text(chain, values[1], places[1], size)}\n"
            return context, Question(question, tuple(chain), "match_all", VT_TOKENS, start)

        return build, 1, None

    # -- words ------------------------------------------------------------------------------------------------------

    def _common_words(self, name: str, length: int) -> _Builder:
        pool = sorted({*self.adjectives, *self.nouns})
        draw = random.Random(f"{name}/words")
        draw.shuffle(pool)
        # No word may be part of another: an answer would be found in a wrong one.
        common: list[str] = []
        for word in pool:
            if len(common) < 2 * _COMMON_WORDS and not any(word in other or other in word for other in common):
                common.append(word)
        shown, asked = common[:_COMMON_WORDS], common[_COMMON_WORDS:]
        rest = [word for word in pool if word not in common]
        if len(asked) < _COMMON_WORDS or len(rest) < 2 * _COMMON_WORDS:
            raise ValueError(f"cwe needs more words than the {len(pool)} there are: give a longer haystack")
        intro = (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            "that appear most often.\n"
        )
        question = f"Question: What are the {_COMMON_WORDS} most common words in the above list?"
        start = f" Answer: The top {_COMMON_WORDS} words that appear most often in the list are:"

        def numbered(words: Sequence[str]) -> str:
            return " ".join(f"{index}. {word}" for index, word in enumerate(words, 1))

        def words(frequent: list[str], others: list[str], times: tuple[int, int], key: str) -> str:
            both = [
                word for group, n in ((frequent, times[0]), (others, times[1])) for word in group for _ in range(n)
            ]
            random.Random(f"{name}/{key}").shuffle(both)
            return numbered(both)

        example = words(shown, rest[-_COMMON_WORDS:], (3, 1), "example")
        worked = f"{intro}{example}\n{question}{start} {numbered(shown)}\n\n"

        def builder(times: tuple[int, int]) -> Callable[[int], tuple[str, Question]]:
            def build(size: int) -> tuple[str, Question]:
                context = f"{worked}{intro}{words(asked, rest[:size], times, 'list')}\n"
                return context, Question(question, tuple(asked), "match_all", CWE_TOKENS, start)

            return build

        for times in _FREQUENCIES:
            build = builder(times)
            context, asking = build(_COMMON_WORDS)
            if self.frame.tokens(Sample("cwe", 0, context, (asking,), length)) <= length:
                break
        return build, _COMMON_WORDS, len(rest) - _COMMON_WORDS

    def _frequent_words(self, name: str, length: int) -> _Builder:
        draw = random.Random(f"{name}/coded")
        coded = _Distinct(draw, lambda rng: "".join(rng.choices(string.ascii_lowercase, k=6)))
        vocabulary = ["..."]  # the most frequent one is noise
        intro = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words. "
        )
        question = (
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?"
        )
        start = " Answer: According to the coded text above, the three most frequently appeared words are:"

        def build(size: int) -> tuple[str, Question]:
            text: list[str] = []
            rank = 1
            while (times := int(size / (rank * rank * _ZETA_2))) > 0:
                while len(vocabulary) < rank:
                    vocabulary.append(coded.next())
                text += [vocabulary[rank - 1]] * times
                rank += 1
            random.Random(f"{name}/text").shuffle(text)
            context = f"{intro}{' '.join(text)}\n"
            return context, Question(question, tuple(vocabulary[1:4]), "match_all", FWE_TOKENS, start)

        # With fewer words the fourth and the fifth rank are equally frequent.
        return build, 90, None

    # -- question answering -----------------------------------------------------------------------------------------

    def _questions(self, task: str, name: str) -> _Builder:
        passages = self.passages[task]
        draw = random.Random(f"{name}/question")
        question, answers, wanted = passages.questions[draw.randrange(len(passages.questions))]
        others = [index for index in range(len(passages.documents)) if index not in wanted]
        draw.shuffle(others)
        instruction = (
            "Answer the question based on the given documents. Only give me the answer and do not output any other "
            "words."
        )

        def build(size: int) -> tuple[str, Question]:
            chosen = [*wanted, *others[: size - len(wanted)]]
            random.Random(f"{name}/order").shuffle(chosen)
            documents = [f"Document {n}:\n{passages.documents[index]}" for n, index in enumerate(chosen, 1)]
            context = (
                f"{instruction}\n\nThe following are given documents.\n\n"
                + "\n\n".join(documents)
                + f"\n\n{instruction}\n\n"
            )
            return context, Question(f"Question: {question}", answers, "match_any", QA_TOKENS, " Answer:")

        return build, len(wanted), len(wanted) + len(others)


class _Distinct:
    """Draws without repetition."""

    def __init__(self, draw: random.Random, make: Callable[[random.Random], str]) -> None:
        self._draw, self._make = random.Random(draw.getrandbits(64)), make
        self._drawn: set[str] = set()

    def next(self) -> str:
        for _ in range(10_000):
            value = self._make(self._draw)
            if value not in self._drawn:
                self._drawn.add(value)
                return value
        raise ValueError(f"no new word is left after {len(self._drawn)}: give a longer haystack")


def _insert(units: Sequence[str], pieces: Sequence[str], places: Sequence[float]) -> list[str]:
    """`pieces` between the units, each at its place from 0 to 1; those of ascending places keep their order."""
    boundaries = [int(place * (len(units) + 1)) for place in places]
    order = sorted(range(len(pieces)), key=lambda index: (boundaries[index], index))
    marks = [boundaries[index] for index in order]
    result: list[str] = []
    for start in range(len(units) + 1):
        result += [
            pieces[order[i]] for i in range(bisect.bisect_left(marks, start), bisect.bisect_right(marks, start))
        ]
        result += units[start : start + 1]
    return result
