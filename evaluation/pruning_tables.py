"""Tables of pruning policies' measurements, and the machines that these were made on.

Rows are measurements as `evaluation/pruning_trials.py` has them, with the machine where it is known.
"""

from __future__ import annotations

import collections
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from nearfar.evaluation.comparison import aligned_table
from nearfar.modeling.cache_registry import CACHES


def summarize(
    rows: Sequence[dict[str, Any]], labels: Sequence[str], sizes: Sequence[float], budgets: Sequence[int]
) -> str:
    """The first table: hits, perplexities and times of each policy at each size.

    Args:
        labels: of the variants, in the order of the table's rows.
        sizes: ratios or budgets of the needle contexts.
        budgets: of the essays.
    """
    header = ["policy"]
    for size in sizes:
        header += [f"hits {size:g}", "log-prob", "ppl"]
    header += ["essays"] if len(budgets) == 1 else [f"essays {budget}" for budget in budgets]
    header += ["scoring %", "eviction %"]
    body = []
    for label in labels:
        own = [row for row in rows if row["variant"] == label]
        needles, essays = ([row for row in own if row["kind"] == kind] for kind in ("needle", "essay"))
        cells = [label]
        for size in sizes:
            at = [row for row in needles if row["size"] in (size, None)]
            cells += [_hits(at), _mean(at, "log_probability"), _perplexity(at)]
        cells += [_perplexity([row for row in essays if row["size"] in (budget, None)]) for budget in budgets]
        shown = [row for row in needles if row["size"] in (*sizes, None)]
        cells += [_percent(shown, "scoring_share"), _percent(shown, "eviction_share")]
        body.append(cells)
    return aligned_table(header, body)


def beside_kvzip(rows: Sequence[dict[str, Any]], labels: Sequence[str], sizes: Sequence[float]) -> str | None:
    """The second table, or None without KVzip: hits and kept mass of KVzip's scores, in % of KVzip's own."""
    kvzip = CACHES["kvzip"].label
    needles = [row for row in rows if row["kind"] == "needle"]
    if kvzip not in labels or not needles:
        return None

    def at(label: str, size: float) -> list[dict[str, Any]]:
        return [row for row in needles if row["variant"] == label and row["size"] in (size, None)]

    header = ["policy"]
    for size in sizes:
        header += [f"hits {size:g}, %", "mass, %"]
    header += ["all hits, %", "mean mass, %"]
    body = []
    for label in labels:
        cells, found, masses = [label], [0, 0], []
        for size in sizes:
            mine, theirs = at(label, size), at(kvzip, size)
            # Of a run that is not finished, the trials that both have.
            both = {row["trial"] for row in mine} & {row["trial"] for row in theirs}
            mine, theirs = ([row for row in of if row["trial"] in both] for of in (mine, theirs))
            hits, most = (sum(row["hit"] for row in of) for of in (mine, theirs))
            found = [found[0] + hits, found[1] + most]
            cells.append(f"{100 * hits / most:.1f}" if most else "-")
            # What was measured without KVzip beside it has no mass.
            known = {row["trial"] for row in mine if "kvzip_mass" in row}
            mass, best = ([row["kvzip_mass"] for row in of if row["trial"] in known] for of in (mine, theirs))
            if mass and best:
                masses.append(statistics.fmean(mass) / statistics.fmean(best))
            cells.append(f"{100 * masses[-1]:.1f}" if mass and best else "-")
        cells.append(f"{100 * found[0] / found[1]:.1f}" if found[1] else "-")
        cells.append(f"{100 * statistics.fmean(masses):.1f}" if masses else "-")
        body.append(cells)
    return aligned_table(header, body)


def shown_rows(
    rows: Sequence[dict[str, Any]], labels: Sequence[str], sizes: Sequence[float], budgets: Sequence[int]
) -> list[dict[str, Any]]:
    """Those that the tables are made of; arguments as `summarize`'s."""
    known = {"needle": (*sizes, None), "essay": (*budgets, None)}
    return [row for row in rows if row["variant"] in labels and row["size"] in known[row["kind"]]]


def machine_lines(rows: Sequence[dict[str, Any]], dtype: str, begun_on: dict[str, Any] | None) -> list[str]:
    """What the rows were measured on, one line for each machine.

    Args:
        dtype: of the model, the same for a file.
        begun_on: the machine that the file names at its beginning: all that is known of rows without one.
    """
    counts = collections.Counter(json.dumps(row.get("machine")) for row in rows)
    unknown = f"a machine that was not noted; the file was begun on {json.dumps(begun_on)}"
    return [
        f"{count:,} measurement{'s' if count > 1 else ''} in {dtype} on {unknown if machine == 'null' else machine}"
        for machine, count in counts.items()
    ]


def kind_of(sizes: Sequence[float]) -> str:
    """What sizes are: shares of the pairs, or tokens a layer."""
    return "ratios" if all(size < 1 for size in sizes) else "budgets"


def _hits(rows: Sequence[dict[str, Any]]) -> str:
    return f"{sum(row['hit'] for row in rows)}/{len(rows)}" if rows else "-"


def _mean(rows: Sequence[dict[str, Any]], name: str) -> str:
    return f"{statistics.fmean(row[name] for row in rows):.2f}" if rows else "-"


def _perplexity(rows: Sequence[dict[str, Any]]) -> str:
    values = [row["nats"] for row in rows if "nats" in row]
    return f"{math.exp(min(statistics.fmean(values), 700)):.2f}" if values else "-"


def _percent(rows: Sequence[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{100 * statistics.median(values):.2f}" if values else "-"
