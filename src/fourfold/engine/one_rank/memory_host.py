"""The process in which one rank of another engine's job is counted, in that engine's environment:
a RankMemoryRequest comes in as JSON, a RankMemoryCount goes out; of its job alone, an
EngineJobReply."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import time
from dataclasses import replace

from fourfold.result.one_rank import EngineJobReply, RankMemoryCount, RankMemoryRequest
from fourfold.spec import codec

# A dry run holds no weights: one that needs more than this has made real tensors by mistake.
MAX_HOST_BYTES = 8 * 2**30


def main(adapter_path: str, function: str) -> None:
    """`function`: of the adapter's file, `count_rank` or `read_job`."""
    began = time.perf_counter()
    answers = os.dup(1)
    os.dup2(2, 1)  # what an engine prints must not come between answers
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_HOST_BYTES, MAX_HOST_BYTES))
    request = codec.from_json(RankMemoryRequest, sys.stdin.read())
    os.environ |= {"RANK": str(request.rank), "WORLD_SIZE": str(request.world)}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    sys.path.insert(0, request.folder)
    spec = importlib.util.spec_from_file_location("adapter_memory", adapter_path)
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = adapter
    spec.loader.exec_module(adapter)
    answer: RankMemoryCount | EngineJobReply = getattr(adapter, function)(request)
    if isinstance(answer, RankMemoryCount):
        answer = replace(
            answer,
            seconds=time.perf_counter() - began,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
    os.write(answers, codec.to_json(answer).encode())
    # Reference cycles of an engine on fake tensors take seconds to take apart.
    sys.stderr.flush()
    os._exit(0)
