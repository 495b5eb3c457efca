"""Charts of runs that are compared: score against retention ratio, score against time, heat maps, latency."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nearfar.evaluation.benchmark_runs import BenchmarkRun, higher_is_better
from nearfar.evaluation.comparison import _COLORS, _MARKERS
from nearfar.evaluation.context_reading import FULL
from nearfar.evaluation.multi_needle import short_length
from nearfar.evaluation.run_comparison import SIZES, Comparison, in_order
from nearfar.evaluation.run_lines import CacheLine, cache_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    lines = cache_lines(comparison)
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


def _dodges(lines: Sequence[CacheLine], width: float) -> dict[int, float]:
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
    for number, line in enumerate(cache_lines(comparison)):
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

    cells = in_order(comparison.cells)
    lengths = {length for _, length in cells}
    names = [task if len(lengths) < 2 or n is None else f"{task}, {short_length(n)}" for task, n in cells]
    lines = cache_lines(comparison)
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
        axis.set_xlabel(" or ".join(what for key, what in SIZES if any(run.settings.get(key) for run in runs)),
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
    return next((f"{run.settings[key]:g}" for key, _ in SIZES if run.settings.get(key) is not None), "")


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
        for color, line in enumerate(cache_lines(comparison)):
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
