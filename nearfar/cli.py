"""The `nearfar` command: `generate`, `fit-prototypes`; `cli_demo`, `cli_convert`, `cli_eval`, … add the others.

Importing this module imports neither torch nor transformers, so that `nearfar --help` answers at once; each command
imports what it needs after its arguments have been checked.

Exit codes: 0 done; 1 something that was asked for failed (one cache of several in `demo`); 2 the user's input was
wrong or could not be read, one line on standard error says what; 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEMO_MODEL = "smollm2-135m-instruct"
DEFAULT_BUDGET = 512
# And proxykv, where it can be had. KVzip reads a context twice and H2O in pieces: `--caches all` has them.
DEMO_CACHES = ("full", "streaming_llm", "snapkv", "proactive")
# A proxy of the packaged model and its mapper, in a checkout.
KEPT_PROXY, KEPT_MAPPER = "checkpoints/smollm2-proxy", "checkpoints/smollm2-mapper"
# The demo's text is the first of these; the others, then all that remain, follow if one is not long enough. The
# prototypes that come with the package were fitted on other essays.
DEMO_ESSAYS = ("worked.txt", "popular.txt", "philosophy.txt", "startuplessons.txt")

# Essays, without ".txt", on which policies are measured: nothing is fitted or trained on them.
HELD_OUT_ESSAYS = (
    "worked", "popular", "philosophy", "startuplessons", "langdes", "useful", "desres", "boss", "submarine", "apple",
    "gba", "hubs",
)  # fmt: skip

logger = logging.getLogger(__name__)

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


class UserError(Exception):
    """Wrong input: its message is shown as it is, without a traceback."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


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


# --- arguments -------------------------------------------------------------------------------------------------------


def _build_parser() -> argparse.ArgumentParser:
    from nearfar import __version__
    from nearfar.cli_convert import add_convert  # here, because it imports this module
    from nearfar.cli_demo import add_demo
    from nearfar.cli_eval import add_eval
    from nearfar.cli_images import add_images
    from nearfar.cli_lm_eval import add_lm_eval
    from nearfar.cli_report import add_report
    from nearfar.cli_train import add_train

    parser = _Parser(
        prog="nearfar",
        description="Near tokens in full, far tokens compressed: pruned key-value caches for transformers models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nearfar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_demo(commands)
    _add_generate(commands)
    _add_fit_prototypes(commands)
    add_convert(commands)
    add_eval(commands)
    add_lm_eval(commands)
    add_report(commands)
    add_train(commands)
    add_images(commands)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, formatter_class=_HelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda, cuda:1, …")
    group.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
        help="auto is float32 on a CPU, bfloat16 on a GPU",
    )  # fmt: skip
    group.add_argument(
        "--threads",
        type=_positive_int,
        default=None,
        metavar="N",
        help="CPU threads (default: what a short probe finds fastest, leaving a core to others)",
    )
    group.add_argument("--traceback", action="store_true", help="on an error show where it came from")


def _add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("budget")
    group.add_argument(
        "--budget", type=_positive_int, default=None, metavar="N",
        help=f"tokens kept per layer and key-value head on average (default: {DEFAULT_BUDGET})",
    )  # fmt: skip
    group.add_argument(
        "--retention-ratio", type=_ratio, default=None, metavar="R",
        help="share of the context's pairs to keep, in (0, 1], instead of a budget",
    )  # fmt: skip
    group.add_argument(
        "--prototypes", default=None, metavar="DIR_OR_ID",
        help="fitted prototypes for the caches that need them (default: those that come with nearfar for this model)",
    )  # fmt: skip
    group.add_argument(
        "--proxy", default=None, metavar="DIR_OR_ID",
        help="the small model that the iam and proxykv caches read the prompt with (for the packaged model: "
        f"{KEPT_PROXY}, where it is there)",
    )  # fmt: skip
    group.add_argument(
        "--mapper", default=None, metavar="DIR_OR_ID",
        help="the mapper of the proxykv cache, trained for both models (for the packaged model: "
        f"{KEPT_MAPPER}, where it is there)",
    )  # fmt: skip
    group.add_argument(
        "--cache-option", action="append", default=[], type=_cache_option, metavar="[CACHE.]KEY=VALUE",
        help="a further argument of a cache, for example proactive.head=mlp or sink_tokens=8; repeatable",
    )  # fmt: skip


