"""Train ProxyFormer with history, without history, and a plain decoder of the same size; compare their perplexity.

    python examples/train_language_model.py --text corpus/ --tokenizer gpt2 --output runs/lm

Text is cut into windows of --window-tokens, and each window into blocks of --block-tokens (the generation block):

    history            ProxyFormer over whole windows: a block sees the proxies of the window's blocks before it
    no_history         ProxyFormer over each block alone
    decoder            a plain decoder of the same width and depth over each block alone
    decoder_history    the plain decoder over whole windows; trained only if named

None has positional encodings (NoPE). All read the same windows in the same order, and are trained and evaluated on the
same predicted tokens: all of a block but its first, which those without history have nothing to predict from. The
auxiliary loss of the mid-layer head is in the training of all and in none of the perplexities. They are trained one
after the other, each into its own folder of --output; then there are a table, `summary.json` and `perplexity.png` (in
percent of the decoder's along training). The same command again skips what is finished; with --resume it goes on with
what was interrupted. On several GPUs, with the same batch: `accelerate launch examples/train_language_model.py …`.

The paper's Table 1 (P = 32, blocks of 128, d = 512, 10 layers, GPT-2's tokenizer, Mano; it says neither how long its
histories nor how long its training were):

    --dataset Salesforce/wikitext:wikitext-103-v1 --eval-split test --tokenizer gpt2 --optimizer mano \\
        --block-tokens 128 --compression-ratio 32 --hidden-size 512 --layers 10 --heads 8
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, Trainer, TrainerState, TrainingArguments, set_seed

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM
from nearfar.conversion.packaged_model import cache_root
from nearfar.evaluation.machine import machine_report
from nearfar.training.comparison_report import compared_with, comparison_figure, comparison_table
from nearfar.training.loss_bar import show_loss_bar
from nearfar.training.main_process import run_main
from nearfar.training.matrix_optimizer import make_optimizer
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

# Name -> whether it reads each block alone.
VARIANTS = {"decoder": True, "no_history": True, "history": False, "decoder_history": False}
DEFAULT_VARIANTS = ("decoder", "no_history", "history")
LEARNING_RATES = {"muon": 3e-3, "mano": 6e-4, "adamw": 1e-3}
# What must be equal for two runs to be compared, or for one to be gone on with.
SETTINGS = (
    "hidden_size", "history_hidden_size", "layers", "heads", "compression_ratio", "block_tokens", "window_tokens",
    "tokenizer", "text", "dataset", "split", "text_field", "max_tokens", "eval_text", "eval_split", "eval_blocks",
    "eval_every", "batch_size", "steps", "optimizer", "learning_rate", "weight_decay",
    "auxiliary_loss_weight", "seed", "bf16",
)  # fmt: skip


# --- model and data --------------------------------------------------------------------------------------------------


def make_config(options: argparse.Namespace, variant: str, tokenizer: Any) -> ProxyFormerConfig:
    """The variants differ in whether there are proxies; `no_history` has them and is never shown a second block."""
    return ProxyFormerConfig(
        vocab_size=-(-len(tokenizer) // 128) * 128,  # a multiple that kernels like
        hidden_size=options.hidden_size,
        history_hidden_size=options.history_hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        compression_ratio=None if variant.startswith("decoder") else options.compression_ratio,
        generation_block_size=None if variant.startswith("decoder") else options.block_tokens,
        auxiliary_loss_weight=options.auxiliary_loss_weight,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def load_data(options: argparse.Namespace, tokenizer: Any) -> tuple[TokenBlocks, dict[str, TokenBlocks]]:
    """Windows to train on, a whole number of batches, and windows to evaluate on by the name of their text."""
    train, evaluation = load_training_blocks(
        options.dataset or [Path(path) for path in options.text],
        tokenizer,
        options.window_tokens,
        batch_size=options.batch_size,
        split=options.split,
        text_field=options.text_field,
        max_tokens=options.max_tokens,
        evaluation_texts=dict(text.split("=", 1) for text in options.eval_text),
        evaluation_split=options.eval_split,
        cache_dir=options.cache_dir or cache_root() / "tokens",
        single_block="the text is a single window, which leaves none to evaluate on: give more text",
    )
    return train, even_shares(evaluation, options.eval_blocks, options.per_device_batch_size, options.processes)


def blocks_of(ids: torch.Tensor, block: int, alone: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What a variant reads of windows, and the labels: all tokens of a block but its first.

    Args:
        ids: `(windows, window_tokens)`.
        block: tokens of a generation block.
        alone: each block is a row of its own, so that it sees nothing before it.

    Returns:
        ids and labels, `(windows, window_tokens)` or `(windows · blocks, block)`.
    """
    labels = ids.clone()
    labels[:, ::block] = -100
    return (ids.reshape(-1, block), labels.reshape(-1, block)) if alone else (ids, labels)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token in float32, `(rows, tokens - 1)`; 0 where it has no label."""
    rows = [
        F.cross_entropy(scores[:-1].float(), wanted[1:], ignore_index=-100, reduction="none")
        for scores, wanted in zip(logits, labels, strict=True)  # a row at a time, for the float32 copy's sake
    ]
    return torch.stack(rows)


# --- a run -----------------------------------------------------------------------------------------------------------


class BlockTrainer(Trainer):
    """The Trainer over windows, which hands a model what its variant reads of them.

    Perplexities are those of the last layer's head alone.
    """

    def __init__(self, *args: Any, block_tokens: int, alone: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_tokens, self.alone = block_tokens, alone
        self.model_accepts_loss_kwargs = False  # every batch has the same number of labels: a mean of means is exact

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids, labels = blocks_of(inputs["input_ids"], self.block_tokens, self.alone)
        if model.training:
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        else:
            logits = model(input_ids=ids, use_cache=False).logits
            loss = token_losses(logits, labels).sum() / (labels[:, 1:] != -100).sum()
        return (loss, {"loss": loss}) if return_outputs else loss


@torch.no_grad()
def block_losses(model: Any, windows: TokenBlocks, block: int, alone: bool, bf16: bool) -> torch.Tensor:
    """The mean loss of each block of each window, `(windows, blocks)` float64 on the CPU."""
    model.eval()
    rows = []
    for index in tqdm(range(len(windows)), desc="perplexity by block", leave=False, dynamic_ncols=True):
        ids, labels = blocks_of(windows[index]["input_ids"][None].to(model.device), block, alone)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            losses = token_losses(model(input_ids=ids, use_cache=False).logits, labels)
        # The loss of token t + 1 stands at t: with a zero in front, blocks begin where they should.
        rows.append(F.pad(losses, (1, 0)).reshape(-1, block).sum(1).double().cpu() / (block - 1))
    return torch.stack(rows)


def fit(
    options: argparse.Namespace,
    variant: str,
    config: ProxyFormerConfig,
    train: TokenBlocks,
    evaluation: dict[str, TokenBlocks],
) -> ProxyFormerForCausalLM:
    """The trained model; checkpoints and `perplexity.jsonl` are left in the variant's folder."""
    folder = options.output / variant
    checkpoint = last_checkpoint(folder) if options.resume else None
    if checkpoint is not None and checkpoint_step(checkpoint) == options.steps:  # only the end was missed
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        assert state.global_step == options.steps
        model = ProxyFormerForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        return model.to(PartialState().device)
    set_seed(options.seed)
    model = ProxyFormerForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.per_device_batch_size,
        per_device_eval_batch_size=options.per_device_batch_size,
        gradient_accumulation_steps=options.batch_size // (options.per_device_batch_size * options.processes),
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.03},
        warmup_steps=max(1, round(0.06 * options.steps)),
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
    model.to(arguments.device)
    optimizer = make_optimizer(model, options.optimizer, lr=options.learning_rate, weight_decay=options.weight_decay)
    trainer = BlockTrainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        callbacks=[PerplexityLog(options.batch_size * options.window_tokens)],
        optimizers=(optimizer, None),  # the Trainer makes the schedule
        block_tokens=options.block_tokens,
        alone=VARIANTS[variant],
    )
    show_loss_bar(trainer)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return model


