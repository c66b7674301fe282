"""When is a job silent for too long? Limits for the start and for a step, read from the beats."""

from __future__ import annotations

import time
from collections.abc import Callable

from fourfold.launch.outcomes import Scene
from fourfold.result.job import SLOW_PHASES
from fourfold.spec.job import Job

_SAY_EVERY_S = 2.0


class Silence:
    """Seconds since any rank finished a step, by the launcher's own clock."""

    def __init__(self, job: Job, say: Callable[[str], None] | None = None) -> None:
        self._job, self._say = job, say
        self._progress: object = None
        self._changed_at = self._said_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._changed_at

    def broken(self, scene: Scene) -> str:
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

    def _tell(self, scene: Scene, task: int) -> None:
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
