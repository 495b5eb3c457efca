"""`nearfar lm-eval`, lm-eval's own command with our model type, and `nearfar eval dar-tasks`, which runs it."""

from __future__ import annotations

import argparse
from typing import Any

from nearfar.cli_arguments import comma_separated, natural_int, positive_int
from nearfar.cli_benchmarks import _benchmark, _Session
from nearfar.cli_messages import UserError, say

DAR_EXAMPLES = """\
examples:
  nearfar eval dar-tasks my-dar
      MMLU, HellaSwag, CommonsenseQA, GSM8K and Multi-News, of prompts longer than the model's window.
  nearfar eval dar-tasks my-pythia --window 256 --allow-code
      An ordinary model on the same samples, with MBPP too, whose answers are programs that are run here.
  nearfar eval dar-tasks my-pythia --window 256 --caches snapkv --retention-ratio 0.3 --tasks gsm8k --limit 200
"""


def add_lm_eval(commands: Any) -> None:
    """Add `lm-eval`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "lm-eval",
        help="lm-eval's own command line, with nearfar among its model types",
        description="Hands everything that follows to lm-eval.",
        # Its arguments begin with -- and are not ours.
        prefix_chars="\0",
        add_help=False,
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=_lm_eval, traceback=False)


def _lm_eval(args: argparse.Namespace) -> int:
    from nearfar.evaluation.lm_eval_model import PLUGIN_FILE, run_lm_eval

    if args.arguments == ["plugin"]:
        print(PLUGIN_FILE)
        return 0
    return run_lm_eval(args.arguments)


def add_dar_tasks(tests: Any) -> None:
    """Add `dar-tasks` to `nearfar eval`."""
    parser = _benchmark(
        tests,
        "dar-tasks",
        _dar_tasks,
        "the DAR paper's six tasks, through lm-eval",
        "MMLU, HellaSwag, CommonsenseQA, GSM8K (5 shots), MBPP (3), Multi-News (0); only prompts beyond the window.",
        DAR_EXAMPLES,
        limit=None,
    )
    add = parser.add_argument_group("tasks").add_argument
    add("--tasks", type=comma_separated, default=[], metavar="NAME,…", help="comma-separated (default: all)")
    add("--window", type=natural_int, default=None, metavar="N",
        help="leave out prompts of at most N tokens (default: the model's window_size; 0 if it has none)")  # fmt: skip
    add("--batch-size", type=positive_int, default=1, metavar="N", help="requests at once")
    add("--data-dir", default=None, metavar="DIR", help="with multi_news.jsonl (default: from the Hub)")
    add("--include-path", default=None, metavar="DIR", help="lm-eval task files that replace its own of the same name")
    add("--allow-code", action="store_true", help="run the programs that MBPP has the model write; without it no MBPP")


def _dar_tasks(args: argparse.Namespace) -> int:
    from nearfar.evaluation.dar_tasks import DAR_TASKS, run_dar_tasks
    from nearfar.evaluation.task_samples import check_tasks

    tasks = check_tasks(args.tasks, list(DAR_TASKS), "dar-tasks")
    unsafe = [name for name in tasks if DAR_TASKS[name].runs_code and not args.allow_code]
    if unsafe and args.tasks:
        raise UserError(f"{unsafe[0]} runs the programs that the model writes: allow it with --allow-code")
    if unsafe:
        say(f"without {', '.join(unsafe)}, which runs the programs that the model writes (--allow-code)")
        tasks = [name for name in tasks if name not in unsafe]

    from nearfar.evaluation.benchmark_runs import open_run, run_file_name
    from nearfar.evaluation.lm_eval_model import NearfarLM

    session = _Session(args, "dar-tasks")
    manager = None
    if tasks != ["multi_news"]:
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=args.include_path)
    model = session.model()
    window = args.window if args.window is not None else int(getattr(model.config, "window_size", None) or 0)
    for choice in session.choices:
        lm = NearfarLM(
            pretrained=model,
            tokenizer=session.tokenizer,
            cache=choice.name,
            budget=choice.budget,
            retention_ratio=choice.retention_ratio,
            batch_size=args.batch_size,
            **choice.options,
        )
        path = session.out / run_file_name("dar-tasks", choice)
        settings = {"window": window, "seed": args.seed, "max_length": lm.max_length}
        run = open_run(
            "dar-tasks",
            lm.reader,
            settings,
            model_name=session.name,
            path=path,
            restart=args.restart,
            record={"command": args.command_line},
        )
        run.write(path)  # the settings that answers kept beside it belong to
        if args.restart:
            for old in path.parent.glob(f"{path.stem}.requests*"):
                old.unlink()
        run_dar_tasks(
            run,
            lm,
            tasks,
            window=window,
            limit=args.limit,
            seed=args.seed,
            data_dir=args.data_dir,
            manager=manager,
            allow_code=args.allow_code,
            path=path,
        )
        print(f"dar-tasks, {session.name}, {run.label}, prompts beyond {window} tokens\n\n{run.table()}\n")
        print(f"data: {path}\n")
    return 0
