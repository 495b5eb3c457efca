"""`nearfar eval perplexity|ruler|longbench|scbench|latency`: a model with any caches, at any sizes; one JSON a run."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar import cli_loading, cli_texts
from nearfar.cli_arguments import (
    ExamplesFormatter,
    add_command,
    comma_separated,
    positive_int,
    positive_share,
    token_counts,
)
from nearfar.cli_caches import cache_option
from nearfar.cli_machine import add_machine_arguments, find_device, find_dtype, set_threads, used_threads
from nearfar.cli_messages import UserError, say
from nearfar.cli_output import check_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nearfar.evaluation.benchmark_runs import Item
    from nearfar.evaluation.context_reading import CacheChoice, ContextReader
    from nearfar.evaluation.shared_folder import SharedFolder
    from nearfar.evaluation.task_samples import PromptFrame, Sample

RULER_EXAMPLES = """\
examples:
  nearfar eval ruler --lengths 1k,2k --limit 3
      The packaged model, all tasks that need no data, with a full cache.
  nearfar eval ruler my/model --lengths 4k,8k --caches full,snapkv,kvzip --retention-ratio 0.1,0.3,0.5 --limit 50
      One run for each cache and ratio; the same command again goes on where it was interrupted, and several at once
      share the runs out: a small model alone uses a fraction of a GPU.
  nearfar eval ruler my/model --data-dir qa/ --tasks qa_1,qa_2
      Question answering over a squad*.json and a hotpot*.json in that folder.
  nearfar report nearfar-ruler
      Charts and a table of all runs.
"""
LONGBENCH_EXAMPLES = """\
examples:
  nearfar eval longbench my/model --caches full,snapkv --retention-ratio 0.3 --tasks hotpotqa,trec --limit 50
      From the Hub.
  nearfar eval longbench my/model --data-dir longbench/
      All 21 tasks, from files such as longbench/hotpotqa.jsonl.
"""
SCBENCH_EXAMPLES = """\
examples:
  nearfar eval scbench my/model --caches full,kvzip --retention-ratio 0.3 --tasks scbench_kv,scbench_vt --limit 20
      From the Hub.
"""
PERPLEXITY_EXAMPLES = """\
examples:
  nearfar eval perplexity my/model --text books/ --lengths 4k,16k --caches full,streaming_llm --retention-ratio 0.1,0.3
"""
LATENCY_EXAMPLES = """\
examples:
  nearfar eval latency my/model --lengths 4k,32k --caches full,snapkv,kvzip --retention-ratio 0.3 --limit 5