def _add_generate(commands: Any) -> None:
    parser = _command(
        commands,
        "generate",
        _generate,
        help="generate text from a prompt with a pruned cache",
        description="Generate from a prompt, printing the text as it comes; to standard error, what the cache held.",
    )
    parser.add_argument(
        "--model", default=None, metavar="ID_OR_DIR", help="a causal language model (default: the packaged one)"
    )
    parser.add_argument(
        "--cache",
        default="proactive",
        metavar="NAME",
        help="which cache; `full` prunes nothing, and is what a DAR or a ProxyFormer makes itself",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", default=None, metavar="TEXT")
    prompt.add_argument("--prompt-file", default=None, metavar="FILE", help="UTF-8 text; - for standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--max-new-tokens", type=_positive_int, default=128, metavar="N")
    parser.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="0 is greedy decoding")
    parser.add_argument(
        "--top-p",
        type=_ratio,
        default=1.0,
        metavar="P",
        help="with a temperature: sample from the likeliest tokens of this total probability",
    )
    parser.add_argument("--seed", type=_seed, default=0, help="of the sampling")
    _add_budget_arguments(parser)
    add_machine_arguments(parser)


def _add_fit_prototypes(commands: Any) -> None:
    parser = _command(
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
        "--heads", type=_names, default="linear,prototypes,mlp,cosine", help="comma-separated heads to fit"
    )
    parser.add_argument("--contexts", type=_positive_int, default=10, metavar="N", help="contexts read")
    parser.add_argument("--context-tokens", type=_positive_int, default=1900, metavar="N", help="tokens of a context")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, metavar="DIR", help="where the fitted prototypes are saved")
    parser.add_argument("--push-to-hub", default=None, metavar="ID", help="also push them to this Hub repository")
    add_machine_arguments(parser)


def _positive_int(text: str) -> int:
    value = _integer(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _count(text: str) -> int:
    value = _integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def _seed(text: str) -> int:
    value = _count(text)
    if value >= 1 << 32:
        raise argparse.ArgumentTypeError(f"must be below 2^32, got {text}")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _ratio(text: str) -> float:
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def _temperature(text: str) -> float:
    value = _float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 (greedy) or a positive number, got {text}")
    return value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("names nothing")
    return names


def _cache_option(text: str) -> tuple[str | None, str, Any]:
    """`[CACHE.]KEY=VALUE` as (cache or None, key, value); the value is a Python literal, or else a string."""
    target, equals, value = text.partition("=")
    cache, _, key = target.rpartition(".")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"must look like KEY=VALUE or CACHE.KEY=VALUE, got {text!r}")
    try:
        return cache or None, key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return cache or None, key, value


# --- what the commands share -----------------------------------------------------------------------------------------


def _resolve_budget(args: argparse.Namespace) -> None:
    if args.budget is not None and args.retention_ratio is not None:
        raise UserError("give --budget or --retention-ratio, not both")
    if args.budget is None and args.retention_ratio is None:
        args.budget = DEFAULT_BUDGET


def _check_cache_names(names: Sequence[str]) -> None:
    from nearfar.modeling.cache_registry import CACHES

    for name in names:
        if name not in CACHES:
            known = ", ".join(CACHES)
            raise UserError(f"unknown cache {name!r}; known caches: {known}")
    if len(set(names)) != len(names):
        raise UserError(f"a cache is named twice in {','.join(names)}")


