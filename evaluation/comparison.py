"""Cache policies side by side: one text, one budget, one set of questions; a table, a figure, a JSON file.

Every policy reads exactly the same token ids. What was held equal is not claimed but checked afterwards: each result
carries what it was measured on, and `held_equal` compares.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from nearfar.evaluation.context_reading import FULL
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.evaluation.needles import NeedleAnswer, NeedleContext, ask_needle, multi_needle_context
from nearfar.evaluation.perplexity import continuation_perplexity
from nearfar.evaluation.restoring import restored
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.budgets import check_budget
from nearfar.modeling.cache_kvzip import KVzipCache
from nearfar.modeling.cache_proxykv import ProxyKVCache
from nearfar.modeling.cache_registry import CACHES, cache_kept_pairs, cache_nbytes, make_cache
from nearfar.modeling.compat import cache_argument

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache


logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 2


@dataclass
class CacheResult:
    """What one policy did. Over several texts: means, the geometric mean of perplexity, sums of needles.

    Attributes:
        name, label: as registered.
        kept_pairs: key-value pairs held after prefill, over layers and key-value heads.
        cache_bytes: bytes that the cache's tensors take after prefill.
        perplexity: of the continuation, None if none was asked for.
        answers: one per needle.
        prefill_seconds: reading the context, scoring and eviction included: one forward pass, several for KVzip.
        decode_tokens_per_second: greedy decoding at batch 1, from the end of the context.
        context_tokens, context_digest, continuation_tokens, decode_tokens, needles_asked, budget, retention_ratio:
            what it was measured on.
        options: further arguments of the policy.
        error: why there are no figures, None if there are.
    """

    name: str
    label: str
    context_tokens: int
    context_digest: str
    continuation_tokens: int
    decode_tokens: int
    budget: int | None
    retention_ratio: float | None
    needles_asked: int
    options: dict[str, Any] = field(default_factory=dict)
    kept_pairs: float = 0
    cache_bytes: float = 0
    perplexity: float | None = None
    answers: list[NeedleAnswer] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_tokens_per_second: float | None = None
    error: str | None = None

    @property
    def needles_found(self) -> int:
        return sum(answer.hit for answer in self.answers)

    @property
    def answer_log_probability(self) -> float | None:
        """Mean log-probability of an answer's token: moves before hits do."""
        if not self.answers:
            return None
        return sum(answer.log_probability for answer in self.answers) / len(self.answers)


# --- measuring -------------------------------------------------------------------------------------------------------


