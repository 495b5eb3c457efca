"""Fine-tune DAR, ProxyFormer or any other causal language model on text, on one device or many.

    python examples/finetune.py --model checkpoints/proxyformer-needles-12m --text books/ --output runs/books
    python examples/finetune.py --model HuggingFaceTB/SmolLM2-135M --lora --output runs/wikitext \\
        --dataset Salesforce/wikitext:wikitext-2-v1 --eval-split validation
    accelerate launch --config_file examples/accelerate/fsdp2.yaml --num_processes 2 examples/finetune.py …

Text is packed into blocks of --block-tokens. A step reads --batch-size of them, whatever the number of processes: what
a process cannot hold at once (--per-device-batch-size) is accumulated, and the loss is the mean over all tokens of the
step, so that the same command gives the same model on one device and on many. The folder of --output gets the model
(with --lora the adapter, with --merge the model it was merged into) and its tokenizer, `perplexity.jsonl`,
`log_history.json` (the loss of each step), `run.json`, and with tensorboard installed its files.

--resume goes on from the last checkpoint, with the same loss curve as if nothing had happened. With --patience it
stops when the first evaluation text has not improved so many times, and the best checkpoint is what is kept.

The folder examples/accelerate has configurations for DDP (ddp.yaml), FSDP2 (fsdp2.yaml) and DeepSpeed ZeRO-3
(zero3.yaml); --num_processes is the number of devices. DDP also runs on CPUs, with --cpu.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import nearfar  # noqa: F401  (the Auto classes learn its models)
from nearfar.conversion.packaged_model import cache_root
from nearfar.evaluation.machine import machine_report
from nearfar.training.loss_bar import show_loss_bar
from nearfar.training.main_process import run_main
from nearfar.training.perplexity_log import LOG_NAME, PerplexityLog, read_perplexity_log
from nearfar.training.run_folder import check_run, last_checkpoint, write_json, write_run
from nearfar.training.token_blocks import TokenBlocks
from nearfar.training.training_blocks import blocks_at_once, check_numbers, even_shares, load_training_blocks

# What must be equal for a run to be gone on with.
SETTINGS = (
    "model", "tokenizer", "text", "dataset", "split", "text_field", "max_tokens", "eval_text", "eval_split",
    "eval_blocks", "block_tokens", "batch_size", "steps", "epochs", "learning_rate", "weight_decay", "warmup",
    "schedule", "seed", "bf16", "eval_every", "patience", "lora", "lora_rank", "lora_alpha", "lora_dropout",
    "lora_targets", "load_in_4bit",
)  # fmt: skip


# --- model and data --------------------------------------------------------------------------------------------------


def load_tokenizer(options: argparse.Namespace) -> Any:
    """The tokenizer; fails before any work.

    Raises:
        ValueError: there is no such model, or it is made for shorter blocks or another tokenizer.
    """
    try:
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {options.model}: {error}") from error
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and options.block_tokens > longest:
        raise ValueError(
            f"--block-tokens {options.block_tokens}: {options.model} is made for at most {longest} tokens"
        )
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    known = getattr(config.get_text_config(), "vocab_size", None)
    if known is not None and tokenizer.vocab_size > known:  # added tokens, which may go unused, are not counted
        raise ValueError(
            f"--tokenizer {options.tokenizer} has {tokenizer.vocab_size:,} tokens, and {options.model} knows {known:,}"
        )
    return tokenizer


def load_model(options: argparse.Namespace) -> Any:
    """The model, in float32 (what is frozen under --lora in the checkpoint's own dtype), with an adapter if asked."""
    set_seed(options.seed)
    arguments: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if options.load_in_4bit:
        arguments["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        arguments["device_map"] = {"": PartialState().device}
    # Weights that are updated are held in float32: in bfloat16 small steps would be rounded away.
    arguments["dtype"] = "auto" if options.lora else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(options.model, **arguments)
    except Exception as error:  # a damaged file makes the libraries raise errors of any kind
        why = str(error).partition(" Model type should be one of")[0]  # hundreds of names follow
        raise ValueError(f"--model {options.model}: {why or type(error).__name__}") from error
    if options.gradient_checkpointing:
        # Its name from transformers 5.24 on, and before.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if not options.lora:
        return model

    import peft

    if options.load_in_4bit:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=options.gradient_checkpointing)
    targets = options.lora_targets
    adapter = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
    )
    return peft.get_peft_model(model, adapter)


