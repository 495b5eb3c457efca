"""What each loss term and each stage of ProxyKV's mapper is worth: all of them but one, trained alike.

    nearfar train-mapper --proxy SMALL --target LARGE --sources books/ needles --pairs pairs --pairs-only
    python benchmarks/mapper_ablation.py --pairs pairs --out results/ --steps 500 --seeds 0,1,2
    python benchmarks/mapper_ablation.py --out results/ --table      # what is there so far

Every variant is trained anew on the same pairs, with the same seeds and as many steps (or seconds). The five terms
of the loss are left out by a weight of 0; the three stages are replaced, as in the paper's Appendix C, by the simplest
thing that keeps the shapes (`HybridAxialMapperConfig.disabled_stage`). Where the pairs hold the proxy's values, one
variant reads its attention alone. One JSON a variant and seed; the same command goes on, also in the middle of a
training, and several of them at once share the trainings out. A folder holds what was trained under one set of
arguments: others are refused, also where a training is not finished.

Measured is the share of KVzip's scores in the pairs kept, in % of what KVzip's own choice holds, on whole contexts
that were held out: with a top-K of each layer and head for itself, and with one for all of them, as it is used. The
weights measured are those that were best on crops of the same contexts, for every variant alike. Beside each figure
stands the difference from the whole, seed by seed; ± is its standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from nearfar import cli
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.file_lock import held_lock
from nearfar.evaluation.machine import machine_report
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper
from nearfar.training.mapper_losses import MapperLoss
from nearfar.training.mapper_pairs import MapperPairs
from nearfar.training.mapper_report import context_mass_reconstruction
from nearfar.training.mapper_training import MODEL_NAME, MapperTrainer, MapperTraining, last_checkpoint, new_mapper
from nearfar.training.run_folder import write_json

WHOLE = "whole"
LOSSES = ("binary", "mse", "fine", "boundary", "cosine")
STAGES = ("convolutions", "encoder", "heads")
# Name -> how it is shown.
VARIANTS = {
    WHOLE: "whole",
    **{f"no-{name}": f"without the {name} loss" for name in LOSSES},
    "no-states": "without the proxy's values",
    "no-convolutions": "without the convolutions",
    "no-encoder": "without the encoder",
    "no-heads": "without the head attention",
}
RATIOS = (0.1, 0.3)
# In the folder of a training that is not finished.
SETTINGS_NAME = "settings.json"
# Of a top-K -> how it is shown.
SCOPES = {"head": "each head", "context": "shared"}
COLORS = ("#0072b2", "#d55e00")
MEASURES = [(scope, f"{ratio:g}") for scope in SCOPES for ratio in RATIOS]


# --- training --------------------------------------------------------------------------------------------------------


def settings_of(args: argparse.Namespace, pairs: MapperPairs) -> dict[str, Any]:
    """What all variants have in common, JSON-ready."""
    names = (
        "steps", "seconds", "epoch_steps", "batch_size", "learning_rate", "warmup_steps", "schedule", "validation",
        "loss_scope", "hidden_size", "layers", "heads", "head_dim", "dropout", "feature_transform", "proxy_layers",
        "layer_queries", "crop_tokens", "rank_samples",
    )  # fmt: skip
    return {"pairs": pairs.digest, "bf16": args.bf16, **{name: getattr(args, name) for name in names}}


def make_trainer(args: argparse.Namespace, pairs: MapperPairs, variant: str, seed: int, folder: Path) -> MapperTrainer:
    """Of one variant; it writes nothing yet.

    Raises:
        ValueError: arguments that no mapper or training can have.
    """
    left_out = variant.removeprefix("no-")
    loss = MapperLoss(scope=args.loss_scope, samples=args.rank_samples)
    if left_out in LOSSES:
        loss = dataclasses.replace(loss, **{left_out: 0.0})  # type: ignore[arg-type]
    options = MapperTraining(
        epochs=10**6,
        steps=args.steps,
        seconds=args.seconds,
        epoch_steps=args.epoch_steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup_steps,
        schedule=args.schedule,
        validation=args.validation,
        mass_ratios=RATIOS,
        seed=seed,
        save_every=None,
        bf16=args.bf16,
        loss=loss,
    )
    states = "none" if args.proxy_layers == "paired" or left_out == "states" else pairs.mapper_fields["proxy_states"]
    mapper = new_mapper(
        pairs,
        seed,
        proxy_states=states,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        head_dim=args.head_dim,
        dropout=args.dropout,
        feature_transform=args.feature_transform,
        layer_queries=args.layer_queries,
        proxy_layers=args.proxy_layers,
        window_tokens=args.crop_tokens,
        window_stride=max(1, args.crop_tokens // 2),
        disabled_stage=left_out if left_out in STAGES else None,
    )
    return MapperTrainer(mapper, pairs, folder, options, cpu=args.found_device.type == "cpu", plot=False)


def train(args: argparse.Namespace, trainer: MapperTrainer, variant: str, seed: int) -> dict[str, Any]:
    """Train one variant, or go on with it, and measure it."""
    pairs, folder = trainer.pairs, trainer.folder
    result = trainer.train(last_checkpoint(folder))
    best = HybridAxialMapper.from_pretrained(folder / MODEL_NAME, dtype="float32").to(trainer.device).eval()
    held_out = trainer.validation_contexts
    mass = {
        "head": context_mass_reconstruction(best, pairs, held_out, RATIOS, scope="head"),
        "context": context_mass_reconstruction(best, pairs, held_out, RATIOS),
    }
    return {
        "variant": variant,
        "seed": seed,
        "settings": settings_of(args, pairs),
        "parameters": trainer.mapper.num_parameters(),
        "trained_steps": result["steps"],
        "trained_seconds": result["seconds"],
        "best_step": result["best"]["step"],
        "contexts": {"train": len(trainer.train_contexts), "validation": len(held_out)},
        "mass": mass,
        "machine": machine_report(trainer.device),
    }


def result_file(out: Path, variant: str, seed: int) -> Path:
    return out / f"{variant}-seed{seed}.json"


def measure_variants(args: argparse.Namespace) -> None:
    """All that is not there yet and that no other process is at."""
    pairs = MapperPairs(args.pairs)
    settings = settings_of(args, pairs)
    for variant, seeds in read_results(args.out).items():  # all of a folder stand in one table
        for seed in seeds:
            check_settings(result_file(args.out, variant, seed), settings)
    for folder in sorted((args.out / "runs").glob("*")):
        with contextlib.suppress(FileNotFoundError):  # another process's, which has just finished
            check_unfinished(folder, args.out / f"{folder.name}.json", settings)
    has_states = args.proxy_layers == "all" and pairs.mapper_fields["proxy_states"] != "none"
    for seed in args.seeds:
        for variant in args.variants:
            if variant == "no-states" and not has_states:
                continue  # it would be the whole again
            path = result_file(args.out, variant, seed)
            with held_lock(path.with_name(f".{path.stem}.lock"), wait=False) as held:
                if path.exists():
                    check_settings(path, settings)  # maybe another process's, written just now
                    continue
                if not held:
                    print(f"{path}: left to another process, which is at it", file=sys.stderr)
                    continue
                print(f"seed {seed}, {VARIANTS[variant]}", file=sys.stderr)
                folder = args.out / "runs" / path.stem
                trainer = make_trainer(args, pairs, variant, seed, folder)  # wrong arguments leave no settings behind
                write_json(folder / SETTINGS_NAME, {"settings": settings})  # a trainer's checkpoint lets steps differ
                write_json(path, train(args, trainer, variant, seed))
                del trainer  # makes room for the next one's
                shutil.rmtree(folder)


def check_unfinished(folder: Path, result: Path, settings: dict[str, Any]) -> None:
    """A training that is not finished must be one under the settings given now.

    Args:
        folder: its own.
        result: the file that it writes at its end, before another process deletes the folder.

    Raises:
        UserError: other settings, or a checkpoint without any, as older releases left it.
    """
    checkpoint = last_checkpoint(folder)
    if (folder / SETTINGS_NAME).exists():
        check_settings(folder / SETTINGS_NAME, settings)
    elif checkpoint is not None and not result.exists():
        raise cli.UserError(
            f"{folder} is of a training that is not finished and does not say under which arguments it was begun (an "
            "older release's): delete that folder to train it anew, or give another --out"
        )


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Those of a result, or of a training that is not finished, must be the ones given now."""
    before = json.loads(path.read_text(encoding="utf-8"))["settings"]
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        values = "; ".join(f"{name} was {before.get(name)!r}, is now {settings[name]!r}" for name in changed)
        raise cli.UserError(
            f"{path} is of a training with another {', '.join(changed)} ({values}); give another --out, or the same "
            "arguments as before"
        )


