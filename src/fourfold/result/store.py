"""Where are runs kept? A folder per run under one root, complete or not there at all.

A run works in `.work/NAME` and is renamed to its key when it is over: run id, device, torch version
and repeat. Renaming a folder is atomic, also on shared file systems, and fails where the key is
taken: many writers need no lock, and a repeat never overwrites. `.index.json` is a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.job import REPORT_FILE, JobReport
from fourfold.result.prediction import Prediction
from fourfold.result.report import RunReport
from fourfold.result.summary import Summary, summarise
from fourfold.spec import codec

RUN_FILE = "run.json"
# Written before a run starts: a prediction that outlives a killed sweep.
PREDICTED_FILE = "predicted.json"
WORK = ".work"
INDEX = ".index.json"
_INDEX_VERSION = 1
_FIELDS = tuple(field.name for field in dataclasses.fields(Summary))
_OWNER = "owner.json"
_SAY_EVERY_S = 2.0
# run id, device, torch version, repeat
_NAME = re.compile(r"([0-9a-f]{16})_([a-z0-9-]*)_([a-z0-9-]*)_([0-9]{1,6})\Z")
# What a rank leaves behind that says why a run failed; the rest is of no use after the run.
_KEPT = ("rank-*.log", "host.log", "stack-*", "flight-*", "failure-*.json")


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48]


@dataclass(frozen=True, slots=True)
class RunKey:
    run_id: str
    device: str
    torch: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.run_id}_{slug(self.device)}_{slug(self.torch)}_{self.repeat}"


def key_of(report: RunReport) -> RunKey:
    known = dict(report.environment)
    return RunKey(
        report.spec.run_id, known.get("device", ""), known.get("torch", ""), report.repeat
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """One run of the store: its folder's name and what its file says in short."""

    name: str
    folder: Path
    summary: Summary

    def report(self) -> RunReport:
        return codec.from_json(RunReport, files.read_text(self.folder / RUN_FILE, field="run"))


class Store:
    """A root folder of runs; made when the first run is kept."""

    def __init__(self, root: str | Path) -> None:
        # Absolute: processes started for a work folder are later found by its name.
        self.root = Path(root).absolute()

    # --- writing

    def workplace(self) -> Path:
        """A new folder to run in, marked with who works there."""
        place = self.root / WORK / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            place.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"cannot be written ({error.strerror})",
                field="runs",
                value=str(self.root),
                way_out="name another folder with --runs",
            ) from None
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid())}
        files.write_text(place / _OWNER, json.dumps(owner) + "\n")
        return place

    def keep(self, report: RunReport, place: Path | None = None) -> Stored:
        """Give the run its key: the folder it worked in becomes the stored one."""
        place = place or self.workplace()
        for repeat in self._free_repeats(report):
            report = dataclasses.replace(report, repeat=repeat)
            key = key_of(report)
            files.write_text(place / RUN_FILE, codec.to_json(report))
            # Only now: until the run's own file is there, the job's report is the only copy.
            _tidy(place, everything=report.outcome == "ok")
            _sync(place)
            target = self.root / key.name
            try:
                os.rename(place, target)
            except OSError:
                if target.exists():  # another writer took this repeat
                    continue
                raise
            _sync(self.root)
            plain = codec.dump(report)
            return Stored(key.name, target, summarise(plain, report.spec.run_id))
        raise AssertionError("repeats are unbounded")

    def _free_repeats(self, report: RunReport) -> Iterator[int]:
        key = key_of(report)
        prefix = dataclasses.replace(key, repeat=0).name.rpartition("_")[0]
        used = [
            int(match.group(4))
            for name in self._names()
            if (match := _NAME.match(name)) and name.rpartition("_")[0] == prefix
        ]
        repeat = max(used, default=-1) + 1
        while True:
            yield repeat
            repeat += 1

    # --- what a stopped writer left

    def leftovers(self) -> list[Path]:
        """Work folders of this host whose owner lives no more. Other hosts' are theirs to judge."""
        work = self.root / WORK
        if not work.is_dir():
            return []
        return sorted(place for place in work.iterdir() if place.is_dir() and _orphaned(place))

    def recover(self, place: Path) -> Stored | None:
        """Keep what a left folder holds of a finished run; else clear it away."""
        finished = _finished(place)
        if finished is not None:
            return self.keep(finished, place)
        shutil.rmtree(place, ignore_errors=True)
        return None

    # --- reading

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.name for entry in entries if _NAME.match(entry.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"cannot be read ({error.strerror})", field="runs", value=str(self.root)
            ) from None

    def named(self, prefix: str) -> list[Stored]:
        """The few runs whose key begins so, read from their own files, in order of repeats."""
        found = []
        for name in self._names():
            if name.startswith(prefix):
                with contextlib.suppress(OSError, ValueError):
                    plain = json.loads((self.root / name / RUN_FILE).read_bytes())
                    found.append(Stored(name, self.root / name, summarise(plain, name[:16])))
        return sorted(found, key=lambda stored: stored.summary.repeat)

    def runs(
        self,
        *,
        progress: Callable[[str], None] | None = None,
        unreadable: list[str] | None = None,
    ) -> list[Stored]:
        """Every stored run, in the order of keys. What cannot be read is named, not dropped."""
        index = _read_index(self.root / INDEX)
        fresh: dict[str, list[Any]] = {}
        found: list[Stored] = []
        names = self._names()
        said_at = time.monotonic()
        for number, name in enumerate(names):
            folder = self.root / name
            if progress and time.monotonic() - said_at > _SAY_EVERY_S:
                said_at = time.monotonic()
                progress(f"read {number} of {len(names)} runs")
            try:
                stat = os.stat(folder / RUN_FILE)
                stamp = [stat.st_mtime_ns, stat.st_size]
                known = index.get(name)
                if known is not None and known[:2] == stamp:
                    summary = _summary_from(known[2])
                else:
                    plain = json.loads((folder / RUN_FILE).read_bytes())
                    summary = summarise(plain, name[:16])
                    fresh[name] = [*stamp, {field: getattr(summary, field) for field in _FIELDS}]
            except (OSError, ValueError, TypeError) as error:
                if unreadable is not None:
                    unreadable.append(f"{name}: {error}")
                continue
            found.append(Stored(name, folder, summary))
        if fresh:
            _write_index(self.root / INDEX, names, index | fresh)
        return found