def compare_caches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Sequence[str],
    names: Sequence[str] = (FULL, "streaming_llm", "proactive"),
    *,
    budget: int | None = None,
    retention_ratio: float | None = None,
    needles: int = 12,
    context_tokens: int = 3072,
    continuation_tokens: int = 256,
    decode_tokens: int = 32,
    seed: int = 0,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool = True,
) -> list[CacheResult]:
    """Measure each policy on each text, one prefill per policy and text.

    The context is the text's first `context_tokens` tokens with the needles inserted, inside the tokenizer's chat
    template if it has one. The continuation is what follows in the text; it is scored, and the questions are asked, on
    that one prefilled cache, which is restored in between.

    A policy that fails gets a result with `error` set; the others are measured all the same.

    Args:
        names: registered policies, in the order of the rows.
        budget, retention_ratio: exactly one of them, given to every policy (a full cache ignores it).
        needles: needles in each context; 0 for none.
        continuation_tokens: tokens scored for perplexity; 0 for none.
        decode_tokens: tokens of the timed greedy decoding; 0 for none.
        options: for a policy's name, further keyword arguments (`{"proactive": {"head": "linear"}}`).
        progress: show a progress bar on standard error.

    Raises:
        ValueError: an unknown or repeated name, no budget or two, a text that is too short, a count out of range.
    """
    options = dict(options or {})
    check_names(names)
    check_names(options, allow_empty=True)
    check_budget_arguments(budget, retention_ratio)
    for name, value in (("needles", needles), ("continuation_tokens", continuation_tokens)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if decode_tokens < 0:
        raise ValueError(f"decode_tokens must be at least 0, got {decode_tokens}")
    contexts = prepare_contexts(
        tokenizer,
        texts,
        needles=needles,
        context_tokens=context_tokens,
        continuation_tokens=continuation_tokens,
        seed=seed,
    )

    digest = hashlib.sha256(json.dumps([[c.context_ids, c.continuation_ids] for c in contexts]).encode()).hexdigest()
    results = []
    steps = len(names) * sum(3 + len(context.needles) for context in contexts)
    _warm_up(model, contexts[0])
    with tqdm(total=steps, disable=not progress, unit="step", leave=False, dynamic_ncols=True) as bar:
        for name in names:
            result = CacheResult(
                name=name,
                label=CACHES[name].label,
                context_tokens=sum(len(context.context_ids) for context in contexts),
                context_digest=digest,
                continuation_tokens=continuation_tokens,
                decode_tokens=decode_tokens,
                budget=budget,
                retention_ratio=retention_ratio,
                needles_asked=sum(len(context.needles) for context in contexts),
                options=dict(options.get(name, {})),
            )
            start = bar.n
            try:
                _measure(model, tokenizer, contexts, result, partial(_advance, bar, result.label))
            except Exception as error:  # one policy's failure must not hide the others
                logger.debug("policy %s failed", name, exc_info=True)
                result.error = f"{type(error).__name__}: {error}"
                bar.update(start + steps // len(names) - bar.n)
            results.append(result)
    return results


def check_names(names: Sequence[str] | Mapping[str, Any], *, allow_empty: bool = False) -> None:
    """Refuse unknown and repeated policy names, listing the known ones."""
    if isinstance(names, str):
        raise TypeError(f"names must be a sequence of names, got the string {names!r}")
    if not names and not allow_empty:
        raise ValueError(f"no cache named; choose from {', '.join(CACHES)}")
    for name in names:
        if name not in CACHES:
            raise ValueError(f"unknown cache {name!r}; choose from {', '.join(CACHES)}")
    if len(set(names)) != len(names):
        raise ValueError(f"a cache is named twice in {', '.join(names)}")


def check_budget_arguments(budget: int | None, retention_ratio: float | None) -> None:
    """Refuse anything but exactly one of a positive budget and a ratio in (0, 1], whatever policies make of it."""
    check_budget(budget, retention_ratio, sink_tokens=0, recent_tokens=None)


def prepare_contexts(
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Sequence[str],
    *,
    needles: int,
    context_tokens: int,
    continuation_tokens: int,
    seed: int,
) -> list[NeedleContext]:
    """The contexts that `compare_caches` measures on. Raises ValueError if a text is too short."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise ValueError("no text to compare the caches on")
    # One more token than is scored: the first one is only read (see `continuation_perplexity`).
    following = continuation_tokens + 1 if continuation_tokens else 0
    return [
        multi_needle_context(tokenizer, text, needles, context_tokens, seed + index, continuation_tokens=following)
        for index, text in enumerate(texts)
    ]


def prefill(
    model: PreTrainedModel,
    cache: Cache,
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[float, torch.Tensor]:
    """Read `ids` into `cache`: in one forward pass, or in those of a `KVzipCache`, or after a proxy's; all count.

    Args:
        tokenizer: what a `KVzipCache` needs.

    Returns:
        Seconds it took, and the logits of the last token, shape (1, vocabulary).
    """
    inputs = torch.tensor([list(ids)], device=model.get_input_embeddings().weight.device)
    synchronize(inputs.device)
    start = time.perf_counter()
    if isinstance(cache, ProxyKVCache) and cache.scores is None:
        cache.score_prompt(inputs)
    if isinstance(cache, KVzipCache) and inputs.shape[1] > 1:
        if tokenizer is None:
            raise ValueError("a KVzipCache needs the tokenizer to ask the model to repeat the context")
        # All but the last token, whose logits are wanted.
        cache.compress_context(model, inputs[:, :-1], tokenizer)
        inputs = inputs[:, -1:]
    with torch.no_grad():
        output = model(inputs, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
    if isinstance(cache, KVzipCache):
        cache.compress()  # the last token counts towards the budget too
    synchronize(inputs.device)
    return time.perf_counter() - start, output.logits[:, -1]


@torch.no_grad()
def decode_speed(model: PreTrainedModel, cache: Cache, logits: torch.Tensor, tokens: int) -> float:
    """Tokens a second of greedy decoding at batch 1, after two untimed steps; the cache is restored afterwards."""
    name = cache_argument(model)
    with restored(cache):
        start = 0.0
        for step in range(_WARM_UP_STEPS + tokens):
            if step == _WARM_UP_STEPS:
                synchronize(logits.device)
                start = time.perf_counter()
            token = logits.argmax(-1, keepdim=True).to(model.get_input_embeddings().weight.device)
            logits = model(token, **{name: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
        synchronize(logits.device)
        return tokens / (time.perf_counter() - start)


def _advance(bar: tqdm, label: str, what: str) -> None:
    bar.set_description(f"{label}: {what}", refresh=False)
    bar.update(1)


def _warm_up(model: PreTrainedModel, context: NeedleContext) -> None:
    """A short forward pass, so that the first policy does not pay for threads and kernels starting up."""
    inputs = torch.tensor([list(context.context_ids[:64])], device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        model(inputs, use_cache=False, logits_to_keep=1)


def _warm_up_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: NeedleContext, result: CacheResult
) -> None:
    """A short prefill that evicts: what a policy loads or compiles at first use does not count as its prefill."""
    cache = make_cache(result.name, model, retention_ratio=0.5, **result.options)
    prefill(model, cache, context.context_ids[:64], tokenizer)


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contexts: Sequence[NeedleContext],
    result: CacheResult,
    step: Callable[[str], None],
) -> None:
    """Fill in `result`."""
    pairs, sizes, nats, prefills, speeds = [], [], [], [], []
    _warm_up_policy(model, tokenizer, contexts[0], result)
    for context in contexts:
        cache = make_cache(
            result.name, model, budget=result.budget, retention_ratio=result.retention_ratio, **result.options
        )
        seconds, logits = prefill(model, cache, context.context_ids, tokenizer)
        step("prefill")
        prefills.append(seconds)
        pairs.append(cache_kept_pairs(cache))
        sizes.append(cache_nbytes(cache))
        for index, needle in enumerate(context.needles, 1):
            result.answers.append(ask_needle(model, cache, needle))
            step(f"needle {index} of {len(context.needles)}")
        if context.continuation_ids:
            nats.append(continuation_perplexity(model, cache, context.continuation_ids).nats)
        step("perplexity")
        if result.decode_tokens:
            speeds.append(decode_speed(model, cache, logits, result.decode_tokens))
        step("decode")
    result.kept_pairs = _mean(pairs)
    result.cache_bytes = _mean(sizes)
    result.prefill_seconds = _mean(prefills)
    result.perplexity = math.exp(min(_mean(nats), 700.0)) if nats else None
    result.decode_tokens_per_second = _mean(speeds) if speeds else None


def _mean(values: Sequence[float]) -> float:
    total = sum(values)
    # Integers stay integers where they can: 276480 pairs, not 276480.0.
    return total // len(values) if isinstance(total, int) and total % len(values) == 0 else total / len(values)


# --- telling ---------------------------------------------------------------------------------------------------------

_CONDITIONS = (
    "context_tokens",
    "context_digest",
    "continuation_tokens",
    "decode_tokens",
    "needles_asked",
    "budget",
    "retention_ratio",
)


def held_equal(results: Sequence[CacheResult]) -> dict[str, Any]:
    """The conditions under which all results were measured, name to value.

    Raises:
        ValueError: they were not measured under the same conditions, so they must not stand in one table.
    """
    for name in _CONDITIONS:
        values = {str(getattr(result, name)) for result in results}
        if len(values) > 1:
            raise ValueError(f"results with different {name} cannot be compared: {', '.join(sorted(values))}")
    return {name: getattr(results[0], name) for name in _CONDITIONS}


def format_bytes(count: float) -> str:
    """134.2 MB, decimal units."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def number_or_dash(value: float | None, form: str) -> str:
    """A number in a format such as ".2f"; a dash where there is none."""
    return "–" if value is None else format(value, form)


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, rule: bool = True) -> str:
    """Plain-text columns: the first to the left, the others to the right; `rule` is a line under the header."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def join(line: Sequence[str]) -> str:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        return "  ".join(cells).rstrip()

    under = ["  ".join("-" * width for width in widths)] if rule else []
    return "\n".join([join(lines[0]), *under, *map(join, lines[1:])])


def format_table(results: Sequence[CacheResult]) -> str:
    """The results as a plain-text table; under it one line for each policy that failed."""
    header = ["cache", "kept pairs", "bytes", "perplexity", "needles", "prefill s", "decode tok/s"]
    rows, failures = [], []
    for result in results:
        if result.error is not None:
            rows.append([result.label, "failed", "-", "-", "-", "-", "-"])
            failures.append(f"{result.label} failed: {result.error}")
            continue
        rows.append(
            [
                result.label,
                f"{result.kept_pairs:,.0f}",
                format_bytes(result.cache_bytes),
                "-" if result.perplexity is None else f"{result.perplexity:.2f}",
                f"{result.needles_found} of {result.needles_asked}" if result.needles_asked else "-",
                f"{result.prefill_seconds:.2f}",
                "-" if result.decode_tokens_per_second is None else f"{result.decode_tokens_per_second:.1f}",
            ]
        )
    return "\n".join([aligned_table(header, rows), *failures])


def plain_words(results: Sequence[CacheResult]) -> list[str]:
    """What was seen, one sentence or two a line, derived from the figures and from nothing else."""
    lines = [
        f"{result.label} could not be measured ({result.error})." for result in results if result.error is not None
    ]
    measured = [result for result in results if result.error is None]
    full = next((result for result in measured if result.name == FULL), None)
    pruned = [result for result in measured if result is not full]
    if full is not None:
        said = f"{full.label}: {full.kept_pairs:,.0f} pairs in {format_bytes(full.cache_bytes)}"
        lines.append(_sentence([said, _needle_words(full), _perplexity_words(full, None)]))
    for result in pruned:
        said = f"{result.label}: {result.kept_pairs:,.0f} pairs in {format_bytes(result.cache_bytes)}"
        if full is not None and full.kept_pairs and full.cache_bytes:
            if result.kept_pairs == full.kept_pairs:
                said += " (nothing had to be evicted: every pair of the full cache was kept)"
            else:
                said += (
                    f" ({100 * result.kept_pairs / full.kept_pairs:.1f} % of the full cache's pairs, "
                    f"{100 * result.cache_bytes / full.cache_bytes:.1f} % of its bytes)"
                )
        lines.append(_sentence([said, _needle_words(result), _perplexity_words(result, full)]))
    if len(pruned) > 1:
        lines += _ranking(pruned)
    if full is not None and full.needles_asked and full.needles_found < full.needles_asked:
        lines.append(
            f"The model itself, with nothing evicted, missed {full.needles_asked - full.needles_found} of "
            f"{full.needles_asked} needles: no policy is to blame for those."
        )
    return lines


def _ranking(pruned: Sequence[CacheResult]) -> list[str]:
    lines = []
    asked = pruned[0].needles_asked
    if asked:
        most = max(result.needles_found for result in pruned)
        best = [result.label for result in pruned if result.needles_found == most]
        least = min(result.needles_found for result in pruned)
        if most == least:
            lines.append(f"All pruned caches found equally many needles, {most} of {asked}.")
        else:
            lines.append(f"Most needles among the pruned caches: {listed(best)}, {most} of {asked}; fewest: {least}.")
            # Two independent hit counts near half of n differ by chance by about sqrt(n / 2), one standard deviation.
            if most - least <= math.sqrt(asked / 2):
                lines.append(f"With {asked} questions a difference of {most - least} may be chance.")
    with_perplexity = [(result.perplexity, result.label) for result in pruned if result.perplexity is not None]
    if len(with_perplexity) > 1:
        (low, best_label), (high, worst_label) = min(with_perplexity), max(with_perplexity)
        if f"{low:.2f}" == f"{high:.2f}":
            lines.append(f"Their perplexities are equal ({low:.2f}).")
        else:
            lines.append(f"Lowest perplexity among them: {best_label}, {low:.2f}; highest: {worst_label}, {high:.2f}.")
    return lines


def _needle_words(result: CacheResult) -> str:
    return f"{result.needles_found} of {result.needles_asked} needles found" if result.needles_asked else ""


def _perplexity_words(result: CacheResult, full: CacheResult | None) -> str:
    if result.perplexity is None:
        return ""
    words = f"perplexity {result.perplexity:.2f}"
    if full is not None and full.perplexity:
        change = 100 * (result.perplexity / full.perplexity - 1)
        words += f" ({change:+.1f} %)" if abs(change) >= 0.05 else " (as with the full cache)"
    return words


def _sentence(parts: Sequence[str]) -> str:
    return ", ".join(part for part in parts if part) + "."


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: "A", "A and B", "A, B and C"."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


# --- files -----------------------------------------------------------------------------------------------------------


def write_json(
    path: str | Path,
    results: Sequence[CacheResult],
    *,
    model: str | None,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    command: str | None = None,
    **more: Any,
) -> Path:
    """The results with everything needed to repeat them; written beside, then renamed. Arguments as `json_record`."""
    return write_record(path, json_record(results, model=model, device=device, seed=seed, command=command, **more))


def json_record(
    results: Sequence[CacheResult],
    *,
    model: str | None,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    command: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The results with everything needed to repeat them, for `write_record`.

    Args:
        results: may be empty, where `more` is what there is to tell.
        model: the model's id or folder.
        more: further JSON-ready entries (dtype, where the text came from).
    """
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "model": model,
        "seed": seed,
        **more,
        "held_equal": held_equal(results) if results else {},
        "machine": machine_report(device),
        "results": [
            {
                **vars(result),
                "answers": [asdict(answer) for answer in result.answers],
                "needles_found": result.needles_found,
                "answer_log_probability": result.answer_log_probability,
            }
            for result in results
        ],
    }


