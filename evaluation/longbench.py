"""LongBench (Bai et al., 2024): its 21 tasks, with the paper's prompts, answer lengths and metrics.

Rows come from local files in the official format (`hotpotqa.jsonl`, …: `context`, `input`, `answers`, `all_classes`)
or from `data.zip` of the data set on the Hub. As in the paper's own evaluation the few-shot and code tasks are not put
into a chat template, only the first line counts in four of them, and a context that is too long loses its middle.

What is compressed is everything before the question: the instruction and the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.evaluation.jsonl_data import find_jsonl, hub_jsonl, read_jsonl
from nearfar.evaluation.task_samples import Question, Sample

REPOSITORY = "THUDM/LongBench"


@dataclass(frozen=True)
class LongBenchTask:
    """How a task is asked and judged.

    Attributes:
        prompt: with `{context}` and, in most tasks, `{input}`.
        max_new_tokens: decoded at most.
        metric: a name in `answer_metrics.METRICS`.
        chat: whether prompts go into a chat template.
        one_line: only the first line of the answer counts.
    """

    prompt: str
    max_new_tokens: int
    metric: str
    chat: bool = True
    one_line: bool = False


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\nAnswer the question based on the given passages. "
    "Only give me the "
    "answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_QASPER = (
    "nswer the question{} as concisely as you can, using a single phrase or sentence if possible. If the "
    "question cannot "
    'be answered based on the information in the article, write "unanswerable". If the question is a yes/no question, '
    'answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\n'
)
_STORY = "as concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"

LONGBENCH: dict[str, LongBenchTask] = {
    "narrativeqa": LongBenchTask(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        + _STORY
        + "Story: {context}\n\nNow, answer the question based on the story "
        + _STORY
        + "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": LongBenchTask(
        "You are given a scientific article and a question. A"
        + _QASPER.format("")
        + "Article: {context}\n\n A"
        + _QASPER.format(" based on the above article")
        + "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": LongBenchTask(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "multifieldqa_zh": LongBenchTask(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n"
        "问题：{input}\n回答：",
        64,
        "qa_f1_chinese",
    ),
    "hotpotqa": LongBenchTask(_PASSAGES, 32, "qa_f1"),
    "2wikimqa": LongBenchTask(_PASSAGES, 32, "qa_f1"),
    "musique": LongBenchTask(_PASSAGES, 32, "qa_f1"),
    "dureader": LongBenchTask(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "rouge_l_chinese",
    ),
    "gov_report": LongBenchTask(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\n"
        "Now, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": LongBenchTask(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in one or "
        "more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting "
        "transcript in one "
        "or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": LongBenchTask(
        "You are given several news passages. Write a one-page summary of all news. "
        "\n\nNews:\n{context}\n\nNow, write a "
        "one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "vcsum": LongBenchTask(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        "rouge_l_chinese",
    ),
    "trec": LongBenchTask(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification",
        chat=False,
        one_line=True,
    ),
    "triviaqa": LongBenchTask(
        "Answer the question based on the given passage. Only give me the answer and do not output any "
        "other words. The "
        "following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1",
        chat=False,
        one_line=True,
    ),
    "samsum": LongBenchTask(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge_l",
        chat=False,
        one_line=True,
    ),
    "lsht": LongBenchTask(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        64,
        "classification",
        chat=False,
        one_line=True,
    ),
    "passage_count": LongBenchTask(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. "
        "In other words, "
        "how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of unique "
        "paragraphs after removing duplicates. The output format should only contain the number, such as "
        "1, 2, 3, and so "
        "on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": LongBenchTask(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph "
        "the abstract is "
        "from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of "
        "the paragraph that "
        'the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
    ),
    "passage_retrieval_zh": LongBenchTask(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        "retrieval",
    ),
    "lcc": LongBenchTask(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code_similarity", chat=False
    ),
    "repobench-p": LongBenchTask(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code_similarity",
        chat=False,
    ),
}


def longbench_sample(task: str, row: dict[str, Any], number: int) -> Sample:
    """A row of a task's file as a sample.

    Raises:
        ValueError: the row lacks a field.
    """
    spec = LONGBENCH[task]
    missing = [name for name in ("context", "answers") if name not in row]
    if missing:
        raise ValueError(f"{task}, row {number}: no {' and no '.join(missing)}; is this LongBench's format?")
    before, after = spec.prompt.split("{context}")
    question = Question(
        text=after.replace("{input}", str(row.get("input", ""))),
        answers=tuple(map(str, row["answers"])),
        metric=spec.metric,
        max_new_tokens=spec.max_new_tokens,
        choices=tuple(map(str, row.get("all_classes") or ())),
        one_line=spec.one_line,
    )
    return Sample(task, number, before + str(row["context"]), (question,), chat=spec.chat)


def load_longbench(task: str, data_dir: str | Path | None = None, limit: int | None = None) -> list[Sample]:
    """The first samples of a task, from `data_dir/task.jsonl` or from the Hub.

    Raises:
        OSError: no such file, or the Hub cannot be reached.
        ValueError: the file is not of this format.
    """
    if data_dir is None:
        rows = hub_jsonl(REPOSITORY, "data.zip", f"data/{task}.jsonl", limit)
    else:
        rows = read_jsonl(find_jsonl(data_dir, task), limit)
    return [longbench_sample(task, row, number) for number, row in enumerate(rows)]
