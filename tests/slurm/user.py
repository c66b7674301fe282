"""The commands as a user of a cluster calls them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.slurm.local_slurm import LocalSlurm

SMALL = ["--model", "llama-tiny", "--gpus", "4", "--pp", "2", "--tp", "2", "--seq-len", "32",
         "--global-batch", "4", "--precision", "fp32", "--set", "device=cpu"]  # fmt: skip
FOREVER = "1000000"


class User:
    """Somebody on the login node, in a folder of their own, with a site of two ranks a node."""

    def __init__(self, cluster: LocalSlurm, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.env = os.environ | cluster.env | {"OMP_NUM_THREADS": "1"}
        self.site = folder / "site.toml"
        self.write_site()

    def write_site(self, **values: object) -> None:
        whole = {"gpus_per_node": 2, "ask_gpus": "no", "poll_s": 0.2, **values}
        self.site.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in whole.items()))

    def begin(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fourfold", *words, "--on", str(self.site)]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *words: str, status: int = 0) -> str:
        return self.finish(self.begin(*words), status=status)

    def finish(self, process: subprocess.Popen[str], status: int = 0) -> str:
        out, errors = process.communicate()
        assert process.returncode == status, f"{out}\n{errors}"
        return out

    def ask(self, *words: str, status: int = 0) -> Any:
        return json.loads(self.call(*words, "--format", "json", status=status))

    def runs(self) -> list[dict[str, Any]]:
        paths = sorted((self.folder / "runs").glob("*/run.json"))
        return [json.loads(path.read_text().partition("\n#")[0]) for path in paths]

    def at_work(self) -> bool:
        """Some rank of a job has done a step."""
        beats = (self.folder / "runs" / ".jobs").glob("*/beat-*.json")
        return any(_steps(path) for path in beats)

    @contextlib.contextmanager
    def node_lost_before_srun(self) -> Iterator[str]:
        """The second node dies when a job has it and before srun starts anything there; it is back
        afterwards."""
        gate, lost = self.folder / "gate", self.cluster.names[1]
        waits = f"touch {gate}-reached; until [ -e {gate} ]; do sleep 0.1; done"
        self.write_site(prelude=[waits])

        def lose() -> None:
            self.cluster.wait_for(Path(f"{gate}-reached").exists, "the job's script")
            self.cluster.kill_node(lost)
            gate.touch()

        thread = threading.Thread(target=lose)
        thread.start()
        try:
            yield lost
        finally:
            thread.join()
            self.cluster.start_node(lost)
            self.cluster.wait_for(lambda: self.cluster.ready() == 2, "the node to be back")

    def interrupt(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def taken_port(user: User) -> Iterator[int]:
    """Somebody listens on the first node at the port that the next job proposes."""
    done = user.cluster.run(["sbatch", "--parsable", "--output=/dev/null", "--wrap", "true"])
    user.cluster.wait_for(lambda: not user.cluster.jobs(), "the job to end")
    port = 20000 + (int(done) + 1) * 7 % 12000
    listen = (
        "import socket, sys\n"
        f"with socket.create_server(('', {port})):\n"
        "    print('listening', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = user.cluster.on_node(user.cluster.names[0], [sys.executable, "-c", listen])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # closes its stdin at the end
        assert process.stdout.readline() == "listening\n"
        yield port


def _steps(path: Path) -> int:
    try:
        return json.loads(path.read_text().splitlines()[0])["steps"]
    except (OSError, ValueError, LookupError):
        return 0
