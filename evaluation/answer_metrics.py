"""How answers are judged: the metrics of RULER, LongBench and SCBench, each from 0 to 1.

`METRICS[name](prediction, question)` gives the score of one prediction. Where several answers are accepted the best
one counts. ROUGE comes from `rouge-score`, edit distances from `rapidfuzz`, Chinese words from `jieba`, BLEU from
`nltk`; each is imported when it is first needed.

Differences from the benchmarks' own scripts, which use other packages: LongBench's ROUGE-L comes from `rouge`, which
joins the longest common subsequences of all sentences, while here it is that of the two texts as a whole; its code
similarity comes from `fuzzywuzzy`, which rounds to whole percent. RepoQA's functions are compared with their comments.
"""

from __future__ import annotations

import functools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from nearfar.evaluation.task_samples import Question

REPOQA_SIMILARITY = 0.8

Metric = Callable[[str, Question], float]


def _missing(package: str, error: ImportError) -> ImportError:
    return ImportError(f"this metric needs the package {package}: pip install 'nearfar[eval]' ({error})")


# --- text ------------------------------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """Lower case, without punctuation, English articles and repeated white space (SQuAD's)."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalised_chinese(text: str) -> str:
    """Lower case, without punctuation of any script and without white space."""
    kept = (letter for letter in text.lower() if not unicodedata.category(letter).startswith(("P", "S", "Z", "C")))
    return "".join(kept)


def f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of tokens."""
    same = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * same / (len(predicted) + len(expected)) if same else 0.0


def _chinese_words(text: str) -> list[str]:
    try:
        import jieba
    except ImportError as error:
        raise _missing("jieba", error) from error
    jieba.setLogLevel("WARNING")
    return [str(word) for word in jieba.cut(text, cut_all=False)]


class _SplitAtSpaces:
    """`rouge-score`'s own tokenizer knows Latin letters only."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


@functools.cache
def _rouge(kind: str, at_spaces: bool) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise _missing("rouge-score", error) from error
    return RougeScorer([kind], tokenizer=_SplitAtSpaces() if at_spaces else None)


def rouge(prediction: str, answer: str, kind: str = "rougeL", *, at_spaces: bool = True) -> float:
    """F-measure of `rouge1`, `rouge2`, `rougeL` or `rougeLsum`.

    Args:
        at_spaces: words are what stands between spaces; otherwise `rouge-score`'s own, lower-cased.
    """
    return float(_rouge(kind, at_spaces).score(answer, prediction)[kind].fmeasure)


# --- RULER -----------------------------------------------------------------------------------------------------------


def match_all(prediction: str, question: Question) -> float:
    """Share of the answers that appear in the prediction, whatever the case (RULER's `string_match_all`)."""
    text = prediction.lower()
    return sum(answer.lower() in text for answer in question.answers) / len(question.answers)


def match_any(prediction: str, question: Question) -> float:
    """Whether one of the answers appears in the prediction, whatever the case (RULER's `string_match_part`)."""
    text = prediction.lower()
    return float(any(answer.lower() in text for answer in question.answers))


# --- LongBench -------------------------------------------------------------------------------------------------------


def _best(score: Callable[[str, str, Question], float]) -> Metric:
    """A metric of one accepted answer as one of several."""

    @functools.wraps(score)
    def metric(prediction: str, question: Question) -> float:
        return max(score(prediction, answer, question) for answer in question.answers)

    return metric


def _qa_f1(prediction: str, answer: str, question: Question) -> float:
    return f1(normalised(prediction).split(), normalised(answer).split())


def _qa_f1_chinese(prediction: str, answer: str, question: Question) -> float:
    pairs = [[normalised_chinese(word) for word in _chinese_words(text)] for text in (prediction, answer)]
    predicted, expected = ([word for word in words if word] for words in pairs)
    return f1(predicted, expected)


def _rouge_l(prediction: str, answer: str, question: Question) -> float:
    return rouge(prediction, answer)


def _rouge_l_chinese(prediction: str, answer: str, question: Question) -> float:
    return rouge(" ".join(_chinese_words(prediction)), " ".join(_chinese_words(answer)))


def _classification(prediction: str, answer: str, question: Question) -> float:
    """1 over the number of classes named, if the right one is among them; those that are part of its name are not."""
    named = [choice for choice in question.choices if choice in prediction]
    named = [choice for choice in named if choice == answer or choice not in answer]
    return 1 / len(named) if answer in named else 0.0


