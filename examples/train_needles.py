"""Train a ProxyFormer to find many needles in long documents, by a curriculum, and measure it on longer ones.

    python examples/train_needles.py --text wiki/train.txt.xz --output runs/needles

trains the plan "fast" from random weights: a tokenizer of 4,096 tokens with single digits, then 256 tokens with one
needle, 512 with 8, 2,048 with 25 and 8,192 with 50, some minutes on one GPU. It leaves in --output

    model/            the checkpoint with tokenizer, code and a card; loads with `trust_remote_code=True`
    needles.json      accuracy at --eval-lengths, on text that was not trained on; needles.png, by length and depth
    training.jsonl    loss and share of exact answers along training; TensorBoard's files where that is installed
    data/             tokenizer and background as token ids; --data keeps them elsewhere, for several runs
    run.json          settings, stages, result

The same command with --resume goes on with a run that was interrupted. `--plan long` ends with 65,536 tokens, `--plan
paper` is the paper's curriculum, and `--write-plan FILE` writes a plan to edit and give back as --plan-file. The
paper's tokenizer is --tokenizer gpt2, in which a passkey takes two or three tokens and its name one: take `--plan
merged` for it. --prepare-only makes data/ on a machine without a GPU; elsewhere --data names it, without --text.
--start-from MODEL trains a checkpoint on, for instance with a plan of longer documents. On several GPUs each process
adds a batch of its own: `accelerate launch --num_processes 8 examples/train_needles.py …`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import PartialState
from transformers import AutoTokenizer, PreTrainedConfig, set_seed

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM, __version__
from nearfar.evaluation.card_data import Metric, card_data
from nearfar.evaluation.machine import machine_name, machine_report
from nearfar.evaluation.multi_needle import NeedleResults, evaluate_needles, least_length, write_heat_map
from nearfar.evaluation.needle_documents import (
    DEFAULT_IDS,
    NeedleDocuments,
    NeedleTemplates,
    load_background,
    split_background,
)
from nearfar.evaluation.text_pieces import read_text_pieces
from nearfar.modeling.atomic_file import write_beside
from nearfar.training.digit_tokenizer import train_digit_tokenizer
from nearfar.training.main_process import in_main_process, run_main
from nearfar.training.needle_curriculum import NEEDLE_PLANS, NeedlePlan, read_plan
from nearfar.training.needle_training import NeedleTrainer, NeedleTraining, last_checkpoint
from nearfar.training.run_folder import check_run, replaced_folder, write_json, write_run

HELD_OUT = 0.1
# What must be equal for a run to be gone on with.
SETTINGS = (
    "hidden_size", "layers", "heads", "compression_ratio", "start_from", "sharpen", "seconds", "seed", "bf16",
    "pure_bf16", "processes",
)  # fmt: skip


# --- text ------------------------------------------------------------------------------------------------------------


def prepare_data(options: argparse.Namespace) -> None:
    """Write tokenizer, `background.npy` and last `data.json` into --data, unless they are there for this text."""
    source = {"text": options.text, "dataset": options.dataset, "split": options.split, "column": options.column}
    wanted = {
        **source,
        "tokenizer": options.tokenizer,
        "vocabulary": None if options.tokenizer else options.vocabulary,
        "tokens": options.background_tokens,
    }
    record = options.data / "data.json"
    if record.is_file():
        found = json.loads(record.read_text(encoding="utf-8"))
        if options.text is None and options.dataset is None:
            return
        if found == wanted:
            return
        differing = [name for name in wanted if found.get(name) != wanted[name]]
        raise ValueError(
            f"{options.data} holds data of another {', '.join(differing)}: delete it or give another --data"
        )
    sources: Any = options.dataset or options.text
    if not sources:
        raise ValueError(f"give --text or --dataset ({options.data} holds no data yet)")
    if options.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    else:
        pieces = read_text_pieces(sources, options.tokenizer_characters, split=options.split, column=options.column)
        tokenizer = train_digit_tokenizer(pieces, options.vocabulary)
    NeedleTemplates(tokenizer)  # refuses a tokenizer that cannot write passkeys
    background = load_background(
        sources, tokenizer, options.background_tokens, split=options.split, column=options.column
    )
    tokenizer.save_pretrained(options.data / "tokenizer")
    ids = background.numpy().astype(np.uint16 if len(tokenizer) <= 1 << 16 else np.int32)
    write_beside(options.data / "background.npy", lambda file: np.save(file, ids))
    write_json(record, wanted)


def load_data(options: argparse.Namespace) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Tokenizer, background to train on, and background to evaluate on."""
    tokenizer = AutoTokenizer.from_pretrained(options.data / "tokenizer")
    ids = torch.from_numpy(np.load(options.data / "background.npy").astype(np.int32))
    return (tokenizer, *split_background(ids, HELD_OUT))


