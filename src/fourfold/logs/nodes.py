"""One run that several nodes tell of, each in a log of its own: the first may print the
configuration and the last the steps, or all the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fourfold.logs.book import ENDS, MOST_SHOWN, Book, LogRun
from fourfold.logs.log import read_log


def read_nodes(paths: Sequence[str | Path], engine: str = "") -> Book:
    """The steps of the log that has most of them, of equals the slowest; from the others what it
    does not say, the highest memory, and the worst end."""
    books = [read_log(path, engine, begun=True) for path in paths]
    runs = [book.runs[-1] for book in books if book.runs]
    main = max(books, key=lambda book: _weight(book.runs[-1]) if book.runs else (0, 0.0))
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


def _weight(run: LogRun) -> tuple[int, float]:
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
