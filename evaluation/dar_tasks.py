"""The six tasks on which the DAR paper compares models (Section 4.1), with its shots and metrics, through lm-eval.

MMLU, HellaSwag, CommonsenseQA and GSM8K with five shots, MBPP with three, LongBench's Multi-News with none. As in the
paper, samples whose prompt is not longer than the window are left out: a DAR reads those as an ordinary decoder
would. All models of a comparison are to be asked about the same samples: give an ordinary one the DAR's `window`.

The prompts are lm-eval's. Each request's answer is kept in a file as it comes, so that an interrupted run goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.evaluation.benchmark_runs import BenchmarkRun, check_data, measure_answers, run_items
from nearfar.evaluation.longbench import load_longbench
from nearfar.evaluation.task_samples import PromptFrame, text_digest

if TYPE_CHECKING:
    from nearfar.evaluation.lm_eval_model import NearfarLM


@dataclass(frozen=True)
class DARTask:
    """A task of lm-eval, or one of its groups.

    Attributes:
        shots: worked examples in the prompt.
        metric: which of lm-eval's is the paper's.
        filter: which of lm-eval's filters the metric is taken after.
        runs_code: the answers are programs, which are run.
    """

    shots: int
    metric: str
    filter: str = "none"
    runs_code: bool = False


DAR_TASKS: dict[str, DARTask] = {
    "mmlu": DARTask(5, "acc"),
    "hellaswag": DARTask(5, "acc_norm"),
    "commonsense_qa": DARTask(5, "acc"),
    "gsm8k": DARTask(5, "exact_match", "flexible-extract"),
    "mbpp": DARTask(3, "pass_at_1", runs_code=True),
    "multi_news": DARTask(0, "rouge_l"),
}


def run_dar_tasks(
    run: BenchmarkRun,
    lm: NearfarLM,
    tasks: Sequence[str],
    *,
    window: int,
    limit: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    manager: Any = None,
    allow_code: bool = False,
    path: str | Path | None = None,
    progress: bool = True,
) -> BenchmarkRun:
    """Fill a run with the samples of these tasks.

    Args:
        run: from `open_run`.
        tasks: names in `DAR_TASKS`.
        window: prompts of at most so many tokens are left out.
        limit: samples of each task of lm-eval (each of MMLU's 57), of those that are long enough.
        seed: chooses the worked examples where lm-eval draws them.
        data_dir: where `multi_news.jsonl` lies; by default it comes from the Hub.
        manager: lm-eval's `TaskManager`, if not one of its own tasks; making one takes a while.
        allow_code: let MBPP run the programs that the model writes.
        path: where the run is kept; answers of single requests are kept beside it.

    Raises:
        ValueError: an unknown task; MBPP without `allow_code`; the run holds samples of other data.
        ImportError: lm-eval or a package of one of its metrics is missing.
    """
    for name in tasks:
        if name not in DAR_TASKS:
            raise ValueError(f"unknown task {name!r}; known tasks: {', '.join(DAR_TASKS)}")
        if DAR_TASKS[name].runs_code and not allow_code:
            raise ValueError(f"{name} runs the programs that the model writes: allow it, or leave {name} out")
    for name in tasks:
        if name == "multi_news":
            _multi_news(run, lm, window, limit, data_dir, path, progress)
            continue
        if manager is None:
            from lm_eval.tasks import TaskManager

            manager = TaskManager()
        _lm_eval_task(run, lm, name, window, limit, seed, manager, path)
    return run


def _multi_news(
    run: BenchmarkRun,
    lm: NearfarLM,
    window: int,
    limit: int | None,
    data_dir: str | Path | None,
    path: str | Path | None,
    progress: bool,
) -> None:
    frame = PromptFrame(lm.tokenizer, chat=False)
    samples = [s for s in load_longbench("multi_news", data_dir) if _prompt_tokens(frame, s) > window][:limit]

    def measure(sample: Any) -> Any:
        return lambda: measure_answers(lm.reader, frame, sample, question_seen=True, max_tokens=lm.max_length)

    data = {sample.key: sample.digest for sample in samples}
    run_items(run, [(sample.key, measure(sample)) for sample in samples], path, data=data, progress=progress)


def _prompt_tokens(frame: PromptFrame, sample: Any) -> int:
    return len(frame.context_ids(sample)) + len(frame.question_ids(sample, sample.questions[0]))


def _lm_eval_task(
    run: BenchmarkRun,
    lm: NearfarLM,
    name: str,
    window: int,
    limit: int | None,
    seed: int,
    manager: Any,
    path: str | Path | None,
) -> None:
    from lm_eval import simple_evaluate

    spec = DAR_TASKS[name]
    if spec.runs_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    leaves = list(manager.load(name)["tasks"].items())
    chosen, tokens, data = [], {}, {}
    for leaf, task in leaves:
        if task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=spec.shots)
        task.set_fewshot_seed(seed=seed)
        kept = _keep_long(task, lm, window, limit)
        digests = {f"{name}/{leaf}/{number}": digest for number, digest in _digests(task).items()}
        check_data(run, digests, path)
        data.update(digests)
        if not digests.keys() <= run.samples.keys():
            chosen.append(task)
            tokens[leaf] = kept
    if not chosen:
        return
    found = simple_evaluate(
        model=lm,
        tasks=chosen,
        use_cache=None if path is None else str(Path(path).with_suffix(".requests")),
        task_manager=manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        bootstrap_iters=0,
        log_samples=True,
        confirm_run_unsafe_code=spec.runs_code,
    )
    for leaf, entries in found["samples"].items():
        # A task without filters has the one named "none".
        filters = {entry["filter"] for entry in entries}
        chosen_filter = spec.filter if spec.filter in filters else "none"
        for entry in (entry for entry in entries if entry["filter"] == chosen_filter):
            number = entry["doc_id"]
            run.samples[f"{name}/{leaf}/{number}"] = {
                "task": name,
                "length": None,
                "score": float(entry[spec.metric]),
                "context_tokens": tokens[leaf][number],
                "data": data[f"{name}/{leaf}/{number}"],
            }
    if path is not None:
        run.write(path)


def _digests(task: Any) -> dict[int, str]:
    """By document: a digest of it and of what is asked about it, the worked examples included."""
    asked: dict[int, list[Any]] = {}
    for request in task.instances:
        asked.setdefault(request.doc_id, [request.doc]).append(request.args)
    return {number: text_digest(json.dumps(parts, sort_keys=True, default=str)) for number, parts in asked.items()}


def _keep_long(task: Any, lm: NearfarLM, window: int, limit: int | None) -> dict[int, int]:
    """Build a task's requests, leave those of short prompts out, and return each document's prompt tokens.

    lm-eval draws worked examples one document after the other, so the requests are built for all documents, as they
    would be without this, and only then chosen from. It builds them again when it evaluates, which is prevented.
    """
    task.build_all_requests(limit=None, rank=lm.rank, world_size=lm.world_size)
    longest: dict[int, int] = {}
    for request in task.instances:
        tokens = len(lm.tok_encode(request.args[0]))
        longest[request.doc_id] = max(tokens, longest.get(request.doc_id, 0))
    kept = {number: tokens for number, tokens in sorted(longest.items()) if tokens > window}
    kept = dict(list(kept.items())[:limit])
    task._instances = [request for request in task.instances if request.doc_id in kept]
    every = task.doc_iterator

    def doc_iterator(**arguments: Any) -> Iterator[tuple[int, Any]]:
        return ((number, document) for number, document in every(**arguments) if number in kept)

    task.doc_iterator = doc_iterator
    task.build_all_requests = lambda **arguments: None
    return kept
