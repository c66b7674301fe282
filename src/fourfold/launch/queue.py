"""Runs of a store under Slurm: submitted many at a time, followed one by one. A run works in
`.jobs/RUN-N` of the store until it is kept, so the same command finds it again after a logout."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from fourfold import files
from fourfold.launch.batch_script import BatchJob, same_batch
from fourfold.launch.folder import job_folder
from fourfold.launch.slurm import Slurm, Submitted, submitted
from fourfold.launch.stop import stop_signals
from fourfold.result.job import JOB_FILE, Job
from fourfold.spec import codec
from fourfold.spec.run import RunSpec

JOBS = ".jobs"


class Queue:
    """`options` are those of every job; a `Slurm` says where they go."""

    def __init__(self, root: Path, slurm: Slurm, options: tuple[tuple[str, str], ...] = ()) -> None:
        self.root, self.slurm, self.options = root / JOBS, slurm, options
        self._taken: Counter[str] = Counter()
        self._waiting: list[tuple[Path, Job]] = []  # not submitted yet
        self._followed: list[Path] = []

    def job(self, spec: RunSpec) -> Job:
        return Job(job="run", specs=(spec,), options=self.options)

    def take(self, spec: RunSpec) -> Path:
        """The folder of the next run of the spec; it is submitted when this returns."""
        place = self._place(spec, self._taken)
        mine = next((one for one in self._waiting if one[0] == place), None)
        if mine is not None:
            self._submit(self._batch(mine))
        elif place not in self._followed:
            self._followed += [place]
            if not self.slurm.knows(self.job(spec), place):
                self._submit([(place, self.job(spec))])
        return place

    def _place(self, spec: RunSpec, counted: Counter[str]) -> Path:
        name = f"{spec.run_id}-{counted[spec.run_id]}"
        counted[spec.run_id] += 1
        return self.root / name

    def done(self, place: Path) -> None:
        """It is kept, or given up: the next may be submitted."""
        self._followed = [one for one in self._followed if one != place]
        self._fill()

    @contextlib.contextmanager
    def queued(self, specs: Sequence[RunSpec]) -> Iterator[None]:
        """Have many runs queued at once while each is followed in turn; an interruption cancels
        all of them."""
        with stop_signals(None):
            try:
                self.submit(specs)
                yield
            except BaseException:
                self.cancel()
                raise
            finally:
                self._clear_logs()

    def submit(self, specs: Sequence[RunSpec]) -> list[Path]:
        """As many of them as the site wants queued; those that an earlier command has submitted
        are found again."""
        counted = self._taken.copy()
        places = [(self._place(spec, counted), self.job(spec)) for spec in specs]
        for place, job in places:
            if self.slurm.knows(job, place):
                self._followed.append(place)
            else:
                self._waiting.append((place, job))
        self._fill()
        return [place for place, _ in places if place in self._followed]

    def _fill(self) -> None:
        site = self.slurm.site
        while self._waiting and len(self._followed) < site.most_queued:
            if site.queue != "each" and self._followed:
                return  # one array, one allocation after the other
            self._submit(self._batch(self._waiting[0]))

    def _batch(self, first: tuple[Path, Job]) -> list[tuple[Path, Job]]:
        """Those that are submitted with `first`: with the same ranks and variables, in order."""
        site = self.slurm.site
        if site.queue == "each":
            return [first]
        same = [one for one in self._waiting if same_batch(one[1]) == same_batch(first[1])]
        same.sort(key=lambda one: one is not first)
        return same[: site.most_queued]

    def prepare(self, specs: Sequence[RunSpec]) -> list[str]:
        """The batch scripts that would be submitted, beside the job files that they name."""
        counted = self._taken.copy()
        self._waiting += [(self._place(spec, counted), self.job(spec)) for spec in specs]
        scripts = []
        while self._waiting:
            batch = self._written(self._batch(self._waiting[0]))
            scripts.append(self.slurm.write_script(batch).read_text(encoding="utf-8"))
        return scripts

    def _submit(self, batch: list[tuple[Path, Job]]) -> None:
        written = self._written(batch)
        self.slurm.submit(written)
        self._followed += [place for place in written.folders if place not in self._followed]

    def _written(self, batch: list[tuple[Path, Job]]) -> BatchJob:
        """Job files first: a script skips a folder without one."""
        places = tuple(place for place, _ in batch)
        for place, job in batch:
            with job_folder(place):
                files.write_text(place / JOB_FILE, codec.to_json(job))
        logs = places[0]
        if len(batch) > 1:  # a run's own folder moves when it is kept
            logs = self.root / f"queue-{secrets.token_hex(4)}"
            logs.mkdir()
        array = self.slurm.site.queue == "array" and len(batch) > 1
        self._waiting = [one for one in self._waiting if one[0] not in places]
        return BatchJob(batch[0][1], (0,), places, logs, array)

    def cancel(self) -> None:
        """Everything that is submitted and not kept; returns when nothing of it runs."""
        known = [one for place in self._followed if (one := submitted(place)) is not None]
        ids = sorted({one.id for one in known})
        self.slurm.cancel(*ids)
        self.slurm.wait_until_gone(ids)
        for place in self._followed:
            shutil.rmtree(place, ignore_errors=True)
        self._followed, self._waiting = [], []

    def _clear_logs(self) -> None:
        """Of arrays and allocations that no waiting run belongs to."""
        if not self.root.is_dir():
            return
        runs = [path for path in self.root.iterdir() if not path.name.startswith("queue-")]
        used = {Path(one.log).parent for path in runs if (one := submitted(path)) is not None}
        for folder in self.root.glob("queue-*"):
            if folder not in used:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.root.rmdir()  # only when it is empty


def described_job(place: Path) -> dict[str, str]:
    one = submitted(place) or Submitted(id="")
    return {"slurm_job": one.id, "folder": str(place)}
