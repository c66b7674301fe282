"""A stand-in for Megatron: takes exported settings, prints its format, and fails as told.

python fake.py SETTINGS ITERATIONS SECONDS HOW
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    settings, iterations, seconds, how = sys.argv[1:5]
    words = (Path(settings) / "engine.args").read_text().split("\n")
    args = {w[2:].replace("-", "_"): v for w, v in itertools.pairwise(words) if w[:2] == "--"}
    print("------------------------ arguments ------------------------")
    for name, value in sorted(args.items()):
        print(f"  {name} {'.' * (48 - len(name))} {'True' if value[:2] == '--' else value}")
    print("-------------------- end of arguments ---------------------", flush=True)
    if how == "child":  # one that leaves the group, as elastic launchers' workers do
        code = "import time; time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        print(f"child {child.pid}", flush=True)
    if how == "silent":
        time.sleep(600)
    batch = int(args["global_batch_size"])
    for step in range(1, int(iterations) + 1):
        if step == 3 and how == "oom":
            print("Traceback (most recent call last):")
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
            return 1
        if step == 3 and how == "crash":
            raise RuntimeError("no such kernel")
        if step == 3 and how == "hang":
            time.sleep(600)
        print(
            f" [2026-01-01 00:00:00] iteration {step:8d}/{int(iterations):8d} | consumed samples: "
            f"{step * batch:12d} | elapsed time per iteration (ms): {1000 * float(seconds):.1f} | "
            f"throughput per GPU (TFLOP/s/GPU): 1.5 | learning rate: 1.000000E-04 | global batch "
            f"size: {batch:5d} | lm loss: {11.0 - 0.1 * step:.6E} | loss scale: 1.0 | "
            "grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   "
            "0 |",
            flush=True,
        )
    if how == "idle":
        time.sleep(600)
    if how == "plain":
        return 0
    used = "allocated: 500.0 | max allocated: 900.0 | reserved: 1000.0 | max reserved: 1024.0"
    print(f"[Rank 0] (after 2 iterations) memory (MB) | {used}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
