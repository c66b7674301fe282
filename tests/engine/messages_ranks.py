"""Three gloo ranks send to the next and receive from the one before: FOLDER. Prints what each
received, by messages in place and by copies in host memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.engine.parallel import messages

RANKS = 3


def around(rank: int, dtype: torch.dtype, begin) -> list[float]:
    sent = torch.arange(4, dtype=dtype) + 10 * rank
    received = torch.full((4,), -1.0, dtype=dtype)
    ops = [
        dist.P2POp(dist.isend, sent, (rank + 1) % RANKS),
        dist.P2POp(dist.irecv, received, (rank - 1) % RANKS),
    ]
    sending, receiving = begin(ops)
    receiving.wait()
    sending.wait()
    return received.tolist()


def live(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for begin in (messages.start, messages.start_by_host):
            found[f"{begin.__name__} {dtype}"] = around(rank, dtype, begin)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> int:
    folder = Path(sys.argv[1])
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            live(rank, folder)
            os._exit(0)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main())
