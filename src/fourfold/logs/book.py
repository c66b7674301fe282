"""The runs of one log, as its reader finds them.

A configuration opens a run. A run that starts again in the middle of its steps, with the same
configuration or none, is the same run; one that starts at its beginning is another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fourfold.logs.lines import Line
from fourfold.logs.series import StepLine, StepSeries

MOST_RUNS = 10_000
MOST_SHOWN = 5
_SHOWN_CHARS = 160
_FACT_CHARS = 300

# What a log says of a run's end, in the order in which one outweighs the other.
_ENDS = (
    ("oom", re.compile(
        r"(CUDA|HIP|GPU|XPU|NPU|GLOBAL) out of memory|OutOfMemoryError|oom[-_]kill|Out Of Memory"
        r"|can't allocate memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
        r"|cudaErrorMemoryAllocation")),
    ("hang", re.compile(
        r"Watchdog caught collective operation timeout|collective operation timeout"
        r"|Timeout at NCCL work|heartbeat monitor timed out|Timed out waiting \d+ms")),
    ("fail", re.compile(
        r"Traceback \(most recent call last\)|Segmentation fault|ChildFailedError"
        r"|\bAborted \(core dumped\)|NCCL error|Fatal Python error|srun: error: .*exit"
        r"|\b[A-Z]\w+Error: |CUDA error: ")),
)  # fmt: skip
ENDS = tuple(name for name, _ in _ENDS)
# Evaluations and checkpoints: the line after them has their time in it.
_PAUSE = re.compile(
    r"validation loss at|[Ee]valuat(?:ing|ion) (?:iter|step|loss)|validate step:|\[Eval batch="
    r"|Validation: iteration|Validation epoch|[Ss]av(?:ing|ed) (?:the )?checkpoint"
    r"|successfully saved checkpoint|save-checkpoint|profiler traces"
)

# One of these is in every line that either finds; plain texts are found ten times as fast.
_TELLING = (
    "emory", "oom", "MEMORY", "ALLOC_FAILED", "imeout", "imed out", "Traceback", "rror", "fault",
    "Aborted", "heckpoint", "alidat", "valuati", "[Eval", "profiler",
)  # fmt: skip


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
            self.runs[-1].steps.tear()
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
