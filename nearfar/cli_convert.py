"""`nearfar convert`: arguments and commands. Like `cli`, importing it imports neither torch nor transformers."""

from __future__ import annotations

import argparse
from typing import Any

from nearfar import cli_loading
from nearfar.cli_arguments import add_command, natural_int, positive_int, real_number
from nearfar.cli_machine import add_machine_arguments, find_device, set_threads
from nearfar.cli_messages import UserError


def add_convert(commands: Any) -> None:
    """Add `convert` and what it converts to."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="convert a checkpoint: GPT-NeoX (Pythia) to DAR, a model to a small sibling",
        description="Convert a checkpoint.",
    )
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    _add_dar(targets)
    _add_proxy(targets)
    _add_gpt_neox(targets)


def _add_dar(targets: Any) -> None:
    parser = add_command(
        targets,
        "dar",
        _convert_to_dar,
        help="GPT-NeoX (Pythia) to DAR",
        description=(
            "Initialise DAR's bottlenecks from calibration text, distill them if asked to, and save a self-contained "
            "checkpoint with a model card. Prints the perplexity of held-out text before and after. An interrupted "
            "distillation goes on when the same command is given again."
        ),
    )
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="ID_OR_DIR", help="a GPT-NeoX checkpoint")
    add("--to", dest="output", required=True, metavar="DIR", help="where the DAR checkpoint goes")
    add("--revision", default=None, help="of a Hub id, for example step3000")
    add("--tokenizer", default=None, metavar="ID_OR_DIR", help="where the checkpoint has none")

    add = parser.add_argument_group("model").add_argument
    add("--bottleneck-size", type=positive_int, default=None, metavar="N",
        help="numbers kept of a far token (default: a quarter of the hidden size)")  # fmt: skip
    add("--window-size", type=natural_int, default=128, metavar="N", help="tokens that are seen in full")
    add("--far-cache", choices=("fast", "small"), default="fast",
        help="what the cache keeps of a far token: fast also keeps the rotated part of its keys")  # fmt: skip
    add("--method", default="weighted", help="of the initialisation: weighted, svd or pca")

    add = parser.add_argument_group("text").add_argument
    add(
        "--calibration-text",
        nargs="+",
        required=True,
        metavar="PATH_OR_ID",
        help=".txt, .md, .jsonl and .json files, also as .xz or .gz, folders of them, or the id of a dataset",
    )
    add("--calibration-tokens", type=positive_int, default=131_072, metavar="N",
        help="to initialise from, in blocks spread over 8 times as many")  # fmt: skip
    add(
        "--eval-text",
        nargs="+",
        default=None,
        metavar="PATH_OR_ID",
        help="text to measure perplexity on (default: the end of the calibration text, which is then left out there)",
    )
    add("--eval-tokens", type=positive_int, default=131_072, metavar="N", help="to measure on")
    add("--distill-text", nargs="+", default=None, metavar="PATH_OR_ID", help="default: the calibration text")
    add("--block-tokens", type=positive_int, default=None, metavar="N",
        help="tokens read in one go (default: 2048, or the model's longest sequence)")  # fmt: skip
    add("--text-field", default="text", help="of JSON files and datasets")
    add("--split", default="train", help="of a dataset")
    add("--batch-size", type=positive_int, default=4, metavar="N", help="blocks at once, but in the distillation")

    add = parser.add_argument_group("distillation").add_argument
    add("--distill-steps", type=natural_int, default=0, metavar="N", help="steps with the base frozen; 0 for none")
    add("--distill-batch-size", type=positive_int, default=8, metavar="N", help="blocks at once on each device")
    add("--gradient-accumulation", type=positive_int, default=1, metavar="N", help="such batches a step")
    add("--learning-rate", type=real_number, default=1e-3, metavar="R")
    add("--attention-weight", type=real_number, default=1.0, metavar="W", help="of the error of attention outputs")
    add("--logits-weight", type=real_number, default=1.0, metavar="W", help="of the divergence of the logits")
    add(
        "--unfrozen-steps",
        type=natural_int,
        default=0,
        metavar="N",
        help="further steps with all weights trained",
    )
    add("--unfrozen-learning-rate", type=real_number, default=2e-5, metavar="R")
    add(
        "--min-windows",
        type=natural_int,
        default=8,
        metavar="N",
        help="refuse blocks shorter than so many windows",
    )
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    add("--save-steps", type=positive_int, default=100, metavar="N", help="between checkpoints to go on from")
    add("--seed", type=int, default=0, help="of the order of the blocks")

    _add_output_arguments(parser)


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights")
    add(
        "--work-dir",
        default=None,
        metavar="DIR",
        help="where unfinished work lies, in a folder <name of the output>.partial (default: beside the output)",
    )
    add("--overwrite", action="store_true", help="replace a checkpoint that is there already, at the end")
    add("--restart", action="store_true", help="throw unfinished work away instead of going on from it")
    add("--quiet", action="store_true", help="print the table only")
    add_machine_arguments(parser)


def _add_proxy(targets: Any) -> None:
    parser = add_command(
        targets,
        "proxy",
        _convert_to_proxy,
        help="a model to a small sibling of it, ProxyKV's proxy",
        description=(
            "Make a smaller model with the same tokenizer out of a Llama, Mistral, Qwen2, Qwen3 or SmolLM model: "
            "fewer layers, a narrower residual stream, or both; distill it from the target's logits; save an ordinary "
            "checkpoint with a model card. Prints parameters, bytes and the perplexity of held-out text. An "
            "interrupted distillation goes on when the same command is given again."
        ),
    )
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="ID_OR_DIR", help="the target")
    add("--to", dest="output", required=True, metavar="DIR", help="where the sibling goes")
    add("--revision", default=None, help="of a Hub id")
    add("--tokenizer", default=None, metavar="ID_OR_DIR", help="where the target has none; it must be the target's")

    add = parser.add_argument_group("model").add_argument
    add("--layers", type=_layers, default=None, metavar="N|I,J,…",
        help="how many, evenly spaced with the first and the last, or which, from 0 (default: all)")  # fmt: skip
    add("--hidden-size", type=positive_int, default=None, metavar="N",
        help="width of the residual stream (default: the target's); heads and MLPs keep their sizes")  # fmt: skip
    add("--embedding-storage", choices=("model", "float8"), default="model",
        help="float8 halves the embedding's bytes in the file; it loads in the model's dtype")  # fmt: skip

    add = parser.add_argument_group("text").add_argument
    add(
        "--text",
        nargs="+",
        required=True,
        metavar="PATH_OR_ID",
        help="to distill on: .txt, .md, .jsonl and .json files, also as .xz or .gz, folders of them, or the id of a "
        "dataset",
    )
    add("--max-tokens", type=positive_int, default=None, metavar="N",
        help="most tokens of it to read (default: what the steps read)")  # fmt: skip
    add("--eval-text", nargs="+", default=None, metavar="PATH_OR_ID",
        help="text to measure perplexity on (default: the end of the text, which is then left out)")  # fmt: skip
    add("--eval-tokens", type=positive_int, default=131_072, metavar="N", help="to measure on")
    add("--block-tokens", type=positive_int, default=None, metavar="N",
        help="tokens read in one go (default: 2048, or the model's longest sequence)")  # fmt: skip
    add("--text-field", default="text", help="of JSON files and datasets")
    add("--split", default="train", help="of a dataset")
    add("--eval-batch-size", type=positive_int, default=4, metavar="N", help="blocks at once in measuring")

    add = parser.add_argument_group("distillation").add_argument
    add("--steps", type=natural_int, default=1000, metavar="N", help="most steps; 0 for no distillation")
    add("--seconds", type=real_number, default=None, metavar="S", help="end after S seconds, if that is sooner")
    add("--batch-size", type=positive_int, default=8, metavar="N", help="blocks at once on each device")
    add("--gradient-accumulation", type=positive_int, default=1, metavar="N", help="such batches a step")
    add("--learning-rate", type=real_number, default=5e-4, metavar="R")
    add("--temperature", type=real_number, default=1.0, metavar="T", help="of both models' logits")
    add("--next-token-weight", type=real_number, default=0.0, metavar="W", help="of the next-token loss")
    add("--weight-decay", type=real_number, default=0.0, metavar="R", help="of AdamW")
    add("--train-embedding", action="store_true", default=None,
        help="also the embedding and the output head (default: with --hidden-size only)")  # fmt: skip
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    add("--save-steps", type=positive_int, default=500, metavar="N", help="between checkpoints to go on from")
    add("--seed", type=int, default=0, help="of the order of the blocks")
    _add_output_arguments(parser)


def _layers(text: str) -> int | list[int]:
    """`4`, or `0,7,14`; a single layer by its index is `7,`."""
    numbers = [natural_int(part) for part in text.split(",") if part.strip()]
    if not numbers:
        raise argparse.ArgumentTypeError("names no layer")
    return numbers if "," in text else positive_int(text)


def _add_gpt_neox(targets: Any) -> None:
    parser = add_command(
        targets,
        "gpt-neox",
        _convert_to_gpt_neox,
        help="DAR to GPT-NeoX: not possible, and why",
        description="There is no way back from DAR to GPT-NeoX; this says why.",
    )
    parser.add_argument("--from", dest="source", required=True, metavar="ID_OR_DIR")
    parser.add_argument("--to", dest="output", default=None, metavar="DIR")
    parser.set_defaults(traceback=False)


def _convert_to_dar(args: argparse.Namespace) -> int:
    if args.dtype == "float16":
        raise UserError("--dtype float16: a conversion computes in float32 or bfloat16; the output keeps its dtype")
    device = find_device(args)
    set_threads(args, device)

    from transformers.utils import logging as transformers_logging

    from nearfar.conversion.dar_from_pythia import convert_gpt_neox_to_dar
    from nearfar.training.dar_distillation import DistillationSettings

    transformers_logging.disable_progress_bar()
    conversion = convert_gpt_neox_to_dar(
        args.source,
        args.output,
        calibration_sources=args.calibration_text,
        bottleneck_size=args.bottleneck_size,
        window_size=args.window_size,
        method=args.method,
        far_cache=args.far_cache,
        calibration_tokens=args.calibration_tokens,
        eval_sources=args.eval_text,
        eval_tokens=args.eval_tokens,
        distillation=DistillationSettings(
            steps=args.distill_steps,
            batch_size=args.distill_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation,
            learning_rate=args.learning_rate,
            attention_weight=args.attention_weight,
            logits_weight=args.logits_weight,
            unfrozen_steps=args.unfrozen_steps,
            unfrozen_learning_rate=args.unfrozen_learning_rate,
            min_windows=args.min_windows,
            gradient_checkpointing=args.gradient_checkpointing,
            save_steps=args.save_steps,
            seed=args.seed,
        ),
        distill_sources=args.distill_text,
        block_tokens=args.block_tokens,
        text_field=args.text_field,
        split=args.split,
        tokenizer=args.tokenizer,
        revision=args.revision,
        batch_size=args.batch_size,
        device=None if args.device == "auto" else device,  # of several processes each finds its own
        autocast=None if args.dtype == "auto" else args.dtype == "bfloat16",
        max_shard_size=args.max_shard_size,
        work_dir=args.work_dir,
        overwrite=args.overwrite,
        restart=args.restart,
        quiet=args.quiet,
    )
    if conversion.is_main_process:
        print(conversion.table())
        print(f"saved: {conversion.output}")
    return 0


def _convert_to_proxy(args: argparse.Namespace) -> int:
    if args.dtype == "float16":
        raise UserError("--dtype float16: a conversion computes in float32 or bfloat16; the output keeps its dtype")
    device = find_device(args)
    set_threads(args, device)

    from transformers.utils import logging as transformers_logging

    from nearfar.conversion.distill_proxy import distill_proxy
    from nearfar.training.proxy_distillation import ProxyDistillation

    transformers_logging.disable_progress_bar()
    settings = ProxyDistillation(
        steps=args.steps,
        seconds=args.seconds,
        batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation,
        learning_rate=args.learning_rate,
        temperature=args.temperature,
        next_token_weight=args.next_token_weight,
        weight_decay=args.weight_decay,
        train_embedding=args.hidden_size is not None if args.train_embedding is None else args.train_embedding,
        gradient_checkpointing=args.gradient_checkpointing,
        save_steps=args.save_steps,
        seed=args.seed,
    )
    sibling = distill_proxy(
        cli_loading.model_source(args.source),
        args.output,
        text_sources=args.text,
        layers=args.layers,
        hidden_size=args.hidden_size,
        distillation=settings,
        embedding_storage=args.embedding_storage,
        eval_sources=args.eval_text,
        eval_tokens=args.eval_tokens,
        max_tokens=args.max_tokens,
        block_tokens=args.block_tokens,
        text_field=args.text_field,
        split=args.split,
        tokenizer=args.tokenizer,
        revision=args.revision,
        batch_size=args.eval_batch_size,
        device=None if args.device == "auto" else device,  # of several processes each finds its own
        autocast=None if args.dtype == "auto" else args.dtype == "bfloat16",
        max_shard_size=args.max_shard_size,
        work_dir=args.work_dir,
        overwrite=args.overwrite,
        restart=args.restart,
        quiet=args.quiet,
    )
    if sibling.is_main_process:
        print(sibling.table())
        print(f"saved: {sibling.output}")
    return 0


def _convert_to_gpt_neox(args: argparse.Namespace) -> int:
    from nearfar.conversion.dar_from_pythia import convert_dar_to_gpt_neox

    convert_dar_to_gpt_neox(args.source, args.output)
