"""Folders of scripts that start several runs, beside those of the runs. One that no run names any
more is cleared away; one that is being made is held by a lock until its runs name it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from pathlib import Path

from fourfold.launch.claim import Claim, claim
from fourfold.launch.slurm import logs_of

_PREFIX = "queue-"


class ScriptFolders:
    """Of the queue in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: list[Claim] = []

    def new(self) -> Path:
        """Held until `release`."""
        while True:
            folder = self._root / f"{_PREFIX}{secrets.token_hex(4)}"
            folder.mkdir(parents=True)
            with contextlib.suppress(FileNotFoundError):  # cleared away before it was locked
                if (own := claim(folder)) is not None:
                    self._held.append(own)
                    return folder

    def release(self) -> None:
        """Their runs name them now."""
        for own in self._held:
            own.release()
        self._held = []

    def clear(self) -> None:
        for folder in self._root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                own = claim(folder)
                if own is not None:
                    if not self._is_named(folder):
                        shutil.rmtree(folder, ignore_errors=True)
                    own.release()

    def _is_named(self, folder: Path) -> bool:
        """Looked up when it is locked: whoever made it may have released it just then."""
        runs = [path for path in self._root.iterdir() if not path.name.startswith(_PREFIX)]
        return any(logs_of(path) == folder for path in runs)
