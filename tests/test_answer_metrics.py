"""Metrics of long-context benchmarks against values worked out by hand."""

import pytest

from nearfar.evaluation import answer_metrics
from nearfar.evaluation.answer_metrics import METRICS, score_answer
from nearfar.evaluation.task_samples import Question


def score(metric: str, prediction: str, *answers: str, choices: tuple[str, ...] = (), one_line: bool = False) -> float:
    return score_answer(prediction, Question("?", answers, metric, 10, choices=choices, one_line=one_line))


def test_matches_of_ruler() -> None:
    assert score("match_all", "it is ABC and 12", "abc", "12", "x", "y") == 0.5
    assert score("match_any", "It is ABC.", "x", "abc") == 1.0 and score("match_any", "no", "x") == 0.0
    assert score("contains", "key: aB", "aB") == 1.0 and score("contains", "key: ab", "aB") == 0.0


def test_f1_of_questions_and_answers() -> None:
    # Without the article: {cat, sat} and {cat, sat, down}: precision 1, recall 2/3.
    assert score("qa_f1", "The cat sat.", "a cat sat down") == pytest.approx(0.8)
    assert score("qa_f1", "cat", "dog", "the CAT!") == 1.0
    assert score("qa_f1", "the the", "dog") == 0.0 and score("qa_f1", "", "dog") == 0.0
    # cat cat dog / cat dog dog: two in common of three each.
    assert score("qa_f1", "cat cat dog", "cat dog dog") == pytest.approx(2 / 3)
    # Four characters of five and of four; punctuation does not count.
    assert score("qa_f1_characters", "北京，市 城区。", "北京城区") == pytest.approx(2 * 4 / (5 + 4))


def test_classification() -> None:
    classes = ("Food", "Human", "Food other", "Number")
    assert score("classification", "Type: Food other", "Food other", choices=classes) == 1.0
    assert score("classification", "Food or Number", "Food", choices=classes) == 0.5
    assert score("classification", "Number", "Food", choices=classes) == 0.0
    # Only the first line with something in it counts.
    assert score("classification", "\nHuman\nType: Food", "Human", choices=classes, one_line=True) == 1.0


def test_counts_and_passages() -> None:
    assert score("count", "There are 7, or maybe 8 or 7", "7") == pytest.approx(2 / 3)
    assert score("count", "many", "7") == 0.0
    assert score("retrieval", "Paragraph 12", "Paragraph 12") == 1.0
    assert score("retrieval", "Paragraph 1 or 12", "Paragraph 12") == 0.5
    assert score("retrieval", "段落3", "段落3") == 1.0
    with pytest.raises(ValueError, match="no number"):
        score("retrieval", "1", "Paragraph")


def test_choices_of_a_book() -> None:
    right = ("B", "The dog did it")
    assert score("choice", "B. The dog", *right) == 1.0
    assert score("choice", "A", *right) == 0.0
    assert score("choice", "The dog did it", *right) == 1.0
    assert score("choice", "I think the answer is: B", *right) == 1.0
    assert score("choice", "I think the answer is C, not B", *right) == 0.0
    assert score("choice", "It must be B or C", *right) == 1.0
    assert score("choice", "", *right) == 0.0 and score("choice", "none", *right) == 0.0


def test_numbers() -> None:
    assert score("first_number", "The result is 12.0, not 13", "12") == 1.0
    assert score("first_number", "-3", "-3") == 1.0 and score("first_number", "no", "3") == 0.0
    assert score("first_digits", "the key is 00123!", "00123") == 1.0
    assert score("first_digits", "123", "00123") == 0.0


def test_rouge() -> None:
    pytest.importorskip("rouge_score")
    # Longest common subsequence "the cat sat" of 3 and 4 words.
    assert score("rouge_l", "the cat sat", "the cat has sat") == pytest.approx(2 * 3 / 7)
    assert score("rouge_l", "", "word") == 0.0
    # Lines are sentences: both lines of the answer are found, in the other order.
    assert score("rouge_l_sum", "c d\na b", "a b\nc d") == 1.0
    assert score("rouge_l", "c d\na b", "a b\nc d") == 0.5


def test_code_similarity() -> None:
    fuzz = pytest.importorskip("rapidfuzz.fuzz")
    assert score("code_similarity", "```python\n# a comment\nreturn x\nreturn y", "return x") == 1.0
    # "ab" to "axb": one insertion in five characters.
    assert score("code_similarity", "ab", "axb") == pytest.approx(0.8) == pytest.approx(fuzz.ratio("ab", "axb") / 100)
    assert score("code_similarity", "# nothing else", "return") == 0.0


def test_chinese_words() -> None:
    pytest.importorskip("jieba")
    assert score("qa_f1_chinese", "北京大学。", "北京大学") == 1.0
    assert score("qa_f1_chinese", "我", "北京大学") == 0.0
    pytest.importorskip("rouge_score")
    assert score("rouge_l_chinese", "我在北京大学", "我在北京大学") == 1.0


def test_functions_of_a_repository() -> None:
    pytest.importorskip("nltk")
    wanted = "def add(a, b):\n    total = a + b\n    print(total)\n    return total"
    other = "def sub(a, b):\n    total = a - b\n    print(total)\n    return total"
    answer = f"Here it is:\n```python\n{wanted}\n```\nDone."
    assert score("function_retrieval", answer, wanted, choices=(wanted, other)) == 1.0
    assert score("function_retrieval", answer, other, choices=(wanted, other)) == 0.0
    assert score("function_retrieval", "def add(a, b):", wanted, choices=(wanted,)) == 0.0
    assert score("function_retrieval", "", wanted) == 0.0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    answer_metrics._rouge.cache_clear()
    for module in ("rouge_score.rouge_scorer", "rapidfuzz", "jieba", "nltk.translate.bleu_score"):
        monkeypatch.setitem(sys.modules, module, None)
    for metric, package in (
        ("rouge_l", "rouge-score"),
        ("code_similarity", "rapidfuzz"),
        ("qa_f1_chinese", "jieba"),
        ("function_retrieval", "nltk"),
    ):
        with pytest.raises(ImportError, match=rf"needs the package {package}: pip install 'nearfar\[eval\]'"):
            score(metric, "x", "y")


def test_all_metrics_are_between_0_and_1_and_1_for_the_answer_itself() -> None:
    for package in ("rouge_score", "rapidfuzz", "jieba", "nltk"):
        pytest.importorskip(package)
    function = "def f(a):\n    b = a + 1\n    return b"
    for name in METRICS:
        answer = function if name == "function_retrieval" else "12"
        assert score(name, answer, answer, choices=(answer,)) == 1.0, name
        assert score(name, "nothing here", answer, choices=(answer,)) == 0.0, name
