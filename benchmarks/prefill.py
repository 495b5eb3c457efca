"""Time and memory from a prompt to a compressed cache: full, SnapKV, KVzip and ProxyKV in its three regimes.

    python benchmarks/prefill.py --device cuda                   # Llama-3.1-8B and 3.2-1B shapes, to 125 K
    python benchmarks/prefill.py --shape tiny --lengths 256 --device cpu --threads 1

Models have random weights, so the figures say nothing about quality; time and memory do not depend on the weights.
Columns:

- prefill: seconds until the last layer has been evicted, the median of --repeats;
- of full: over the prefill with a full cache; KVzip/this: how many times faster than KVzip;
- proxy, mapper: of the prefill, the proxy's reading and the mapper, in % (beside the target when both run at once, so
  that together with the target they make more than 100 %);
- peak: the allocators' high-water mark over all GPUs, weights included (the proxy's where it is used);
- kept: the pairs that are left, of all.

ProxyKV's "sequential" reads the prompt with the proxy first; "two streams" at the same time on one GPU; "two GPUs" at
the same time on another one. On a CPU "two streams" are two threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from nearfar import cli
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.cache_registry import cache_kept_pairs
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.kvzip_scores import RepeatPrompt
from nearfar.modeling.proxy_scorer import ProxyScorer

LENGTHS = {"llama": "8192,32768,65536,128000", "tiny": "256,512"}
# Target, proxy, and what differs from the paper in the mapper.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": (  # Llama-3.1-8B and Llama-3.2-1B
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
        {},
    ),
    "tiny": (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    ),
}
HEADS = {
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    "tiny": {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
}
SYSTEMS = ("full", "snapkv", "kvzip", "kvpress_snapkv", "sequential", "two_streams", "two_gpus")
LABELS = {
    "full": "full cache",
    "snapkv": "SnapKV",
    "kvzip": "KVzip",
    "kvpress_snapkv": "SnapKV (kvpress)",
    "sequential": "ProxyKV, sequential",
    "two_streams": "ProxyKV, two streams",
    "two_gpus": "ProxyKV, two GPUs",
}
# The request to repeat: as many tokens as Llama's tokenizer makes of it.
PROMPT = RepeatPrompt(prefix=(), first=tuple(range(10, 18)), later=tuple(range(20, 33)), suffix=tuple(range(40, 45)))


@dataclass
class Prefill:
    """One prefill: the cache, and the seconds of its parts."""

    cache: Any
    parts: Callable[[], dict[str, float]] = field(default=dict)


Run = Callable[[torch.Tensor], Prefill]


class Unavailable(Exception):
    """A system that cannot run here, and why."""


# --- systems ---------------------------------------------------------------------------------------------------------


def read(model: Any, ids: torch.Tensor, cache: Any) -> None:
    with torch.no_grad():
        model(ids, logits_to_keep=1, **{cache_argument(model): cache})


def find(module: str, name: str) -> Any:
    """An attribute of a module that may not be there."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unavailable(str(error)) from error


def alone(system: str, model: Any, ratio: float) -> Run:
    """A system that needs the target only."""
    if system == "full":

        def full(ids: torch.Tensor) -> Prefill:
            cache = DynamicCache(config=model.config)
            read(model, ids, cache)
            return Prefill(cache)

        return full
    if system == "snapkv":
        snapkv = find("nearfar.modeling.cache_snapkv", "SnapKVCache")

        def watched(ids: torch.Tensor) -> Prefill:
            cache = snapkv(model, retention_ratio=ratio)
            read(model, ids, cache)
            return Prefill(cache)

        return watched
    if system == "kvzip":
        kvzip = find("nearfar.modeling.cache_kvzip", "KVzipCache")
        return lambda ids: Prefill(kvzip(model, retention_ratio=ratio).compress_context(model, ids, PROMPT))
    press = find("kvpress", "SnapKVPress")(compression_ratio=1 - ratio)

    def pressed(ids: torch.Tensor) -> Prefill:
        cache = DynamicCache()
        with press(model):
            read(model, ids, cache)
        return Prefill(cache)

    return pressed


