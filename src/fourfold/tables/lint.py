"""Finds rows of a table that cannot be right: rules with fixed ids, and the likely repairs. Every
rule compares what a table says twice; measured speed itself is never doubted.

Lint rules on the speeds and bytes of a row, among each other and against the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise

from fourfold import door
from fourfold.result.record import KINDS, Record, grouped
from fourfold.spec import catalog
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.tables import cells, rules_copies, rules_shape, rules_work
from fourfold.tables.document import Document
from fourfold.tables.records import (
    Finding,
    Problem,
    RowRule,
    TablesFile,
    finding,
    records,
    with_text,
)
from fourfold.tables.shape import hardware_ratio, peak_tflops, shape_of

_SPEED_SLACK = 0.001
# Memory of runs that differ in their micro batch only; allocators make small differences.
_ORDER_SLACK = 0.10
_BUT_MICRO_BATCH = (
    "table", "seq_len", "gpus", *AXES, *EXPERT_AXES,
    "virtual_stages", "label", "layers", "hidden", "heads",
    "sharding",
)  # fmt: skip


def mpt_rates(record: Record, tokens: float, seq_len: int, gpus: int) -> Iterator[Problem]:
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


def _unit(record: Record, name: str) -> float:
    """One step of the last printed digit."""
    return 2 * cells.half_unit(record.text(name))


def reference_rate(
    record: Record, step_s: float, speed: float, gpus: int, batch: int, seq_len: int
) -> Iterator[Problem]:
    tokens = batch * seq_len / gpus
    if record.outcome == "ok" and abs(speed * step_s / tokens - 1) > _SPEED_SLACK:
        right = f"tokens_s_gpu {tokens / step_s:.6g}"
        repair = f"{right} or step_s {tokens / speed:.6g}"
        yield f"{step_s:g} s and {speed:g} tokens/s/GPU", right, repair


def hfu_mfu(record: Record, mfu: float) -> Iterator[Problem]:
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


@functools.cache
def _fastest_peak_tflops() -> float:
    peaks = (catalog.device(name).peak_flops_per_s.bf16 for name in catalog.device_names())
    return max(peak for peak in peaks if peak) / 1e12


def possible_number(record: Record) -> Iterator[Problem]:
    """What is not, is read as blank elsewhere."""
    for name, text in record.cells.items():
        value = cells.printed(text) if KINDS.get(name, "").startswith(("int", "float")) else None
        # Counts may be none, and a throughput that is cut to a whole number as well.
        is_count = KINDS.get(name, "").startswith("int") and name not in ("gpus", "nodes")
        may_be_zero = is_count or (name == "tokens_s_gpu" and record.style == "mpt")
        if value is None or door.is_possible(value) or (value == 0 and may_be_zero):
            continue
        yield f"{name} {value:g}", door.POSSIBLE, "check against the log"


def utilisation(record: Record) -> Iterator[Problem]:
    for name in ("mfu_pct", "hfu_pct"):
        value = getattr(record, name)
        if value is not None and value > 100:
            yield f"{name} {value:g}", "at most 100", "check peak and speed"
    peak = peak_tflops(record)
    limit = _fastest_peak_tflops() if peak is None else peak
    if record.tflops_gpu is not None and record.tflops_gpu > limit:
        whose = "any known GPU's peak" if peak is None else f"{record.hardware}'s dense peak"
        expected = f"at most {limit:g}, {whose}"
        yield f"{record.tflops_gpu:g} TFLOPs", expected, "check TFLOPs, seconds and GPUs"


def memory_device(record: Record, memory: float, hardware: str) -> Iterator[Problem]:
    """Only where the row itself names its device: a heading far above may mean another one."""
    if "hardware" in record.cells and hardware in catalog.device_names():
        most = catalog.device(hardware).memory_bytes / 1e9
        if memory > 1.01 * most and record.outcome == "ok":
            yield f"{memory:g} GB", f"at most {most:.0f} GB", "check memory and device"


def memory_order(file: TablesFile) -> Iterator[Finding]:
    rows = [r for r in file.records if r.style == "topology" and r.mem_gb and r.micro_batch]
    for group in grouped(rows, _BUT_MICRO_BATCH).values():
        group.sort(key=lambda record: record.micro_batch or 0)
        for small, large in pairwise(group):
            if small.micro_batch == large.micro_batch or not (small.mem_gb and large.mem_gb):
                continue
            if small.mem_gb > large.mem_gb * (1 + _ORDER_SLACK):
                yield finding(
                    small, "memory-order", f"{small.mem_gb:g} GB with MBS {small.micro_batch}",
                    f"at most {large.mem_gb:g} GB, what MBS {large.micro_batch} needs",
                    "check both Mem cells",
                )  # fmt: skip


# id, styles ('': all), what a row must say (and not as 0), and what looks at it.
_ROW_RULES: tuple[RowRule, ...] = (
    *rules_shape.ROW_RULES,
    *rules_copies.ROW_RULES,
    ("throughput", "mpt", "tokens_s seq_len gpus", mpt_rates),
    ("throughput", "reference", "step_s tokens_s_gpu gpus global_batch seq_len", reference_rate),
    ("hfu-mfu", "", "mfu_pct", hfu_mfu),
    ("possible-number", "", "", possible_number),
    ("utilisation", "", "", utilisation),
    ("memory-device", "", "mem_gb hardware", memory_device),
)
_FILE_CHECKS = (*rules_shape.CHECKS, memory_order, *rules_work.CHECKS, *rules_copies.CHECKS)
# id -> what must hold.
RULES: dict[str, str] = catalog.data("lint.toml")["rules"]


def lint(document: Document) -> list[Finding]:
    rows = tuple(records(document))
    file = TablesFile(tuple(with_text(document)), rows, grouped(rows, ("table",)))
    findings = [finding(record, *found) for record in rows for found in _of_row(record)]
    for check in _FILE_CHECKS:
        findings += check(file)
    order = list(RULES)
    return sorted(
        dict.fromkeys(_unexplained(findings)), key=lambda f: (f.row, f.place, order.index(f.rule))
    )


def _of_row(record: Record) -> Iterator[tuple[str, str, str, str]]:
    for rule, styles, needs, check in _ROW_RULES:
        known = [getattr(record, name) for name in needs.split()]
        if all(known) and (not styles or record.style in styles.split()):
            yield from ((rule, *problem) for problem in check(record, *known))


def _unexplained(findings: list[Finding]) -> list[Finding]:
    """Without those that would only repeat in other words what another rule has explained."""
    explained = {
        (second, item.place)
        for item in findings
        for second in catalog.data("lint.toml")["explains"].get(item.rule, ())
    }
    return [item for item in findings if (item.rule, item.place) not in explained]
