"""Runs of a comparison by cache, and names that tell caches with different arguments apart.

A cache goes by its plain name; only where a comparison has it with two sets of arguments, those that differ are named,
and of paths as much as tells them apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nearfar.evaluation.benchmark_runs import BenchmarkRun
from nearfar.evaluation.context_reading import cache_label
from nearfar.evaluation.run_comparison import Comparison, options_key


@dataclass
class CacheLine:
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


def cache_lines(comparison: Comparison) -> list[CacheLine]:
    """All runs, in the order of `comparison.runs` where `compare` made it."""
    by_cache: dict[str, dict[str, list[BenchmarkRun]]] = {}
    for run in comparison.runs:
        by_cache.setdefault(str(run.settings.get("cache")), {}).setdefault(options_key(run), []).append(run)
    lines = []
    for cache, sets in by_cache.items():
        apart = _what_differs([runs[0].settings.get("cache_options") or {} for runs in sets.values()])
        lines += [CacheLine(cache, text, len(sets) > 1, runs) for text, runs in zip(apart, sets.values(), strict=True)]
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
