"""Runs many configurations one after the other, and stores each when it ends. Finished runs of this
machine are skipped, interrupted ones are run again; only Ctrl-C stops it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.folder import end_processes_of
from fourfold.launch.identity import number_of
from fourfold.launch.local import run_job
from fourfold.launch.permit import Permit, kind_of
from fourfold.launch.queue import Queue
from fourfold.launch.slurm import Slurm
from fourfold.result.files.store import PREDICTED_FILE, Store, Stored
from fourfold.result.files.stored import seal
from fourfold.result.job import Job
from fourfold.result.machine import MachineKey, this_machine, torch_version
from fourfold.result.report import Failure, Prediction, Remedy, RunReport
from fourfold.spec import RunSpec, codec
from fourfold.units import counted

_LOOK_S = 0.1
Say = Callable[[str], None]
# (spec, folder, say) -> the report; tests put their own here.
Runner = Callable[[RunSpec, Path, Say], RunReport]


class RunPredictor(Protocol):
    """Predicts what a run will take, and after an out-of-memory what would have fitted."""

    def predicted(self, spec: RunSpec) -> Prediction | None: ...

    def remedies(self, report: RunReport) -> tuple[Remedy, ...]: ...


@dataclass(frozen=True, slots=True)
class Done:
    """One run of the campaign; `resumed`: it was in the store already."""

    spec: RunSpec
    stored: Stored
    resumed: bool

    @property
    def outcome(self) -> str:
        return self.stored.summary.outcome


def launch_run(
    spec: RunSpec,
    folder: Path,
    say: Say,
    *,
    options: tuple[tuple[str, str], ...] = (),
    permit: Permit | None = None,
    on: Slurm | None = None,
) -> RunReport:
    job = Job(job="run", specs=(spec,), options=options)
    return run_job(job, folder, progress=say, permit=permit, on=on).runs[0]


class Campaign:
    """A store, the machine it is filled from, and what counts as finished."""

    def __init__(
        self,
        store: Store,
        *,
        runner: Runner = launch_run,
        say: Say = lambda text: None,
        again: Sequence[str] = (),
        predictor: RunPredictor | None = None,
        engine: str = "",
        unsupported: Callable[[RunSpec], str] = lambda spec: "",
        queue: Queue | None = None,
    ) -> None:
        """`engine`: whose runs they are, if not ours; in their keys it stands for torch.
        `unsupported`: why it has no settings for a run, '' where it has. `queue`: where they run,
        if not on this host."""
        self.store, self.runner, self.say = store, runner, say
        self._engine, self.unsupported, self.queue = engine, unsupported, queue
        self.predictor = predictor
        self.again = {"cancelled", *again}
        self._machines: dict[str, MachineKey] = {}

    def clear_up(self) -> list[Stored]:
        """End what a killed campaign left running; keep runs that it finished but did not store."""
        stored_runs = []
        for place in self.store.leftovers():
            ended = end_processes_of(place)
            if ended:
                self.say(f"ended {counted(ended, 'process')} of a stopped sweep")
            stored = self.store.recover(place)
            if stored is not None:
                self.say(f"kept {stored.name}, finished by a stopped sweep")
                stored_runs.append(stored)
        return stored_runs

    @contextlib.contextmanager
    def queued(self, specs: Sequence[RunSpec]) -> Iterator[None]:
        """While it lasts, runs of these specs wait for their turn in the site's queue, if any."""
        with self.queue.queued(self.supported(specs)) if self.queue else contextlib.nullcontext():
            yield

    def supported(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        return [spec for spec in specs if not self.unsupported(spec)]

    def missing(self, spec: RunSpec, repeats: int) -> int:
        return max(0, repeats - len(self.finished(spec)))

    def machine(self, spec: RunSpec) -> MachineKey:
        if self.queue is not None:  # a site's devices are known when a run has been there
            return MachineKey(self.queue.slurm.site.name, self._engine or torch_version())
        kind = kind_of(spec)
        if kind not in self._machines:
            here = this_machine(kind)
            self._machines[kind] = replace(here, torch=self._engine or here.torch)
        return self._machines[kind]

    def finished(self, spec: RunSpec) -> list[Stored]:
        """Stored runs of this spec, torch and machine, oldest first; interrupted ones are not."""
        machine = self.machine(spec)
        candidates = self.store.named(f"{spec.run_id}_")
        return [stored for stored in candidates if self._counts(stored, machine)]

    def _counts(self, stored: Stored, machine: MachineKey) -> bool:
        summary = stored.summary
        if summary.outcome in self.again:
            return False
        if self.queue is not None:
            # Torch on a site's own interpreter is known when a run has been there.
            any_torch = bool(self.queue.slurm.site.python) and not self._engine
            return self._is_ours(stored) and (any_torch or summary.torch == machine.torch)
        same_machine = summary.host == socket.gethostname() or summary.device == machine.device
        return same_machine and summary.torch == machine.torch

    def _is_ours(self, stored: Stored) -> bool:
        """Whether a run of a site is by this engine, on this site."""
        site = self.queue.slurm.site.name if self.queue else None
        known = dict(stored.report().environment)
        return (known.get("site"), known.get("engine", "")) == (site, self._engine)

    def run(self, spec: RunSpec, repeats: int = 1) -> list[Done]:
        """Until the store holds `repeats` finished runs of the spec. What another campaign of this
        host is measuring is waited for, and not measured again."""
        done = [Done(spec, stored, True) for stored in self.finished(spec)[-repeats:]]
        while len(done) < repeats:
            with self._alone(spec):
                names = {one.stored.name for one in done}
                stored = [run for run in self.finished(spec) if run.name not in names]
                new = stored[-1] if stored else self.run_new(spec)
            done.append(Done(spec, new, bool(stored)))
        return done

    def _alone(self, spec: RunSpec) -> contextlib.AbstractContextManager[None]:
        if self.queue is not None:  # which hands out each place once
            return contextlib.nullcontext()
        words = f"waiting for another command that measures the same run into {self.store.root}"
        return self.store.measuring(spec.run_id, lambda: self.say(words))

    def run_new(self, spec: RunSpec) -> Stored:
        """Once more, whatever the store has: the next repeat. One that its engine has no settings
        for is illegal."""
        if why := self.unsupported(spec):
            return self.refuse(spec, why).stored
        if self.queue is None:
            place = self.store.new_work_folder()
            return self.store.keep(self._report(spec, place), place)
        return self._follow(spec, self.queue)

    def _follow(self, spec: RunSpec, queue: Queue) -> Stored:
        """A run in the site's queue. Where another command follows it too, one of them keeps it,
        and the other has what that one stored."""
        taken = queue.take(spec, self.say)
        if taken.mine:
            try:
                report = self._report(spec, taken.place)
                place = self.store.adopt(taken.place)
            except BaseException as error:
                lost = isinstance(error, OSError | UserError) and not taken.is_there
                if not lost:
                    queue.cancel()
                    raise
            else:
                stored = self.store.keep(report, place)
                queue.done(taken.place)
                return stored
        queue.done(taken.place)
        stored = self._kept_by_another(spec, taken.number)
        if stored is None:  # given up by the other: it is still to be done
            queue.give_back(spec)
            return self._follow(spec, queue)
        return stored

    def _kept_by_another(self, spec: RunSpec, number: int) -> Stored | None:
        """What became of the folder with this number, which another command took."""
        while number:
            for stored in self.store.named(f"{spec.run_id}_"):
                if number_of(stored.folder) == number and self._is_ours(stored):
                    return stored
            if number not in map(number_of, self.store.work()):
                break
            self.clear_up()  # the other may have been killed just then
            time.sleep(_LOOK_S)
        return None

    def _report(self, spec: RunSpec, place: Path) -> RunReport:
        predicted = self.predictor.predicted(spec) if self.predictor else None
        if predicted is not None:
            content = seal(codec.to_json(predicted))
            files.write_bytes(place / PREDICTED_FILE, content, own=True)
        try:
            report = self.runner(spec, place, self.say)
        except BaseException:  # stopped by the user: an unfinished run leaves nothing
            if self.queue is None:
                shutil.rmtree(place, ignore_errors=True)
            raise
        report = replace(self._named(report), predicted=predicted)
        if report.outcome == "oom" and self.predictor is not None:
            report = replace(report, remedies=self.predictor.remedies(report))
        return report

    def refuse(self, spec: RunSpec, reason: str) -> Done:
        """An illegal run is a row too, with its reason; it needs no process."""
        for stored in self.finished(spec):
            return Done(spec, stored, True)
        failure = Failure(rank=-1, stage=0, phase="", message=reason)
        report = RunReport(spec=spec, outcome="illegal", failure=failure)
        return Done(spec, self.store.keep(self._named(report)), False)

    def _named(self, report: RunReport) -> RunReport:
        """A run that died before it could say where it was still ran on this machine."""
        machine = self.machine(report.spec)
        known = dict(report.environment)
        missing = {"device": machine.device, "torch": machine.torch, "host": socket.gethostname()}
        if self.queue is not None:
            missing |= {"host": "", "site": self.queue.slurm.site.name}
        if self._engine:
            missing["engine"] = self._engine
        return replace(report, environment=tuple(sorted({**missing, **known}.items())))
