"""Train DAR and its controls on any text, and compare their perplexity with an ordinary GPT-NeoX's.

    python examples/train_dar.py --text corpus/ --tokenizer EleutherAI/pythia-70m --output runs/70m \
        --variant vanilla --variant dar:w=128,d=128 --variant uniform:d=128

The variants are trained one after the other, each into its own folder of --output: on the same blocks in the same
order, and from the same random weights as far as they share them. At the end there are a table, `summary.json` and
`perplexity.png` (each variant's perplexity in percent of vanilla's along training). The same command again skips what
is finished; with --resume it goes on with what was interrupted. On several GPUs, with the same batch and the same
result: `accelerate launch --num_processes 8 examples/train_dar.py …`. With several --seed, each in an --output of its
own, benchmarks/join_seeds.py tells which differences are more than chance.

A variant is one of

    vanilla                      an ordinary GPT-NeoX
    dar[:w=W,d=D]                window of W tokens (128), bottleneck of D numbers (a quarter of the hidden size)
    uniform[:d=D]                the bottleneck at every distance
    control[:w=W]                DAR whose bottleneck is as wide as the model

and all but vanilla also take activation=sigmoid. --vocabulary N trains a small tokenizer on the text instead of taking
--tokenizer, --tie-embeddings and --save-dtype bfloat16 make a small checkpoint. Each folder has a model card with what
was measured, vanilla's figures beside it, and the same as `training.json`.

The paper's set-ups (10 billion tokens, blocks of 2,048):

    --size pythia-70m --batch-size 256 --steps 19073 --sweep bottlenecks                 Table 1, Figure 3
    --size pythia-70m --batch-size 256 --steps 19073 --sweep windows                     Table 3
    --size pythia-160m --batch-size 896 --steps 5450 --variant vanilla --variant dar     Table 2, and pythia-410m
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer, Trainer, TrainerState, TrainingArguments, set_seed

from nearfar import DARConfig, DARForCausalLM
from nearfar.conversion.dar_model_card import trained_model_card
from nearfar.conversion.packaged_model import cache_root
from nearfar.evaluation.machine import machine_name, machine_report
from nearfar.modeling.atomic_file import write_beside
from nearfar.training.comparison_report import compared_with, comparison_figure, comparison_table
from nearfar.training.corpus_tokenizer import train_corpus_tokenizer
from nearfar.training.digit_tokenizer import LEAST_VOCABULARY
from nearfar.training.loss_bar import show_loss_bar
from nearfar.training.main_process import in_main_process, run_main
from nearfar.training.perplexity_log import PerplexityLog, read_perplexity_log, tokens_per_second
from nearfar.training.run_folder import (
    check_run,
    checkpoint_step,
    last_checkpoint,
    read_run,
    same_settings,
    write_json,
    write_run,
)
from nearfar.training.token_blocks import TokenBlocks
from nearfar.training.training_blocks import blocks_at_once, check_numbers, even_shares, load_training_blocks

# Pythia's shapes and learning rates: hidden size, layers, heads, rate.
SIZES = {
    "pythia-70m": (512, 6, 8, 1e-3),
    "pythia-160m": (768, 12, 12, 6e-4),
    "pythia-410m": (1024, 24, 16, 3e-4),
    "pythia-1b": (2048, 16, 8, 3e-4),
    "pythia-1.4b": (2048, 24, 16, 2e-4),
}
SWEPT_WINDOWS = (0, 1, 4, 16, 64, 128, 256)
SWEPT_DIVISORS = (2, 4, 8)
# What must be equal for two runs to be compared, or for one to be gone on with.
SETTINGS = (
    "model", "hidden_size", "layers", "heads", "tokenizer", "text", "dataset", "split", "text_field", "max_tokens",
    "eval_text", "block_tokens", "batch_size", "steps", "learning_rate", "weight_decay", "seed", "bf16", "eval_every",
    "eval_blocks", "vocabulary", "tie_embeddings", "save_dtype",
)  # fmt: skip


# --- variants --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A model to train: the name of its folder, and the fields of its configuration that make it what it is."""

    name: str
    fields: dict[str, Any] = field(hash=False)


VARIANT_OPTIONS = {
    "vanilla": (),
    "dar": ("w", "d", "activation"),
    "uniform": ("d", "activation"),
    "control": ("w", "activation"),
}


