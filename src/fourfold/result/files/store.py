"""The run store: a folder per run under one root, complete or absent.

A run works in `.work/NAME` and is renamed to its key when it is over, which is atomic and fails
where the key is taken: many writers need no lock, and a repeat never overwrites.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError, inside, shorten
from fourfold.escape import one_line
from fourfold.result.files import run_file
from fourfold.result.files.stored import read_stored
from fourfold.result.job import LOG_FILES, REPORT_FILE, JobReport
from fourfold.result.report import Prediction, RunReport
from fourfold.result.stored_run import StoredRun
from fourfold.spec import codec
from fourfold.units import counted

# Written before a run starts: a prediction that outlives a killed sweep.
PREDICTED_FILE = "predicted.json"
# Work folders whose reports cannot be read: left for the user.
DAMAGED = ".damaged"
_SAY_EVERY_S = 2.0
_MOST_REPEATS = 1_000_000
# What a rank leaves behind that says why a run failed; the rest is of no use after the run.
_EXPLAINS_FAILURE = (
    "rank-*.log",
    "host*.log",
    "slurm*",
    "stack-*",
    "flight-*",
    "failure-*.json",
)


@dataclass(frozen=True, slots=True)
class Stored:
    """One run of the store: its folder's name and what its file says in short."""

    name: str
    folder: Path
    summary: StoredRun

    def report(self) -> RunReport:
        return run_file.read_run_folder(self.folder)


def _summary_of(folder: Path) -> StoredRun:
    return StoredRun.of(run_file.read_run_folder(folder), folder.name[:16])


def to_stderr(message: str) -> None:
    if sys.stderr is not None:
        print(f"warning: {one_line(message)}", file=sys.stderr)


def require_store(folder: str) -> None:
    """Refuse a folder that does not exist: 'no run store at ./runs'."""
    if not Path(folder).is_dir():
        shown = folder if os.path.isabs(folder) else f"./{os.path.normpath(folder)}"
        hint = "store a run with 'fourfold bench', or name a store's folder with --runs"
        raise UserError(f"no run store at {shorten(shown)}", hint=hint)


