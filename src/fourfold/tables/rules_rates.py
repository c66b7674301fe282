"""Lint rules on the speeds of a row: rates that follow from each other, exchanged columns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from fourfold.tables import cells
from fourfold.tables.finding import FileCheck, Finding, Problem, RowCheck, TablesFile, finding
from fourfold.tables.row import PublishedRow
from fourfold.tables.shape import agree, hardware_ratio, row_work, shape_of

_SPEED_SLACK = 0.001


def mpt_rates(record: PublishedRow, tokens: float, seq_len: int, gpus: int) -> Iterator[Problem]:
    """The published integers are cut off, not rounded: S/s 32 may be 32.99."""
    samples, each = record.samples_s, record.tokens_s_gpu
    if samples is not None and "." not in record.text("samples_s"):
        low, high = samples * seq_len, (samples + 1) * seq_len
        if not low - _unit(record, "tokens_s") <= tokens < high + 1:
            right = f"S/s {math.floor(tokens / seq_len)}"
            yield f"{record.text('samples_s')} S/s and {tokens:g} T/s", right, f"{right}, or T/s"
    unit = _unit(record, "tokens_s_gpu")
    high = (tokens + _unit(record, "tokens_s")) / gpus
    if each is not None and not tokens / gpus - unit <= each <= high + unit:
        right = f"T/s/GPU {math.floor(tokens / gpus)}"
        repair = f"{right}, or T/s {each * gpus:.0f}"
        yield f"{each:g} T/s/GPU and {tokens:g} T/s", right, repair


def _unit(record: PublishedRow, name: str) -> float:
    """One step of the last printed digit."""
    return 2 * cells.half_unit(record.text(name))


def reference_rate(
    record: PublishedRow, step_s: float, speed: float, gpus: int, batch: int, seq_len: int
) -> Iterator[Problem]:
    tokens = batch * seq_len / gpus
    if record.outcome == "ok" and abs(speed * step_s / tokens - 1) > _SPEED_SLACK:
        right = f"tokens_s_gpu {tokens / step_s:.6g}"
        repair = f"{right} or step_s {tokens / speed:.6g}"
        yield f"{step_s:g} s and {speed:g} tokens/s/GPU", right, repair


def hfu_mfu(record: PublishedRow, mfu: float) -> Iterator[Problem]:
    shape, hfu = shape_of(record), record.hfu_pct
    ratio = hardware_ratio(shape, record) if shape else None
    if ratio is None or hfu is None:
        return
    right = mfu * ratio
    if abs(hfu - right) > 0.006 * (1 + ratio) + 1e-3 * right:
        words = f"HFU {right:.2f}"
        recompute = record.recompute or "none"
        yield (
            f"MFU {mfu:g}, HFU {hfu:g}",
            f"{words} with recompute '{recompute}'",
            f"{words}, or Activation Checkpointing",
        )


def swapped_utilisation(record: PublishedRow, mfu: float, hfu: float) -> Iterator[Problem]:
    shape = shape_of(record)
    ratio = hardware_ratio(shape, record) if shape else None
    if ratio and hfu < mfu and agree(mfu, hfu * ratio, 0.005):
        yield f"MFU {mfu:g}, HFU {hfu:g}", f"HFU = {ratio:.3g} x MFU", "exchange MFU and HFU"


def _exchanged(record: PublishedRow, why: str) -> Problem:
    seconds, tflops = record.text("step_s"), record.text("tflops_gpu")
    right = f"{tflops} s, {seconds} TFLOPs {why}"
    return f"{seconds} s, {tflops} TFLOPs", right, "exchange Sec/it and TFLOPs"


def swapped_reference(
    record: PublishedRow,
    step_s: float,
    tflops: float,
    speed: float,
    gpus: int,
    batch: int,
    seq_len: int,
) -> Iterator[Problem]:
    """tokens/s/GPU ties seconds to the batch, so here arithmetic does see it."""
    right = batch * seq_len / gpus / speed
    wrong = abs(step_s / right - 1) > 0.01
    if record.outcome == "ok" and wrong and abs(tflops / right - 1) < 0.001:
        yield _exchanged(record, "by tokens_s_gpu")


def swapped_by_twin(file: TablesFile) -> Iterator[Finding]:
    """Seconds x TFLOPs does not change when the two are exchanged, so arithmetic cannot see it: a
    row elsewhere in the file with the same two numbers the other way round can."""
    rows = [record for record in file.records if row_work(record) is not None]
    seen: dict[tuple[object, float, float], list[PublishedRow]] = defaultdict(list)
    sums: dict[tuple[object, ...], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for record in rows:
        seen[_model(record), record.step_s or 0, record.tflops_gpu or 0].append(record)
        for key in _sum_keys(record):
            for at, value in enumerate((1, record.step_s or 0.0, record.tflops_gpu or 0.0)):
                sums[key][at] += value
    for record in rows:
        model, seconds, tflops = _model(record), record.step_s or 0, record.tflops_gpu or 0
        twins = seen.get((model, tflops, seconds), [])
        if not twins or record.step_s == record.tflops_gpu:
            continue
        # Which of the two is wrong: the one whose seconds fit worse to the other rows of the model.
        whole, pair = (sums[key] for key in _sum_keys(record))
        others = [all_rows - alike for all_rows, alike in zip(whole, pair, strict=True)]
        if _misfit(record, others) > _misfit(twins[0], others) or (
            not others[0]
            and len(twins) >= len(seen[model, seconds, tflops])
            and record.line > twins[0].line
        ):
            problem = _exchanged(record, f"as in line {twins[0].line}")
            yield finding(record, "swapped-values", *problem)


def _model(record: PublishedRow) -> tuple[object, ...]:
    """The same run: a twin under other axes would only be a coincidence."""
    axes = (record.dp, record.tp, record.cp, record.pp, record.micro_batch)
    return (record.label, record.gpus, record.global_batch, *axes)


def _sum_keys(record: PublishedRow) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Rows of the same model on as many GPUs, and those of them with the same two numbers."""
    pair = frozenset((record.step_s, record.tflops_gpu))
    return (record.label, record.gpus), (record.label, record.gpus, pair)


def _misfit(record: PublishedRow, others: list[float]) -> float:
    """How far seconds and TFLOPs lie from the means of `others` (count and both sums), as a
    ratio."""
    count, seconds, tflops = others
    if not count or not seconds > 0 or not tflops > 0:
        return 0.0
    ratio = (record.step_s or 1) / seconds * tflops / (record.tflops_gpu or 1)
    return max(ratio, 1 / ratio)


_SPEED_FIELDS = ("step_s", "tokens_s_gpu", "gpus", "global_batch", "seq_len")
ROW_CHECKS = (
    RowCheck("throughput", ("mpt",), ("tokens_s", "seq_len", "gpus"), mpt_rates),
    RowCheck("throughput", ("reference",), _SPEED_FIELDS, reference_rate),
    RowCheck("hfu-mfu", (), ("mfu_pct",), hfu_mfu),
    RowCheck("swapped-values", ("mpt",), ("mfu_pct", "hfu_pct"), swapped_utilisation),
    RowCheck(
        "swapped-values",
        ("reference",),
        ("step_s", "tflops_gpu", "tokens_s_gpu", "gpus", "global_batch", "seq_len"),
        swapped_reference,
    ),
)
FILE_CHECKS: tuple[FileCheck, ...] = (swapped_by_twin,)
