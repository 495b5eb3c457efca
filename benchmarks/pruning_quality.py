"""Needles found and perplexity of every pruning policy, by how much of the cache is kept.

    python benchmarks/pruning_quality.py                                  # SmolLM2-135M, 40 trials; hours on a CPU
    python benchmarks/pruning_quality.py --device cuda --out results/     # resumes where an interrupted run stopped
    python benchmarks/pruning_quality.py --trials 4 --ratios 0.25 --policies streaming_llm,proactive
    python benchmarks/pruning_quality.py --budgets 128,256,512 --out results/    # fixed budgets in place of ratios
    python benchmarks/pruning_quality.py --out results/ --table                  # what is there so far, at once

A small model uses a fraction of a GPU. Several processes share one folder, each with its part of the trials::

    for i in 0 1 2 3; do python benchmarks/pruning_quality.py --device cuda --out results/ --shard $i/4 & done; wait
    python benchmarks/pruning_quality.py --out results/ --table

Each trial: one context of --context-tokens with one needle, prefilled once with a full cache; every policy takes that
cache over (`PrunedCache.ingest`, which evicts for real and is identical to a prefill with the policy itself), at every
ratio; then the question is asked and the text's continuation scored. The question is unseen when a policy evicts.
Policies that judge pairs by queries (SnapKV, H2O) read the context themselves, at every ratio anew; KVzip has it
repeated once a trial and evicts by these scores at every ratio. IAM and ProxyKV take part with --proxy (and, for
ProxyKV, --mapper); the proxy reads a context once a trial. The chat template's header is kept by KVzip, IAM and
ProxyKV, whose scores do not cover it.

Besides, perplexity alone on plain essays (no needle, no chat template) at one fixed budget, or at each of --budgets:
--essay-trials, --essay-context, --essay-budget. A budget is of tokens a layer: of pairs for each of its key-value
heads, on average.

Columns, for each ratio or budget: hits = needles found; log-prob = mean log-probability of the answer's tokens; ppl =
perplexity of the continuation, geometric mean over trials. essays = perplexity of the essays at a fixed budget.
scoring and eviction = median time that the policy's scores, and all of it (scores, top-K, copying what is kept), take,
in % of the full prefill; where a policy reads the context itself, what its reading takes longer than the full cache's.
Above the tables stand the machines that the measurements in them were made on.

A second table sets all policies beside KVzip, if it takes part: hits in % of KVzip's, and mass = how much of KVzip's
scores (header left out) stands in the pairs that a policy keeps, as a share of what KVzip itself keeps of it.

--peers: scores of kvpress's presses, if it is installed, on the same footing (same cache, budget, positions).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

from nearfar import cli
from nearfar.evaluation.comparison import aligned_table, prefill
from nearfar.evaluation.file_lock import held_lock
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.evaluation.needles import NeedleContext, ask_needle, needle_trials
from nearfar.evaluation.perplexity import continuation_perplexity
from nearfar.evaluation.texts import Text, load_texts
from nearfar.modeling.cache_kvzip import KVzipCache
from nearfar.modeling.cache_proxykv import ProxyKVCache
from nearfar.modeling.cache_registry import CACHES, cache_kept_pairs, make_cache
from nearfar.modeling.kvzip_scores import Reconstruction, RepeatPrompt, reconstruction_scores
from nearfar.modeling.pending_scores import PendingScores
from nearfar.modeling.prunable_models import text_config
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates
from nearfar.modeling.received_attention import NO_COLUMN

# Packaged essays that are long enough, less those that the packaged prototypes were fitted on.
HELD_OUT = cli.HELD_OUT_ESSAYS

# The proactive cache's heads and allocations. SnapKV takes part with equal and with shared budgets, any other policy
# as it is registered.
FULL = "full"
MAIN_PROACTIVE = (("linear", "global"), ("prototypes", "global"))
PROACTIVE = (
    ("linear", "global"),
    ("prototypes", "global"),
    ("mlp", "global"),
    ("cosine", "uniform"),
    ("cosine", "global"),
    ("linear", "head"),
    ("linear", "uniform"),
    ("prototypes", "head"),
    ("prototypes", "uniform"),
)


# kvpress's policies that need no second pass over the context.
PEERS = ("StreamingLLM", "SnapKV", "ExpectedAttention", "Knorm")


@dataclass
class Variant:
    """One row of the table: a policy with its options."""

    label: str
    policy: str
    make: Callable[..., Cache]


@dataclass
class Trial:
    """One context and the sizes at which it is compressed (`budget` or `retention_ratio`)."""

    kind: str
    index: int
    context: NeedleContext
    sizes: list[dict[str, Any]] = field(default_factory=list)


# --- what is measured ------------------------------------------------------------------------------------------------


def list_variants(
    model: Any,
    policies: Sequence[str],
    prototypes: str | None,
    proactive: Sequence[tuple[str, str]] = PROACTIVE,
    given: dict[str, dict[str, Any]] | None = None,
) -> list[Variant]:
    """All rows but the full cache's and the peers'.

    Args:
        proactive: heads and allocations of the proactive cache.
        given: further arguments of a policy, for all of its rows.
    """
    variants = []
    for name in policies:
        if name == "full":
            continue
        options: list[dict[str, Any]] = [{}]
        if name == "proactive":
            options = [{"head": head, "allocation": allocation} for head, allocation in proactive]
        elif name == "snapkv":
            options = [{"allocation": "uniform"}, {"allocation": "global"}]
        for chosen in options:
            label = ", ".join([CACHES[name].label, *chosen.values()])
            if CACHES[name].needs_prototypes and prototypes is not None:
                chosen = {**chosen, "prototypes": prototypes}
            chosen = {**(given or {}).get(name, {}), **chosen}
            variants.append(Variant(label, name, _maker(name, model, chosen)))
    return variants


def _maker(name: str, model: Any, options: dict[str, Any]) -> Callable[..., Cache]:
    return lambda **size: make_cache(name, model, **size, **options)


def usable(variants: Sequence[Variant], size: dict[str, Any]) -> list[Variant]:
    """The variants that can be made with a size; of the others, why not is printed."""
    found = []
    for variant in variants:
        try:
            variant.make(**size)
        except (ValueError, TypeError) as error:
            print(f"left out: {variant.label} ({error})", file=sys.stderr)
        else:
            found.append(variant)
    return found


def make_trials(tokenizer: Any, texts: Sequence[Text], args: argparse.Namespace) -> list[Trial]:
    # One more token than is scored: the first one is only read.
    following = args.continuation_tokens + 1 if args.continuation_tokens else 0
    needed = args.context_tokens + following
    lengths = {
        text.name: len(tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids) for text in texts
    }
    long_enough = [text for text in texts if lengths[text.name] >= needed]
    if not long_enough:
        raise cli.UserError(
            f"no text has the {needed} tokens that a trial needs; the longest has {max(lengths.values())}"
        )
    contexts = needle_trials(
        tokenizer,
        [text.text for text in long_enough],
        args.trials,
        args.context_tokens,
        args.seed,
        continuation_tokens=following,
    )
    trials = [Trial("needle", index, context, args.needle_sizes) for index, context in enumerate(contexts)]
    plain = [text for text in texts if lengths[text.name] > args.essay_context + args.essay_continuation]
    for index, text in enumerate(plain[: args.essay_trials]):
        ids = tuple(tokenizer(text.text, verbose=False).input_ids)
        stop = args.essay_context
        context = NeedleContext((), ids[:stop], (), ids[stop : stop + args.essay_continuation + 1])
        trials.append(Trial("essay", index, context, args.essay_sizes))
    return trials


class Reading:
    """One context, read with a full cache, and how pruned caches come to hold it.

    Attributes:
        full: the full cache.
        prefill_seconds: how long that took.
    """

    def __init__(self, model: Any, context: NeedleContext, prompt: RepeatPrompt) -> None:
        self.model, self.context, self.prompt = model, context, prompt
        self.full = DynamicCache(config=text_config(model))
        self.prefill_seconds, _ = prefill(model, self.full, context.context_ids)
        self._repeated: tuple[Reconstruction, float] | None = None
        self._scored: dict[int, tuple[PendingScores, float]] = {}

    def fill(self, cache: PrunedCache) -> tuple[float, float]:
        """Compress the context into `cache`, which is empty.

        Returns:
            Seconds of scoring, and of all that came to the full cache's prefill.
        """
        if isinstance(cache, KVzipCache):
            repeated, scoring = self._repeat()
            return scoring, scoring + self._timed(lambda: cache.ingest_scored(repeated))
        if isinstance(cache, ProxyKVCache):
            pending, scoring = self._read_by_proxy(cache)
            cache.expect(pending)
            return scoring, scoring + self._timed(lambda: cache.ingest(self.full))
        with timed_scores(cache, self.model.device) as scores:
            if cache.watches_queries:
                seconds, _ = prefill(self.model, cache, self.context.context_ids)
                eviction = max(seconds - self.prefill_seconds, sum(scores))
            else:
                eviction = self._timed(lambda: cache.ingest(self.full))
        return sum(scores), eviction

    def _repeat(self) -> tuple[Reconstruction, float]:
        """KVzip's scores, which no budget changes, and the seconds that they took beside the prefill."""
        if self._repeated is None:
            ids, prefix = self.context.context_ids, len(self.context.prefix_ids)
            start = time.perf_counter()
            found = reconstruction_scores(self.model, ids, self.prompt, prefix_length=prefix)
            synchronize(self.model.device)
            self._repeated = found, time.perf_counter() - start - self.prefill_seconds
        return self._repeated

    def _read_by_proxy(self, cache: ProxyKVCache) -> tuple[PendingScores, float]:
        """The proxy's scores, which no budget changes, and the seconds that they took."""
        key = id(cache.scorer)
        if key not in self._scored:
            ids = torch.tensor([list(self.context.context_ids)], device=self.model.device)
            start = time.perf_counter()
            cache.score_prompt(ids)
            synchronize(self.model.device)
            assert cache.scores is not None
            self._scored[key] = cache.scores, time.perf_counter() - start
        return self._scored[key]

    def kvzip_mass(self, cache: PrunedCache) -> float:
        """Share of KVzip's scores, the header's left out, that stands in the pairs that a cache keeps."""
        repeated, _ = self._repeat()
        prefix, kept, total = len(self.context.prefix_ids), 0.0, 0.0
        for layer in cache.ragged_layers:
            scores = repeated.scores[layer.layer_idx][0].clone()  # (heads, n)
            scores[:, :prefix] = 0
            with layer.awake():
                _, _, columns = layer.store.rectangle()
            held = columns[0] != NO_COLUMN
            found = scores.gather(1, columns[0].masked_fill(~held, 0).to(scores.device).long())
            kept += float((found * held.to(scores.device)).sum())
            total += float(scores.sum())
        return kept / total

    def _timed(self, work: Callable[[], Any]) -> float:
        synchronize(self.model.device)
        start = time.perf_counter()
        work()
        synchronize(self.model.device)
        return time.perf_counter() - start