def parse_variant(text: str, hidden_size: int) -> Variant:
    """Read `kind[:key=value,…]`; see the head of this file.

    Raises:
        ValueError: an unknown kind or key, or a value that is no number. Ranges are the configuration's to check.
    """
    kind, colon, rest = text.partition(":")
    if kind not in VARIANT_OPTIONS:
        raise ValueError(f"variant {text!r}: {kind!r} is none of {', '.join(VARIANT_OPTIONS)}")
    options: dict[str, str] = {}
    for option in rest.split(",") if colon else ():
        key, _, value = option.partition("=")
        if key not in VARIANT_OPTIONS[kind] or not value:
            known = " and ".join(f"{name}=…" for name in VARIANT_OPTIONS[kind]) or "nothing"
            raise ValueError(f"variant {text!r}: {option!r} is not understood; {kind} takes {known}")
        if key in options:
            raise ValueError(f"variant {text!r}: {key} is given twice")
        options[key] = value
    if kind == "vanilla":
        return Variant("vanilla", {"window_size": None, "uniform_bottleneck": False})

    numbers = {"w": 128, "d": hidden_size if kind == "control" else hidden_size // 4}
    for key in options.keys() & numbers.keys():
        if not re.fullmatch(r"\d+", options[key]):
            raise ValueError(f"variant {text!r}: {key} must be a whole number, got {options[key]!r}")
        numbers[key] = int(options[key])
    activation = None if options.get("activation") == "linear" else options.get("activation")
    shown = [f"{key}{numbers[key]}" for key in ("w", "d") if key in VARIANT_OPTIONS[kind]]
    return Variant(
        "-".join([kind, *shown, *([activation] if activation else [])]),
        {
            "window_size": numbers["w"],
            "bottleneck_size": numbers["d"],
            "bottleneck_activation": activation,
            "uniform_bottleneck": kind == "uniform",
        },
    )


def chosen_variants(options: argparse.Namespace) -> list[Variant]:
    """All that --variant and --sweep name, each once, in that order."""
    hidden = options.hidden_size
    named = list(options.variant)
    if options.sweep == "windows":
        named += ["vanilla", *(f"dar:w={window},d={hidden // 4}" for window in SWEPT_WINDOWS)]
    elif options.sweep == "bottlenecks":
        sizes = [hidden // divisor for divisor in SWEPT_DIVISORS]
        named += ["vanilla", *(f"dar:d={size}" for size in sizes), *(f"uniform:d={size}" for size in sizes)]
    variants = {variant.name: variant for variant in (parse_variant(text, hidden) for text in named)}
    if not variants:
        raise ValueError("nothing to train: name a --variant or a --sweep")
    return list(variants.values())


# --- model and data --------------------------------------------------------------------------------------------------


def make_config(options: argparse.Namespace, variant: Variant, tokenizer: Any) -> DARConfig:
    """The variant's configuration, of the given shape or around the given checkpoint."""
    if options.model:
        base = AutoConfig.from_pretrained(options.model).to_dict()
        size = variant.fields.get("bottleneck_size")
        has_bottleneck = base["model_type"] == "dar" and base["window_size"] is not None
        if has_bottleneck and size not in (None, base["bottleneck_size"]):
            raise ValueError(
                f"{options.model} has a bottleneck of {base['bottleneck_size']} numbers, {variant.name} wants {size}"
            )
        for name in ("model_type", "architectures", "auto_map", "transformers_version", "dtype"):
            base.pop(name, None)
        base["max_position_embeddings"] = max(base["max_position_embeddings"], options.block_tokens)
    else:
        base = {
            "vocab_size": -(-len(tokenizer) // 128) * 128,  # as Pythia's: a multiple that kernels like
            "hidden_size": options.hidden_size,
            "intermediate_size": 4 * options.hidden_size,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.heads,
            "max_position_embeddings": max(options.block_tokens, 2048),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "tie_word_embeddings": bool(options.tie_embeddings),
        }
    config = DARConfig(**{**base, **variant.fields})
    if config.vocab_size < len(tokenizer):
        raise ValueError(f"the model has {config.vocab_size} token ids and the tokenizer {len(tokenizer)}")
    if config.has_bottleneck and config.near_window >= options.block_tokens:
        raise ValueError(
            f"{variant.name}: with --block-tokens {options.block_tokens} no token is ever farther away than its "
            "window, and nothing would pass the bottleneck"
        )
    return config


def make_model(options: argparse.Namespace, config: DARConfig) -> DARForCausalLM:
    """Float32 weights: the checkpoint's, or random ones, the same in all variants as far as vanilla has them."""
    set_seed(options.seed)
    if options.model:
        return DARForCausalLM.from_pretrained(options.model, config=config, dtype=torch.float32)
    if not config.has_bottleneck:
        return DARForCausalLM(config)
    plain = copy.deepcopy(config)
    plain.window_size, plain.uniform_bottleneck = None, False
    vanilla = DARForCausalLM(plain)  # drawn first, so that the bottleneck's numbers are none of its own
    model = DARForCausalLM(config)
    model.load_state_dict(vanilla.state_dict(), strict=False)
    return model


def train_tokenizer(options: argparse.Namespace) -> None:
    """The tokenizer of --vocabulary, in the output folder."""
    train_corpus_tokenizer(
        options.tokenizer,
        options.vocabulary,
        text=options.text,
        dataset=options.dataset,
        split=options.split,
        text_field=options.text_field,
    )


def load_data(options: argparse.Namespace, tokenizer: Any) -> tuple[TokenBlocks, dict[str, TokenBlocks]]:
    """Training blocks, a whole number of batches, and the evaluation sets by name."""
    max_tokens = options.max_tokens
    if options.dataset and max_tokens is None:  # a dataset may have no end: as much as is read once, and held-out text
        max_tokens = int(1.02 * options.steps * options.batch_size + 2) * options.block_tokens
    train, evaluation = load_training_blocks(
        options.dataset or [Path(path) for path in options.text],
        tokenizer,
        options.block_tokens,
        batch_size=options.batch_size,
        split=options.split,
        text_field=options.text_field,
        max_tokens=max_tokens,
        evaluation_texts=dict(text.split("=", 1) for text in options.eval_text),
        cache_dir=options.cache_dir or cache_root() / "tokens",
    )
    return train, even_shares(evaluation, options.eval_blocks, options.per_device_batch_size, options.processes)


# --- a run -----------------------------------------------------------------------------------------------------------


def fit(
    options: argparse.Namespace,
    folder: Path,
    config: DARConfig,
    train: TokenBlocks,
    evaluation: dict[str, TokenBlocks],
) -> tuple[DARForCausalLM, list[dict[str, Any]]]:
    """The trained model and the Trainer's log; checkpoints and `perplexity.jsonl` are left in the folder."""
    checkpoint = last_checkpoint(folder) if options.resume else None
    if checkpoint is not None and checkpoint_step(checkpoint) == options.steps:  # only the end was missed
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        return DARForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), state.log_history
    model = make_model(options, config)
    if options.gradient_checkpointing:
        # Its name from transformers 5.24 on, and before.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.per_device_batch_size,
        per_device_eval_batch_size=options.per_device_batch_size,
        gradient_accumulation_steps=options.batch_size // (options.per_device_batch_size * options.processes),
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, round(0.01 * options.steps)),
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=options.weight_decay,
        max_grad_norm=1.0,
        bf16=options.bf16,
        use_cpu=options.cpu,
        torch_compile=options.compile,
        ddp_find_unused_parameters=False,
        seed=options.seed,
        data_seed=options.seed,
        eval_strategy="steps",
        eval_steps=options.eval_every,
        eval_on_start=checkpoint is None,
        prediction_loss_only=True,
        dataloader_pin_memory=not options.cpu,
        save_strategy="steps" if options.save_every <= options.steps else "no",
        save_steps=options.save_every,
        save_total_limit=1,
        logging_steps=10,
        report_to=["tensorboard"] if importlib.util.find_spec("tensorboard") else [],
    )
    # One process drives one GPU: the Trainer would otherwise spread it over all it sees with DataParallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    log = PerplexityLog(options.batch_size * options.block_tokens)
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=evaluation, callbacks=[log])
    show_loss_bar(trainer, folder.name)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return model, trainer.state.log_history


