"""Markdown tables and notes on runs that are compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nearfar.evaluation.benchmark_runs import BenchmarkRun, higher_is_better, shared_words
from nearfar.evaluation.context_reading import FULL, cache_label
from nearfar.evaluation.multi_needle import short_length
from nearfar.evaluation.run_comparison import SIZES, Comparison, in_order
from nearfar.evaluation.run_lines import cache_lines

_ORACLE = "kvzip"


def notes(comparison: Comparison) -> list[str]:
    """What has to be known about the figures: dtypes, devices, how many samples, whether other processes ran."""
    machines = sorted({str(run.record.get("machine", {}).get("device", "?")) for run in comparison.runs})
    dtypes = sorted({str(run.settings.get("dtype")) for run in comparison.runs})
    lines = [f"{len(comparison.runs)} runs in {', '.join(dtypes)} on {', '.join(machines)}."]
    every = {cell for run in comparison.runs for cell in comparison.entries(run)}
    if len(every) > len(comparison.cells):
        lines.append(f"Averages are over the {len(comparison.cells)} of {len(every)} tasks and lengths that all have.")
    counts = {
        count["count"] for run in comparison.runs for cell, count in comparison.entries(run).items()
        if cell in comparison.cells
    }  # fmt: skip
    if counts:
        least, most = min(counts), max(counts)
        number = str(least) if least == most else f"{least} to {most}"
        lines.append(f"Samples of each task and length: {number}.")
        if least != most:
            lines.append("**Runs with different numbers of samples are compared.**")
    samples = [sample for run in comparison.runs for sample in run.samples.values()]
    if shared := sum(bool(sample.get("shared")) for sample in samples):
        lines.append(f"Times: {shared_words(shared, len(samples))}.")
    return lines


def score_table(comparison: Comparison) -> list[str]:
    """Tasks down, runs across; below, averages and costs."""
    lengths = {length for _, length in comparison.cells}
    header = ["task", *(line.run_label(run) for line in cache_lines(comparison) for run in line.runs)]
    rows = []
    if comparison.benchmark != "latency":
        for task, length in in_order([cell for run in comparison.runs for cell in comparison.entries(run)]):
            name = task if len(lengths) < 2 or length is None else f"{task}, {short_length(length)}"
            values = [comparison.entries(run).get((task, length), {}).get("score") for run in comparison.runs]
            rows.append(
                [name, *(_number(value, ".1f" if value is None or value < 1000 else ".3g") for value in values)]
            )
        if len(comparison.cells) > 1:
            rows.append(
                ["**average**", *(_number(comparison.average(run), ".1f", bold=True) for run in comparison.runs)]
            )
    for name, what, scale, form in (
        ("pairs kept", "kept_pairs", 1.0, ",.0f"),
        ("cache, MB", "cache_bytes", 1e-6, ",.2f"),
        ("prefill, s", "prefill_seconds", 1.0, ".3f"),
        ("answer, s", "answer_seconds", 1.0, ".3f"),
        ("decode, ms/token", "seconds_per_token", 1e3, ".2f"),
    ):
        for length in sorted(lengths, key=lambda n: n or 0) if comparison.benchmark == "latency" else [None]:
            label = name if length is None else f"{name}, {short_length(length)}"
            values = [_cost(comparison, run, what, length) for run in comparison.runs]
            if any(value is not None for value in values):
                scaled = [None if value is None else scale * value for value in values]
                rows.append([label, *(_number(value, form) for value in scaled)])
    rule = ["---", *("---:" for _ in comparison.runs)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def tables_by_size(comparison: Comparison) -> list[str]:
    """Caches down, ratios or budgets across: averages with their intervals, and each cache's mean beside KVzip's."""
    if not higher_is_better(comparison.benchmark) or comparison.benchmark == "latency" or not comparison.cells:
        return []
    lines = []
    for setting, what in SIZES:
        found = {
            line.label: {run.settings[setting]: run for run in line.runs if run.settings.get(setting) is not None}
            for line in cache_lines(comparison)
        }
        found = {label: runs for label, runs in found.items() if runs}
        sizes = sorted({size for runs in found.values() for size in runs})
        if len(found) < 2 and len(sizes) < 2:
            continue
        common = [size for size in sizes if all(size in runs for runs in found.values())]
        oracle = found.get(cache_label(_ORACLE))
        header = [f"average score by {what}", *(f"{size:g}" for size in sizes), "mean"]
        header += [f"% of {cache_label(_ORACLE)}'s"] if oracle else []
        rows = [header, ["---", *("---:" for _ in header[1:])]]
        best = _mean_score(comparison, oracle, common) if oracle else None
        for run in comparison.runs:
            if run.settings.get("cache") == FULL:
                full = _with_interval(comparison, run)
                score = comparison.average(run)
                rows.append([cache_label(FULL), *(full for _ in sizes), _number(score, ".1f")])
                rows[-1] += [_percent_of(score, best)] if oracle else []
        for label, runs in found.items():
            mean = _mean_score(comparison, runs, common)
            cells = [_with_interval(comparison, runs[size]) if size in runs else "–" for size in sizes]
            rows.append([label, *cells, _number(mean, ".1f"), *([_percent_of(mean, best)] if oracle else [])])
        lines += [f"| {' | '.join(row)} |" for row in rows]
        over = "" if common == sizes else f" Means are over {', '.join(f'{size:g}' for size in common) or 'no size'}."
        lines += ["", f"In brackets 95 % intervals.{over}", ""]
    return lines


def _mean_score(comparison: Comparison, runs: dict[float, BenchmarkRun], sizes: Sequence[float]) -> float | None:
    scores = [comparison.average(runs[size]) for size in sizes]
    known = [score for score in scores if score is not None]
    return statistics.fmean(known) if known and len(known) == len(scores) else None


def _percent_of(score: float | None, best: float | None) -> str:
    return _number(100 * score / best if score is not None and best else None, ".1f")


def _with_interval(comparison: Comparison, run: BenchmarkRun) -> str:
    score, interval = comparison.average(run), comparison.interval(run)
    if score is None or interval is None:
        return _number(score, ".1f")
    return f"{score:.1f} ({interval[0]:.0f}–{interval[1]:.0f})"


def _cost(comparison: Comparison, run: BenchmarkRun, what: str, length: int | None) -> float | None:
    if length is None:
        return comparison.average(run, what)
    values = [entry.get(what) for cell, entry in comparison.entries(run).items() if cell[1] == length]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def cache_arguments(comparison: Comparison) -> list[str]:
    """One line for each cache that was given any."""
    lines = []
    for line in cache_lines(comparison):
        options = line.runs[0].settings.get("cache_options") or {}
        if options or line.several:
            shown = ", ".join(f"`{name}={value}`" for name, value in sorted(options.items()))
            lines.append(f"- {line.label}: {shown or 'no arguments'}")
    return ["Arguments:", "", *lines, ""] if lines else []


def _number(value: float | None, form: str, bold: bool = False) -> str:
    text = "–" if value is None else format(value, form)
    return f"**{text}**" if bold and value is not None else text
