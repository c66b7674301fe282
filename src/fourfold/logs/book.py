"""The runs of one log, as its reader finds them.

A configuration opens a run. A run that starts again in the middle of its steps, with the same
configuration or none, is the same run; one that starts at its beginning is another.

Recognises the engine that wrote a log, and reads its runs in one pass and bounded memory.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from fourfold.logs.lines import Line, read_lines
from fourfold.logs.series import StepLine, StepSeries
from fourfold.spec.engine import READERS


class EngineReader:
    """Reads the lines of one engine's logs into a book; each engine has its own (engines)."""

    name = ""  # of the engine, in rows
    steps = ""  # what grep -E finds in every line, or block, that tells of a step
    is_below = False  # its lines may stand in the log of another engine, which it is a part of
    # Of logs of events, with a file for each rank: what every line has, and the file's name as run
    # and rank.
    events = ""
    rank_file: ClassVar[re.Pattern[str] | None] = None

    def __init__(self, book: Book) -> None:
        self.book = book

    def take(self, line: Line) -> bool:
        """Read a line; return whether it is one of this engine's."""
        raise NotImplementedError

    def finish(self) -> None:
        """Read what the end of the log completes."""


@functools.cache
def _reader(name: str) -> type[EngineReader]:
    module, _, title = READERS[name].rpartition(".")
    found: type[EngineReader] = getattr(
        importlib.import_module(f"fourfold.backends.{module}"), title
    )
    return found


def is_event(text: str) -> bool:
    """Return whether a JSON line is an engine's log, by events instead of steps."""
    readers = map(_reader, READERS)
    return any(reader.events and reader.events in text for reader in readers)


def run_and_rank(file: str) -> tuple[str, str] | None:
    """Return the run and the rank that the name of a log of one rank says, else None."""
    patterns = (_reader(name).rank_file for name in READERS)
    found = next(filter(None, (pattern.fullmatch(file) for pattern in patterns if pattern)), None)
    return (found[1], found[2]) if found else None


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
            found = [one for one in self._readers if _has_step(one.book) and not one.is_below]
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


def _weight(reader: EngineReader) -> tuple[bool, bool, int, int]:
    book = reader.book
    facts = max((len(run.facts) for run in book.runs), default=0)
    has_step = _has_step(book)
    return has_step, has_step and not reader.is_below, facts, book.unread


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


MOST_RUNS = 10_000
MOST_SHOWN = 5
_SHOWN_CHARS = 160
_FACT_CHARS = 300

# What a log says of a run's end, in the order in which one outweighs the other.
_ENDS = (
    (
        "oom",
        re.compile(
            r"(CUDA|HIP|GPU|XPU|NPU|GLOBAL) out of memory|OutOfMemoryError|oom[-_]kill"
            r"|Out Of Memory"
            r"|can't allocate memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
            r"|cudaErrorMemoryAllocation"
        ),
    ),
    (
        "hang",
        re.compile(
            r"Watchdog caught collective operation timeout|collective operation timeout"
            r"|Timeout at NCCL work|heartbeat monitor timed out|Timed out waiting \d+ms"
        ),
    ),
    (
        "fail",
        re.compile(
            r"Traceback \(most recent call last\)|Segmentation fault|ChildFailedError"
            r"|\bAborted \(core dumped\)|NCCL error|Fatal Python error|srun: error: .*exit"
            r"|\b[A-Z]\w+Error: |CUDA error: "
        ),
    ),
)
ENDS = tuple(name for name, _ in _ENDS)
# Evaluations and checkpoints: the line after them has their time in it.
_PAUSE = re.compile(
    r"validation loss at|[Ee]valuat(?:ing|ion) (?:iter|step|loss)|validate step:|\[Eval batch="
    r"|Validation: iteration|Validation epoch|[Ss]av(?:ing|ed) (?:the )?checkpoint"
    r"|successfully saved checkpoint|save-checkpoint|profiler traces"
)