@torch.no_grad()
def row_losses(model: DARForCausalLM, blocks: TokenBlocks, rows: int, bf16: bool) -> list[float]:
    """The mean loss of each block, `rows` at once: what differences between models can be resampled from."""
    model.eval()
    losses: list[float] = []
    for start in range(0, len(blocks), rows):
        ids = torch.stack([blocks[index]["input_ids"] for index in range(start, min(start + rows, len(blocks)))])
        ids = ids.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids, use_cache=False).logits
        for scores, wanted in zip(logits, ids, strict=True):  # a row at a time, for the float32 copy's sake
            losses.append(F.cross_entropy(scores[:-1].float(), wanted[1:]).item())
    return losses


def train_variant(
    options: argparse.Namespace,
    variant: Variant,
    config: DARConfig,
    tokenizer: Any,
    train: TokenBlocks,
    evaluation: dict[str, TokenBlocks],
) -> None:
    """Train one model into its folder: weights and tokenizer, `perplexity.jsonl`, `log_history.json`, `run.json`."""
    folder = options.output / variant.name
    main_process = PartialState().is_main_process
    machine = machine_report(PartialState().device)
    run = {"settings": options.settings, "variant": variant.fields, "machine": machine, "result": None}
    if main_process:
        write_run(folder, run)
    model, log_history = fit(options, folder, config, train, evaluation)
    if main_process:
        model.to(PartialState().device)  # one that only missed its end was just loaded
        model.config.use_cache = True  # the Trainer has switched it off
        write_json(folder / "log_history.json", log_history)
        lines = read_perplexity_log(folder)
        run["result"] = {
            "parameters": model.num_parameters(),
            **{name: lines[-1][name] for name in ("step", "tokens", "seconds", "loss", "perplexity")},
            "tokens_per_second": tokens_per_second(lines),
            "row_losses": {
                name: row_losses(model, blocks, options.per_device_batch_size, options.bf16)
                for name, blocks in evaluation.items()
            },
        }
        if options.keep_weights:
            if options.save_dtype:
                model.to(getattr(torch, options.save_dtype))
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        write_run(folder, run)
        for leftover in folder.glob("checkpoint-*"):
            shutil.rmtree(leftover)
    PartialState().wait_for_everyone()


