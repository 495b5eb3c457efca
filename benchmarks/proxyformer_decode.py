"""Prefill, decoding and cache of ProxyFormer against a plain decoder of the same width and depth, by history length.

    python benchmarks/proxyformer_decode.py --device cuda --out results/
    python benchmarks/proxyformer_decode.py --layers 2 --hidden-size 64 --heads 2 --history 1024,4096 --device cpu

Random weights. ProxyFormer encodes the history to proxies (`encode_history`) and decodes on its `ProxyCache`; the
plain decoder is the same model with compression_ratio=None, prefilled in one pass into a `DynamicCache`. A step is one
token through the whole model and the choice of the likeliest; each step is timed by itself, over enough of them to
cross block boundaries, where a block is compressed: the worst step shows what that costs. Cache bytes are all that is
held, also the keys and values of attention among proxies and the room reserved for more of them.
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
from tqdm import tqdm
from transformers import DynamicCache

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM, cli
from nearfar.evaluation.comparison import aligned_table, format_bytes
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.cache_registry import cache_nbytes
from nearfar.modeling.compat import cache_argument

SYSTEMS = ("ProxyFormer", "plain decoder")
HISTORIES = {"cuda": "16384,131072,1048576", "cpu": "512,2048"}
WARM_UP_HISTORY, WARM_UP_STEPS = 512, 8


def make_model(system: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(args.seed)
    config = ProxyFormerConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        history_hidden_size=args.history_hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        compression_ratio=args.ratio if system == "ProxyFormer" else None,
        max_position_embeddings=2 * max(args.lengths),
    )
    return ProxyFormerForCausalLM(config).to(device, dtype).eval()


def prefill(model: Any, ids: torch.Tensor) -> Any:
    """The cache of a history."""
    if model.config.has_proxies:
        return model.encode_history(ids)
    cache = DynamicCache(config=model.config)
    model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
    return cache


def decode(model: Any, cache: Any, steps: int) -> list[float]:
    """Milliseconds of each of `steps` greedy steps."""
    arguments = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    times = []
    for _ in range(steps):
        synchronize(model.device)
        start = time.perf_counter()
        token = model(token, **arguments).logits[:, -1:].argmax(-1)
        synchronize(model.device)
        times.append(1000 * (time.perf_counter() - start))
    return times


@torch.inference_mode()
def measure(model: Any, ids: torch.Tensor, repeats: int, steps: int) -> dict[str, Any]:
    """One line of the table: median prefill, steps, and what was held."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, cache = [], None
    for _ in range(repeats):
        cache = None  # before the next one is made
        synchronize(device)
        start = time.perf_counter()
        cache = prefill(model, ids)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    held = cache_nbytes(cache)
    times = decode(model, cache, steps)
    return {
        "prefill_s": statistics.median(seconds),
        "mean_ms": statistics.fmean(times),
        "median_ms": statistics.median(times),
        "worst_ms": max(times),
        "worst_step": times.index(max(times)) + 1,
        "steps": steps,
        "cache_bytes": held,
        "cache_bytes_after": cache_nbytes(cache),
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
    }


def measured(model: Any, history: int, args: argparse.Namespace) -> dict[str, Any]:
    """`measure`, or an `error` that says why there is no figure."""
    if not model.config.has_proxies and args.longest_decoder is not None and history > args.longest_decoder:
        return {"error": f"skipped: --longest-decoder {args.longest_decoder}"}
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(args.vocabulary, (1, history), generator=generator).to(model.device)
    try:
        return measure(model, ids, args.repeats, args.steps)
    except torch.OutOfMemoryError as error:
        return {"error": "out of memory", "message": " ".join(str(error).split())[:300]}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", help="tokens, comma-separated (default: 16 K, 128 K and 1 M; 512, 2048 on a CPU)")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--history-hidden-size", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--ratio", type=int, default=64, help="compression ratio P, also the generation block")
    parser.add_argument("--steps", type=int, help="decoded tokens, at least 2 P (default: 3 P)")
    parser.add_argument("--repeats", type=int, default=3, help="prefills, of which the median counts")
    parser.add_argument("--longest-decoder", type=int, metavar="TOKENS", help="skip the plain decoder beyond this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for proxyformer_decode.json")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    args.steps = 3 * args.ratio if args.steps is None else args.steps
    if args.steps < 2 * args.ratio:
        parser.error(f"--steps must be at least 2 P = {2 * args.ratio}, to cross block boundaries, got {args.steps}")
    if min(args.ratio, args.repeats) < 1:
        parser.error("--ratio and --repeats must be at least 1")
    return args


def run(args: argparse.Namespace) -> None:
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    cli.set_threads(args, device)
    if device.type == "cuda":
        # torch's cuDNN attention plans anew for every length, which would make the growing cache look slow.
        torch.backends.cuda.enable_cudnn_sdp(False)
    text = args.history or HISTORIES["cuda" if device.type == "cuda" else "cpu"]
    args.lengths = [int(part) for part in text.split(",")]
    if min(args.lengths) < 1:
        raise ValueError(f"--history takes positive lengths, got {text!r}")

    rows: list[dict[str, Any]] = []
    weights: dict[str, int] = {}
    with tqdm(total=len(SYSTEMS) * len(args.lengths), unit="run", dynamic_ncols=True) as bar:
        for system in SYSTEMS:
            model = make_model(system, args, device, dtype)
            weights[system] = sum(x.numel() * x.element_size() for x in model.parameters())
            with torch.inference_mode():  # kernels are loaded before anything is timed
                warm = torch.ones(1, WARM_UP_HISTORY, dtype=torch.long, device=device)
                decode(model, prefill(model, warm), WARM_UP_STEPS + args.ratio)
            for history in args.lengths:
                bar.set_description(f"{system}, {history:,}")
                rows.append({"system": system, "history": history, "error": None, **measured(model, history, args)})
                bar.update()
            del model
            gc.collect()

    machine = machine_report(device)
    print(f"\n{json.dumps(machine)}")
    sizes = ", ".join(f"{name} {format_bytes(count)}" for name, count in weights.items())
    print(
        f"Held equal: batch 1, {args.layers} layers, width {args.hidden_size}, {args.heads} heads, vocabulary "
        f"{args.vocabulary}, {str(dtype)[6:]}, random weights, {args.steps} steps each; ProxyFormer with P = "
        f"{args.ratio}, d_h = {args.history_hidden_size}. Weights: {sizes}\n"
    )
    header = ["history", "system", "prefill, s", "ms/token", "worst step, ms", "cache", "bytes a token", "peak, GB"]
    body = []
    for row in sorted(rows, key=lambda row: row["history"]):
        if row["error"]:
            body.append([f"{row['history']:,}", row["system"], row["error"], *[""] * 5])
            continue
        peak = "–" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}"
        body.append([
            f"{row['history']:,}", row["system"], f"{row['prefill_s']:.3f}", f"{row['mean_ms']:.2f}",
            f"{row['worst_ms']:.2f}", format_bytes(row["cache_bytes"]),
            f"{row['cache_bytes'] / row['history']:,.0f}", peak,
        ])  # fmt: skip
    print(aligned_table(header, body))
    if args.out is not None:
        names = ("layers", "hidden_size", "history_hidden_size", "heads", "vocabulary", "ratio", "steps", "repeats")
        settings = {name: getattr(args, name) for name in names} | {"dtype": str(dtype)}
        record = {"settings": settings, "machine": machine, "weights_bytes": weights, "rows": rows}
        shown = json.dumps(record, indent=2) + "\n"
        write_beside(args.out / "proxyformer_decode.json", lambda file: file.write_text(shown, encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
