"""RULER's generators: an independent solver, which knows regular expressions only, answers every sample."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from tiny_texts import english, tiny_tokenizer

from nearfar.evaluation import ruler
from nearfar.evaluation.answer_metrics import score_answer
from nearfar.evaluation.ruler import RULER_TASKS, RulerTasks
from nearfar.evaluation.task_samples import PromptFrame, Sample

# Lengths in bytes, which are this tokenizer's tokens.
LENGTHS = (3000, 5000)
TEXT = english(3000)


def squad(path: Path, paragraphs: int = 30) -> Path:
    rng = random.Random(0)
    entries = []
    for n in range(paragraphs):
        text = f"{english(20, seed=n)} The mayor of town {n} is Person{n}. {english(20, seed=1000 + n)}"
        answers = [{"text": f"Person{n}", "answer_start": text.index(f"Person{n}")}] * 2
        qas = [
            {"id": str(n), "question": f"Who is the mayor of town {n}?", "answers": answers, "is_impossible": False}
        ]
        if rng.random() < 0.5:
            qas.append({"id": f"{n}x", "question": "Unanswerable?", "answers": [], "is_impossible": True})
        entries.append({"context": text, "qas": qas})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": entries}]}))
    return path


def hotpot(path: Path, questions: int = 12) -> Path:
    rows = []
    for n in range(questions):
        context = [
            [f"House {n}", [f"House {n} was built by Builder{n}. ", english(10, seed=n)]],
            [f"Builder{n}", [f"Builder{n} was born in City{n}. ", english(10, seed=50 + n)]],
            [f"Other {n}", [english(15, seed=100 + n)]],
        ]
        facts = [[f"House {n}", 0], [f"Builder{n}", 0]]
        question = f"Where was the builder of House {n} born?"
        rows.append({"question": question, "answer": f"City{n}", "context": context, "supporting_facts": facts})
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> RulerTasks:
    folder = tmp_path_factory.mktemp("qa")
    squad(folder / "squad-dev.json")
    hotpot(folder / "hotpot_dev_distractor.json")
    found = ruler.find_passages(folder)
    passages = {task: ruler.load_passages(task, path) for task, path in found.items()}
    return RulerTasks(PromptFrame(tiny_tokenizer()), TEXT, passages=passages)


@pytest.fixture(scope="module")
def samples(tasks: RulerTasks) -> list[Sample]:
    return tasks.samples([], LENGTHS, 2)


def solve(sample: Sample) -> str:
    """Read the prompt, as its text is, and answer."""
    question = sample.questions[0].text
    if sample.task.startswith("niah"):
        keys = re.search(r"special magic \w+ for (.+) mentioned in the provided text", question)
        assert keys is not None
        asked = re.split(r", and |, ", keys.group(1))
        facts = re.findall(r"One of the special magic (?:numbers|uuids) for (\S+) is: ([0-9a-f-]+)\.", sample.context)
        return " ".join(value for key, value in facts if key in asked)
    if sample.task == "vt":
        document = sample.context.rpartition("Memorize and track")[2]  # after the worked example
        value = re.search(r"assigned the value (\d+)", question)
        assert value is not None
        known = {value.group(1)}
        for line in document.splitlines():
            assignment = re.fullmatch(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", line)
            if assignment and assignment.group(2) in known:
                known.add(assignment.group(1))
        return " ".join(sorted(known))
    if sample.task == "cwe":
        words = re.findall(r"\d+\. ([a-zA-Z]+)", sample.context.rpartition("Below is a numbered list")[2])
        return " ".join(word for word, _ in Counter(words).most_common(10))
    if sample.task == "fwe":
        words = sample.context.partition("coded words. ")[2].split()
        return " ".join([word for word, _ in Counter(words).most_common(4) if word != "..."])
    if sample.task == "qa_1":
        town = re.search(r"town (\d+)", question)
        assert town is not None
        found = re.search(rf"The mayor of town {town.group(1)} is (\w+)\.", sample.context)
        return "" if found is None else found.group(1)
    house = re.search(r"House (\d+)", question)
    assert house is not None
    builder = re.search(rf"House {house.group(1)} was built by (\w+)\.", sample.context)
    assert builder is not None
    city = re.search(rf"\b{builder.group(1)} was born in (\w+)\.", sample.context)
    return "" if city is None else city.group(1)


def test_all_thirteen_are_generated(samples: list[Sample]) -> None:
    assert len(RULER_TASKS) == 13
    assert Counter(sample.task for sample in samples) == dict.fromkeys(RULER_TASKS, 4)


def test_an_independent_solver_answers_everything(samples: list[Sample]) -> None:
    for sample in samples:
        assert score_answer(solve(sample), sample.questions[0]) == 1.0, (sample.key, solve(sample), sample.questions)


def test_a_solver_that_does_not_read_answers_nothing(samples: list[Sample]) -> None:
    """The question, and what the answer begins with, do not give the answer away."""
    for sample in samples:
        question = sample.questions[0]
        assert score_answer(question.text + question.answer_start, question) == 0.0, sample.key


def test_samples_are_as_long_as_asked_for(tasks: RulerTasks, samples: list[Sample]) -> None:
    frame = tasks.frame
    # One more sentence, paragraph or needle would not have fitted; one with all of the data may be shorter.
    largest_unit = max(len(part) for part in re.split(r"(?<=[.!?])\s+", tasks.haystack)) + 200
    for sample in samples:
        assert sample.length is not None
        tokens = frame.tokens(sample)
        assert tokens <= sample.length, sample.key
        everything = sample.task == "qa_2" and sample.context.count("Document ") == 36
        assert tokens > sample.length - largest_unit - 200 or everything, (sample.key, tokens)
    chatless = PromptFrame(tiny_tokenizer(chat=False))
    assert chatless.tokens(samples[0]) < frame.tokens(samples[0])


def test_the_same_seed_gives_the_same_samples_in_any_order(tasks: RulerTasks, samples: list[Sample]) -> None:
    again = RulerTasks(tasks.frame, TEXT, passages=tasks.passages)
    for sample in reversed(samples):
        assert sample.length is not None
        assert again.sample(sample.task, sample.length, sample.number) == sample
    other = RulerTasks(tasks.frame, TEXT, passages=tasks.passages, seed=1)
    assert all(other.sample(task, 3000, 0) != tasks.sample(task, 3000, 0) for task in RULER_TASKS)


def test_needles_are_what_the_paper_says(samples: list[Sample]) -> None:
    needles = {
        task: [
            re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", sample.context)
            for sample in samples
            if sample.task == task
        ]
        for task in ruler.NIAH_TASKS
    }
    counts = {task: {len(found) for found in of_samples} for task, of_samples in needles.items()}
    assert counts["niah_single_1"] == counts["niah_single_2"] == counts["niah_single_3"] == {1}
    assert counts["niah_multikey_1"] == counts["niah_multivalue"] == counts["niah_multiquery"] == {4}
    assert min(counts["niah_multikey_2"]) > 10 and min(counts["niah_multikey_3"]) > 10
    for task, of_samples in needles.items():
        for found in of_samples:
            kinds, keys, values = zip(*found, strict=True)
            uuids = task in ("niah_single_3", "niah_multikey_3")
            assert set(kinds) == {"uuids" if uuids else "numbers"}
            assert len(set(values)) == len(values)
            assert len(set(keys)) == (1 if task == "niah_multivalue" else len(keys))
            assert all(re.fullmatch(r"\d{7}" if not uuids else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value)
                       for value in values)  # fmt: skip
    questions = {sample.task: sample.questions[0] for sample in samples}
    assert {task: len(question.answers) for task, question in questions.items()} == {
        **dict.fromkeys(RULER_TASKS, 1),
        "niah_multivalue": 4,
        "niah_multiquery": 4,
        "vt": 5,
        "cwe": 10,
        "fwe": 3,
    }
    haystacks = {sample.task: sample.context for sample in samples}
    assert ruler.NOISE in haystacks["niah_single_1"] and ruler.NOISE not in haystacks["niah_single_2"]


def test_needles_stand_at_all_depths(tasks: RulerTasks) -> None:
    depths = []
    for number in range(24):
        context = tasks.sample("niah_single_2", 3000, number).context
        depths.append(context.index("One of the special magic") / len(context))
    assert min(depths) < 0.25 and max(depths) > 0.75
    assert 0.3 < sum(depths) / len(depths) < 0.7


def test_common_words_are_common_and_frequent_ones_are_frequent(samples: list[Sample]) -> None:
    for sample in (sample for sample in samples if sample.task in ("cwe", "fwe")):
        text = sample.context.rpartition("numbered list" if sample.task == "cwe" else "coded words. ")[2]
        counts = Counter(word for word in text.split() if not re.fullmatch(r"\d+\.|\.\.\.", word))
        answers = sample.questions[0].answers
        rest = [count for word, count in counts.items() if word not in answers]
        assert min(counts[answer] for answer in answers) > max(rest)
    fwe = next(sample for sample in samples if sample.task == "fwe")
    assert fwe.context.split().count("...") > max(fwe.context.split().count(word) for word in fwe.questions[0].answers)


def test_question_answering_reads_the_official_formats(tasks: RulerTasks, tmp_path: Path) -> None:
    assert len(tasks.passages["qa_1"].questions) == 30  # those without an answer are left out
    assert tasks.passages["qa_1"].questions[3][1] == ("Person3",)
    assert len(tasks.passages["qa_2"].documents) == 36 and len(tasks.passages["qa_2"].questions[0][2]) == 2
    rows = json.loads(hotpot(tmp_path / "h.json", 3).read_text())
    columns = [
        {
            **row,
            "context": {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]},
            "supporting_facts": {"title": [t for t, _ in row["supporting_facts"]], "sent_id": [0, 0]},
        }
        for row in rows
    ]
    assert ruler.hotpot_passages(columns) == ruler.hotpot_passages(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense", 3000, 0), "unknown task 'nonsense' of RULER"),
        (("vt", 300, 0), "vt does not fit into 300 tokens: the shortest takes"),
    ],
)
def test_what_cannot_be_made_is_told(tasks: RulerTasks, arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tasks.sample(*arguments)


def test_wrong_data_is_told(tasks: RulerTasks, tmp_path: Path) -> None:
    bare = RulerTasks(tasks.frame, TEXT)
    assert bare.tasks == [task for task in RULER_TASKS if not task.startswith("qa")]
    with pytest.raises(ValueError, match="qa_1 needs its data"):
        bare.sample("qa_1", 3000, 0)
    wrong = tmp_path / "squad.json"
    wrong.write_text("[1, 2]")
    with pytest.raises(ValueError, match="not a SQuAD file"):
        ruler.load_passages("qa_1", wrong)
    wrong.write_text('{"data": []}')
    with pytest.raises(ValueError, match="no question with an answer"):
        ruler.load_passages("qa_1", wrong)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ruler.find_passages(tmp_path / "nowhere")


def test_words_of_the_haystack_do_without_a_word_list(tasks: RulerTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wonderwords", None)
    own = RulerTasks(tasks.frame, TEXT)
    assert own.word_source == "haystack" and set(own.nouns) <= set(re.findall(r"\w+", TEXT.lower()))
    for task in ("niah_single_2", "cwe"):
        sample = own.sample(task, 3000, 0)
        assert score_answer(solve(sample), sample.questions[0]) == 1.0
    with pytest.raises(ValueError, match="install wonderwords"):
        RulerTasks(tasks.frame, "Too short.")