# --- what came of it -------------------------------------------------------------------------------------------------


def read_results(out: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Variant -> seed -> its file, in the order of `VARIANTS`."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for variant in VARIANTS:
        for path in sorted(out.glob(f"{variant}-seed*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault(variant, {})[result["seed"]] = result
    return found


def value(result: dict[str, Any], scope: str, ratio: str) -> float:
    """In % of what the oracle's own choice holds."""
    return 100 * float(result["mass"][scope][ratio]["relative"])


def differences(results: dict[str, dict[int, dict[str, Any]]], variant: str, scope: str, ratio: str) -> list[float]:
    """From the whole, for each seed that both have."""
    whole, mine = results.get(WHOLE, {}), results[variant]
    common = sorted(mine.keys() & whole.keys())
    return [value(mine[seed], scope, ratio) - value(whole[seed], scope, ratio) for seed in common]


def spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def table(results: dict[str, dict[int, dict[str, Any]]]) -> str:
    header = ["mapper", "seeds", "parameters"]
    for scope, ratio in MEASURES:
        header += [f"{ratio}, {SCOPES[scope]}", "change"]
    body = []
    for variant, seeds in results.items():
        first = next(iter(seeds.values()))
        cells = [VARIANTS[variant], str(len(seeds)), f"{first['parameters']:,}"]
        for scope, ratio in MEASURES:
            cells.append(f"{statistics.fmean(value(result, scope, ratio) for result in seeds.values()):.2f}")
            changes = differences(results, variant, scope, ratio)
            deviation = spread(changes)
            if variant == WHOLE or not changes:
                cells.append("")
            else:
                cells.append(f"{statistics.fmean(changes):+.2f}" + ("" if deviation is None else f" ±{deviation:.2f}"))
        body.append(cells)
    return aligned_table(header, body)


def draw(path: Path, results: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Changes from the whole, one panel a ratio."""
    from matplotlib.figure import Figure

    names = [name for name in results if name != WHOLE and differences(results, name, *MEASURES[0])]
    figure = Figure(figsize=(10.5, 1.6 + 0.42 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(RATIOS), sharey=True, squeeze=False)[0]
    for axis, ratio in zip(panels, (f"{ratio:g}" for ratio in RATIOS), strict=True):
        for number, (scope, label) in enumerate(SCOPES.items()):
            changes = [differences(results, name, scope, ratio) for name in names]
            whole = statistics.fmean(value(result, scope, ratio) for result in results[WHOLE].values())
            places = [index + (number - 0.5) * 0.38 for index in range(len(names))]
            errors = [spread(values) or 0.0 for values in changes]
            axis.barh(places, [statistics.fmean(values) for values in changes], 0.36, color=COLORS[number],
                      xerr=errors if any(errors) else None, error_kw={"elinewidth": 1, "capsize": 2},
                      label=f"{label} (whole: {whole:.1f} %)")  # fmt: skip
        axis.axvline(0, color="#222222", linewidth=1)
        axis.set_yticks(range(len(names)), [VARIANTS[name] for name in names], fontsize=9)
        axis.set_title(f"{ratio} of the pairs kept", fontsize=10)
        axis.set_xlabel("change of KVzip's mass kept, points", fontsize=9)
        axis.tick_params(labelsize=8.5)
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=150)


# --- command line ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, help="folder of `nearfar train-mapper --pairs-only`")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; the same folder goes on")
    parser.add_argument("--table", action="store_true", help="only print and draw what --out holds")
    parser.add_argument("--variants", help=f"comma-separated (default: all: {', '.join(VARIANTS)})")
    parser.add_argument("--seeds", default="0", help="comma-separated; each trains every variant once")
    parser.add_argument("--steps", type=int, help="of each training (default: 500, without --seconds)")
    parser.add_argument("--seconds", type=float, help="of each training, in place of steps")
    parser.add_argument("--epoch-steps", type=int, help="between measurements and checkpoints (default: a quarter)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--schedule", choices=("cosine", "plateau"), default="cosine")
    parser.add_argument("--validation", type=float, default=0.1, help="share of the contexts held out")
    parser.add_argument("--loss-scope", choices=("layer", "head", "context"), default="context")
    parser.add_argument("--rank-samples", type=int, default=4096, help="pairs that the rank losses draw")
    parser.add_argument("--hidden-size", type=int, default=320)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--feature-transform", choices=("none", "log"), default="log")
    parser.add_argument("--proxy-layers", choices=("paired", "all"), default="all")
    parser.add_argument(
        "--layer-queries", action="store_true", help="with paired proxy layers; all of them always have them"
    )
    parser.add_argument("--crop-tokens", type=int, default=2048)
    cli.add_machine_arguments(parser)
    args = parser.parse_args(argv)
    if not args.table and args.pairs is None:
        parser.error("give --pairs, or --table")
    args.variants = list(VARIANTS) if args.variants is None else args.variants.split(",")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}; known: {', '.join(VARIANTS)}")
    try:
        args.seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds must be whole numbers, got {args.seeds}")
    if args.steps is not None and args.seconds is not None:
        parser.error("give --steps or --seconds, not both")
    if args.steps is None and args.seconds is None:
        args.steps = 500
    if args.epoch_steps is None and args.steps is not None:
        args.epoch_steps = max(1, args.steps // 4)
    args.layer_queries = args.layer_queries or args.proxy_layers == "all"
    return args


def run(args: argparse.Namespace) -> None:
    if not args.table:
        args.found_device = device = cli.find_device(args)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        args.bf16 = cli.find_dtype(args, device) == torch.bfloat16
        cli.set_threads(args, device)
        transformers_logging.disable_progress_bar()
        measure_variants(args)
    results = read_results(args.out)
    if not results:
        raise cli.UserError(f"{args.out} holds no results")
    first = next(iter(next(iter(results.values())).values()))
    print(f"\n{json.dumps(first['machine'])}\n\nHeld equal: {json.dumps(first['settings'])}")
    steps = sorted({result["trained_steps"] for seeds in results.values() for result in seeds.values()})
    print(
        f"  {steps[0]:,} to {steps[-1]:,} steps a training; {first['contexts']['train']} contexts to train on, "
        f"{first['contexts']['validation']} to measure on; mass in % of the oracle's\n"
    )
    print(table(results))
    if len(results.get(WHOLE, {})) and len(results) > 1:
        write_beside(args.out / "mapper_ablation.png", lambda file: draw(file, results))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
