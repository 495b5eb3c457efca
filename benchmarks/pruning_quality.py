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
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache

from nearfar import cli
from nearfar.evaluation.context_reading import FULL
from nearfar.evaluation.kvpress_peers import list_peers
from nearfar.evaluation.machine import machine_report
from nearfar.evaluation.measurement_file import Records
from nearfar.evaluation.needles import NeedleContext, needle_trials
from nearfar.evaluation.pruned_reading import Reading
from nearfar.evaluation.pruning_tables import beside_kvzip, kind_of, machine_lines, shown_rows, summarize
from nearfar.evaluation.pruning_trials import Trial, Variant, measure, measurement_key, wanted_keys
from nearfar.evaluation.texts import Text, load_texts
from nearfar.modeling.cache_registry import CACHES, make_cache
from nearfar.modeling.kvzip_scores import RepeatPrompt
from nearfar.modeling.pruned_cache import PrunedCache

# Packaged essays that are long enough, less those that the packaged prototypes were fitted on.
HELD_OUT = cli.HELD_OUT_ESSAYS

# The proactive cache's heads and allocations. SnapKV takes part with equal and with shared budgets, any other policy
# as it is registered.
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
        print_everything(open_records(args.out, None))
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
    records = open_records(args.out, settings, machine_report(device))
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


def open_records(
    folder: Path | None, settings: dict[str, Any] | None, machine: dict[str, Any] | None = None
) -> Records:
    """The measurements of a folder; `settings` and `machine` as those of `Records`."""

    def upgrade(before: dict[str, Any]) -> dict[str, Any]:
        # Runs before there were --budgets had the essays' one budget there, which a measurement's key has.
        return {**before, "essay": before["essay"][:2]}

    path = None if folder is None else folder / "measurements.jsonl"
    return Records(path, settings, machine, key=measurement_key, upgrade=upgrade)


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
        try:
            variants += list_peers(model)
        except ImportError as error:
            print(f"no peers: kvpress cannot be used here ({error})", file=sys.stderr)
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
