"""Perplexity along a training run: a Trainer callback that logs it, and the figure that compares runs.

One JSON object a line, `perplexity.jsonl` in the run's folder; `tokens` and `seconds` are those of training so far,
without evaluating and saving::

    {"step": 100, "tokens": 52428800, "seconds": 91.2, "loss": {"held_out": 4.1}, "perplexity": {"held_out": 60.3}}
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainerCallback

from nearfar.modeling.atomic_file import write_beside

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = [
    "LOG_NAME",
    "PerplexityLog",
    "plot_relative_perplexity",
    "read_perplexity_log",
    "relative_perplexity",
    "tokens_per_second",
]

LOG_NAME = "perplexity.jsonl"

# Step and values of a line; see the module's docstring.
Line = dict[str, Any]


class PerplexityLog(TrainerCallback):
    """Writes a line to `<output_dir>/perplexity.jsonl` at every evaluation.

    Each of several evaluation sets (a dict as the Trainer's `eval_dataset`) has its entry in the line; a single one is
    called "eval". When a run is resumed, lines after the resumed step are dropped, and the time goes on from the last
    line that stays; a run from step 0 starts a new file.

    Args:
        tokens_per_step: tokens that all processes together read in one optimiser step.
    """

    def __init__(self, tokens_per_step: int) -> None:
        if tokens_per_step < 1:
            raise ValueError(f"tokens_per_step must be at least 1, got {tokens_per_step}")
        self.tokens_per_step = tokens_per_step
        self.lines: list[Line] = []
        self._seconds = 0.0
        self._since: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        file = Path(args.output_dir, LOG_NAME)
        resumed = bool(state.global_step) and file.is_file()
        lines = read_perplexity_log(file) if resumed else []
        self.lines = [line for line in lines if line["step"] <= state.global_step]
        self._seconds = self.lines[-1]["seconds"] if self.lines else 0.0
        self._since = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The clock stops for whatever is not training, which the Trainer does between the steps.
        if self._since is not None and (
            control.should_evaluate or control.should_save or control.should_training_stop
        ):
            if args.device.type == "cuda":
                torch.cuda.synchronize(args.device)  # else the steps still queued would count as evaluation
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float],
        **kwargs: Any,
    ) -> None:
        # Called once for each evaluation set: the sets of one step share a line.
        if not self.lines or self.lines[-1]["step"] != state.global_step:
            tokens = state.global_step * self.tokens_per_step
            line = {"step": state.global_step, "tokens": tokens, "seconds": round(self._seconds, 3)}
            self.lines.append({**line, "loss": {}, "perplexity": {}})
        for key, loss in metrics.items():
            if match := re.fullmatch(r"eval_(?:(.+)_)?loss", key):
                name = match[1] or "eval"
                self.lines[-1]["loss"][name] = loss if math.isfinite(loss) else None
                self.lines[-1]["perplexity"][name] = math.exp(loss) if loss < 700 else None
        if state.is_world_process_zero:
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in self.lines)
            write_beside(Path(args.output_dir, LOG_NAME), lambda file: file.write_text(text, encoding="utf-8"))


def read_perplexity_log(path: str | Path) -> list[Line]:
    """The lines of a log, in the order of their steps.

    Args:
        path: the file, or the folder that holds it as `perplexity.jsonl`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a line is no entry of such a log.
    """
    path = Path(path)
    path = path / LOG_NAME if path.is_dir() else path
    lines: list[Line] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int) or not isinstance(line["perplexity"], dict):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: no entry of a perplexity log") from None
        lines.append(line)
    return sorted(lines, key=lambda line: line["step"])


def tokens_per_second(lines: Sequence[Line]) -> float | None:
    """Training speed over a log; the first stretch, with compiling and warming up, is left out if there are others.

    Returns:
        Tokens a second, all processes together; None if the log covers no time.
    """
    first, last = (lines[1] if len(lines) > 2 else lines[0], lines[-1]) if lines else ({}, {})
    seconds = last.get("seconds", 0.0) - first.get("seconds", 0.0)
    return (last["tokens"] - first["tokens"]) / seconds if seconds > 0 else None


def relative_perplexity(line: Line, baseline: Line, eval_set: str | None = None) -> float | None:
    """Perplexity in percent of the baseline's: the mean over the evaluation sets, or that of one set.

    Returns:
        Percent; None where a perplexity is missing or not finite.
    """
    names = list(baseline["perplexity"]) if eval_set is None else [eval_set]
    pairs = [(line["perplexity"].get(name), baseline["perplexity"].get(name)) for name in names]
    if not pairs or any(mine is None or its is None for mine, its in pairs):
        return None
    return 100 * sum(mine / its for mine, its in pairs) / len(pairs)


def plot_relative_perplexity(
    runs: Mapping[str, str | Path],
    path: str | Path,
    *,
    baseline: str = "vanilla",
    against: Literal["tokens", "step"] = "tokens",
    eval_set: str | None = None,
    title: str = "",
) -> Path:
    """Draw runs' perplexity in percent of one run's at the same step (the paper's Figure 3) as a PNG.

    The vertical axis shows what lies beyond the first tenth of training in full: before, models differ by luck, and
    their ratios would flatten all that follows.

    Args:
        runs: name in the legend -> the run's log, or the folder that holds it.
        path: the PNG; written beside, then renamed.
        baseline: name of the run that is 100 %.
        against: the horizontal axis: training tokens or optimiser steps.
        eval_set: one evaluation set; None for the mean of the ratios over all.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no such baseline, or no run with a step that the baseline was evaluated at.
        FileNotFoundError: a run without log.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise ImportError("drawing the figure needs matplotlib: pip install 'nearfar[eval]'") from error
    if against not in ("tokens", "step"):
        raise ValueError(f"against must be 'tokens' or 'step', got {against!r}")
    if baseline not in runs:
        raise ValueError(f"no run is called {baseline!r} to be the 100 %; there are {', '.join(runs) or 'none'}")
    logs = {name: read_perplexity_log(run) for name, run in runs.items()}
    base = {line["step"]: line for line in logs[baseline] if line["step"]}
    curves = {
        name: [
            (line[against], value)
            for line in lines
            if line["step"] in base and (value := relative_perplexity(line, base[line["step"]], eval_set)) is not None
        ]
        for name, lines in logs.items()
    }
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        raise ValueError(f"no evaluation of any run can be compared with one of {baseline!r} at the same step")

    end = max(line[against] for line in base.values())
    settled = [value for curve in curves.values() for at, value in curve if at >= 0.1 * end]
    low, high = min(settled, default=100.0), max(settled, default=100.0)
    margin = max(0.08 * (high - low), 0.25)

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.axhline(100, color="#222222", linewidth=1.2, linestyle="--", label=f"{baseline} (100 %)", zorder=1)
    for index, (name, curve) in enumerate((name, curve) for name, curve in curves.items() if name != baseline):
        color, style = _COLORS[index % len(_COLORS)], _STYLES[index // len(_COLORS) % len(_STYLES)]
        steps, values = zip(*curve, strict=True)
        marker = "o" if len(curve) <= 30 else None
        label = f"{name}: {values[-1]:.2f} %"
        axis.plot(steps, values, color=color, linestyle=style, linewidth=1.5, marker=marker, markersize=3, label=label)
    axis.set_ylim(low - margin, high + margin)
    axis.set_xlim(0, 1.02 * end)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_xlabel("training tokens" if against == "tokens" else "step")
    axis.set_ylabel(f"perplexity, % of {baseline}" + (f" ({eval_set})" if eval_set else ""))
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if title:
        axis.set_title(title, fontsize=10)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return write_beside(path, lambda file: figure.savefig(file, dpi=150, format="png"))


_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_STYLES = ("-", ":", "-.")
