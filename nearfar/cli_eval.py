"""`nearfar eval`: arguments and commands. Like `cli`, importing it imports neither torch nor transformers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar import cli_loading, cli_texts
from nearfar.cli_arguments import ExamplesFormatter, add_command, open_share, positive_int, token_count, token_counts
from nearfar.cli_benchmarks import add_benchmarks
from nearfar.cli_images import add_eval_images
from nearfar.cli_lm_eval import add_dar_tasks
from nearfar.cli_machine import add_machine_arguments, find_device, find_dtype, set_threads, used_threads
from nearfar.cli_messages import UserError, say
from nearfar.cli_output import check_out

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
    parser = add_command(
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
    parser.formatter_class = ExamplesFormatter
    add = parser.add_argument
    add("model", metavar="MODEL", help="a causal language model: a folder or a Hub id")
    add("--tokenizer", default=None, metavar="ID_OR_DIR", help="where the model has none")
    add("--trust-remote-code", action="store_true", help="let a checkpoint run the code that it comes with")

    add = parser.add_argument_group("documents").add_argument
    add("--lengths", type=token_counts, default="1k,2k,4k,8k", metavar="N,…",
        help="tokens of a document, comma-separated; k is 1024 and m is 1024 k")  # fmt: skip
    add("--documents", type=positive_int, default=100, metavar="N", help="of each length")
    add("--needles", type=positive_int, default=50, metavar="N", help="in each document, all asked for")
    add(
        "--span",
        type=token_count,
        default=None,
        metavar="N",
        help="put all needles of a document into N tokens (dense)",
    )
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
    add("--held-out", type=open_share, default=None, metavar="S",
        help="use the last share S of the text only, for a model that was trained on the rest")  # fmt: skip
    add("--text-tokens", type=token_count, default=None, metavar="N",
        help="tokens of the text to read (default: 2m, or twice the longest document if that is more)")  # fmt: skip
    add("--seed", type=int, default=0, help="chooses documents and passkeys")

    add = parser.add_argument_group("questions").add_argument
    add("--batch-size", type=positive_int, default=10, metavar="N", help="questions at once")
    add("--max-new-tokens", type=positive_int, default=10, metavar="N", help="decoded for an answer")
    add("--quick", action="store_true",
        help="in one pass instead of decoding: is each token of the answer the most likely one? Stricter")  # fmt: skip
    add("--control", action="store_true", help="ask about other documents than those read; should find nothing")
    add("--chunk-tokens", type=positive_int, default=4096, metavar="N",
        help="tokens that a model without proxies reads at once")  # fmt: skip
    add("--beyond-positions", action="store_true",
        help="also ask about documents longer than what the model was made for")  # fmt: skip

    add = parser.add_argument_group("output").add_argument
    add("--out", default="nearfar-needles", metavar="DIR", help="where needles.json and needles.png go")
    add("--restart", action="store_true", help="throw results that are there away instead of going on from them")
    add_machine_arguments(parser)


def _needles(args: argparse.Namespace) -> int:
    out = Path(args.out)
    check_out(out)
    if args.span is not None and args.span > args.lengths[0]:
        raise UserError(f"--span {args.span} is longer than the shortest document, {args.lengths[0]} tokens")

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
    device = find_device(args)
    dtype = find_dtype(args, device)
    source = cli_loading.model_source(args.model)
    tokenizer = cli_loading.load_tokenizer(args.tokenizer or source, args.trust_remote_code)
    templates = NeedleTemplates(tokenizer, num_ids=max(DEFAULT_IDS, args.needles))
    least = multi_needle.least_length(tokenizer, templates, args.needles)
    for name, tokens in (("--lengths", args.lengths[0]), ("--span", args.span)):
        if tokens is not None and tokens < least:
            raise UserError(
                f"{name} {tokens}: {args.needles} needles of up to {templates.max_needle_tokens} tokens take at least "
                f"{least}; give a larger one or fewer --needles"
            )
    config = cli_loading.load_config(source, args.trust_remote_code)
    cli_loading.check_vocabulary(config, tokenizer, args.model)
    if not args.beyond_positions:
        _check_positions(config, args.lengths[-1] + templates.max_query_tokens + args.max_new_tokens)
    text_tokens = args.text_tokens or max(2 << 20, 2 * args.lengths[-1])
    if args.text is None:
        background = encode_background(cli_texts.packaged_text(text_tokens), tokenizer, text_tokens)
    else:
        background = load_background(args.text, tokenizer, text_tokens, split=args.split, column=args.column)
    if args.held_out is not None:
        background = split_background(background, args.held_out)[1]

    set_threads(args, device)
    say(f"loading {args.model} ({str(dtype).removeprefix('torch.')}, {device}, {used_threads()} thread(s))")
    model = cli_loading.load_model(source, device, dtype, args.trust_remote_code)
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


def _check_positions(config: PreTrainedConfig, tokens: int) -> None:
    try:
        cli_loading.check_length(config, tokens, "the longest document with its question")
    except UserError as error:
        raise UserError(f"{error}; give shorter --lengths, or --beyond-positions") from None
