"""Runs of benchmarks: one model, one cache, many samples, one JSON file that an interrupted run goes on from.

A file holds the settings, the machine, every sample's answers and figures, and a summary by task and length. A sample
depends on its seed, task, length and number only, so that a command with more of them adds to the file. Results of
other settings or of other data are never mixed with those in a file.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nearfar.evaluation.answer_metrics import score_answer
from nearfar.evaluation.comparison import aligned_table, decode_speed
from nearfar.evaluation.context_reading import CacheChoice, ContextReader, ReadContext
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.evaluation.multi_needle import _fingerprint
from nearfar.evaluation.perplexity import continuation_perplexity
from nearfar.evaluation.task_samples import PromptFrame, Sample
from nearfar.modeling.atomic_file import write_beside

FORMAT = "nearfar benchmark run 1"
_SAVE_SECONDS = 10.0
# Figures of a sample that its group's summary gives the mean of.
_MEANS = ("context_tokens", "kept_pairs", "cache_bytes", "prefill_seconds", "answer_seconds", "seconds_per_token")

Item = tuple[str, Callable[[], dict[str, Any]]]


@dataclass
class BenchmarkRun:
    """What was measured of one model with one cache.

    Attributes:
        benchmark: its name.
        settings: what all samples have in common.
        samples: by key (`task/length/number`), JSON-ready: `task`, `length`, `score` (0 to 1, in `perplexity` nats a
            token, in `latency` None) and further figures; `data`, a digest of what was asked; `shared`, whether
            another process measured into the same folder meanwhile, where that was noted.
        record: further entries of the file (time, command, machine).
    """

    benchmark: str
    settings: dict[str, Any]
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The cache and its size, such as `snapkv 0.3`."""
        settings = self.settings
        sizes = [settings.get("budget"), settings.get("retention_ratio")]
        size = next((f" {value:g}" for value in sizes if value is not None), "")
        return f"{settings.get('cache', '?')}{size}"

    def scores(self) -> list[dict[str, Any]]:
        """One entry for each task and length: `score`, `count` of samples, and means of their figures.

        A score is a mean in percent; of `perplexity`, exp of the mean of nats over tokens; of `latency` None. Where
        samples were measured beside other processes, `shared` is their number.
        """
        groups: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
        for sample in self.samples.values():
            groups.setdefault((sample["task"], sample.get("length")), []).append(sample)
        return [
            {"task": task, "length": length, "count": len(group), **_summary(self.benchmark, group)}
            for (task, length), group in groups.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "format": FORMAT,
            "benchmark": self.benchmark,
            **self.record,
            "settings": self.settings,
            "scores": self.scores(),
            "samples": self.samples,
        }

    def write(self, path: str | Path) -> Path:
        """As JSON; written beside, then renamed."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)
        return write_beside(path, lambda file: file.write_text(text + "\n", encoding="utf-8"))

    @classmethod
    def from_dict(cls, data: Any) -> BenchmarkRun:
        """The inverse of `to_dict`.

        Raises:
            ValueError: this is no run.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("not a run of a benchmark")
        kept = ("format", "benchmark", "settings", "scores", "samples")
        try:
            record = {key: value for key, value in data.items() if key not in kept}
            return cls(str(data["benchmark"]), dict(data["settings"]), dict(data["samples"]), record)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a damaged run: {type(error).__name__} {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> BenchmarkRun:
        """What `write` wrote.

        Raises:
            ValueError: the file is something else.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (UnicodeDecodeError, ValueError) as error:  # JSON errors are ValueErrors
            raise ValueError(f"{path}: {error}") from None

    def table(self) -> str:
        """One line for each task and length, in plain text; times of a shared machine, where that is known, with *."""
        rows = []
        scores = self.scores()
        for entry in scores:
            speed = entry.get("seconds_per_token")
            mark = "*" if "shared" in entry else ""
            rows.append(
                [
                    entry["task"],
                    "–" if entry["length"] is None else f"{entry['length']:,}",
                    str(entry["count"]),
                    "–" if entry["score"] is None else f"{entry['score']:.2f}",
                    _shown(entry.get("kept_pairs"), ",.0f"),
                    _shown(_mega(entry.get("cache_bytes")), ",.2f"),
                    _shown(entry.get("prefill_seconds"), ".2f", mark),
                    _shown(entry.get("answer_seconds") if speed is None else 1000 * speed, ".2f", mark),
                ]
            )
        last = "ms/token" if self.benchmark == "latency" else "answer s"
        header = ["task", "tokens", "samples", "score", "pairs", "MB", "prefill s", last]
        table = aligned_table(header, rows)
        if shared := sum(entry.get("shared", 0) for entry in scores):
            table += f"\n\n* {shared_words(shared, len(self.samples))}"
        return table


def shared_words(shared: int, samples: int) -> str:
    """Of samples whose times are those of a shared machine."""
    return (
        f"{shared:,} of {samples:,} samples were measured while other processes measured into the same folder: their "
        "times may be longer than those of a process by itself"
    )


def _summary(benchmark: str, group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"score": None}
    if benchmark == "perplexity":
        tokens = sum(sample["tokens"] for sample in group)
        nats = sum(sample["score"] * sample["tokens"] for sample in group) / tokens
        summary["score"] = math.exp(min(nats, 700.0))
        summary["tokens"] = tokens
    elif benchmark != "latency":
        summary["score"] = 100 * sum(sample["score"] for sample in group) / len(group)
    for name in _MEANS:
        values = [sample[name] for sample in group if sample.get(name) is not None]
        if values:
            # Times of a shared machine have outliers.
            mean = statistics.median if benchmark == "latency" else statistics.fmean
            summary[name] = mean(values)
    if shared := sum(bool(sample.get("shared")) for sample in group):
        summary["shared"] = shared
    return summary


def _shown(value: float | None, form: str, mark: str = "") -> str:
    return "–" if value is None else format(value, form) + mark


def _mega(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def higher_is_better(benchmark: str) -> bool:
    """Of its score."""
    return benchmark != "perplexity"


def run_file_name(benchmark: str, choice: CacheChoice) -> str:
    """Where the run with one cache is kept inside its command's folder."""
    return f"{benchmark}-{choice.label.replace(' ', '-')}.json"


# --- running ---------------------------------------------------------------------------------------------------------


def open_run(
    benchmark: str,
    reader: ContextReader,
    settings: dict[str, Any],
    *,
    model_name: str = "",
    path: str | Path | None = None,
    restart: bool | str = False,
    record: dict[str, Any] | None = None,
) -> BenchmarkRun:
    """A new run, or the one in the file, if it was measured under the same settings.

    Args:
        settings: further ones than the model and its cache.
        restart: a new run in any case; with the name of a restart (`SharedFolder.join_restart`), unless the one in the
            file is of that restart.
        record: further entries of the file.

    Raises:
        ValueError: the file is something else, or a run with other settings.
    """
    model = reader.model
    settings = {
        "model": model_name,
        "weights": _fingerprint(model),
        "dtype": str(model.get_input_embeddings().weight.dtype).removeprefix("torch."),
        **reader.choice.settings(),
        **settings,
    }
    settings = json.loads(json.dumps(settings))  # as a file gives it back
    run = BenchmarkRun(benchmark, settings)
    if path is not None and (not restart or is_of(path, restart)) and Path(path).exists():
        run = BenchmarkRun.read(path)
        names = {*settings, *run.settings}
        differing = sorted(name for name in names if run.settings.get(name) != settings.get(name))
        if run.benchmark != benchmark:
            raise ValueError(f"{path} holds a run of {run.benchmark}, not of {benchmark}")
        if differing:
            name = differing[0]
            others = f"another {', another '.join(differing)}"
            values = f"({name}: {run.settings.get(name)!r} there, {settings.get(name)!r} now)"
            if restart:
                raise ValueError(f"{path}: {_restarted_with(others)} {values}; {_WAIT}")
            raise ValueError(f"{path} holds results with {others} {values}; write elsewhere, or restart to replace it")
    begun = restart if isinstance(restart, str) else run.record.get("restart")
    run.record = {
        **({"restart": begun} if begun else {}),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **(record or {}),
        "machine": machine_report(reader.device),
    }
    return run


_WAIT = "wait for it, or give another --out"


def _restarted_with(others: str) -> str:
    return f"another process is restarting this benchmark with {others}"


def is_of(path: str | Path, restart: bool | str) -> bool:
    """Whether a file holds a run of a restart of that name."""
    try:
        return isinstance(restart, str) and BenchmarkRun.read(path).record.get("restart") == restart
    except (OSError, ValueError):
        return False


def check_data(
    run: BenchmarkRun, data: Mapping[str, str], path: str | Path | None = None, restart: bool | str = False
) -> None:
    """Samples that are in the run already must be of the data that is here now.

    Args:
        data: by key, a digest of what the sample is made from.
        path: the run's file, for the message.
        restart: as in `open_run`; what the run holds already is then another process's.

    Raises:
        ValueError: a sample in the run is of other data, or of data that nobody noted.
    """
    other = [key for key in data if key in run.samples and run.samples[key].get("data") != data[key]]
    if other:
        noted = all("data" in run.samples[key] for key in other)
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        if restart:
            raise ValueError(f"{path or 'the run'}: {_restarted_with('other data')} ({other[0]}{more}); {_WAIT}")
        raise ValueError(
            f"{path or 'the run'} holds results of {'other' if noted else 'unknown'} data ({other[0]}{more}); write "
            "into another folder (--out), or replace what is there (--restart)"
        )


def run_items(
    run: BenchmarkRun,
    items: Iterable[Item],
    path: str | Path | None = None,
    *,
    data: Mapping[str, str] | None = None,
    shared: Callable[[], bool] | None = None,
    restart: bool | str = False,
    progress: bool = True,
) -> BenchmarkRun:
    """Measure what is not in the run yet, and save while doing so, also when interrupted.

    Args:
        items: a sample's key, and what measures it.
        data: by key, a digest of what the sample is made from, which is kept with its results.
        shared: asked before and after each sample whether another process measures; the answer is kept with it.
        restart: as in `open_run`.

    Raises:
        ValueError: see `check_data`.
    """
    data = data or {}
    check_data(run, data, path, restart)
    todo = [(key, measure) for key, measure in items if key not in run.samples]
    saved = time.monotonic()
    try:
        with tqdm(total=len(todo), unit="sample", dynamic_ncols=True, disable=None if progress else True) as bar:
            for key, measure in todo:
                bar.set_description(f"{run.label}: {key}", refresh=False)
                beside = shared is not None and shared()
                sample = {**measure(), **({"data": data[key]} if key in data else {})}
                if shared is not None:
                    sample["shared"] = beside or shared()
                run.samples[key] = sample
                bar.update()
                if path is not None and time.monotonic() - saved > _SAVE_SECONDS:
                    run.write(path)
                    saved = time.monotonic()
    finally:
        if path is not None:
            run.write(path)
    return run


# --- what is measured ------------------------------------------------------------------------------------------------


def measure_answers(
    reader: ContextReader,
    frame: PromptFrame,
    sample: Sample,
    *,
    question_seen: bool = False,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Read one sample's context, ask its questions, and judge the answers.

    Args:
        question_seen: read each question together with the context, before anything is evicted; the context is then
            read once for every question. Otherwise a question comes after the context has been compressed.
        max_tokens: cut so much out of the context's middle that prompt and answer fit.

    Returns:
        The sample's entry in a `BenchmarkRun`; its score is the mean over questions.
    """
    ids = frame.context_ids(sample) if max_tokens is None else frame.shortened(sample, max_tokens)
    read: ReadContext | None = None
    asked: list[dict[str, Any]] = []
    prefill, answering, new_tokens = 0.0, 0.0, 0
    pairs: list[int | None] = []
    sizes: list[int] = []
    for question in sample.questions:
        question_ids = frame.question_ids(sample, question)
        if question_seen:
            read, question_ids = reader.read([*ids, *question_ids]), []
        elif read is None:
            read = reader.read(ids, logits=False)
        if question_seen or not asked:
            prefill += read.seconds
            pairs.append(read.kept_pairs())
            sizes.append(read.nbytes())
        synchronize(reader.device)
        start = time.perf_counter()
        written = reader.answer(read, question_ids, question.max_new_tokens, one_line=question.one_line)
        synchronize(reader.device)
        answering += time.perf_counter() - start
        new_tokens += len(written)
        prediction = reader.tokenizer.decode(written, skip_special_tokens=True)
        entry: dict[str, Any] = {"prediction": prediction, "answers": list(question.answers)}
        if question.part:
            entry["part"] = question.part
        asked.append({**entry, "metric": question.metric, "score": score_answer(prediction, question)})
    known = [value for value in pairs if value is not None]
    return {
        "task": sample.task,
        "length": sample.length,
        "score": statistics.fmean(entry["score"] for entry in asked),
        "context_tokens": len(ids),
        "kept_pairs": statistics.fmean(known) if known else None,
        "cache_bytes": statistics.fmean(sizes),
        "prefill_seconds": prefill / len(sizes),
        "answer_seconds": answering / len(asked),
        "new_tokens": new_tokens,
        "questions": asked,
    }


def measure_perplexity(
    reader: ContextReader, context_ids: Sequence[int], continuation_ids: Sequence[int]
) -> dict[str, Any]:
    """Nats a token of a continuation, given the compressed context; its first token is read and not scored."""
    read = reader.read(context_ids, logits=False)
    found = continuation_perplexity(reader.model, read.cache, continuation_ids)
    return {
        "task": "perplexity",
        "length": len(context_ids),
        "score": found.nats,
        "tokens": found.tokens,
        "context_tokens": len(context_ids),
        "kept_pairs": read.kept_pairs(),
        "cache_bytes": read.nbytes(),
        "prefill_seconds": read.seconds,
    }


def measure_latency(reader: ContextReader, context_ids: Sequence[int], decode_tokens: int) -> dict[str, Any]:
    """Seconds of a prefill and of a token of greedy decoding at batch 1, and what the cache holds in between."""
    read = reader.read(context_ids)
    assert read.logits is not None
    pairs, nbytes = read.kept_pairs(), read.nbytes()
    return {
        "task": "latency",
        "length": len(context_ids),
        "score": None,
        "context_tokens": len(context_ids),
        "kept_pairs": pairs,
        "cache_bytes": nbytes,
        "prefill_seconds": read.seconds,
        "seconds_per_token": 1 / decode_speed(reader.model, read.cache, read.logits, decode_tokens),
        "new_tokens": decode_tokens,
    }
