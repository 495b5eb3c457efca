"""Time of DAR attention, forward and backward, against ordinary causal attention of the same shape in the same run.

    python benchmarks/dar_attention.py --device cuda
    python benchmarks/dar_attention.py --shapes 1x2048x4x64 --window 64 --device cpu --threads 1

Ordinary attention is torch's scaled_dot_product_attention with each of its backends, of which the fastest is the
100 %. DAR attention is given queries, near and far keys and values; a further line also makes the far ones from a
bottleneck of a quarter of the model's width, forward and backward. Medians over --repeats rounds, in which the systems
take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from nearfar import cli
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.dar_attention import FarPairs, dar_attention

SHAPES = {"cuda": "16x2048x8x64,4x8192x16x64,1x32768x16x128", "cpu": "1x2048x4x64"}
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}

System = Callable[[], Any]


def systems(
    shape: tuple[int, int, int, int], window: int, device: torch.device, dtype: torch.dtype, seed: int
) -> dict[str, System]:
    """One forward and backward pass of each system over the same queries, keys and values."""
    batch, tokens, heads, dim = shape
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    # As a model's projections leave them: tokens before heads.
    query, key, value, far_key, far_value = (
        draw(batch, tokens, heads, dim).transpose(1, 2).requires_grad_() for _ in range(5)
    )
    gradient = draw(batch, tokens, heads, dim).transpose(1, 2)
    scaling, size = dim**-0.5, heads * dim // 4
    angles = torch.zeros(1, tokens, dim // 4, device=device, dtype=dtype)
    given = FarPairs(draw(batch, tokens, size), None, None, angles + 1, angles, far_key, far_value)
    bottleneck = draw(batch, tokens, size).requires_grad_()
    weight = (draw(heads, 2 * dim, size) * size**-0.5).requires_grad_()
    made = FarPairs(bottleneck, weight, None, angles + 1, angles)

    def ordinary(backend: SDPBackend) -> System:
        def run() -> Any:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(query, key, value, is_causal=True)
                return torch.autograd.grad(out, (query, key, value), gradient)

        return run

    def ours(far: FarPairs, *leaves: torch.Tensor) -> System:
        def run() -> Any:
            out = dar_attention(query, key, value, far, window, scaling)
            return torch.autograd.grad(out, (query, key, value, *leaves), gradient)

        return run

    backends = BACKENDS if device.type == "cuda" else {"SDPA flash": SDPBackend.FLASH_ATTENTION}
    found: dict[str, System] = {name: ordinary(backend) for name, backend in backends.items()}
    found["DAR"] = ours(given, far_key, far_value)
    found["DAR with bottleneck"] = ours(made, bottleneck, weight)
    return found


def milliseconds(run: System, device: torch.device, calls: int) -> float:
    """Mean over `calls` calls in a row."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / calls
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return 1000 * (time.perf_counter() - begin) / calls


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="batch x tokens x heads x head dim, comma-separated (default: by device)")
    parser.add_argument("--window", type=int, default=128, help="near tokens")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--calls", type=int, default=4, help="calls timed together in each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for dar_attention.json")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    if args.window < 0 or args.repeats < 1 or args.calls < 1:
        parser.error("--window must be at least 0, --repeats and --calls at least 1")
    return args


def run(args: argparse.Namespace) -> None:
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    cli.set_threads(args, device)
    shapes = []
    for text in (args.shapes or SHAPES.get(device.type, SHAPES["cpu"])).split(","):
        shape = tuple(int(part) for part in text.split("x"))
        if len(shape) != 4 or min(shape) < 1:
            raise ValueError(f"a shape is batch x tokens x heads x head dim, for example 4x8192x16x64, got {text!r}")
        shapes.append(shape)
    rows: list[dict[str, Any]] = []
    for shape in tqdm(shapes, unit="shape", dynamic_ncols=True):
        found = systems(shape, args.window, device, dtype, args.seed)
        times: dict[str, list[float]] = {}
        for name, call in list(found.items()):
            try:
                for _ in range(3):
                    call()
                synchronize(device)
                times[name] = []
            except RuntimeError as error:  # a backend that does not take this shape or dtype
                tqdm.write(f"{name} at {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
        for _ in range(args.repeats):
            for name in times:
                times[name].append(milliseconds(found[name], device, args.calls))
        medians = {name: statistics.median(values) for name, values in times.items()}
        best = min(value for name, value in medians.items() if name.startswith("SDPA"))
        rows += [
            {"shape": list(shape), "system": name, "ms": value, "relative": value / best}
            for name, value in medians.items()
        ]
        del found
    machine = machine_report(device)
    print(f"\n{json.dumps(machine)}")
    print(f"Held equal: queries, keys, values, {str(dtype).removeprefix('torch.')}; causal; window {args.window}\n")
    body = [
        ["x".join(map(str, row["shape"])), row["system"], f"{row['ms']:.3f}", f"{row['relative']:.2f} x"]
        for row in rows
    ]
    print(
        aligned_table(["batch x tokens x heads x dim", "system", "forward + backward, ms", "of the best SDPA"], body)
    )
    if args.out is not None:
        record = json.dumps({"window": args.window, "dtype": str(dtype), "machine": machine, "rows": rows}, indent=2)
        write_beside(args.out / "dar_attention.json", lambda file: file.write_text(record + "\n", encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