def measure(
    model: Any, prompt: RepeatPrompt, variants: Sequence[Variant], trial: Trial, done: set[tuple[Any, ...]]
) -> Iterator[dict[str, Any]]:
    """Measurements of one trial that are not in `done`, one dictionary each."""
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
    """Of all measurements of a trial: the full cache, then at each size those with these labels."""
    places: list[tuple[str | None, dict[str, Any]]] = [(None, {})]
    places += [(label, size) for size in trial.sizes for label in labels]
    return [_key(_describe(trial, *place)) for place in places]


def _describe(trial: Trial, label: str | None, size: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": trial.kind,
        "trial": trial.index,
        "variant": label or FULL,
        "size": next(iter(size.values()), None),
    }


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["kind"], record["trial"], record["variant"], record["size"]


@contextlib.contextmanager
def timed_scores(cache: PrunedCache, device: torch.device) -> Iterator[list[float]]:
    """Seconds of each call of the policy's `score`."""
    seconds: list[float] = []
    score = cache.score

    def timed(states: TokenStates) -> torch.Tensor:
        synchronize(device)
        start = time.perf_counter()
        scores = score(states)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        return scores

    cache.score = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del cache.score


# --- peers -----------------------------------------------------------------------------------------------------------


class PeerCache(PrunedCache):
    """kvpress's score for each layer, in our cache: the same budget in every head, as kvpress has it."""

    def __init__(self, model: Any, press: Any, inputs: AttentionInputs, **size: Any) -> None:
        super().__init__(model, allocation="uniform", sink_tokens=0, recent_tokens=1, **size)
        self.press, self.inputs = press, inputs

    def score(self, states: TokenStates) -> torch.Tensor:
        module, hidden, kwargs = self.inputs.seen[states.layer_idx]
        if states.keys.shape[2] != hidden.shape[1]:  # tokens after the prefill, about to be forgotten by a restore
            return states.positions[:, None].expand(states.keys.shape[:3]).float()
        # A press may score by how much it is to remove (StreamingLLM's does).
        kept = self.retention_ratio if self.budget is None else self.budget / hidden.shape[1]
        self.press.compression_ratio = 1 - (kept or 0.0)
        scores: torch.Tensor = self.press.score(module, hidden, states.keys, states.values, None, kwargs)
        return scores


