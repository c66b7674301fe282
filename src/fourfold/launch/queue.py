"""Runs of a store under Slurm: submitted many at a time, followed one by one. A run works in
`.jobs/RUN-WORK-N` of the store until it is kept, named by its spec and by what is done for it on
which site, so the same command finds it again after a logout. Of several commands that find it one
follows it, and the others wait for what it stores."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.batch_script import BatchJob, same_batch
from fourfold.launch.command import stop_signals
from fourfold.launch.folder import job_folder
from fourfold.launch.identity import Claim, ScriptFolders, claim, number_of
from fourfold.launch.slurm import Slurm, has_run, script_of, submitted
from fourfold.result.job import JOB_FILE, Job
from fourfold.spec import RunSpec, codec

JOBS = ".jobs"
_LOOK_S, _SAY_EVERY_S = 0.2, 2.0
_ANY_PLACE = Path("/place")  # for what is the same wherever a run works


@dataclass(frozen=True, slots=True)
class Work:
    """What a run's folder gets before it is submitted: its job, and other files by name."""

    job: Job
    files: Mapping[str, str] = field(default_factory=dict)


# (spec, folder) -> what is submitted for it there
Make = Callable[[RunSpec, Path], Work]


@dataclass(frozen=True, slots=True)
class Taken:
    """A run's folder, and its number under whatever name; not `mine`: another command has kept it
    or given it up."""

    place: Path
    number: int
    mine: bool

    @property
    def is_there(self) -> bool:
        return number_of(self.place) == self.number


