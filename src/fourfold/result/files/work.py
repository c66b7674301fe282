"""Whose is a work folder of the store? Its owner's: a process of a host, known by its start.

`.work/HOST-PID-TOKEN` holds `owner.json`; both must name the same process. A folder that says
otherwise is left alone and named.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.files.sealed import read_stored, seal
from fourfold.result.process import born

WORK = ".work"
OWNER_FILE = "owner.json"
_NAME = re.compile(r"(?P<host>.+)-(?P<pid>[0-9]{1,10})-[0-9a-f]{8}\Z", re.DOTALL)


def is_folder(path: Path) -> bool:
    """A folder itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def new_place(root: Path) -> Path:
    """A new folder to run in, marked with who works there."""
    host = socket.gethostname()
    work = root / WORK
    place = work / f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        work.mkdir(parents=True, exist_ok=True)
        if not is_folder(work):
            raise UserError(
                "is a symbolic link", field="runs", value=str(work), hint="replace it by a folder"
            )
        place.mkdir()
    except OSError as error:
        raise files.refused(error, root, field="runs", verb="written") from None
    owner = {"host": host, "pid": os.getpid(), "born": born(os.getpid())}
    files.write_bytes(place / OWNER_FILE, seal(json.dumps(owner)), own=True)
    return place


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
    alive_since = born(pid)
    return alive_since is None or (isinstance(started, str) and started != alive_since)
