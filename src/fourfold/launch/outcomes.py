"""Decides what went wrong and who failed first, from exit codes, failure files and silence."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.job import Beat, RankFailure, failure_file, log_file
from fourfold.result.report import Failure, Outcome
from fourfold.spec import codec
from fourfold.units import counted

T = TypeVar("T")
# Errors that only say that somebody else is gone: consequences, not causes.
_PEER_GONE = re.compile(
    r"closed by peer|connection (was )?(reset|closed|refused)|broken pipe|remote process exited"
    r"|ncclRemoteError|communicator was aborted|DistNetworkError|DistStoreError|Gloo connect"
    r"|Timed ?out|wait timeout",
    re.IGNORECASE,
)
# Python code in which a rank waits for the others; such a rank is not the one that is missing.
_WAITING = re.compile(
    r"torch[/\\]distributed|torch[/\\]autograd|_functional_collectives", re.IGNORECASE
)
# What the innermost line does when it waits in compiled code: a message, a collective, a device.
_WAITING_CALL = re.compile(
    r"\.wait\(|\.synchronize\(|\.item\(|\.backward\(|barrier\(|all_reduce|all_gather|reduce_scatter"
    r"|all_to_all|broadcast|\bi?send|\bi?recv|isfinite\("
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_INNER_FRAMES = 5
_TAIL_LINES, _TAIL_CHARS, _TAIL_BYTES = 15, 1500, 2**16
# Who starts the ranks of a host and watches them; in place of a rank's number.
WORKER = -1
# Ranks give a sign every quarter second; one this old, beside fresh ones, is of a stopped rank.
STALE_S = 5.0


@dataclass(slots=True)
class JobScene:
    folder: Path
    ranks: int
    exits: dict[int, tuple[int, float]] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)
    kernel_kills: int = 0
    # Who is stopped now, as its parent sees it: rank (or WORKER) -> the signal, 0 if not known.
    stopped: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    worker_exit: int | None = None
    worker_log: Path | None = None
    # Rank -> its host, where there are several.
    hosts: dict[int, str] = field(default_factory=dict)
    # What the batch system did to the job, which explains every exit by a signal.
    by_scheduler: tuple[Outcome, str] | None = None

    def take(self, news: Mapping[str, Any]) -> None:
        """One line of a host's worker: a rank's start, stop, going on or end."""
        rank = news["rank"]
        self.stopped.pop(rank, None)
        if "host" in news:
            self.hosts[rank] = news["host"]
        if "pid" in news:
            self.pids[rank] = news["pid"]
        elif "stopped" in news:
            self.stopped[rank] = news["stopped"]
        elif "code" in news:
            self.exits.setdefault(rank, (news["code"], news["at"]))

    def place(self, rank: int) -> str:
        """Who and where, for a person who will look there."""
        where = f"pid {self.pids[rank]} on" if rank in self.pids else "on"
        where = f"{where} {self.hosts.get(rank) or socket.gethostname()}"
        if rank == WORKER:
            return f"the worker ({where}), which starts and watches the ranks,"
        stage, phase = self._stands(rank)
        return f"rank {rank} ({where}, stage {stage}, {phase})"

    def _stands(self, rank: int) -> tuple[int, str]:
        beat = self.beats.get(rank)
        return (beat.stage, beat.phase) if beat else (0, "worker" if rank == WORKER else "start")

    def failure(self, rank: int, message: str) -> Failure:
        stage, phase = self._stands(rank)
        return Failure(rank=rank, stage=stage, phase=phase, message=message)


def first_failure(scene: JobScene) -> tuple[Outcome, Failure]:
    """After at least one rank ended badly: the earliest cause that is no consequence."""
    if scene.by_scheduler is not None:
        outcome, words = scene.by_scheduler
        return outcome, Failure(rank=WORKER, stage=0, phase="scheduler", message=words)
    causes: list[tuple[float, Outcome, Failure]] = []
    consequences: list[tuple[float, Outcome, Failure]] = []
    for rank, (code, at) in scene.exits.items():
        own_failure = own_words(scene.folder, rank)
        if own_failure is not None:
            failure, outcome = own_failure.failure, own_failure.outcome
            gone = outcome == "crashed" and _PEER_GONE.search(failure.message)
            row = own_failure.at, outcome, _with_tail(failure, scene.folder)
            (consequences if own_failure.echo or gone else causes).append(row)
        elif code != 0:
            outcome, message = _ending(scene, rank, code)
            causes.append((at, outcome, _with_tail(scene.failure(rank, message), scene.folder)))
    for _, outcome, failure in sorted(causes or consequences, key=lambda item: item[0]):
        return outcome, failure
    return _worker_end(scene)


def _worker_end(scene: JobScene) -> tuple[Outcome, Failure]:
    """No rank ended by itself: the worker did, and its ranks with it."""
    code = scene.worker_exit
    log_tail = tail(scene.worker_log or log_file(scene.folder, WORKER))
    outcome, words = _ending(scene, WORKER, code)
    if code is not None and code < 0:
        words += (
            ", and its ranks with it; look for the sender in the log of the kernel or the batch "
            "system, then start again"
        )
    else:
        last = log_tail.rpartition("\n")[2]
        words += f": {last}"
    return outcome, scene.failure(WORKER, f"{words}\n{log_tail}".strip())


def _ending(scene: JobScene, rank: int, code: int | None) -> tuple[Outcome, str]:
    """What an exit code says of a process that said nothing itself."""
    if code is None or code >= 0:
        return "crashed", f"{scene.place(rank)} exited with code {code}"
    words = f"{scene.place(rank)} was killed by signal {-code} ({_signal_name(-code)})"
    if code == -signal.SIGKILL and scene.kernel_kills:
        return "oom", f"{words}, sent by the kernel: the host ran out of memory"
    return "crashed", words


def own_words(folder: Path, rank: int) -> RankFailure | None:
    return read_if_whole(RankFailure, failure_file(folder, rank))


def read_if_whole(kind: type[T], path: Path) -> T | None:
    """What a rank has left; None where it left nothing, or died while it wrote."""
    try:
        return codec.from_json(kind, files.read_own_text(path))
    except UserError:
        return None


def stopped(scene: JobScene, rank: int, seconds: float) -> Failure:
    """A rank, or the worker, is stopped and stays so."""
    by = f" by {_signal_name(scene.stopped[rank])}" if scene.stopped.get(rank) else ""
    waiting = "" if rank == WORKER else ", and the others wait for it"
    message = (
        f"{scene.place(rank)} has been suspended{by} for {seconds:.0f} s{waiting}; find what "
        "suspends it (kill -STOP, a suspended batch job, a terminal), then start again"
    )
    return scene.failure(rank, message)


def silent(scene: JobScene, waited_s: float, limit: str) -> Failure:
    """After a time limit: the first rank that did not arrive where the others wait."""
    rank, how = missing_rank(scene)
    others = len(scene.beats) - 1
    waiting = f"; {counted(others, 'other rank')} waiting" if others > 0 else ""
    message = f"no progress for {waited_s:.0f} s ({limit}); {scene.place(rank)} {how}{waiting}"
    return scene.failure(rank, message)


def missing_rank(scene: JobScene) -> tuple[int, str]:
    """The lowest suspect, by the strongest evidence there is: stopped, no beat, a still beat, a
    stack that waits for nobody (and, of several, a collective that others started), a collective
    that others started and it did not, the fewest phases passed: of a pipeline's stages, the first
    that stands still."""
    halted = [rank for rank in scene.stopped if rank != WORKER]
    if halted:
        return min(halted), "is suspended"
    absent = [rank for rank in range(scene.ranks) if rank not in scene.beats]
    if absent:
        return absent[0], "never started"
    newest = max(beat.at for beat in scene.beats.values())
    still = [rank for rank, beat in scene.beats.items() if newest - beat.at > STALE_S]
    if still:
        age_s = newest - scene.beats[min(still)].at
        return min(still), f"is suspended or stuck: its last heartbeat is {age_s:.0f} s old"
    behind = _behind(scene.beats)
    busy = [rank for rank in scene.beats if not _waits(scene.folder, rank)]
    both = [rank for rank in busy if rank in behind]
    if both:
        return min(both), f"has not started {behind[min(both)]}"
    if busy and len(busy) < len(scene.beats):
        return min(busy), "is busy outside any collective"
    if behind:
        return min(behind), f"has not started {behind[min(behind)]}"
    fewest = min(scene.beats.values(), key=lambda beat: (beat.marks, beat.rank))
    return fewest.rank, "has passed the fewest phases"


def _behind(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Rank -> the collective of a group that another of its ranks has started and it has not."""
    most: dict[str, int] = {}
    for beat in beats.values():
        for group, count in beat.groups:
            most[group] = max(most.get(group, 0), int(count))
    return {
        rank: f"collective {int(count) + 1} of group {group}"
        for rank, beat in sorted(beats.items())
        for group, count in beat.groups
        if int(count) < most[group]
    }


