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
back to the given length after each measurement. The JSON is written after each length, so that a run that is cut off
leaves what it measured.
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


def table(rows: Sequence[dict[str, Any]], names: Sequence[str], lengths: Sequence[int]) -> str:
    """One line a length, three columns a cache."""
    header = ["tokens seen"]
    for name in names:
        header += [CACHES[name].label, "ms/step", "(mean)"]
    body = []
    for length in lengths:
        cells = [f"{length:,}"]
        for name in names:
            row = next(row for row in rows if row["cache"] == name and row["tokens"] == length)
            cells += [format_bytes(row["bytes"]), f"{row['median_ms']:.2f}", f"{row['mean_ms']:.2f}"]
        body.append(cells)
    return aligned_table(header, body)


def growth(rows: Sequence[dict[str, Any]], names: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """What happened from the first length to the last."""
    lines = []
    for name in names:
        own = {row["tokens"]: row for row in rows if row["cache"] == name}
        first, last = own[lengths[0]], own[lengths[-1]]
        lines.append(
            f"{CACHES[name].label}: {lengths[-1] / lengths[0]:.0f} times the tokens, "
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for decode_scaling.json and .png")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    args.caches = args.caches.split(",")
    unknown = [name for name in args.caches if name not in CACHES]
    if unknown:
        parser.error(f"unknown cache {unknown[0]!r}; known: {', '.join(CACHES)}")
    if args.min_tokens < 1 or (args.max_tokens or args.min_tokens) < args.min_tokens or args.steps < 1:
        parser.error("--min-tokens must lie between 1 and --max-tokens, --steps be at least 1")
    return args


def run(args: argparse.Namespace) -> None:
    device = cli.find_device(args)
    if args.max_tokens is None:
        args.max_tokens = max(args.min_tokens, 65536 if device.type == "cuda" else 32768)
    dtype = cli.find_dtype(args, device)
    cli.set_threads(args, device)
    if device.type == "cuda":
        # torch's cuDNN attention plans anew for every length it meets, which costs a growing cache milliseconds a
        # layer and step; the other kernels do not, so no cache is measured with it.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if args.model is None:
        model = random_llama(args).to(device, dtype).eval()
    else:
        model = cli.load_model(cli.model_source(args.model), device, dtype)
    cli.check_length(model.config, args.max_tokens + WARM_UP_STEPS + args.steps, "the longest text")
    lengths = [args.min_tokens]
    while lengths[-1] * 2 <= args.max_tokens:
        lengths.append(lengths[-1] * 2)

    what = args.model or (
        f"random Llama, {args.layers} layers, {args.heads}/{args.kv_heads} heads, hidden size {args.hidden_size}"
    )
    kind = str(dtype).removeprefix("torch.")
    rows: list[dict[str, Any]] = []
    record = {
        "model": what,
        "dtype": kind,
        "budget": args.budget,
        "steps": args.steps,
        "seed": args.seed,
        "machine": machine_report(device),
        "rows": rows,
    }

    def keep() -> None:
        if args.out is not None:
            text = json.dumps(record, indent=2) + "\n"
            write_beside(args.out / "decode_scaling.json", lambda file: file.write_text(text, encoding="utf-8"))

    with tqdm(total=len(args.caches) * len(lengths), unit="length", dynamic_ncols=True) as bar:
        for name in args.caches:
            options: dict[str, Any] = {}
            if CACHES[name].needs_prototypes:
                if args.prototypes is not None:
                    options["prototypes"] = args.prototypes
                elif args.model is None:
                    options["prototypes"] = random_prototypes(model)
            cache = make_cache(name, model, budget=args.budget, **options)
            generator = torch.Generator().manual_seed(args.seed)
            for length in lengths:
                bar.set_description(f"{CACHES[name].label} at {length:,}", refresh=True)
                extend(model, cache, length, generator)
                rows.append({"cache": name, "tokens": length, **decode(model, cache, args.steps)})
                keep()
                bar.update()
            del cache

    print(f"\n{json.dumps(record['machine'])}")
    kernels = "; torch SDPA without cuDNN" if device.type == "cuda" else ""
    print(f"Held equal: {what}, {kind}; batch 1; budget {args.budget}; {args.steps} steps{kernels}\n")
    print(table(rows, args.caches, lengths) + "\n")
    print("\n".join(growth(rows, args.caches, lengths)))
    if args.out is not None:
        write_beside(args.out / "decode_scaling.png", lambda file: draw(file, rows, args.caches))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
