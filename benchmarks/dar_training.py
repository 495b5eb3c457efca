"""Time and memory of a whole training step: DAR against transformers' GPT-NeoX of the same shape, in one run.

    python benchmarks/dar_training.py --device cuda
    python benchmarks/dar_training.py --shapes 4x128x4 --block-tokens 512 --batch-size 1 --device cpu --threads 1

A step is forward pass, loss, backward pass and AdamW, with float32 weights under bfloat16 autocast on a GPU, as
Trainer's bf16 runs it. Both models are as their library makes them (GPT-NeoX with sdpa), once as they are and once
through torch.compile. They take turns, a block of steps each; the figure is the median step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from nearfar import DARConfig, DARForCausalLM, cli
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.atomic_file import write_beside

# layers x hidden size x heads
SHAPES = {"cuda": "12x768x12,24x1024x16", "cpu": "2x128x4"}
WARM_UP_STEPS = 3


class Step:
    """One model with its optimiser, ready to be stepped."""

    def __init__(self, config: Any, args: argparse.Namespace, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(args.seed)
        model_class = DARForCausalLM if isinstance(config, DARConfig) else GPTNeoXForCausalLM
        model = model_class(config).to(device).train()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.model = torch.compile(model) if compiled else model
        self.device, self.low = device, device.type == "cuda"

    def run(self, ids: torch.Tensor) -> float:
        """Milliseconds of one step."""
        synchronize(self.device)
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16) if self.low else nullcontext():
            loss = self.model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        synchronize(self.device)
        return 1000 * (time.perf_counter() - start)


def configs(shape: tuple[int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    layers, hidden, heads = shape
    common = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": args.block_tokens,
        "attn_implementation": "sdpa",
    }
    return {
        "GPT-NeoX": GPTNeoXConfig(**common),
        "DAR": DARConfig(**common, window_size=args.window, bottleneck_size=hidden // 4),
    }


def measure(shape: tuple[int, int, int], compiled: bool, args: argparse.Namespace, device: torch.device) -> list[dict]:
    """Both systems of one shape, in turns."""
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(args.vocabulary, (args.batch_size, args.block_tokens), generator=generator).to(device)
    steps: dict[str, Step] = {}
    peaks: dict[str, float] = {}
    for name, config in configs(shape, args).items():
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        steps[name] = Step(config, args, device, compiled)
        for index in range(WARM_UP_STEPS):
            if device.type == "cuda" and index == WARM_UP_STEPS - 1:
                torch.cuda.reset_peak_memory_stats(device)
            steps[name].run(ids)
        if device.type == "cuda":
            peaks[name] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name] += [step.run(ids) for _ in range(args.steps)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "shape": list(shape), "compiled": compiled, "system": name, "parameters": steps[name].parameters,
            "ms": medians[name], "relative": medians[name] / medians["GPT-NeoX"],
            "tokens_per_second": 1000 * ids.numel() / medians[name], "peak_gib": peaks.get(name),
        }
        for name in steps
    ]  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", help="layers x hidden size x heads, comma-separated (default: Pythia-160M and 410M)"
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of a system before it is the other's turn")
    parser.add_argument("--modes", default="eager,compiled", help="comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for dar_training.json")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    if set(args.modes.split(",")) - {"eager", "compiled"}:
        parser.error(f"--modes takes eager and compiled, got {args.modes!r}")
    if min(args.batch_size, args.block_tokens, args.rounds, args.steps) < 1:
        parser.error("--batch-size, --block-tokens, --rounds and --steps must be at least 1")
    return args


def run(args: argparse.Namespace) -> None:
    device = cli.find_device(args)
    cli.set_threads(args, device)
    rows: list[dict[str, Any]] = []
    shapes = [tuple(map(int, text.split("x"))) for text in (args.shapes or SHAPES[device.type]).split(",")]
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"a shape is layers x hidden size x heads, for example 12x768x12, got {args.shapes!r}")
    jobs = [(shape, mode) for shape in shapes for mode in args.modes.split(",")]
    for shape, mode in tqdm(jobs, unit="shape", dynamic_ncols=True):
        rows += measure(shape, mode == "compiled", args, device)  # type: ignore[arg-type]
        for row in rows[-2:]:
            tqdm.write(f"{row['shape']} {mode}, {row['system']}: {row['ms']:.1f} ms a step", file=sys.stderr)
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    machine = machine_report(device)
    kind = "bfloat16 autocast over float32 weights" if device.type == "cuda" else "float32"
    print(f"\n{json.dumps(machine)}")
    print(
        f"Held equal: batch {args.batch_size} x {args.block_tokens} tokens, {kind}, AdamW, "
        f"vocabulary {args.vocabulary}; DAR with window {args.window} and a quarter of the width\n"
    )
    header = [
        "layers x width x heads",
        "mode",
        "system",
        "parameters, M",
        "step, ms",
        "of GPT-NeoX",
        "tokens/s",
        "peak, GiB",
    ]
    body = [
        [
            "x".join(map(str, row["shape"])), "compiled" if row["compiled"] else "eager", row["system"],
            f"{row['parameters'] / 1e6:.0f}", f"{row['ms']:.1f}", f"{row['relative']:.3f} x",
            f"{row['tokens_per_second']:,.0f}", "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    print(aligned_table(header, body))
    if args.out is not None:
        settings = {name: getattr(args, name) for name in ("batch_size", "block_tokens", "window", "vocabulary")}
        record = json.dumps({**settings, "machine": machine, "rows": rows}, indent=2)
        write_beside(args.out / "dar_training.json", lambda file: file.write_text(record + "\n", encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
