"""Progress on stderr: one line that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

from fourfold.escape import one_line, steer

# In a log file a line every few seconds says enough.
_LOG_EVERY_S = 10.0
_DIGITS = re.compile("[0-9]+")


def progress_lines() -> Callable[[str], None]:
    """A function that shows where the work stands; quick repeats are dropped off a terminal."""
    last_at, last_kind = [-_LOG_EVERY_S], [""]

    def show(text: str) -> None:
        if sys.stderr.isatty():
            steer(sys.stderr, f"\r\033[K{one_line(text)[:100]}")
            return
        kind = _DIGITS.sub("", text).partition(",")[0]
        # A new phase is news at once, such as the first step after the start.
        if kind != last_kind[0] or time.monotonic() - last_at[0] >= _LOG_EVERY_S:
            last_at[0], last_kind[0] = time.monotonic(), kind
            print(text, file=sys.stderr, flush=True)

    return show


def end_line() -> None:
    """Leave the terminal clean before the answer is printed."""
    if sys.stderr.isatty():
        steer(sys.stderr, "\r\033[K")
