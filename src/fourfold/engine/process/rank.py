"""One rank's life: its tasks in order, facts or a failure left behind as files."""

from __future__ import annotations

import faulthandler
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from fourfold import files
from fourfold.engine.process.failure import NonFiniteError, OomError, outcome_of
from fourfold.engine.process.heartbeat import Heartbeat
from fourfold.engine.process.task import Place, Task
from fourfold.result.job import RankFacts, RankFailure, facts_file, failure_file
from fourfold.result.report import Failure, RankMemory, RankSteps
from fourfold.spec import codec
from fourfold.spec.job import Job

_MESSAGE_CHARS = 2000


def work(
    job: Job,
    tasks: Sequence[int],
    *,
    place: Place,
    folder: Path,
    perform: Callable[[Task], RankFacts | None],
) -> int:
    """The first failure ends it: the peers can't go on without this rank anyway."""
    faulthandler.enable()
    heartbeat = Heartbeat(folder, place.rank)
    heartbeat.start()
    try:
        for index in tasks:
            heartbeat.begin(index)
            # The first task's start includes that of the processes.
            began_at = place.started_at if index == tasks[0] else time.time()
            task = Task(job, index, place, folder, heartbeat, began_at)
            facts = perform(task) or _no_facts(place.rank)
            files.write_text(facts_file(folder, index, place.rank), codec.to_json(facts))
        heartbeat.enter("done")
    except BaseException as error:
        _say_why(folder, heartbeat, error)
        return 1
    heartbeat.stop()
    return 0


def _no_facts(rank: int) -> RankFacts:
    """The mark of a finished task that measures nothing by rank."""
    return RankFacts(
        memory=RankMemory(rank=rank, stage=0, peak_bytes=0),
        times=RankSteps(rank=rank, host=socket.gethostname()),
    )


def _say_why(folder: Path, heartbeat: Heartbeat, error: BaseException) -> None:
    """The failure as a file, the traceback in the rank's log."""
    at = time.time()
    report = error.report if isinstance(error, OomError) else None
    cause = error.__cause__ or error if isinstance(error, OomError) else error
    text = f"{type(cause).__name__}: {cause}"
    failure = Failure(
        rank=heartbeat.rank,
        stage=heartbeat.stage,
        phase=heartbeat.phase,
        message=text[:_MESSAGE_CHARS],
    )
    echo = isinstance(error, NonFiniteError) and not error.from_here
    record = RankFailure(
        outcome=outcome_of(error), failure=failure, at=at, echo=echo, shortage=report
    )
    files.write_text(failure_file(folder, heartbeat.rank), codec.to_json(record))
    traceback.print_exception(error)
