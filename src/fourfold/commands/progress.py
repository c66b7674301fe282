"""Progress on stderr: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys


def to_stderr(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def end_line() -> None:
    """Leave the terminal clean before the answer is printed."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
