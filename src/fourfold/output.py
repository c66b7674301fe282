"""A command's answer as text or Markdown for people, one CSV table or JSON for programs; events on
the way go to stderr. Nothing else in a command prints."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TextIO

from fourfold.escape import Screen, csv_text, flattened, json_text, one_line, write_control
from fourfold.events import Event
from fourfold.text_table import Grid, Part, named, render, table

# In a log file a line every few seconds says enough.
_LOG_EVERY_S = 10.0
_BAR, _WIDTH = 30, 100  # characters; of a terminal that does not say its width


class Tabular(Protocol):
    """An answer: its JSON, and the rows of its table."""

    def plain(self) -> Any: ...

    def rows(self) -> Sequence[dict[str, Any]]: ...


class Output(NamedTuple):
    """What a command answers: `plain` is its JSON, `rows` its CSV, `parts` make the page for
    people. `raw` instead of all: a text that is a file of its own."""

    plain: Callable[[], Any] = lambda: None
    rows: Callable[[], Sequence[dict[str, Any]]] = lambda: ()
    parts: Callable[[], Iterable[Part]] = lambda: ()
    status: int = 0
    raw: str | None = None

    @classmethod
    def of(cls, answer: Tabular, parts: Callable[[], Iterable[Part]], status: int = 0) -> Output:
        return cls(answer.plain, answer.rows, parts, status)


def submitted(answer: Any) -> Output:
    """Return the output of a command that leaves its job to a scheduler."""
    if answer.scripts:
        return Output(raw="\n".join(answer.scripts))
    jobs = table(answer.jobs, *named("Slurm job=slurm_job", "folder"))
    follow = "The same command without --detach follows them and has the answer."
    waiting = [f"{answer.waiting} when these have run."] if answer.waiting else []
    return Output.of(answer, lambda: [jobs, "", *waiting, follow])


def text_of(output: Output, style: str, columns: int = 0) -> str:
    """The whole answer in one of the four formats, without the last newline."""
    if output.raw is not None:
        return output.raw.rstrip("\n")
    if style == "json":
        return json_text(output.plain())
    if style == "csv":
        return table_csv(output.rows()).rstrip("\n")
    shown = []
    for part in output.parts():
        if isinstance(part, Grid):
            shown.append(render(part.headings, part.rows, style))
        else:
            shown += _folded(part, columns) if style == "text" else [part]
    return "\n".join(shown).strip("\n")


def _folded(text: str, columns: int) -> list[str]:
    if columns < 40:
        return [text]
    from textwrap import wrap

    return [
        piece
        for line in text.split("\n")
        for piece in wrap(line, columns, subsequent_indent="  ", break_on_hyphens=False) or [""]
    ]


def table_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One header, every line as wide: columns are the union of the rows' keys, in their order."""
    flat = [flattened(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    return csv_text([names, *([_cell(row.get(name)) for name in names] for row in flat)])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        nested = any(isinstance(item, dict | list | tuple) for item in value)
        return json_text(value, indent=None) if nested else "; ".join(map(_cell, value))
    return str(value)


def terminal_columns(stream: TextIO | Screen | None) -> int:
    """Characters of a line on this terminal, or as COLUMNS says; 0 for a file or a pipe."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal():
        return int(given)
    is_terminal = stream is not None and stream.isatty()
    return os.get_terminal_size(stream.fileno()).columns if is_terminal else 0


class Stderr:
    """Events of a verb, shown: progress is one line that is rewritten on a terminal and a line now
    and then in a log; a note stays."""

    def __init__(self) -> None:
        self._last_at, self._last_kind = -_LOG_EVERY_S, ""
        self._is_open = False

    def __call__(self, event: Event) -> None:
        if event.kind == "progress":
            self._progress(event.text, event.share)
        else:
            self.close()
            mark = "warning: " if event.kind == "warning" else ""
            print(f"{mark}{event.text}", file=sys.stderr, flush=True)

    def _progress(self, text: str, share: float | None) -> None:
        if sys.stderr.isatty():
            if share is not None:
                done = "#" * round(_BAR * share)
                text = f"[{done:.<{_BAR}}] {100 * share:3.0f}% {text}"
            most = (terminal_columns(sys.stderr) or _WIDTH) - 1  # a wrapped line stays
            write_control(sys.stderr, f"\r\033[K{one_line(text)[:most]}")
            self._is_open = True
            return
        kind = re.sub("[0-9]+", "", text).partition(",")[0]
        # A new phase is news at once, such as the first step after the start.
        if kind != self._last_kind or time.monotonic() - self._last_at >= _LOG_EVERY_S:
            self._last_at, self._last_kind = time.monotonic(), kind
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal clean before anything else is printed."""
        if self._is_open:
            write_control(sys.stderr, "\r\033[K")
            self._is_open = False
