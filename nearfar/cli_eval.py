"""`nearfar eval`: arguments and commands. Like `cli`, importing it imports neither torch nor transformers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar import cli
from nearfar.cli_images import add_eval_images

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

NEEDLE_EXAMPLES = """\
examples:
  nearfar eval needles HuggingFaceTB/SmolLM2-135M --lengths 1k,2k,4k --documents 5
      A heat map of a model from the Hub, on the essays that come with the demo.
  nearfar eval needles my-proxyformer --lengths 8k,64k,1m --documents 20 --text test.txt.xz --out needles-64k
      Longer documents over a text of your own. The same command again goes on where it was interrupted; more
      lengths or more documents are added to what is there.
  nearfar eval needles my-proxyformer --lengths 8k --text test.txt.xz --control --out needles-control
      The same questions about documents that do not hold their answers: this should find next to nothing.
"""


def add_eval(commands: Any) -> None:
    """Add `eval` and its tests."""
    from nearfar.cli_benchmarks import add_benchmarks  # here, because they import this module
    from nearfar.cli_lm_eval import add_dar_tasks

    parser: argparse.ArgumentParser = commands.add_parser(
        "eval",
        help="evaluate a model with any cache: perplexity, needles, RULER, LongBench, SCBench, latency; drawn images",
        description="Evaluate a model with any cache. `nearfar report` draws what was measured.",
    )
    tests = parser.add_subparsers(dest="test", required=True, metavar="TEST")
    _add_needles(tests)
    add_benchmarks(tests)
    add_dar_tasks(tests)
    add_eval_images(tests)


def _add_needles(tests: Any) -> None:
    parser = cli._command(
        tests,
        "needles",
        _needles,
        help="passkeys hidden in long documents, by length and depth",
        description=(
            "Hide passkeys in long documents, one in each of as many equal segments, read each document once and ask "
            "for every passkey by itself. An answer is right when the five digits appear in the first tokens of "
            "greedy decoding. Prints accuracy by length, and writes all answers as JSON and a heat map as PNG."
        ),
    )
    parser.epilog = NEEDLE_EXAMPLES
    parser.formatter_class = _ExamplesFormatter
    add = parser.add_argument
    add("model", metavar="MODEL", help="a causal language model: a folder or a Hub id")
    add("--tokenizer", default=None, metavar="ID_OR_DIR", help="where the model has none")
    add("--trust-remote-code", action="store_true", help="let a checkpoint run the code that it comes with")

    add = parser.add_argument_group("documents").add_argument
    add("--lengths", type=_lengths, default="1k,2k,4k,8k", metavar="N,…",
        help="tokens of a document, comma-separated; k is 1024 and m is 1024 k")  # fmt: skip
    add("--documents", type=cli._positive_int, default=100, metavar="N", help="of each length")
    add("--needles", type=cli._positive_int, default=50, metavar="N", help="in each document, all asked for")
    add("--span", type=_length, default=None, metavar="N", help="put all needles of a document into N tokens (dense)")
    add(
        "--text",
        nargs="+",
        default=None,
        metavar="PATH_OR_ID",
        help=".txt and .md files, also as .xz or .gz, folders of them, or the id of a dataset (default: the demo's "
        "essays)",
    )
    add("--split", default="train", help="of a dataset")
    add("--column", default=None, help="of a dataset (default: found by name)")
    add("--held-out", type=_share, default=None, metavar="S",
        help="use the last share S of the text only, for a model that was trained on the rest")  # fmt: skip
    add("--text-tokens", type=_length, default=None, metavar="N",
        help="tokens of the text to read (default: 2m, or twice the longest document if that is more)")  # fmt: skip
    add("--seed", type=int, default=0, help="chooses documents and passkeys")

    add = parser.add_argument_group("questions").add_argument
    add("--batch-size", type=cli._positive_int, default=10, metavar="N", help="questions at once")
    add("--max-new-tokens", type=cli._positive_int, default=10, metavar="N", help="decoded for an answer")
    add("--quick", action="store_true",
        help="in one pass instead of decoding: is each token of the answer the most likely one? Stricter")  # fmt: skip
    add("--control", action="store_true", help="ask about other documents than those read; should find nothing")
    add("--chunk-tokens", type=cli._positive_int, default=4096, metavar="N",
        help="tokens that a model without proxies reads at once")  # fmt: skip
    add("--beyond-positions", action="store_true",
        help="also ask about documents longer than what the model was made for")  # fmt: skip

    add = parser.add_argument_group("output").add_argument
    add("--out", default="nearfar-needles", metavar="DIR", help="where needles.json and needles.png go")
    add("--restart", action="store_true", help="throw results that are there away instead of going on from them")
    cli.add_machine_arguments(parser)


class _ExamplesFormatter(cli._HelpFormatter):
    """Keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)