def _waits(folder: Path, rank: int) -> bool:
    """Whether the dumped stack of the main thread stands inside communication, torch's or ours.
    Without a stack nothing is known, and other evidence must tell: then it counts as waiting."""
    try:
        text = files.read_own_text(folder / f"stack-{rank}.txt")
    except UserError:
        return True
    main = text.split("Thread 0x")[-1].splitlines()[1:]
    if _WAITING.search("\n".join(main[:_INNER_FRAMES])):
        return True
    return not main or bool(_WAITING_CALL.search(_source_line(main[0])))


def _source_line(frame: str) -> str:
    """The text of the line a frame stands at; compiled code below it has no frame of its own."""
    match = _FRAME.search(frame)
    try:
        lines = files.read_text(match.group(1)).splitlines() if match else []
        return lines[int(match.group(2)) - 1] if match else ""
    except (ValueError, IndexError):
        return ""


def tail(path: Path) -> str:
    """The last lines of a log, for a report that must stand alone."""
    try:
        with files.open_own(path) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = stream.read(_TAIL_BYTES).decode("utf-8", errors="replace").splitlines()
    except (OSError, UserError):
        return ""
    return "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARS:]


def _with_tail(failure: Failure, folder: Path) -> Failure:
    end = tail(log_file(folder, failure.rank))
    message = f"{failure.message}\n{end}" if end not in failure.message else failure.message
    return replace(failure, message=message.strip())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def kernel_kills() -> int:
    """Processes the kernel has killed for memory in our control group; 0 where it does not say."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", "0"))
    except (OSError, ValueError):
        return 0
