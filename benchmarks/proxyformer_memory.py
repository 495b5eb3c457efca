"""Memory and speed of a training step at long histories: ProxyFormer against a plain decoder of the same size.

    python benchmarks/proxyformer_memory.py --device cuda --out results/
    python benchmarks/proxyformer_memory.py --rows proxy-longest --longest 8388608 --steps 3

The paper's Table 2 in one run and one process, which may hold no more than --memory-gb of GPU memory. A step is
forward pass, loss, backward pass and fused AdamW on one sequence. Rows:

    decoder                   plain decoder, every position labelled, its logits in float32 all at once (as the paper)
    decoder-checkpointed      the same with gradient checkpointing and the loss in chunks
    decoder-history           plain decoder over history and generated tokens, loss on the generated ones only
    decoder-history-checkpointed
    proxy-short, proxy-long   ProxyFormer, history encoded to proxies, history stream rebuilt in the backward pass
    proxy-longest             the longest of --lengths that trains; doubling, then bisection
    ….-checkpointed           these three with gradient checkpointing instead
    ….-plain                  proxy-short and proxy-long with neither, as plain autograd keeps them
    ….-captured               decoder-history and proxy-short, as plain autograd keeps them, forward and backward pass
                              replayed from a CUDA graph: at this length Python is slower than a GPU
    decoder-longest           the longest for the plain decoder with checkpointing; only if named

Where memory is nearly full, fragments decide: PYTORCH_ALLOC_CONF=expandable_segments:True helps every row. On a CPU
there is no limit and no figure of memory; shapes and times only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM, cli
from nearfar.evaluation.comparison import aligned_table, number_or_dash
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.atomic_file import write_beside

WARM_UP_STEPS = 2
# Steps of a trial while the longest history is searched: the second has the optimiser's state beside it.
TRIAL_STEPS = 2
# Defaults by device: the decoder's tokens, short and long history, generated tokens; then the lengths that are tried.
SIZES = {"cuda": (20_496, 20_992, 716_800, 128), "cpu": (96, 128, 256, 16)}
LENGTHS = {
    "cuda": [count << 20 for count in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32)],
    "cpu": [256, 512, 1024],
}
# The paper's Table 2: memory in GB and steps a second.
PAPER = {
    "decoder": (15.6, 2.6),
    "decoder-history": (15.6, 1.3),
    "proxy-short": (2.9, 16.10),
    "proxy-long": (15.1, 2.70),
}


@dataclass(frozen=True)
class Row:
    """One line of the table: which model, over what, and what it keeps for the backward pass."""

    name: str
    proxies: bool
    length: str  # "all": every position labelled; "short", "long", "longest": history, then generated tokens
    kept: str  # "plain", "checkpointed" or "reversible"
    captured: bool = False  # forward and backward pass are one CUDA graph

    @property
    def paper(self) -> tuple[float, float] | None:
        """The paper does not say what its ProxyFormer keeps; its figures stand beside the default rows."""
        return PAPER.get(self.name)


def _rows() -> dict[str, Row]:
    rows = [
        Row("decoder", False, "all", "plain"),
        Row("decoder-checkpointed", False, "all", "checkpointed"),
        Row("decoder-history", False, "short", "plain"),
        Row("decoder-history-checkpointed", False, "short", "checkpointed"),
        Row("decoder-history-captured", False, "short", "plain", captured=True),
        Row("proxy-short-captured", True, "short", "plain", captured=True),
    ]
    for length in ("short", "long", "longest"):
        rows += [
            Row(f"proxy-{length}", True, length, "reversible"),
            Row(f"proxy-{length}-checkpointed", True, length, "checkpointed"),
        ]
        if length != "longest":
            rows.append(Row(f"proxy-{length}-plain", True, length, "plain"))
    rows.append(Row("decoder-longest", False, "longest", "checkpointed"))
    return {row.name: row for row in rows}


ROWS = _rows()
DEFAULT_ROWS = [name for name in ROWS if name != "decoder-longest"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch gave up for want of memory: its own exception, cuBLAS's, or the CPU allocator's."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in text for words in ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    )


def make_model(row: Row, args: argparse.Namespace, device: torch.device, labelled: int) -> ProxyFormerForCausalLM:
    """Random weights: float32, or all bfloat16 with --bf16-weights."""
    torch.manual_seed(args.seed)
    config = ProxyFormerConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        history_hidden_size=args.history_hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        compression_ratio=args.ratio if row.proxies else None,
        generation_block_size=args.generation_block if row.proxies else None,
        reversible_history=row.kept == "reversible",
        auxiliary_loss_weight=args.auxiliary_loss_weight,
        # The paper's baseline: logits of all positions at once. Elsewhere a few thousand at a time.
        **({"loss_chunk_tokens": labelled} if row.length == "all" and row.kept == "plain" else {}),
    )
    model = ProxyFormerForCausalLM(config).to(device).train()
    if args.bf16_weights:
        model.to(torch.bfloat16)
    if row.kept == "checkpointed":
        # Its name from transformers 5.24 on, and before.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def make_inputs(row: Row, history: int, args: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """Random ids; with a history, the same predicted tokens in both models: all generated ones but the first."""
    generator = torch.Generator().manual_seed(args.seed)

    def draw(tokens: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(args.vocabulary, (1, tokens), generator=generator, dtype=dtype).to(device)

    if row.length == "all":
        ids = draw(args.decoder_tokens, torch.long)
        return {"input_ids": ids, "labels": ids}
    past, ids = draw(history, torch.int32), draw(args.generated_tokens, torch.long)
    if row.proxies:
        return {"history_ids": past, "input_ids": ids, "labels": ids}
    labels = torch.full((1, history + args.generated_tokens), -100, device=device)
    labels[:, history + 1 :] = ids[:, 1:]
    return {"input_ids": torch.cat([past.long(), ids], 1), "labels": labels}


def known_loss(
    model: ProxyFormerForCausalLM, inputs: dict[str, torch.Tensor], generated: int, weight: float
) -> torch.Tensor:
    """The model's loss without looking for labels, which waits for the GPU and cannot be captured."""
    outputs = model.model(**{name: x for name, x in inputs.items() if name != "labels"}, use_cache=False)
    targets = inputs["labels"][0, -generated + 1 :]

    def cross_entropy(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(states[0, -generated:-1]).float(), targets)

    return cross_entropy(outputs.last_hidden_state) + weight * cross_entropy(outputs.middle_hidden_state)


