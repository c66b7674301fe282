"""A Slurm cluster of several nodes on one Debian machine, for tests.

Plain processes: a munged of its own, one slurmctld, one slurmd a node. Each node has a network
namespace, an address and a host name of its own where the machine allows that (root, namespaces),
else all are on the loopback device, by the addresses 127.0.S.N. Several clusters can live beside
each other, each in its own slot S. `python tests/slurm/local_slurm.py FOLDER` starts one to try
things by hand, and stops it on Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_SLOTS, _PORT = 200, 17000
# Long enough for a machine on which everything else runs too; only a broken one reaches them.
_START_S, _STOP_S = 180.0, 60.0
_CONF = (Path(__file__).parent / "slurm.conf").read_text()


def why_not() -> str:
    """Why no cluster can be started here; '' where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    packages = "slurmctld, slurmd, slurm-client and munge"
    return f"needs Debian's {packages} ({', '.join(missing)} missing)" if missing else ""


class LocalSlurm:
    """`spaced`: every node has a network of its own."""

    def __init__(self, root: Path, *, nodes: int = 2, cpus: int = 8) -> None:
        self.root, self.cpus = root, cpus
        self.slot, self._holder = _free_slot()
        self.spaced = os.geteuid() == 0 and _namespaces_work()
        self.port = _PORT + 10 * self.slot
        self.subnet = f"10.179.{self.slot}" if self.spaced else f"127.0.{self.slot}"
        self.addresses = [f"{self.subnet}.{i + 1}" for i in range(nodes)]
        self.names = [f"ff{self.slot}n{i + 1}" for i in range(nodes)]
        self._numbers = f"[1-{nodes}]" if nodes > 1 else "1"
        if not self.spaced:  # nobody may write /etc/hosts, so nodes are named by their addresses
            self.names = self.addresses

    @property
    def kind(self) -> str:
        return "a network namespace for each node" if self.spaced else "all nodes on loopback"

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": _PATH}

    def start(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        for name in ("state", *(f"spool-{node}" for node in self.names)):
            (self.root / name).mkdir(exist_ok=True)
        self._configure()
        if self.spaced:
            self._make_network()
        self._munged()
        self._run(["slurmctld", "-c", "-f", str(self.root / "slurm.conf")])
        for node in self.names:
            self.start_node(node)
        self.wait_for(lambda: self.ready() == len(self.names), "nodes to be ready")

    def _configure(self) -> None:
        prefix = f"ff{self.slot}n" if self.spaced else f"{self.subnet}."
        nodes = f"NodeAddr={self.subnet}.{self._numbers} Port={self.port + 1}"
        if not self.spaced:  # a slurmd listens on all addresses
            last = self.port + len(self.names)
            nodes = f"NodeHostname={_short_name()} {nodes}" + (
                f"-{last}" if last > self.port + 1 else ""
            )
        (self.root / "slurm.conf").write_text(
            _CONF.format(
                controller=_short_name(),
                address=f"{self.subnet}.254",
                port=self.port,
                root=self.root,
                user=getpass.getuser(),
                names=f"{prefix}{self._numbers}",
                nodes=nodes,
                cpus=self.cpus,
            )
        )
        key = self.root / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))

    def _munged(self) -> None:
        words = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munge.seed",
        }
        files = [f"--{name}={self.root / file}" for name, file in words.items()]
        self._run(["munged", "--force", *files])

    def _make_network(self) -> None:
        """Nodes on a bridge; their names, by which a job finds its first node, in /etc/hosts."""
        with _hosts_file() as lines:
            for address, name in zip(self.addresses, self.names, strict=True):
                lines.append(f"{address} {name} {self._mark}")
        bridge = self._bridge
        self._run(["ip", "link", "add", bridge, "type", "bridge"])
        self._run(["ip", "addr", "add", f"{self.subnet}.254/24", "dev", bridge])
        self._run(["ip", "link", "set", bridge, "up"])
        for i, (address, name) in enumerate(zip(self.addresses, self.names, strict=True)):
            own = f"ffv{self.slot}-{i}"
            self._run(["ip", "netns", "add", name])
            self._run(["ip", "link", "add", own, "type", "veth", "peer", "name", "eth0",
                       "netns", name])  # fmt: skip
            self._run(["ip", "link", "set", own, "master", bridge, "up"])
            self._run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0"])
            self._run(["ip", "-n", name, "link", "set", "lo", "up"])
            self._run(["ip", "-n", name, "link", "set", "eth0", "up"])

    @property
    def _bridge(self) -> str:
        return f"ffbr{self.slot}"

    @property
    def _mark(self) -> str:
        return f"# fourfold test cluster {self.slot}"

    def start_node(self, name: str) -> None:
        slurmd = ["slurmd", "-f", str(self.root / "slurm.conf"), "-N", name]
        if self.spaced:  # not `ip netns exec`: it hides the mounts that slurmd looks for
            named = ["sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", name, *slurmd]
            slurmd = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", *named]
        self._run(slurmd)

    def on_node(self, name: str, command: list[str]) -> list[str]:
        """As a process in the network of this node, beside Slurm."""
        return ["nsenter", f"--net=/run/netns/{name}", *command] if self.spaced else command

    def kill_node(self, name: str) -> None:
        """As by a power cut: its daemon and whatever that started, all at once."""
        daemon = [pid] if (pid := self._pid(f"slurmd-{name}")) else []
        _kill([*daemon, *self._processes_of(name)], signal.SIGKILL)

    def _processes_of(self, name: str) -> list[int]:
        """By its network or, on loopback, by the variable that Slurm sets for what it starts."""
        if self.spaced:
            space = os.stat(f"/run/netns/{name}").st_ino
            return [pid for pid in _pids() if _network(pid) == space]
        variable = f"SLURMD_NODENAME={name}".encode()
        started = [pid for pid in _pids() if variable in _read(pid, "environ").split(b"\0")]
        parents = {_parent(pid) for pid in started}
        steps = [pid for pid in parents if b"slurmstepd" in _read(pid, "cmdline")]
        return [*steps, *started]

    def ready(self) -> int:
        states = self.run(["sinfo", "-h", "-N", "-o", "%t"]).split()
        return sum(state in ("idle", "mix", "alloc") for state in states)

    def wait_for(self, done: Callable[[], bool], what: str, at_most_s: float = _START_S) -> None:
        until = time.monotonic() + at_most_s
        while not done():
            if time.monotonic() > until:
                log = (self.root / "slurmctld.log").read_text()[-3000:]
                raise RuntimeError(f"waited {at_most_s:g} s for {what}:\n{log}")
            time.sleep(0.1)

    def run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, env=os.environ | self.env, capture_output=True, text=True, timeout=120
        )
        return done.stdout.strip()

    def _run(self, command: list[str]) -> None:
        environment = os.environ | self.env
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")

    def jobs(self) -> list[str]:
        return self.run(["squeue", "-h", "-o", "%A"]).split()

    def _pid(self, name: str) -> int:
        """0 where the daemon of this name does not run."""
        path = self.root / f"{name}.pid"
        pid = int(path.read_text().strip() or 0) if path.exists() else 0
        binary = name.partition("-")[0]
        return pid if pid and binary in os.fsdecode(_read(pid, "cmdline")) else 0

    def stop(self) -> None:
        """Jobs first, since they outlive their daemon; then what `start` made."""
        if self._pid("slurmctld") and (jobs := self.jobs()):
            self.run(["scancel", *jobs])
            until = time.monotonic() + _STOP_S
            while self.jobs() and time.monotonic() < until:
                time.sleep(0.1)
        for node in self.names:
            self.kill_node(node)
        daemons = [pid for name in ("slurmctld", "munged") if (pid := self._pid(name))]
        _kill(daemons, signal.SIGTERM)
        _kill(daemons, signal.SIGKILL)
        if self.spaced:
            with _hosts_file() as lines:
                lines[:] = [line for line in lines if not line.endswith(self._mark)]
            for name in self.names:
                self.run(["ip", "netns", "del", name])
            self.run(["ip", "link", "del", self._bridge])
        self._holder.close()


