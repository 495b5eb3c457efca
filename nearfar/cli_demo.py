"""`nearfar demo`: all systems on real input. Like `cli`, importing it imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar import cli_loading, cli_texts
from nearfar.cli_arguments import add_command, comma_separated, natural_int, positive_int
from nearfar.cli_caches import (
    DEMO_CACHES,
    add_budget_arguments,
    add_scorers,
    cache_options,
    check_cache_names,
    proxy_sources,
    resolve_budget,
)
from nearfar.cli_machine import add_machine_arguments, find_device, find_dtype, set_threads, used_threads
from nearfar.cli_messages import UserError, say
from nearfar.cli_output import check_out

if TYPE_CHECKING:
    import torch

    from nearfar.evaluation.comparison import CacheResult

RECORD_NAME = "comparison.json"
# What the sections besides the caches show, in a checkout.
KEPT_PROXYFORMER, KEPT_DAR, KEPT_IMAGES = (
    "checkpoints/proxyformer-needles-12m", "checkpoints/dar-14m", "checkpoints/proxyformer-mnist-9m",
)  # fmt: skip
NEEDLE_LENGTHS, NEEDLES = (8192, 65_536), 20
# A DAR that was trained on blocks of 2,048 tokens reads most of one, and the rest is decoded.
DAR_TOKENS, DAR_CHUNK, DAR_DECODED = 1984, 64, 48
IMAGES, IMAGE_STEPS = 20, 12
# Characters of the essays: enough for the longest document.
TEXT_TOKENS = 100_000


@dataclass
class Section:
    """What one system's part of the demo has found.

    Attributes:
        title: its line in the last table.
        said: what the last table says of it.
        record: for the JSON.
        seconds: it took.
        failed: whether something that was asked for did not work.
    """

    title: str
    said: str
    record: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    failed: bool = False


# Entries of the JSON that are those of one command; `earlier` has them for the systems of another.
CIRCUMSTANCES = ("time", "command", "seed", "dtype", "text", "load_average_before", "machine")
# Entries that the pruned caches' results come with.
PRUNED_ENTRIES = ("model", "held_equal", "results")


class Skipped(Exception):
    """A section that cannot be shown here; the message says why."""


def add_demo(commands: Any) -> None:
    """Add `demo`."""
    parser = add_command(
        commands,
        "demo",
        _demo,
        help="all systems on real input: caches on one model and text, and the checkpoints that come with the source",
        description=(
            "Read one long text with each cache at one budget. Prints a table (kept pairs, cache bytes, perplexity of "
            "the text's continuation, needles found, prefill and decode speed) and writes it as PNG and JSON. Without "
            "arguments: SmolLM2-135M-Instruct and a Paul Graham essay, both from Python packages; and then a "
            "ProxyFormer that finds passkeys in documents of 8 K and 64 K tokens, a DAR that reads a text through its "
            "cache, and a ProxyFormer that draws digits, where their checkpoints are (in a checkout)."
        ),
    )
    parser.add_argument(
        "--systems",
        type=_systems,
        default=None,
        metavar="NAME,…",
        help=f"of {','.join(SECTIONS)}; pruned has the caches, ProxyKV among them (default: all, with --model pruned)",
    )
    parser.add_argument(
        "--model", default=None, metavar="ID_OR_DIR", help="a causal language model (default: the packaged one)"
    )
    parser.add_argument("--text", default=None, metavar="FILE", help="the text, UTF-8 (default: packaged essays)")
    parser.add_argument(
        "--caches",
        default=None,
        type=comma_separated,
        help="comma-separated names, or all; an unknown name lists the known ones (default: "
        f"{','.join(DEMO_CACHES)}, and proxykv with --proxy and --mapper)",
    )
    parser.add_argument(
        "--context-tokens",
        type=positive_int,
        default=2048,
        metavar="N",
        help="tokens of text that are compressed",
    )
    parser.add_argument(
        "--needles", type=natural_int, default=12, metavar="N", help="facts hidden in the context; 0 for none"
    )
    parser.add_argument(
        "--continuation-tokens", type=natural_int, default=256, metavar="N",
        help="tokens scored for perplexity; 0 for none",
    )  # fmt: skip
    parser.add_argument(
        "--decode-tokens",
        type=natural_int,
        default=32,
        metavar="N",
        help="tokens of the timed decoding; 0 for none",
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the needles and the noise of images")
    parser.add_argument(
        "--out",
        default="nearfar-demo",
        metavar="DIR",
        help="where PNGs and the JSON go; the results of other systems that are there stay",
    )
    add_budget_arguments(parser)
    add_machine_arguments(parser)


def _systems(text: str) -> list[str]:
    names = comma_separated(text)
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"unknown system {name!r}; known systems: {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


def _demo(args: argparse.Namespace) -> int:
    from nearfar.evaluation.texts import load_texts

    # What needs no model is checked first: numbers by argparse, then files, then names (which import torch).
    resolve_budget(args)
    out = Path(args.out)
    check_out(out)
    read_record(out / RECORD_NAME)
    given = None if args.text is None else load_texts([args.text])[0].text
    asked = args.systems is not None
    if not asked:
        args.systems = list(SECTIONS) if args.model is None else ["pruned"]
    if args.caches is None:
        args.caches = [*DEMO_CACHES, *(["proxykv"] if all(proxy_sources(args).values()) else [])]
    elif args.caches == ["all"]:
        args.caches = _all_caches(args)
    check_cache_names(args.caches)
    options = cache_options(args, args.caches)
    device = find_device(args)
    demo = Demo(args, out, given, options, device, find_dtype(args, device))

    sections: dict[str, Section] = {}
    missing = False
    for name in args.systems:
        start = time.perf_counter()
        try:
            sections[name] = SECTIONS[name](demo)
        except Skipped as why:
            print(f"\n{name}: skipped, {why}")
            missing = asked
            continue
        except Exception as error:  # one system's failure must not hide the others
            if args.traceback or len(args.systems) == 1 or name == "pruned":
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            sections[name] = Section(name, f"failed: {message}", {"error": message}, failed=True)
            print(f"\n{name}: failed, {message}")
        sections[name].seconds = time.perf_counter() - start
        demo.write({name: section.record for name, section in sections.items() if name != "pruned"})
    _print_end(demo, sections)
    return 1 if missing or any(section.failed for section in sections.values()) else 0


def _all_caches(args: argparse.Namespace) -> list[str]:
    """All policies but those that need a proxy or a mapper which is not there."""
    from nearfar.modeling.cache_registry import CACHES

    found = proxy_sources(args)
    return [
        name
        for name, cache in CACHES.items()
        if (found["proxy"] or not cache.needs_proxy) and (found["mapper"] or not cache.needs_mapper)
    ]


def _print_end(demo: Demo, sections: dict[str, Section]) -> None:
    """A line a system, and where the data is."""
    if len(demo.args.systems) > 1 and sections:
        width = max(len(section.title) for section in sections.values())
        print(f"\n{'system'.ljust(width)}  seconds  seen\n{'-' * width}  -------  ----")
        for section in sections.values():
            print(f"{section.title.ljust(width)}  {section.seconds:7.0f}  {section.said}")
    if demo.path is not None:
        print(f"\ndata:   {demo.path}")
        if demo.earlier:
            print(f"        with {', '.join(demo.earlier)} of earlier commands")
    demo.print_load()


class Demo:
    """What the sections share.

    Args:
        args: parsed.
        out: where files go.
        text: the user's, `None` for the packaged essays.
        options: keyword arguments for each cache.
        device, dtype: of all models.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        out: Path,
        text: str | None,
        options: dict[str, dict[str, Any]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        from nearfar.evaluation.machine import load_average

        self.args, self.out, self.options, self.device, self.dtype = args, out, options, device, dtype
        self.given = text
        self.origin = "Paul Graham's essays" if text is None else Path(args.text).name
        self.load = load_average()
        self.path: Path | None = None
        self.earlier: list[str] = []
        self.results: list[CacheResult] = []
        self._threads_chosen = False

    def text(self, tokens: int) -> str:
        """The user's text, or as many essays as have `tokens` tokens for sure."""
        return cli_texts.packaged_text(tokens) if self.given is None else self.given

    def set_threads(self) -> None:
        """Choose them once, before the first model is loaded."""
        if not self._threads_chosen:
            set_threads(self.args, self.device)
            self._threads_chosen = True

    def load_checkpoint(self, name: str) -> tuple[Path, Any, Any]:
        """A kept checkpoint's folder, model and tokenizer."""
        folder = kept(name)
        tokenizer = cli_loading.load_tokenizer(str(folder))
        self.set_threads()
        say(f"loading {name}")
        return folder, cli_loading.load_model(str(folder), self.device, self.dtype), tokenizer

    def write(self, more: dict[str, Any]) -> None:
        """Write comparison.json with what has been found so far; `more` has an entry for each further system.

        What the file has of other systems stays, and `earlier` tells under which circumstances it was found. So does
        what it has of a system that failed this time. Earlier failures do not stay.
        """
        from nearfar.evaluation.comparison import json_record, write_record

        args, path = self.args, self.out / RECORD_NAME
        record = json_record(
            self.results,
            model=(args.model or cli_loading.DEMO_MODEL) if "pruned" in args.systems else None,
            device=self.device,
            seed=args.seed,
            command=args.command_line,
            dtype=str(self.dtype).removeprefix("torch."),
            text=self.origin,
            load_average_before=self.load,
            **more,
        )
        before, earlier = read_record(path), {}
        for system in SECTIONS:
            names = PRUNED_ENTRIES if system == "pruned" else (system,)
            if _holds_result(record.get(names[-1])) or not _holds_result(before.get(names[-1])):
                continue
            record |= {name: before[name] for name in names if name in before}
            known = before.get("earlier", {}).get(system, before)
            earlier[system] = {name: known.get(name) for name in CIRCUMSTANCES}
        self.earlier = list(earlier)
        self.path = write_record(path, {**record, "earlier": earlier} if earlier else record)

    def print_load(self) -> None:
        """Say so if other programs were running."""
        from nearfar.evaluation.machine import available_cores

        cores = available_cores()
        if self.load is not None and self.device.type == "cpu" and self.load >= cores / 2:
            print(f"Other programs kept the {cores} cores busy (load {self.load:.1f}): the times say little.")


def _holds_result(entry: Any) -> bool:
    """Whether an entry of the record is there and more than the message of a failure; of caches one is enough."""
    if isinstance(entry, list):
        return any(_holds_result(result) for result in entry)
    return bool(entry) and not (isinstance(entry, dict) and entry.get("error") is not None)


def read_record(path: Path) -> dict[str, Any]:
    """What an earlier command wrote; empty where there is none.

    Raises:
        UserError: the file is something else.
    """
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # JSON's and UTF-8's are ValueErrors
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("results"), list):
        raise UserError(f"{path} is no record of a demo: delete it, or give another --out")
    return record


