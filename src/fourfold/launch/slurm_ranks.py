"""The ranks of a job under Slurm, watched as those of this host are: by what the workers of its
nodes write in the job's folder, which all nodes see. Slurm is asked for the job's state only."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.batch_script import EXIT_FILE, STOPPED_FILE, BatchJob
from fourfold.launch.outcomes import STALE_S, JobScene, tail
from fourfold.launch.slurm import GONE_S, LIVING, WAITING, Slurm, State, submitted
from fourfold.result.job import Job, beat_file, read_beat
from fourfold.result.report import Outcome

# What the scheduler did to a job; anything else is left to what the ranks say.
_BY_SCHEDULER: dict[str, tuple[Outcome, str]] = {
    "CANCELLED": ("cancelled", "was cancelled"),
    "PREEMPTED": ("cancelled", "was pre-empted"),
    "NODE_FAIL": ("cancelled", "lost a node"),
    "BOOT_FAIL": ("cancelled", "could not start a node"),
    "DEADLINE": ("cancelled", "reached its deadline"),
    "TIMEOUT": ("cancelled", "reached its time limit"),
    "REVOKED": ("cancelled", "was revoked"),
}
# srun's own words; a task that cannot be executed there is another matter.
_UNREACHED = re.compile(
    r"^srun: error: Task launch for \S+ failed on node (\S+): "
    r"(?:Communication|Unable to contact|Socket timed out|Message|Connection|No route|Transport)"
    r"|^srun: error: Node failure on (\S+)",
    re.MULTILINE,
)
_LOOK_S = 0.1
_LAST_WORDS_S = 15.0  # files of other hosts are seen late
_LOST_S = 400.0  # Slurm gives a node up after SlurmdTimeout, 300 s unless the site says otherwise


class SlurmRanks:
    """One submitted job. `step`: it is one of several in an allocation, and ends before that.
    `each`: ranks behind every process that tells of itself: another engine's, of a node. `mine`:
    this command submitted it."""

    def __init__(
        self,
        slurm: Slurm,
        job_id: str,
        job: Job,
        folder: Path,
        *,
        ranks: int,
        step: bool,
        each: int = 1,
        mine: bool = True,
    ) -> None:
        self.slurm, self.job_id, self.is_step, self.each = slurm, job_id, step, each
        self.mine = mine
        self.scene = JobScene(folder=folder, ranks=ranks)
        self.queued = f"Slurm job {job_id} was submitted"
        self._patient, self._is_engine = job.patient, job.job == "engine"
        self._read: dict[Path, int] = {}
        self._beats_at: dict[int, tuple[float, float]] = {}  # rank -> its last sign, and when seen
        self._asked_at, self._ended, self._start, self._step = -1e9, False, 0, ""

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """Where it was, for its report, whether or not its ranks could say so."""
        hosts: dict[str, list[int]] = {}
        for rank, host in sorted(self.scene.hosts.items()):
            hosts.setdefault(host, []).append(rank)
        shown = ", ".join(
            f"{host}: {ranks[0] * self.each}-{(ranks[-1] + 1) * self.each - 1}"
            for host, ranks in hosts.items()
        )
        known = {"site": self.slurm.site.name, "slurm.job": self.job_id, "slurm.ranks": shown}
        return tuple((name, text) for name, text in known.items() if text)

    @property
    def has_ended(self) -> bool:
        """Slurm says so; with a script that leaves its status, that is seen sooner."""
        return self._ended

    @property
    def all_ended(self) -> bool:
        """A training that saved may be started over, which only Slurm knows."""
        whole = len(self.scene.exits) == self.scene.ranks
        return whole and (self._ended or not self._patient)

    def poll(self) -> bool:
        """Take in the nodes' news, the beats and the state; True when nothing of it runs."""
        gone = self._script_ended()
        due = time.monotonic() - self._asked_at >= self.slurm.site.poll_s
        if not self._ended and (due or (gone and self._patient)):
            self._asked_at = time.monotonic()
            self._take_state(self.slurm.state(self.job_id))
        for path in sorted(self.scene.folder.glob("news-*.jsonl")):
            self._read_news(path)
        for rank in range(self.scene.ranks):
            beat = read_beat(beat_file(self.scene.folder, rank))
            if beat is not None:
                self.scene.beats[rank] = beat
                if self._beats_at.get(rank, (0.0, 0.0))[0] != beat.at:
                    self._beats_at[rank] = (beat.at, time.monotonic())
        return self._ended or (gone and not self._patient)

    def _script_ended(self) -> bool:
        with contextlib.suppress(ValueError):
            text = files.read_own_text(self.scene.folder / EXIT_FILE)
            start, code = map(int, text.split())
            if start >= self._start:
                self.scene.worker_exit = code
                return True
        return False

    def _take_state(self, state: State) -> None:
        if not state.name:
            return  # asked again at the next turn
        where = f"Slurm job {self.job_id}"
        waits = state.name in WAITING
        if waits and self.scene.exits:
            self._start_over(self._start + 1)
        not_yet = waits or (self.is_step and not self.scene.pids)
        why = f" ({state.detail})" if state.detail else ""
        self.queued = f"{where} is {state.name.lower()}{why}" if not_yet else ""
        self._ended = state.name not in LIVING
        if self._ended:
            self.queued = ""
        if state.name == "OUT_OF_MEMORY":
            self.scene.kernel_kills += 1
        # Ranks of ours that have all ended did so by themselves. The shell of another engine's node
        # tells of an end by a signal too, whatever status it has then.
        told = len(self.scene.exits) == self.scene.ranks and not self._is_engine
        if state.name in _BY_SCHEDULER and not told:
            outcome, words = _BY_SCHEDULER[state.name]
            on = f" on {state.detail}" if state.detail else ""
            if state.name == "NODE_FAIL" and (down := self.slurm.down(state.detail)):
                words = f"lost {', '.join(down)}"
            self.scene.by_scheduler = (outcome, f"{where}{on} {words} ({state.name})")

    def _start_over(self, start: int) -> None:
        self._start = start
        for known in (self.scene.exits, self.scene.beats, self.scene.pids, self.scene.stopped):
            known.clear()
        self.scene.worker_exit = None

    def _read_news(self, path: Path) -> None:
        """Whole lines that were added; a node that is writing finishes its line later."""
        with contextlib.suppress(OSError, UserError), files.open_own(path) as file:
            file.seek(self._read.get(path, 0))
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._take(json.loads(line))

    def _take(self, news: dict[str, Any]) -> None:
        start = news.get("start", 0)
        if start > self._start:
            self._start_over(start)
        if start == self._start:
            self._step, self.queued = news.get("step", self._step), ""
            self.scene.take(news)

    def hear_out(self) -> bool:
        """After a bad exit: wait for what others still say, and for Slurm's word on a node that
        says nothing any more; True where Slurm starts the job over."""
        began = time.monotonic()
        while not self._is_settled(self.poll(), time.monotonic() - began):
            if self._patient and self.queued:
                return True
            time.sleep(_LOOK_S)
        self.report_lost_nodes()
        return False

    def report_lost_nodes(self) -> None:
        """Nodes that are gone, where Slurm has not said so."""
        if self.scene.by_scheduler is not None or self.scene.kernel_kills:
            return
        why = "srun could not start its ranks"
        lost = self._unreached()
        if not lost and not self._is_engine:  # of another engine's nodes there are no signs of life
            why, lost = "its ranks left no word of their end", self._lost_hosts()
        if lost:
            words = f"{', '.join(lost)} was lost: {why}"
            self.scene.by_scheduler = ("cancelled", f"Slurm job {self.job_id}: {words}")

    def _unreached(self) -> list[str]:
        """Nodes that srun itself could not reach, as it says in the job's log."""
        log = self.scene.worker_log
        printed = tail(log) if log else ""
        return sorted({found[1] or found[2] for found in _UNREACHED.finditer(printed)})

    def _is_settled(self, ended: bool, waited_s: float) -> bool:
        if len(self.scene.exits) == self.scene.ranks or self.scene.by_scheduler:
            return ended or not self._patient or waited_s > GONE_S
        if ended:  # those that were started and have not ended may still say so
            return not self.scene.pids or waited_s > _LAST_WORDS_S
        return waited_s > (_LOST_S if self._lost_hosts() else _LAST_WORDS_S)

    def _lost_hosts(self) -> list[str]:
        """Hosts with ranks that have not ended, none of which gives a sign of life."""
        now, hosts = time.monotonic(), {}
        for rank in range(self.scene.ranks):
            if rank not in self.scene.exits and rank in self.scene.hosts:
                fresh = now - self._beats_at.get(rank, (0.0, -1e9))[1] < STALE_S
                host = self.scene.hosts[rank]
                hosts[host] = hosts.get(host, False) or fresh
        return sorted(host for host, lives in hosts.items() if not lives)

    def end(self) -> None:
        """Cancel what is left of it, and wait until it is gone."""
        until = time.monotonic() + GONE_S
        cancelled = len(self.scene.exits) == self.scene.ranks  # then it ends by itself
        while time.monotonic() < until and not self._is_gone():
            if not cancelled or time.monotonic() > until - GONE_S / 2:
                self.slurm.cancel(self._step_id())
                cancelled = True
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """The user, or an error, stops the command: a job that an earlier one submitted goes on.
        A training has been asked to save before that, and ends."""
        if self._patient:
            self.end()
        elif self.mine:
            has_run = self._script_ended()
            mark = self.scene.folder / STOPPED_FILE
            try:
                if not has_run:  # before it is cancelled, of which its script may still tell
                    mark.touch()
                self.end()
            except BaseException:
                mark.unlink(missing_ok=True)
                raise

    def _step_id(self) -> str:
        return f"{self.job_id}.{self._step}" if self.is_step and self._step else self.job_id

    def _is_gone(self) -> bool:
        if self._ended or (self.is_step and (self._script_ended() or not self._step)):
            return True
        return self.slurm.state(self.job_id).name not in ("", *LIVING)


def started(slurm: Slurm, job: Job, tasks: list[int], folder: Path) -> SlurmRanks:
    """Submit it, unless it is (by `Slurm.submit`, or by an earlier command)."""
    known = submitted(folder)
    if known is None or (known.tasks and known.tasks != tuple(tasks)):
        (known,) = slurm.submit(BatchJob(job, tuple(tasks), (folder,), folder))
    count, each = job.processes(tasks[0]), 1
    if job.job == "engine":
        count, each = slurm.site.nodes(count), slurm.site.per_node(count)
    mine = known.id in slurm.mine
    ranks = SlurmRanks(
        slurm, known.id, job, folder, ranks=count, step=known.step, each=each, mine=mine
    )
    if known.log:
        ranks.scene.worker_log = Path(known.log)
    return ranks
