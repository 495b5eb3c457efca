"""What commands say to the people who run them."""

from __future__ import annotations

import sys


class UserError(Exception):
    """Wrong input: its message is shown as it is, without a traceback."""


def say(text: str) -> None:
    """A line on standard error, where results are not."""
    print(text, file=sys.stderr, flush=True)