def train_variant(
    options: argparse.Namespace,
    variant: str,
    config: ProxyFormerConfig,
    tokenizer: Any,
    train: TokenBlocks,
    evaluation: dict[str, TokenBlocks],
) -> None:
    """Train one model into its folder: weights and tokenizer, `perplexity.jsonl`, `run.json`."""
    folder = options.output / variant
    main_process = PartialState().is_main_process
    run = {"settings": options.settings, "variant": variant, "result": None}
    if main_process:
        write_run(folder, run)
    model = fit(options, variant, config, train, evaluation)
    if main_process:
        model.config.use_cache = True  # the Trainer has switched it off
        if options.keep_weights:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        lines = read_perplexity_log(folder)
        by_block = {
            name: block_losses(model, windows, options.block_tokens, VARIANTS[variant], options.bf16)
            for name, windows in evaluation.items()
        }
        run["result"] = {
            "parameters": model.num_parameters(),
            **{name: lines[-1][name] for name in ("step", "tokens", "seconds", "loss", "perplexity")},
            # How it falls as the history grows, and what differences between models can be resampled from.
            "perplexity_by_block": {name: losses.mean(0).exp().tolist() for name, losses in by_block.items()},
            "row_losses": {name: losses.mean(1).tolist() for name, losses in by_block.items()},
            "tokens_per_second": tokens_per_second(lines),
        }
        write_run(folder, run)
        for leftover in folder.glob("checkpoint-*"):
            shutil.rmtree(leftover)
    PartialState().wait_for_everyone()