# One of these is in every line that either finds; plain texts are found ten times as fast.
_TELLING = (
    "emory",
    "oom",
    "MEMORY",
    "ALLOC_FAILED",
    "imeout",
    "imed out",
    "Traceback",
    "rror",
    "fault",
    "Aborted",
    "heckpoint",
    "alidat",
    "valuati",
    "[Eval",
    "profiler",
)


@dataclass(slots=True)
class LogRun:
    """One run: facts by column of the reference schema, as texts; its steps, and how it ended."""

    engine: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    interval: int = 0
    steps: StepSeries = field(default_factory=StepSeries)
    end: str = ""
    end_words: str = ""
    mem_gib: float | None = None
    unread: int = 0  # lines of steps that could not be read

    @property
    def is_fresh(self) -> bool:
        """Nothing has happened yet."""
        return self.steps.first is None and not self.end


@dataclass(slots=True)
class Book:
    """What a reader writes into. `unread`: lines that look like the engine's and are not."""

    engine: str = ""
    runs: list[LogRun] = field(default_factory=list)
    lines: int = 0
    unread: int = 0
    shown: list[tuple[int, str]] = field(default_factory=list)
    cut: int = 0
    dropped_runs: int = 0
    on_step: Callable[[StepLine], None] = lambda step: None

    @property
    def run(self) -> LogRun:
        if not self.runs:
            self._open()
        return self.runs[-1]

    def begin(self) -> None:
        """A start: another run, unless nothing has come of the one before."""
        if not self.runs or not self.runs[-1].is_fresh:
            self._open()

    def fact(self, **facts: Any) -> None:
        """Added to the run's; a later word overrides."""
        said = {name: value for name, value in facts.items() if value not in (None, "")}
        self.run.facts |= {n: v[:_FACT_CHARS] if isinstance(v, str) else v for n, v in said.items()}

    def memory(self, gib: float) -> None:
        self.run.mem_gib = max(gib, self.run.mem_gib or 0.0)

    def step(self, found: StepLine) -> None:
        run = self.run
        before = self.runs[-2] if len(self.runs) > 1 else None
        if run.steps.first is None and before is not None and _resumes(before, run, found.step):
            self.runs.pop()
            before.steps.restart(found.step)
            run = before
        elif run.steps.first is not None and run.steps.place(found) == "back":
            if found.step > run.steps.first:
                run.steps.restart(found.step)
            else:
                run = self._open()
        run.end, run.end_words = "", ""
        run.engine = run.engine or self.engine
        run.steps.add(found)
        self.on_step(found)

    def pause(self) -> None:
        if self.runs:
            self.runs[-1].steps.pause()

    def unreadable(self, line: Line) -> None:
        if self.runs:
            self.runs[-1].steps.break_average()
            self.runs[-1].unread += 1
            self.runs[-1].end, self.runs[-1].end_words = "", ""  # it went on
        self.skip(line.number, line.text)

    def skip(self, number: int, text: str) -> None:
        self.unread += 1
        if len(self.shown) < MOST_SHOWN:
            self.shown.append((number, text.strip()[:_SHOWN_CHARS]))

    def look(self, line: Line) -> None:
        """For what every engine's log may say."""
        text = line.text
        for word in _TELLING:
            if word in text:
                break
        else:
            return
        if _PAUSE.search(text[:2000]):
            self.pause()
        if self.runs:
            self._end(text[:2000])

    def _end(self, text: str) -> None:
        run = self.runs[-1]
        for rank, (name, pattern) in enumerate(_ENDS):
            if run.end and rank >= ENDS.index(run.end):
                return
            if pattern.search(text):
                run.end, run.end_words = name, text.strip()[:_SHOWN_CHARS]
                return

    def _open(self) -> LogRun:
        if len(self.runs) >= MOST_RUNS:  # the last place is used again
            self.dropped_runs += 1
            self.runs.pop()
        self.runs.append(LogRun(engine=self.engine))
        return self.runs[-1]


def _resumes(before: LogRun, run: LogRun, step: int) -> bool:
    first = before.steps.first
    return first is not None and step > first and run.facts == before.facts