def kept(name: str) -> Path:
    """The folder of a checkpoint that comes with the source.

    Raises:
        Skipped: it is not there.
    """
    folder = cli_loading.kept_checkpoint(name)
    if folder is None:
        raise Skipped(f"{name} is not there (checkpoints come with the source, not with the installed package)")
    return folder


# --- pruned caches and ProxyKV ---------------------------------------------------------------------------------------


def _show_pruned(demo: Demo) -> Section:
    from nearfar.evaluation import comparison
    from nearfar.evaluation.context_reading import FULL

    args = demo.args
    source = cli_loading.model_source(args.model)
    text = demo.text(args.context_tokens + args.continuation_tokens)
    tokenizer = cli_loading.load_tokenizer(source)
    contexts = comparison.prepare_contexts(
        tokenizer,
        text,
        needles=args.needles,
        context_tokens=args.context_tokens,
        continuation_tokens=args.continuation_tokens,
        seed=args.seed,
    )
    longest = max(len(c.context_ids) + max(len(c.continuation_ids), args.decode_tokens) for c in contexts)
    cli_loading.check_length(cli_loading.load_config(source), longest, "the context with its continuation")

    demo.set_threads()
    name = args.model or cli_loading.DEMO_MODEL
    precision = str(demo.dtype).removeprefix("torch.")
    say(f"loading {name} ({precision}, {demo.device}, {used_threads()} thread(s))")
    model = cli_loading.load_model(source, demo.device, demo.dtype)
    add_scorers(demo.options, args, tokenizer, demo.device, demo.dtype)
    results = demo.results = comparison.compare_caches(
        model,
        tokenizer,
        text,
        args.caches,
        budget=args.budget,
        retention_ratio=args.retention_ratio,
        needles=args.needles,
        context_tokens=args.context_tokens,
        continuation_tokens=args.continuation_tokens,
        decode_tokens=args.decode_tokens,
        seed=args.seed,
        options=demo.options,
    )

    budget = f"budget {args.budget} tokens" if args.budget is not None else f"retention ratio {args.retention_ratio:g}"
    heading = f"{Path(name).name}, {len(contexts[0].context_ids)} tokens of context, {budget}"
    print(f"\n{heading} ({demo.origin})\n")
    print(comparison.format_table(results))
    measured = [result for result in results if result.error is None]
    if measured:
        print(f"\nfigure: {comparison.write_figure(demo.out / 'comparison.png', results, heading)}")
    print()
    for line in comparison.plain_words(results):
        print(line)
    said = f"{len(measured)} of {len(results)} caches measured"
    said += _found_most([result for result in measured if result.name != FULL])
    title = "Pruned caches, ProxyKV" if "proxykv" in args.caches else "Pruned caches"
    return Section(title, said, failed=len(measured) < len(results))


