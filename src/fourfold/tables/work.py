"""How much work does a row claim? TFLOPs x seconds x GPUs / batch = FLOPs of one sequence.

For one model and convention this is a constant, whatever the layout; it ties the columns together.
"""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.cost.count.flops import CONVENTIONS, TRIED
from fourfold.result.record import Record
from fourfold.tables import cells
from fourfold.tables.shape import NOTES_SEQ_LEN, Shape, flops_per_token, flops_range, shape_of

# Beyond rounding of the printed digits; conventions that must be told apart differ by 2% and more.
SLACK = 0.006
_LENGTHS = tuple(2**power for power in range(9, 18))


def row_work(record: Record) -> float | None:
    """FLOPs of one sequence by the row's own numbers."""
    if record.outcome != "ok" or not (record.step_s and record.tflops_gpu):
        return None
    if not (record.gpus and record.global_batch) or min(record.step_s, record.tflops_gpu) <= 0:
        return None
    return record.tflops_gpu * 1e12 * record.step_s * record.gpus / record.global_batch


def rounding(record: Record) -> float:
    """Relative error that the printed digits allow."""
    share = 0.0
    for name in ("step_s", "tflops_gpu"):
        value = getattr(record, name)
        if value and record.text(name):
            share += cells.half_unit(record.text(name)) / abs(value)
    return share


def agree(one: float, other: float, slack: float) -> bool:
    return abs(one / other - 1) <= slack


def matching(record: Record, shape: Shape, work: float, seq_len: int) -> list[str]:
    """Conventions that explain the row's work exactly (assumed vocabulary where none is stated)."""
    slack = SLACK + rounding(record)
    return [
        rule
        for rule in tried(record)
        if agree(work, seq_len * flops_per_token(shape, record, rule, seq_len), slack)
    ]


def tried(record: Record) -> tuple[str, ...]:
    return (record.convention,) if record.convention in CONVENTIONS else TRIED


def possible(record: Record, shape: Shape, work: float, seq_len: int) -> bool:
    """Whether any convention, with any usual vocabulary, can explain the row's work."""
    slack = SLACK + rounding(record)
    for rule in tried(record):
        low, high = flops_range(shape, record, rule, seq_len)
        if low * seq_len * (1 - slack) <= work <= high * seq_len * (1 + slack):
            return True
    return False


def common_length(records: Sequence[Record]) -> int:
    """Sequence length of tables that never state it: the one that explains most rows."""
    votes = dict.fromkeys(_LENGTHS, 0)
    for record in records:
        work, shape = row_work(record), shape_of(record)
        if work is None or shape is None or record.seq_len:
            continue
        for length in _LENGTHS:
            votes[length] += bool(matching(record, shape, work, length))
    best = max(votes.values())
    if votes[NOTES_SEQ_LEN] == best:
        return NOTES_SEQ_LEN
    return next(length for length, count in votes.items() if count == best)


def implied_batches(record: Record) -> list[float]:
    """The global batches for which seconds and TFLOPs are right, one for each convention."""
    work, shape = row_work(record), shape_of(record)
    if work is None or shape is None:
        return []
    seq_len = record.seq_len or NOTES_SEQ_LEN
    total = work * (record.global_batch or 1)
    return [
        total / (seq_len * flops_per_token(shape, record, rule, seq_len)) for rule in tried(record)
    ]