# --- what comes out --------------------------------------------------------------------------------------------------


def write_card(
    options: argparse.Namespace, name: str, results: dict[str, dict[str, Any]], machine: dict[str, Any]
) -> None:
    """`training.json` and README.md in a variant's folder, without paths: what it is, and vanilla's figures.

    `machine` stands for that of runs which did not note their own.
    """
    folder = options.output / name
    if not (folder / "config.json").is_file():  # trained with --no-keep-weights: there is no model to describe
        return
    config = DARConfig.from_pretrained(folder)
    machine = (read_run(folder) or {}).get("machine") or machine  # an earlier command may have run elsewhere
    result, twin = results[name], results.get("vanilla") if name != "vanilla" else None
    sources = [options.dataset] if options.dataset else [Path(path).name for path in options.text]
    evaluated = {key: Path(path).name for key, path in (text.split("=", 1) for text in options.eval_text)}
    record = {
        "shape": {
            "layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "heads": config.num_attention_heads,
            "vocabulary": config.vocab_size, "tied_embeddings": config.tie_word_embeddings,
            "window_size": config.window_size, "uniform_bottleneck": config.uniform_bottleneck,
            "bottleneck_size": config.bottleneck_size if config.has_bottleneck else None,
        },
        "parameters": result["parameters"],
        "text": sources,
        "trained_on_tokens": result["tokens"],
        "steps": options.steps,
        "batch_tokens": options.batch_size * options.block_tokens,
        "block_tokens": options.block_tokens,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "seconds": result["seconds"],
        "tokens_per_second": result["tokens_per_second"],
        "evaluation": {"text": evaluated or "the end of the same text", "blocks": options.eval_blocks},
        "perplexity": result["perplexity"],
        "vanilla": twin and {field: twin[field] for field in ("parameters", "perplexity", "seconds")},
        "computed_in": "bfloat16 autocast" if options.bf16 else "float32",
        "saved_as": options.save_dtype or "float32",
        "machine": machine_name(machine),
        "versions": machine["versions"],
    }  # fmt: skip
    write_json(folder / "training.json", record)
    shown = options.card_name if options.card_name and name != "vanilla" else name
    card = trained_model_card(record, shown, options.license)
    write_beside(folder / "README.md", lambda file: file.write_text(card, encoding="utf-8"))


