"""`nearfar fit-prototypes`: arguments and command. Like `cli`, importing it imports neither torch nor transformers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nearfar import cli_loading
from nearfar.cli_arguments import add_command, comma_separated, positive_int
from nearfar.cli_caches import own_cache
from nearfar.cli_machine import add_machine_arguments, find_device, find_dtype, set_threads
from nearfar.cli_messages import UserError
from nearfar.cli_output import check_out


def add_fit_prototypes(commands: Any) -> None:
    """Add `fit-prototypes`."""
    parser = add_command(
        commands,
        "fit-prototypes",
        _fit_prototypes,
        help="fit the proactive cache's scorers for a model",
        description=(
            "Read some texts with the model, measure which keys and values matter, and fit the heads that predict it "
            "from the keys and values alone. Offline, once per model."
        ),
    )
    parser.add_argument("--model", required=True, metavar="ID_OR_DIR", help="a causal language model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--texts", nargs="+", metavar="PATH", help="text files, or folders of .txt and .md files")
    source.add_argument(
        "--dataset", metavar="ID", help="a dataset on the Hub or in a folder (needs the `datasets` package)"
    )
    parser.add_argument("--split", default="train", help="of the dataset")
    parser.add_argument("--column", default=None, help="of the dataset (default: found by name)")
    parser.add_argument(
        "--heads", type=comma_separated, default="linear,prototypes,mlp,cosine", help="comma-separated heads to fit"
    )
    parser.add_argument("--contexts", type=positive_int, default=10, metavar="N", help="contexts read")
    parser.add_argument("--context-tokens", type=positive_int, default=1900, metavar="N", help="tokens of a context")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, metavar="DIR", help="where the fitted prototypes are saved")
    parser.add_argument("--push-to-hub", default=None, metavar="ID", help="also push them to this Hub repository")
    add_machine_arguments(parser)


def _fit_prototypes(args: argparse.Namespace) -> int:
    out = Path(args.out)
    check_out(out)

    from nearfar.evaluation.texts import load_dataset_texts, load_texts
    from nearfar.modeling.key_prototypes import KeyPrototypes
    from nearfar.modeling.prototype_scoring import HEADS

    unknown = [head for head in args.heads if head not in HEADS]
    if unknown:
        raise UserError(f"unknown head {unknown[0]!r}; known heads: {', '.join(HEADS)}")

    if args.texts is not None:
        texts = load_texts(args.texts)
    else:
        texts = load_dataset_texts(args.dataset, split=args.split, column=args.column, max_documents=4 * args.contexts)
    device = find_device(args)
    dtype = find_dtype(args, device)
    source = cli_loading.model_source(args.model)
    own = own_cache(cli_loading.load_config(source))
    if own is not None:
        raise UserError(f"{args.model} is a {own} model, whose cache is its own: there is nothing to prune")
    tokenizer = cli_loading.load_tokenizer(source)
    set_threads(args, device)
    model = cli_loading.load_model(source, device, dtype)
    prototypes = KeyPrototypes.fit(model, tokenizer, [text.text for text in texts], **_fit_arguments(args))
    prototypes.save_pretrained(out)
    print(f"saved: {out}")
    if args.push_to_hub is not None:
        prototypes.push_to_hub(args.push_to_hub)
        print(f"pushed: {args.push_to_hub}")
    return 0


def _fit_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The command's arguments under the names that `KeyPrototypes.fit` gives them."""
    return {
        "heads": args.heads,
        "contexts": args.contexts,
        "context_tokens": args.context_tokens,
        "seed": args.seed,
    }
