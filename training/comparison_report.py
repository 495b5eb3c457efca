"""Variants that were trained alike, side by side: in percent of one of them, as a table and as a figure.

What a variant's training came to is a dict with at least `parameters`, `perplexity` (name of an evaluation set ->
perplexity, None where it is not finite) and `tokens_per_second`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfar.evaluation.comparison import aligned_table, number_or_dash
from nearfar.training.perplexity_log import plot_relative_perplexity, relative_perplexity

__all__ = ["compared_with", "comparison_figure", "comparison_table"]

Results = dict[str, dict[str, Any]]


def compared_with(baseline: str, results: Mapping[str, Mapping[str, Any]]) -> Results:
    """The results with `percent_of_baseline`, and without `row_losses`, hundreds of numbers that stay in `run.json`.

    Args:
        baseline: the variant that is 100 %.
        results: variant -> what came of it; left as they are.

    Raises:
        ValueError: no such variant.
    """
    if baseline not in results:
        raise ValueError(f"no variant is called {baseline!r}; there are {', '.join(results) or 'none'}")
    return {
        name: {
            **{key: value for key, value in result.items() if key != "row_losses"},
            "percent_of_baseline": relative_perplexity(dict(result), dict(results[baseline])),
        }
        for name, result in results.items()
    }


def comparison_figure(runs: Mapping[str, Path], path: Path, *, baseline: str, title: str) -> list[str]:
    """`plot_relative_perplexity` over runs' folders; lines that say why there is no figure, or none."""
    try:
        plot_relative_perplexity(runs, path, baseline=baseline, title=title)
    except (ImportError, ValueError) as error:  # no matplotlib, or nothing finite to draw
        return [f"no figure: {error}"]
    return []


def comparison_table(
    results: Mapping[str, Mapping[str, Any]],
    baseline: str,
    columns: Sequence[str],
    perplexities: Callable[[Mapping[str, Any]], Sequence[float | None]],
    *,
    rule: bool = True,
) -> str:
    """A line for each variant: parameters, perplexities, percent of the baseline's, tokens a second.

    Args:
        results: of `compared_with`.
        baseline: the variant that is 100 %.
        columns: titles of the perplexities.
        perplexities: of a variant's result, one for each of the columns.
        rule: whether there is a line under the titles.
    """
    rows = [
        [
            name,
            f"{result['parameters']:,}",
            *(number_or_dash(value, ".3f") for value in perplexities(result)),
            number_or_dash(result["percent_of_baseline"], ".2f"),
            number_or_dash(result["tokens_per_second"], ",.0f"),
        ]
        for name, result in results.items()
    ]
    return aligned_table(["variant", "parameters", *columns, f"% of {baseline}", "tokens/s"], rows, rule=rule)