class Queue:
    """`make` says what is submitted for a run; a `Slurm` says where it goes."""

    def __init__(self, root: Path, slurm: Slurm, make: Make) -> None:
        self.root, self.slurm, self.make = root / JOBS, slurm, make
        self._taken: Counter[str] = Counter()  # by name, as are their places in order
        self._places: dict[str, list[Path]] = {}
        self.waiting: list[tuple[Path, Work]] = []  # not submitted yet
        self._followed: dict[Path, Claim] = {}
        self._mine: set[Path] = set()  # submitted by this command
        self._scripts = ScriptFolders(self.root)

    def take(self, spec: RunSpec, say: Callable[[str], None] = lambda text: None) -> Taken:
        """The folder of the next run of the spec; it is submitted when this returns. Waits while
        another command follows it."""
        place = self._place(spec, self._taken)
        mine = next((one for one in self.waiting if one[0] == place), None)
        if mine is not None:
            self._submit(self._batch(mine))
        elif place not in self._followed:
            work = self.make(spec, place)
            if not self._finds(place, work.job) and not self._is_followed_elsewhere(place):
                self._submit([(place, work)])
        if place in self._followed:
            return Taken(place, self._followed[place].number, True)
        return self._wait(place, say)

    def _wait(self, place: Path, say: Callable[[str], None]) -> Taken:
        number, said_at = number_of(place), time.monotonic()
        while number and number_of(place) == number:
            with contextlib.suppress(FileNotFoundError):
                if (own := claim(place)) is not None:  # whoever followed it is gone
                    self._followed[place] = own
                    return Taken(place, own.number, True)
            if time.monotonic() - said_at > _SAY_EVERY_S:
                said_at = time.monotonic()
                say("another command follows this run")
            time.sleep(_LOOK_S)
        return Taken(place, number, False)

    def give_back(self, spec: RunSpec) -> None:
        """Nothing came of the run that was taken last: the next one takes its place."""
        self._taken[self._name(spec)] -= 1

    def _finds(self, place: Path, job: Job) -> bool:
        """Whether an earlier command has submitted it; it is followed here from now on, unless by
        another command."""
        if not self.slurm.knows(job, place):
            return False
        with contextlib.suppress(FileNotFoundError):
            own = claim(place)
            if own is not None:
                self._followed[place] = own
            return True
        return False

    def _is_followed_elsewhere(self, place: Path) -> bool:
        """Else it is made, and claimed by this command."""
        place.mkdir(parents=True, exist_ok=True)
        own = claim(place)
        if own is not None:
            self._followed[place] = own
        return own is None

    def _place(self, spec: RunSpec, counted: Counter[str]) -> Path:
        """Those that are submitted come first, whatever their numbers; then free ones."""
        name = self._name(spec)
        if name not in self._places:
            self._places[name] = self._known(name, spec)
        places, number = self._places[name], 0
        while len(places) <= counted[name]:
            place = self.root / f"{name}-{number}"
            number += 1
            if place not in places:
                places.append(place)
        counted[name] += 1
        return places[counted[name] - 1]

    def _name(self, spec: RunSpec) -> str:
        """Another engine, template or site works elsewhere for the same spec."""
        whole = f"{self.slurm.site.name}\n{codec.to_json(self.make(spec, _ANY_PLACE).job)}"
        return f"{spec.run_id}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"

    def _known(self, name: str, spec: RunSpec) -> list[Path]:
        numbers = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            own, _, number = path.name.rpartition("-")
            if own == name and number.isdecimal():
                numbers.append((int(number), path))
        places = [path for _, path in sorted(numbers)]
        return [one for one in places if self.slurm.knows(self.make(spec, one).job, one)]

    def done(self, place: Path) -> None:
        """It is kept, or given up: the next may be submitted."""
        own = self._followed.pop(place, None)
        if own is not None:
            own.release()
        self._fill()

    @contextlib.contextmanager
    def queued(self, specs: Sequence[RunSpec]) -> Iterator[None]:
        """Have many runs queued at once while each is followed in turn; an interruption cancels
        those that this command has submitted."""
        with stop_signals(None):
            try:
                self.submit(specs)
                yield
            except BaseException:
                self.cancel()
                raise
            finally:
                self._release()
                self._clear_up()

    def submit(self, specs: Sequence[RunSpec]) -> list[Path]:
        """As many of them as the site wants queued; those that an earlier command has submitted
        are found again."""
        counted = self._taken.copy()
        places = [(place := self._place(spec, counted), self.make(spec, place)) for spec in specs]
        found = [place for place, work in places if self._finds(place, work.job)]
        self.waiting += [one for one in places if one[0] not in found]
        self._fill()
        return [place for place, _ in places if place in found or place in self._followed]

    def detach(self, specs: Sequence[RunSpec]) -> list[Path]:
        """Leave them to the scheduler: nobody follows them."""
        places = self.submit(specs)
        self._release()
        return places

    def _fill(self) -> None:
        site = self.slurm.site
        most = site.most_queued if site.queue == "each" else 1  # array or allocation at a time
        while self.waiting and sum(not has_run(place) for place in self._followed) < most:
            self._submit(self._batch(self.waiting[0]))

    def _batch(self, first: tuple[Path, Work]) -> list[tuple[Path, Work]]:
        """Those that are submitted with `first`: with the same ranks and variables, in order."""
        site = self.slurm.site
        if site.queue == "each":
            return [first]
        alike = same_batch(first[1].job)
        same = [one for one in self.waiting if same_batch(one[1].job) == alike]
        same.sort(key=lambda one: one is not first)
        return same[: site.most_queued]

    def prepare(self, specs: Sequence[RunSpec]) -> list[str]:
        """The batch scripts that would be submitted, beside the job files that they name; of a run
        that is submitted, the script that was."""
        counted, scripts = self._taken.copy(), []
        for spec in specs:
            place = self._place(spec, counted)
            work = self.make(spec, place)
            if self.slurm.knows(work.job, place):
                scripts.append(script_of(place))
            else:
                self.waiting.append((place, work))
        try:
            while self.waiting:
                batch = self._batch(self.waiting[0])
                written = self._written(batch)
                if written is None:
                    rule, hint = "is followed by another command", "wait for it, or stop it"
                    raise UserError(rule, field="run", value=str(batch[0][0]), hint=hint)
                scripts.append(files.read_own_text(self.slurm.write_script(written)))
                self._scripts.release()
        finally:
            self._release()
        return list(dict.fromkeys(scripts))  # runs may share one

    def _submit(self, batch: list[tuple[Path, Work]]) -> None:
        written = self._written(batch)
        if written is not None:
            self.slurm.submit(written)
            self._mine.update(written.folders)
            self._scripts.release()

    def _written(self, batch: list[tuple[Path, Work]]) -> BatchJob | None:
        """Job files first: a script skips a folder without one. Runs that another command follows
        are left out; None where nothing remains."""
        places = [place for place, _ in batch]
        self.waiting = [one for one in self.waiting if one[0] not in places]
        batch = [
            (place, work)
            for place, work in batch
            if place in self._followed or not self._is_followed_elsewhere(place)
        ]
        if not batch:
            return None
        for place, work in batch:
            self._require_idle(place)
            with job_folder(place):
                for name, text in work.files.items():
                    (place / name).parent.mkdir(exist_ok=True)
                    files.write_text(place / name, text)
                files.write_text(place / JOB_FILE, codec.to_json(work.job))
        logs = batch[0][0]
        if len(batch) > 1:  # a run's own folder moves when it is kept
            logs = self._scripts.new()
        array = self.slurm.site.queue == "array" and len(batch) > 1
        folders = tuple(place for place, _ in batch)
        return BatchJob(batch[0][1].job, (0,), folders, logs, array)

    def _require_idle(self, place: Path) -> None:
        """A folder is never emptied while a job works there."""
        known = submitted(place)
        if known is not None and self.slurm.is_living(known.id):
            rule, hint = f"works in {place}", f"wait for it, or scancel {known.id}"
            raise UserError(f"Slurm job {known.id} {rule}", hint=hint)

    def cancel(self) -> None:
        """What this command has submitted and what has not run to its end; returns when nothing of
        it runs. Finished runs and jobs of earlier commands are there for the next one."""
        known = {place: submitted(place) for place in self._followed if not has_run(place)}
        mine = {place: one for place, one in known.items() if one is None or place in self._mine}
        ids = sorted({one.id for one in mine.values() if one is not None})
        self.slurm.cancel(*ids)
        self.slurm.wait_until_gone(ids)
        for place in mine:
            shutil.rmtree(place, ignore_errors=True)
        self._release()
        self.waiting = []

    def _release(self) -> None:
        for own in self._followed.values():
            own.release()
        self._followed = {}
        self._scripts.release()

    def _clear_up(self) -> None:
        self._scripts.clear()
        with contextlib.suppress(OSError):
            self.root.rmdir()  # only when it is empty
