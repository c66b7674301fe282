"""Files and folders of the run store: a stored run, the index of all, and who owns a work folder.

The index is a cache: an entry is believed while the run's file has the same times and size and the
cache's own sum is right. `.work/HOST-PID-TOKEN` holds `owner.json`; both name the same process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError, inside
from fourfold.result.files.stored import read_stored, seal
from fourfold.result.machine import process_born
from fourfold.result.report import RunReport
from fourfold.result.stored_run import StoredRun
from fourfold.spec import check, codec

INDEX = ".index.json"
_VERSION = 4
_FIELDS = [field.name for field in dataclasses.fields(StoredRun)]
_MOST_BYTES = 256 * 2**20  # 150,000 runs


def stamp(path: Path) -> list[int]:
    """Changes whenever the file does: nobody can set the time of its last change of state."""
    status = os.stat(path)
    return [status.st_mtime_ns, status.st_ctime_ns, status.st_size]


class RunIndex:
    """Entries by the name of a run's folder, as read; and those to write."""

    def __init__(self, root: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = root / INDEX, warn
        self._fresh: dict[str, list[Any]] = {}
        self._known = self._read()

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        try:
            data = read_stored(self.path, field="index", max_bytes=_MOST_BYTES)
        except UserError as error:
            self._warn(f"{error}; it is only a cache, runs are read from their own files")
            return {}
        runs = data.get("runs")
        if data.get("version") != _VERSION or data.get("fields") != _FIELDS:
            return {}  # of another version
        return runs if isinstance(runs, dict) else {}

    def run(self, name: str, at: list[int]) -> StoredRun | None:
        """What is known of the run `name` whose file has the stamp `at`."""
        known = self._known.get(name)
        if not isinstance(known, list) or known[:3] != at or len(known) != 4:
            return None
        with contextlib.suppress(UserError):
            return codec.decode(StoredRun, known[3]).checked()
        return None

    def add(self, name: str, at: list[int], run: StoredRun) -> None:
        self._fresh[name] = [*at, codec.encode(run, sparse=True)]

    def write(self, names: list[str]) -> None:
        """Only what is new is worth a write; a store that can only be read works without."""
        if not self._fresh:
            return
        runs = self._known | self._fresh
        listed = {name: runs[name] for name in names if name in runs}
        data = {"version": _VERSION, "fields": _FIELDS, "runs": listed}
        with contextlib.suppress(UserError):
            content = seal(json.dumps(data, separators=(",", ":")))
            files.write_bytes(self.path, content, own=True)


RUN_FILE = "run.json"
# run id, device, torch version, repeat
NAME = re.compile(r"([0-9a-f]{16})_([a-z0-9-]*)_([a-z0-9-]*)_([0-9]{1,6})\Z")


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


def key_of(report: RunReport, run_id: str = "") -> RunKey:
    """`run_id`: where it is known; working it out takes as long as the rest."""
    known = dict(report.environment)
    device, torch = known.get("device", ""), known.get("torch", "")
    return RunKey(run_id or report.spec.run_id, device, torch, report.repeat)


def run_bytes(report: RunReport) -> bytes:
    plain = {**codec.dump(report), "run_id": report.spec.run_id}
    return seal(codec.json_of(plain))


def read_run(path: Path) -> tuple[RunReport, str]:
    """A stored report and the id under which it was stored."""
    plain = read_stored(path)
    spec = plain.get("spec")
    # A stored run holds its model; a name or a path there would be read from elsewhere.
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise UserError("is not a stored run", field="run", value=str(path))
    run_id = plain.pop("run_id", None)
    with inside(path):
        report = codec.load(RunReport, plain)
    return report, str(run_id or report.spec.run_id)  # some were stored before the id was


def read_run_folder(folder: Path) -> RunReport:
    """The run kept in `folder`, which must be the one that its name says."""
    match = NAME.match(folder.name)
    if match is None or not is_folder(folder):
        raise UserError("is not the folder of a run", field="run", value=str(folder))
    report, run_id = read_run(folder / RUN_FILE)
    key = key_of(report, run_id)
    if key.name != f"{folder.name[: match.start(4)]}{int(match.group(4))}":
        rule = f"contains another run ({key.name})"
        raise UserError(rule, field="run", value=str(folder / RUN_FILE))
    return report


WORK = ".work"
OWNER_FILE = "owner.json"
_NAME = re.compile(r"(?P<host>.+)-(?P<pid>[0-9]{1,10})-[0-9a-f]{8}\Z", re.DOTALL)


def is_folder(path: Path) -> bool:
    """A folder itself, not a link to one."""
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def new_place(root: Path) -> Path:
    """A new folder to run in, marked with who works there."""
    try:
        place = _new_name(root)
        place.mkdir()
    except OSError as error:
        raise files.refused(error, root, field="runs", verb="written") from None
    _sign(place)
    return place


def adopted(root: Path, place: Path) -> Path:
    """A folder of the store as one's own work place; it must not have been another's before."""
    mine = _new_name(root)
    os.rename(place, mine)
    _sign(mine)
    return mine


def work_folder(root: Path) -> Path:
    """Return the folder that runs work in; it is made where it is missing."""
    work = root / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.refused(error, root, field="runs", verb="written") from None
    hint = "replace it by a folder"
    check.that(is_folder(work), "runs", str(work), "is a symbolic link", hint)
    return work


def _new_name(root: Path) -> Path:
    work = work_folder(root)
    return work / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _sign(place: Path) -> None:
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # To keep what another program measured, numpy is enough: the number alone tells then.
        "born": process_born(os.getpid()) if importlib.util.find_spec("psutil") else None,
    }
    files.write_bytes(place / OWNER_FILE, seal(json.dumps(owner)), own=True)


def orphans(root: Path, warn: Callable[[str], None]) -> list[Path]:
    """Work folders of this host whose owner lives no more. Other hosts' are theirs to judge."""
    work = root / WORK
    if not is_folder(work):
        if os.path.lexists(work):
            warn(f"{work} is not a plain folder; its target is left alone")
        return []
    places = [Path(entry.path) for entry in os.scandir(work)]
    return sorted(place for place in places if is_folder(place) and _orphaned(place, warn))


def _orphaned(place: Path, warn: Callable[[str], None]) -> bool:
    named = _NAME.match(place.name)
    if named is None:
        warn(f"{place} was not made by fourfold and is left alone")
        return False
    host, pid, started = named["host"], int(named["pid"]), None
    if os.path.lexists(place / OWNER_FILE):  # else killed before it was written: the name tells
        try:
            owner = read_stored(place / OWNER_FILE, field="owner")
        except UserError as error:
            owner = {"host": host, "pid": pid}
            warn(f"{error}; the folder's name tells whose it is")
        if (owner.get("host"), owner.get("pid")) != (host, pid):
            warn(f"the owner of {place} does not match its name; it is left alone")
            return False
        started = owner.get("born")
    if host != socket.gethostname():
        return False
    alive_since = process_born(pid)
    return alive_since is None or (isinstance(started, str) and started != alive_since)
