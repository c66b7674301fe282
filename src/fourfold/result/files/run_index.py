"""What did the runs of a store say when they were last read? A cache, made again when in doubt.

An entry is believed while the run's file has the same times and size and the cache's own sum is
right; everything it says has been checked like a run's own file.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.files.sealed import seal
from fourfold.result.files.stored import read_stored
from fourfold.result.read.from_run import checked
from fourfold.result.record import RUN_FIELDS, Record

INDEX = ".index.json"
_VERSION = 2
_MOST_BYTES = 256 * 2**20  # 150,000 runs


def stamp(path: Path) -> list[int]:
    """Changes whenever the file does: nobody can set the time of its last change of state."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise UserError(f"{path.name} is {kind}", hint="replace it by the run's own file")
    return [status.st_mtime_ns, status.st_ctime_ns, status.st_size]


class Index:
    """Entries by the name of a run's folder, as read; and those to write."""

    def __init__(self, root: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = root / INDEX, warn
        self._fresh: dict[str, list[Any]] = {}
        self._usable = not os.path.lexists(self.path) or _is_file(self.path)
        self._known = self._read()

    def _read(self) -> dict[str, Any]:
        if not os.path.lexists(self.path):
            return {}
        try:
            data = read_stored(self.path, field="index", max_bytes=_MOST_BYTES)
        except UserError as error:
            self._warn(f"{error}; it is only a cache, runs are read from their own files")
            return {}
        runs = data.get("runs")
        if data.get("version") != _VERSION or data.get("fields") != list(RUN_FIELDS):
            return {}  # of another version
        return runs if isinstance(runs, dict) else {}

    def record(self, name: str, at: list[int]) -> Record | None:
        """What is known of the run `name` whose file has the stamp `at`."""
        known = self._known.get(name)
        if not isinstance(known, list) or known[:3] != at or len(known) != 4:
            return None
        with contextlib.suppress(UserError, TypeError, ValueError, AttributeError):
            fields: dict[str, Any] = {**known[3], "env": tuple(map(tuple, known[3]["env"]))}
            return checked(Record(**fields))
        return None

    def add(self, name: str, at: list[int], record: Record) -> None:
        self._fresh[name] = [*at, {field: getattr(record, field) for field in RUN_FIELDS}]

    def write(self, names: list[str]) -> None:
        """Only what is new is worth a write; a store that can only be read works without."""
        if not self._fresh or not self._usable:
            return
        runs = self._known | self._fresh
        listed = {name: runs[name] for name in names if name in runs}
        data = {"version": _VERSION, "fields": RUN_FIELDS, "runs": listed}
        with contextlib.suppress(UserError):
            content = seal(json.dumps(data, separators=(",", ":")))
            files.write_bytes(self.path, content, own=True)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