def summarise(options: argparse.Namespace, variants: Sequence[Variant]) -> str:
    """Write summary.json, perplexity.png and cards over all finished runs with these settings; return the table."""
    names = [variant.name for variant in variants]
    for file in sorted(options.output.glob("*/run.json")):  # of earlier commands
        run = read_run(file.parent)
        if file.parent.name not in names and run and run["result"] and same_settings(run, options.settings):
            names.append(file.parent.name)
    baseline = "vanilla" if "vanilla" in names else names[0]
    results = compared_with(baseline, {name: (read_run(options.output / name) or {})["result"] for name in names})
    sets = list(results[baseline]["perplexity"])
    summary = {
        "settings": options.settings,
        "processes": options.processes,
        "machine": machine_report(PartialState().device),
        "baseline": baseline,
        "variants": results,
    }
    write_json(options.output / "summary.json", summary)
    if options.keep_weights:
        for name in names:
            write_card(options, name, results, summary["machine"])
    tokens = options.steps * options.batch_size * options.block_tokens
    notes = comparison_figure(
        {name: options.output / name for name in names},
        options.output / "perplexity.png",
        baseline=baseline,
        title=f"{options.shape}, {tokens:,} tokens; {'mean over ' if len(sets) > 1 else ''}{', '.join(sets)}",
    )
    table = comparison_table(
        results,
        baseline,
        [f"ppl {name}" for name in sets],
        lambda result: [result["perplexity"].get(name) for name in sets],
        rule=False,
    )
    return "\n".join([table, *notes])