def write_record(path: str | Path, record: dict[str, Any]) -> Path:
    """Write what `json_record` returned; beside, then renamed."""
    # allow_nan=False: a NaN in a JSON file breaks other readers; figures that are not finite become strings. So do
    # options that are objects.
    text = json.dumps(_finite(record), indent=2, allow_nan=False, default=str)
    return write_beside(path, lambda file: file.write_text(text + "\n", encoding="utf-8"))


def write_figure(path: str | Path, results: Sequence[CacheResult], title: str = "") -> Path:
    """Quality against bytes as a PNG: perplexity and needles, one marker a policy; written beside, then renamed.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no policy was measured.
    """
    figure = draw_figure(results, title)
    return write_beside(path, lambda file: figure.savefig(file, dpi=150, format="png"))


_COLORS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_MARKERS = ("s", "o", "D", "^", "v", "P", "X", "*")


def draw_figure(results: Sequence[CacheResult], title: str = "") -> Figure:
    """The figure of `write_figure`. Each policy's numbers stand in the legend below, where nothing can overlap."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("drawing the figure needs matplotlib: pip install 'nearfar[demo]'") from error

    measured = [result for result in results if result.error is None]
    if not measured:
        raise ValueError("nothing to draw: no cache could be measured")
    with_perplexity = [result for result in measured if result.perplexity is not None]
    with_needles = [result for result in measured if result.needles_asked]
    panels = [kind for kind, some in (("perplexity", with_perplexity), ("needles", with_needles)) if some]
    legend_height = 0.3 * len(measured) + 0.35
    figure = Figure(figsize=(4.9 * max(len(panels), 1), 3.9 + legend_height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, max(len(panels), 1), squeeze=False)[0]
    handles: list[Any] = [None] * len(measured)
    for axis, kind in zip(axes, panels or ["bytes"], strict=True):
        for index, result in enumerate(measured):
            value = result.needles_found if kind == "needles" else result.perplexity
            if kind == "bytes" or value is None or (kind == "needles" and not result.needles_asked):
                value = 0 if kind == "bytes" else math.nan
            handles[index] = axis.plot(
                [result.cache_bytes / 1e6],
                [value],
                linestyle="none",
                marker=_MARKERS[index % len(_MARKERS)],
                color=_COLORS[index % len(_COLORS)],
                markersize=9,
                # Equal figures lie on top of each other: rings around a growing middle keep both visible.
                markerfacecolor="none" if index % 2 else _COLORS[index % len(_COLORS)],
                markeredgewidth=2,
                alpha=0.9,
                clip_on=False,
            )[0]
        axis.set_xlabel("cache, MB after prefill")
        axis.set_xlim(0, 1.08 * max(result.cache_bytes for result in measured) / 1e6 or 1)
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if kind == "needles":
            asked = with_needles[0].needles_asked
            axis.set_title(f"needles found of {asked} (higher is better)", fontsize=10)
            axis.set_ylim(-0.04 * asked, 1.04 * asked)
            axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        elif kind == "perplexity":
            axis.set_title("perplexity of the continuation (lower is better)", fontsize=10)
            values = [result.perplexity for result in with_perplexity if result.perplexity is not None]
            if max(values) > 4 * min(values):
                axis.set_yscale("log")
            else:
                margin = max(0.15 * (max(values) - min(values)), 0.02 * max(values))
                axis.set_ylim(min(values) - margin, max(values) + margin)
    figure.legend(
        handles,
        [_legend_words(result) for result in measured],
        loc="outside lower center",
        ncols=1,
        fontsize=9,
        frameon=False,
    )
    return figure


def _legend_words(result: CacheResult) -> str:
    parts = [f"{result.label}: {format_bytes(result.cache_bytes)}"]
    if result.perplexity is not None:
        parts.append(f"perplexity {result.perplexity:.2f}")
    if result.needles_asked:
        parts.append(f"{result.needles_found} of {result.needles_asked} needles")
    return ", ".join(parts)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
