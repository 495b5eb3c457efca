"""`nearfar report`: charts and a table from any number of runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nearfar.cli_arguments import ExamplesFormatter, add_command
from nearfar.cli_messages import UserError, say
from nearfar.cli_output import check_out

REPORT_EXAMPLES = """\
examples:
  nearfar report nearfar-ruler
      Score against retention ratio and against time, heat maps of tasks, and report.md, in nearfar-ruler/report.
  nearfar report runs/ --out charts/
      From all runs below a folder, of any models and benchmarks.
"""


def add_report(commands: Any) -> None:
    """Add `report`."""
    parser = add_command(
        commands,
        "report",
        _report,
        help="charts and a table from runs of nearfar eval",
        description="Read all runs below a folder, and draw them: a chart never mixes models or benchmarks.",
    )
    parser.epilog = REPORT_EXAMPLES
    parser.formatter_class = ExamplesFormatter
    parser.add_argument("folder", metavar="DIR", help="where runs lie, at any depth")
    parser.add_argument("--out", default=None, metavar="DIR", help="where the report goes (default: DIR/report)")
    parser.add_argument("--traceback", action="store_true", help="on an error show where it came from")


def _report(args: argparse.Namespace) -> int:
    from nearfar.evaluation.run_report import find_runs, write_report

    folder = Path(args.folder)
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}")
    out = folder / "report" if args.out is None else Path(args.out)
    check_out(out)
    found = find_runs(folder)
    for path, why in found.skipped:
        say(f"left out {path}: {why}")
    for path in write_report(found, out, command=args.command_line):
        print(path)
    return 0