def capture(passes: Callable[[], object], model: torch.nn.Module) -> Callable[[], object]:
    """Forward and backward pass as one CUDA graph, which writes gradients anew at each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            model.zero_grad(set_to_none=True)
            passes()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()
    return graph.replay


def step_times(row: Row, history: int, steps: int, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Seconds of each step after warming up."""
    inputs = make_inputs(row, history, args, device)
    model = make_model(row, args, device, inputs["input_ids"].shape[1])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    forward: Any = torch.compile(model, dynamic=False) if args.compile else model

    def passes() -> None:
        with torch.autocast(device.type, args.low) if args.low else nullcontext():
            if row.captured:
                loss = known_loss(model, inputs, args.generated_tokens, args.auxiliary_loss_weight)
            else:
                loss = forward(**inputs, use_cache=False).loss
        loss.backward()

    both: Callable[[], object] = capture(passes, model) if row.captured else passes
    times = []
    for index in range(WARM_UP_STEPS + steps):
        synchronize(device)
        start = time.perf_counter()
        both()
        optimiser.step()
        if not row.captured:
            optimiser.zero_grad(set_to_none=True)
        synchronize(device)
        if index >= WARM_UP_STEPS:
            times.append(time.perf_counter() - start)
    return times


def clean(device: torch.device, compiled: bool) -> None:
    """Give back what the last row held, so that each row's peak is its own."""
    if compiled:
        torch.compiler.reset()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(row: Row, history: int, steps: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One line of the table; `error` says why there are no figures in it."""
    clean(device, args.compile)
    tokens = args.decoder_tokens if row.length == "all" else history + args.generated_tokens
    found: dict[str, Any] = {
        "row": row.name, "system": "ProxyFormer" if row.proxies else "plain decoder", "kept": row.kept,
        "history": 0 if row.length == "all" else history,
        "generated": args.decoder_tokens if row.length == "all" else args.generated_tokens,
        "error": None, "peak_gb": None, "reserved_gb": None, "steps_per_second": None, "tokens_per_second": None,
    }  # fmt: skip
    try:
        seconds = statistics.median(step_times(row, history, steps, args, device))
        found |= {"steps_per_second": 1 / seconds, "tokens_per_second": tokens / seconds}
        if device.type == "cuda":
            found["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
            found["reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    except RuntimeError as error:  # or a kernel's limit, for instance: the other rows do not depend on it
        problem = "out of memory" if is_out_of_memory(error) else "failed"
        found |= {"error": problem, "message": " ".join(str(error).split())[:300]}
    return found


def longest(lengths: Sequence[int], trial: Callable[[int], bool]) -> int | None:
    """The greatest of ascending `lengths` for which `trial` holds, given that it holds up to some length.

    Every second, fourth, … is tried until one fails, then the gap is halved.

    Returns:
        The length; None if not even the first will do.
    """
    good, bad, at = -1, len(lengths), 0
    while at < bad:
        if not trial(lengths[at]):
            bad = at
            break
        good = at
        if at == len(lengths) - 1:
            break
        at = min(2 * at + 1, len(lengths) - 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if trial(lengths[middle]):
            good = middle
        else:
            bad = middle
    return lengths[good] if good >= 0 else None


def measure_longest(row: Row, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The row at the longest history that trains, with the lengths that were tried."""
    tried: dict[int, dict[str, Any]] = {}

    def trial(length: int) -> bool:
        tried[length] = measure(row, length, TRIAL_STEPS, args, device)
        tqdm.write(f"{row.name}: {length:,} tokens: {tried[length]['error'] or 'trains'}", file=sys.stderr)
        return tried[length]["error"] is None

    length = longest(args.lengths, trial)
    found = tried[args.lengths[0]] if length is None else measure(row, length, args.steps, args, device)
    return found | {"tried": {str(length): one["error"] or "trains" for length, one in sorted(tried.items())}}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", help="comma-separated (default: all but decoder-longest, on a CPU also but ….-captured)"
    )
    parser.add_argument("--memory-gb", type=float, default=16.0, help="limit on the GPU, in 10^9 bytes")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a row, of which the median counts")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--bf16-weights", action="store_true", help="bfloat16 (default: autocast over float32)")
    parser.add_argument("--hidden-size", type=int, help="default: 512; 32 on a CPU")
    parser.add_argument("--history-hidden-size", type=int, help="default: 64; 8 on a CPU")
    parser.add_argument("--layers", type=int, help="default: 10; 2 on a CPU")
    parser.add_argument("--heads", type=int, help="default: 8; 4 on a CPU")
    parser.add_argument("--vocabulary", type=int, help="default: 50257; 503 on a CPU")
    parser.add_argument("--ratio", type=int, help="compression ratio P (default: 64; 16 on a CPU)")
    parser.add_argument(
        "--generation-block", type=int, help="C, tokens (default: all generated ones, in whole proxies)"
    )
    parser.add_argument("--auxiliary-loss-weight", type=float, default=0.3, help="of the mid-layer head, in all rows")
    parser.add_argument("--decoder-tokens", type=int, help="of the rows without history (default: 20496)")
    parser.add_argument("--short-history", type=int, help="default: 20992")
    parser.add_argument("--long-history", type=int, help="default: 716800")
    parser.add_argument("--generated-tokens", type=int, help="default: 128")
    parser.add_argument("--lengths", help="histories tried for the longest, comma-separated (default: 1 M to 32 M)")
    parser.add_argument("--longest", type=int, help="try none of --lengths beyond this (default: 16 M)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for proxyformer_memory.json")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    args.chosen = args.rows.split(",") if args.rows else list(DEFAULT_ROWS)
    if unknown := set(args.chosen) - set(ROWS):
        parser.error(f"--rows: {', '.join(sorted(unknown))} is none of {', '.join(ROWS)}")
    if args.memory_gb <= 0 or args.steps < 1:
        parser.error("--memory-gb must be above 0 and --steps at least 1")
    try:
        args.lengths = None if args.lengths is None else sorted({int(part) for part in args.lengths.split(",")})
    except ValueError:
        parser.error(f"--lengths takes whole numbers, got {args.lengths!r}")
    return args