# --- what comes out --------------------------------------------------------------------------------------------------


def summarise(options: argparse.Namespace, evaluation: dict[str, TokenBlocks]) -> str:
    """Write summary.json and perplexity.png over all finished runs with these settings; return the table."""
    results: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS:  # those of earlier commands too
        run = read_run(options.output / variant)
        if run and run["result"] and same_settings(run, options.settings):
            results[variant] = run["result"]
    baseline = next(iter(results))
    results = compared_with(baseline, results)
    block = options.block_tokens
    predicted = {name: len(windows.tokens) // block * (block - 1) for name, windows in evaluation.items()}
    write_json(options.output / "summary.json", {
        "settings": options.settings, "processes": options.processes, "baseline": baseline,
        "machine": machine_report(PartialState().device), "predicted_tokens": predicted, "variants": results,
    })  # fmt: skip
    notes = comparison_figure(
        {name: options.output / name for name in results},
        options.output / "perplexity.png",
        baseline=baseline,
        title=f"P = {options.compression_ratio}, blocks of {block}, windows of {options.window_tokens}",
    )

    def perplexities(result: Mapping[str, Any]) -> list[float | None]:
        by_block = result["perplexity_by_block"]
        return [
            value
            for name in predicted
            for value in (result["perplexity"][name], by_block[name][0], by_block[name][-1])
        ]

    titles = [title for name in predicted for title in (f"ppl {name}", "its first block", "its last block")]
    notes.append("predicted tokens, the same for all: " + ", ".join(f"{n} {c:,}" for n, c in predicted.items()))
    return "\n".join([comparison_table(results, baseline, titles, perplexities), *notes])


# --- arguments -------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variant", action="append", choices=tuple(VARIANTS), help="repeatable (default: the first three)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--resume", action="store_true", help="go on with what was interrupted, from its checkpoint")

    add = parser.add_argument_group("model").add_argument
    add("--hidden-size", type=int, default=512)
    add("--history-hidden-size", type=int, default=64)
    add("--layers", type=int, default=10)
    add("--heads", type=int, default=8)
    add("--compression-ratio", type=int, default=32, help="P, tokens a proxy; divides --block-tokens")
    add("--block-tokens", type=int, default=128, help="the generation block")
    add(
        "--window-tokens", type=int, default=2048, help="a multiple of --block-tokens: the longest history and a block"
    )
    add("--auxiliary-loss-weight", type=float, default=0.3, help="of the mid-layer head while training")

    add = parser.add_argument_group("text").add_argument
    add("--tokenizer", required=True, metavar="ID_OR_DIR")
    add(
        "--text",
        nargs="+",
        metavar="PATH",
        help=".txt, .md, .jsonl, .json, also .xz and .gz, or folders of them; or one .npz of write_tokens.py",
    )
    add("--dataset", metavar="ID[:CONFIG]", help="instead of files; needs the `datasets` package; a row is a document")
    add("--split", default="train", help="of the dataset")
    add("--text-field", default="text", help="of JSON files and datasets")
    add("--max-tokens", type=int, help="read no more (default: everything)")
    add("--eval-text", action="append", default=[], metavar="NAME=PATH", help="held-out text; repeatable")
    add("--eval-split", help="held-out split of the dataset (default: the last 1 %% of the windows, not trained on)")
    add("--cache-dir", type=Path, metavar="DIR", help="where tokens are kept (default: nearfar's cache folder)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=10_000)
    add("--batch-size", type=int, default=32, help="windows a step, over all processes")
    add("--per-device-batch-size", type=int, help="windows at once (default: at most 8); the rest is accumulated")
    add("--optimizer", choices=tuple(LEARNING_RATES), default="muon", help="of matrices; AdamW for all else")
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in LEARNING_RATES.items())
    add("--learning-rate", type=float, help=f"highest (default: {rates}); 6 %% warm-up, cosine to 3 %% of it")
    add("--weight-decay", type=float, default=0.1, help="of matrices and embeddings")
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, metavar="STEPS", help="default: 40 times in all")
    add("--eval-blocks", type=int, default=400, metavar="WINDOWS", help="at most so many of each held-out text")
    add("--save-every", type=int, metavar="STEPS",
        help="checkpoints to resume from, more than --steps: none (default: as --eval-every)")  # fmt: skip
    add("--keep-weights", action=argparse.BooleanOptionalAction, default=True, help="of finished variants")

    add = parser.add_argument_group("machine").add_argument
    add("--precision", choices=("auto", "bfloat16", "float32"), default="auto",
        help="auto is bfloat16 autocast on a GPU, float32 on a CPU; weights are float32 in any case")  # fmt: skip
    add("--compile", action="store_true", help="torch.compile")
    add("--cpu", action="store_true", help="even if there is a GPU")
    add("--threads", type=int, help="CPU threads of each process")
    return parser


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other arguments.

    Raises:
        ValueError: arguments that do not go together, or out of range.
    """
    if (options.text is None) == (options.dataset is None):
        raise ValueError("give --text or --dataset")
    if options.eval_split and not options.dataset:
        raise ValueError("--eval-split is a split of --dataset; beside --text use --eval-text NAME=PATH")
    names = [text.partition("=")[0] for text in options.eval_text] + [options.eval_split] * bool(options.eval_split)
    for text in options.eval_text:
        if not re.fullmatch(r"[\w-]+=.+", text):
            raise ValueError(f"--eval-text must look like NAME=PATH, got {text!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"two held-out texts have the same name: {', '.join(names)}")
    options.eval_every = max(1, options.steps // 40) if options.eval_every is None else options.eval_every
    options.save_every = options.eval_every if options.save_every is None else options.save_every
    for name in ("steps", "batch_size", "eval_every", "eval_blocks", "save_every"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.block_tokens < 2 or options.window_tokens % options.block_tokens:
        raise ValueError(
            f"--window-tokens must be a multiple of --block-tokens, and that at least 2, got {options.window_tokens} "
            f"and {options.block_tokens}"
        )
    options.per_device_batch_size = blocks_at_once(
        options.batch_size, options.processes, options.per_device_batch_size, kind="windows"
    )
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.optimizer]
    check_numbers(options, ("learning_rate",), ("weight_decay", "auxiliary_loss_weight"))
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
    variants = list(dict.fromkeys(options.variant or DEFAULT_VARIANTS))
    try:
        resolve(options)
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        configs = [make_config(options, variant, tokenizer) for variant in variants]
        finished = [check_run(options.output / variant, options.settings, options.resume) for variant in variants]
        train, evaluation = load_data(options, tokenizer)
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).split()))

    state.wait_for_everyone()  # all have seen which variants are finished before the first one changes that
    sizes = ", ".join(f"{name} {len(windows)}" for name, windows in evaluation.items())
    state.print(f"{train} to train on; windows to evaluate on: {sizes}")
    for variant, config, done in zip(variants, configs, finished, strict=True):
        if done:
            state.print(f"{variant}: finished already")
            continue
        train_variant(options, variant, config, tokenizer, train, evaluation)
        gc.collect()  # the Trainer and its model refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        torch.compiler.reset()
    if state.is_main_process:
        print(summarise(options, evaluation))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