def with_proxy(scorer: ProxyScorer, model: Any, system: str, ratio: float, chunk_tokens: int) -> Run:
    """ProxyKV; the scorer's models are where the system wants them."""
    mode: Any = "sequential" if system == "sequential" else "parallel"

    def run(ids: torch.Tensor) -> Prefill:
        cache = scorer.prefill(
            ids, target_model_or_config=model, retention_ratio=ratio, mode=mode, chunk_tokens=chunk_tokens
        )
        pending = cache.scores
        assert pending is not None
        read(model, ids, cache)
        return Prefill(cache, pending.seconds)

    return run


def make_model(shape: str, which: int, length: int, device: torch.device, dtype: torch.dtype) -> Any:
    sizes = {**SHAPES[shape][which], **HEADS[shape]}
    config = LlamaConfig(**sizes, max_position_embeddings=max(131_072, length), tie_word_embeddings=which == 1)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_scorer(shape: str, target: Any, length: int, device: torch.device, dtype: torch.dtype) -> ProxyScorer:
    mapper = find("nearfar.modeling.modeling_axial_mapper", "HybridAxialMapper")
    proxy = make_model(shape, 1, length, device, dtype)
    return ProxyScorer(proxy, mapper.for_models(proxy, target, **SHAPES[shape][2]).eval().to(device, dtype))


# --- measuring -------------------------------------------------------------------------------------------------------


