"""Decoding after pruning: tokens a second, and the largest batch, with a pruned cache against a full one.

    python benchmarks/pruned_decode.py --device cuda --out results/          # Llama-3.1-8B's shape, 32 K and 125 K
    python benchmarks/pruned_decode.py --shape tiny --lengths 256 --batches 1,2 --device cpu --threads 1

The model has random weights. The full cache (transformers' DynamicCache, which copies what it holds at every step) is
filled with random keys and values; the pruned ones take one row of it over (`PrunedCache.ingest`, which evicts for
real, the kept pairs chosen at random: "even" as many in every head, "ragged" by one threshold for all layers and
heads) and repeat it for the batch. What a step costs depends on how many pairs there are, not on which.

Columns: pairs kept of all; bytes of the cache; tokens a second over the batch, from the median step of --steps; where
memory ends (GPU only): the largest batch with which --steps go through, found from below, and its tokens a second.
Rows are written as they come; the same command with the same --out goes on.
Where rows come from several machines, a line for each says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from prefill import make_model
from transformers import Cache, DynamicCache

from nearfar import cli
from nearfar.evaluation.comparison import aligned_table, format_bytes
from nearfar.evaluation.kept_rows import KeptRows
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.cache_random import RandomCache
from nearfar.modeling.cache_registry import cache_kept_pairs, cache_nbytes
from nearfar.modeling.compat import cache_argument

LENGTHS = {"llama": "32768,128000", "tiny": "256,512"}
SYSTEMS = {"full": "full cache", "even": "pruned, even heads", "ragged": "pruned, ragged heads"}
WARM_UP_STEPS = 3
HEADER = ["tokens", "cache", "batch", "kept, %", "bytes", "tokens/s", "ms/step"]


@torch.no_grad()
def full_cache(model: Any, tokens: int, batch: int, seed: int) -> DynamicCache:
    """Random keys and values; all rows alike."""
    config = model.config
    generator = torch.Generator(model.device).manual_seed(seed)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, tokens, config.head_dim)
        keys, values = (
            torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype) for _ in range(2)
        )
        if batch > 1:
            keys, values = (states.repeat(batch, 1, 1, 1) for states in (keys, values))
        cache.update(keys, values, layer)
    return cache


def make(system: str, model: Any, tokens: int, batch: int, ratio: float, seed: int) -> Cache:
    """A cache that has seen `tokens` in each of `batch` rows."""
    if system == "full":
        return full_cache(model, tokens, batch, seed)
    allocation = "global" if system == "ragged" else "uniform"
    cache = RandomCache(model, retention_ratio=ratio, allocation=allocation, seed=seed)
    cache.ingest(full_cache(model, tokens, 1, seed))
    gc.collect()
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    return cache


@torch.no_grad()
def decode(model: Any, cache: Cache, batch: int, steps: int) -> float:
    """Seconds of the median step."""
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    times = []
    for step in range(WARM_UP_STEPS + steps):
        synchronize(model.device)
        start = time.perf_counter()
        logits = model(token, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        synchronize(model.device)
        if step >= WARM_UP_STEPS:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(system: str, model: Any, tokens: int, batch: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """One row, or None where memory does not suffice."""
    config = model.config
    pairs = batch * tokens * config.num_hidden_layers * config.num_key_value_heads
    _collect(model.device)
    try:
        cache = make(system, model, tokens, batch, args.retention_ratio, args.seed)
        kept, size = cache_kept_pairs(cache) / pairs, cache_nbytes(cache)
        seconds = decode(model, cache, batch, args.steps)
    except torch.OutOfMemoryError:
        return None
    finally:
        cache = None
        _collect(model.device)
    return {
        "tokens": tokens,
        "system": system,
        "batch": batch,
        "kept": kept,
        "bytes": size,
        "seconds": seconds,
        "tokens_per_second": batch / seconds,
    }


def largest(system: str, model: Any, tokens: int, args: argparse.Namespace, one: dict[str, Any]) -> dict[str, Any]:
    """The row of the largest batch that goes through: an estimate from the bytes of one row, then step by step."""
    free, _ = torch.cuda.mem_get_info(model.device)
    batch = max(1, int(0.9 * free / one["bytes"]))
    row = measure(system, model, tokens, batch, args)
    while row is None and batch > 1:
        batch = max(1, min(batch - 1, round(batch * 0.94)))
        row = measure(system, model, tokens, batch, args)
    while row is not None:  # upwards, as long as it goes
        more = measure(system, model, tokens, row["batch"] + max(1, row["batch"] // 25), args)
        if more is None:
            return {**row, "largest": True}
        row = more
    return {**one, "largest": True}


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _place(row: dict[str, Any]) -> tuple[int, int, bool, int]:
    """What rows are sorted by."""
    return row["tokens"], list(SYSTEMS).index(row["system"]), "largest" in row, row["batch"]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['tokens']:,}",
        SYSTEMS[row["system"]],
        f"{row['batch']}{' (largest)' if row.get('largest') else ''}",
        f"{100 * row['kept']:.1f}",
        format_bytes(row["bytes"]),
        f"{row['tokens_per_second']:.1f}",
        f"{1000 * row['seconds']:.2f}",
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(LENGTHS), help="of the model (default: llama on a GPU, tiny on a CPU)")
    parser.add_argument("--lengths", help="tokens seen, comma-separated (default: by shape)")
    parser.add_argument("--batches", default="1,4", help="comma-separated; those that do not fit are left out")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}, comma-separated")
    parser.add_argument("--no-largest", action="store_true", help="do not look for the largest batch")
    parser.add_argument("--retention-ratio", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="begin no further row after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for pruned_decode.json, which the next run adds to")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    args.systems = args.systems.split(",")
    if unknown := [name for name in args.systems if name not in SYSTEMS]:
        parser.error(f"unknown system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    if args.steps < 1 or not 0 < args.retention_ratio <= 1:
        parser.error("--steps must be at least 1, --retention-ratio in (0, 1]")
    return args


def run(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    cli.set_threads(args, device)
    if device.type == "cuda":
        # torch's cuDNN attention plans anew for every length it meets, which costs a growing cache milliseconds a
        # layer and step; the other kernels do not, so no cache is measured with it.
        torch.backends.cuda.enable_cudnn_sdp(False)
    shape = args.shape or ("llama" if device.type == "cuda" else "tiny")
    lengths = [int(text) for text in (args.lengths or LENGTHS[shape]).split(",")]
    batches = [int(text) for text in args.batches.split(",")]
    if min(lengths) < 64 or min(batches) < 1:
        raise ValueError("--lengths must be at least 64 tokens each, --batches at least 1")
    machine = machine_report(device)
    settings = {"shape": shape, "dtype": str(dtype), "retention_ratio": args.retention_ratio}
    settings |= {"steps": args.steps, "seed": args.seed}
    path = None if args.out is None else args.out / "pruned_decode.json"
    kept = KeptRows(path, settings, machine, order=_place)
    print(f"{json.dumps(machine)}\n", flush=True)
    torch.manual_seed(args.seed)
    model = make_model(shape, 0, max(lengths) + args.steps + WARM_UP_STEPS, device, dtype)

    def add(row: dict[str, Any]) -> None:
        kept.add(row)
        print("  ".join(_cells(row)), flush=True)

    def over() -> bool:
        return args.seconds is not None and time.perf_counter() - begin >= args.seconds

    for tokens in lengths:
        for system in args.systems:
            for batch in batches:
                key = {"tokens": tokens, "system": system, "batch": batch, "largest": None}
                if kept.has(**key):
                    continue
                if over():
                    break
                row = measure(system, model, tokens, batch, args)
                if row is None:
                    print(f"{tokens:,} tokens, {SYSTEMS[system]}, batch {batch}: does not fit", file=sys.stderr)
                    break
                add(row)
            there = [row for row in kept.rows if row["tokens"] == tokens and row["system"] == system]
            wanted = device.type == "cuda" and not args.no_largest and not any("largest" in row for row in there)
            if there and wanted and not over():
                one = {**there[0], "bytes": there[0]["bytes"] / there[0]["batch"]}
                add(largest(system, model, tokens, args, one))
    kind = str(dtype).removeprefix("torch.")
    kernels = "; torch SDPA without cuDNN" if device.type == "cuda" else ""
    print(
        f"\nHeld equal: {shape} shape, random weights, {kind}; retention ratio {args.retention_ratio:g}; "
        f"{args.steps} steps{kernels}\n"
    )
    print(aligned_table(HEADER, [_cells(row) for row in kept.rows]))
    for line in kept.machine_lines():
        print(line)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