class AttentionInputs:
    """What each attention layer was given in the last prefill: presses look at hidden states."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[int, tuple[Any, torch.Tensor, dict[str, Any]]] = {}
        for layer in model.model.layers:
            # Presses look for the rotary embedding on the attention module.
            layer.self_attn.rotary_emb = model.model.rotary_emb
            layer.self_attn.register_forward_hook(self._remember, with_kwargs=True)

    def _remember(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"]
        if hidden.shape[1] > 512:  # a prefill, not a question or a piece of a continuation
            self.seen[module.layer_idx] = (module, hidden, {"position_embeddings": kwargs["position_embeddings"]})


def list_peers(model: Any) -> list[Variant]:
    """Some of kvpress's policies; none, with a line that says so, if kvpress cannot be imported."""
    try:
        kvpress = importlib.import_module("kvpress")
        presses = [getattr(kvpress, f"{name}Press") for name in PEERS]
    except (ImportError, AttributeError) as error:
        print(f"no peers: kvpress cannot be used here ({error})", file=sys.stderr)
        return []
    inputs = AttentionInputs(model)

    def variant(press: Any) -> Variant:
        def make(**size: Any) -> Cache:
            return PeerCache(model, press(), inputs, **size)

        return Variant(f"kvpress {press.__name__.removesuffix('Press')}", "peer", make)

    return [variant(press) for press in presses]


