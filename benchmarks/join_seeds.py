"""Join runs of examples/train_dar.py or train_language_model.py that differ in their seed: what is more than chance.

    python examples/train_dar.py … --sweep bottlenecks --seed 0 --output runs/0
    python examples/train_dar.py … --sweep bottlenecks --seed 1 --output runs/1
    python benchmarks/join_seeds.py runs/0 runs/1 --out runs/joined

A seed is both the weights' and the order of the blocks. All variants of one seed share them, so variants are compared
within each seed, by the logarithm of their perplexity; what is left after variants' and seeds' own means is the noise.

- `% of baseline`: mean over the seeds of the perplexity relative to the same seed's baseline; `± 95 %` the half-width
  of its interval, a t interval whose noise is pooled over all variants (with n seeds and k variants of (n - 1)(k - 1)
  degrees of freedom; a variant that is much noisier than the others gets too narrow a one).
- `blocks 95 %`: what the choice of held-out blocks leaves open, by bootstrap over these, paired with the baseline's:
  the lowest end and the highest of the seeds' intervals. It says nothing about other seeds.
- Pairs: a difference counts as shown when its interval, at 95 % for all pairs together (Bonferroni), is free of 0.

Written to --out: joined.json, joined.txt (the tables), relative_perplexity.png (in % of the baseline along training,
the mean over the seeds; the band is from the lowest seed to the highest), and windows.png where DAR's windows were
swept. Needed of a run: each variant's run.json and perplexity.jsonl. Figures need matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.evaluation.comparison import aligned_table, number_or_dash
from nearfar.modeling.atomic_file import write_beside
from nearfar.training.perplexity_log import read_perplexity_log

BASELINES = ("vanilla", "decoder")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#222222")
STYLES = ("-", ":", "-.")


@dataclass(frozen=True)
class Run:
    """One --output folder: settings, and of each finished variant its `result` and its evaluations."""

    folder: Path
    settings: dict[str, Any]
    results: dict[str, dict[str, Any]]
    logs: dict[str, list[dict[str, Any]]]

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])


# --- reading ---------------------------------------------------------------------------------------------------------


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Settings that are not the same; those that a run does not name, being older, are `None`."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def read_run(folder: Path) -> Run:
    """The finished variants in a folder.

    Raises:
        ValueError: none, or variants with different settings.
    """
    settings: dict[str, Any] = {}
    results: dict[str, dict[str, Any]] = {}
    logs: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*/run.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        if not run.get("result"):
            continue
        name = file.parent.name
        if settings and differing(run["settings"], settings):
            raise ValueError(f"{folder}: {name} was trained with other settings than {next(iter(results))}")
        settings, results[name], logs[name] = run["settings"], run["result"], read_perplexity_log(file.parent)
    if not results:
        raise ValueError(f"{folder} holds no finished variant (a folder with a run.json that has a result)")
    return Run(folder, settings, results, logs)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs that differ in nothing but their seed.

    Raises:
        ValueError: they do, or two have the same seed.
    """
    runs = sorted((read_run(folder) for folder in folders), key=lambda run: run.seed)
    for before, after in itertools.pairwise(runs):
        if before.seed == after.seed:
            raise ValueError(f"{before.folder} and {after.folder} have the same seed, {after.seed}")
        others = [name for name in differing(before.settings, after.settings) if name != "seed"]
        if others:
            raise ValueError(
                f"{before.folder} and {after.folder} differ in more than their seed: {others[0]} is "
                f"{before.settings.get(others[0])!r} and {after.settings.get(others[0])!r}"
            )
    return runs


def natural(name: str) -> list[Any]:
    """Sorts `dar-w4` before `dar-w16`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# --- statistics ------------------------------------------------------------------------------------------------------


def t_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t; SciPy is no dependency.

    Raises:
        ValueError: not 0.5 <= share < 1, or no degree of freedom.
    """
    if not 0.5 <= share < 1 or freedom < 1:
        raise ValueError(f"share must be in [0.5, 1) and freedom at least 1, got {share} and {freedom}")
    # With t = sqrt(f) tan a, the density over a is cos(a)^(f - 1), which is smooth on a finite range.
    angle = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    found = float(np.interp((share - 0.5) * 2 * mass[-1], mass, angle))
    return math.sqrt(freedom) * math.tan(found)


