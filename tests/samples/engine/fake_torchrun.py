"""A stand-in for torchrun with Megatron under it, on several hosts: they meet at the address they
were given, the first prints the arguments, the last one the steps, and it fails as told.

SETTINGS and HOW are variables; SECONDS too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fake


def meet(node: int, nodes: int, address: str, port: int) -> list[socket.socket]:
    """One connection for each other host, or to the first."""
    if node == 0:
        with socket.create_server(("", port)) as server:
            return [server.accept()[0] for _ in range(nodes - 1)]
    while True:
        with contextlib.suppress(OSError):
            return [socket.create_connection((address, port))]
        time.sleep(0.1)


def main() -> int:
    words = iter(sys.argv[1:])
    asked = {}
    for word in words:
        if not word.startswith("--"):
            break
        asked[word[2:]] = next(words) if word != "--standalone" else ""
    node, nodes = int(asked["node-rank"]), int(asked["nnodes"])
    print(f"node {node} of {nodes}, {asked['nproc-per-node']} ranks here", flush=True)
    others = meet(node, nodes, asked["master-addr"], int(asked["master-port"]))
    if node < nodes - 1:
        for other in others:
            other.recv(1)
        if os.environ["HOW"] != "ok":
            time.sleep(600)  # as a rank that waits for another in a collective
        return 0
    rest = list(words)
    iterations = rest[rest.index("--train-iters") + 1]
    sys.argv[1:] = [
        os.environ["SETTINGS"],
        iterations,
        os.environ["SECONDS_EACH"],
        os.environ["HOW"],
    ]
    try:
        code = fake.main()
    except RuntimeError:
        traceback.print_exc()
        code = 1
    if code:  # as torchrun does
        rank = node * int(asked["nproc-per-node"]) + 1
        print("Root Cause (first observed failure):\n[0]:")
        print(f"  rank      : {rank} (local_rank: 1)\n  exitcode  : {code} (pid: 7)", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
