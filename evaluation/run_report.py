"""A report on runs of benchmarks: score against retention ratio, score against time, heat maps, Markdown tables.

Runs of different models or benchmarks never share a chart, and neither do those whose settings differ in anything but
the cache. Averages are over the tasks and lengths that all runs of a chart have; the report says how many those are.

Intervals are Wilson's at 95 %, of as many samples as the average has, as if each were right or wrong. Scores in
between, and tasks of different difficulty, vary less, so that they are, if anything, too wide. They say how far an
average is from what more samples would give; all caches were asked the same, so that differences are known better.

A cache goes by its plain name; only where a comparison has it with two sets of arguments, those that differ are named,
and of paths as much as tells them apart. `report.md` gives all arguments below the table.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.evaluation.benchmark_runs import FORMAT, BenchmarkRun, higher_is_better, shared_words
from nearfar.evaluation.comparison import _COLORS, _MARKERS
from nearfar.evaluation.context_reading import FULL, cache_label
from nearfar.evaluation.multi_needle import NeedleResults, short_length, write_heat_map
from nearfar.modeling.atomic_file import write_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cell = tuple[str, int | None]
# Settings that may differ inside a chart.
_CACHE_SETTINGS = ("cache", "budget", "retention_ratio", "cache_options")


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


@dataclass
class Comparison:
    """Runs of one benchmark and one model that differ in their caches only.

    Attributes:
        name: for files.
        benchmark, model: what they have in common.
        runs: full caches first, then by name and size.
        cells: (task, length) that all runs with samples have.
    """

    name: str
    benchmark: str
    model: str
    runs: list[BenchmarkRun]
    cells: list[Cell]

    @property
    def title(self) -> str:
        return f"{self.benchmark}, {Path(self.model).name}"

    def entries(self, run: BenchmarkRun) -> dict[Cell, dict[str, Any]]:
        return {(entry["task"], entry["length"]): entry for entry in run.scores()}

    def average(self, run: BenchmarkRun, what: str = "score") -> float | None:
        """Over the cells that all have; of perplexity the geometric mean."""
        values = [self.entries(run)[cell].get(what) for cell in self.cells]
        known = [value for value in values if value is not None]
        if not known:
            return None
        if self.benchmark == "perplexity" and what == "score":
            return statistics.geometric_mean(known)
        return statistics.fmean(known)

    def interval(self, run: BenchmarkRun) -> tuple[float, float] | None:
        """Of the average score, in percent; None for scores that are not between 0 and 100."""
        score = self.average(run)
        if score is None or not higher_is_better(self.benchmark):
            return None
        counts = [self.entries(run)[cell]["count"] for cell in self.cells]
        # What a mean of means, each of so many samples, is worth in samples.
        return wilson_interval(score, len(counts) ** 2 / sum(1 / count for count in counts))

    def seconds(self, run: BenchmarkRun) -> float | None:
        """Prefill and answer of a sample, on average."""
        parts = [self.average(run, name) for name in ("prefill_seconds", "answer_seconds")]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None


def wilson_interval(percent: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of `count` samples, in percent."""
    share = percent / 100
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def compare(runs: Sequence[BenchmarkRun]) -> list[Comparison]:
    """The runs, sorted into comparisons: of the same settings, and of the same data where they share samples."""
    alike: dict[str, list[list[BenchmarkRun]]] = {}
    for run in runs:
        if run.samples:
            common = {name: value for name, value in run.settings.items() if name not in _CACHE_SETTINGS}
            groups = alike.setdefault(json.dumps([run.benchmark, common], sort_keys=True), [])
            group = next((group for group in groups if all(_same_data(run, other) for other in group)), None)
            if group is None:
                groups.append([run])
            else:
                group.append(run)
    comparisons: list[Comparison] = []
    for group in (group for groups in alike.values() for group in groups):
        group = sorted(group, key=_order)
        shared = [
            [(entry["task"], entry["length"]) for entry in run.scores()]
            for run in group
        ]  # fmt: skip
        cells = [cell for cell in shared[0] if all(cell in others for others in shared)]
        model = str(group[0].settings.get("model") or "model")
        first = name = f"{group[0].benchmark}-{_file_name(model)}"
        taken, number = {other.name for other in comparisons}, 1
        while name in taken:
            name = f"{first}-{(number := number + 1)}"
        comparisons.append(Comparison(name, group[0].benchmark, model, group, cells))
    return comparisons