def log_perplexities(runs: Sequence[Run], names: Sequence[str]) -> np.ndarray:
    """Logarithm of the last perplexity, the mean over the evaluation sets, `(seeds, variants)`.

    Raises:
        ValueError: one is missing or not finite: that variant diverged.
    """
    rows = []
    for run in runs:
        row = []
        for name in names:
            losses = list(run.results[name]["loss"].values())
            if not losses or any(loss is None for loss in losses):
                raise ValueError(f"{run.folder / name} has no finite loss at its end: leave it out (--without {name})")
            row.append(sum(losses) / len(losses))
        rows.append(row)
    return np.array(rows)


@dataclass(frozen=True)
class Noise:
    """What is left of log-perplexities `(seeds, variants)` after the means of seeds and of variants.

    Attributes:
        deviation: of one log-perplexity; None with one seed or one variant.
        freedom: degrees of freedom.
        seeds: how many.
    """

    deviation: float | None
    freedom: int
    seeds: int

    @classmethod
    def of(cls, logs: np.ndarray) -> Noise:
        seeds, variants = logs.shape
        freedom = (seeds - 1) * (variants - 1)
        if not freedom:
            return cls(None, 0, seeds)
        left = logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()
        return cls(math.sqrt(float((left**2).sum()) / freedom), freedom, seeds)

    def half_width(self, share: float) -> float | None:
        """Of the two-sided interval with that share, of a difference between two variants' means."""
        if self.deviation is None:
            return None
        return t_quantile(0.5 + share / 2, self.freedom) * self.deviation * math.sqrt(2 / self.seeds)


def bootstrap_interval(
    mine: dict[str, list[float]], its: dict[str, list[float]], samples: int, seed: int
) -> tuple[float, float]:
    """95 % interval of the perplexity in % of the baseline's, over blocks drawn anew, the same for both.

    Each evaluation set's blocks are drawn by themselves, and sets count alike, as in `log_perplexities`.
    """
    random = np.random.default_rng(seed)
    means = np.zeros(samples)
    for name, losses in mine.items():
        difference = np.asarray(losses) - np.asarray(its[name])
        drawn = random.integers(len(difference), size=(samples, len(difference)))
        means += difference[drawn].mean(1) / len(mine)
    low, high = np.quantile(means, (0.025, 0.975))
    return 100 * math.exp(low), 100 * math.exp(high)


def block_interval(runs: Sequence[Run], name: str, baseline: str, samples: int) -> tuple[float, float] | None:
    """The seeds' bootstrap intervals from the lowest end to the highest; None where a run kept no losses of blocks."""
    ends = []
    for run in runs:
        mine, its = (run.results[one].get("row_losses") for one in (name, baseline))
        if not mine or not its:
            return None
        ends.append(bootstrap_interval(mine, its, samples, run.seed))
    return min(low for low, _ in ends), max(high for _, high in ends)


def percent(log_ratio: float) -> float:
    """Of a difference of log-perplexities, how much more in %."""
    return 100 * math.expm1(log_ratio)