def _found_most(pruned: list[CacheResult]) -> str:
    """Which pruned caches found most needles; empty where none were asked for."""
    from nearfar.evaluation import comparison

    most = max((result.needles_found for result in pruned), default=0)
    best = [result for result in pruned if result.needles_found == most and result.needles_asked]
    if not best:
        return ""
    names, size = comparison.listed([result.label for result in best]), comparison.format_bytes(best[0].cache_bytes)
    return f"; {names} found most: {most} of {best[0].needles_asked} needles in {size}"


# --- ProxyFormer -----------------------------------------------------------------------------------------------------


def _show_proxyformer(demo: Demo) -> Section:
    from nearfar.evaluation.comparison import format_bytes
    from nearfar.evaluation.long_reading import format_readings, read_long_documents
    from nearfar.evaluation.needle_documents import encode_background

    folder, model, tokenizer = demo.load_checkpoint(KEPT_PROXYFORMER)
    background = encode_background(demo.text(TEXT_TOKENS), tokenizer, TEXT_TOKENS)
    lengths = [length for length in NEEDLE_LENGTHS if length <= len(background)]
    if not lengths:
        raise Skipped(f"{demo.origin} has {len(background):,} tokens, and {NEEDLE_LENGTHS[0]:,} are needed")
    readings = read_long_documents(model, tokenizer, background, lengths, NEEDLES, seed=demo.args.seed)
    print(
        f"\n{folder.name}: passkeys hidden in {demo.origin}; of each length one document is timed, and another asked "
        f"about {NEEDLES} times\n"
    )
    print(format_readings(readings))
    print(
        "\nPlain decoder: the keys and values of its own layers and heads, if it kept them for every token; computed, "
        "not run."
    )
    last = readings[-1]
    said = (
        f"{last.found} of {last.asked} passkeys in {last.tokens:,} tokens, read in {last.prefill_seconds:.1f} s into "
        f"{format_bytes(last.cache_bytes)}"
    )
    return Section(
        "ProxyFormer", said, {"checkpoint": KEPT_PROXYFORMER, "readings": [asdict(reading) for reading in readings]}
    )


