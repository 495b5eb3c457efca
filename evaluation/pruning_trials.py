"""Trials of pruning policies: contexts, what each policy's cache keeps of them, and what the model then still knows.

A measurement is one dictionary, JSON-ready: `kind`, `trial`, `variant` and `size` say what was measured, all else are
figures. `evaluation/measurement_file.py` keeps them, `evaluation/pruning_tables.py` makes tables of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from transformers import Cache

from nearfar.evaluation.context_reading import FULL
from nearfar.evaluation.needles import NeedleContext, ask_needle
from nearfar.evaluation.perplexity import continuation_perplexity
from nearfar.evaluation.pruned_reading import Reading
from nearfar.modeling.cache_registry import cache_kept_pairs
from nearfar.modeling.kvzip_scores import RepeatPrompt
from nearfar.modeling.pruned_cache import PrunedCache


@dataclass
class Variant:
    """A policy with its options.

    Attributes:
        label: names it in measurements and tables.
        policy: its registered name; "peer" for one that is not ours.
        make: an empty cache, called with a size: `budget` or `retention_ratio`.
    """

    label: str
    policy: str
    make: Callable[..., Cache]


@dataclass
class Trial:
    """One context and the sizes at which it is compressed.

    Attributes:
        kind: "needle" or "essay"; `index` counts those of a kind.
        context: with a needle or without one.
        sizes: each with one entry, `budget` or `retention_ratio`.
    """

    kind: str
    index: int
    context: NeedleContext
    sizes: list[dict[str, Any]] = field(default_factory=list)


def measure(
    model: Any, prompt: RepeatPrompt, variants: Sequence[Variant], trial: Trial, done: AbstractSet[Hashable]
) -> Iterator[dict[str, Any]]:
    """Measurements of one trial whose keys are not in `done`, one dictionary each, as they come."""
    with_mass = trial.kind == "needle" and any(variant.policy == "kvzip" for variant in variants)
    everything = [(None, {}), *((variant, size) for size in trial.sizes for variant in variants)]
    keys = wanted_keys(trial, [variant.label for variant in variants])
    wanted = [pair for pair, key in zip(everything, keys, strict=True) if key not in done]
    if not wanted:
        return
    reading = Reading(model, trial.context, prompt)
    for variant, size in wanted:
        record = _describe(trial, None if variant is None else variant.label, size)
        cache: Cache = reading.full
        if variant is None:
            record["prefill_seconds"] = reading.prefill_seconds
        else:
            cache = variant.make(**size)
            assert isinstance(cache, PrunedCache)
            scoring, eviction = reading.fill(cache)
            record |= {
                "eviction_share": eviction / reading.prefill_seconds,
                "scoring_share": scoring / reading.prefill_seconds,
            }
            if with_mass:
                record["kvzip_mass"] = reading.kvzip_mass(cache)
        record["kept_pairs"] = cache_kept_pairs(cache)
        if trial.context.needles:
            answer = ask_needle(model, cache, trial.context.needles[0])
            record |= {"hit": answer.hit, "log_probability": answer.log_probability}
        if trial.context.continuation_ids:
            record["nats"] = continuation_perplexity(model, cache, trial.context.continuation_ids).nats
        yield record


def wanted_keys(trial: Trial, labels: Sequence[str]) -> list[tuple[Any, ...]]:
    """Keys of all measurements of a trial: the full cache, then at each size those with these labels."""
    places: list[tuple[str | None, dict[str, Any]]] = [(None, {})]
    places += [(label, size) for size in trial.sizes for label in labels]
    return [measurement_key(_describe(trial, *place)) for place in places]


def measurement_key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one measurement from all others of a run."""
    return record["kind"], record["trial"], record["variant"], record["size"]


def _describe(trial: Trial, label: str | None, size: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": trial.kind,
        "trial": trial.index,
        "variant": label or FULL,
        "size": next(iter(size.values()), None),
    }
