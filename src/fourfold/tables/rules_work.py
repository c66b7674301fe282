"""Lint rules on work per sequence: seconds, TFLOPs, GPUs and batch, by model and convention."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fourfold.cost.count.flops import ALIASES, CONVENTIONS
from fourfold.tables.finding import FileCheck, Finding, TablesFile, finding
from fourfold.tables.row import PublishedRow, grouped
from fourfold.tables.shape import (
    SLACK,
    Shape,
    agree,
    common_length,
    flops_per_token,
    matching,
    peak_tflops,
    possible,
    rounding,
    row_work,
    shape_of,
)

# Some sources print a mean speed beside a mean time, or coarse tokens/s: 3% apart, no mistake.
_LOOSE = 0.035
_EXACT = 0.0005
_SAME_WORK = ("table", "label", "layers", "hidden", "seq_len")
# Without a shape only the recompute factor (4/3) can be recognised as another convention.
_RECOMPUTE_RATIOS = (0.75, 4 / 3)


def topology_work(file: TablesFile) -> Iterator[Finding]:
    """Rows of one model in one table agree with each other; a lone row agrees with its shape."""
    rows = [record for record in file.records if record.style == "topology"]
    length = common_length(rows)
    working = (record for record in rows if row_work(record) is not None)
    for group in grouped(working, _SAME_WORK).values():
        works = [work for record in group if (work := row_work(record)) is not None]
        usual = _consensus(group, works, length)
        for record, work in zip(group, works, strict=True):
            yield from _judge(record, work, usual, record.seq_len or length)


def _consensus(group: list[PublishedRow], works: list[float], length: int) -> float | None:
    """The work that most rows share. Two rows that differ have none unless the shape decides."""
    ordered = sorted(works)
    support = [_near(ordered, work, 2 * SLACK * abs(work)) for work in works]
    best = max(support)
    if best > len(works) / 2 and best > 1:
        return works[support.index(best)]
    for record, work in zip(group, works, strict=True):
        shape = shape_of(record)
        if shape and matching(record, shape, work, record.seq_len or length):
            return work
    return None


def _near(ordered: list[float], value: float, slack: float) -> int:
    """How many of the sorted values lie within the slack."""
    return bisect_right(ordered, value + slack) - bisect_left(ordered, value - slack)


def _judge(
    record: PublishedRow, work: float, usual: float | None, seq_len: int
) -> Iterator[Finding]:
    shape = shape_of(record)
    slack = 2 * SLACK + rounding(record)
    if usual is not None and agree(work, usual, slack):
        if shape is None or possible(record, shape, work, seq_len):
            return
        if record.convention in CONVENTIONS:
            yield _convention(record, record.convention, _names(record, shape, work, seq_len))
            return
        usual = None  # all rows agree, and none with the shape: that is what to expect
    elif usual is None and (shape is None or possible(record, shape, work, seq_len)):
        return
    names = _names(record, shape, work, seq_len) if shape and usual is not None else []
    if names:
        usual_names = _names(record, shape, usual or 0.0, seq_len)
        yield _convention(record, (usual_names or ["the table's other rows"])[0], names)
    elif usual is not None and any(agree(work / usual, x, 0.01) for x in _RECOMPUTE_RATIOS):
        yield _convention(record, "the table's other rows", ["a count with other recompute"])
    else:
        found = _miscount(record, work, seq_len)
        yield found or _off(record, work, usual or _likely(record, shape, seq_len))


def _names(record: PublishedRow, shape: Shape | None, work: float, seq_len: int) -> list[str]:
    """Every convention of the catalogue that explains the row, also when the table states one."""
    return matching(record, shape, work, seq_len, CONVENTIONS) if shape else []


def _likely(record: PublishedRow, shape: Shape | None, seq_len: int) -> float | None:
    if shape is None:
        return None
    rule = record.convention if record.convention in CONVENTIONS else "megatron-recompute"
    return seq_len * flops_per_token(shape, record, rule, seq_len)


def _convention(record: PublishedRow, stated: str, names: list[str]) -> Finding:
    likely = ", ".join(names) if names else "no known convention"
    return finding(
        record,
        "convention-mix",
        f"{record.text('tflops_gpu') or record.tflops_gpu} by {likely}",
        f"by {stated}",
        f"restate the row by {stated}",
    )


# What published counts of models with experts got wrong: all experts as active; a window as if it
# were the sequence; an expert as a plain MLP, with both in GPT-OSS of Megatron-Bridge until 26.04.
_PLAIN: dict[str, Any] = {"activation": "silu"}
_WHOLE: dict[str, Any] = {"window": None, "mixers": None}
_MISCOUNTS: dict[str, dict[str, Any]] = {
    "two of an expert's three matrices": _PLAIN,
    "two of an expert's three matrices, and windows as whole sequences": _PLAIN | _WHOLE,
    "windows as whole sequences": _WHOLE,
}


def _miscount(record: PublishedRow, work: float, seq_len: int) -> Finding | None:
    """A row of a model with experts whose work a known mistake explains."""
    shape = shape_of(record)
    if shape is None or shape.model.moe is None:
        return None
    model = shape.model
    free = replace(shape.model.moe, groups=1, group_top_k=1)
    everything: dict[str, Any] = {"top_k": model.experts, "moe": free}
    own = record.convention in CONVENTIONS
    for words, fields in {"all experts as active": everything, **_MISCOUNTS}.items():
        other = replace(model, **fields)
        names = (record.convention,) if own else tuple(CONVENTIONS)
        rules = matching(record, replace(shape, model=other), work, seq_len, names)
        if other == model or not rules:
            continue
        right = seq_len * flops_per_token(shape, record, rules[0], seq_len)
        tflops = record.tflops_gpu or 0.0
        return finding(
            record,
            "experts-counted",
            f"{tflops:g} TFLOPs count {words} (by {rules[0]})",
            f"{tflops * right / work:.4g} TFLOPs: {model.top_k} of {model.experts} experts a token",
            "count again by the shape (fourfold flops)",
        )
    return None


def _off(record: PublishedRow, work: float, usual: float | None) -> Finding:
    ratio = work / usual if usual else None
    value = (
        f"{record.text('tflops_gpu')} TFLOPs x {record.text('step_s')} s x {record.gpus} GPUs / "
        f"{record.global_batch} = {work:.4g}"
    )
    expected = f"{usual:.4g} FLOPs per sequence" if usual else "FLOPs of the model's shape"
    if ratio is None or usual is None:
        return finding(record, "work-constant", value, expected, "check the row against its log")
    return finding(record, "work-constant", value, expected, _fixes(record, ratio))


def _fixes(record: PublishedRow, ratio: float) -> str:
    """Each column that could be the wrong one, with the value that would make the row right."""
    fixes = []
    tflops = (record.tflops_gpu or 0.0) / ratio
    peak = peak_tflops(record)
    if peak is None or tflops <= peak:
        fixes.append(f"TFLOPs {tflops:.2f}")
    fixes.append(f"Sec/it {(record.step_s or 0.0) / ratio:.2f}")
    batch = (record.global_batch or 0) * ratio
    if round(batch) != record.global_batch and abs(batch / max(1, round(batch)) - 1) < SLACK:
        fixes.append(f"GBS {round(batch)}")
    return " or ".join(fixes)


def reference_work(file: TablesFile) -> Iterator[Finding]:
    """Reference schema: TFLOPs against tokens/s/GPU under the convention that the row names."""
    rows = [record for record in file.records if record.style == "reference"]
    for group in grouped(rows, ("table", "stack", "convention")).values():
        known = [(record, off) for record in group if (off := _residual(record)) is not None]
        exact = sum(abs(residual) <= _EXACT for _, residual in known)
        slack = SLACK if exact >= 0.9 * (len(known) - 1) and len(known) > 2 else _LOOSE
        for record, residual in known:
            if abs(residual) > slack:
                yield _reference_finding(record, residual)


def _residual(record: PublishedRow) -> float | None:
    rule = ALIASES.get(record.convention, record.convention)
    shape = shape_of(record)
    if record.outcome != "ok" or rule not in CONVENTIONS or shape is None or not record.seq_len:
        return None
    if not (record.tflops_gpu and record.tokens_s_gpu) or record.tokens_s_gpu <= 0:
        return None
    per_token = record.tflops_gpu * 1e12 / record.tokens_s_gpu
    return per_token / flops_per_token(shape, record, rule, record.seq_len) - 1


def _reference_finding(record: PublishedRow, residual: float) -> Finding:
    shape = shape_of(record)
    tflops, speed = record.tflops_gpu or 0.0, record.tokens_s_gpu or 1.0
    seq_len = record.seq_len or 1
    names = _names(record, shape, tflops * 1e12 / speed * seq_len, seq_len)
    if names:
        return _convention(record, record.convention, names)
    if found := _miscount(record, tflops * 1e12 / speed * seq_len, seq_len):
        return found
    right = tflops / (1 + residual)
    return finding(
        record,
        "work-constant",
        f"{tflops:g} TFLOPs at {speed:g} tokens/s/GPU",
        f"{right:.4g} TFLOPs by {record.convention}",
        f"tflops_gpu {right:.4g} or tokens_s_gpu {speed * (1 + residual):.6g}",
    )


def mpt_work(file: TablesFile) -> Iterator[Finding]:
    """MPT tables: Model TFLOP and MFU follow from tokens/s by 6 N + 12 L d s."""
    for record in file.records:
        shape = shape_of(record)
        if record.style != "mpt" or shape is None or not (record.tokens_s and record.gpus):
            continue
        if not record.seq_len or record.tokens_s < 1:
            continue
        speed = record.tokens_s / record.gpus
        right = flops_per_token(shape, record, "mpt", record.seq_len) * speed / 1e12
        slack = 0.001 + 1 / record.tokens_s  # printed MFU has two digits, tokens/s is cut off
        peak = peak_tflops(record)
        printed = [(record.tflops_gpu, "Model TFLOP", 100.0, record.text("model_tflop"))]
        if peak is not None and record.mfu_pct is not None:
            printed.append((record.mfu_pct * peak / 100, "MFU", peak / 100, record.text("mfu_pct")))
        for tflops, name, unit, text in printed:
            half = 0.5 * 10.0 ** -len(text.partition(".")[2]) * unit if text else 0.0
            if tflops is not None and abs(tflops - right) > right * slack + half:
                yield _mpt_finding(record, shape, (name, text), tflops, right / unit)


def _mpt_finding(
    record: PublishedRow, shape: Shape, cell: tuple[str, str], tflops: float, right: float
) -> Finding:
    seq_len = record.seq_len or 1
    per_token = tflops * 1e12 * (record.gpus or 1) / (record.tokens_s or 1.0)
    names = [
        rule
        for rule in CONVENTIONS
        if rule != "mpt" and agree(per_token, flops_per_token(shape, record, rule, seq_len), 0.002)
    ]
    name, text = cell
    rule = "convention-mix" if names else "work-constant"
    value = f"{name} {text}" + (f" by {', '.join(names)}" if names else "")
    expected = f"{right:.4g} by mpt (6 N + 12 L d s)"
    return finding(record, rule, value, expected, f"{name} {right:.4g}, or tokens/s")


FILE_CHECKS: tuple[FileCheck, ...] = (topology_work, reference_work, mpt_work)
