"""A report on runs of benchmarks: score against retention ratio, score against time, heat maps, Markdown tables.

Runs of different models or benchmarks never share a chart, and neither do those whose settings differ in anything but
the cache (`run_comparison`). Averages are over the tasks and lengths that all runs of a chart have; the report says
how many those are. `report.md` gives all arguments of caches below the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nearfar.evaluation.benchmark_runs import FORMAT, BenchmarkRun
from nearfar.evaluation.multi_needle import NeedleResults, write_heat_map
from nearfar.evaluation.run_charts import (
    draw_latency,
    draw_score_against_ratio,
    draw_score_against_time,
    draw_task_heat_map,
)
from nearfar.evaluation.run_comparison import Comparison, compare, file_name, wilson_interval
from nearfar.evaluation.run_tables import cache_arguments, notes, score_table, tables_by_size
from nearfar.modeling.atomic_file import write_beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Comparison",
    "FoundRuns",
    "compare",
    "draw_latency",
    "draw_score_against_ratio",
    "draw_score_against_time",
    "draw_task_heat_map",
    "find_runs",
    "wilson_interval",
    "write_report",
]


@dataclass
class FoundRuns:
    """What lies below a folder.

    Attributes:
        runs: (file, run), sorted by file.
        needles: results of `nearfar eval needles`.
        skipped: (file, why) of JSON files that are damaged runs.
    """

    runs: list[tuple[Path, BenchmarkRun]] = field(default_factory=list)
    needles: list[tuple[Path, NeedleResults]] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def find_runs(folder: str | Path) -> FoundRuns:
    """All runs below a folder; JSON files that are something else are passed over."""
    found = FoundRuns()
    for path in sorted(Path(folder).rglob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            found.skipped.append((path, f"not JSON ({error})"))
            continue
        if not isinstance(data, dict):
            continue
        try:
            if data.get("format") == FORMAT:
                run = BenchmarkRun.from_dict(data)
                run.scores()  # damaged samples are told here
                found.runs.append((path, run))
            elif path.name == "needles.json" and "lengths" in data:
                needles = NeedleResults.from_dict(data)
                if any(result.asked for result in needles.lengths.values()):
                    found.needles.append((path, needles))
                else:
                    found.skipped.append((path, "no question has been asked yet"))
        except (ValueError, KeyError, TypeError) as error:
            found.skipped.append((path, f"{type(error).__name__}: {error}"))
    return found


def write_report(found: FoundRuns, out: str | Path, *, command: str = "") -> list[Path]:
    """`report.md` and its charts, each written beside and renamed.

    Returns:
        The files, the Markdown first.

    Raises:
        ValueError: there is nothing to report on.
        ImportError: matplotlib is missing.
    """
    out = Path(out)
    comparisons = compare([run for _, run in found.runs])
    if not comparisons and not found.needles:
        raise ValueError("no runs were found: `nearfar eval` writes them")
    lines, files = ["# Report", ""], []
    if command:
        lines += [f"`{command}`", ""]
    for comparison in comparisons:
        lines += [f"## {comparison.title}", "", *notes(comparison), "", *score_table(comparison), ""]
        lines += cache_arguments(comparison)
        lines += tables_by_size(comparison)
        for kind, draw in _charts(comparison):
            path = out / f"{comparison.name}-{kind}.png"
            files.append(_save(draw(comparison), path))
            lines += [f"![{comparison.title}: {kind.replace('-', ' ')}]({path.name})", ""]
    for index, (source, needles) in enumerate(found.needles):
        model = str(needles.settings.get("model") or "model")
        path = out / f"needles-{file_name(model)}{f'-{index + 1}' if index else ''}.png"
        title = f"{Path(model).name}: {needles.settings.get('needles')} needles a document"
        files.append(write_heat_map(path, needles, title))
        lines += [f"## needles, {Path(model).name}", "", f"From `{source.name}`.", ""]
        lines += ["```", needles.table(), "```", "", f"![{title}]({path.name})", ""]
    text = "\n".join(lines)
    report = write_beside(out / "report.md", lambda file: file.write_text(text, encoding="utf-8"))
    return [report, *files]


def _save(figure: Figure, path: Path) -> Path:
    # Tight: a legend of long names is wider than the figure.
    return write_beside(path, lambda file: figure.savefig(file, dpi=150, format="png", bbox_inches="tight"))


def _charts(comparison: Comparison) -> Iterator[tuple[str, Callable[[Comparison], Figure]]]:
    scored = comparison.benchmark != "latency"
    ratios = any(run.settings.get("retention_ratio") is not None for run in comparison.runs)
    if scored and comparison.cells:
        if ratios:
            yield "score-ratio", draw_score_against_ratio
        if all(comparison.seconds(run) is not None for run in comparison.runs):
            yield "score-time", draw_score_against_time
        yield "heat-map", draw_task_heat_map
    if not scored:
        yield "time", draw_latency
