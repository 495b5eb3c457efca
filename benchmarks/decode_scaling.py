"""Bytes and time of a decode step as more and more tokens have been seen: a full cache against pruned ones.

    python benchmarks/decode_scaling.py                        # a small random Llama; 1 K to 32 K, on a GPU to 64 K
    python benchmarks/decode_scaling.py --layers 16 --hidden-size 2048 --heads 16 --kv-heads 8 --out results/
    python benchmarks/decode_scaling.py --model smollm2-135m-instruct --max-tokens 8192

The pruned caches really read that many tokens (random ones, in chunks, evicting after each). The full cache,
transformers' DynamicCache, which copies what it holds at every step, is filled up with random keys and values instead
of a prefill whose cost grows with the square of its length; what a step costs does not depend on the values. Likewise
a random model's proactive cache scores with random prototypes.

Each figure is measured over --steps decode steps at batch 1 after a few untimed ones: the median step, the mean step
(which contains the evictions that come every few dozen steps), and the largest number of bytes held. The cache is put
back to the given length after each measurement.

Every row is printed, and written to decode_scaling.json, as soon as it is there; the same command with the same --out
goes on with what is missing, also of other --caches and a longer --max-tokens. Table and figure are of what is there,
with a line for each machine if there is more than one. --seconds ends it in time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Cache, LlamaConfig

from nearfar import cli
from nearfar.evaluation.comparison import aligned_table, format_bytes
from nearfar.evaluation.kept_rows import KeptRows
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.evaluation.restoring import restored
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.cache_registry import CACHES, cache_nbytes, make_cache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.key_prototypes import KeyPrototypes
from nearfar.modeling.model_identity import scored_layers
from nearfar.modeling.prototype_scoring import PrototypesConfig
from nearfar.modeling.prunable_models import text_config

CHUNK_TOKENS = 1024
WARM_UP_STEPS = 4
# Of settings that files of older releases do not name. A cache goes from length to length, so what it holds at one
# depends on the first.
UNNAMED = {"min_tokens": 1024}


def random_llama(args: argparse.Namespace) -> Any:
    """A Llama whose cache outweighs its weights early, so that growth shows."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2 * args.max_tokens,
    )
    return AutoModelForCausalLM.from_config(config)


def random_prototypes(model: Any) -> KeyPrototypes:
    """Prototypes of the model's shape that were fitted on nothing: they cost what real ones cost."""
    config = text_config(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    description = PrototypesConfig(
        model_type=config.model_type,
        model_name="random",
        layers=scored_layers(config),
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        heads=["linear"],
        max_position=2000,
        rotary={"head_dim": head_dim},
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1 for name, shape in description.tensor_shapes().items()
    }
    tensors["features.scale"] = torch.ones_like(tensors["features.scale"])
    return KeyPrototypes(description, tensors)


@torch.no_grad()
def extend(model: Any, cache: Cache, length: int, generator: torch.Generator) -> None:
    """Let `cache` have seen `length` tokens."""
    config, device = model.config.get_text_config(), model.device
    while (seen := cache.get_seq_length()) < length:
        count = min(CHUNK_TOKENS, length - seen)
        if hasattr(cache, "kept_pairs"):
            ids = torch.randint(config.vocab_size, (1, count), generator=generator).to(device)
            model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
            continue
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            shape = (1, config.num_key_value_heads, count, head_dim)
            keys, values = (torch.randn(shape, generator=generator).to(device, model.dtype) for _ in range(2))
            cache.update(keys, values, layer)


@torch.no_grad()
def decode(model: Any, cache: Cache, steps: int) -> dict[str, float]:
    """Milliseconds a step (median, mean) and the most bytes held; the cache is restored."""
    name, token = cache_argument(model), torch.ones(1, 1, dtype=torch.long, device=model.device)
    times, most = [], 0
    with restored(cache):
        for step in range(WARM_UP_STEPS + steps):
            synchronize(model.device)
            start = time.perf_counter()
            logits = model(token, **{name: cache}, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            synchronize(model.device)
            if step >= WARM_UP_STEPS:
                times.append(1000 * (time.perf_counter() - start))
            most = max(most, cache_nbytes(cache))
    return {"median_ms": statistics.median(times), "mean_ms": statistics.fmean(times), "bytes": most}


def _cells(row: dict[str, Any]) -> list[str]:
    return [format_bytes(row["bytes"]), f"{row['median_ms']:.2f}", f"{row['mean_ms']:.2f}"]


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """One line a length, three columns a cache; a dash stands for what has not been measured."""
    header = ["tokens seen"]
    for name in names:
        header += [CACHES[name].label, "ms/step", "(mean)"]
    cells = {(row["cache"], row["tokens"]): _cells(row) for row in rows}
    body = []
    for length in sorted({row["tokens"] for row in rows}):
        body.append([f"{length:,}"])
        for name in names:
            body[-1] += cells.get((name, length), ["-", "-", "-"])
    return aligned_table(header, body)


def growth(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """What happened from each cache's first length to its last."""
    lines = []
    for name in names:
        own = sorted((row for row in rows if row["cache"] == name), key=lambda row: row["tokens"])
        first, last = own[0], own[-1]
        lines.append(
            f"{CACHES[name].label}: {last['tokens'] / first['tokens']:.0f} times the tokens, "
            f"{last['bytes'] / first['bytes']:.2f} times the bytes, "
            f"{last['median_ms'] / first['median_ms']:.2f} times the time a step"
        )
    return lines


def draw(path: Path, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axis, (value, scale, title) in zip(
        panels, (("bytes", 1e-6, "cache, MB"), ("median_ms", 1.0, "decode step, ms")), strict=True
    ):
        for name, marker in zip(names, "soD^vPX*" * len(names), strict=False):
            own = [row for row in rows if row["cache"] == name]
            axis.plot([row["tokens"] for row in own], [scale * row[value] for row in own], marker=marker,
                      label=CACHES[name].label)  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g} K")
        axis.set_xlabel("tokens seen")
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    panels[0].legend()
    figure.savefig(path, dpi=150)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="id, folder or packaged name (default: a random Llama of the shape below)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument(
        "--caches", default="full,streaming_llm,h2o,snapkv,proactive", help="comma-separated registered names"
    )
    parser.add_argument("--prototypes", help="for the proactive cache (default: packaged ones, or random ones)")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--min-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, help="default: 32,768 on a CPU, 65,536 on a GPU")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--seconds", type=float, help="begin no further row after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="folder for decode_scaling.json, which the next run adds to, and decode_scaling.png"
    )
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    args.caches = args.caches.split(",")
    unknown = [name for name in args.caches if name not in CACHES]
    if unknown:
        parser.error(f"unknown cache {unknown[0]!r}; known: {', '.join(CACHES)}")
    if args.min_tokens < 1 or (args.max_tokens or args.min_tokens) < args.min_tokens or args.steps < 1:
        parser.error("--min-tokens must lie between 1 and --max-tokens, --steps be at least 1")
    if args.seconds is not None and not args.seconds > 0:
        parser.error(f"--seconds must be positive, got {args.seconds:g}")
    return args