# --- model -----------------------------------------------------------------------------------------------------------


def make_model(options: argparse.Namespace, tokenizer: Any, templates: NeedleTemplates) -> ProxyFormerForCausalLM:
    """Float32 weights, random or those of --start-from; a generation block holds a question and its answer."""
    if options.start_from:
        own = AutoTokenizer.from_pretrained(options.start_from)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"{options.data} was not made with the tokenizer of {options.start_from}: give another --data"
            )
        config = start_config(options.start_from)
        if options.sharpen is not None:
            config.proxy_sharpen_from = most_proxies(options.plan_object, config.ratios) if options.sharpen else None
        return ProxyFormerForCausalLM.from_pretrained(options.start_from, config=config, dtype=torch.float32)
    ratio = options.compression_ratio
    text = templates.max_query_tokens + templates.max_answer_tokens
    config = ProxyFormerConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=options.hidden_size,
        history_hidden_size=min(64, options.hidden_size // 2),
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        compression_ratio=ratio,
        generation_block_size=-(-max(text, ratio) // ratio) * ratio,
        # Changes nothing in training, which has no longer documents.
        proxy_sharpen_from=most_proxies(options.plan_object, [ratio]) if options.sharpen else None,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(options.seed)
    return ProxyFormerForCausalLM(config)


def start_config(checkpoint: str) -> ProxyFormerConfig:
    """Of a checkpoint to train on.

    Raises:
        OSError: there is none.
        ValueError: it is no ProxyFormer, or one without proxies.
    """
    try:
        found = PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type")
    except OSError as error:
        raise OSError(f"--start-from {checkpoint}: {error}") from None
    if found != ProxyFormerConfig.model_type:
        raise ValueError(f"--start-from wants a ProxyFormer, and {checkpoint} is {found!r}")
    config = ProxyFormerConfig.from_pretrained(checkpoint)
    if not config.has_proxies:
        raise ValueError(f"--start-from wants proxies, and {checkpoint} is a plain decoder (compression_ratio=None)")
    return config


def most_proxies(plan: NeedlePlan, ratios: Sequence[int]) -> int:
    """Of a document of the plan's longest stage; at least 2."""
    longest = max([stage.length for stage in plan.stages if stage.history], default=0)
    return max(2, -(-longest // max(ratios)))


def save_model(folder: Path, model: ProxyFormerForCausalLM, tokenizer: Any) -> None:
    """Weights, code and tokenizer, beside and then in the folder's place."""
    with replaced_folder(folder) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)


def model_card(options: argparse.Namespace, model: ProxyFormerForCausalLM, run: dict[str, Any]) -> str:
    """README.md of the checkpoint."""
    config, result = model.config, run["result"]
    metrics = [
        Metric("accuracy", row["accuracy"], "multi-needle passkeys", f"passkeys found in {row['length']:,} tokens")
        for row in result["accuracy"]
    ]
    data = card_data(options.output.name, ["proxyformer", "custom_code"], metrics)
    stages = "\n".join(
        f"- {entry['stage']}: {entry['steps']:,} steps, exact {entry['exact']:.3f}, left for: {entry['reason']}"
        for entry in result["left"]
    )
    found = "\n".join(
        f"| {row['length']:,} | {row['found']:,} of {row['asked']:,} | {row['accuracy']:.4f} | {row['measure']} |"
        for row in result["accuracy"]
    )
    plan = options.plan_object
    start = f"; trained on from {options.start_from}" if options.start_from else ""
    return f"""---
{data.to_yaml()}
---

# {options.output.name}

A ProxyFormer of {model.num_parameters():,} parameters that was trained for one task: to find passkeys in long
documents, as in Section 5.3 of the ProxyFormer paper. It is no general language model.

- {config.num_hidden_layers} layers, width {config.hidden_size}, history width {config.history_hidden_size},
  {config.num_attention_heads} heads, {config.compression_ratio} tokens a proxy, {config.vocab_size:,} token ids
- trained {result["steps"]:,} steps in {result["seconds"]:,.0f} s on {machine_name(run["machine"])}; it ended for:
  {result["ended"]}
- plan `{plan.name}`: {plan.optimizer} at {plan.learning_rate:g}, clip {plan.clip:g}, batches a step:
  {plan.accumulation}, seed {options.seed}{start}
- nearfar {__version__}, torch {torch.__version__}, transformers {transformers.__version__}

Stages left (tokens/needles × documents·questions):

{stages or "- none"}

## Needles found

{result["needles"]} needles a document, background not trained on.

| tokens | found | accuracy | measure |
|---:|---:|---:|---|
{found or "| – | not measured | – | – |"}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{options.output.name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{options.output.name}")
cache = model.encode_history(tokenizer(document, return_tensors="pt").input_ids)
```
"""


# --- a run -----------------------------------------------------------------------------------------------------------


def evaluate(
    options: argparse.Namespace, model: ProxyFormerForCausalLM, templates: NeedleTemplates, held_out: torch.Tensor
) -> NeedleResults:
    """Accuracy at --eval-lengths, in needles.json and as a heat map in needles.png."""
    device = model.get_input_embeddings().weight.device
    if templates.num_ids != (ids := max(DEFAULT_IDS, options.needles)):
        templates = NeedleTemplates(templates.tokenizer, num_ids=ids)  # seconds where digits merge
    results: NeedleResults | None = None
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
        for length, count in sorted(options.eval_counts.items()):
            results = evaluate_needles(
                model,
                templates.tokenizer,
                held_out,
                [length],
                count,
                options.needles,
                batch_size=min(options.needles, options.eval_batch_size),
                seed=options.seed,
                quick=options.eval_quick,
                path=options.output / "needles.json",
                restart=results is None,  # further lengths join those before
                model_name=options.output.name,
                record={"command": options.command},
                templates=templates,
            )
    assert results is not None
    needles = f"{options.needles} needle{'s' if options.needles > 1 else ''} a document"
    try:
        write_heat_map(options.output / "needles.png", results, f"{options.output.name}: {needles}")
    except ImportError as error:
        print(f"no figure: {error}")
    return results


def make_trainer(options: argparse.Namespace, templates: NeedleTemplates, text: torch.Tensor) -> NeedleTrainer:
    """A model, random or of --start-from, and what trains it."""
    return NeedleTrainer(
        make_model(options, templates.tokenizer, templates),
        options.plan_object,
        NeedleDocuments(text, templates),
        options.output,
        options.training,
        cpu=options.cpu,
    )


def train(options: argparse.Namespace, trainer: NeedleTrainer, tokenizer: Any, held_out: torch.Tensor) -> None:
    """Train, save, evaluate."""
    main_process = PartialState().is_main_process
    model = trainer.model
    run: dict[str, Any] = {
        "command": options.command,
        "settings": options.settings,
        "machine": machine_report(trainer.device),
        "parameters": model.num_parameters(),
        "result": None,
    }
    if main_process:
        write_run(options.output, run)
    result = trainer.train(last_checkpoint(options.output) if options.resume else None)
    if main_process:
        model.eval()
        model.config.use_cache = True
        save_model(options.output / "model", model, tokenizer)
        accuracy = []
        if options.eval_lengths:
            found = evaluate(options, model, trainer.documents.templates, held_out)
            measure = str(found.settings["measure"])
            for length, counts in found.lengths.items():
                accuracy.append({
                    "length": length, "asked": counts.asked, "found": counts.found, "accuracy": counts.accuracy,
                    "measure": measure,
                })  # fmt: skip
            print(found.table())
        run["result"] = {**result, "needles": options.needles, "accuracy": accuracy}
        card = model_card(options, model, run)
        write_beside(options.output / "model" / "README.md", lambda file: file.write_text(card, encoding="utf-8"))
        write_run(options.output, run)
        for leftover in options.output.glob("checkpoint-*"):
            shutil.rmtree(leftover)
        print(
            f"{result['steps']:,} steps in {result['seconds']:,.1f} s ({result['ended']}); {options.output / 'model'}"
        )
    PartialState().wait_for_everyone()


# --- arguments -------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="DIR", help="required, but for --write-plan")
    parser.add_argument("--resume", action="store_true", help="go on with what was interrupted, from its checkpoint")

    add = parser.add_argument_group("plan").add_argument
    add("--plan", choices=tuple(NEEDLE_PLANS), help="default: fast")
    add("--plan-file", type=Path, metavar="JSON", help="a plan of your own")
    add("--write-plan", type=Path, metavar="JSON", help="write the plan with all changes to it, and end")
    add("--steps", type=int, help="of the whole run (default: the plan's)")
    add("--seconds", type=float, help="of training, in place of steps; the learning rate follows the time")
    add("--optimizer", choices=("muon", "mano", "adamw"), help="default: the plan's; AdamW for all but matrices")
    add("--learning-rate", type=float, help="default: the plan's")
    add("--dense", type=float, help="share of documents with all needles in a short span (default: the plan's)")
    add("--seed", type=int, default=0)

    add = parser.add_argument_group("model").add_argument
    add("--start-from", metavar="MODEL", help="train this checkpoint on, at its own sizes and with its tokenizer")
    add("--hidden-size", type=int, help="default: 512")
    add("--layers", type=int, help="default: 10")
    add("--heads", type=int, help="default: of 64 numbers each")
    add("--compression-ratio", type=int, help="P, tokens a proxy (default: 64)")
    add("--sharpen", action=argparse.BooleanOptionalAction, default=None,
        help="scale queries by the logarithm of how many proxies they see, beyond the longest stage's "
        "(default: yes; with --start-from as the checkpoint has it)")  # fmt: skip

    add = parser.add_argument_group("text").add_argument
    add("--text", nargs="+", metavar="PATH", help=".txt and .md, also .xz and .gz, or folders of them")
    add("--dataset", metavar="ID[:CONFIG]", help="instead of files; needs the `datasets` package")
    add("--split", default="train", help="of the dataset")
    add("--column", help="of the dataset (default: found by its name)")
    add("--tokenizer", metavar="ID_OR_DIR", help="instead of one that is trained on the text")
    add("--vocabulary", type=int, default=4096, help="of the tokenizer that is trained")
    add("--tokenizer-characters", type=int, default=8_000_000, help="of the text that it is trained on")
    add("--background-tokens", type=int, default=10_000_000, help="read no more")
    add("--data", type=Path, metavar="DIR", help="where the tokens are kept (default: OUTPUT/data)")
    add("--prepare-only", action="store_true", help="make tokenizer and tokens, and end")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval-lengths", type=int, nargs="*", default=[8192], metavar="TOKENS", help="none: no evaluation")
    add("--eval-documents", type=int, nargs="+", default=[20], metavar="COUNT",
        help="of each length, or a number for every length; all needles are asked for")  # fmt: skip
    add("--eval-batch-size", type=int, default=50,
        help="questions at once; decoding copies the cache as often: fewer for very long documents")  # fmt: skip
    add("--eval-needles", type=int, help="default: the last stage's")
    add("--eval-quick", action="store_true", help="exact answers in one pass, instead of greedy decoding")

    add = parser.add_argument_group("machine").add_argument
    add("--bf16", action=argparse.BooleanOptionalAction, help="autocast; weights are float32 (default: on a GPU)")
    add("--pure-bf16", action="store_true", help="passes on bfloat16 copies of the weights, without autocast")
    add("--compile", action="store_true", help="torch.compile of the layers")
    add("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="record each stage's passes")
    add("--log-every", type=int, default=10, metavar="STEPS", help="also when stages are left")
    add("--save-every", type=int, metavar="STEPS", help="checkpoints to resume from (default: none)")
    add("--cpu", action="store_true", help="even if there is a GPU")
    add("--threads", type=int, help="CPU threads of each process")
    return parser


def chosen_plan(options: argparse.Namespace) -> NeedlePlan:
    """The plan named, with what other arguments change of it."""
    if options.plan and options.plan_file:
        raise ValueError("give --plan or --plan-file")
    plan = read_plan(options.plan_file) if options.plan_file else NEEDLE_PLANS[options.plan or "fast"]
    changes = {
        name: value
        for name in ("steps", "optimizer", "learning_rate", "dense")
        if (value := getattr(options, name)) is not None
    }
    if "steps" in changes and plan.warmup_steps > changes["steps"] // 2:
        changes["warmup_steps"] = changes["steps"] // 2
    return dataclasses.replace(plan, **changes)


def document_counts(lengths: Sequence[int], counts: Sequence[int]) -> dict[int, int]:
    """Length -> documents.

    Raises:
        ValueError: neither one count nor one for every length, a count below 1, or a length that is given twice.
    """
    if min(counts) < 1:
        raise ValueError(f"--eval-documents must be at least 1, got {min(counts)}")
    if len(counts) == 1:
        return dict.fromkeys(lengths, counts[0])
    if len(counts) != len(lengths):
        raise ValueError(f"--eval-documents has {len(counts)} numbers for {len(lengths)} --eval-lengths")
    if len(set(lengths)) < len(lengths):
        raise ValueError("--eval-lengths names a length twice")
    return dict(zip(lengths, counts, strict=True))


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other arguments.

    Raises:
        ValueError: arguments that do not go together, or out of range.
    """
    options.plan_object = chosen_plan(options)
    if options.write_plan:
        return
    if options.output is None:
        raise ValueError("--output is missing")
    if options.text and options.dataset:
        raise ValueError("give --text or --dataset")
    if options.steps is not None and options.seconds is not None:
        raise ValueError("give --steps or --seconds")
    if options.eval_needles is not None and options.eval_needles < 1:
        raise ValueError(f"--eval-needles must be at least 1, got {options.eval_needles}")
    sizes = {"hidden_size": 512, "layers": 10, "heads": None, "compression_ratio": 64}
    for name, default in sizes.items():
        given = getattr(options, name)
        if options.start_from and given is not None:
            raise ValueError(f"--{name.replace('_', '-')} is the checkpoint's with --start-from: leave it out")
        if given is None and not options.start_from:
            setattr(options, name, default)
    if options.start_from:
        start_config(options.start_from)
        options.tokenizer = options.tokenizer or options.start_from
    elif options.sharpen is None:
        options.sharpen = True
    for name in (
        "hidden_size", "layers", "compression_ratio", "vocabulary", "tokenizer_characters", "background_tokens",
        "eval_batch_size",
    ):  # fmt: skip
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    options.eval_counts = document_counts(options.eval_lengths, options.eval_documents)
    if not options.start_from:
        if options.heads is None:
            options.heads = max(1, options.hidden_size // 64)
        if options.heads < 1 or options.hidden_size % options.heads:
            raise ValueError(f"--heads must divide --hidden-size, got {options.heads} and {options.hidden_size}")
    options.cpu = options.cpu or not torch.accelerator.is_available()
    options.bf16 = not options.cpu if options.bf16 is None else options.bf16
    options.data = options.data or options.output / "data"
    options.needles = options.plan_object.stages[-1].needles if options.eval_needles is None else options.eval_needles
    options.training = NeedleTraining(
        seconds=options.seconds,
        seed=options.seed,
        log_every=options.log_every,
        save_every=options.save_every,
        bf16=options.bf16,
        pure_bf16=options.pure_bf16,
        compile=options.compile,
        cuda_graphs=options.cuda_graphs,
    )
    options.settings = {
        **{name: getattr(options, name) for name in SETTINGS},
        "plan": options.plan_object.to_dict(),
        "data": str(options.data),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    options.command = shlex.join(["train_needles.py", *(sys.argv[1:] if argv is None else argv)])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # of loading and saving weights
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.threads:
        torch.set_num_threads(options.threads)
    state = PartialState(cpu=options.cpu or not torch.accelerator.is_available())
    options.processes = state.num_processes
    try:
        resolve(options)
        if options.write_plan:
            write_json(options.write_plan, options.plan_object.to_dict())
            return 0
        finished = check_run(options.output, options.settings, options.resume)
        in_main_process(lambda: prepare_data(options))
        if options.prepare_only:
            return 0
        tokenizer, text, held_out = load_data(options)
        ids = max([DEFAULT_IDS, options.needles, *(stage.needles for stage in options.plan_object.stages)])
        templates = NeedleTemplates(tokenizer, num_ids=ids)
        least = least_length(tokenizer, templates, options.needles)
        if options.eval_lengths and min(options.eval_lengths) < least:
            raise ValueError(f"--eval-lengths must be at least {least} for {options.needles} needles")
        if finished:
            state.print(f"{options.output}: finished already")
            return 0
        asked = any(stage.question_weight for stage in options.plan_object.stages)
        if not (templates.single_digits or asked or options.start_from):
            state.print(
                'note: this tokenizer merges digits, so that a passkey\'s name is a token of its own. The plan "fast" '
                'was seen to stay at chance then; "merged" asks for the names as well.', file=sys.stderr,
            )  # fmt: skip
        trainer = make_trainer(options, templates, text)
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).split()))
    code = 0
    try:
        train(options, trainer, tokenizer, held_out)
    except FloatingPointError as error:
        state.print(f"{options.output}: {error}", file=sys.stderr)
        code = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(run_main(main))
