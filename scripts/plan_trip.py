"""How far a question travels before its candidates are made: source files entered, changes of file.

python scripts/plan_trip.py [MODEL] [GPUS]

Calls `fourfold.plan` twice in one process and follows the second call's Python functions with
`sys.setprofile` until the first candidate table is built.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import fourfold
from fourfold.search.candidates import candidates
from fourfold.verbs.requests import PlanRequest

SOURCE = str(Path(fourfold.__file__).parent)
# The function that makes candidates, by its code.
MAKES_CANDIDATES = candidates.__code__


class Trip:
    """Files whose functions ran, in the order of entry, until candidates are made."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.calls: Counter[str] = Counter()

    def follow(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code is MAKES_CANDIDATES:
            sys.setprofile(None)
            return
        file = frame.f_code.co_filename
        if file.startswith(SOURCE):
            self.files.append(file.removeprefix(SOURCE + "/"))
            self.calls[self.files[-1]] += 1

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-8b"
    gpus = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    request = PlanRequest(model=model, gpu="h100-80gb", gpus=gpus, seq_len=8192, global_batch=512)
    fourfold.plan(request)
    trip = Trip()
    sys.setprofile(trip.follow)
    try:
        fourfold.plan(request)
    finally:
        sys.setprofile(None)
    print(f"files {len(trip.calls)}, changes of file {trip.changes}, calls {len(trip.files)}")
    for file, calls in trip.calls.most_common():
        print(f"  {calls:5} {file}")


if __name__ == "__main__":
    main()
