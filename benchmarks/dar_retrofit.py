"""How well a GPT-NeoX keeps as a DAR: perplexity by bottleneck and initialisation, at once and after distillation.

    python benchmarks/dar_retrofit.py --model runs/70m/vanilla --text train.txt.xz --eval-text validation.txt.xz
    python benchmarks/dar_retrofit.py --model EleutherAI/pythia-70m --text books/ --distill-steps 300 --out dar.json

One run, one table. Everything but bottleneck and method is the same for all rows: the source model's weights (shared,
not copied), the calibration text, which is read once, the window, the blocks that perplexity is measured on, and the
steps, blocks and seed of the distillation, in which the base stays frozen. --model is a GPT-NeoX checkpoint, or one of
examples/train_dar.py's variant `vanilla`.

Columns: far bytes = cache bytes that a token beyond the window takes in the "fast" mode, and the share of an ordinary
cache's, in the dtype of the checkpoint. ppl = perplexity of held-out text; % = the same relative to the source's. KL =
divergence of the predictions from the source's, in 10^-4 nats a token, over tokens that see far ones: it also tells
apart what differs by less than perplexity's own noise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

from nearfar import cli
from nearfar.conversion.dar_from_pythia import (
    SPREAD,
    block_perplexity,
    cache_bytes_per_far_token,
    dar_around,
    dar_config,
    load_gpt_neox,
    read_base_config,
    spread_blocks,
)
from nearfar.conversion.dar_initialisation import METHODS, collect_moments, initialise_bottlenecks, needs_moments
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.machine import machine_report, synchronize
from nearfar.modeling.atomic_file import write_beside
from nearfar.training.dar_distillation import DistillationSettings, distill_dar
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks


def load_text(options: argparse.Namespace, tokenizer: Any, distilled_tokens: int) -> tuple[TokenBlocks, TokenBlocks]:
    """Blocks to calibrate and distill on, and blocks to measure on."""
    block = options.block_tokens
    common: dict[str, Any] = {"text_field": options.text_field, "split": options.split}
    wanted = max(SPREAD * options.calibration_tokens, distilled_tokens, block)
    evaluated = max(1, options.eval_tokens // block)
    if options.eval_text is not None:
        text = load_token_blocks(options.text, tokenizer, block, max_tokens=wanted, **common)
        held_out = load_token_blocks(
            options.eval_text, tokenizer, block, max_tokens=SPREAD * evaluated * block, **common
        )
        return text, spread_blocks(held_out, evaluated)
    everything = load_token_blocks(options.text, tokenizer, block, max_tokens=wanted + evaluated * block, **common)
    if len(everything) < 2:
        raise ValueError(
            f"the text fills one block of {block} tokens, which leaves none to measure on: give --eval-text"
        )
    end = len(everything) - min(evaluated, max(1, len(everything) // 5))
    return everything.part(0, end), everything.part(end, len(everything))


def distillation_settings(options: argparse.Namespace) -> DistillationSettings:
    return DistillationSettings(
        steps=options.distill_steps,
        batch_size=options.distill_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation,
        learning_rate=options.learning_rate,
        attention_weight=options.attention_weight,
        logits_weight=options.logits_weight,
        min_windows=options.min_windows,
        save_steps=max(1, options.distill_steps),
        seed=options.seed,
    )


@torch.no_grad()
def divergence(source: Any, model: Any, blocks: TokenBlocks, window: int, batch_size: int) -> float:
    """KL(source || model) in nats a token, over tokens that see some beyond the window."""
    total, count = 0.0, 0
    for start in range(0, len(blocks), batch_size):
        rows = range(start, min(start + batch_size, len(blocks)))
        ids = torch.stack([blocks[row]["input_ids"] for row in rows]).to(source.device)
        columns = ids.shape[1] - window
        both = [m(input_ids=ids, use_cache=False, logits_to_keep=columns).logits for m in (source, model)]
        for expected, found in zip(*both, strict=True):
            expected, found = expected.float().log_softmax(-1), found.float().log_softmax(-1)
            total += F.kl_div(found, expected, log_target=True, reduction="sum").item()
        count += ids.shape[0] * columns
    return total / count


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rows, and what was held equal."""
    base = read_base_config(options.model)
    if options.block_tokens is None:
        options.block_tokens = min(2048, base.max_position_embeddings)
    settings = distillation_settings(options)
    if not options.window_size < options.block_tokens <= base.max_position_embeddings:
        raise ValueError(
            f"--block-tokens {options.block_tokens} must be more than the window of {options.window_size} and at most "
            f"the model's {base.max_position_embeddings} positions"
        )
    if settings.steps:
        settings.check_blocks(options.block_tokens, options.window_size)
    sizes = [base.hidden_size // divisor for divisor in options.divisors]
    configs = {
        size: dar_config(base, bottleneck_size=size, window_size=options.window_size) for size in dict.fromkeys(sizes)
    }
    device = cli.find_device(options)
    cli.set_threads(options, device)
    low_precision = cli.find_dtype(options, device) != torch.float32
    distilled_tokens = settings.tokens(options.block_tokens)
    text, held_out = load_text(
        options, AutoTokenizer.from_pretrained(options.tokenizer or options.model), distilled_tokens
    )
    calibration = spread_blocks(text, max(1, options.calibration_tokens // options.block_tokens))

    model = load_gpt_neox(options.model, base)
    dtype = model.dtype
    model = model.float().to(device)
    precision = torch.autocast(device.type, torch.bfloat16) if low_precision else nullcontext()

    def perplexity(measured: Any) -> float:
        with precision:
            return block_perplexity(measured, held_out, batch_size=options.batch_size).perplexity

    def state(measured: Any) -> dict[str, float]:
        with precision:
            kl = divergence(model, measured, held_out, options.window_size, options.batch_size)
        return {"perplexity": perplexity(measured), "kl": kl}

    source = perplexity(model)
    print(f"source: perplexity {source:.4g}", file=sys.stderr, flush=True)
    moments, calibration_seconds = None, 0.0
    if any(needs_moments(method, size, base.hidden_size) for method in options.methods for size in configs):
        start = time.perf_counter()
        with precision:
            moments = collect_moments(model, calibration, window=options.window_size, batch_size=options.batch_size)
        synchronize(device)
        calibration_seconds = time.perf_counter() - start
    rows = []
    for size, config in configs.items():
        for method in options.methods:
            dar = dar_around(model, config)
            start = time.perf_counter()
            initialise_bottlenecks(dar, moments, method=method)
            synchronize(device)
            row: dict[str, Any] = {
                "bottleneck_size": size,
                "divisor": base.hidden_size / size,
                "method": method,
                "far_bytes": cache_bytes_per_far_token(config, dtype),
                "initialisation_seconds": time.perf_counter() - start,
                "initialised": state(dar),
            }
            if settings.steps:
                with tempfile.TemporaryDirectory() as folder:
                    report = distill_dar(dar, text, folder, settings, bf16=low_precision)
                row |= {"distilled": state(dar), "distillation": asdict(report)}
            rows.append(row)
            print(f"{size} {method}: {_short(row)}", file=sys.stderr, flush=True)
    return {
        "model": Path(options.model).name if Path(options.model).is_dir() else options.model,
        "layers": base.num_hidden_layers,
        "hidden_size": base.hidden_size,
        "window_size": options.window_size,
        "block_tokens": options.block_tokens,
        "calibration_tokens": len(calibration) * options.block_tokens,
        "calibration_seconds": calibration_seconds,
        "eval_tokens": len(held_out) * options.block_tokens,
        "autocast": "bfloat16" if low_precision else None,
        "distillation": asdict(settings) if settings.steps else None,
        "distilled_tokens": distilled_tokens,
        "training_tokens": options.training_tokens,
        "source": source,
        "rows": rows,
        "machine": machine_report(device),
    }


def _short(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{stage} {row[stage]['perplexity']:.4g}" for stage in ("initialised", "distilled") if stage in row
    )


def format_report(result: dict[str, Any]) -> str:
    """What was held equal, and the table."""
    equal = [
        f"{result['model']}: {result['layers']} layers, hidden size {result['hidden_size']}; perplexity "
        f"{result['source']:.4g}",
        f"the same for every row: window {result['window_size']}, {result['calibration_tokens']:,} tokens of "
        f"calibration, {result['eval_tokens']:,} held-out tokens in blocks of {result['block_tokens']:,}, "
        f"{result['autocast'] or 'float32'}",
    ]
    if result["distillation"]:
        tokens = f"{result['distilled_tokens']:,} tokens"
        if result["training_tokens"]:
            tokens += f" ({100 * result['distilled_tokens'] / result['training_tokens']:.2g} % of the training's)"
        settings = result["distillation"]
        equal.append(
            f"distillation, base frozen: {settings['steps']} steps, {tokens}, learning rate "
            f"{settings['learning_rate']:g}, seed {settings['seed']}"
        )
    stages = [stage for stage in ("initialised", "distilled") if stage in result["rows"][0]]
    header = ["bottleneck", "method", "far bytes"]
    for stage in stages:
        header += [f"ppl {stage}", "%", "KL"]
    lines = []
    for row in result["rows"]:
        sizes = row["far_bytes"]
        line = [
            f"{row['bottleneck_size']} (d/{row['divisor']:g})",
            row["method"],
            f"{sizes['fast']:,} (1/{sizes['ordinary'] / sizes['fast']:.3g})",
        ]
        for stage in stages:
            perplexity, kl = row[stage]["perplexity"], row[stage]["kl"]
            line += [f"{perplexity:.4g}", f"{100 * perplexity / result['source']:.2f}", f"{1e4 * kl:.3g}"]
        lines.append(line)
    return "\n".join([*equal, "", aligned_table(header, lines)])


def _divisors(text: str) -> list[int]:
    try:
        divisors = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between, got {text!r}") from None
    if any(divisor < 1 for divisor in divisors):
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
    return divisors


def _methods(text: str) -> list[str]:
    methods = list(dict.fromkeys(text.split(",")))
    for method in methods:
        if method not in METHODS:
            raise argparse.ArgumentTypeError(f"{method!r} is none of {', '.join(METHODS)}")
    return methods


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="ID_OR_DIR", help="a trained GPT-NeoX")
    add("--tokenizer", metavar="ID_OR_DIR", help="default: the model's")
    add("--divisors", type=_divisors, default="2,4,8", help="bottlenecks: the hidden size over these numbers")
    add("--methods", type=_methods, default=",".join(METHODS))
    add("--window-size", type=int, default=128)
    add("--text", nargs="+", required=True, metavar="PATH_OR_ID", help="to calibrate and distill on")
    add("--eval-text", nargs="+", metavar="PATH_OR_ID", help="default: the end of --text, left out there")
    add("--text-field", default="text", help="of JSON files and datasets")
    add("--split", default="train", help="of a dataset")
    add("--block-tokens", type=int, help="default: 2048, or the model's longest sequence")
    add("--calibration-tokens", type=int, default=131_072, help="in blocks spread over 8 times as many")
    add("--eval-tokens", type=int, default=262_144, help="spread in the same way")
    add("--batch-size", type=int, default=4, help="blocks at once in calibrating and measuring")
    add("--distill-steps", type=int, default=0)
    add("--distill-batch-size", type=int, default=8)
    add("--gradient-accumulation", type=int, default=1)
    add("--learning-rate", type=float, default=1e-3)
    add("--attention-weight", type=float, default=1.0)
    add("--logits-weight", type=float, default=1.0)
    add("--min-windows", type=int, default=8, help="refuse to distill on blocks shorter than so many windows")
    add("--training-tokens", type=int, help="tokens the source was trained on, to say what share distillation reads")
    add("--seed", type=int, default=0, help="of the order of the blocks")
    add("--out", type=Path, help="write everything to this JSON file too")
    cli.add_machine_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        result = measure(options)
    except (cli.UserError, ValueError, OSError, ImportError) as error:
        if options.traceback:
            raise
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
    print(format_report(result))
    if options.out is not None:
        text = json.dumps(result, indent=2) + "\n"
        write_beside(options.out, lambda path: path.write_text(text, encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
