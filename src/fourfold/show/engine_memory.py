"""The page of a rank of another engine's job: bytes by rank, kind and tensor; whether they fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.text_table import Part, named, table
from fourfold.units import counted, show_bytes

if TYPE_CHECKING:
    from fourfold.result.one_rank import Fit, LiveTensor
    from fourfold.verbs.engine_memory import EngineMemory

_SEGMENTS, _EXPANDABLE = "default allocator", "expandable segments"


def memory_page(answer: EngineMemory) -> list[Part]:
    """Return the page: the ranks that were counted, then the fullest one's peak and verdict."""
    parts: list[Part] = [
        f"{answer.engine}, {answer.model} on {counted(answer.gpus, 'rank')}: {answer.layout}, "
        f"{answer.sharding}, {answer.precision}, recompute {answer.recompute}; "
        f"sequences of {answer.seq_len}, micro batch {answer.micro_batch}, "
        f"global batch {answer.global_batch}",
        "",
        table(
            answer.ranks,
            *named("rank", "stage", "allocated=allocated_bytes:bytes"),
            *named("reserved=reserved_bytes.segments:bytes"),
            *named("with expandable segments=reserved_bytes.expandable:bytes", "peak=peak_phase"),
        ),
        "",
        table(
            answer.by_kind.items(),
            (f"rank {answer.rank}, at the peak", lambda item: item[0]),
            ("bytes", lambda item: show_bytes(item[1])),
        ),
        "",
        table(
            answer.peak,
            ("largest tensors", lambda tensor: show_bytes(tensor.bytes)),
            *named("kind"),
            ("tensor", _tensor),
            ("module", lambda tensor: tensor.module or "-"),
            ("line", lambda tensor: tensor.line or "-"),
        ),
        "",
        f"not in the allocator, {show_bytes(answer.outside_bytes)}: "
        + "; ".join(f"{part.name} {show_bytes(part.bytes)}" for part in answer.outside),
    ]
    return [*parts, *_verdict(answer)]


def _tensor(tensor: LiveTensor) -> str:
    return f"{tensor.shape} {tensor.dtype}, {tensor.op.partition('::')[2]} in {tensor.phase}"


def _verdict(answer: EngineMemory) -> list[Part]:
    if answer.limit_bytes is None or answer.fits is None or answer.left_bytes is None:
        return []
    name = f"{answer.gpu}, {show_bytes(answer.limit_bytes)}" if answer.gpu else "the limit"
    if not answer.gpu:
        name += f" of {show_bytes(answer.limit_bytes)}"
    return [
        f"{name}: {_sentence(answer.fits.segments, answer.left_bytes.segments)} ({_SEGMENTS}); "
        f"{_sentence(answer.fits.expandable, answer.left_bytes.expandable)} ({_EXPANDABLE})"
    ]


def _sentence(fit: Fit, left_bytes: int) -> str:
    if fit == "fits":
        return f"fits, {show_bytes(left_bytes)} left"
    if fit == "retries":
        return f"runs, but returns cached memory when short ({show_bytes(-left_bytes)} over)"
    return f"does not fit, {show_bytes(-left_bytes)} over"
