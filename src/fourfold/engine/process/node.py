"""One of several hosts of a Slurm job, and the network by which it reaches the others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from fourfold import files
from fourfold.result.job import (
    DUMP_FILE,
    PORT_VARIABLE,
    STOP_FILE,
    beat_file,
    facts_file,
    failure_file,
)

_LOOK_S = 0.1
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address


@dataclass(frozen=True, slots=True)
class Node:
    """`start` counts how often Slurm has started the job over, `step` is its number of this part of
    it. A node runs one task, so tasks are nodes in order, and ranks follow it, `per_node` each."""

    index: int
    per_node: int
    name: str
    start: int = 0
    step: str = ""

    @classmethod
    def of(cls, per_node: int, env: Mapping[str, str]) -> Node:
        return cls(
            index=int(env["SLURM_PROCID"]),  # SLURM_NODEID does not follow a host file
            per_node=per_node,
            name=env.get("SLURMD_NODENAME") or socket.gethostname(),
            start=int(env.get("SLURM_RESTART_COUNT", "0")),
            step=env.get("SLURM_STEP_ID", ""),
        )

    def ranks(self, world: int) -> range:
        first = self.index * self.per_node
        return range(first, min(world, first + self.per_node))

    def news(self, folder: Path) -> int:
        """Where this host tells of its ranks: its launcher is on another."""
        return appended(folder / f"news-{self.index}.jsonl")

    def meet(self, env: MutableMapping[str, str]) -> None:
        """Agree on a port of the first node: the one that was proposed, or the next that is free
        there. Bound and closed, not kept: the first rank binds it within the second."""
        told = env.get(PORT_VARIABLE)
        if told is None:
            return
        path = Path(told)
        if self.index == 0:
            port = _free_port(int(env["MASTER_PORT"]))
            files.write_text(path, f"{port}\n")
        while not path.exists():  # the start limit ends a wait in vain
            os.listdir(path.parent)  # a network file system then asks its server
            time.sleep(_LOOK_S)
        env["MASTER_PORT"] = files.read_own_text(path).strip()

    def clear(self, folder: Path, ranks: range) -> None:
        """What its ranks left before Slurm started the job over: nothing of it is true now."""
        if self.start == 0:
            return
        for rank in ranks:
            own = (beat_file(folder, rank), failure_file(folder, rank), facts_file(folder, 0, rank))
            for path in (*own, folder / f"stack-{rank}.txt"):
                path.unlink(missing_ok=True)
        if self.index == 0:
            for name in (STOP_FILE, DUMP_FILE):
                (folder / name).unlink(missing_ok=True)


def _free_port(first: int) -> int:
    for port in range(first, 2**16):
        with contextlib.suppress(OSError), _listener() as probe:
            probe.bind(("", port))
            return port
    raise OSError(f"no port from {first} on is free on {socket.gethostname()}")


def _listener() -> socket.socket:
    """As torch's store binds: both families where the host has them."""
    both = socket.has_dualstack_ipv6()
    probe = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
    if both:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    # A port whose last connections are still being closed is free to a listener.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe


def appended(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def interface_to(host: str) -> str:
    """The network interface by which this host reaches another; '' where that can't be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if answer[20:24] == own:
                    return name
    return ""