def devices_of(device: torch.device) -> list[torch.device]:
    if device.type != "cuda":
        return [device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def measure(run: Run, ids: torch.Tensor, repeats: int, pairs: int) -> dict[str, Any]:
    """Figures of one system on one prompt; the first run is not counted."""
    devices = devices_of(ids.device)
    seconds, parts, peaks = [], [], []
    kept = 0
    for repeat in range(repeats + 1):
        for device in devices:
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        done = run(ids)
        for device in devices:
            synchronize(device)
        if repeat:
            seconds.append(time.perf_counter() - begin)
            parts.append(done.parts())
            if ids.is_cuda:
                peaks.append(sum(torch.cuda.max_memory_allocated(device) for device in devices))
        kept = cache_kept_pairs(done.cache)
        del done
    total = statistics.median(seconds)
    return {
        "seconds": total,
        "proxy_share": statistics.median(p["proxy"] for p in parts) / total if parts[0] else None,
        "mapper_share": statistics.median(p["mapper"] for p in parts) / total if parts[0] else None,
        "peak_bytes": max(peaks, default=None),
        "kept": kept / pairs,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), help="models (default: llama on a GPU, tiny on a CPU)")
    parser.add_argument("--lengths", help="tokens of the prompts, comma-separated (default: by shape)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}, comma-separated")
    parser.add_argument("--retention-ratio", type=float, default=0.3)
    parser.add_argument("--chunk-tokens", type=int, default=4096, help="tokens that the proxy reads in one pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for prefill.json")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.chunk_tokens < 1 or not 0 < args.retention_ratio <= 1:
        parser.error("--repeats and --chunk-tokens must be at least 1, --retention-ratio in (0, 1]")
    args.systems = args.systems.split(",")
    if unknown := [name for name in args.systems if name not in SYSTEMS]:
        parser.error(f"unknown system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    return args


def run(args: argparse.Namespace) -> None:
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    cli.set_threads(args, device)
    shape = args.shape or ("llama" if device.type == "cuda" else "tiny")
    lengths = [int(text) for text in (args.lengths or LENGTHS[shape]).split(",")]
    if min(lengths) < 64:
        raise ValueError(f"--lengths must be at least 64 tokens each, got {min(lengths)}")
    torch.manual_seed(args.seed)
    target = make_model(shape, 0, max(lengths), device, dtype)
    config = target.config
    prompts = {n: torch.randint(64, config.vocab_size, (1, n), device=device) for n in lengths}
    rows: list[dict[str, Any]] = []
    bar = tqdm(total=len(args.systems) * len(lengths), unit="prefill", dynamic_ncols=True)
    for system in args.systems:
        try:
            call = _prepare(system, args, shape, target, max(lengths), device, dtype)
        except Unavailable as error:
            tqdm.write(f"{LABELS[system]} is left out: {error}", file=sys.stderr)
            bar.update(len(lengths))
            continue
        for n, ids in prompts.items():
            pairs = n * config.num_hidden_layers * config.num_key_value_heads
            row: dict[str, Any] = {"tokens": n, "system": system}
            try:
                row |= measure(call, ids, args.repeats, pairs)
            except RuntimeError as error:
                # What a proxy's thread ran into is the cause of what the target raises.
                if not isinstance(error, torch.OutOfMemoryError) and not isinstance(
                    error.__cause__, torch.OutOfMemoryError
                ):
                    raise
                row["seconds"] = None
            rows.append(row)
            bar.update()
        del call  # a proxy's weights count only where it is used
    bar.close()
    machine = machine_report(device)
    rows.sort(key=lambda row: (row["tokens"], SYSTEMS.index(row["system"])))
    print(f"\n{json.dumps(machine)}")
    print(
        f"Held equal: target ({shape} shape, random weights, {str(dtype).removeprefix('torch.')}), prompts, batch 1, "
        f"retention ratio {args.retention_ratio:g} (but for the full cache), {args.repeats} repeats after a warm-up\n"
    )
    print(aligned_table(HEADER, [_row(row, rows) for row in rows]))
    if args.out is not None:
        settings = {name: getattr(args, name) for name in ("retention_ratio", "chunk_tokens", "repeats", "seed")}
        record = {"shape": shape, "dtype": str(dtype), **settings, "machine": machine, "rows": rows}
        text = json.dumps(record, indent=2) + "\n"
        write_beside(args.out / "prefill.json", lambda file: file.write_text(text, encoding="utf-8"))


def _prepare(
    system: str,
    args: argparse.Namespace,
    shape: str,
    target: Any,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Run:
    """
    Raises:
        Unavailable: the system cannot run here.
    """
    if system not in ("sequential", "two_streams", "two_gpus"):
        return alone(system, target, args.retention_ratio)
    place = device
    if system == "two_gpus":
        others = [other for other in devices_of(device) if other != torch.device(device.type, device.index or 0)]
        if device.type != "cuda" or not others:
            raise Unavailable("it needs a second GPU")
        place = others[0]
    scorer = make_scorer(shape, target, length, place, dtype)
    return with_proxy(scorer, target, system, args.retention_ratio, args.chunk_tokens)


HEADER = ["tokens", "system", "prefill, s", "of full", "KVzip/this", "proxy, %", "mapper, %", "peak, GiB", "kept, %"]


def _row(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    if row["seconds"] is None:
        return [str(row["tokens"]), LABELS[row["system"]], "out of memory", *["-"] * (len(HEADER) - 3)]
    peers = {other["system"]: other["seconds"] for other in rows if other["tokens"] == row["tokens"]}
    full, kvzip = peers.get("full"), peers.get("kvzip")

    def shown(value: float | None, digits: int = 1, factor: float = 100.0) -> str:
        return "-" if value is None else f"{factor * value:.{digits}f}"

    return [
        str(row["tokens"]),
        LABELS[row["system"]],
        f"{row['seconds']:.3f}",
        "-" if full is None else f"{row['seconds'] / full:.2f} x",
        "-" if kvzip is None else f"{kvzip / row['seconds']:.2f} x",
        shown(row["proxy_share"]),
        shown(row["mapper_share"]),
        shown(row["peak_bytes"], 2, 1 / 2**30),
        shown(row["kept"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