class Store:
    """A root folder of runs; made when the first run is kept. What is damaged is named by `warn`,
    left where it is, and never taken for a run."""

    def __init__(self, root: str | Path, *, warn: Callable[[str], None] = to_stderr) -> None:
        # Absolute: processes started for a work folder are later found by its name.
        self.root = Path(root).absolute()
        self._warned: set[str] = set()
        self._say = warn

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._say(message)

    # --- writing

    def new_work_folder(self) -> Path:
        """A new folder to run in, marked with who works there."""
        return run_file.new_place(self.root)

    def adopt(self, place: Path) -> Path:
        """Make a folder of this store one's own work place; FileNotFoundError where another process
        has done so: of several, one gets it."""
        return run_file.adopted(self.root, place)

    def work(self) -> list[Path]:
        """Work places, whosever they are."""
        with contextlib.suppress(OSError):
            return sorted(filter(run_file.is_folder, (self.root / run_file.WORK).iterdir()))
        return []

    def measuring(
        self, run_id: str, on_wait: Callable[[], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which no other process of this host measures the same run; another
        waits for its end, and says so by `on_wait`."""
        work = run_file.work_folder(self.root)
        return files.locked(work / f"{run_id}@{socket.gethostname()}", on_wait)

    def keep(self, report: RunReport, place: Path | None = None) -> Stored:
        """Give the run its key: the folder it worked in becomes the stored one."""
        place = place or self.new_work_folder()
        for repeat in self._free_repeats(report):
            report = dataclasses.replace(report, repeat=repeat)
            key = run_file.key_of(report)
            files.write_bytes(place / run_file.RUN_FILE, run_file.run_bytes(report), own=True)
            # Only now: until the run's own file is there, the job's report is the only copy.
            _tidy(place, everything=report.outcome == "ok")
            _sync(place)
            target = self.root / key.name
            try:
                os.rename(place, target)
            except OSError as error:
                if os.path.lexists(target):  # another writer took this repeat
                    continue
                raise files.refused(error, target, field="runs", verb="written") from None
            _sync(self.root)
            return Stored(key.name, target, StoredRun.of(report, key.run_id))
        raise AssertionError("repeats are unbounded")

    def _free_repeats(self, report: RunReport) -> Iterator[int]:
        key = run_file.key_of(report)
        prefix = dataclasses.replace(key, repeat=0).name.rpartition("_")[0]
        used = {
            int(match.group(4))
            for name in self._names()
            if (match := run_file.NAME.match(name)) and name.rpartition("_")[0] == prefix
        }
        first = max(used, default=-1) + 1
        yield from range(first, _MOST_REPEATS)
        yield from (repeat for repeat in range(_MOST_REPEATS) if repeat not in used)

    # --- what a stopped writer left

    def leftovers(self) -> list[Path]:
        """Work folders of this host whose owner lives no more."""
        return run_file.orphans(self.root, self._warn)

    def recover(self, place: Path) -> Stored | None:
        """Keep what a left folder holds of a finished run; set aside what cannot be read, and clear
        the rest away."""
        try:
            finished = _finished(place)
        except UserError as error:
            aside = self.root / DAMAGED / place.name
            with contextlib.suppress(OSError):
                aside.parent.mkdir(exist_ok=True)
                os.rename(place, aside)
            self._warn(f"{error}; its folder is kept as {aside}")
            return None
        if finished is not None:
            return self.keep(finished, place)
        shutil.rmtree(place, ignore_errors=True)
        return None

    # --- reading

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.name for entry in entries if run_file.NAME.match(entry.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise files.refused(error, self.root, field="runs", verb="read") from None

    def named(self, prefix: str) -> list[Stored]:
        """The few runs whose key begins so, read from their own files, in order of repeats."""
        runs = []
        for name in self._names():
            if name.startswith(prefix):
                try:
                    runs.append(Stored(name, self.root / name, _summary_of(self.root / name)))
                except UserError as error:
                    self._warn(f"skipped {name}: {error}")
        return sorted(runs, key=lambda stored: stored.summary.repeat)

    def runs(
        self, *, progress: Callable[[str], None] | None = None, unreadable: list[str] | None = None
    ) -> list[Stored]:
        """Every stored run, in the order of keys. What cannot be read is named, not dropped; in
        `unreadable` too, where it is given."""
        index = run_file.RunIndex(self.root, self._warn)
        runs: list[Stored] = []
        names = self._names()
        said_at = time.monotonic()
        for number, name in enumerate(names):
            if progress and time.monotonic() - said_at > _SAY_EVERY_S:
                said_at = time.monotonic()
                progress(f"read {number} of {counted(len(names), 'run')}")
            try:
                runs.append(Stored(name, self.root / name, self._summary(name, index)))
            except (OSError, UserError) as error:
                self._warn(f"skipped {name}: {error}")
                if unreadable is not None:
                    unreadable.append(f"{name}: {error}")
        index.write(names)
        return runs

    def _summary(self, name: str, index: run_file.RunIndex) -> StoredRun:
        folder = self.root / name
        at = run_file.stamp(folder / run_file.RUN_FILE) if run_file.is_folder(folder) else []
        known = index.run(name, at)
        if known is None or known.run_id != name[:16]:
            known = _summary_of(folder)
            index.add(name, at, known)
        return known


def _tidy(place: Path, *, everything: bool) -> None:
    """Leave the run's own file, what it was measured from, and what explains a failure."""
    patterns = (LOG_FILES, run_file.RUN_FILE, *(() if everything else _EXPLAINS_FAILURE))
    stay = {path for pattern in patterns for path in place.glob(pattern)}
    for path in set(place.iterdir()) - stay:
        if run_file.is_folder(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _finished(place: Path) -> RunReport | None:
    """A run whose report was written before its writer died; a cancelled one is not finished. An
    error where a report is there and cannot be read."""
    for report in _reports(place):
        if report.outcome != "cancelled":
            return dataclasses.replace(report, predicted=report.predicted or _predicted(place))
    return None


def _reports(place: Path) -> Iterator[RunReport]:
    """What its own file says, else the job's report."""
    if os.path.lexists(place / run_file.RUN_FILE):
        yield run_file.read_run(place / run_file.RUN_FILE)[0]
    if os.path.lexists(place / REPORT_FILE):
        with inside(place / REPORT_FILE):
            yield from codec.load(JobReport, read_stored(place / REPORT_FILE)).runs[:1]


def _predicted(place: Path) -> Prediction | None:
    try:
        return codec.load(Prediction, read_stored(place / PREDICTED_FILE))
    except UserError:  # a run without its prediction is still a run
        return None


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets folders be synced
        files.sync(folder)
