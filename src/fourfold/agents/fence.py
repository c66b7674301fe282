"""One folder for a client's files: what a request names must lie in it, and whatever the code then
opens outside of it, by a link for example, is refused where it is opened."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fourfold.errors import UserError

# Fields of requests that may name a file.
FILES = {"model", "cluster", "gpu", "profile", "calibration", "log", "logs", "runs", "out", "map",
         "side", "traces", "data"}  # fmt: skip
# Events of the interpreter: files that are named, and what leaves the process.
_PATHS = {"open": 1, "os.listdir": 1, "os.scandir": 1, "os.remove": 1, "os.rmdir": 1,
          "os.mkdir": 1, "os.chmod": 1, "os.truncate": 1, "os.rename": 2, "os.link": 2,
          "os.symlink": 2, "shutil.rmtree": 1, "sqlite3.connect": 1, "os.utime": 1,
          "os.chown": 1}  # fmt: skip
_NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty",
          "socket.connect", "socket.bind", "socket.sendto", "ctypes.dlopen")  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class OutsideError(UserError):
    """A file that is not the client's to name."""


def refusal(path: str, root: Path) -> OutsideError:
    return OutsideError(
        "is outside of the folder of this server", field="file", value=path,
        hint=f"put it below {root}, or start the server with another --folder",
    )  # fmt: skip


def check(request: Any, root: Path) -> None:
    """Every name in the request that is a path, wherever it stands, lies below `root`."""
    for name in _named(request):
        if "\0" in name:
            raise refusal(name, root)
        if not _inside(root / Path(name).expanduser(), (root,)):
            raise refusal(name, root)


def _named(value: Any, field: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _named(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item, field)
    elif isinstance(value, str) and field in FILES:
        yield value


def _inside(path: Path, roots: tuple[Path, ...]) -> bool:
    """Links followed, as opening would."""
    real = Path(os.path.realpath(path))
    return any(real == root or root in real.parents for root in roots)


def confine(root: Path) -> None:
    """From now on this process opens nothing outside of `root` but its own code and data, and the
    system's facts about itself; it starts and calls nothing. There is no way back."""
    places = sysconfig.get_paths()
    code = {places[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    code |= {path for path in sys.path if path}
    ours = Path(__file__).parents[1]
    readable = (root, ours, *(Path(os.path.realpath(path)) for path in code))
    system = (*readable, Path("/proc"), Path("/sys"), Path("/dev/null"), Path("/dev/urandom"))
    os.chdir(root)
    sys.dont_write_bytecode = True  # of what is imported from now on

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in _NEVER:
            raise OutsideError(f"{event} is not for clients of this server")
        count = _PATHS.get(event)
        if count is None:
            return
        reads = event in ("os.listdir", "os.scandir") or (
            event == "open" and not (given[2] or 0) & _WRITES
        )
        for path in given[:count]:
            if isinstance(path, str | bytes | os.PathLike):
                name = os.fsdecode(path)
                if event == "sqlite3.connect":  # maybe an address of a file
                    name = name.removeprefix("file:").partition("?")[0]
                if not _inside(Path(name), system if reads else (root, Path("/dev/null"))):
                    raise refusal(name, root)

    sys.addaudithook(hook)