def load_data(options: argparse.Namespace, tokenizer: Any) -> tuple[TokenBlocks, dict[str, TokenBlocks]]:
    """Blocks to train on, a whole number of batches, and blocks to evaluate on by the name of their text."""
    train, evaluation = load_training_blocks(
        options.dataset or [Path(path) for path in options.text],
        tokenizer,
        options.block_tokens,
        batch_size=options.batch_size,
        split=options.split,
        text_field=options.text_field,
        max_tokens=options.max_tokens,
        evaluation_texts=dict(text.split("=", 1) for text in options.eval_text),
        evaluation_split=options.eval_split,
        cache_dir=options.cache_dir or cache_root() / "tokens",
    )
    # As many at once as all processes have of the smallest text.
    smallest = min(options.eval_blocks, *map(len, evaluation.values()))
    options.eval_batch_size = max(1, min(options.per_device_batch_size, smallest // options.processes))
    return train, even_shares(evaluation, options.eval_blocks, options.eval_batch_size, options.processes)


# --- the run ---------------------------------------------------------------------------------------------------------


def is_last(checkpoint: Path) -> bool:
    """Whether no step comes after a checkpoint: it is the last one's, or training was stopped early there."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    return bool(state["global_step"] >= state["max_steps"] or control.get("should_training_stop"))


class ResumableTrainer(Trainer):
    """Trains nothing when it resumes from the last checkpoint; the Trainer looks for the end only after a step."""

    ended = False

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        epochs, *others = super().set_initial_training_values(*args, **kwargs)
        return (0 if self.ended else epochs, *others)


def training_arguments(options: argparse.Namespace, first_text: str) -> TrainingArguments:
    stops_early = options.patience is not None
    length = {"num_train_epochs": options.epochs} if options.steps is None else {"max_steps": options.steps}
    return TrainingArguments(
        output_dir=str(options.output),
        **length,
        per_device_train_batch_size=options.per_device_batch_size,
        per_device_eval_batch_size=options.eval_batch_size,
        gradient_accumulation_steps=options.batch_size // (options.per_device_batch_size * options.processes),
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.schedule,
        warmup_steps=options.warmup,
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
        eval_on_start=not options.resume,
        # Evaluation gathers losses alone: neither logits nor caches are kept or sent between processes.
        prediction_loss_only=True,
        label_names=["labels"],  # of a model inside an adapter the Trainer cannot tell
        dataloader_pin_memory=not options.cpu,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=2 if stops_early else 1,
        load_best_model_at_end=stops_early,
        restore_callback_states_from_checkpoint=stops_early,  # evaluations without a new best
        metric_for_best_model=f"eval_{first_text}_loss" if stops_early else None,
        greater_is_better=False if stops_early else None,
        logging_steps=1,
        report_to=["tensorboard"] if importlib.util.find_spec("tensorboard") else [],
    )


def save(trainer: Trainer, options: argparse.Namespace, tokenizer: Any) -> None:
    """Write the model into the run's folder, put together from the shards of all processes."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.is_world_process_zero():
        return
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    for copy, original in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if copy in weights and original in weights:
            weights[copy] = weights[
                original
            ]  # collected from the shards they are two tensors, and would be saved twice
    model.config.use_cache = True  # the Trainer has switched it off
    model.save_pretrained(options.output, state_dict=weights)
    tokenizer.save_pretrained(options.output)


def merge_adapter(options: argparse.Namespace) -> None:
    """Replace the adapter in the run's folder by the model it makes, from the saved files."""
    import peft

    model = peft.AutoPeftModelForCausalLM.from_pretrained(
        options.output, dtype=torch.float32, trust_remote_code=options.trust_remote_code
    )
    merged = model.merge_and_unload()
    merged.save_pretrained(options.output)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (options.output / name).unlink(missing_ok=True)


def run(
    options: argparse.Namespace,
    model: Any,
    arguments: TrainingArguments,
    tokenizer: Any,
    train: TokenBlocks,
    evaluation: dict[str, TokenBlocks],
) -> None:
    """Train, save, and write what came of it."""
    state = PartialState()
    checkpoint = last_checkpoint(options.output) if options.resume else None
    record: dict[str, Any] = {"settings": options.settings, "result": None}
    if state.is_main_process:
        write_run(options.output, record)
    # One process drives one GPU: the Trainer would otherwise spread it over all it sees with DataParallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    log = PerplexityLog(options.batch_size * options.block_tokens)
    callbacks: list[Any] = [log]
    if options.patience is not None:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=options.patience))
    trainer = ResumableTrainer(model, arguments, train_dataset=train, eval_dataset=evaluation, callbacks=callbacks)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and options.bf16:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate's own would also sum gradients up in bfloat16, and round the loss to it.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    show_loss_bar(trainer)
    trainer.ended = checkpoint is not None and is_last(checkpoint)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.ended:
        trainer.state.log_history.pop()  # a summary of no steps
    save(trainer, options, tokenizer)
    state.wait_for_everyone()
    if not state.is_main_process:
        return
    if options.merge:
        merge_adapter(options)
    write_json(options.output / "log_history.json", trainer.state.log_history)
    lines = read_perplexity_log(options.output / LOG_NAME)
    best = trainer.state.best_global_step if options.patience is not None else None
    kept = next((line for line in lines if line["step"] == best), lines[-1])
    record["result"] = {
        "step": trainer.state.global_step,
        "kept_step": kept["step"],
        "perplexity": kept["perplexity"],
        "perplexity_before": lines[0]["perplexity"] if lines[0]["step"] == 0 else None,
        "seconds": lines[-1]["seconds"],
        "processes": options.processes,
        "machine": machine_report(state.device),
    }
    write_run(options.output, record)
    for leftover in options.output.glob("checkpoint-*"):
        shutil.rmtree(leftover)


