"""Time and memory from a prompt to a compressed cache: full, SnapKV, KVzip and ProxyKV in its three regimes.

    python benchmarks/prefill.py --device cuda --out results/    # Llama-3.1-8B and 3.2-1B shapes, to 125 K
    python benchmarks/prefill.py --device cuda --out results/ --seconds 100 --lengths 8192,32768
    python benchmarks/prefill.py --shape tiny --lengths 256 --device cpu --threads 1

Models have random weights, so the figures say nothing about quality; time and memory do not depend on the weights.
Every row is printed, and written to prefill.json, as soon as it is there; the same command with the same --out goes on
with what is missing, also of other --lengths and --systems. --seconds ends it in time. Columns:

- prefill: seconds until the last layer has been evicted, the median of --repeats after one run that does not count; a
  system that takes more than --long-seconds runs once only;
- of full: over the prefill with a full cache; KVzip/this: how many times faster than KVzip;
- proxy, mapper: of the prefill, the proxy's reading and the mapper, in % (beside the target when both run at once, so
  that together with the target they make more than 100 %);
- peak: the allocators' high-water mark over all GPUs, weights included (the proxy's where it is used); of full: over
  that of the full prefill;
- kept: the pairs that are left, of all. kvpress's KVzip masks pairs and frees none.

ProxyKV's "sequential" reads the prompt with the proxy first; "two streams" at the same time on one GPU; "two GPUs" at
the same time on another one. On a CPU "two streams" are two threads. kvpress takes part where it is installed; its
KVzip gets a tokenizer that gives the request to repeat as many tokens as ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from nearfar import cli
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.kept_rows import KeptRows
from nearfar.evaluation.machine import machine_report, synchronize
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
# Of settings that files of older releases do not name.
UNNAMED = {"proxy_states": "none"}
WITH_PROXY = ("sequential", "two_streams", "two_gpus")
SYSTEMS = ("full", "snapkv", "kvzip", *WITH_PROXY, "kvpress_snapkv", "kvpress_kvzip")
LABELS = {
    "full": "full cache",
    "snapkv": "SnapKV",
    "kvzip": "KVzip",
    "kvpress_snapkv": "SnapKV (kvpress)",
    "kvpress_kvzip": "KVzip (kvpress)",
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
    name = {"kvpress_snapkv": "SnapKVPress", "kvpress_kvzip": "KVzipPress"}[system]
    press = find("kvpress", name)(compression_ratio=1 - ratio)
    if name == "KVzipPress":
        # It looks for a tokenizer where the model was loaded from, and this one was not loaded.
        stub = SimpleNamespace(from_pretrained=lambda source: _RequestTokenizer())
        sys.modules[type(press).__module__].AutoTokenizer = stub  # type: ignore[attr-defined]

    def pressed(ids: torch.Tensor) -> Prefill:
        cache = DynamicCache(config=model.config)
        try:
            with torch.no_grad(), press(model):
                read(model, ids, cache)
        except (KeyError, TypeError, AttributeError) as error:  # made for another version of transformers
            raise Unavailable(f"kvpress does not work with this transformers ({error!r})") from error
        for layer in model.model.layers:  # what it masks stays on the model
            layer.self_attn.masked_key_indices = None
        return Prefill(cache)

    return pressed


class _RequestTokenizer:
    """Gives kvpress's request to repeat the tokens of `PROMPT`."""

    chat_template = None

    def encode(self, text: str, **options: Any) -> torch.Tensor:
        known = {"": (), "\n": PROMPT.suffix}
        default = PROMPT.later if "starting with" in text else PROMPT.first
        return torch.tensor([known.get(text, default)], dtype=torch.long)


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


