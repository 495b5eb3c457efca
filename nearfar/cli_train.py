"""`nearfar train-mapper`: arguments and command. Like `cli`, importing it imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar import cli_loading, cli_texts
from nearfar.cli_arguments import (
    ExamplesFormatter,
    add_command,
    natural_int,
    open_share,
    positive_int,
    real_number,
    token_count,
)
from nearfar.cli_machine import add_machine_arguments, find_device, find_dtype, set_threads
from nearfar.cli_messages import UserError
from nearfar.cli_output import check_out

if TYPE_CHECKING:
    from nearfar.training.mapper_pairs import MapperPairs, PairSettings

EXAMPLES = """\
examples:
  nearfar train-mapper --proxy meta-llama/Llama-3.2-1B-Instruct --target meta-llama/Llama-3.1-8B-Instruct --out mapper
      Compute the pairs of the paper's mixture (needs the `datasets` package), then train by the paper's recipe. The
      same command with --resume goes on where it was interrupted; computed pairs are kept in any case.
  nearfar train-mapper --proxy small --target large --sources books/ needles --contexts 40 --epochs 5 --out mapper
      On text of your own, with needles hidden in it, for a short time.
  nearfar train-mapper --proxy small --target large --sources gsm8k squad --pairs pairs --pairs-only
      Compute pairs only; more sources can be added to the same folder later.
  nearfar train-mapper --pairs pairs --steps 2000 --loss-scope context --layer-queries --out mapper-2000
      Train on pairs that are there, without loading either model.
  accelerate launch --num_processes 4 examples/train_mapper.py --pairs pairs --batch-size 3 --out mapper
      The same on several GPUs, each with batches of its own.
