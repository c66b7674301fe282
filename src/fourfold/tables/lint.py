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
from fourfold.tables.records import Finding, Problem, TablesFile, finding, records, with_text
from fourfold.tables.shape import hardware_ratio, peak_tflops, shape_of

_SPEED_SLACK = 0.001
# Memory of runs that differ in their micro batch only; allocators make small differences.
_ORDER_SLACK = 0.10
_BUT_MICRO_BATCH = (
    "table", "seq_len", "gpus", *AXES, *EXPERT_AXES,
    "virtual_stages", "label", "layers", "hidden", "heads",
    "sharding",
)  # fmt: skip


def throughput(record: Record) -> Iterator[Problem]:
    if record.style == "mpt":
        yield from _mpt_throughput(record)
    elif record.style == "reference":
        yield from _reference_throughput(record)


def _mpt_throughput(record: Record) -> Iterator[Problem]:
    """The published integers are cut off, not rounded: S/s 32 may be 32.99."""
    tokens, samples, seq_len = record.tokens_s, record.samples_s, record.seq_len
    if tokens is None or not seq_len or record.gpus is None:
        return
    if samples is not None and "." not in record.text("samples_s"):
        low, high = samples * seq_len, (samples + 1) * seq_len
        if not low - _unit(record, "tokens_s") <= tokens < high + 1:
            right = math.floor(tokens / seq_len)
            yield (
                f"{record.text('samples_s')} S/s and {tokens:g} T/s",
                f"S/s {right}",
                f"S/s {right}, or T/s",
            )
    each = record.tokens_s_gpu
    if each is None:
        return
    unit = _unit(record, "tokens_s_gpu")
    high = (tokens + _unit(record, "tokens_s")) / record.gpus
    if not tokens / record.gpus - unit <= each <= high + unit:
        right = math.floor(tokens / record.gpus)
        yield (
            f"{each:g} T/s/GPU and {tokens:g} T/s",
            f"T/s/GPU {right}",
            f"T/s/GPU {right}, or T/s {each * record.gpus:.0f}",
        )


def _unit(record: Record, name: str) -> float:
    """One step of the last printed digit."""
    return 2 * cells.half_unit(record.text(name))


def _reference_throughput(record: Record) -> Iterator[Problem]:
    if record.outcome != "ok" or not (record.step_s and record.tokens_s_gpu and record.gpus):
        return
    if not (record.global_batch and record.seq_len) or record.step_s <= 0:
        return
    right = record.global_batch * record.seq_len / record.step_s / record.gpus
    if abs(record.tokens_s_gpu / right - 1) > _SPEED_SLACK:
        seconds = record.global_batch * record.seq_len / record.tokens_s_gpu / record.gpus
        yield (
            f"{record.step_s:g} s and {record.tokens_s_gpu:g} tokens/s/GPU",
            f"tokens_s_gpu {right:.6g}",
            f"tokens_s_gpu {right:.6g} or step_s {seconds:.6g}",
        )


def hfu_mfu(record: Record) -> Iterator[Problem]:
    if not record.mfu_pct or record.hfu_pct is None:
        return
    shape = shape_of(record)
    ratio = hardware_ratio(shape, record) if shape else None
    if ratio is None:
        return
    right = record.mfu_pct * ratio
    if abs(record.hfu_pct - right) > 0.006 * (1 + ratio) + 1e-3 * right:
        yield (
            f"MFU {record.mfu_pct:g}, HFU {record.hfu_pct:g}",
            f"HFU {right:.2f} with recompute '{record.recompute or 'none'}'",
            f"HFU {right:.2f}, or Activation Checkpointing",
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
        may_be_zero = KINDS.get(name, "").startswith("int") or (
            name == "tokens_s_gpu" and record.style == "mpt"
        )
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


def memory_device(record: Record) -> Iterator[Problem]:
    """Only where the row itself names its device: a heading far above may mean another one."""
    if record.mem_gb is None or "hardware" not in record.cells:
        return
    if record.hardware not in catalog.device_names():
        return
    most = catalog.device(record.hardware).memory_bytes / 1e9
    if record.mem_gb > 1.01 * most and record.outcome == "ok":
        yield (f"{record.mem_gb:g} GB", f"at most {most:.0f} GB", "check memory and device")


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


ROW_CHECKS = {
    "throughput": throughput, "hfu-mfu": hfu_mfu, "possible-number": possible_number,
    "utilisation": utilisation,
    "memory-device": memory_device,
}  # fmt: skip
CHECKS = (memory_order,)


# id -> what must hold.
RULES: dict[str, str] = catalog.data("lint.toml")["rules"]
_ROW_CHECKS = {**rules_shape.ROW_CHECKS, **ROW_CHECKS}
_FILE_CHECKS = (*rules_shape.CHECKS, *CHECKS, *rules_work.CHECKS, *rules_copies.CHECKS)


def lint(document: Document) -> list[Finding]:
    rows = tuple(records(document))
    file = TablesFile(tuple(with_text(document)), rows, grouped(rows, ("table",)))
    findings = [
        finding(record, rule, *problem)
        for rule, check in _ROW_CHECKS.items()
        for record in rows
        for problem in check(record)
    ]
    for check in _FILE_CHECKS:
        findings += check(file)
    order = list(RULES)
    return sorted(
        dict.fromkeys(_unexplained(findings)), key=lambda f: (f.row, f.place, order.index(f.rule))
    )


def _unexplained(findings: list[Finding]) -> list[Finding]:
    """Without those that would only repeat in other words what another rule has explained."""
    explained = {
        (second, item.place)
        for item in findings
        for second in catalog.data("lint.toml")["explains"].get(item.rule, ())
    }
    return [item for item in findings if (item.rule, item.place) not in explained]