def join(runs: Sequence[Run], names: Sequence[str], baseline: str, samples: int) -> dict[str, Any]:
    """Everything that the tables and figures show."""
    logs = log_perplexities(runs, names)
    noise = Noise.of(logs)
    alone = noise.half_width(0.95)
    base = list(names).index(baseline)
    rows = []
    for column, name in enumerate(names):
        ratios = logs[:, column] - logs[:, base]
        results = [run.results[name] for run in runs]
        perplexities = np.exp(logs[:, column])
        speeds = [result["tokens_per_second"] for result in results if result.get("tokens_per_second")]
        rows.append({
            "variant": name,
            "parameters": results[0]["parameters"],
            "perplexity": {"mean": float(perplexities.mean()), "seeds": perplexities.tolist(),
                           "deviation": float(perplexities.std(ddof=1)) if len(runs) > 1 else None},
            "percent": {"mean": 100 * math.exp(ratios.mean()), "seeds": (100 * np.exp(ratios)).tolist(),
                        "half_width": None if alone is None or column == base
                        else 100 * math.exp(ratios.mean()) * alone,
                        "blocks": None if column == base else block_interval(runs, name, baseline, samples)},
            "tokens_per_second": sum(speeds) / len(speeds) if speeds else None,
            "seconds": sum(result["seconds"] for result in results) / len(results),
        })  # fmt: skip
    pairs = list(itertools.combinations(range(len(names)), 2))
    wide = noise.half_width(1 - 0.05 / len(pairs)) if pairs else None
    compared: list[dict[str, Any]] = []
    for first, second in pairs:
        difference = logs[:, second] - logs[:, first]
        if difference.mean() < 0:
            first, second, difference = second, first, -difference
        compared.append({
            "lower": names[first], "higher": names[second], "percent": percent(difference.mean()),
            "half_width": None if wide is None else 100 * math.exp(difference.mean()) * wide,
            "seeds_agree": int((difference > 0).sum()),
            "shown": None if wide is None else bool(difference.mean() > wide),
        })  # fmt: skip
    compared.sort(key=lambda pair: pair["percent"], reverse=True)
    order = [names[index] for index in np.argsort(logs.mean(0), kind="stable")]
    shown = {(pair["lower"], pair["higher"]): pair["shown"] for pair in compared}
    return {
        "settings": {key: value for key, value in runs[0].settings.items() if key != "seed"},
        "seeds": [run.seed for run in runs],
        "baseline": baseline,
        "noise": {"percent": None if noise.deviation is None else percent(noise.deviation), "freedom": noise.freedom},
        "variants": rows,
        "order": order,
        "neighbours_shown": [shown.get(pair) for pair in itertools.pairwise(order)],
        "pairs": compared,
    }


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(joined: dict[str, Any]) -> str:
    """The table of variants, the order, and the pairs."""

    seeds, baseline = joined["seeds"], joined["baseline"]
    header = ["variant", "parameters", "perplexity", "sd", f"% of {baseline}", "± 95 %", "each seed", "blocks 95 %"]
    rows = []
    for row in joined["variants"]:
        share, blocks = row["percent"], row["percent"]["blocks"]
        rows.append([
            row["variant"], f"{row['parameters']:,}", f"{row['perplexity']['mean']:.3f}",
            number_or_dash(row["perplexity"]["deviation"], ".3f"), f"{share['mean']:.2f}",
            number_or_dash(share["half_width"], ".2f"),
            " ".join(f"{value:.2f}" for value in share["seeds"]),
            "–" if blocks is None else f"{blocks[0]:.2f}–{blocks[1]:.2f}",
            number_or_dash(row["tokens_per_second"], ",.0f"),
        ])  # fmt: skip
    noise = joined["noise"]
    count = f"seeds {', '.join(map(str, seeds))}"
    note = (
        f"{count}; noise of one perplexity {noise['percent']:.2f} %, {noise['freedom']} degrees of freedom"
        if noise["percent"] is not None
        else f"{count}: noise takes two seeds and two variants at least, and nothing is said about other seeds"
    )
    signs = {True: "<", False: "≈", None: "?"}
    order = joined["order"][0]
    for name, shown in zip(joined["order"][1:], joined["neighbours_shown"], strict=True):
        order += f" {signs[shown]} {name}"
    lines = [aligned_table([*header, "tokens/s"], rows), "", note, ""]
    if len(joined["order"]) > 1:
        lines += [f"order by mean perplexity (< shown, ≈ not shown by these seeds, ? too few seeds): {order}", ""]
        verdicts = {True: "shown", False: "not shown", None: "–"}
        lines.append(
            aligned_table(
                ["lower perplexity", "higher", "by %", "± (95 % for all pairs)", "seeds that agree", ""],
                [
                    [
                        pair["lower"],
                        pair["higher"],
                        f"{pair['percent']:.2f}",
                        number_or_dash(pair["half_width"], ".2f"),
                        f"{pair['seeds_agree']} of {len(seeds)}",
                        verdicts[pair["shown"]],
                    ]
                    for pair in joined["pairs"]
                ],
            )
        )
    return "\n".join(lines)