def _length(text: str) -> int:
    """A number of tokens: 8192, 8k, 1m."""
    number, unit = text.strip().lower(), 1
    if number.endswith(("k", "m")):
        unit = 1 << (10 if number[-1] == "k" else 20)
        number = number[:-1]
    try:
        value = int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of tokens such as 8192, 8k or 1m, got {text!r}") from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of tokens, got {text}")
    return value * unit


def _lengths(text: str) -> list[int]:
    return sorted({_length(part) for part in cli._names(text)})


def _share(text: str) -> float:
    value = cli._float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def _needles(args: argparse.Namespace) -> int:
    out = Path(args.out)
    cli.check_out(out)
    if args.span is not None and args.span > args.lengths[0]:
        raise cli.UserError(f"--span {args.span} is longer than the shortest document, {args.lengths[0]} tokens")

    from nearfar.evaluation import multi_needle
    from nearfar.evaluation.needle_documents import (
        DEFAULT_IDS,
        NeedleTemplates,
        encode_background,
        find_text_files,
        load_background,
        split_background,
    )

    if args.text is not None:
        find_text_files(args.text)
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    source = cli.model_source(args.model)
    tokenizer = _load_tokenizer(args.tokenizer or source, args.trust_remote_code)
    templates = NeedleTemplates(tokenizer, num_ids=max(DEFAULT_IDS, args.needles))
    least = multi_needle.least_length(tokenizer, templates, args.needles)
    for name, tokens in (("--lengths", args.lengths[0]), ("--span", args.span)):
        if tokens is not None and tokens < least:
            raise cli.UserError(
                f"{name} {tokens}: {args.needles} needles of up to {templates.max_needle_tokens} tokens take at least "
                f"{least}; give a larger one or fewer --needles"
            )
    config = _load_config(args, source)
    cli.check_vocabulary(config, tokenizer, args.model)
    if not args.beyond_positions:
        _check_positions(config, args.lengths[-1] + templates.max_query_tokens + args.max_new_tokens)
    text_tokens = args.text_tokens or max(2 << 20, 2 * args.lengths[-1])
    if args.text is None:
        background = encode_background(cli._packaged_text(text_tokens), tokenizer, text_tokens)
    else:
        background = load_background(args.text, tokenizer, text_tokens, split=args.split, column=args.column)
    if args.held_out is not None:
        background = split_background(background, args.held_out)[1]

    cli.set_threads(args, device)
    cli._say(f"loading {args.model} ({str(dtype).removeprefix('torch.')}, {device}, {cli._threads()} thread(s))")
    model = _load_model(source, device, dtype, args.trust_remote_code)
    results = multi_needle.evaluate_needles(
        model,
        tokenizer,
        background,
        args.lengths,
        args.documents,
        args.needles,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        quick=args.quick,
        control=args.control,
        span=args.span,
        chunk_tokens=args.chunk_tokens,
        path=out / "needles.json",
        restart=args.restart,
        model_name=args.model,
        record={"command": args.command_line, "text": args.text or "the demo's essays"},
        templates=templates,
    )
    heading = f"{Path(args.model).name}: {args.needles} needles a document"
    if args.control:
        heading += ", control (the document does not hold the answers)"
    if args.quick:
        heading += ", quick (exact, teacher-forced)"
    print(heading + "\n")
    print(results.table())
    print(f"\nfigure: {multi_needle.write_heat_map(out / 'needles.png', results, heading)}")
    print(f"data:   {out / 'needles.json'}")
    return 0


def _load_config(args: argparse.Namespace, source: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    with cli._loading(source):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    return config


def _check_positions(config: PreTrainedConfig, tokens: int) -> None:
    try:
        cli.check_length(config, tokens, "the longest document with its question")
    except cli.UserError as error:
        raise cli.UserError(f"{error}; give shorter --lengths, or --beyond-positions") from None


def _load_tokenizer(source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    cli.check_tokenizer(source)
    with cli._loading(source):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    return tokenizer


def _load_model(source: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with cli._loading(source):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model.to(device).eval()