def _same_data(run: BenchmarkRun, other: BenchmarkRun) -> bool:
    shared = run.samples.keys() & other.samples.keys()
    return all(run.samples[key].get("data") == other.samples[key].get("data") for key in shared)


def _order(run: BenchmarkRun) -> tuple[Any, ...]:
    name = str(run.settings.get("cache"))
    settings = run.settings
    size = (settings.get("budget") or 0, settings.get("retention_ratio") or 0.0)
    return (name != FULL, name, _options_key(run), *size)


def _options_key(run: BenchmarkRun) -> str:
    options = run.settings.get("cache_options")
    return json.dumps(options, sort_keys=True) if options else ""  # none is first


def _file_name(model: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in Path(model).name)
    return kept.strip("-.") or "model"


# --- names of caches -------------------------------------------------------------------------------------------------


@dataclass
class _Line:
    """Runs that are points of one line of a chart: those of one cache with the same arguments.

    Attributes:
        cache: its registered name.
        apart: what tells it from the same cache with other arguments, such as `mapper=new`; mostly empty.
        several: whether the same cache is there with other arguments.
        runs: by size.
    """

    cache: str
    apart: str
    several: bool
    runs: list[BenchmarkRun]

    @property
    def label(self) -> str:
        return cache_label(self.cache) + (f" ({self.apart})" if self.apart else "")

    def run_label(self, run: BenchmarkRun) -> str:
        return run.label + (f" ({self.apart})" if self.apart else "")


def _lines(comparison: Comparison) -> list[_Line]:
    """All runs, in the order of `comparison.runs` where `compare` made it."""
    by_cache: dict[str, dict[str, list[BenchmarkRun]]] = {}
    for run in comparison.runs:
        by_cache.setdefault(str(run.settings.get("cache")), {}).setdefault(_options_key(run), []).append(run)
    lines = []
    for cache, sets in by_cache.items():
        apart = _what_differs([runs[0].settings.get("cache_options") or {} for runs in sets.values()])
        lines += [_Line(cache, text, len(sets) > 1, runs) for text, runs in zip(apart, sets.values(), strict=True)]
    return lines


def _what_differs(sets: Sequence[dict[str, Any]]) -> list[str]:
    """Of each set the arguments that the others do not all have; no two texts are alike."""
    texts: list[list[str]] = [[] for _ in sets]
    for name in sorted({name for options in sets for name in options}):
        given = {json.dumps(options[name], sort_keys=True): options[name] for options in sets if name in options}
        if len(given) == 1 and all(name in options for options in sets):
            continue
        shown = dict(zip(given, _short_values(list(given.values())), strict=True))
        for text, options in zip(texts, sets, strict=True):
            if name in options:
                text.append(f"{name}={shown[json.dumps(options[name], sort_keys=True)]}")
    return [", ".join(text) for text in texts]


def _short_values(values: Sequence[Any]) -> list[str]:
    """Values that differ, as texts that differ: paths by as many of their last components as that takes."""
    parts = [[part for part in re.split(r"[/\\]", str(value)) if part] for value in values]
    for count in range(1, max(map(len, parts), default=0) + 1):
        shown = ["/".join(p[-count:]) if isinstance(v, str) else str(v) for p, v in zip(parts, values, strict=True)]
        if len(set(shown)) == len(shown):
            return shown
    return [json.dumps(value, sort_keys=True) for value in values]


