"""The `nearfar` command, and what scripts share with it; `cli_generate`, `cli_eval`, … add the commands.

Importing this module imports neither torch nor transformers, so that `nearfar --help` answers at once; each command
imports what it needs after its arguments have been checked.

Exit codes: 0 done; 1 something that was asked for failed (one cache of several in `demo`); 2 the user's input was
wrong or could not be read, one line on standard error says what; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nearfar.cli_arguments import Parser
from nearfar.cli_caches import DEFAULT_BUDGET, DEMO_CACHES, KEPT_MAPPER, KEPT_PROXY, add_scorers, proxy_sources
from nearfar.cli_convert import add_convert
from nearfar.cli_demo import add_demo
from nearfar.cli_eval import add_eval
from nearfar.cli_generate import add_generate
from nearfar.cli_images import add_images
from nearfar.cli_lm_eval import add_lm_eval
from nearfar.cli_loading import (
    DEMO_MODEL,
    check_length,
    kept_checkpoint,
    load_config,
    load_model,
    load_tokenizer,
    model_source,
)
from nearfar.cli_machine import add_machine_arguments, find_device, find_dtype, set_threads
from nearfar.cli_messages import UserError
from nearfar.cli_output import check_out
from nearfar.cli_prototypes import add_fit_prototypes
from nearfar.cli_report import add_report
from nearfar.cli_texts import HELD_OUT_ESSAYS
from nearfar.cli_train import add_train

__all__ = [
    "DEFAULT_BUDGET",
    "DEMO_CACHES",
    "DEMO_MODEL",
    "HELD_OUT_ESSAYS",
    "KEPT_MAPPER",
    "KEPT_PROXY",
    "UserError",
    "add_machine_arguments",
    "add_scorers",
    "check_length",
    "check_out",
    "find_device",
    "find_dtype",
    "kept_checkpoint",
    "load_config",
    "load_model",
    "load_tokenizer",
    "main",
    "model_source",
    "proxy_sources",
    "run_script",
    "set_threads",
]

EXAMPLES = """\
examples:
  nearfar demo
      All systems on real input: a chat model reads a long essay with a full cache and with pruned ones, a
      ProxyFormer finds passkeys in 65,536 tokens, a DAR reads what it was not trained on, digits are drawn.
  nearfar demo --text book.txt --context-tokens 6000 --budget 1024 --caches full,streaming_llm,proactive,random
      The same on your text, at another budget, with other caches.
  nearfar generate --model HuggingFaceTB/SmolLM2-135M-Instruct --cache proactive --budget 512 --chat \\
      --prompt-file question_about_a_long_text.txt
      Generate from a long prompt while holding 512 tokens' worth of keys and values.
  nearfar generate --model my/model --cache proxykv --proxy sibling --mapper mapper/model --prompt-file long.txt
      ProxyKV: a small model reads the prompt too, and its attention tells what the large one may forget.
  nearfar convert proxy --from my/model --to sibling --layers 4 --text books/
      Make such a small model; `nearfar train-mapper` then trains the mapper.
  nearfar fit-prototypes --model my/model --texts essays/ --out prototypes/
      Fit what the proactive cache needs for another model.
  nearfar convert dar --from EleutherAI/pythia-70m --to pythia-70m-dar --calibration-text books/ --distill-steps 300
      Convert a Pythia checkpoint to a DAR, whose cache keeps a bottleneck of each token beyond a window.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (`sys.argv[1:]` if None) and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:  # argparse has already said why
        return int(leaving.code or 0)
    args.command_line = shlex.join(["nearfar", *argv])
    logging.basicConfig(level=logging.DEBUG if args.traceback else logging.WARNING, format="%(name)s: %(message)s")
    if not args.traceback:
        for noisy in ("httpx", "filelock", "transformers", "torchao", "torch.utils._pytree"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("nearfar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`nearfar generate … | head`). Point standard output at nothing, so that the
        # interpreter's own flush at exit does not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, ValueError, OSError, ImportError) as error:
        if args.traceback:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"nearfar {args.command}: error: {message}", file=sys.stderr)
        return 2


def run_script(run: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> int:
    """Run a benchmark's body; wrong input ends it with one line on standard error and exit code 2.

    Args:
        run: called with `args`.
        args: parsed arguments, those of `add_machine_arguments` among them.
    """
    try:
        run(args)
    except (UserError, ValueError, OSError, ImportError) as error:
        if args.traceback:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _build_parser() -> argparse.ArgumentParser:
    from nearfar import __version__

    parser = Parser(
        prog="nearfar",
        description="Near tokens in full, far tokens compressed: pruned key-value caches for transformers models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nearfar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_demo(commands)
    add_generate(commands)
    add_fit_prototypes(commands)
    add_convert(commands)
    add_eval(commands)
    add_lm_eval(commands)
    add_report(commands)
    add_train(commands)
    add_images(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
