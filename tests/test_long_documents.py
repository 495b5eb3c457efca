"""LongBench and SCBench from small files of their official formats."""

import json
import zipfile
from pathlib import Path

import pytest
from tiny_texts import tiny_tokenizer

from nearfar.evaluation import jsonl_data
from nearfar.evaluation.answer_metrics import METRICS, score_answer
from nearfar.evaluation.longbench import LONGBENCH, load_longbench
from nearfar.evaluation.scbench import SCBENCH, load_scbench
from nearfar.evaluation.task_samples import PromptFrame, Question, Sample

ROW = {
    "input": "Who wrote it?",
    "context": "Passage 1:\nAnn wrote it.",
    "answers": ["Ann", "Ann B."],
    "length": 5,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "0",
}


def write_jsonl(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    return path


# --- LongBench -------------------------------------------------------------------------------------------------------


def test_longbench_has_21_tasks_of_known_metrics() -> None:
    assert len(LONGBENCH) == 21
    for name, task in LONGBENCH.items():
        assert task.metric in METRICS and task.prompt.count("{context}") == 1, name
    # Those that the benchmark does not put into a chat template.
    plain = {name for name, task in LONGBENCH.items() if not task.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


@pytest.mark.parametrize("task", list(LONGBENCH))
def test_longbench_rows_become_samples(task: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / f"{task}.jsonl", {**ROW, "all_classes": ["Ann", "Bob"]}, ROW, ROW)
    first, second = load_longbench(task, tmp_path, limit=2)
    assert (first.task, first.number, second.number, first.key) == (task, 0, 1, f"{task}/0")
    (question,) = first.questions
    whole = first.context + question.text
    assert whole == LONGBENCH[task].prompt.replace("{context}", str(ROW["context"])).replace(
        "{input}", str(ROW["input"])
    )
    assert first.context.endswith(str(ROW["context"]))  # the question is not part of what is compressed
    assert question.answers == ("Ann", "Ann B.") and question.choices == ("Ann", "Bob")
    assert second.questions[0].choices == ()


def test_longbench_prompts_are_those_of_lm_eval() -> None:
    """Which come from the authors' own file; the two differ in white space, and in one word's missing blank."""
    pytest.importorskip("lm_eval")
    import lm_eval
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: None)
    compared = 0
    for path in (Path(lm_eval.__file__).parent / "tasks" / "longbench").glob("[!_]*.yaml"):
        data = yaml.load(path.read_text(encoding="utf-8"), Loader)  # a safe loader
        name = data["dataset_name"]
        if name in LONGBENCH:
            theirs = data["doc_to_text"].replace("{{context}}", "{context}").replace("{{question}}", "{input}")
            theirs = theirs.replace("asconcisely", "as concisely")
            assert theirs.split() == LONGBENCH[name].prompt.split(), name
            assert data["generation_kwargs"]["max_gen_toks"] == LONGBENCH[name].max_new_tokens, name
            compared += 1
    assert compared == 21


def test_longbench_comes_from_an_archive_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_jsonl(tmp_path / "hotpotqa.jsonl", ROW)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(file, "data/hotpotqa.jsonl")
    asked: list[tuple[str, str]] = []

    def download(repository: str, filename: str, repo_type: str) -> str:
        asked.append((repository, filename))
        assert repo_type == "dataset"
        return str(tmp_path / "data.zip")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_longbench("hotpotqa") == load_longbench("hotpotqa", tmp_path)
    assert asked == [("THUDM/LongBench", "data.zip")]


def test_without_the_hub_local_files_are_proposed() -> None:
    with pytest.raises(OSError, match=r"THUDM/LongBench from the Hub \(or give local files with --data-dir\)"):
        load_longbench("hotpotqa")  # the tests run offline


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: not a JSON object"),
        ("\n\n", "holds no row"),
        ('{"context": "x"}', "no answers; is this LongBench's format"),
    ],
)
def test_damaged_files_are_told(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trec.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_longbench("trec", tmp_path)
    with pytest.raises(FileNotFoundError, match="no qasper"):
        load_longbench("qasper", tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_longbench("qasper", tmp_path / "nowhere")


def test_long_contexts_lose_their_middle() -> None:
    tokenizer = tiny_tokenizer()
    frame = PromptFrame(tokenizer)
    sample = Sample("t", 0, "a" * 50 + "b" * 50, (Question("why?", ("x",), "match_any", 7),))
    whole = frame.context_ids(sample)
    assert frame.shortened(sample, frame.tokens(sample)) == whole
    cut = frame.shortened(sample, frame.tokens(sample) - 40)
    assert len(cut) == len(whole) - 40
    text = tokenizer.decode(cut)
    assert text.count("a") + text.count("b") == 60 + tokenizer.decode(whole[:-100]).count("a")
    assert cut[:30] == whole[:30] and cut[-30:] == whole[-30:]
    with pytest.raises(ValueError, match="leave no room for a context"):
        frame.shortened(sample, 10)


# --- SCBench ---------------------------------------------------------------------------------------------------------


def turns(**more: object) -> list[dict[str, object]]:
    return [{"input": f"question {n}", "answer": f"answer {n}", **more} for n in range(3)]


def test_scbench_has_12_tasks_of_known_metrics() -> None:
    assert len(SCBENCH) == 12 and all(task.metric in METRICS for task in SCBENCH.values())


@pytest.mark.parametrize("task", [name for name in SCBENCH if not name.endswith(("needles", "and_kv"))])
def test_scbench_turns_become_questions_about_one_context(task: str, tmp_path: Path) -> None:
    row = {"id": 0, "context": "A long text.", "multi_turns": turns(options=["w", "x", "y", "z"])}
    write_jsonl(tmp_path / f"{task}.jsonl", row, row)
    (sample,) = load_scbench(task, tmp_path, limit=1)
    assert "A long text." in sample.context and len(sample.questions) == 3
    for n, question in enumerate(sample.questions):
        assert f"question {n}" in question.text and question.answers == (f"answer {n}",)
        assert "{" not in question.text
        if task not in ("scbench_choice_eng", "scbench_mf", "scbench_repoqa"):
            if question.metric.startswith("rouge"):
                pytest.importorskip("rouge_score")
            assert score_answer(f"answer {n}", question) == 1.0


def test_scbench_options_and_targets(tmp_path: Path) -> None:
    choice = {"context": "c", "multi_turns": [{"input": "q?", "answer": ["C", "y"], "options": ["w", "x", "y", "z"]}]}
    write_jsonl(tmp_path / "scbench_choice_eng.jsonl", choice)
    (question,) = load_scbench("scbench_choice_eng", tmp_path)[0].questions
    assert question.text.startswith("Question: q?\nA. w\nB. x\nC. y\nD. z") and score_answer("C", question) == 1.0
    largest = {"input": "The largest number of the list is", "answer": 12}
    write_jsonl(tmp_path / "scbench_mf.jsonl", {"context": "[1, 12]", "multi_turns": [largest]})
    (question,) = load_scbench("scbench_mf", tmp_path)[0].questions
    assert question.text == "What is the largest number of the list?\n\nThe largest number of the list is"
    assert score_answer(" 12.", question) == 1.0


def test_scbench_functions_compete_inside_a_repository(tmp_path: Path) -> None:
    pytest.importorskip("nltk")
    functions = [f"def f{n}(a):\n    value = a * {n}\n    return value + {n}" for n in range(3)]
    rows = [
        {"context": "code", "repo": "one", "multi_turns": [{"input": "d0", "answer": functions[0]}]},
        {"context": "code", "repo": "one", "multi_turns": [{"input": "d1", "answer": functions[1]}]},
        {"context": "code", "repo": "two", "multi_turns": [{"input": "d2", "answer": functions[2]}]},
    ]
    write_jsonl(tmp_path / "scbench_repoqa.jsonl", *rows)
    samples = load_scbench("scbench_repoqa", tmp_path)
    assert samples[0].questions[0].choices == tuple(functions[:2])
    assert samples[2].questions[0].choices == (functions[2],)
    assert score_answer(f"```\n{functions[0]}\n```", samples[0].questions[0]) == 1.0
    assert score_answer(f"```\n{functions[1]}\n```", samples[0].questions[0]) == 0.0
    # The limit cuts samples, not the functions that they compete with.
    assert load_scbench("scbench_repoqa", tmp_path, 1)[0].questions[0].choices == tuple(functions[:2])


def test_scbench_mixed_turns_have_their_own_metrics(tmp_path: Path) -> None:
    both = [
        {"input": "Summarize.", "answer": "text", "task": "scbench_summary"},
        {"input": "The passkey?", "answer": "00712", "task": "scbench_passkey"},
    ]
    write_jsonl(tmp_path / "scbench_summary_with_needles.jsonl", {"context": "c", "multi_turns": both})
    (sample,) = load_scbench("scbench_summary_with_needles", tmp_path)
    assert [(q.metric, q.max_new_tokens, q.part) for q in sample.questions] == [
        ("rouge_l_sum", 800, "scbench_summary"),
        ("first_digits", 15, "scbench_passkey"),
    ]
    write_jsonl(tmp_path / "scbench_repoqa_and_kv.jsonl", {"context": "c", "multi_turns": turns()})
    with pytest.raises(ValueError, match="a turn of the kind ''"):
        load_scbench("scbench_repoqa_and_kv", tmp_path)
    write_jsonl(tmp_path / "scbench_kv.jsonl", {"context": "c", "multi_turns": []})
    with pytest.raises(ValueError, match="no multi_turns; is this SCBench's format"):
        load_scbench("scbench_kv", tmp_path)


def test_files_may_lie_in_a_folder_named_data(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data" / "trec.jsonl", ROW, ROW)
    assert jsonl_data.find_jsonl(tmp_path, "trec") == path
    assert len(jsonl_data.read_jsonl(path)) == 2 and len(jsonl_data.read_jsonl(path, 1)) == 1
