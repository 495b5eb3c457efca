"""What runs of benchmarks can be compared, and their averages over what all of them have.

Runs of different models or benchmarks are never compared, and neither are those whose settings differ in anything but
the cache.

Intervals are Wilson's at 95 %, of as many samples as the average has, as if each were right or wrong. Scores in
between, and tasks of different difficulty, vary less, so that they are, if anything, too wide. They say how far an
average is from what more samples would give; all caches were asked the same, so that differences are known better.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.evaluation.benchmark_runs import BenchmarkRun, higher_is_better
from nearfar.evaluation.context_reading import FULL

Cell = tuple[str, int | None]
# Settings that may differ inside a chart.
_CACHE_SETTINGS = ("cache", "budget", "retention_ratio", "cache_options")
# Of these, sizes of a cache, and what they are.
SIZES = (("retention_ratio", "share of pairs kept"), ("budget", "budget"))


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
        first = name = f"{group[0].benchmark}-{file_name(model)}"
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
    return (name != FULL, name, options_key(run), *size)


def options_key(run: BenchmarkRun) -> str:
    """The same for runs whose caches have the same arguments."""
    options = run.settings.get("cache_options")
    return json.dumps(options, sort_keys=True) if options else ""  # none is first


def file_name(model: str) -> str:
    """A model's name as part of a file's."""
    kept = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in Path(model).name)
    return kept.strip("-.") or "model"


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Tasks as they come, each by length."""
    tasks = list(dict.fromkeys(task for task, _ in cells))
    return sorted(dict.fromkeys(cells), key=lambda cell: (tasks.index(cell[0]), cell[1] or 0))