def _cache_options(args: argparse.Namespace, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keyword arguments for each cache, out of --prototypes and --cache-option; refuses a budget it cannot honour."""
    from nearfar.modeling.budgets import check_budget
    from nearfar.modeling.cache_registry import CACHES, check_options
    from nearfar.modeling.pruned_cache import SINK_TOKENS, PrunedCache

    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for flag, needed in (("proxy", "needs_proxy"), ("mapper", "needs_mapper")):
        if getattr(args, flag) is not None and not any(getattr(CACHES[name], needed) for name in names):
            raise UserError(f"--{flag} was given, but none of {', '.join(names)} uses a {flag}")
    for name in names:
        for flag, needed in (("proxy", "needs_proxy"), ("mapper", "needs_mapper")):
            if getattr(CACHES[name], needed) and proxy_sources(args)[flag] is None:
                raise UserError(
                    f"the {name} cache needs --{flag}: {_HOW_TO_MAKE[flag]} (with the packaged model it is looked for "
                    f"in {KEPT_PROXY if flag == 'proxy' else KEPT_MAPPER})"
                )
    wanting = [name for name in names if CACHES[name].needs_prototypes]
    if args.prototypes is not None:
        if not wanting:
            raise UserError(f"--prototypes was given, but none of {', '.join(names)} uses prototypes")
        for name in wanting:
            options[name]["prototypes"] = args.prototypes
    for cache, key, value in args.cache_option:
        if cache is not None and cache not in options:
            raise UserError(f"--cache-option {cache}.{key}: {cache} is not among the caches {', '.join(names)}")
        # Without a name an option goes to every cache that prunes.
        for name in [cache] if cache is not None else [name for name in names if name != "full"]:
            options[name][key] = value
    for name in names:
        factory, given = CACHES[name].factory, options[name]
        try:
            check_options(name, given)
            if isinstance(factory, type) and issubclass(factory, PrunedCache):
                sinks, recent = given.get("sink_tokens", SINK_TOKENS), given.get("recent_tokens")
                check_budget(args.budget, args.retention_ratio, sinks, recent)
        except TypeError as error:
            raise UserError(f"--cache-option: {error}") from None
    return options


_HOW_TO_MAKE = {
    "proxy": "a small model with the same tokenizer; `nearfar convert proxy` makes one",
    "mapper": "`nearfar train-mapper` trains one for a proxy and a target",
}


def proxy_sources(args: argparse.Namespace) -> dict[str, str | None]:
    """Where the proxy and the mapper are: as given, or for the packaged model those that are kept with the source."""
    found: dict[str, str | None] = {"proxy": args.proxy, "mapper": args.mapper}
    if args.model in (None, DEMO_MODEL) and args.proxy is None:
        kept = {"proxy": kept_checkpoint(KEPT_PROXY), "mapper": kept_checkpoint(KEPT_MAPPER)}
        for name, folder in kept.items():  # a mapper goes with its proxy
            if found[name] is None and all(kept.values()):
                found[name] = str(folder)
    return found


def kept_checkpoint(name: str) -> Path | None:
    """The folder `name` of the checkout; None if it is not there, as where only the package is installed."""
    folder = Path(__file__).resolve().parent.parent / name
    return folder if (folder / "config.json").is_file() else None


def add_scorers(
    options: dict[str, dict[str, Any]],
    args: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Load the proxy and the mapper for the caches that need them, as their option `scorer`.

    Raises:
        UserError: they cannot be loaded, or do not go together.
    """
    from transformers import AutoConfig

    from nearfar.configuration.configuration_axial_mapper import HybridAxialMapperConfig
    from nearfar.modeling.cache_iam import IAMScorer
    from nearfar.modeling.cache_registry import CACHES
    from nearfar.modeling.kvzip_scores import RepeatPrompt
    from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper
    from nearfar.modeling.proxy_scorer import ProxyScorer

    wanting = [name for name in options if CACHES[name].needs_proxy and "scorer" not in options[name]]
    if not wanting:
        return
    sources = proxy_sources(args)
    assert sources["proxy"] is not None
    source = model_source(sources["proxy"])
    tokenizers = (load_tokenizer(source), tokenizer)
    proxy = load_model(source, device, dtype)
    prompt = RepeatPrompt.from_tokenizer(tokenizer)
    for name in wanting:
        if not CACHES[name].needs_mapper:
            options[name]["scorer"] = IAMScorer(
                proxy, prompt, prefix_length=None, proxy_tokenizer=tokenizers[0], target_tokenizer=tokenizers[1]
            )
            continue
        assert sources["mapper"] is not None
        with _loading(sources["mapper"]):
            kind = AutoConfig.from_pretrained(sources["mapper"]).model_type
            if kind != HybridAxialMapperConfig.model_type:
                raise ValueError(f"it is no mapper, but a {kind} model; {_HOW_TO_MAKE['mapper']}")
            # In float32 also on a GPU: scores that differ by little would be equal in half precision.
            mapper = HybridAxialMapper.from_pretrained(sources["mapper"], dtype="float32").to(device).eval()
        options[name]["scorer"] = ProxyScorer(proxy, mapper, *tokenizers, prefix_ids=prompt.prefix)


def check_out(out: Path, option: str = "--out") -> None:
    """Raise UserError unless files can be written in the folder `out`."""
    from nearfar.modeling.atomic_file import check_writable

    if out.exists() and not out.is_dir():
        raise UserError(f"{option} {out} is a file; give a folder")
    try:
        check_writable(out)
    except ValueError as error:
        raise UserError(f"{option} {error}") from None


def find_device(args: argparse.Namespace) -> torch.device:
    import torch

    if args.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise UserError(f"unknown device {args.device!r}; try cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"there is no device {args.device}: {torch.cuda.device_count()} CUDA devices were found")
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, NotImplementedError, AssertionError):  # of a kind that this torch was not built for, or meta
        raise UserError(f"--device {args.device} does not work here; try cpu or cuda") from None
    return device


def find_dtype(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    import torch

    if args.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, args.dtype)
    return dtype


def set_threads(args: argparse.Namespace, device: torch.device) -> None:
    import torch

    from nearfar.evaluation.machine import choose_threads

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    elif device.type == "cpu":
        torch.set_num_threads(choose_threads())


def model_source(model: str | None) -> str:
    """A folder or Hub id to load from; the packaged model is unpacked and converted when it is used first."""
    from nearfar.conversion.packaged_model import PACKAGED_MODELS, PackagedModelError, packaged_model_dir

    model = DEMO_MODEL if model is None else model
    if model in PACKAGED_MODELS and not Path(model).is_dir():
        try:
            return str(packaged_model_dir(model))
        except PackagedModelError as error:
            raise UserError(str(error)) from error
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise UserError(f"{model} is a folder without config.json, not a saved model")
    return model


def load_config(source: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    with _loading(source):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    return config


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    check_tokenizer(source)
    with _loading(source):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    return tokenizer


def load_model(source: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with _loading(source):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.to(device).eval()


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Know nearfar's models, and name what could not be loaded; the libraries' own messages do not always."""
    from nearfar.auto_classes import register

    register()
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file makes the libraries raise errors of any kind
        nowhere = "it is no folder here, and: " if isinstance(error, OSError) and not Path(source).exists() else ""
        why = str(error).partition(" Model type should be one of")[0]  # hundreds of names follow
        raise UserError(f"cannot load {source}: {nowhere}{why or type(error).__name__}") from error


def check_tokenizer(source: str) -> None:
    """Raise UserError for a folder without a tokenizer; the library asks for packages that would not help."""
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(name)) for name in ("*token*", "vocab*", "*.model")):
        raise UserError(f"{source} is a folder without a tokenizer (tokenizer.json): copy the model's own there")


def check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise UserError for a tokenizer that writes ids which the model has no embedding for."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and tokenizer.vocab_size > size:  # added tokens, which may go unused, are not counted
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, and {source} knows {size:,}: give the model's own"
        )


def own_cache(config: PreTrainedConfig) -> str | None:
    """The kind of a model that compresses by itself and makes its own cache; None for all others."""
    from nearfar.evaluation.context_reading import OWN_CACHE_MODELS

    kind: str = config.model_type
    return kind if kind in OWN_CACHE_MODELS and getattr(config, "has_bottleneck", True) else None


def check_length(config: PreTrainedConfig, tokens: int, what: str) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise UserError(f"{what} is {tokens} tokens, more than the {limit} positions that the model was made for")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _packaged_text(tokens: int, leave_out: Sequence[str] = ()) -> str:
    """Packaged essays, as many as give `tokens` tokens for sure, one after the other; none of those to leave out."""
    from nearfar.conversion.packaged_model import PackagedModelError, packaged_essays_dir
    from nearfar.evaluation.texts import join_texts, load_texts

    try:
        folder = packaged_essays_dir()
    except PackagedModelError as error:
        raise UserError(f"{error} (or give a text of your own with --text)") from error
    essays = {text.name: text for text in load_texts([folder]) if Path(text.name).stem not in leave_out}
    order = [name for name in DEMO_ESSAYS if name in essays] + [name for name in essays if name not in DEMO_ESSAYS]
    chosen, characters = [], 0
    for name in order:
        chosen.append(essays[name])
        characters += len(essays[name].text)
        if characters > 10 * tokens:  # English has four or five characters a token
            break
    return join_texts(chosen)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


# --- generate --------------------------------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    _resolve_budget(args)
    prompt = _read_prompt(args)
    _check_cache_names([args.cache])
    options = _cache_options(args, [args.cache])[args.cache]
    device = find_device(args)
    dtype = find_dtype(args, device)

    import torch
    from transformers import TextStreamer, set_seed

    from nearfar.modeling.cache_kvzip import KVzipCache
    from nearfar.modeling.cache_proxykv import ProxyKVCache
    from nearfar.modeling.cache_registry import CACHES, cache_kept_pairs, cache_nbytes, make_cache
    from nearfar.modeling.compat import CACHE_FIELD, cache_argument

    source = model_source(args.model)
    tokenizer = load_tokenizer(source)
    if args.chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"--chat: the tokenizer of {args.model} has no chat template")
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise UserError("the prompt is empty")
    loaded = load_config(source)
    check_length(loaded, length + args.max_new_tokens, "the prompt with the new tokens")
    check_vocabulary(loaded, tokenizer, source)
    own = own_cache(loaded)
    if own is not None and args.cache != "full":
        raise UserError(
            f"--cache {args.cache}: {args.model} is a {own} model, which compresses by itself and makes its own "
            "cache; give --cache full"
        )

    set_threads(args, device)
    model = load_model(source, device, dtype)
    add_scorers({args.cache: options}, args, tokenizer, device, dtype)
    cache: Any = None  # its own
    try:
        if own is None:
            cache = make_cache(args.cache, model, budget=args.budget, retention_ratio=args.retention_ratio, **options)
    except TypeError as error:  # an option of the wrong type
        raise UserError(f"--cache {args.cache}: {error}") from None
    # Greedy decoding must not inherit sampling settings from the checkpoint: they would be warned about.
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    set_seed(args.seed)
    if isinstance(cache, KVzipCache):
        if length < 2:
            raise UserError("--cache kvzip reads the prompt but for its last token first: give a longer one")
        cache.compress_context(model, inputs["input_ids"][:, :-1], tokenizer)  # generate reads the last token
    if isinstance(cache, ProxyKVCache):
        cache.score_prompt(inputs["input_ids"].to(device))
    with torch.no_grad():
        generated = model.generate(
            input_ids=inputs["input_ids"].to(device),
            attention_mask=inputs["attention_mask"].to(device),
            **({} if own is not None else {cache_argument(model): cache}),
            return_dict_in_generate=True,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    sys.stdout.flush()
    new = generated.sequences.shape[1] - length
    if own is not None:
        held = getattr(generated, CACHE_FIELD, None) or generated.past_key_values
        _say(f"[own cache of {own}: {length} prompt tokens, {new} new; {cache_nbytes(held):,} bytes]")
        return 0
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    seen = cache.get_seq_length() * heads * config.num_hidden_layers
    _say(
        f"[{CACHES[args.cache].label}: {length} prompt tokens, {new} new; "
        f"{cache_kept_pairs(cache):,} key-value pairs held of {seen:,} seen, {cache_nbytes(cache):,} bytes]"
    )
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        prompt = args.prompt
    elif args.prompt_file == "-":
        prompt = sys.stdin.read()
    else:
        path = Path(args.prompt_file)
        if path.is_dir():
            raise UserError(f"--prompt-file {path} is a folder; give a file")
        if not path.is_file():
            raise UserError(f"no such prompt file: {path}")
        try:
            prompt = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8 text") from None
    if not prompt.strip():
        raise UserError("the prompt is empty")
    return str(prompt)


# --- fit-prototypes --------------------------------------------------------------------------------------------------


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
    source = model_source(args.model)
    own = own_cache(load_config(source))
    if own is not None:
        raise UserError(f"{args.model} is a {own} model, whose cache is its own: there is nothing to prune")
    tokenizer = load_tokenizer(source)
    set_threads(args, device)
    model = load_model(source, device, dtype)
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


if __name__ == "__main__":
    from nearfar import cli  # not this copy of the module: the commands raise the other one's UserError

    sys.exit(cli.main())