"""

# Between looks at whether a run that is to be restarted is still another process's.
_LOOK_AGAIN_SECONDS = 2.0
# RULER: tokens of the haystack for documents of up to as many.
_SHORT_HAYSTACK = 64 << 10


# --- arguments -------------------------------------------------------------------------------------------------------


def add_benchmarks(tests: Any) -> None:
    """Add the benchmarks to `nearfar eval`."""
    parser = _benchmark(
        tests,
        "perplexity",
        _perplexity,
        "of a text's continuation, after a context that was compressed",
        "Read contexts of a text, and score the tokens that follow each. Lower is better.",
        PERPLEXITY_EXAMPLES,
        limit=20,
    )
    add = parser.add_argument_group("text").add_argument
    add("--lengths", type=token_counts, default="1k,2k,4k", metavar="N,…", help="tokens of a context")
    add("--continuation", type=positive_int, default=256, metavar="N", help="tokens scored after each")
    _add_text(add)

    parser = _benchmark(
        tests,
        "ruler",
        _ruler,
        "RULER's 13 synthetic tasks, generated here",
        "Needles, variable chains, word counts and question answering in contexts of any length.",
        RULER_EXAMPLES,
        limit=20,
    )
    add = parser.add_argument_group("tasks").add_argument
    add("--lengths", type=token_counts, default="4k", metavar="N,…", help="tokens of prompt and answer together")
    add("--tasks", type=comma_separated, default=[], metavar="NAME,…",
        help="such as niah_single_1,vt (default: all; qa_1 and qa_2 if --data-dir has their data)")  # fmt: skip
    add("--data-dir", default=None, metavar="DIR",
        help="with squad*.json and hotpot*.json; without it --tasks qa_1,qa_2 loads them from the Hub")  # fmt: skip
    _add_text(add)
    _add_asking(add)

    about_longbench = "Real long documents, English and Chinese."
    about_scbench = "Each context is compressed once and asked about several times."
    for name, run, about, text, examples in (
        ("longbench", _longbench, "LongBench's 21 tasks", about_longbench, LONGBENCH_EXAMPLES),
        ("scbench", _scbench, "SCBench: many questions about one context", about_scbench, SCBENCH_EXAMPLES),
    ):
        parser = _benchmark(tests, name, run, about, text, examples, limit=None)
        add = parser.add_argument_group("tasks").add_argument
        add("--tasks", type=comma_separated, default=[], metavar="NAME,…", help="comma-separated (default: all)")
        add("--data-dir", default=None, metavar="DIR", help="JSONL files, one a task (default: from the Hub)")
        add("--max-tokens", type=positive_int, default=None, metavar="N",
            help="cut the middle out of longer prompts (default: as many as the model was made for)")  # fmt: skip
        _add_asking(add)

    parser = _benchmark(
        tests,
        "latency",
        _latency,
        "seconds of prefill and decoding, and what the cache holds",
        "Time a prefill and greedy decoding at batch 1. Medians over repetitions.",
        LATENCY_EXAMPLES,
        limit=3,
    )
    add = parser.add_argument_group("text").add_argument
    add("--lengths", type=token_counts, default="1k,4k", metavar="N,…", help="tokens of a context")
    add("--decode-tokens", type=positive_int, default=32, metavar="N", help="timed for a repetition")
    _add_text(add)


def _benchmark(
    tests: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    about: str,
    description: str,
    examples: str,
    limit: int | None,
) -> argparse.ArgumentParser:
    parser = add_command(tests, name, run, help=about, description=description)
    parser.epilog = examples
    parser.formatter_class = ExamplesFormatter
    add = parser.add_argument
    add("model", nargs="?", default=None, metavar="MODEL",
        help="a causal language model: a folder or a Hub id (default: the packaged one)")  # fmt: skip
    add("--tokenizer", default=None, metavar="ID_OR_DIR", help="where the model has none")
    add("--trust-remote-code", action="store_true", help="let a checkpoint run the code that it comes with")

    add = parser.add_argument_group("caches").add_argument
    add("--caches", type=comma_separated, default="full", metavar="NAME,…",
        help="full (what the model makes itself), streaming_llm, snapkv, kvzip, proxykv, …")  # fmt: skip
    add("--retention-ratio", type=_ratios, default=None, metavar="R,…",
        help="shares of the context's pairs to keep, in (0, 1]; one run for each")  # fmt: skip
    add("--budget", type=token_counts, default=None, metavar="N,…",
        help="instead: tokens kept per layer and key-value head on average; one run for each")  # fmt: skip
    add("--prototypes", default=None, metavar="DIR_OR_ID", help="for the proactive cache")
    add("--proxy", default=None, metavar="DIR_OR_ID", help="the smaller model that proxykv and iam ask")
    add("--mapper", default=None, metavar="DIR_OR_ID", help="for proxykv: its mapper for this pair of models")
    add("--cache-option", action="append", default=[], type=cache_option, metavar="[CACHE.]KEY=VALUE",
        help="a further argument of a cache; repeatable")  # fmt: skip

    add = parser.add_argument_group("run").add_argument
    add("--limit", type=positive_int, default=limit, metavar="N", help="samples of each task and length")
    add("--seed", type=int, default=0, help="chooses samples")
    add("--out", default=f"nearfar-{name}", metavar="DIR", help="where the runs go, one JSON for each cache and size")
    add(
        "--restart",
        action="store_true",
        help="throw results that are there away instead of going on from them; a process that begins while another "
        "with --restart is at the same benchmark takes part in its restart, and keeps what has been redone; what a "
        "process without --restart is measuring is waited for at the end, and redone",
    )
    add_machine_arguments(parser)
    return parser


def _add_text(add: Callable[..., Any]) -> None:
    add("--text", nargs="+", default=None, metavar="PATH_OR_ID",
        help="text files, also as .xz or .gz, folders of them, or a data set (default: essays)")  # fmt: skip
    add("--split", default="train", help="of a data set")
    add("--column", default=None, help="of a data set (default: found by name)")


def _add_asking(add: Callable[..., Any]) -> None:
    add("--question-seen", action="store_true",
        help="read the question together with the context, before anything is evicted")  # fmt: skip
    add("--no-chat", action="store_true", help="plain prompts, even if the tokenizer has a chat template")


def _ratios(text: str) -> list[float]:
    return sorted({positive_share(part) for part in comma_separated(text)})


# --- what the benchmarks share ---------------------------------------------------------------------------------------


def _choices(args: argparse.Namespace) -> list[CacheChoice]:
    """One cache for each name and size; wrong names, sizes and options are told here."""
    from nearfar.evaluation.context_reading import FULL, SCORED_BY_A_PROXY, CacheChoice, known_caches
    from nearfar.modeling.cache_registry import CACHES

    for name in args.caches:
        if name not in known_caches():
            raise UserError(f"unknown cache {name!r}; known caches: {', '.join(known_caches())}")
    names = list(dict.fromkeys(args.caches))
    pruning = [name for name in names if name != FULL]
    if pruning and (args.budget is None) == (args.retention_ratio is None):
        raise UserError(f"give --retention-ratio or --budget for {', '.join(pruning)}, not both")
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    wanting = {
        "prototypes": [name for name in names if name in CACHES and CACHES[name].needs_prototypes],
        "proxy": [name for name in names if name in SCORED_BY_A_PROXY],
        "mapper": [name for name in names if name == "proxykv"],
    }
    for key, takers in wanting.items():
        value = getattr(args, key)
        if value is not None and not takers:
            raise UserError(f"--{key} was given, but none of {', '.join(names)} takes it")
        for name in takers if value is not None else ():
            options[name][key] = value
    for cache, key, value in args.cache_option:
        if cache is not None and cache not in options:
            raise UserError(f"--cache-option {cache}.{key}: {cache} is not among the caches {', '.join(names)}")
        for name in [cache] if cache is not None else pruning:
            options[name][key] = value
    sizes: list[dict[str, Any]] = [{"retention_ratio": ratio} for ratio in args.retention_ratio or ()]
    sizes += [{"budget": budget} for budget in args.budget or ()]
    try:
        return [
            CacheChoice(name, **size, options=options[name])
            for name in names
            for size in (sizes if name != FULL else [{}])
        ]
    except TypeError as error:
        raise UserError(f"--cache-option: {error}") from None


class _Session:
    """Arguments checked, tokenizer loaded; the model follows when it is needed."""

    def __init__(self, args: argparse.Namespace, benchmark: str) -> None:
        self.args, self.benchmark, self.out = args, benchmark, Path(args.out)
        check_out(self.out)
        self.choices = _choices(args)
        self.device = find_device(args)
        self.dtype = find_dtype(args, self.device)
        self.name = args.model or cli_loading.DEMO_MODEL
        self.source = cli_loading.model_source(args.model)
        self.tokenizer: PreTrainedTokenizerBase = cli_loading.load_tokenizer(
            args.tokenizer or self.source, args.trust_remote_code
        )
        self.config = cli_loading.load_config(self.source, args.trust_remote_code)
        cli_loading.check_vocabulary(self.config, self.tokenizer, self.name)
        self._model: PreTrainedModel | None = None

    def max_positions(self) -> int | None:
        """What the model was made for, if its configuration says so."""
        limit: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit

    def model(self) -> PreTrainedModel:
        if self._model is None:
            set_threads(self.args, self.device)
            dtype = str(self.dtype).removeprefix("torch.")
            say(f"loading {self.name} ({dtype}, {self.device}, {used_threads()} thread(s))")
            self._model = cli_loading.load_model(self.source, self.device, self.dtype, self.args.trust_remote_code)
        return self._model

    def text(self, tokens: int) -> str:
        """At least `tokens` tokens of the text asked for, where there are as many."""
        from nearfar.evaluation.needle_documents import load_background

        if self.args.text is None:
            return cli_texts.packaged_text(tokens)
        ids = load_background(self.args.text, self.tokenizer, tokens, split=self.args.split, column=self.args.column)
        return str(self.tokenizer.decode(ids.tolist()))

    def run(
        self,
        settings: dict[str, Any],
        items: Callable[[ContextReader], Sequence[Item]],
        data: Mapping[str, str] | None = None,
    ) -> int:
        """One run for each cache and size; prints a table for each.

        A run that another process is measuring is left to it: the same command, started several times, shares the
        runs out. One that restarts comes back for what others have not restarted.
        """
        from nearfar.evaluation.benchmark_runs import is_of, run_file_name
        from nearfar.evaluation.file_lock import held_lock
        from nearfar.evaluation.shared_folder import joined

        with joined(self.out) as folder:
            restart = folder.join_restart(self.benchmark) if self.args.restart else False

            def measured(choice: CacheChoice, path: Path) -> bool:
                with held_lock(path.with_name(f".{path.stem}.lock"), wait=False) as held:
                    if held:
                        self._run_one(choice, path, settings, items, data, folder, restart)
                return held

            left: list[tuple[CacheChoice, Path]] = []
            for choice in self.choices:
                path = self.out / run_file_name(self.benchmark, choice)
                if not measured(choice, path):
                    later = "; --restart comes back to it" if restart else ""
                    say(f"{path}: left to another process, which is measuring it{later}")
                    left.append((choice, path))
            for choice, path in left if restart else ():
                waited = False
                # What bears the restart's name is being redone by a process that takes part in it.
                while not measured(choice, path) and not is_of(path, restart):
                    if not waited:
                        say(f"{path}: waiting for the process that is measuring it")
                    waited = True
                    time.sleep(_LOOK_AGAIN_SECONDS)
        return 0

    def _run_one(
        self,
        choice: CacheChoice,
        path: Path,
        settings: dict[str, Any],
        items: Callable[[ContextReader], Sequence[Item]],
        data: Mapping[str, str] | None,
        folder: SharedFolder,
        restart: bool | str,
    ) -> None:
        from nearfar.evaluation.benchmark_runs import open_run, run_items
        from nearfar.evaluation.context_reading import ContextReader

        with cli_loading.loading_errors(self.name):
            reader = ContextReader(self.model(), self.tokenizer, choice)
        run = open_run(
            self.benchmark,
            reader,
            settings,
            model_name=self.name,
            path=path,
            restart=restart,
            record={"command": self.args.command_line},
        )
        run_items(run, items(reader), path, data=data, shared=folder.has_others, restart=restart)
        print(f"{self.benchmark}, {Path(self.name).name}, {run.label}\n\n{run.table()}\n\ndata: {path}\n")


# --- the benchmarks --------------------------------------------------------------------------------------------------


def _ruler(args: argparse.Namespace) -> int:
    from nearfar.evaluation.ruler import QA_TASKS, RULER_TASKS, RulerTasks, find_passages, load_passages
    from nearfar.evaluation.task_samples import PromptFrame, check_tasks, text_digest

    check_tasks(args.tasks, RULER_TASKS, "RULER")
    found = find_passages(args.data_dir)
    asked = [task for task in QA_TASKS if task in (args.tasks or found)]
    session = _Session(args, "ruler")
    _check_positions_of(session, args.lengths[-1], "the longest prompt with its answer")
    passages = {task: load_passages(task, found.get(task)) for task in asked}
    frame = PromptFrame(session.tokenizer, chat=not args.no_chat)
    # A length's haystack depends on that length only: samples of others, added later, leave it as it is.
    sizes = {length: max(length, _SHORT_HAYSTACK) for length in args.lengths}
    made = {
        size: RulerTasks(frame, session.text(size), passages=passages, seed=args.seed)
        for size in dict.fromkeys(sizes.values())
    }
    by_length = {length: made[size] for length, size in sizes.items()}
    shortest = by_length[args.lengths[0]]
    chosen = list(dict.fromkeys(args.tasks)) or shortest.tasks
    left_out = [task for task in QA_TASKS if not args.tasks and task not in chosen]
    if left_out:
        say(f"without {', '.join(left_out)}: no data in --data-dir (or name them with --tasks, for the Hub's)")
    for task in chosen:  # too short a length is told before the model is loaded
        shortest.sample(task, args.lengths[0], 0)

    settings = {
        "seed": args.seed,
        "chat": frame.has_chat,
        "question_seen": args.question_seen,
        "words": shortest.word_source,
    }
    places = [(task, length, n) for task in chosen for length in args.lengths for n in range(args.limit)]
    # What a sample is drawn from: making all samples only to compare them would take long.
    haystacks = {length: text_digest(tasks.haystack) for length, tasks in by_length.items()}
    asking = {task: text_digest(repr(found)) for task, found in passages.items()}
    data = {
        f"{task}/{length}/{number}": asking[task] if task in asking else haystacks[length]
        for task, length, number in places
    }

    def items(reader: ContextReader) -> list[Item]:
        return [
            (
                f"{task}/{length}/{number}",
                _asking(args, reader, frame, by_length[length].sample, (task, length, number)),
            )
            for task, length, number in places
        ]

    return session.run(settings, items, data)


def _asking(
    args: argparse.Namespace,
    reader: ContextReader,
    frame: PromptFrame,
    make: Callable[..., Sample],
    arguments: tuple[Any, ...],
    max_tokens: int | None = None,
) -> Callable[[], dict[str, Any]]:
    """Measures one sample, which is made only then."""

    def measure() -> dict[str, Any]:
        from nearfar.evaluation.benchmark_runs import measure_answers

        sample = make(*arguments)
        return measure_answers(reader, frame, sample, question_seen=args.question_seen, max_tokens=max_tokens)

    return measure


def _check_positions_of(session: _Session, tokens: int, what: str) -> None:
    limit = session.max_positions()
    if limit is not None and tokens > limit:
        raise UserError(
            f"{what} is {tokens} tokens, more than the {limit} positions that the model was made for; give shorter "
            "--lengths"
        )


def _longbench(args: argparse.Namespace) -> int:
    from nearfar.evaluation.longbench import LONGBENCH, load_longbench

    return _documents(args, "longbench", list(LONGBENCH), load_longbench)


def _scbench(args: argparse.Namespace) -> int:
    from nearfar.evaluation.scbench import SCBENCH, load_scbench

    return _documents(args, "scbench", list(SCBENCH), load_scbench)


def _documents(
    args: argparse.Namespace,
    benchmark: str,
    known: Sequence[str],
    load: Callable[[str, str | None, int | None], Iterable[Sample]],
) -> int:
    from nearfar.evaluation.task_samples import PromptFrame, check_tasks

    tasks = check_tasks(args.tasks, known, benchmark)
    if args.data_dir is not None and not args.tasks:
        here = [task for task in tasks if any(Path(args.data_dir).glob(f"**/{task}.jsonl"))]
        missing = [task for task in tasks if task not in here]
        if here and missing:
            say(f"without {', '.join(missing)}: not in {args.data_dir}")
            tasks = here
    samples = [sample for task in tasks for sample in load(task, args.data_dir, args.limit)]
    session = _Session(args, benchmark)
    frame = PromptFrame(session.tokenizer, chat=not args.no_chat)
    max_tokens = args.max_tokens or session.max_positions()
    settings = {"chat": frame.has_chat, "question_seen": args.question_seen, "max_tokens": max_tokens}

    def items(reader: ContextReader) -> list[Item]:
        return [
            (sample.key, _asking(args, reader, frame, lambda made: made, (sample,), max_tokens)) for sample in samples
        ]

    return session.run(settings, items, {sample.key: sample.digest for sample in samples})


def _perplexity(args: argparse.Namespace) -> int:
    from nearfar.evaluation.task_samples import text_digest

    session = _Session(args, "perplexity")
    _check_positions_of(session, args.lengths[-1] + args.continuation, "the longest context with its continuation")
    ids, prefix = _text_ids(session)
    settings = {"seed": args.seed, "continuation": args.continuation, "text": text_digest(str(ids))}
    places = [(length, number) for length in args.lengths for number in range(args.limit)]

    def measure(reader: ContextReader, length: int, number: int) -> Callable[[], dict[str, Any]]:
        def measured() -> dict[str, Any]:
            from nearfar.evaluation.benchmark_runs import measure_perplexity

            context, following = _window(ids, length - len(prefix), args.continuation + 1, args.seed, number)
            return measure_perplexity(reader, [*prefix, *context], following)

        return measured

    def items(reader: ContextReader) -> list[Item]:
        return [(f"perplexity/{length}/{number}", measure(reader, length, number)) for length, number in places]

    return session.run(settings, items)


def _latency(args: argparse.Namespace) -> int:
    from nearfar.evaluation.machine import machine_report
    from nearfar.evaluation.task_samples import text_digest

    session = _Session(args, "latency")
    _check_positions_of(session, args.lengths[-1] + args.decode_tokens + 2, "the longest context with what is decoded")
    ids, prefix = _text_ids(session)
    settings = {"seed": args.seed, "decode_tokens": args.decode_tokens, "text": text_digest(str(ids))}
    settings |= {"device": machine_report(session.device)["device"], "threads": args.threads}  # times of one machine
    warm: set[int] = set()  # readers

    def measure(reader: ContextReader, length: int, number: int) -> Callable[[], dict[str, Any]]:
        def measured() -> dict[str, Any]:
            from nearfar.evaluation.benchmark_runs import measure_latency

            context, _ = _window(ids, length - len(prefix), 0, args.seed, number)
            if id(reader) not in warm:  # what a policy loads or compiles at first use does not count
                warm.add(id(reader))
                measure_latency(reader, [*prefix, *context][:128], 1)
            return measure_latency(reader, [*prefix, *context], args.decode_tokens)

        return measured

    places = [(length, number) for length in args.lengths for number in range(args.limit)]

    def items(reader: ContextReader) -> list[Item]:
        return [(f"latency/{length}/{number}", measure(reader, length, number)) for length, number in places]

    return session.run(settings, items)


def _text_ids(session: _Session) -> tuple[list[int], tuple[int, ...]]:
    """The text's ids without special tokens, and what a text of this tokenizer begins with."""
    from nearfar.evaluation.task_samples import PromptFrame

    frame = PromptFrame(session.tokenizer, chat=False)
    least = session.args.lengths[-1] + getattr(session.args, "continuation", 0) + 1
    # Not as many as there are samples: more of them should be found in the same text.
    ids = frame.encode(session.text(max(256 << 10, 2 * least)))
    if len(ids) < least:
        raise UserError(f"the text has {len(ids)} tokens, at least {least} are needed: give more with --text")
    return ids, frame._plain[0]


def _window(ids: list[int], length: int, following: int, seed: int, number: int) -> tuple[list[int], list[int]]:
    """A context somewhere in the text and what follows it; depends on its arguments only."""
    start = random.Random(f"{seed}/{length}/{number}").randint(0, len(ids) - length - following)
    return ids[start : start + length], ids[start + length : start + length + following]
