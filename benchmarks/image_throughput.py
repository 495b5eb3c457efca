"""Images a second, drawn and trained on, by a ProxyFormer and by plain transformers of equal width in the same run.

    python benchmarks/image_throughput.py --device cuda
    python benchmarks/image_throughput.py --shapes 32:4 --hidden-size 64 --layers 2 --threads 1 --repeats 3

The plain transformer is written here in the manner of DiT and JiT: patches projected to tokens, full attention with a
rotary embedding, RMSNorm, SwiGLU, time and class as scale, shift and gate of each block, a linear layer back to
pixels. It has the ProxyFormer's width, depth, heads and inner width. With the same patch it has as many tokens as the
ProxyFormer has proxies, and no stream at full resolution. With patches of a half and a quarter it has 4 and 16 times
as many, which is what a finer look at the pixels costs it.

Drawing is Euler's method with --sampling-steps, one pass a step, in the device's dtype; training is the flow-matching
loss, backward pass and AdamW, float32 weights under autocast. Medians over --repeats rounds, in which the systems take
turns; on a GPU passes are recorded as CUDA graphs, so that launches do not count.
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
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from nearfar import ProxyFormerImageConfig, ProxyFormerImageModel, cli
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.axial_positions import AxialRotary, sinusoidal_grid
from nearfar.modeling.flow_sampling import euler_step
from nearfar.modeling.rms_norm import RMSNorm
from nearfar.modeling.time_embedding import TimeEmbedding
from nearfar.training.flow_matching import flow_matching_loss

# Image size : patch : images at once.
SHAPES = {"cuda": "32:4:128,64:8:128,256:16:16", "cpu": "32:4:4,64:8:2,256:16:1"}
CLASSES = 10


# --- the plain transformer -------------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    """Attention and SwiGLU, each scaled, shifted and gated by the condition (DiT's adaptive normalisation)."""

    def __init__(self, size: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(size, 6 * size)
        self.norms = nn.ModuleList([RMSNorm(size, eps=1e-6) for _ in range(2)])
        self.query_norm, self.key_norm = (RMSNorm(size // heads, eps=1e-6) for _ in range(2))
        self.projections = nn.Linear(size, 3 * size, bias=False)
        self.output = nn.Linear(size, size, bias=False)
        self.gate_up = nn.Linear(size, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, size, bias=False)

    def forward(self, x: torch.Tensor, condition: torch.Tensor, rotary: AxialRotary) -> torch.Tensor:
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        n = torch.addcmul(shift1, self.norms[0](x), 1 + scale1)
        query, key, value = self.projections(n).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key, value = (y.transpose(1, 2) for y in (self.query_norm(query), self.key_norm(key), value))
        attended = F.scaled_dot_product_attention(rotary(query), rotary(key), value)
        x = torch.addcmul(x, gate1, self.output(attended.transpose(1, 2).flatten(2)))
        n = torch.addcmul(shift2, self.norms[1](x), 1 + scale2)
        gate, up = self.gate_up(n).chunk(2, dim=-1)
        return torch.addcmul(x, gate2, self.down(F.silu(gate) * up))


class PlainTransformer(nn.Module):
    """Patches as tokens, full attention; called like a `ProxyFormerImageModel`."""

    def __init__(self, patch: int, channels: int, size: int, layers: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.patch, self.size, self.head_dim = patch, size, size // heads
        self.config = SimpleNamespace(auxiliary_loss_weight=0.0)
        self.embed = nn.Linear(channels * patch**2, size)
        self.time_embedding = TimeEmbedding(256, size)
        self.class_embedding = nn.Embedding(CLASSES + 1, size)
        self.blocks = nn.ModuleList([PlainBlock(size, heads, intermediate) for _ in range(layers)])
        self.norm = RMSNorm(size, eps=1e-6)
        self.head = nn.Linear(size, channels * patch**2)

    def forward(
        self,
        pixel_values: torch.Tensor,
        time: torch.Tensor,
        class_labels: torch.Tensor,
        drop_condition: torch.Tensor | None = None,
        **unused: Any,
    ) -> Any:
        """Estimates of images, `sample` as in `ProxyFormerImageOutput`."""
        side = self.patch
        rows, columns = pixel_values.shape[2] // side, pixel_values.shape[3] // side
        tokens = F.pixel_unshuffle(pixel_values, side).flatten(2).mT
        x = self.embed(tokens)
        places = sinusoidal_grid((rows, columns), self.size, x.device, torch.float32)
        x = x + places.to(x.dtype)
        if drop_condition is not None:
            class_labels = torch.where(drop_condition, CLASSES, class_labels)
        condition = F.silu(self.time_embedding(time) + self.class_embedding(class_labels))
        rotary = AxialRotary((rows, columns), self.head_dim, 100.0, x.device, torch.float32)
        for block in self.blocks:
            x = block(x, condition, rotary)
        sample = F.pixel_shuffle(self.head(self.norm(x)).mT.unflatten(2, (rows, columns)), side)
        return SimpleNamespace(sample=sample, middle_sample=None)


# --- measuring -------------------------------------------------------------------------------------------------------


def make_systems(args: argparse.Namespace, side: int, patch: int) -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    """Name -> tokens, and what makes the model."""
    size, layers, heads = args.hidden_size, args.layers, args.heads
    found: dict[str, tuple[int, Callable[[], nn.Module]]] = {}

    def proxyformer() -> nn.Module:
        return ProxyFormerImageModel(
            ProxyFormerImageConfig(
                image_size=side,
                in_channels=args.channels,
                patch_size=patch,
                local_hidden_size=args.local_hidden_size,
                hidden_size=size,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_classes=CLASSES,
                auxiliary_loss_weight=0.0,
            )
        )

    found[f"ProxyFormer, patch {patch}"] = ((side // patch) ** 2, proxyformer)
    for finer in (1, 2, 4):
        if patch % finer == 0:
            small = patch // finer
            found[f"plain, patch {small}"] = (
                (side // small) ** 2,
                lambda small=small: PlainTransformer(small, args.channels, size, layers, heads, 3 * size),  # type: ignore[misc]
            )
    return found


def recorded(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`run` as a CUDA graph; on a CPU as it is."""
    if device.type != "cuda":
        run()
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are chosen and compiled
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(recorded: Callable[[], Any] = run) -> None:  # what `run` refers to lives as long as the graph
        graph.replay()

    return replay


def passes(
    make: Callable[[], nn.Module], side: int, batch: int, device: torch.device, dtype: torch.dtype, args: Any
) -> tuple[dict[str, Callable[[], Any]], int]:
    """One step of drawing and one of training, and the number of parameters."""
    torch.manual_seed(args.seed)
    model = make().to(device)
    labels = torch.arange(batch, device=device) % CLASSES
    shape = (batch, args.channels, side, side)
    images = torch.rand(shape, device=device) * 2 - 1
    x, step_time = torch.randn(shape, device=device), torch.full((batch,), 0.5, device=device)
    drawing = make().to(device, dtype).eval()

    @torch.no_grad()
    def draw() -> torch.Tensor:
        return euler_step(x, drawing(x.to(dtype), step_time, class_labels=labels).sample.to(x.dtype), 25, 50)

    # Gradients stay in place, so that a recorded step writes where the optimiser reads.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=device.type == "cuda", capturable=device.type == "cuda"
    )

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = flow_matching_loss(model, images, labels).loss  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()

    found = {"draw": recorded(draw, device), "train": recorded(train, device)}
    return found, sum(parameter.numel() for parameter in model.parameters())


def seconds(run: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Mean over `calls` calls in a row."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return (time.perf_counter() - began) / calls


def rate(value: float) -> str:
    """Three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measure(
    args: argparse.Namespace, side: int, patch: int, batch: int, device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """All systems at one size."""
    rows: list[dict[str, Any]] = []
    ready: list[tuple[dict[str, Any], dict[str, Callable[[], Any]]]] = []
    for name, (tokens, make) in make_systems(args, side, patch).items():
        row: dict[str, Any] = {"size": side, "patch": patch, "system": name, "tokens": tokens, "batch": batch}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        try:
            runs, row["parameters"] = passes(make, side, batch, device, dtype, args)
        except torch.OutOfMemoryError:
            tqdm.write(f"{name} at {side}: out of memory", file=sys.stderr)
            continue
        if device.type == "cuda":
            row["peak_gib"] = (torch.cuda.max_memory_allocated(device) - held) / 2**30
        rows.append(row)
        ready.append((row, runs))
    times: dict[tuple[int, str], list[float]] = {}
    for _ in range(args.repeats):
        for index, (_, runs) in enumerate(ready):
            for kind, run in runs.items():
                times.setdefault((index, kind), []).append(seconds(run, device, args.calls))
    for index, (row, _) in enumerate(ready):
        row["drawn_per_second"] = batch / statistics.median(times[index, "draw"]) / args.sampling_steps
        row["trained_per_second"] = batch / statistics.median(times[index, "train"])
    synchronize(device)  # a graph must not be destroyed in flight
    return rows


# --- arguments -------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", metavar="SIZE:PATCH[:BATCH],…", help="image size, patch, images at once")
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, help="default: 512 on a GPU, 64 on a CPU")
    parser.add_argument("--local-hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, help="default: 10 on a GPU, 2 on a CPU")
    parser.add_argument("--heads", type=int, help="default: of 64 numbers each")
    parser.add_argument("--sampling-steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3, help="timed together in each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for image_throughput.json")
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("channels", "local_hidden_size", "sampling_steps", "repeats", "calls"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def read_shapes(text: str) -> list[tuple[int, int, int]]:
    """(size, patch, batch) of each shape.

    Raises:
        ValueError: a shape that is none.
    """
    shapes = []
    for part in text.split(","):
        try:
            numbers = [int(number) for number in part.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) == 2:
            numbers.append(4)
        if len(numbers) != 3 or min(numbers) < 1 or numbers[0] % numbers[1]:
            raise ValueError(
                f"a shape is SIZE:PATCH or SIZE:PATCH:BATCH with a patch that divides the size, for example 64:8:32, "
                f"got {part!r}"
            )
        shapes.append((numbers[0], numbers[1], numbers[2]))
    return shapes


def our_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any] | None:
    """ProxyFormer's row of the same shape; `None` where it ran out of memory."""
    same = (r for r in rows if all(r[name] == row[name] for name in ("size", "patch", "batch")))
    return next((r for r in same if r["system"].startswith("ProxyFormer")), None)


def times_as_fast(ours: dict[str, Any] | None, row: dict[str, Any], name: str) -> str:
    return "–" if ours is None else f"{ours[name] / row[name]:.2f} x"


def run(args: argparse.Namespace) -> None:
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    on_gpu = device.type == "cuda"
    args.hidden_size = args.hidden_size or (512 if on_gpu else 64)
    args.layers = args.layers or (10 if on_gpu else 2)
    args.heads = args.heads or max(1, args.hidden_size // 64)
    if min(args.hidden_size, args.layers, args.heads) < 1 or args.hidden_size % args.heads:
        raise ValueError(f"--heads must divide --hidden-size, got {args.heads} and {args.hidden_size}")
    shapes = read_shapes(args.shapes or SHAPES.get(device.type, SHAPES["cpu"]))
    cli.set_threads(args, device)
    rows: list[dict[str, Any]] = []
    for side, patch, batch in tqdm(shapes, unit="size", dynamic_ncols=True):
        rows += measure(args, side, patch, batch, device, dtype)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    machine = machine_report(device)
    print(f"\n{json.dumps(machine)}")
    print(
        f"Held equal: width {args.hidden_size}, {args.layers} layers, {args.heads} heads, {args.channels} channels, "
        f"{str(dtype).removeprefix('torch.')}; {args.sampling_steps} steps an image; local stream "
        f"{args.local_hidden_size}\n"
    )
    body = []
    for row in rows:
        ours = our_row(rows, row)
        body.append(
            [
                f"{row['size']}²", row["system"], f"{row['tokens']:,}", f"{row['parameters'] / 1e6:.1f} M",
                str(row["batch"]), rate(row["drawn_per_second"]),
                times_as_fast(ours, row, "drawn_per_second"), rate(row["trained_per_second"]),
                times_as_fast(ours, row, "trained_per_second"),
                f"{row['peak_gib']:.2f}" if "peak_gib" in row else "–",
            ]
        )  # fmt: skip
    header = ["pixels", "system", "tokens", "parameters", "batch", "drawn/s", "ProxyFormer is", "trained/s",
              "ProxyFormer is", "peak, GiB"]  # fmt: skip
    print(aligned_table(header, body))
    if args.out is not None:
        settings = {name: getattr(args, name) for name in
                    ("hidden_size", "layers", "heads", "channels", "local_hidden_size", "sampling_steps", "repeats",
                     "calls", "seed")}  # fmt: skip
        record = json.dumps({**settings, "dtype": str(dtype), "machine": machine, "rows": rows}, indent=2)
        write_beside(args.out / "image_throughput.json", lambda file: file.write_text(record + "\n", encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
