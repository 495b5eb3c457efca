"""What a long-context benchmark asks: a context, one or more questions about it, and how answers are judged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nearfar.modeling.chat_frame import chat_frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        text: what follows the context.
        answers: accepted ones, or the parts of one; the metric says which.
        metric: a name in `answer_metrics.METRICS`.
        max_new_tokens: decoded at most.
        answer_start: what the answer is made to begin with; it is not part of what is judged.
        choices: all classes of a classification, all functions of a repository.
        one_line: only the first line of the answer counts.
        part: a name for the kind of question, where a task mixes several.
    """

    text: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_start: str = ""
    choices: tuple[str, ...] = ()
    one_line: bool = False
    part: str = ""


@dataclass(frozen=True)
class Sample:
    """A context and its questions, each asked by itself.

    Attributes:
        task: the task's name.
        number: which sample of the task.
        context: what is read and compressed.
        questions: at least one.
        length: tokens that the whole was made for, None where the text decides.
        chat: whether a chat template is used, if the tokenizer has one.
    """

    task: str
    number: int
    context: str
    questions: tuple[Question, ...]
    length: int | None = None
    chat: bool = True

    @property
    def key(self) -> str:
        """Names the sample in a file of results."""
        return "/".join([self.task, *([] if self.length is None else [str(self.length)]), str(self.number)])

    @property
    def digest(self) -> str:
        """Of the context, the questions and their answers: tells the sample from another one of its key."""
        return text_digest(json.dumps(asdict(self)))


def text_digest(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class PromptFrame:
    """How contexts and questions of one tokenizer become token ids.

    Args:
        chat: use the tokenizer's chat template, if it has one; otherwise prompts are plain text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool = True) -> None:
        self.tokenizer = tokenizer
        self.has_chat = chat and bool(getattr(tokenizer, "chat_template", None))
        self._chat = chat_frame(tokenizer) if self.has_chat else None
        probe = list(tokenizer("a").input_ids)  # with the special tokens that this tokenizer puts first
        bos = tokenizer.bos_token_id
        self._plain = ((bos,) if bos is not None and probe[:1] == [bos] else (), "")

    def _around(self, chat: bool) -> tuple[tuple[int, ...], str]:
        return self._chat if chat and self._chat is not None else self._plain

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens of the tokenizer's own."""
        # verbose=False: what is too long for the model is told elsewhere.
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def context_ids(self, sample: Sample) -> list[int]:
        """What is read and compressed: the chat header or beginning-of-sequence token, and the context."""
        return [*self._around(sample.chat)[0], *self.encode(sample.context)]

    def question_ids(self, sample: Sample, question: Question) -> list[int]:
        """The question, the end of the user's turn, and the start of the answer."""
        return self.encode(question.text + self._around(sample.chat)[1] + question.answer_start)

    def tokens(self, sample: Sample) -> int:
        """Tokens of the longest prompt of the sample, with the answer that is to be decoded."""
        questions = [len(self.question_ids(sample, q)) + q.max_new_tokens for q in sample.questions]
        return len(self.context_ids(sample)) + max(questions)

    def shortened(self, sample: Sample, max_tokens: int) -> list[int]:
        """`context_ids` with so much cut out of the middle that `tokens` is at most `max_tokens`.

        Both ends are kept, as LongBench does.

        Raises:
            ValueError: the question alone is longer.
        """
        ids = self.context_ids(sample)
        allowed = len(ids) - (self.tokens(sample) - max_tokens)
        if allowed >= len(ids):
            return ids
        if allowed < 2:
            raise ValueError(f"{sample.key}: the question and its answer leave no room for a context in {max_tokens}")
        head = allowed // 2
        return ids[:head] + ids[len(ids) - (allowed - head) :]


def check_tasks(asked: Sequence[str], known: Sequence[str], benchmark: str) -> list[str]:
    """`asked` without repetitions, in their order; all if empty.

    Raises:
        ValueError: an unknown task.
    """
    for name in asked:
        if name not in known:
            raise ValueError(f"unknown task {name!r} of {benchmark}; its tasks: {', '.join(known)}")
    return list(dict.fromkeys(asked)) or list(known)