# --- figures ---------------------------------------------------------------------------------------------------------


def new_figure(size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing figures needs matplotlib: pip install 'nearfar[eval]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure, axis


def save(figure: Any, path: Path) -> Path:
    return write_beside(path, lambda file: figure.savefig(file, dpi=150, format="png"))


def curves(runs: Sequence[Run], name: str, baseline: str) -> list[tuple[int, list[float]]]:
    """Tokens of training -> perplexity in % of the same seed's baseline, a number a seed, at steps that all have."""
    joined: dict[int, list[float]] = {}
    for run in runs:
        base = {line["step"]: line for line in run.logs[baseline] if line["step"]}
        for line in run.logs[name]:
            mine, its = line["loss"], base.get(line["step"], {}).get("loss", {})
            if its and all(mine.get(name) is not None and its[name] is not None for name in its):
                # The sets' mean loss, as in the table.
                value = 100 * math.exp(sum(mine[name] - its[name] for name in its) / len(its))
                joined.setdefault(line["tokens"], []).append(value)
    return sorted((tokens, values) for tokens, values in joined.items() if len(values) == len(runs))


def draw_trajectories(runs: Sequence[Run], joined: dict[str, Any], path: Path, title: str) -> Path | None:
    """The paper's Figure 3. None where there is nothing to draw.

    The vertical axis shows in full what lies beyond the first tenth of training: before, ratios are those of luck.
    """
    from matplotlib.ticker import EngFormatter

    baseline = joined["baseline"]
    drawn = {row["variant"]: curves(runs, row["variant"], baseline) for row in joined["variants"]}
    drawn = {name: curve for name, curve in drawn.items() if curve and name != baseline}
    if not drawn:
        return None
    figure, axis = new_figure((7.6, 4.4))
    axis.axhline(100, color="#222222", linewidth=1.2, linestyle="--", label=f"{baseline} (100 %)", zorder=1)
    end = max(curve[-1][0] for curve in drawn.values())
    settled: list[float] = [100.0]
    for index, (name, curve) in enumerate(drawn.items()):
        color, style = COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]
        tokens = [at for at, _ in curve]
        means = [math.exp(sum(map(math.log, values)) / len(values)) for _, values in curve]  # as in the table
        axis.plot(tokens, means, color=color, linestyle=style, linewidth=1.6, label=f"{name}: {means[-1]:.2f} %")
        if len(runs) > 1:
            lows, highs = [min(values) for _, values in curve], [max(values) for _, values in curve]
            axis.fill_between(tokens, lows, highs, color=color, alpha=0.15, linewidth=0)
        settled += [value for at, values in curve if at >= 0.1 * end for value in values]
    margin = max(0.08 * (max(settled) - min(settled)), 0.25)
    axis.set_ylim(min(settled) - margin, max(settled) + margin)
    axis.set_xlim(0, 1.02 * end)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_xlabel("training tokens")
    seeds = len(runs)
    axis.set_ylabel(f"perplexity, % of {baseline}" + (f" (mean and range of {seeds} seeds)" if seeds > 1 else ""))
    axis.set_title(title, fontsize=10)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return save(figure, path)