# --- DAR -------------------------------------------------------------------------------------------------------------


def _show_dar(demo: Demo) -> Section:
    from nearfar.evaluation.far_caches import compare_far_caches, format_far_caches, training_words

    folder, model, tokenizer = demo.load_checkpoint(KEPT_DAR)
    limit = int(model.config.max_position_embeddings) - DAR_DECODED - 1
    ids = tokenizer(demo.text(DAR_TOKENS), add_special_tokens=False, verbose=False).input_ids[: min(DAR_TOKENS, limit)]
    if len(ids) <= model.config.near_window:
        raise Skipped(f"{demo.origin} has {len(ids):,} tokens, and none is beyond the model's window")
    unseen = ", which it was not trained on" if demo.given is None else ""
    found = compare_far_caches(model, ids, chunk_tokens=DAR_CHUNK, decode_tokens=DAR_DECODED)
    print(
        f"\n{folder.name}: {found.tokens:,} tokens of {demo.origin}{unseen}, read in chunks of {DAR_CHUNK} through "
        f"its cache; window of {found.window} tokens, bottleneck of {found.bottleneck}\n"
    )
    print(format_far_caches(found))
    largest = max(result.difference for result in found.results)
    print(
        f"\nAs uncached: the likeliest next token is the uncached pass's; logits differ by at most {largest:.1e}.\n"
        "Bytes of the cache have the window, room for coming tokens and fused projections in them."
    )
    words = training_words(folder)
    if words is not None:
        print(words)
    first = found.results[0]
    print(f"It goes on (greedy): {' '.join(tokenizer.decode(first.continuation).split())}")
    small = min(found.results, key=lambda result: result.far_token_bytes)
    said = (
        f"perplexity {first.perplexity:.1f} through the cache, {found.uncached_perplexity:.1f} without; a far token "
        f"takes 1/{found.plain_token_bytes / small.far_token_bytes:.3g} of keys and values"
    )
    return Section("DAR", said, {"checkpoint": KEPT_DAR, "trained": words, **asdict(found)})


