"""Recognises the engine that wrote a log, and reads its runs in one pass and bounded memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.logs.book import ENDS, MOST_SHOWN, Book, LogRun
from fourfold.logs.lines import Line, read_lines
from fourfold.logs.series import StepLine
from fourfold.spec import catalog

# Name of a reader -> its file and class.
READERS: dict[str, str] = catalog.data("stacks.toml")["readers"]


def _reader(name: str) -> Any:
    file, _, title = READERS[name].partition(".")
    return getattr(importlib.import_module(f"fourfold.logs.{file}"), title)


def step_words(reader: str = "") -> str:
    """What grep -E finds in every line, or block, that tells of a step; without a name, in those
    of any engine."""
    return "|".join(_reader(name).steps for name in ([reader] if reader else READERS))


class LogReader:
    """Takes lines; all readers look at them until one has read a step, then only that one."""

    def __init__(
        self, engine: str = "", on_step: Callable[[StepLine], None] = lambda step: None
    ) -> None:
        names = [engine] if engine else list(READERS)
        books = {name: Book(engine=_reader(name).name, on_step=on_step) for name in names}
        self._readers = [_reader(name)(book) for name, book in books.items()]
        self.lines = self.cut = 0

    def begin(self) -> None:
        """A run has started, whatever its log says of it."""
        for reader in self._readers:
            reader.book.begin()

    def take(self, line: Line) -> None:
        self.lines += 1
        self.cut += not line.is_whole
        for reader in self._readers:
            if not reader.take(line):
                reader.book.look(line)
        if len(self._readers) > 1:
            found = [one for one in self._readers if _has_step(one.book) and not _is_below(one)]
            self._readers = found[:1] or self._readers

    def finish(self) -> Book:
        """The book of the reader that found most."""
        for reader in self._readers:
            reader.finish()
        book: Book = max(self._readers, key=_weight).book
        book.runs = [run for run in book.runs if not run.is_fresh or run.facts]
        book.lines, book.cut = self.lines, self.cut
        return book


def _has_step(book: Book) -> bool:
    return bool(book.runs) and book.runs[-1].steps.first is not None


def _is_below(reader: Any) -> bool:
    """Whether its lines may stand in the log of another engine, which it is a part of."""
    return getattr(reader, "is_below", False)


def _weight(reader: Any) -> tuple[bool, bool, int, int]:
    book = reader.book
    facts = max((len(run.facts) for run in book.runs), default=0)
    has_step = _has_step(book)
    return has_step, has_step and not _is_below(reader), facts, book.unread


def read_log(path: str | Path, engine: str = "", *, begun: bool = False) -> Book:
    """`begun`: it is known to be of a run, of which it may say nothing but how that ended."""
    reader = LogReader(engine)
    if begun:
        reader.begin()
    for line in read_lines(path):
        reader.take(line)
    return reader.finish()


def read_nodes(paths: Sequence[str | Path], engine: str = "") -> Book:
    """The steps of the log that has most of them, of equals the slowest; from the others what it
    does not say, the highest memory, and the worst end."""
    books = [read_log(path, engine, begun=True) for path in paths]
    runs = [book.runs[-1] for book in books if book.runs]
    main = max(books, key=lambda book: _steps_of(book.runs[-1]) if book.runs else (0, 0.0))
    named = max(books, key=lambda book: len(book.runs[-1].facts) if book.runs else 0)
    return replace(
        main,
        engine=named.engine,
        runs=[_whole(run, runs, named.engine) for run in main.runs],
        lines=sum(book.lines for book in books),
        unread=sum(book.unread for book in books),
        shown=[line for book in books for line in book.shown][:MOST_SHOWN],
        cut=sum(book.cut for book in books),
    )


def _steps_of(run: LogRun) -> tuple[int, float]:
    measured = run.steps.measured(run.interval)
    slow = 1.0 / measured.tokens_s_gpu if measured.tokens_s_gpu else measured.seconds or 0.0
    return measured.iterations, slow


def _whole(run: LogRun, runs: Sequence[LogRun], engine: str) -> LogRun:
    facts = {name: value for one in reversed(runs) for name, value in one.facts.items()}
    ends = sorted((one for one in runs if one.end), key=lambda one: ENDS.index(one.end))
    worst = ends[0] if ends else run
    memory = (gib for one in runs for gib in (one.mem_gib, one.steps.measured().mem_gib) if gib)
    return replace(
        run,
        engine=engine,
        facts=facts | run.facts,
        interval=run.interval or max(one.interval for one in runs),
        end=worst.end,
        end_words=worst.end_words,
        mem_gib=max(memory, default=None),
        unread=sum(one.unread for one in runs),
    )