def _arguments(comparison: Comparison) -> list[str]:
    """One line for each cache that was given any."""
    lines = []
    for line in _lines(comparison):
        options = line.runs[0].settings.get("cache_options") or {}
        if options or line.several:
            shown = ", ".join(f"`{name}={value}`" for name, value in sorted(options.items()))
            lines.append(f"- {line.label}: {shown or 'no arguments'}")
    return ["Arguments:", "", *lines, ""] if lines else []


# --- writing ---------------------------------------------------------------------------------------------------------


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
        lines += [f"## {comparison.title}", "", *_notes(comparison), "", *_table(comparison), ""]
        lines += _arguments(comparison)
        lines += _tables_by_size(comparison)
        for kind, draw in _charts(comparison):
            path = out / f"{comparison.name}-{kind}.png"
            files.append(_save(draw(comparison), path))
            lines += [f"![{comparison.title}: {kind.replace('-', ' ')}]({path.name})", ""]
    for index, (source, needles) in enumerate(found.needles):
        model = str(needles.settings.get("model") or "model")
        path = out / f"needles-{_file_name(model)}{f'-{index + 1}' if index else ''}.png"
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


def _notes(comparison: Comparison) -> list[str]:
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


def _table(comparison: Comparison) -> list[str]:
    """Tasks down, runs across; below, averages and costs."""
    lengths = {length for _, length in comparison.cells}
    header = ["task", *(line.run_label(run) for line in _lines(comparison) for run in line.runs)]
    rows = []
    if comparison.benchmark != "latency":
        for task, length in _in_order([cell for run in comparison.runs for cell in comparison.entries(run)]):
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


_SIZES = (("retention_ratio", "share of pairs kept"), ("budget", "budget"))
_ORACLE = "kvzip"