def run(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    device = cli.find_device(args)
    if args.max_tokens is None:
        args.max_tokens = max(args.min_tokens, 65536 if device.type == "cuda" else 32768)
    dtype = cli.find_dtype(args, device)
    cli.set_threads(args, device)
    if device.type == "cuda":
        # torch's cuDNN attention plans anew for every length it meets, which costs a growing cache milliseconds a
        # layer and step; the other kernels do not, so no cache is measured with it.
        torch.backends.cuda.enable_cudnn_sdp(False)
    what = args.model or (
        f"random Llama, {args.layers} layers, {args.heads}/{args.kv_heads} heads, hidden size {args.hidden_size}"
    )
    kind = str(dtype).removeprefix("torch.")
    machine = machine_report(device)
    settings = {"model": what, "dtype": kind, "budget": args.budget, "steps": args.steps, "seed": args.seed}
    settings |= {"prototypes": args.prototypes, "min_tokens": args.min_tokens}
    registered = list(CACHES)
    results = KeptRows(
        None if args.out is None else args.out / "decode_scaling.json",
        settings,
        machine,
        order=lambda row: (registered.index(row["cache"]), row["tokens"]),
        unnamed=UNNAMED,
    )
    print(f"{json.dumps(machine)}\n", flush=True)
    if args.model is None:
        model = random_llama(args).to(device, dtype).eval()
    else:
        model = cli.load_model(cli.model_source(args.model), device, dtype)
    cli.check_length(model.config, args.max_tokens + WARM_UP_STEPS + args.steps, "the longest text")
    lengths = [args.min_tokens]
    while lengths[-1] * 2 <= args.max_tokens:
        lengths.append(lengths[-1] * 2)

    def missing(name: str) -> list[int]:
        """What neither this process nor another with the same file has measured by now."""
        return [length for length in lengths if not results.has(cache=name, tokens=length)]

    def over() -> bool:
        return args.seconds is not None and time.perf_counter() - begin >= args.seconds

    names = list(dict.fromkeys(args.caches))
    with tqdm(total=sum(len(missing(name)) for name in names), unit="length", dynamic_ncols=True) as bar:
        for name in names:
            if not missing(name):
                continue
            label = CACHES[name].label
            cache = make_cache(name, model, budget=args.budget, **_options(args, name, model))
            generator = torch.Generator().manual_seed(args.seed)
            # What was measured before is read again: the cache is to be the same as in a run that goes through.
            for length in lengths:
                wanted = missing(name)
                if not wanted:
                    break
                if over():
                    left = ", ".join(f"{n:,}" for n in wanted)
                    bar.write(f"{label} at {left}: not begun, --seconds are over", file=sys.stderr)
                    break
                bar.set_description(f"{label} at {length:,}", refresh=True)
                extend(model, cache, length, generator)
                if length in wanted:
                    row = {"cache": name, "tokens": length, **decode(model, cache, args.steps)}
                    results.add(row)
                    bar.write("  ".join([f"{length:,}", label, *_cells(row)]), file=sys.stdout)
                    sys.stdout.flush()
                    bar.update()
            del cache

    rows = results.rows
    there = {row["cache"] for row in rows}
    names = [name for name in dict.fromkeys([*args.caches, *(row["cache"] for row in rows)]) if name in there]
    kernels = "; torch SDPA without cuDNN" if device.type == "cuda" else ""
    print(f"\nHeld equal: {what}, {kind}; batch 1; budget {args.budget}; {args.steps} steps{kernels}\n")
    print(table(rows, names) + "\n")
    print("\n".join(growth(rows, names)))
    for line in results.machine_lines():
        print(line)
    if args.out is not None and rows:
        write_beside(args.out / "decode_scaling.png", lambda file: draw(file, rows, names))


def _options(args: argparse.Namespace, name: str, model: Any) -> dict[str, Any]:
    """Further arguments of a cache."""
    if CACHES[name].needs_prototypes:
        if args.prototypes is not None:
            return {"prototypes": args.prototypes}
        if args.model is None:
            return {"prototypes": random_prototypes(model)}
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