def draw_windows(joined: dict[str, Any], path: Path, title: str) -> Path | None:
    """Perplexity by DAR's window, one line for each bottleneck; None unless one has three windows."""
    swept: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for row in joined["variants"]:
        if match := re.fullmatch(r"dar-w(\d+)-d(\d+)", row["variant"]):
            swept.setdefault(int(match[2]), []).append((int(match[1]), row["percent"]))
    swept = {size: sorted(rows, key=lambda row: row[0]) for size, rows in swept.items() if len(rows) >= 3}
    if not swept:
        return None
    figure, axis = new_figure((6.4, 4.0))
    places = {window: place for place, window in enumerate(sorted({w for rows in swept.values() for w, _ in rows}))}
    axis.axhline(100, color="#222222", linewidth=1.2, linestyle="--", label=f"{joined['baseline']} (100 %)", zorder=1)
    for index, (size, rows) in enumerate(sorted(swept.items())):
        color = COLORS[index % len(COLORS)]
        at = [places[window] for window, _ in rows]
        means = [share["mean"] for _, share in rows]
        if all(share["half_width"] is None for _, share in rows):
            axis.plot(at, means, "o-", color=color, label=f"bottleneck {size}")
        else:
            widths = [share["half_width"] or 0.0 for _, share in rows]  # the baseline's own has none
            axis.errorbar(at, means, widths, fmt="o-", color=color, capsize=3, label=f"bottleneck {size}, ± 95 %")
            dots = [(place, value) for place, (_, share) in zip(at, rows, strict=True) for value in share["seeds"]]
            x, y = zip(*dots, strict=True)
            axis.plot(x, y, "_", color=color, markersize=9, label="each seed")
    axis.set_xticks(list(places.values()), [str(window) for window in places])
    axis.set_xlabel("window w, tokens")
    axis.set_ylabel(f"perplexity, % of {joined['baseline']}")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8, frameon=False)
    return save(figure, path)


# --- arguments -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR", help="an --output of the training script, one a seed")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--baseline", help=f"the 100 %% (default: {' or '.join(BASELINES)})")
    add("--without", action="append", default=[], metavar="VARIANT", help="leave it out; repeatable")
    add("--bootstrap", type=int, default=2000, metavar="SAMPLES", help="of the held-out blocks")
    add("--title", default="", help="of the figures")
    options = parser.parse_args(argv)
    try:
        if options.bootstrap < 1:
            raise ValueError(f"--bootstrap must be at least 1, got {options.bootstrap}")
        runs = read_runs(options.runs)
        everywhere = set.intersection(*(set(run.results) for run in runs))
        anywhere = set.union(*(set(run.results) for run in runs))
        if unknown := sorted(set(options.without) - anywhere, key=natural):
            known = ", ".join(sorted(anywhere, key=natural))
            raise ValueError(f"--without {unknown[0]}: no run has a finished variant of that name; there are {known}")
        names = sorted(everywhere - set(options.without), key=natural)
        baseline = options.baseline or next((name for name in BASELINES if name in names), None)
        if baseline not in names:
            raise ValueError(
                f"the baseline {baseline or ' or '.join(BASELINES)} is not among the variants that all runs have "
                f"({', '.join(names) or 'none'}): give --baseline"
            )
        names = [baseline, *(name for name in names if name != baseline)]
        joined = join(runs, names, baseline, options.bootstrap)
    except (ValueError, OSError, KeyError) as error:
        parser.error(" ".join(str(error).split()))

    text = tables(joined)
    if missing := sorted(anywhere - everywhere, key=natural):
        text += f"\n\nnot finished in all runs, and left out: {', '.join(missing)}"
    content = json.dumps(joined, indent=1) + "\n"
    write_beside(options.out / "joined.json", lambda file: file.write_text(content, encoding="utf-8"))
    write_beside(options.out / "joined.txt", lambda file: file.write_text(text + "\n", encoding="utf-8"))
    print(text)
    settings = joined["settings"]
    rows = settings.get("window_tokens") or settings.get("block_tokens", 0)
    title = options.title or f"{settings['steps'] * settings['batch_size'] * rows:,} tokens of training"
    try:
        drawn = [
            draw_trajectories(runs, joined, options.out / "relative_perplexity.png", title),
            draw_windows(joined, options.out / "windows.png", title),
        ]
        print("\n" + "\n".join(str(path) for path in drawn if path))
    except ImportError as error:
        print(f"\nno figures: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
