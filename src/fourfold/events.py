"""Events that a verb reports to its caller while it works: progress and notes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

PATIENCE_S, EVERY_S = 1.0, 0.2  # before a bar is shown, and between two looks of it


class Event(NamedTuple):
    """`progress` is out of date with the next one, `share` (0..1) of the work is done where that is
    known; a `note` is worth keeping, a `warning` says what was left out or may be wrong."""

    text: str
    kind: Literal["progress", "note", "warning"] = "note"
    share: float | None = None


OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The default: nobody is told."""


def notes(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(Event(text))


def warnings(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(Event(text, "warning"))


class Bar:
    """Reports how much of a piece of work is done, once it takes long and not too often."""

    def __init__(self, on_event: OnEvent, text: str) -> None:
        self._on_event, self._text = on_event, text
        self._next_at = time.monotonic() + PATIENCE_S

    def part(self, start: float, end: float) -> Callable[[float], None]:
        """For work that is this part of the whole."""
        return lambda share: self(start + (end - start) * share)

    def __call__(self, share: float) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + EVERY_S
            self._on_event(Event(self._text, "progress", share))


def progress(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(Event(text, "progress"))
