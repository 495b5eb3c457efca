"""The parser of the commands, its help, and the types of arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class ExamplesFormatter(HelpFormatter):
    """Keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, formatter_class=HelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def positive_int(text: str) -> int:
    value = _integer(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def natural_int(text: str) -> int:
    value = _integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def random_seed(text: str) -> int:
    value = natural_int(text)
    if value >= 1 << 32:
        raise argparse.ArgumentTypeError(f"must be below 2^32, got {text}")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def real_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def positive_share(text: str) -> float:
    value = real_number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def open_share(text: str) -> float:
    value = real_number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def temperature(text: str) -> float:
    value = real_number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 (greedy) or a positive number, got {text}")
    return value


def comma_separated(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("names nothing")
    return names


def token_count(text: str) -> int:
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


def token_counts(text: str) -> list[int]:
    return sorted({token_count(part) for part in comma_separated(text)})
