"""Decoding with a DARCache against GPT-NeoX with an ordinary cache: tokens a second, bytes a far token, largest batch.

    python benchmarks/dar_decode.py --device cuda
    python benchmarks/dar_decode.py --layers 2 --hidden-size 128 --heads 2 --tokens 512 --batches 1 --device cpu

Models of one shape (by default Pythia-1.4B's) with random weights. Caches are filled with random states instead of a
prefill: what a step costs does not depend on the values. A step is the whole model and the choice of the likeliest
token. "graph" replays one captured step over static buffers, GPT-NeoX's in transformers' StaticCache. The largest
batch is the one whose weights and caches fit into --memory-gb, by the bytes that the caches of this run hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM, StaticCache

from nearfar import DARCache, DARConfig, DARForCausalLM, cli
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.dar_plan import AttentionPlan

WARM_UP_STEPS = 4
SYSTEMS = (
    "GPT-NeoX, DynamicCache",
    "GPT-NeoX, StaticCache, graph",
    "DAR fast",
    "DAR small",
    "DAR fast, graph",
    "DAR small, graph",
)


def shape(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.heads,
        "intermediate_size": 4 * args.hidden_size,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": 2 * args.longest,
        "attn_implementation": "sdpa",
    }


def filled_cache(model: Any, system: str, batch: int, tokens: int, room: int) -> Any:
    """A cache that holds `tokens` random tokens a row."""
    config, device, dtype = model.config, model.device, model.dtype
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    if isinstance(config, DARConfig):
        fast, static = "fast" in system, "graph" in system
        cache = DARCache(config, "fast" if fast else "small", tokens + room if static else None)
        if not fast:
            cache.note_positions(torch.arange(tokens, device=device)[None], AttentionPlan(), batch)
        for layer in cache.layers:
            pair = draw(batch, heads, tokens, dim)
            rotary = draw(batch, tokens, heads, config.rotary_dims) if fast else None
            layer.append(pair, pair, draw(batch, tokens, config.bottleneck_size or 0), rotary, AttentionPlan())
            del pair, rotary
        return cache
    ordinary: Any
    if "StaticCache" in system:
        ordinary = StaticCache(config=config, max_cache_len=tokens + room)
    else:
        ordinary = DynamicCache(config=config)
    for index in range(config.num_hidden_layers):
        ordinary.update(draw(batch, heads, tokens, dim), draw(batch, heads, tokens, dim), index)
    return ordinary


@torch.no_grad()
def decode(model: Any, system: str, batch: int, tokens: int, steps: int) -> tuple[float, float]:
    """Median milliseconds a step, and bytes held a row."""
    device = model.device
    cache = filled_cache(model, system, batch, tokens, WARM_UP_STEPS + steps + 8)
    arguments = {cache_argument(model): cache, "use_cache": True}
    token = torch.ones(batch, 1, dtype=torch.long, device=device)

    def step() -> None:
        token.copy_(model(token, **arguments, logits_to_keep=1).logits[:, -1:].argmax(-1))

    run: Callable[[], Any] = step
    if "graph" in system:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    times = []
    for index in range(WARM_UP_STEPS + steps):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        if index >= WARM_UP_STEPS:
            times.append(1000 * (time.perf_counter() - start))
    if isinstance(cache, DARCache):
        held = cache.nbytes()
    else:
        held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    return statistics.median(times), held / batch


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--tokens", default="8192,32768", help="context lengths, comma-separated")
    parser.add_argument("--batches", default="1,8", help="comma-separated")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory-gb", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for dar_decode.json")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    try:
        args.lengths, args.rows = ([int(x) for x in text.split(",")] for text in (args.tokens, args.batches))
    except ValueError:
        parser.error(f"--tokens and --batches take whole numbers, got {args.tokens!r} and {args.batches!r}")
    if min(*args.lengths, *args.rows, args.steps) < 1:
        parser.error("--tokens, --batches and --steps must be at least 1")
    args.longest = max(args.lengths) + args.steps + 64
    return args


def run(args: argparse.Namespace) -> None:
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    cli.set_threads(args, device)
    if device.type == "cuda":
        # torch's cuDNN attention plans anew for every length, which would make the growing cache look slow.
        torch.backends.cuda.enable_cudnn_sdp(False)
    rows: list[dict[str, Any]] = []
    names = [name for name in SYSTEMS if device.type == "cuda" or "graph" not in name]
    far_bytes: dict[str, int] = {}
    with tqdm(total=len(names) * len(args.lengths) * len(args.rows), unit="run", dynamic_ncols=True) as bar:
        for family in ("GPT-NeoX", "DAR"):
            torch.manual_seed(args.seed)
            torch.set_default_dtype(dtype)
            with device:
                model: Any
                if family == "DAR":
                    model = DARForCausalLM(DARConfig(**shape(args), window_size=args.window)).eval()
                else:
                    model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape(args))).eval()
            torch.set_default_dtype(torch.float32)
            weights = sum(x.numel() * x.element_size() for x in model.parameters())
            for name in (name for name in names if name.startswith(family)):
                if family == "DAR":
                    far_bytes[name] = filled_cache(model, name, 1, 2, 1).bytes_per_far_token()
                else:
                    far_bytes[name] = 2 * args.hidden_size * args.layers * dtype.itemsize
                for tokens in args.lengths:
                    for batch in args.rows:
                        bar.set_description(f"{name}, {tokens:,} x {batch}")
                        median, held = decode(model, name, batch, tokens, args.steps)
                        largest = int((args.memory_gb * 1e9 - weights) // held)
                        rows.append(
                            {"system": name, "tokens": tokens, "batch": batch, "ms": median, "bytes_per_row": held,
                             "tokens_per_second": 1000 * batch / median, "largest_batch": largest}
                        )  # fmt: skip
                        gc.collect()
                        if device.type == "cuda":
                            torch.cuda.empty_cache()
                        bar.update()
            del model
            gc.collect()
    machine = machine_report(device)
    print(f"\n{json.dumps(machine)}")
    print(
        f"Held equal: {args.layers} layers, width {args.hidden_size}, {args.heads} heads, {str(dtype)[6:]}, random "
        f"weights; DAR with window {args.window} and a quarter of the width; torch SDPA without cuDNN\n"
    )
    body = []
    for tokens in args.lengths:
        for batch in args.rows:
            here = [row for row in rows if (row["tokens"], row["batch"]) == (tokens, batch)]
            for row in here:
                row["speed_up"] = here[0]["ms"] / row["ms"]
                body.append([
                    f"{tokens:,}", str(batch), row["system"], f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.0f}",
                    f"{row['speed_up']:.2f} x", f"{far_bytes[row['system']]:,}", f"{row['bytes_per_row'] / 1e6:,.0f}",
                    str(row["largest_batch"]),
                ])  # fmt: skip
    header = ["context", "batch", "system", "ms/step", "tokens/s", "of DynamicCache", "bytes a far token", "MB a row"]
    print(aligned_table([*header, f"rows in {args.memory_gb:g} GB"], body))
    if args.out is not None:
        record = json.dumps({"machine": machine, "bytes_per_far_token": far_bytes, "rows": rows}, indent=2)
        write_beside(args.out / "dar_decode.json", lambda file: file.write_text(record + "\n", encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
