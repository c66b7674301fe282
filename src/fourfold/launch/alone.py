"""Whether others measure on this host meanwhile: then the seconds of both are too high."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_LOCK = "fourfold-measures.lock"


@contextlib.contextmanager
def measuring() -> Iterator[bool]:
    """Whether this process is the only one of the host that measures; of whichever user."""
    path = os.path.join(tempfile.gettempdir(), _LOCK)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle, is_alone = -1, True
    try:
        with contextlib.suppress(FileExistsError):  # another user's cannot be created again
            os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644))
        handle = os.open(path, flags)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_alone = False
    except OSError:  # no folder for temporary files, or one without locks: nobody can know
        pass
    try:
        yield is_alone
    finally:
        if handle >= 0:
            os.close(handle)


def said_if_not_alone(run: Callable[..., T], warn: Callable[[str], None]) -> Callable[..., T]:
    """`run`, with a word when another command measures at the same time; once is enough."""
    said: list[bool] = []

    def watched(*args: object) -> T:
        with measuring() as is_alone:
            if not is_alone and not said:
                said.append(True)
                warn("another fourfold command measures on this host: seconds of both are too high")
            return run(*args)

    return watched