# --- arguments -------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("variants").add_argument
    add("--variant", action="append", default=[], metavar="KIND[:KEY=VALUE,…]", help="a model to train; repeatable")
    add(
        "--sweep",
        choices=("windows", "bottlenecks"),
        help="vanilla and the paper's values of w, or of d and uniform d",
    )
    add("--output", type=Path, required=True, metavar="DIR")
    add("--resume", action="store_true", help="go on with variants that were interrupted, from their last checkpoint")

    add = parser.add_argument_group("model").add_argument
    add("--size", choices=SIZES, help="a Pythia's shape (default: pythia-70m)")
    add("--hidden-size", type=int, help="a shape of your own, with --layers and --heads")
    add("--layers", type=int)
    add("--heads", type=int)
    add("--model", metavar="ID_OR_DIR", help="start from this GPT-NeoX or DAR checkpoint instead of random weights")
    add("--tokenizer", metavar="ID_OR_DIR", help="default: the one of --model")
    add("--vocabulary", type=int, metavar="N", help="instead: train a byte-level BPE of N tokens on the text")
    add(
        "--tie-embeddings",
        action="store_true",
        default=None,
        help="one matrix for embedding and output head, for models whose vocabulary outweighs their layers",
    )
    add("--save-dtype", choices=("bfloat16", "float16"), help="of the weights that are saved (default: float32)")
    add("--license", metavar="ID", help="for the model cards, such as apache-2.0")
    add("--card-name", metavar="NAME", help="what the cards call all but vanilla (default: the variant)")

    add = parser.add_argument_group("text").add_argument
    add(
        "--text",
        nargs="+",
        metavar="PATH",
        help=".txt, .md, .jsonl, .json, also .xz and .gz, or folders of them; or one .npz of write_tokens.py",
    )
    add("--dataset", metavar="ID[:CONFIG]", help="instead of files; needs the `datasets` package")
    add("--split", default="train", help="of the dataset")
    add("--text-field", default="text", help="of JSON files and datasets")
    add("--max-tokens", type=int, help="read no more (default: all of the files, of a dataset what is trained on)")
    add("--eval-text", action="append", default=[], metavar="NAME=PATH",
        help="text to evaluate on; repeatable (default: the last 1 %% of the blocks, not trained on)")  # fmt: skip
    add("--block-tokens", type=int, default=2048)
    add("--cache-dir", type=Path, metavar="DIR", help="where tokens are kept (default: nearfar's cache folder)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=19_073)
    add("--batch-size", type=int, default=256, help="blocks a step, over all processes")
    add(
        "--per-device-batch-size",
        type=int,
        help="blocks at once on a GPU (default: at most 8); the rest is accumulated",
    )
    add(
        "--learning-rate",
        type=float,
        help="highest (default: Pythia's for this size); 1 %% warm-up, cosine to a tenth",
    )
    add("--weight-decay", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, metavar="STEPS", help="default: 40 times in all")
    add("--eval-blocks", type=int, default=200, help="at most so many of each evaluation text")
    add("--save-every", type=int, metavar="STEPS",
        help="checkpoints to resume from, more than --steps: none (default: as --eval-every)")  # fmt: skip
    add("--keep-weights", action=argparse.BooleanOptionalAction, default=True, help="of finished variants")

    add = parser.add_argument_group("machine").add_argument
    add("--precision", choices=("auto", "bfloat16", "float32"), default="auto",
        help="auto is bfloat16 autocast on a GPU, float32 on a CPU; weights are float32 in any case")  # fmt: skip
    add("--compile", action="store_true", help="torch.compile")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    add("--cpu", action="store_true", help="even if there is a GPU")
    add("--threads", type=int, help="CPU threads of each process")
    return parser


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other arguments.

    Raises:
        ValueError: arguments that do not go together, or out of range.
    """
    own = (options.hidden_size, options.layers, options.heads)
    if sum([options.size is not None, any(value is not None for value in own), options.model is not None]) > 1:
        raise ValueError("give --size, or --hidden-size with --layers and --heads, or --model")
    if options.model:
        base = AutoConfig.from_pretrained(options.model)
        if base.model_type not in ("gpt_neox", "dar"):
            raise ValueError(f"--model {options.model} is a {base.model_type} model; DAR starts from GPT-NeoX or DAR")
        own = (base.hidden_size, base.num_hidden_layers, base.num_attention_heads)
        options.shape = str(options.model)
    elif all(value is None for value in own):
        options.shape = options.size or "pythia-70m"
        own = SIZES[options.shape][:3]
    elif None in own:
        raise ValueError("--hidden-size, --layers and --heads go together")
    else:
        options.shape = f"hidden size {own[0]}, {own[1]} layers"
    options.hidden_size, options.layers, options.heads = own
    if options.vocabulary is not None:
        if options.tokenizer or options.model:
            raise ValueError("--vocabulary trains a tokenizer: leave --tokenizer and --model out, or --vocabulary")
        if options.vocabulary < LEAST_VOCABULARY:
            raise ValueError(f"--vocabulary must be at least {LEAST_VOCABULARY}, got {options.vocabulary}")
        options.tokenizer = str(options.output / "tokenizer")
    if options.tie_embeddings and options.model:
        raise ValueError("--tie-embeddings is for random weights: the checkpoint of --model says whether its are tied")
    options.tokenizer = options.tokenizer or options.model
    if not options.tokenizer:
        raise ValueError("--tokenizer or --vocabulary is missing")
    if (options.text is None) == (options.dataset is None):
        raise ValueError("give --text or --dataset")
    names = [text.partition("=")[0] for text in options.eval_text]
    for text, name in zip(options.eval_text, names, strict=True):
        if not re.fullmatch(r"[\w-]+=.+", text):
            raise ValueError(f"--eval-text must look like NAME=PATH, got {text!r}")
        if names.count(name) > 1:
            raise ValueError(f"--eval-text {name}=… is given twice")

    if options.eval_every is None:
        options.eval_every = max(1, options.steps // 40)
    if options.save_every is None:
        options.save_every = options.eval_every
    for name in ("layers", "heads", "hidden_size", "steps", "batch_size", "eval_every", "eval_blocks", "save_every"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    options.per_device_batch_size = blocks_at_once(
        options.batch_size, options.processes, options.per_device_batch_size
    )
    if options.learning_rate is None:  # that of the smallest Pythia at least as wide
        rates = [rate for hidden, _, _, rate in SIZES.values() if hidden >= options.hidden_size]
        options.learning_rate = SIZES[options.shape][3] if options.shape in SIZES else (rates or [2e-4])[0]
    check_numbers(options, ("learning_rate",), ("weight_decay",))
    options.bf16 = options.precision == "bfloat16" or (options.precision == "auto" and not options.cpu)
    options.settings = {name: getattr(options, name) for name in SETTINGS}


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # of loading and saving weights
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.threads:
        torch.set_num_threads(options.threads)
    options.cpu = options.cpu or not torch.accelerator.is_available()
    state = PartialState(cpu=options.cpu)
    options.processes = state.num_processes
    try:
        resolve(options)
        variants = chosen_variants(options)
        if options.vocabulary is not None:
            in_main_process(lambda: train_tokenizer(options))
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        configs = [make_config(options, variant, tokenizer) for variant in variants]
        finished = [check_run(options.output / variant.name, options.settings, options.resume) for variant in variants]
        train, evaluation = load_data(options, tokenizer)
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).split()))

    state.wait_for_everyone()  # all have seen which variants are finished before the first one changes that
    sizes = ", ".join(f"{name} {len(blocks)}" for name, blocks in evaluation.items())
    state.print(f"{train} to train on, {len(train) * options.block_tokens:,} tokens; blocks to evaluate on: {sizes}")
    for variant, config, done in zip(variants, configs, finished, strict=True):
        if done:
            state.print(f"{variant.name}: finished already")
            continue
        train_variant(options, variant, config, tokenizer, train, evaluation)
        gc.collect()  # the Trainer and its model refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        torch.compiler.reset()
    if PartialState().is_main_process:
        print(summarise(options, variants))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
