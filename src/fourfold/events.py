"""Events that a verb reports to its caller while it works: progress and notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple


class Event(NamedTuple):
    """`progress` is out of date with the next one; a `note` is worth keeping, a
    `warning` says what was left out or may be wrong."""

    text: str
    kind: Literal["progress", "note", "warning"] = "note"


OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The default: nobody is told."""


def notes(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(Event(text))


def warnings(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(Event(text, "warning"))


def progress(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(Event(text, "progress"))
