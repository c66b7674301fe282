"""When is a job silent for too long? Limits for the start and for a step, read from the beats; and
a short one for a process that is stopped, as its parent sees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fourfold.launch.outcomes import JobScene
from fourfold.result.job import SLOW_PHASES
from fourfold.spec.job import Job

_SAY_EVERY_S = 2.0
# A stopped process does nothing until somebody lets it go on. Long enough for a look at it with a
# tool that stops it, and with what follows still within half a minute.
STOPPED_S = 15.0
# What one look counts for at most: time in which this process itself did not run proves nothing.
_LOOK_S = 2.0


class Standstill:
    """Seconds for which a rank, or the worker, was seen stopped at every look. A process that is
    only slow, busy or under a debugger is not in that state, however loaded the machine is."""

    def __init__(self) -> None:
        self._seen_s: dict[int, float] = {}
        self._looked_at = time.monotonic()

    def seconds(self, rank: int) -> float:
        return self._seen_s.get(rank, 0.0)

    def broken(self, scene: JobScene) -> int | None:
        """The rank (or WORKER) that has been stopped for too long: the worker before its ranks,
        since it is who tells of them."""
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, _LOOK_S), now
        # One that was not stopped at the last look may have been so for a moment only.
        self._seen_s = {
            rank: self._seen_s[rank] + passed_s if rank in self._seen_s else 0.0
            for rank in sorted(scene.stopped)
        }
        return next((rank for rank, s in self._seen_s.items() if s >= STOPPED_S), None)


class Silence:
    """Seconds since any rank finished a step, by the launcher's own clock."""

    def __init__(self, job: Job, say: Callable[[str], None] | None = None) -> None:
        self._job, self._say = job, say
        self._progress: object = None
        self._changed_at = self._said_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._changed_at

    def broken(self, scene: JobScene) -> str:
        """The name of the limit that has passed, '' while all is well."""
        beats = scene.beats.values()
        progress = tuple(
            # Ranks mark how far a long save or load has come; other phases prove nothing.
            (beat.rank, beat.task, beat.steps, beat.marks if beat.phase in SLOW_PHASES else 0)
            for beat in beats
            if beat.steps or beat.phase in SLOW_PHASES
        )
        if progress != self._progress:
            self._progress, self._changed_at = progress, time.monotonic()
        task = max((beat.task for beat in beats), default=0)
        started = len(scene.beats) == scene.ranks and all(
            beat.steps or beat.rank in scene.exits for beat in beats if beat.task == task
        )
        limits = self._job.task_limits(task)
        self._tell(scene, task)
        if started and self.seconds > limits.step_s:
            return f"step limit {limits.step_s:g} s"
        if not started and self.seconds > limits.start_s:
            return f"start limit {limits.start_s:g} s"
        return ""

    def _tell(self, scene: JobScene, task: int) -> None:
        now = time.monotonic()
        if self._say is None or now - self._said_at < _SAY_EVERY_S:
            return
        self._said_at = now
        beats = scene.beats.values()
        busiest = max(beats, key=lambda beat: (beat.task, beat.marks), default=None)
        if busiest is None:
            self._say(f"starting {scene.ranks} ranks")
            return
        of = f"run {task + 1} of {self._job.tasks}, " if self._job.tasks > 1 else ""
        self._say(f"{of}{busiest.steps} steps done, now {busiest.phase}")