def _tables_by_size(comparison: Comparison) -> list[str]:
    """Caches down, ratios or budgets across: averages with their intervals, and each cache's mean beside KVzip's."""
    if not higher_is_better(comparison.benchmark) or comparison.benchmark == "latency" or not comparison.cells:
        return []
    lines = []
    for setting, what in _SIZES:
        found = {
            line.label: {run.settings[setting]: run for run in line.runs if run.settings.get(setting) is not None}
            for line in _lines(comparison)
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


def _in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Tasks as they come, each by length."""
    tasks = list(dict.fromkeys(task for task, _ in cells))
    return sorted(dict.fromkeys(cells), key=lambda cell: (tasks.index(cell[0]), cell[1] or 0))


def _number(value: float | None, form: str, bold: bool = False) -> str:
    text = "–" if value is None else format(value, form)
    return f"**{text}**" if bold and value is not None else text


# --- charts ----------------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a report needs matplotlib: pip install 'nearfar[eval]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(index: int) -> dict[str, Any]:
    return {"color": _COLORS[index % len(_COLORS)], "marker": _MARKERS[index % len(_MARKERS)]}


def _score_label(comparison: Comparison) -> str:
    return "score, %" if higher_is_better(comparison.benchmark) else "perplexity (lower is better)"


def draw_score_against_ratio(comparison: Comparison) -> Figure:
    """The average, with 95 % intervals, and each task by the share of pairs kept; a full cache is a dashed line.

    Points of the average are drawn a little beside their ratios, so that the intervals can be told apart.
    """
    tasks = list(dict.fromkeys(task for task, _ in comparison.cells))
    tasks = tasks if len(tasks) > 1 else []
    lines = _lines(comparison)
    # The average takes two rows and columns, tasks the places beside and below.
    beside = min(3, math.ceil(len(tasks) / 2))
    columns = 2 + beside
    rows = 2 + math.ceil(max(0, len(tasks) - 2 * beside) / columns)
    width = 2.5 * columns + 1.2 * (not tasks)
    figure = _figure(width, 2.1 * rows + 0.9)
    from matplotlib.transforms import offset_copy

    dodges = _dodges(lines, 72 * (4.4 + 1.2 * (not tasks)))
    figure.suptitle(comparison.title, fontsize=11)
    grid = figure.add_gridspec(rows, columns)
    places = [(row, column) for row in range(rows) for column in range(columns) if row > 1 or column > 1]
    axes = [figure.add_subplot(grid[:2, :2]), *(figure.add_subplot(grid[place]) for place in places[: len(tasks)])]
    handles: dict[str, Any] = {}
    for axis, task in zip(axes, [None, *tasks], strict=True):
        for number, line in enumerate(lines):
            points = []
            for run in line.runs:
                score = _task_score(comparison, run, task)
                interval = comparison.interval(run) if task is None else None
                if run.settings.get("cache") == FULL and score is not None:
                    handles[line.label] = axis.axhline(score, color="#222222", linestyle="--", linewidth=1.2)
                elif run.settings.get("retention_ratio") is not None and score is not None:
                    points.append((run.settings["retention_ratio"], score, interval))
            if points:
                points.sort(key=lambda point: point[0])
                x, y = [point[0] for point in points], [point[1] for point in points]
                with_intervals = all(point[2] for point in points)
                place = axis.transData
                if with_intervals:
                    place = offset_copy(place, figure, dodges.get(number, 0.0), units="points")
                handles[line.label] = axis.plot(x, y, **_style(number), markersize=5 if task is None else 4,
                                                transform=place)[0]  # fmt: skip
                if with_intervals:
                    axis.vlines(x, *zip(*(point[2] for point in points), strict=True), color=_style(number)["color"],
                                linewidth=1.2, alpha=0.45, transform=place)  # fmt: skip
        axis.set_title("average" if task is None else task, fontsize=10 if task is None else 9)
        _score_axis(comparison, axis)
        axis.set_xlim(0, 1.02)
    first_column = [axes[0], *(axis for axis, place in zip(axes[1:], places, strict=False) if place[1] == 0)]
    for axis in first_column:
        axis.set_ylabel(_score_label(comparison), fontsize=8)
    # The lowest panel of each column; the average stands in the first two.
    lowest = {column: axes[0] for column in (0, 1)}
    lowest |= {place[1]: axis for axis, place in zip(axes[1:], places, strict=False)}
    for axis in dict.fromkeys([axes[0], *lowest.values()]):
        axis.set_xlabel("retention ratio", fontsize=8)
    _legend(figure, handles, width)
    return figure


def _dodges(lines: Sequence[_Line], width: float) -> dict[int, float]:
    """By line, how far beside its ratios it is drawn, in points; the axis is `width` points wide, of ratios 0 to 1."""
    ratios: list[set[float]] = [
        {ratio for run in line.runs if (ratio := run.settings.get("retention_ratio")) is not None} for line in lines
    ]
    drawn = [number for number, own in enumerate(ratios) if own]
    every = sorted({ratio for own in ratios for ratio in own})
    gaps = [after - before for before, after in pairwise(every)]
    step = min(3.0, 0.7 * width * min(gaps, default=1.0) / max(1, len(drawn)))
    return {number: step * (index - (len(drawn) - 1) / 2) for index, number in enumerate(drawn)}


def _legend(figure: Figure, handles: dict[str, Any], width: float) -> None:
    """Below a figure of `width` inches, in as many columns as there is room for."""
    longest = max(map(len, handles), default=1)
    most = max(1, int(width / (0.55 + 0.068 * longest)))
    rows = math.ceil(len(handles) / most)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", fontsize=8, frameon=False,
                  ncols=max(1, math.ceil(len(handles) / max(1, rows))))  # fmt: skip


def _task_score(comparison: Comparison, run: BenchmarkRun, task: str | None) -> float | None:
    if task is None:
        return comparison.average(run)
    cells = [cell for cell in comparison.cells if cell[0] == task]
    scores = [comparison.entries(run)[cell]["score"] for cell in cells]
    known = [score for score in scores if score is not None]
    return statistics.fmean(known) if known else None


def _score_axis(comparison: Comparison, axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if higher_is_better(comparison.benchmark):
        axis.set_ylim(-4, 104)


def draw_score_against_time(comparison: Comparison) -> Figure:
    """The average score by seconds of prefill and answer; where there is room a point's ratio or budget beside it."""
    figure = _figure(7.0, 4.6)
    axis = figure.subplots()
    handles: dict[str, Any] = {}
    drawn = []
    for number, line in enumerate(_lines(comparison)):
        points = []
        for run in line.runs:
            seconds, score = comparison.seconds(run), comparison.average(run)
            if seconds is not None and score is not None:
                size = run.settings.get("retention_ratio") or run.settings.get("budget")
                points.append((seconds, score, "" if size is None else f"{size:g}"))
        if not points:
            continue
        # In the order of sizes, not of times.
        handles[line.label] = axis.plot([p[0] for p in points], [p[1] for p in points], **_style(number), linewidth=1,
                                        markersize=5)[0]  # fmt: skip
        drawn.append((number, points))
    axis.set_title(comparison.title, fontsize=10)
    axis.set_xlabel("seconds a sample: prefill and answer", fontsize=9)
    axis.set_ylabel(_score_label(comparison), fontsize=9)
    _score_axis(comparison, axis)
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    _legend(figure, handles, 7.0)
    _write_sizes(figure, axis, drawn)
    return figure


def _write_sizes(figure: Figure, axis: Axes, drawn: Sequence[tuple[int, list[tuple[float, float, str]]]]) -> None:
    """Texts beside points, the ends of lines first; those that would cover a point or another text are left out."""
    figure.draw_without_rendering()  # where points are is known after the layout
    ordered = [(number, points[index]) for index in (0, -1) for number, points in drawn if index == 0 or points[1:]]
    ordered += [(number, point) for number, points in drawn for point in points[1:-1]]
    places = [
        [float(72 / figure.dpi * place) for place in axis.transData.transform(point[:2])] for _, point in ordered
    ]
    # Left, right, bottom and top, in points.
    taken = [(x - 2.5, x + 2.5, y - 2.5, y + 2.5) for x, y in places]
    letter, height = 4.3, 6.0  # of text of size 7
    for (number, (seconds, score, text)), (x, y) in zip(ordered, places, strict=True):
        width = letter * len(text)
        for right, up in ((4.0, 4.0), (4.0, -4.0 - height), (-4.0 - width, 4.0), (-4.0 - width, -4.0 - height)):
            box = (x + right, x + right + width, y + up, y + up + height)
            if not any(
                box[0] < other[1] and other[0] < box[1] and box[2] < other[3] and other[2] < box[3] for other in taken
            ):
                taken.append(box)
                axis.annotate(text, (seconds, score), textcoords="offset points", xytext=(right, up), fontsize=7,
                              color=_style(number)["color"])  # fmt: skip
                break


def draw_task_heat_map(comparison: Comparison) -> Figure:
    """Tasks (and lengths) by runs, each cell with its score; the runs of a cache stand together, its name above."""
    import numpy as np

    cells = _in_order(comparison.cells)
    lengths = {length for _, length in cells}
    names = [task if len(lengths) < 2 or n is None else f"{task}, {short_length(n)}" for task, n in cells]
    lines = _lines(comparison)
    runs = [run for line in lines for run in line.runs]
    values = [
        [math.nan if (score := comparison.entries(run)[cell]["score"]) is None else score for run in runs]
        for cell in cells
    ]
    many = len(runs) > 20
    column_width, gap = (0.3, 0.4) if many else (0.5, 0.2)  # inches; of a column's width
    # Edges of the columns, and of the empty ones between caches.
    edges, middles = [0.0], []
    columns: list[float] = []
    shown: list[int | None] = []
    for line in lines:
        if columns:
            shown.append(None)
            edges.append(edges[-1] + gap)
        start = edges[-1]
        for _ in line.runs:
            shown.append(len(columns))
            columns.append(edges[-1] + 0.5)
            edges.append(edges[-1] + 1.0)
        middles.append((start + edges[-1]) / 2)
    # Names slant where one is wider than its columns even when it is wrapped.
    room = [max(5, int((len(line.runs) + gap) * column_width / 0.075)) for line in lines]
    labels = [textwrap.fill(line.label, n, break_long_words=False) for line, n in zip(lines, room, strict=True)]
    slant: dict[str, Any] = {}
    if any(len(text) > n for label, n in zip(labels, room, strict=True) for text in label.split("\n")):
        labels, slant = [line.label for line in lines], {"rotation": 30, "ha": "left", "rotation_mode": "anchor"}
    width = 1.3 + 0.07 * max(map(len, names), default=0) + column_width * edges[-1]
    # A slanting name is half as high as it is long.
    height = 0.3 * len(cells) + (0.9 + 0.035 * max(map(len, labels)) if slant else 1.3)
    figure = _figure(max(3.6, width), max(2.4, height))
    axis = figure.subplots()
    flat = [value for row in values for value in row if not math.isnan(value)]
    better = higher_is_better(comparison.benchmark)
    low, high = (0.0, 100.0) if better else (min(flat), max(flat) + 1e-9)
    filled = np.array([[math.nan if column is None else row[column] for column in shown] for row in values])
    image = axis.pcolormesh(edges, np.arange(len(cells) + 1) - 0.5, np.ma.masked_invalid(filled),
                            cmap="viridis" if better else "viridis_r", vmin=low, vmax=high)  # fmt: skip
    axis.set_ylim(len(cells) - 0.5, -0.5)
    for row, line_values in enumerate(values):
        for column, value in zip(columns, line_values, strict=True):
            share = (value - low) / (high - low)
            dark = share < 0.6 if better else share > 0.4
            text = "–" if math.isnan(value) else f"{value:.0f}" if better else f"{value:.1f}"
            color, size = "white" if dark else "black", 7 if many else 8
            axis.text(column, row, text, ha="center", va="center", fontsize=size, color=color)
    sizes = [_size_text(run) for run in runs]
    crowded = max(map(len, sizes), default=0) * 0.07 > column_width
    axis.set_xticks(columns, sizes, fontsize=8, rotation=90 if crowded else 0)
    axis.set_yticks(range(len(cells)), names, fontsize=8)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    if any(sizes):
        axis.set_xlabel(" or ".join(what for key, what in _SIZES if any(run.settings.get(key) for run in runs)),
                        fontsize=8)  # fmt: skip
    above = axis.secondary_xaxis("top")
    above.set_xticks(middles, labels, fontsize=8, **slant)
    above.tick_params(length=0)
    above.spines["top"].set_visible(False)
    figure.suptitle(comparison.title, fontsize=10)
    bar = figure.colorbar(image, ax=axis, pad=0.01)
    bar.set_label(_score_label(comparison), fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def _size_text(run: BenchmarkRun) -> str:
    return next((f"{run.settings[key]:g}" for key, _ in _SIZES if run.settings.get(key) is not None), "")


def draw_latency(comparison: Comparison) -> Figure:
    """Prefill, decoding and bytes by context length, a line for each run."""
    figure = _figure(10.0, 3.9)
    figure.suptitle(comparison.title, fontsize=11)
    panels = (
        ("prefill, s", "prefill_seconds", 1.0),
        ("decoding, ms a token", "seconds_per_token", 1e3),
        ("cache, MB", "cache_bytes", 1e-6),
    )
    handles: dict[str, Any] = {}
    for axis, (label, what, scale) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for color, line in enumerate(_lines(comparison)):
            for number, run in enumerate(line.runs):  # one colour a cache, one marker and dash a size
                points = [(e["length"], scale * e[what]) for e in run.scores() if e.get(what) is not None]
                if points:
                    style = {**_style(color), "marker": _MARKERS[number % len(_MARKERS)]}
                    style["linestyle"] = ("-", "--", ":", "-.")[number % 4]
                    drawn = axis.plot(*zip(*sorted(points), strict=True), **style, markersize=5)
                    handles[line.run_label(run)] = drawn[0]
        axis.set_title(label, fontsize=9)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        axis.set_xlabel("tokens of context", fontsize=8)
    _legend(figure, handles, 10.0)
    return figure