def _free_slot() -> tuple[int, socket.socket]:
    """A number that no other living cluster of this machine has: its holder has a port."""
    for slot in range(1, _SLOTS):
        holder = socket.socket()
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", _PORT + 10 * slot + 9))
            return slot, holder
        holder.close()
    raise RuntimeError("every slot for a test cluster is taken")


@contextlib.contextmanager
def _hosts_file() -> Iterator[list[str]]:
    """Its lines, written back in place: it may be a mount of its own."""
    with open("/etc/hosts", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        yield lines
        file.seek(0)
        file.write("\n".join(lines) + "\n")
        file.truncate()


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    words = _read(pid, "stat").rpartition(b")")[2].split()
    return int(words[1]) if words else 0


def _network(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def _kill(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    until = time.monotonic() + _STOP_S
    while time.monotonic() < until and any(_is_alive(pid) for pid in pids):
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    return _read(pid, "stat").rpartition(b")")[2][1:2] not in (b"", b"Z")


def _short_name() -> str:
    return socket.gethostname().split(".")[0]


def _namespaces_work() -> bool:
    """Whether a network can be made here, not only whether the tools are installed."""
    if not all(shutil.which(name, path=_PATH) for name in ("ip", "nsenter", "unshare")):
        return False
    probe = ["unshare", "--net", "--uts", "ip", "link", "add", "ffprobe", "type", "bridge"]
    named = ["ip", "netns", "add", f"ffprobe{os.getpid()}"]
    if any(subprocess.run(words, capture_output=True).returncode for words in (probe, named)):
        return False
    return not subprocess.run(["ip", "netns", "del", named[-1]], capture_output=True).returncode


if __name__ == "__main__":
    cluster = LocalSlurm(Path(sys.argv[1]).absolute())
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores the first
        signal.signal(number, signal.default_int_handler)
    try:
        cluster.start()
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}  # {cluster.kind}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()