"""


def add_train(commands: Any) -> None:
    """Add `train-mapper`."""
    parser = add_command(
        commands,
        "train-mapper",
        _train_mapper,
        help="train ProxyKV's mapper from a small model's attention to a large model's scores",
        description=(
            "Read texts with a proxy (its attention) and with a target (KVzip's scores, the oracle), keep both on "
            "disk, and train a HybridAxialMapper from one to the other. Leaves in --out: model/ (the best weights, a "
            "checkpoint that loads with trust_remote_code), training.jsonl, training.png and run.json."
        ),
    )
    parser.epilog = EXAMPLES
    parser.formatter_class = ExamplesFormatter
    parser.add_argument("--out", default=None, metavar="DIR", help="where the run goes (needed to train)")
    parser.add_argument("--resume", action="store_true", help="go on with what was interrupted, from its checkpoint")

    add = parser.add_argument_group("pairs").add_argument
    add("--proxy", default=None, metavar="ID_OR_DIR", help="the small model; not needed when all pairs are there")
    add("--target", default=None, metavar="ID_OR_DIR", help="the large model, of the same family")
    add("--tokenizer", default=None, metavar="ID_OR_DIR", help="default: the target's")
    add("--pairs", default=None, metavar="DIR", help="where pairs are kept (default: pairs in --out)")
    add("--pairs-only", action="store_true", help="compute pairs and end")
    add(
        "--sources",
        nargs="+",
        default=None,
        metavar="SOURCE",
        help="text files (.txt, .md, also as .xz or .gz) and folders, ids of datasets (owner/name or "
        "owner/name:config), names: gsm8k, squad, scbench:SUBSET, and what is made here: needles, dialogue, "
        "questions, records, many_shot (default: the paper's mixture when --proxy and --target are given)",
    )
    add("--split", default=None, help="of datasets named by their id (default: train)")
    add("--column", default=None, help="of datasets named by their id (default: found by name)")
    add("--contexts", type=positive_int, default=100, metavar="N", help="from each source")
    add("--context-tokens", type=token_count, default="8k", metavar="N", help="most tokens of a context; k is 1024")
    add("--join-tokens", type=token_count, default="2k", metavar="N", help="shorter documents are joined up to this")
    add("--chunk-tokens", type=positive_int, default=2000, metavar="N", help="that the target repeats at once")
    add("--pairs-seconds", type=real_number, default=None, metavar="S",
        help="begin no further pair after S seconds; sources take turns, so that each has its share")  # fmt: skip
    add("--storage", choices=("float16", "float32"), default="float16", help="of pairs on disk")
    add("--proxy-states", choices=("none", "values"), default=None,
        help="values: pairs also hold the proxy's values, and the mapper reads them beside its attention, with "
        "--proxy-layers all (default: what --pairs hold already, or none)")  # fmt: skip

    add = parser.add_argument_group("mapper").add_argument
    add("--hidden-size", type=positive_int, default=512, metavar="N", help="of the encoder")
    add("--layers", type=positive_int, default=6, metavar="N", help="of the encoder")
    add("--heads", type=positive_int, default=8, metavar="N", help="of the encoder")
    add("--head-dim", type=positive_int, default=64, metavar="N", help="of the target queries")
    add(
        "--crop-tokens", type=token_count, default="2k", metavar="N", help="read at once; half of it from crop to crop"
    )
    add("--dropout", type=real_number, default=0.1, metavar="P", help="in the encoder")
    add("--feature-transform", choices=("none", "log"), default="none", help="of the column sums")
    add("--layer-queries", action="store_true", help="queries of their own for each target layer")
    add("--proxy-layers", choices=("paired", "all"), default="paired",
        help="all: read all proxy layers at once and map them to all target layers, with --layer-queries")  # fmt: skip
    add("--save-dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights in the checkpoint")

    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=positive_int, default=30, metavar="N", help="over the training contexts")
    add("--steps", type=positive_int, default=None, metavar="N", help="end after N steps, if that is sooner")
    add("--seconds", type=real_number, default=None, metavar="S", help="end after S seconds, if that is sooner")
    add("--epoch-steps", type=positive_int, default=None, metavar="N",
        help="steps of an epoch (default: what shows every crop once)")  # fmt: skip
    add("--batch-size", type=positive_int, default=8, metavar="N", help="crops a step, of each process")
    add("--learning-rate", type=real_number, default=2e-4, metavar="R", help="after the warm-up")
    add("--weight-decay", type=real_number, default=1e-4, metavar="R", help="of AdamW")
    add("--warmup-steps", type=natural_int, default=1000, metavar="N", help="of a linear warm-up")
    add("--schedule", choices=("plateau", "cosine"), default="plateau",
        help="of the learning rate: halved where the validation loss stands still, or to zero at the end")  # fmt: skip
    add("--clip", type=real_number, default=1.0, metavar="N", help="largest norm of the gradient; 0 for no limit")
    add("--validation", type=open_share, default=0.05, metavar="S", help="share of the contexts held out")
    add("--validation-crops", type=positive_int, default=512, metavar="N", help="most that are measured")
    add("--loss-scope", choices=("layer", "head", "context"), default="layer",
        help="what a top-K of the loss is taken over; context: all layers and heads together")  # fmt: skip
    add("--log-every", type=positive_int, default=50, metavar="N", help="steps between lines of the log")
    add("--save-every", type=positive_int, default=1000, metavar="N",
        help="steps between checkpoints, besides those after an epoch")  # fmt: skip
    add("--seed", type=int, default=0, help="of weights, split, crops and needles")
    add("--push-to-hub", default=None, metavar="ID", help="also push the best mapper to this Hub repository")
    add_machine_arguments(parser)


def _train_mapper(args: argparse.Namespace) -> int:
    out, folder = _check_arguments(args)

    from nearfar.training.mapper_losses import MapperLoss
    from nearfar.training.mapper_training import MapperTraining

    options = MapperTraining(
        epochs=args.epochs,
        steps=args.steps,
        seconds=args.seconds,
        schedule=args.schedule,
        save_dtype=args.save_dtype,
        epoch_steps=args.epoch_steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        clip=args.clip,
        validation=args.validation,
        validation_crops=args.validation_crops,
        seed=args.seed,
        log_every=args.log_every,
        save_every=args.save_every,
        loss=MapperLoss(scope=args.loss_scope),
    )
    settings = _pair_settings(args, folder) if args.proxy is not None else None
    import torch
    from accelerate import PartialState

    device = find_device(args)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    state = PartialState(cpu=device.type == "cpu")
    set_threads(args, device)
    if settings is not None:
        _compute(args, folder, settings, state.device if args.device == "auto" else device)
        gc.collect()  # the models go before the mapper comes
        if device.type == "cuda":
            torch.cuda.empty_cache()
    from nearfar.training.mapper_pairs import MapperPairs

    pairs = MapperPairs(folder)
    if args.pairs_only:
        state.print(f"{pairs!r}: {folder}")
        return 0
    if args.proxy_states is None and args.proxy_layers != "all" and pairs.mapper_fields["proxy_states"] != "none":
        raise UserError(
            f"{folder} holds the proxy's values, which a mapper reads with --proxy-layers all: give that, or "
            "--proxy-states none to leave them aside"
        )
    assert out is not None
    return _train(args, out, pairs, options, cpu=device.type == "cpu")


def _check_arguments(args: argparse.Namespace) -> tuple[Path | None, Path]:
    """Output and pairs folder; whatever needs no library is checked here."""
    if args.out is None and not (args.pairs_only and args.pairs):
        raise UserError("give --out, or --pairs and --pairs-only")
    out = None if args.out is None else Path(args.out)
    folder = Path(args.pairs) if args.pairs is not None else Path(args.out) / "pairs"
    for option, path in (("--out", out), ("--pairs", folder)):
        if path is not None:
            check_out(path, option)
    if (args.proxy is None) != (args.target is None):
        raise UserError("give both --proxy and --target, or neither to train on the pairs in --pairs")
    if args.proxy is None and args.sources is not None:
        raise UserError("--sources: to compute pairs, give --proxy and --target too")
    if args.proxy is None and not any(folder.glob("index-*.json")):
        raise UserError(f"{folder} holds no pairs yet: give --proxy and --target to compute them")
    if out is not None and not args.pairs_only:
        unfinished = any(out.glob("checkpoint-*")) or (out / "training.jsonl").is_file()
        if unfinished and not args.resume:
            raise UserError(f"{out} holds a run already: add --resume to go on with it, or delete it")
    if args.pairs_seconds is not None and not args.pairs_seconds > 0:
        raise UserError(f"--pairs-seconds must be positive, got {args.pairs_seconds}")
    if args.proxy_layers == "all" and not args.layer_queries:
        raise UserError("--proxy-layers all needs --layer-queries: all target layers would get the same scores")
    if args.proxy_states not in (None, "none") and args.proxy_layers != "all" and not args.pairs_only:
        raise UserError(
            f"--proxy-states {args.proxy_states} needs --proxy-layers all: paired layers share their weights"
        )
    if args.dtype == "float16" and not args.pairs_only:
        raise UserError("--dtype float16: a mapper is trained in float32 or bfloat16")
    if args.crop_tokens < 2:
        raise UserError(f"--crop-tokens must be at least 2, got {args.crop_tokens}")
    return out, folder


def _pair_settings(args: argparse.Namespace, folder: Path) -> PairSettings:
    """Of the pairs to compute: all of a folder have the same. Nothing is loaded for pairs that would be refused.

    Raises:
        UserError: others were asked for than the folder has, or a mapper that does not read them.
    """
    from nearfar.training.mapper_pairs import PairSettings, stored_settings

    stored = stored_settings(folder)
    if stored is None:
        return PairSettings(args.chunk_tokens, args.storage, args.proxy_states or "none")
    for option, before, now in (
        ("--chunk-tokens", stored.chunk_tokens, args.chunk_tokens),
        ("--storage", stored.storage, args.storage),
    ):
        if before != now:
            raise UserError(
                f"{folder} holds pairs computed with {option} {before}, and now it is {now}: give {option} {before}, "
                "or another --pairs; leave out --proxy and --target to train on these pairs only"
            )
    held = stored.proxy_states
    # To train without values that are there takes no model.
    without = "leave out --proxy and --target to train on these pairs without the values"
    if args.proxy_states not in (None, held):
        raise UserError(
            f"{folder} holds pairs computed with --proxy-states {held}, and now it is {args.proxy_states}: give "
            f"--proxy-states {held}, or another --pairs" + ("" if held == "none" else f"; {without}")
        )
    if held != "none" and args.proxy_layers != "all" and not args.pairs_only:
        raise UserError(
            f"{folder} holds the proxy's values, which a mapper reads with --proxy-layers all: give that, or "
            f"--pairs-only to compute more; {without} (--proxy-states none)"
        )
    return stored


def _compute(args: argparse.Namespace, folder: Path, settings: PairSettings, device: Any) -> None:
    """The pairs that are missing."""
    from nearfar.training.mapper_contexts import NEEDLES, PAPER_MIXTURE, mixture_contexts
    from nearfar.training.mapper_pairs import compute_pairs
    from nearfar.training.synthetic_contexts import SYNTHETIC

    sources = args.sources or list(PAPER_MIXTURE)
    proxy_source, target_source = cli_loading.model_source(args.proxy), cli_loading.model_source(args.target)
    tokenizer = cli_loading.load_tokenizer(args.tokenizer or target_source)
    haystack = None
    if NEEDLES in sources and set(sources) <= {NEEDLES, *SYNTHETIC}:
        haystack = [cli_texts.packaged_text(8 * args.context_tokens, leave_out=cli_texts.HELD_OUT_ESSAYS)]
    contexts = mixture_contexts(
        tokenizer,
        sources,
        args.contexts,
        context_tokens=args.context_tokens,
        join_tokens=args.join_tokens,
        haystack=haystack,
        split=args.split,
        column=args.column,
        seed=args.seed,
    )
    dtype = find_dtype(args, device)
    proxy, target = (cli_loading.load_model(source, device, dtype) for source in (proxy_source, target_source))
    compute_pairs(folder, proxy, target, tokenizer, contexts, settings, seconds=args.pairs_seconds)


def _train(args: argparse.Namespace, out: Path, pairs: MapperPairs, options: Any, *, cpu: bool) -> int:
    import dataclasses

    from accelerate import PartialState

    from nearfar.evaluation.comparison import aligned_table
    from nearfar.evaluation.machine import machine_report
    from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper
    from nearfar.training import mapper_training
    from nearfar.training.mapper_report import context_mass_reconstruction
    from nearfar.training.run_folder import write_run

    bf16 = args.dtype == "bfloat16" or (args.dtype == "auto" and not cpu)
    options = dataclasses.replace(options, bf16=bf16)
    states = {} if args.proxy_states is None else {"proxy_states": args.proxy_states}
    mapper = mapper_training.new_mapper(
        pairs,
        args.seed,
        **states,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        head_dim=args.head_dim,
        dropout=args.dropout,
        feature_transform=args.feature_transform,
        layer_queries=args.layer_queries,
        proxy_layers=args.proxy_layers,
        window_tokens=args.crop_tokens,
        window_stride=args.crop_tokens // 2,
    )
    trainer = mapper_training.MapperTrainer(mapper, pairs, out, options, cpu=cpu)
    state = PartialState()
    state.print(
        f"{pairs!r}; a mapper of {mapper.num_parameters():,} parameters; {trainer.total_steps:,} steps, "
        f"{trainer.epoch_steps:,} an epoch"
    )
    run: dict[str, Any] = {
        "command": args.command_line,
        "settings": options.to_dict(),
        "pairs": str(pairs.folder),
        "contexts": {"train": len(trainer.train_contexts), "validation": len(trainer.validation_contexts)},
        "parameters": mapper.num_parameters(),
        "machine": machine_report(trainer.device),
        "result": None,
    }

    if state.is_main_process:
        write_run(out, run)
    result = trainer.train(mapper_training.last_checkpoint(out) if args.resume else None)
    if not state.is_main_process:
        return 0
    kept = out / mapper_training.MODEL_NAME
    best = HybridAxialMapper.from_pretrained(kept, dtype="float32").to(trainer.device).eval()
    held_out = trainer.validation_contexts[:16]
    whole = context_mass_reconstruction(best, pairs, held_out, options.mass_ratios)
    run["result"] = {**result, "whole_contexts": whole}
    write_run(out, run)
    first, last = result["untrained"], result["last"]
    rows = [
        [
            name,
            f"{first['mass_reconstruction'][name]:.3f}",
            f"{last['mass_reconstruction'][name]:.3f}",
            f"{whole[name]['share']:.3f}",
            f"{whole[name]['relative']:.3f}",
        ]
        for name in first["mass_reconstruction"]
    ]
    print(
        aligned_table(["mass reconstruction at", "untrained", "last", "best, whole contexts", "of the oracle's"], rows)
    )
    print(f"{result['steps']:,} steps in {result['seconds']:,.1f} s; {kept}")
    if args.push_to_hub is not None:
        HybridAxialMapper.from_pretrained(kept).push_to_hub(args.push_to_hub)
        print(f"pushed: {args.push_to_hub}")
    return 0
