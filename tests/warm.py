"""Processes of tests that need torch, forked from one that has imported it: a start takes a tenth
of a second of a core instead of four. They run the same code as those that Python starts, with a
parent, a session, signals and streams of their own.

`Popen` and `run` stand for those of subprocess; what can't be forked (another interpreter, a
`preexec_fn`, variables that torch reads when imported) is started as ever. Workers that this
process starts as a launcher, by `main([...])` or `run_job`, are forked too (conftest.py), as are
those of a command that was. `@pytest.mark.cold_start`: the start itself is what a test is about."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
# What torch and its libraries read when they are imported.
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "CUDA_", "GLOO_", "LD_")
_SET_BY_LAUNCHER = {"TORCH_FR_BUFFER_SIZE": "2000", "GLOO_SOCKET_IFNAME": "lo"}
_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST_BYTES = 1 << 20
FOURFOLD = (sys.executable, "-m", "fourfold")


def command(*words: str) -> list[str]:
    """`fourfold WORDS`, for `run` and `Popen`."""
    return [*FOURFOLD, *words]


def _read_at_import(env: dict[str, str]) -> dict[str, str]:
    read = {name: value for name, value in env.items() if name.startswith(_READ_AT_IMPORT)}
    return _SET_BY_LAUNCHER | read


def _program(args: Any) -> list[str] | None:
    """`-m MODULE WORD...` or `FILE WORD...`; None for anything but this interpreter."""
    if not isinstance(args, list) or args[:1] != [sys.executable]:
        return None
    words = [str(word) for word in args[1:]]
    words = words[1:] if words[:1] == ["-P"] else words
    return words if words[:1] == ["-m"] or (words[:1] and words[0].endswith(".py")) else None


class Popen(subprocess.Popen):
    """As subprocess has it; only the making of the process differs."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, pass_fds, cwd, env = rest[:4]
        pipes = rest[7:13]
        program = _program(args)
        wanted = dict(os.environ if env is None else env)
        if (
            program is None
            or preexec_fn is not None
            or pass_fds
            or (origin := _origin()) is None
            or origin.variables != _read_at_import(wanted)
        ):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        ends = enumerate((pipes[0], pipes[3], pipes[5]))
        streams = [ours if theirs == -1 else theirs for ours, theirs in ends]
        where = os.fspath(cwd) if cwd is not None else os.getcwd()
        request = {"program": program, "env": wanted, "cwd": where, "session": bool(rest[-2])}
        self.pid = origin.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(args: Any, **how: Any) -> subprocess.CompletedProcess[Any]:
    """As subprocess.run, with the few of its arguments that tests use."""
    timeout, check, text = how.pop("timeout", None), how.pop("check", False), how.pop("input", None)
    if how.pop("capture_output", False):
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if text is not None:
        how["stdin"] = subprocess.PIPE
    with Popen(args, **how) as process:
        try:
            out, err = process.communicate(text, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# What launchers get in place of the module.
SUBPROCESS = SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)


class _Here:
    """This process has torch itself, and is itself a fork: a command that starts its worker."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become(request, streams)
        return pid


class _Source:
    """The process that has imported torch, and forks on request."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.variables = _read_at_import(dict(os.environ))
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, **self.variables, "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=theirs, env=env, start_new_session=True
        )
        theirs.close()
        self._socket, self._lock = ours, threading.Lock()

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """The process is ours to wait for: its own parent ends at once, and we adopt it."""
        text = json.dumps(request | {"launcher": os.getpid()}).encode()
        assert len(text) < _MAX_REQUEST_BYTES
        with self._lock, _adopting():
            socket.send_fds(self._socket, [len(text).to_bytes(4)], streams)
            self._socket.sendall(text)
            said = _exactly(self._socket, 4)
        return int.from_bytes(said)

    def end(self) -> None:
        self._socket.close()
        self.process.wait()


_at: _Source | _Here | None = None


def _origin() -> _Source | _Here | None:
    global _at
    if _at is None and importlib.util.find_spec("torch") is not None and sys.platform == "linux":
        _at = _Source()
    return _at


def end() -> None:
    global _at
    if isinstance(_at, _Source):
        _at.end()
    _at = None


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _exactly(connection: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        more = connection.recv(count - len(said))
        if not more:
            raise EOFError("the process that starts others is gone")
        said += more
    return said


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """The rest of a forked process's life: the program, as `python` runs it."""
    code = 1
    try:
        if request["session"]:
            os.setsid()
        kept = [os.dup(stream) for stream in streams]
        for number, stream in enumerate(kept):
            os.dup2(stream, number)
        os.closerange(3, 1024)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            for number, mode, buffering, errors in (
                (0, "r", -1, "surrogateescape"),
                (1, "w", 1, "strict"),
                (2, "w", 1, "backslashreplace"),
            )
        )
        code = _run_program(request["program"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1 if leaving.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _run_program(words: list[str]) -> int:
    if words[0] == "-m":
        module, *sys.argv[1:] = words[1:]
        sys.argv[0] = module
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _fork_orphan(request: dict[str, Any], streams: list[int], connection: socket.socket) -> None:
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    while os.getppid() != request["launcher"]:  # until the process between has ended
        time.sleep(0.001)
    connection.sendall(os.getpid().to_bytes(4))
    global _at
    _at = _Here(_read_at_import(dict(os.environ)))
    from fourfold.launch import ranks

    ranks.subprocess = SUBPROCESS
    _become(request, streams)


def _serve(connection: socket.socket) -> None:
    while True:
        said, streams, _, _ = socket.recv_fds(connection, 4, 3)
        if not said:
            return
        said += _exactly(connection, 4 - len(said)) if len(said) < 4 else b""
        request = json.loads(_exactly(connection, int.from_bytes(said)))
        _fork_orphan(request, streams, connection)
        for stream in streams:
            os.close(stream)


def _import_all() -> None:
    import torch  # noqa: F401

    import fourfold.cli  # noqa: F401
    from fourfold import commands
    from fourfold.engine import compat, jobs

    for package in (jobs, commands):
        for path in sorted(Path(package.__path__[0]).glob("[a-z]*.py")):
            importlib.import_module(f"{package.__name__}.{path.stem}")
    compat.import_dynamo()
    gc.freeze()


if __name__ == "__main__":
    sys.modules["tests.warm"] = sys.modules["__main__"]
    _import_all()
    _serve(socket.socket(fileno=os.dup(0)))