# --- records and table -----------------------------------------------------------------------------------------------


class Records:
    """Measurements, kept in memory and, if there is a folder, appended to a file as they come.

    Several processes may append to one file: a line is written at once, under a lock. The first line has the settings
    and the machine that began it, each other one a measurement and the machine that it was made on, which older files
    do not tell. What two processes measured alike counts once.

    Args:
        folder: None keeps them in memory only.
        settings: what all measurements have in common; None takes what the file says.
        machine: that measures; goes into each row that is added.

    Attributes:
        rows: the measurements.
        settings: of the file.
        begun_on: the machine that began the file.
    """

    def __init__(
        self, folder: Path | None, settings: dict[str, Any] | None, machine: dict[str, Any] | None = None
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.machine = self.begun_on = machine
        self.settings = settings or {}
        self.file: Path | None = None
        self._keys: set[tuple[Any, ...]] = set()
        self._read = 0  # bytes of the file
        if folder is None:
            return
        self.file = folder / "measurements.jsonl"
        header = self._header()
        if header is None:
            if settings is None:
                raise cli.UserError(f"{self.file}: nothing has been measured there")
            folder.mkdir(parents=True, exist_ok=True)
            with held_lock(folder / ".beginning.lock"):
                header = self._header()  # another process may have been first
                if header is None:
                    header = {"settings": settings, "machine": machine}
                    self._append(header)
        before = header["settings"]
        self.begun_on = header.get("machine")
        # Runs before there were --budgets had the essays' one budget there, which a measurement's key has.
        before = {**before, "essay": before["essay"][:2]}
        changed = [name for name in settings or {} if before.get(name) != self.settings[name]]
        if changed:
            raise cli.UserError(
                f"{self.file} was measured with another {', '.join(changed)}; give another --out, or the same "
                f"arguments as before ({', '.join(f'{name}={before.get(name)}' for name in changed)})"
            )
        self.settings = before
        self.refresh()

    def refresh(self) -> set[tuple[Any, ...]]:
        """Take in what other processes have added; returns the keys of all that is there."""
        for row in self._new_rows():
            if "settings" not in row:
                self._keep(row)
        return self._keys

    def _header(self) -> dict[str, Any] | None:
        """The file's first whole line, once there is one."""
        found = next(iter(self._new_rows()), None)
        self._read = 0
        return found

    def add(self, row: dict[str, Any]) -> None:
        if self.machine:
            row = {**row, "machine": self.machine}
        if self._keep(row) and self.file is not None:
            self._append(row)

    def _keep(self, row: dict[str, Any]) -> bool:
        new = _key(row) not in self._keys
        if new:
            self._keys.add(_key(row))
            self.rows.append(row)
        return new

    def _new_rows(self) -> list[dict[str, Any]]:
        """Whole lines that were not read before, but for halves that a process which was killed has left."""
        if self.file is None or not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")
        self._read += sum(len(part) for part in whole[:2])
        rows = []
        for line in whole[0].decode().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    def _append(self, row: dict[str, Any]) -> None:
        assert self.file is not None
        with held_lock(self.file.with_name(".measurements.lock")), self.file.open("ab+") as file:
            # After a process that was killed in the middle of a line.
            torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            file.write((b"\n" if torn else b"") + json.dumps(row).encode() + b"\n")


def summarize(
    rows: Sequence[dict[str, Any]], labels: Sequence[str], sizes: Sequence[float], budgets: Sequence[int]
) -> str:
    """The table.

    Args:
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


# --- command line ----------------------------------------------------------------------------------------------------


def _ratios(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _budgets(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"a shard is I/N with I from 0 to N - 1, got {text}")
    return int(index), int(count)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="id, folder or packaged name (default: SmolLM2-135M-Instruct, packaged)")
    parser.add_argument("--essays", nargs="+", help="text files or folders (default: packaged essays, held out)")
    parser.add_argument("--policies", help="comma-separated registered names (default: all)")
    parser.add_argument("--prototypes", help="for the proactive cache (default: packaged)")
    parser.add_argument("--proxy", help="a small model of the target's family, for iam and proxykv (folder or id)")
    parser.add_argument("--mapper", help="the mapper trained for both, for proxykv (folder or id)")
    parser.add_argument(
        "--main-heads",
        action="store_true",
        help="of the proactive cache only linear and prototypes with shared budgets",
    )
    parser.add_argument("--seconds", type=float, help="begin no further trial after so long; --out goes on later")
    parser.add_argument("--peers", action="store_true", help="also kvpress's scores, if it is installed")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--context-tokens", type=int, default=1900)
    parser.add_argument("--continuation-tokens", type=int, default=256, help="scored after each context; 0 for none")
    parser.add_argument("--ratios", type=_ratios, default=[0.1, 0.25, 0.5])
    parser.add_argument("--budgets", type=_budgets, help="in place of ratios: tokens a layer; also of the essays")
    parser.add_argument("--essay-trials", type=int, default=3, help="plain essays at a fixed budget; 0 for none")
    parser.add_argument("--essay-context", type=int, default=3072)
    parser.add_argument("--essay-continuation", type=int, default=512)
    parser.add_argument("--essay-budget", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the measurements; the same folder resumes")
    parser.add_argument(
        "--shard", type=_shard, metavar="I/N", help="only the trials i with i mod N = I; N processes may share --out"
    )
    parser.add_argument("--table", action="store_true", help="only print what --out holds; needs no other argument")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    if args.trials < 1:
        parser.error("--trials must be at least 1")
    if any(not 0 < ratio < 1 for ratio in args.ratios):
        parser.error("--ratios must lie in (0, 1)")
    if args.budgets is not None and any(budget < 1 for budget in args.budgets):
        parser.error("--budgets must be at least 1")
    if (args.table or args.shard is not None) and args.out is None:
        parser.error(f"{'--table' if args.table else '--shard'} needs --out")
    args.needle_sizes = [{"retention_ratio": ratio} for ratio in args.ratios]
    if args.budgets is not None:
        args.needle_sizes = [{"budget": budget} for budget in args.budgets]
    args.essay_sizes = [{"budget": budget} for budget in args.budgets or [args.essay_budget]]
    named = args.policies is not None
    args.policies = args.policies.split(",") if named else list(CACHES)
    unknown = [name for name in args.policies if name not in CACHES]
    if unknown:
        parser.error(f"unknown policy {unknown[0]!r}; known: {', '.join(CACHES)}")
    sources = cli.proxy_sources(args)
    for flag, needed in (("proxy", "needs_proxy"), ("mapper", "needs_mapper")):
        lacking = [name for name in args.policies if getattr(CACHES[name], needed) and sources[flag] is None]
        if named and lacking:
            parser.error(f"{lacking[0]} needs --{flag}")
        args.policies = [name for name in args.policies if name not in lacking]
    if args.seconds is not None and not args.seconds > 0:
        parser.error("--seconds must be positive")
    return args


def run(args: argparse.Namespace) -> None:
    if args.table:
        print_everything(Records(args.out, None))
        return
    texts = load_texts(args.essays) if args.essays else held_out_essays()
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    source = cli.model_source(args.model)
    tokenizer = cli.load_tokenizer(source)
    trials = make_trials(tokenizer, texts, args)
    settings = {
        "model": args.model or cli.DEMO_MODEL,
        "dtype": str(dtype).removeprefix("torch."),
        "texts": [text.name for text in texts],
        "seed": args.seed,
        "trials": args.trials,  # a needle's depth depends on it
        "context_tokens": args.context_tokens,
        "continuation_tokens": args.continuation_tokens,
        "prototypes": args.prototypes,
        "proxy": args.proxy,
        "mapper": args.mapper,
        "essay": [args.essay_context, args.essay_continuation],
    }
    cli.set_threads(args, device)
    records = Records(args.out, settings, machine_report(device))
    index, count = args.shard or (0, 1)
    mine = trials[index::count]
    heads = MAIN_PROACTIVE if args.main_heads else PROACTIVE
    labels = [variant.label for variant in list_variants(None, args.policies, args.prototypes, heads)]
    if args.peers or left_over(mine, labels, records):
        labels = measure_trials(args, mine, records, device, dtype, source, tokenizer, heads)
    left = left_over(trials, labels, records)
    if args.shard is not None:
        own = left_over(mine, labels, records)
        print(f"shard {index}/{count}: {len(mine) - own} of {len(mine)} trials measured; --table prints all shards'")
        return
    if left:
        print(f"\n{len(trials) - left} of {len(trials)} trials so far: the same command goes on")
    sizes, budgets = ([next(iter(size.values())) for size in of] for of in (args.needle_sizes, args.essay_sizes))
    print_results(records, [FULL, *labels], sizes, budgets)


def left_over(trials: Sequence[Trial], labels: Sequence[str], records: Records) -> int:
    """Trials of which a measurement is lacking."""
    done = records.refresh()
    return sum(any(key not in done for key in wanted_keys(trial, labels)) for trial in trials)


def measure_trials(
    args: argparse.Namespace,
    trials: Sequence[Trial],
    records: Records,
    device: torch.device,
    dtype: torch.dtype,
    source: str,
    tokenizer: Any,
    heads: Sequence[tuple[str, str]],
) -> list[str]:
    """Measure what is lacking; returns the labels of the policies that can be measured."""
    model = cli.load_model(source, device, dtype)
    given: dict[str, dict[str, Any]] = {name: {} for name in args.policies}
    cli.add_scorers(given, args, tokenizer, device, dtype)
    smallest = min(args.needle_sizes + args.essay_sizes, key=lambda size: size.get("budget", math.inf))
    variants = usable(list_variants(model, args.policies, args.prototypes, heads, given), smallest)
    if args.peers:
        variants += list_peers(model)
    labels = [variant.label for variant in variants]
    if not left_over(trials, labels, records):
        return labels
    prompt = RepeatPrompt.from_tokenizer(tokenizer)
    warm_up(model, prompt, variants, trials[0])
    done = records.refresh()
    total = sum(key not in done for trial in trials for key in wanted_keys(trial, labels))
    begin = time.perf_counter()
    with tqdm(total=total, unit="measurement", dynamic_ncols=True) as bar:
        for trial in trials:
            if args.seconds is not None and time.perf_counter() - begin > args.seconds:
                break
            bar.set_description(f"{trial.kind} {trial.index + 1}", refresh=False)
            for record in measure(model, prompt, variants, trial, records.refresh()):
                if args.shard is not None:
                    record["shard"] = list(args.shard)
                records.add(record)
                bar.update()
    return labels


def print_results(records: Records, labels: Sequence[str], sizes: Sequence[float], budgets: Sequence[int]) -> None:
    """Conditions and both tables."""
    settings = records.settings
    shown = shown_rows(records.rows, labels, sizes, budgets)
    print("\n" + "\n".join(machine_lines(shown, settings["dtype"], records.begun_on)) + "\n\nHeld equal:")
    print(f"  model {settings['model']}, {settings['dtype']}; true positions; questions unseen when evicting")
    if any("shard" in row for row in shown):
        print("  several processes measured at once: scoring and eviction are times of a shared machine")
    print(
        f"  needles: {settings['trials']} contexts of {settings['context_tokens']} tokens and one needle, seed "
        f"{settings['seed']}; {settings['continuation_tokens']} tokens scored; {kind_of(sizes)} of the pairs, sinks "
        "and recent tokens included"
    )
    context, following = settings["essay"]
    essays = len({row["trial"] for row in records.rows if row["kind"] == "essay"})
    print(
        f"  essays: {essays} contexts of {context} tokens, budget {', '.join(map(str, budgets)) or '-'}, {following} "
        "tokens scored\n"
    )
    print(summarize(records.rows, labels, sizes, budgets))
    if beside := beside_kvzip(records.rows, labels, sizes):
        print(f"\nBeside KVzip:\n\n{beside}")


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
    return "ratios" if all(size < 1 for size in sizes) else "budgets"


def print_everything(records: Records) -> None:
    """What a folder holds, ratios and budgets apart."""
    seen = {row["variant"] for row in records.rows}
    known = [FULL, *(variant.label for variant in list_variants(None, list(CACHES), None))]
    labels = [label for label in known if label in seen]
    labels += sorted(seen.difference(known))
    needles, essays = (
        sorted({row["size"] for row in records.rows if row["kind"] == kind and row["size"] is not None})
        for kind in ("needle", "essay")
    )
    tables = [sizes for kind in ("ratios", "budgets") if (sizes := [n for n in needles if kind_of([n]) == kind])]
    for sizes in tables or [[]]:
        print_results(records, labels, sizes, essays)


def warm_up(model: Any, prompt: RepeatPrompt, variants: Sequence[Variant], trial: Trial) -> None:
    """First calls load scorers and start threads; they must not count as scoring."""
    prefix = trial.context.prefix_ids
    reading = Reading(model, NeedleContext(prefix, trial.context.body_ids[: 600 - len(prefix)], ()), prompt)
    for variant in variants:
        cache = variant.make(retention_ratio=0.5)
        assert isinstance(cache, PrunedCache)
        reading.fill(cache)


def held_out_essays() -> list[Text]:
    from nearfar.conversion.packaged_model import packaged_essays_dir

    texts = {Path(text.name).stem: text for text in load_texts([packaged_essays_dir()])}
    return [texts[name] for name in HELD_OUT if name in texts]


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
