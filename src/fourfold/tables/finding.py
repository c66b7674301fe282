"""The rules of a lint by their ids, and what a rule finds."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.result.record import Record
from fourfold.tables.document import Table

# id -> what must hold. Ids are part of the interface: tools and notes refer to them.
RULES = {
    "heading-count": "a row has as many cells as the table has headings",
    "gpus-axes": "GPUs (or nodes x GPUs per node) = dp x tp x cp x pp",
    "batch-reach": "the global batch is a whole number of micro batches on every dp rank",
    "batch-heading": "batch and sequence length in the text above agree with the rows",
    "batch-tokens": "global batch in tokens = sequences x sequence length",
    "layers-stages": "layers divide into the pipeline's stages (embedding and head may count)",
    "size-label": "the size label or parameter count fits the shape",
    "work-constant": "TFLOPs x seconds x GPUs / batch is the model's FLOPs per sequence",
    "convention-mix": "all rows count FLOPs by the same convention (and the one that is stated)",
    "throughput": "samples/s, tokens/s, tokens/s/GPU and seconds per step agree",
    "hfu-mfu": "HFU is MFU times what activation checkpointing runs again",
    "utilisation": "speeds are positive and no rate exceeds the device's dense peak",
    "memory-device": "memory does not exceed the device's",
    "memory-order": "a larger micro batch, all else equal, does not need less memory",
    "swapped-values": "two columns of a row are not exchanged",
    "duplicate-row": "no row stands twice in one table",
    "copied-cell": "no measured value stands in two layouts or two columns",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """`row` is the line in the file; `value` what stands there, `expected` what would be right."""

    rule: str
    row: int
    table: int
    place: str
    value: str
    expected: str
    repair: str


# What stands there, what would be right, and the repair.
Problem = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class TablesFile:
    """A whole file, read once: rules look at rows, at tables (each with what the text above it
    states), and across tables."""

    tables: tuple[tuple[Table, Record], ...]
    records: tuple[Record, ...]
    by_table: dict[tuple[object, ...], list[Record]]

    def rows_of(self, table: int) -> list[Record]:
        return self.by_table.get((table,), [])


def finding(record: Record, rule: str, value: str, expected: str, repair: str) -> Finding:
    assert rule in RULES
    row, table, place = record.line, record.table + 1, record.place
    return Finding(rule, row, table, place, value, expected, repair)
