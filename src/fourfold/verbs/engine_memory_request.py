"""The request of `dryrun --engine`; like other commands that count, it needs no NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fourfold.flag import flag
from fourfold.units import bytes_from
from fourfold.verbs import Request

ENGINES = ("folder of installed engines (default: the user's cache)", "DIR")
_OWN_CODE = "another engine's own code"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemoryRequest(Request):
    """Which engine, which rank of its job, and what must hold it. `layout` is put into the run;
    with `config`, the engine's own settings, a run has its number of GPUs and nothing else."""

    engine: str = flag("count a release of another engine", "NAME==V", group=_OWN_CODE, default="")
    config: str | None = flag(
        "the engine's own settings: a file, taken as it is (needs --gpus)",
        "FILE",
        group=_OWN_CODE,
    )
    rank: str = flag(
        "rank to count, or first, last, worst (the fullest stage; default)",
        "R",
        group=_OWN_CODE,
        default="worst",
    )
    layout: str | None = flag("layout such as 'pp4 dp16 tp8', with zero0-3 or FIELD=VALUE", "TEXT")
    gpu: str | None = flag(
        "GPU whose memory must hold it", "ID", group=_OWN_CODE, either="engine limit"
    )
    limit: Annotated[int, bytes_from] | None = flag(
        "memory that must hold it, such as 80GiB", "SIZE", group=_OWN_CODE, either="engine limit"
    )
    engines: str | None = flag(*ENGINES, group=_OWN_CODE, rare=True)