# --- arguments -------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="ID_OR_DIR", help="any causal language model")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tokenizer", metavar="ID_OR_DIR", help="default: the one of --model")
    parser.add_argument("--resume", action="store_true", help="go on with what was interrupted, from its checkpoint")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings along")

    add = parser.add_argument_group("text").add_argument
    add("--text", nargs="+", metavar="PATH", help=".txt, .md, .jsonl, .json, also .xz and .gz, or folders of them")
    add("--dataset", metavar="ID[:CONFIG]", help="instead of files; needs the `datasets` package; a row is a document")
    add("--split", default="train", help="of the dataset")
    add("--text-field", default="text", help="of JSON files and datasets")
    add("--max-tokens", type=int, help="read no more (default: everything)")
    add("--eval-text", action="append", default=[], metavar="NAME=PATH", help="held-out text; repeatable")
    add("--eval-split", help="held-out split of the dataset (default: the last 1 %% of the blocks, not trained on)")
    add("--eval-blocks", type=int, default=200, help="at most so many of each held-out text")
    add("--block-tokens", type=int, default=1024)
    add("--cache-dir", type=Path, metavar="DIR", help="where tokens are kept (default: nearfar's cache folder)")

    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=float, default=1.0)
    add("--steps", type=int, help="instead of --epochs")
    add("--batch-size", type=int, default=16, help="blocks a step, over all processes")
    add("--per-device-batch-size", type=int, help="blocks at once (default: at most 8); the rest is accumulated")
    add("--learning-rate", type=float, help="highest (default: 2e-5, with --lora 2e-4)")
    add("--schedule", default="cosine", help="of the learning rate, a name that transformers knows")
    add("--warmup", type=int, default=0, metavar="STEPS")
    add("--weight-decay", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=100, metavar="STEPS")
    add("--save-every", type=int, metavar="STEPS", help="checkpoints to resume from (default: as --eval-every)")
    add("--patience", type=int, metavar="N", help="stop when N evaluations in a row have not been the best")

    add = parser.add_argument_group("adapter, needs the `peft` package").add_argument
    add("--lora", action="store_true", help="train a low-rank adapter and leave the model as it is")
    add("--lora-rank", type=int, default=8)
    add("--lora-alpha", type=float, default=16)
    add("--lora-dropout", type=float, default=0.0)
    add("--lora-targets", nargs="+", metavar="NAME",
        help="modules, or `all-linear` (default: peft's and nearfar's own for this kind of model)")  # fmt: skip
    add("--merge", action="store_true", help="save the model with the adapter merged in")
    add("--load-in-4bit", action="store_true", help="QLoRA: the frozen model in 4 bits; needs bitsandbytes")

    add = parser.add_argument_group("machine").add_argument
    add("--precision", choices=("auto", "bfloat16", "float32"), default="auto",
        help="auto is bfloat16 autocast on a GPU, float32 on a CPU; weights are float32 in any case")  # fmt: skip
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
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
    if (options.load_in_4bit or options.merge or options.lora_targets) and not options.lora:
        raise ValueError("--load-in-4bit, --merge and --lora-targets go with --lora")
    if options.lora and importlib.util.find_spec("peft") is None:
        raise ImportError("--lora needs the `peft` package: pip install 'nearfar[train]'")
    if options.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("--load-in-4bit needs the `bitsandbytes` package")
    options.save_every = options.eval_every if options.save_every is None else options.save_every
    if options.patience is not None and options.save_every % options.eval_every:
        raise ValueError(
            f"with --patience the best evaluation's checkpoint is kept, so that --save-every must be a multiple of "
            f"--eval-every, got {options.save_every} and {options.eval_every}"
        )
    for name in ("steps", "batch_size", "eval_every", "eval_blocks", "save_every", "patience", "lora_rank"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.learning_rate is None:
        options.learning_rate = 2e-4 if options.lora else 2e-5
    check_numbers(options, ("epochs", "learning_rate", "lora_alpha"), ("warmup", "weight_decay"))
    if not 0 <= options.lora_dropout < 1:
        raise ValueError(f"--lora-dropout must be in [0, 1), got {options.lora_dropout}")
    options.per_device_batch_size = blocks_at_once(
        options.batch_size, options.processes, options.per_device_batch_size
    )
    options.tokenizer = options.tokenizer or options.model
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
        finished = check_run(options.output, options.settings, options.resume)
        tokenizer = load_tokenizer(options)
        train, evaluation = load_data(options, tokenizer)
        made = None
        if not finished:  # what the libraries refuse is told before there is a run; ZeRO-3 wants its arguments first
            arguments = training_arguments(options, next(iter(evaluation)))
            made = (load_model(options), arguments)
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).split()))

    state.wait_for_everyone()  # all have seen whether the run is finished before the first one changes that
    sizes = ", ".join(f"{name} {len(blocks)}" for name, blocks in evaluation.items())
    state.print(f"{train} to train on; blocks to evaluate on: {sizes}")
    if made is None:
        state.print(f"{options.output}: finished already")
    else:
        run(options, *made, tokenizer, train, evaluation)
    if state.is_main_process:
        result = json.loads((options.output / "run.json").read_text(encoding="utf-8"))["result"]
        before = result["perplexity_before"] or {}
        for name, perplexity in result["perplexity"].items():
            started = "" if before.get(name) is None else f"{before[name]:.3f} before, "
            shown = "–" if perplexity is None else f"{perplexity:.3f}"
            print(f"perplexity of {name}: {started}{shown} at step {result['kept_step']} of {result['step']}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