def _summary_from(plain: dict[str, Any]) -> Summary:
    fields: dict[str, Any] = {**plain, "env": tuple(map(tuple, plain["env"]))}
    return Summary(**fields)


def _read_index(path: Path) -> dict[str, list[Any]]:
    """Empty when it is missing, of another version or damaged: it can always be made again."""
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != _INDEX_VERSION or data["fields"] != list(_FIELDS):
            return {}
        return data["runs"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_index(path: Path, names: list[str], runs: dict[str, list[Any]]) -> None:
    listed = {name: runs[name] for name in names if name in runs}
    data = {"version": _INDEX_VERSION, "fields": _FIELDS, "runs": listed}
    with contextlib.suppress(UserError):  # a store that can only be read works without a cache
        files.write_text(path, json.dumps(data, separators=(",", ":")))


def _tidy(place: Path, *, everything: bool) -> None:
    """Leave the run's own file, and what explains a failure."""
    kept = set() if everything else {path for pattern in _KEPT for path in place.glob(pattern)}
    kept.add(place / RUN_FILE)
    for path in place.iterdir():
        if path in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _finished(place: Path) -> RunReport | None:
    """A run whose report was written before its writer died; a cancelled one is not finished."""
    for name, kind in ((RUN_FILE, RunReport), (REPORT_FILE, JobReport)):
        try:
            found = codec.from_json(kind, (place / name).read_text(encoding="utf-8"))
        except (OSError, UserError):
            continue
        report = found if isinstance(found, RunReport) else next(iter(found.runs), None)
        if report is not None and report.outcome != "cancelled":
            return dataclasses.replace(report, predicted=report.predicted or _predicted(place))
    return None


def _predicted(place: Path) -> Prediction | None:
    try:
        return codec.from_json(Prediction, (place / PREDICTED_FILE).read_text(encoding="utf-8"))
    except (OSError, UserError):
        return None


def _orphaned(place: Path) -> bool:
    owner: dict[str, Any]
    try:
        owner = json.loads((place / _OWNER).read_bytes())
    except (OSError, ValueError):
        # Killed between making the folder and writing its owner: the name still tells.
        host, _, rest = place.name.rpartition("-")[0].rpartition("-")
        owner = {"host": host, "pid": int(rest) if rest.isdecimal() else 0, "born": None}
    if owner.get("host") != socket.gethostname():
        return False
    born = _born(int(owner.get("pid", 0)))
    return born is None or (owner.get("born") is not None and owner["born"] != born)


def _born(pid: int) -> str | None:
    """When a living process was started, as the system counts; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        pass
    if os.path.isdir("/proc/self"):
        return None
    try:  # no /proc: only whether it lives
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return None
    return "alive"


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets folders be synced
        files.sync(folder)