def make_scorer(
    shape: str, states: str, target: Any, length: int, device: torch.device, dtype: torch.dtype
) -> ProxyScorer:
    mapper = find("nearfar.modeling.modeling_axial_mapper", "HybridAxialMapper")
    proxy = make_model(shape, 1, length, device, dtype)
    options = dict(SHAPES[shape][2])
    if states != "none":
        options |= {"proxy_states": states, "proxy_layers": "all", "layer_queries": True, "feature_transform": "log"}
    return ProxyScorer(proxy, mapper.for_models(proxy, target, **options).eval().to(device, dtype))


# --- measuring -------------------------------------------------------------------------------------------------------


def devices_of(device: torch.device) -> list[torch.device]:
    if device.type != "cuda":
        return [device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def measure(run: Run, ids: torch.Tensor, repeats: int, pairs: int, long_seconds: float) -> dict[str, Any]:
    """Figures of one system on one prompt; the first run is not counted, unless it is long."""
    devices = devices_of(ids.device)
    seconds, parts, peaks = [], [], []
    kept = 0
    run(ids[:, :2048])  # kernels are chosen and compiled; what runs once only is to be as warm as what runs twice
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
        took = time.perf_counter() - begin
        if repeat or took >= long_seconds:
            seconds.append(took)
            parts.append(done.parts())
            if ids.is_cuda:
                peaks.append(sum(torch.cuda.max_memory_allocated(device) for device in devices))
        kept = cache_kept_pairs(done.cache)
        del done
        if took >= long_seconds:
            break
    total = statistics.median(seconds)
    return {
        "seconds": total,
        "runs": len(seconds),
        "proxy_share": statistics.median(p["proxy"] for p in parts) / total if parts[0] else None,
        "mapper_share": statistics.median(p["mapper"] for p in parts) / total if parts[0] else None,
        "peak_bytes": max(peaks, default=None),
        "kept": kept / pairs,
    }


def fits(model: Any, length: int, device: torch.device) -> bool:
    """Whether weights, a full cache and one layer's activations have room on a GPU at all."""
    if device.type != "cuda":
        return True
    config, size = model.config, model.dtype.itemsize
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length * size
    activations = (4 * config.hidden_size + 2 * config.intermediate_size) * length * size
    weights = sum(parameter.nbytes for parameter in model.parameters())
    total = torch.cuda.get_device_properties(device).total_memory
    return weights + cache + activations <= total


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), help="models (default: llama on a GPU, tiny on a CPU)")
    parser.add_argument("--lengths", help="tokens of the prompts, comma-separated (default: by shape)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}, comma-separated")
    parser.add_argument("--retention-ratio", type=float, default=0.3)
    parser.add_argument("--chunk-tokens", type=int, default=4096, help="tokens that the proxy reads in one pass")
    parser.add_argument(
        "--proxy-states", choices=("none", "values"), default="none",
        help="what the mapper reads beside attention, of all proxy layers at once (default: none, as in the paper)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long-seconds", type=float, default=5.0, help="what takes so long is run once")
    parser.add_argument("--seconds", type=float, help="begin no further row after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for prefill.json, which the next run adds to")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.chunk_tokens < 1 or not 0 < args.retention_ratio < 1:
        parser.error("--repeats and --chunk-tokens must be at least 1, --retention-ratio in (0, 1)")
    if args.seconds is not None and not args.seconds > 0:
        parser.error("--seconds must be positive")
    args.systems = args.systems.split(",")
    if unknown := [name for name in args.systems if name not in SYSTEMS]:
        parser.error(f"unknown system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    return args


def run(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    cli.set_threads(args, device)
    shape = args.shape or ("llama" if device.type == "cuda" else "tiny")
    lengths = sorted({int(text) for text in (args.lengths or LENGTHS[shape]).split(",")})
    if lengths[0] < 64:
        raise ValueError(f"--lengths must be at least 64 tokens each, got {lengths[0]}")
    machine = machine_report(device)
    settings = {"shape": shape, "dtype": str(dtype), "retention_ratio": args.retention_ratio}
    settings |= {"chunk_tokens": args.chunk_tokens, "seed": args.seed, "proxy_states": args.proxy_states}
    results = KeptRows(
        None if args.out is None else args.out / "prefill.json",
        settings,
        machine,
        order=lambda row: (row["tokens"], SYSTEMS.index(row["system"])),
        unnamed=UNNAMED,
    )
    print(f"{json.dumps(machine)}\n", flush=True)
    torch.manual_seed(args.seed)
    target = make_model(shape, 0, max(131_072, *lengths), device, dtype)
    config = target.config
    left_out: set[str] = set()
    scorer: tuple[torch.device, ProxyScorer] | None = None
    for n in lengths:
        ids = torch.randint(64, config.vocab_size, (1, n), device=device)
        pairs = n * config.num_hidden_layers * config.num_key_value_heads
        for system in args.systems:
            if system in left_out or results.has(tokens=n, system=system):
                continue
            if args.seconds is not None and time.perf_counter() - begin >= args.seconds:
                print(f"{n} tokens, {LABELS[system]}: not begun, --seconds are over", file=sys.stderr)
                continue
            row: dict[str, Any] = {"tokens": n, "system": system, "seconds": None}
            try:
                place = place_of(system, device)
                # A proxy's weights count only where it is used.
                if scorer is not None and scorer[0] != place:
                    scorer = None
                    _collect(device)
                if place is not None and scorer is None:
                    scorer = place, make_scorer(shape, args.proxy_states, target, max(131_072, *lengths), place, dtype)
                call = (
                    alone(system, target, args.retention_ratio)
                    if scorer is None
                    else with_proxy(scorer[1], target, system, args.retention_ratio, args.chunk_tokens)
                )
                if fits(target, n, device):
                    row |= measure(call, ids, args.repeats, pairs, args.long_seconds)
                del call
            except Unavailable as error:
                print(f"{LABELS[system]} is left out: {error}", file=sys.stderr)
                left_out.add(system)
                continue
            except RuntimeError as error:
                # What a proxy's thread ran into is the cause of what the target raises.
                if not isinstance(error, torch.OutOfMemoryError) and not isinstance(
                    error.__cause__, torch.OutOfMemoryError
                ):
                    raise
            _collect(device)
            results.add(row)
            print("  ".join(_row(row, results.rows)), flush=True)
    kind = str(dtype).removeprefix("torch.")
    print(
        f"\nHeld equal: target ({shape} shape, random weights, {kind}), prompts, batch 1, "
        f"retention ratio {args.retention_ratio:g} (but for the full cache)"
        + ("\n" if args.proxy_states == "none" else f"; the mapper also reads the proxy's {args.proxy_states}\n")
    )
    print(aligned_table(HEADER, [_row(row, results.rows) for row in results.rows]))
    for line in results.machine_lines():
        print(line)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def place_of(system: str, device: torch.device) -> torch.device | None:
    """Where a system's proxy is, None for a system without one.

    Raises:
        Unavailable: there is no such place.
    """
    if system not in WITH_PROXY:
        return None
    if system != "two_gpus":
        return device
    others = [other for other in devices_of(device) if other != torch.device(device.type, device.index or 0)]
    if device.type != "cuda" or not others:
        raise Unavailable("it needs a second GPU")
    return others[0]


HEADER = ["tokens", "system", "prefill, s", "of full", "KVzip/this", "proxy, %", "mapper, %", "peak, GiB",
          "of full", "kept, %"]  # fmt: skip


def _row(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    if row["seconds"] is None:
        return [str(row["tokens"]), LABELS[row["system"]], "does not fit", *["-"] * (len(HEADER) - 3)]
    peers = {other["system"]: other for other in rows if other["tokens"] == row["tokens"]}
    full, kvzip = (peers.get(name, {}).get("seconds") for name in ("full", "kvzip"))
    peak = peers.get("full", {}).get("peak_bytes")

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
        "-" if not peak else f"{row['peak_bytes'] / peak:.3f} x",
        shown(row["kept"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