def _share_of_numbers(prediction: str, number: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def _count(prediction: str, answer: str, question: Question) -> float:
    return _share_of_numbers(prediction, answer)


def _retrieval(prediction: str, answer: str, question: Question) -> float:
    wanted = re.search(r"\d+", answer)
    if wanted is None:
        raise ValueError(f"the answer of a passage retrieval holds no number: {answer!r}")
    return _share_of_numbers(prediction, wanted.group())


def _code_similarity(prediction: str, answer: str, question: Question) -> float:
    """Edit similarity of the first line of code: neither empty, nor a comment, nor a code fence."""
    try:
        from rapidfuzz import fuzz
    except ImportError as error:
        raise _missing("rapidfuzz", error) from error
    lines = (line for line in prediction.split("\n") if line.strip())
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return float(fuzz.ratio(line, answer)) / 100


# --- SCBench ---------------------------------------------------------------------------------------------------------


def contains(prediction: str, question: Question) -> float:
    """Whether an answer appears in the prediction as it is (key-value retrieval)."""
    return float(any(answer in prediction for answer in question.answers))


def choice(prediction: str, question: Question) -> float:
    """Whether the letter that the prediction settles for is right; `answers` holds the letter and the option's text.

    The letter is the prediction's first one if that is A to D; else what follows a phrase such as "answer is"; else
    the first of A to D that stands by itself.
    """
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in question.answers)
    if text in question.answers:
        return 1.0
    plain = " ".join(re.sub(r"[\n\"'.,?!{}]", " ", text).split())
    for phrase in ("answer is:", "answer:", "answer is", "option is"):
        if phrase in plain:
            after = plain.split(phrase, 1)[1].strip()
            return float(any(after.startswith(answer) for answer in question.answers))
    word = next((word for word in plain.split() if word in ("A", "B", "C", "D")), None)
    return float(word in question.answers)


def first_number(prediction: str, question: Question) -> float:
    """Whether the first number in the prediction is the answer's."""
    found = re.search(r"-?\d+(?:\.\d+)?", prediction)
    return float(found is not None and float(found.group()) == float(question.answers[0]))


def first_digits(prediction: str, question: Question) -> float:
    """Whether the first run of digits in the prediction is the answer, digit by digit (passkeys)."""
    found = re.search(r"\d+", prediction)
    return float(found is not None and found.group() == question.answers[0])


def _qa_f1_characters(prediction: str, answer: str, question: Question) -> float:
    return f1(list(normalised_chinese(prediction)), list(normalised_chinese(answer)))


def _rouge_l_sum(prediction: str, answer: str, question: Question) -> float:
    return rouge(prediction, answer, "rougeLsum", at_spaces=False)


def function_retrieval(prediction: str, question: Question) -> float:
    """RepoQA: 1 if what was written resembles the wanted function by BLEU 0.8 at least, and no other choice more."""
    try:
        from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    except ImportError as error:
        raise _missing("nltk", error) from error
    fenced = re.search(r"```[^\n]*\n(.*?)(?:```|\Z)", prediction, re.DOTALL)
    written = (fenced.group(1) if fenced else prediction).split()
    if not written:
        return 0.0
    smoothing = SmoothingFunction().method4

    def likeness(function: str) -> float:
        return float(sentence_bleu([function.split()], written, smoothing_function=smoothing))

    wanted = max(likeness(answer) for answer in question.answers)
    others = [likeness(function) for function in question.choices if function not in question.answers]
    return float(wanted >= REPOQA_SIMILARITY and wanted >= max(others, default=0.0))


METRICS: dict[str, Metric] = {
    "match_all": match_all,
    "match_any": match_any,
    "qa_f1": _best(_qa_f1),
    "qa_f1_chinese": _best(_qa_f1_chinese),
    "qa_f1_characters": _best(_qa_f1_characters),
    "rouge_l": _best(_rouge_l),
    "rouge_l_chinese": _best(_rouge_l_chinese),
    "rouge_l_sum": _best(_rouge_l_sum),
    "classification": _best(_classification),
    "count": _best(_count),
    "retrieval": _best(_retrieval),
    "code_similarity": _best(_code_similarity),
    "contains": contains,
    "choice": choice,
    "first_number": first_number,
    "first_digits": first_digits,
    "function_retrieval": function_retrieval,
}


def score_answer(prediction: str, question: Question) -> float:
    """The question's metric, after the first line alone has been taken where only that counts.

    Raises:
        ImportError: a package that the metric needs is missing.
    """
    if question.one_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return METRICS[question.metric](prediction, question)
