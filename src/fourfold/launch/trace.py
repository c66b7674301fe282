"""Traces in torch's processes: a layer counted by one of them, or steps run by one per rank."""

from __future__ import annotations

from typing import TypeVar

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.folder import scratch
from fourfold.launch.local import Progress, must_be_ok, run_job
from fourfold.launch.permit import gpu_count
from fourfold.result.job import Job, Limits, answer_file
from fourfold.result.trace import LayerTrace, TraceMeasure
from fourfold.spec import codec
from fourfold.spec.run import RunSpec

T = TypeVar("T")
_LIMITS = Limits(start_s=300.0, step_s=300.0)
# One process per rank: more than this starves any host of memory and cores.
MAX_LOCAL_RANKS = 32


def local_device(wanted: str, ranks: int) -> str:
    """What steps run on here, one process per rank: GPUs where there are enough."""
    if ranks > MAX_LOCAL_RANKS:
        raise UserError(
            f"is too many to run: this host starts one process per rank, at most {MAX_LOCAL_RANKS}",
            field="ranks",
            value=ranks,
            hint="omit --run to compute any number of ranks",
        )
    gpus = gpu_count() if wanted != "cpu" else 0
    if wanted == "cuda" and gpus < ranks:
        raise UserError(
            f"needs as many GPUs, but this host has {gpus}",
            field="ranks",
            value=ranks,
            hint="use --device cpu",
        )
    return "cuda" if gpus >= ranks else "cpu"


def count_layer(
    spec: RunSpec, rank: int, progress: Progress | None = None
) -> tuple[LayerTrace, LayerTrace]:
    """A rank's layer as it is, and with other sizes; tensors have shapes but no memory."""
    options = (("count", str(rank)),)
    job = Job(job="trace", specs=(spec,), ranks=1, options=options, limits=_LIMITS)
    trace, stretched = _answers(job, LayerTrace, (0, 1), progress)
    return trace, stretched


def run_layer(
    spec: RunSpec, payload_bytes: tuple[int, int], device: str, progress: Progress | None = None
) -> TraceMeasure:
    """Forward and backward by all ranks on this host; what they send is checked."""
    options = (
        ("device", device),
        ("kind", "layer"),
        ("payload_bytes", ",".join(map(str, payload_bytes))),
    )
    job = Job(job="trace", specs=(spec,), ranks=spec.gpus, options=options, limits=_LIMITS)
    return _answers(job, TraceMeasure, (None,), progress)[0]


def run_list(
    kind: str, ask: str, ranks: int, device: str, progress: Progress | None = None
) -> TraceMeasure:
    """A list of steps by all ranks on this host; `ask` is what the list was made for, as JSON."""
    options = (("ask", ask), ("device", device), ("kind", kind))
    job = Job(job="trace", ranks=ranks, options=options, limits=_LIMITS)
    return _answers(job, TraceMeasure, (None,), progress)[0]


def _answers(
    job: Job, kind: type[T], parts: tuple[int | None, ...], progress: Progress | None
) -> list[T]:
    with scratch() as folder:
        report = run_job(job, folder, progress=progress)
        must_be_ok(report)
        texts = (files.read_text(answer_file(folder, 0, part)) for part in parts)
        return [codec.from_json(kind, text) for text in texts]
