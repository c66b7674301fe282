"""Counts ranks of an engine in its own environment: JSON requests in, counts out, each by a fork of
a process that has imported the engine. `operators`: of "cuda", as a dry run counts, or of the
"cpu"; `is_fake`: False takes the steps on real tensors.

    rank_memory.py ADAPTER MODULE...     its file, and what is imported once for all
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what the engine prints must not come between answers
    sys.path.append(str(ROOT / "src"))
    adapter_path, *modules = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("adapter_memory", adapter_path)
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    for module in modules:
        importlib.import_module(module)

    counts = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(json.load(sys.stdin)):
            path = Path(folder) / str(number)
            pid = os.fork()
            if pid == 0:
                count_in_fork(adapter, case, path)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, case
            counts.append(json.loads(path.read_text()))
    os.write(answers, json.dumps(counts).encode() + b"\n")


def count_in_fork(adapter: Any, case: dict[str, Any], path: Path) -> None:
    from fourfold.engine.one_rank import counted
    from fourfold.result.one_rank import RankMemoryRequest
    from fourfold.spec import codec

    try:
        is_fake = case.pop("is_fake")
        if case.pop("operators") == "cpu":
            counted.cuda_operators = contextlib.nullcontext
        request = codec.decode(RankMemoryRequest, case)
        os.environ |= {"RANK": str(request.rank), "WORLD_SIZE": str(request.world)}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        sys.path.insert(0, request.folder)
        path.write_text(codec.to_json(adapter.count_rank(request, is_fake=is_fake)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
