"""The host process of a release, asked for one cell after another. A host that crashes, hangs or
answers nonsense is a cell's answer too, and is started again for the next."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from typing import Any

from fourfold.conformance.cell import Cell
from fourfold.conformance.install import Release
from fourfold.installed import SOURCE_FOLDER

Told = dict[str, Any]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from fourfold.conformance.ranks.__main__ import main; main(sys.argv[2])"
)
_START_S = 300.0  # importing an engine on a busy machine
# Ranks of another start must not speak for these.
_OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Lab:
    """Answers are kept: controls of several cells are often the same."""

    def __init__(
        self, release: Release, *, device: str = "cpu", limit_s: float = 180.0, fault: str = ""
    ) -> None:
        self.release, self.device, self.limit_s, self.fault = release, device, limit_s, fault
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._known: dict[str, Told] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the lab)
        self._installed: Lab | None = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        self._log.close()
        if self._installed is not None:
            self._installed.__exit__()

    def ask(self, cell: Cell, *, seed: int = 0, size: int = 0, plant: bool = True) -> Told:
        """`plant`: with the fault that this lab was asked to break."""
        fault = self.fault if plant and cell.world > 1 else ""
        request = {"cell": "" if cell == Cell() else str(cell), "seed": seed, "size": size}
        request |= {"device": self.device, "limit_s": self.limit_s, "break": fault}
        line = json.dumps(request)
        if line not in self._known:
            self._known[line] = self._asked(line)
        return self._known[line]

    def alone(self, cell: Cell, seed: int) -> Told:
        """The control: one rank of the same model. Of an edited copy that is wrong there too, what
        the installed release does with one rank: what clears the adapter."""
        told = self.ask(cell.alone(), seed=seed, plant=False)
        if told.get("equal") or not self.release.source:
            return told
        return self.installed().ask(cell.alone(), seed=seed)

    def installed(self) -> Lab:
        """Of an edited copy, the release as it was installed."""
        if self._installed is None:
            limits = {"device": self.device, "limit_s": self.limit_s}
            self._installed = Lab(replace(self.release, source=""), **limits)
        return self._installed

    def legal(self, cell: Cell) -> bool:
        return self._asked(json.dumps({"cell": str(cell), "only_legal": True}))["end"] == "legal"

    def _asked(self, line: str) -> Told:
        if self._process is None:
            told = self._start()
            if told["end"] != "ready":
                return told | {"end": "crash"}
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        # The ranks have their own limit twice, for the reference and for the engine.
        return self._answer(3 * self.limit_s)

    def _start(self) -> Told:
        root = SOURCE_FOLDER
        command = [self.release.python, "-P", "-c", _BOOT, root, str(self.release.adapter_path)]
        env = {name: value for name, value in os.environ.items() if name not in _OUTER}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        env["PYTHONPATH"] = self.release.source
        # Engines ask whether there is CUDA while they load: no, on CPU; and not by starting it,
        # which ranks forked afterwards could not use.
        env |= {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            start_new_session=True,
        )
        self._unread = b""
        return self._answer(_START_S)

    def _answer(self, limit_s: float) -> Told:
        """One line of the host; what is no answer ends it."""
        assert self._process is not None
        assert self._process.stdout is not None
        until, pipe = time.monotonic() + limit_s, self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            more = os.read(pipe, 65536) if ready else b""
            if not more:
                why = self._last_words() if ready else f"no answer within {limit_s:g} s"
                self.end()
                return {"end": "crash" if ready else "hang", "why": why}
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            told = json.loads(line)
            if not isinstance(told, dict) or "end" not in told:
                raise ValueError
        except ValueError:
            self.end()
            return {"end": "crash", "why": f"the host answered {line[:80]!r}"}
        return told

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        lines = self._log.read().decode(errors="replace").splitlines()
        said = [line for line in lines if line.strip() and not line.startswith(" ")]
        return f"the host ended: {said[-1][:200] if said else 'no words'}"

    def end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        self._process = None