def fill_in(args: argparse.Namespace, device: torch.device) -> None:
    """Defaults that depend on the device.

    Raises:
        ValueError: a size out of range, or nothing to try for the longest history.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    if kind == "cpu":
        captured = [name for name in args.chosen if ROWS[name].captured]
        if args.rows and captured:
            raise ValueError(f"--rows {captured[0]} needs a GPU: a CUDA graph holds its step")
        args.chosen = [name for name in args.chosen if name not in captured]
    shape = {"cuda": (512, 64, 10, 8, 50_257, 64), "cpu": (32, 8, 2, 4, 503, 16)}[kind]
    names = ("hidden_size", "history_hidden_size", "layers", "heads", "vocabulary", "ratio")
    sizes = ("decoder_tokens", "short_history", "long_history", "generated_tokens")
    for name, value in zip((*names, *sizes), (*shape, *SIZES[kind]), strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
        least = 2 if name in ("decoder_tokens", "generated_tokens") else 1
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.generation_block is None:
        args.generation_block = -(-args.generated_tokens // args.ratio) * args.ratio
    lengths = LENGTHS[kind] if args.lengths is None else args.lengths
    limit = args.longest or (16 << 20)
    args.lengths = [length for length in lengths if length <= limit]
    if not args.lengths or args.lengths[0] < 1:
        raise ValueError(f"--lengths up to --longest {limit} must name positive histories, got {lengths}")
    dtype = cli.find_dtype(args, device)
    args.low = None if dtype == torch.float32 or args.bf16_weights else dtype


def held_equal(args: argparse.Namespace) -> str:
    if args.bf16_weights:
        kind = "bfloat16 weights"
    else:
        kind = f"{str(args.low)[6:]} autocast over float32 weights" if args.low else "float32"
    return (
        f"Held equal: one sequence, d = {args.hidden_size}, {args.layers} layers, {args.heads} heads, vocabulary "
        f"{args.vocabulary}, {kind}, AdamW{', torch.compile' if args.compile else ''}, mid-layer head "
        f"{args.auxiliary_loss_weight:g}; ProxyFormer with P = {args.ratio}, "
        f"C = {args.generation_block}, d_h = {args.history_hidden_size}. With a "
        f"history both predict the same {args.generated_tokens - 1} tokens. Median of {args.steps} steps"
    )


def run(args: argparse.Namespace) -> None:
    device = cli.find_device(args)
    cli.set_threads(args, device)
    fill_in(args, device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gb * 1e9 / total), device.index or 0)
    rows: list[dict[str, Any]] = []
    bar = tqdm(args.chosen, unit="row", dynamic_ncols=True)
    for name in bar:
        bar.set_description(name)
        row = ROWS[name]
        if row.length == "longest":
            rows.append(measure_longest(row, args, device))
        else:
            history = args.long_history if row.length == "long" else args.short_history
            rows.append(measure(row, history, args.steps, args, device))
        speed = number_or_dash(rows[-1]["steps_per_second"], ".2f")
        tqdm.write(f"{name}: {rows[-1]['error'] or f'{speed} it/s'}", file=sys.stderr)
    clean(device, args.compile)

    machine = machine_report(device)
    limit = f"at most {args.memory_gb:g} GB of GPU memory" if device.type == "cuda" else "no limit on memory"
    print(f"\n{json.dumps(machine)}")
    print(f"{held_equal(args)}; {limit}.\n")

    header = ["row", "system", "kept for backward", "history", "generated", "peak, GB", "it/s", "tokens/s"]
    body = []
    for one in rows:
        paper = ROWS[one["row"]].paper or (None, None)
        kept = f"{one['kept']}, one graph" if ROWS[one["row"]].captured else one["kept"]
        body.append([
            one["row"], one["system"], kept, f"{one['history']:,}", f"{one['generated']:,}",
            one["error"] or number_or_dash(one["peak_gb"], ".2f"), number_or_dash(one["steps_per_second"], ".2f"),
            number_or_dash(one["tokens_per_second"], ",.0f"), number_or_dash(paper[0], ".1f"),
            number_or_dash(paper[1], ".2f"),
        ])  # fmt: skip
    print(aligned_table([*header, "paper, GB", "paper, it/s"], body))
    for one in rows:
        if "tried" in one:
            print(f"{one['row']}: " + ", ".join(f"{int(length):,} {how}" for length, how in one["tried"].items()))
        if one.get("message"):
            print(f"{one['row']}: {one['message']}")
    if args.out is not None:
        names = ("hidden_size", "history_hidden_size", "layers", "heads", "vocabulary", "ratio", "memory_gb", "steps",
                 "compile", "bf16_weights", "auxiliary_loss_weight", "lengths")  # fmt: skip
        settings = {name: getattr(args, name) for name in names} | {"autocast": str(args.low) if args.low else None}
        settings["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        record = json.dumps({"settings": settings, "machine": machine, "rows": rows}, indent=2)
        write_beside(
            args.out / "proxyformer_memory.json", lambda file: file.write_text(record + "\n", encoding="utf-8")
        )


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