# --- images ----------------------------------------------------------------------------------------------------------


def _show_images(demo: Demo) -> Section:
    folder = kept(KEPT_IMAGES)
    import torch
    from transformers.utils import logging as transformers_logging

    from nearfar.evaluation.image_grid import write_grid
    from nearfar.modeling.pipeline_flow_matching import FlowMatchingPipeline

    transformers_logging.disable_progress_bar()
    demo.set_threads()
    say(f"loading {KEPT_IMAGES}")
    with cli_loading.loading_errors(str(folder)):
        pipe = FlowMatchingPipeline.from_pretrained(folder, dtype=demo.dtype).to(demo.device)
    classes = pipe.model.config.num_classes
    labels = [index % classes for index in range(IMAGES)]
    start = time.perf_counter()
    images = pipe(
        IMAGES,
        labels,
        steps=IMAGE_STEPS,
        generator=torch.Generator().manual_seed(demo.args.seed),
        output_type="uint8",
        progress=True,
    )
    seconds = time.perf_counter() - start
    path = write_grid(demo.out / "digits.png", images, classes, scale=2)
    print(f"\n{folder.name}: {IMAGES} images, a class a column, in {IMAGE_STEPS} steps\n\nfigure: {path}")
    record = {
        "checkpoint": KEPT_IMAGES, "images": IMAGES, "steps": IMAGE_STEPS, "seconds": seconds, "figure": path.name,
    }  # fmt: skip
    return Section("ProxyFormer, images", f"{IMAGES} digits drawn in {seconds:.1f} s: {path}", record)


SECTIONS: dict[str, Callable[[Demo], Section]] = {
    "pruned": _show_pruned,
    "proxyformer": _show_proxyformer,
    "dar": _show_dar,
    "images": _show_images,
}
