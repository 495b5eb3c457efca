"""SCBench (Li et al., 2024): twelve tasks in which several questions share one context.

Rows come from local files in the official format (`scbench_kv.jsonl`, …: `context` or `input`, `multi_turns` with
`input` and `answer`) or from the data set on the Hub. A context is read and compressed once and each question is asked
about it by itself: the benchmark's "same context, different query" mode, with its prompts, answer lengths and metrics.
Its multi-turn mode, in which a question sees the questions and answers before it, is not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.evaluation.jsonl_data import find_jsonl, hub_jsonl, read_jsonl
from nearfar.evaluation.task_samples import Question, Sample

REPOSITORY = "microsoft/SCBench"


@dataclass(frozen=True)
class SCBenchTask:
    """How a task's questions are asked and judged.

    Attributes:
        intro: what stands before the context.
        max_new_tokens: decoded at most for an answer.
        metric: a name in `answer_metrics.METRICS`.
        question: with `{input}`, and `{A}` to `{D}` for options.
    """

    intro: str
    max_new_tokens: int
    metric: str
    question: str = "{input}"


SCBENCH: dict[str, SCBenchTask] = {
    "scbench_kv": SCBenchTask(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n", 150, "contains"
    ),
    "scbench_prefix_suffix": SCBenchTask("", 150, "contains"),
    "scbench_vt": SCBenchTask("", 30, "match_all"),
    "scbench_repoqa": SCBenchTask(
        "Based on the function description and code context, please retrieve and repeat the exact described function "
        "from the code context in a code block wrapped by ```:\n\n",
        1024,
        "function_retrieval",
    ),
    "scbench_qa_eng": SCBenchTask(
        "Read the book and answer the question. Be very concise in your answer.\n\n",
        40,
        "match_any",
        "Question: {input}\nAnswer:",
    ),
    "scbench_qa_chn": SCBenchTask("阅读以下书籍然后回答问题。\n\n", 40, "qa_f1_characters", "问题：{input}\n答案："),
    "scbench_choice_eng": SCBenchTask(
        "Read the book and answer the question.\n\n",
        40,
        "choice",
        "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\nThe the correct answer is",  # as published
    ),
    "scbench_many_shot": SCBenchTask("", 10, "match_any"),
    "scbench_summary": SCBenchTask("", 200, "rouge_l_sum"),
    "scbench_mf": SCBenchTask("{input}\n\n", 5, "first_number", "What is {target}?\n\n{input}"),
    "scbench_summary_with_needles": SCBenchTask("", 800, "rouge_l_sum"),
    "scbench_repoqa_and_kv": SCBenchTask("", 1024, "function_retrieval"),
}
# Tasks whose questions are of two kinds, told by their field `task`: the kind's metric and answer length.
_PARTS = {
    "scbench_summary": ("rouge_l_sum", 800),
    "scbench_passkey": ("first_digits", 15),
    "scbench_repoqa": ("function_retrieval", 1024),
    "scbench_kv": ("contains", 80),
}
_MIXED = ("scbench_summary_with_needles", "scbench_repoqa_and_kv")


def scbench_sample(
    task: str, row: dict[str, Any], number: int, functions: Mapping[str, tuple[str, ...]] | None = None
) -> Sample:
    """A row of a task's file as a sample.

    Args:
        functions: by repository, all functions that are asked for, for the RepoQA tasks.

    Raises:
        ValueError: the row lacks a field.
    """
    spec = SCBENCH[task]
    context = row.get("context", row.get("input"))
    turns = row.get("multi_turns")
    if not isinstance(context, str) or not isinstance(turns, list) or not turns:
        raise ValueError(f"{task}, row {number}: no context or no multi_turns; is this SCBench's format?")
    questions = []
    for turn in turns:
        if "input" not in turn or "answer" not in turn:
            raise ValueError(f"{task}, row {number}: a turn without input or answer")
        metric, tokens, part = spec.metric, spec.max_new_tokens, ""
        if task in _MIXED:
            part = str(turn.get("task") or row.get("task") or "")
            if part not in _PARTS:
                raise ValueError(f"{task}, row {number}: a turn of the kind {part!r}; known: {', '.join(_PARTS)}")
            metric, tokens = _PARTS[part]
        choices: tuple[str, ...] = ()
        if metric == "function_retrieval":
            choices = (functions or {}).get(_repository(row, turn), ())
        questions.append(
            Question(_question(spec, turn), _answers(turn["answer"]), metric, tokens, choices=choices, part=part)
        )
    intro = spec.intro.replace("{input}", str(turns[0]["input"]))
    return Sample(task, number, f"{intro}{context}\n\n", tuple(questions))


def _question(spec: SCBenchTask, turn: dict[str, Any]) -> str:
    text = str(turn["input"])
    fields = {"input": text}
    if "{target}" in spec.question:
        named = re.search(r"The (.+) is", text)
        fields["target"] = f"the {named.group(1).lower()}" if named else "the result"
    fields |= dict(zip("ABCD", map(str, turn.get("options") or ()), strict=False))
    for name, value in fields.items():
        spec_field = "{" + name + "}"
        if name != "input":
            spec = SCBenchTask(spec.intro, spec.max_new_tokens, spec.metric, spec.question.replace(spec_field, value))
    return spec.question.replace("{input}", text)


def _answers(answer: Any) -> tuple[str, ...]:
    return tuple(map(str, answer)) if isinstance(answer, (list, tuple)) else (str(answer),)


def _repository(row: dict[str, Any], turn: dict[str, Any]) -> str:
    return str(turn.get("repo", row.get("repo", "")))


def load_scbench(task: str, data_dir: str | Path | None = None, limit: int | None = None) -> list[Sample]:
    """The first samples of a task, from `data_dir/task.jsonl` or from the Hub.

    Raises:
        OSError: no such file, or the Hub cannot be reached.
        ValueError: the file is not of this format.
    """
    if data_dir is None:
        rows = hub_jsonl(REPOSITORY, f"data/{task}.jsonl")
    else:
        rows = read_jsonl(find_jsonl(data_dir, task))
    functions: dict[str, list[str]] = {}
    if "repoqa" in task:  # a function competes with all that are asked for in its repository
        for row in rows:
            for turn in row.get("multi_turns") or ():
                kind = turn.get("task", "scbench_repoqa")
                if kind == "scbench_repoqa" and "answer" in turn:
                    functions.setdefault(_repository(row, turn), []).extend(_answers(turn["answer"]))
    known = {repository: tuple(dict.fromkeys(texts)) for repository, texts in functions.items()}
    return [scbench_sample(task, row, number, known) for number, row in enumerate(rows[:limit])]
