"""Which rows of a table cannot be right? Invariants with fixed rule ids, and the likely repair.

Every rule compares what a table says twice: GPUs against axes, seconds against TFLOPs, labels
against shapes. A row on its own can only be judged by arithmetic; measured
speed itself is never doubted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.tables.context import Context
from fourfold.tables.document import Document, Table
from fourfold.tables.record import Record
from fourfold.tables.records import contexts, records

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`row` is the line in the file; `value` what stands there, `expected` what would be right."""

    rule: str
    row: int
    table: int
    place: str
    value: str
    expected: str
    repair: str


@dataclass(frozen=True, slots=True)
class Case:
    """A whole file, read once: rules look at rows, at tables, and across tables."""

    tables: tuple[tuple[Table, Context], ...]
    records: tuple[Record, ...]
    by_table: dict[int, list[Record]]

    def rows_of(self, table: int) -> list[Record]:
        return self.by_table.get(table, [])


def finding(record: Record, rule: str, value: str, expected: str, repair: str) -> Finding:
    assert rule in RULES
    return Finding(
        rule=rule,
        row=record.line,
        table=record.table + 1,
        place=record.place,
        value=value,
        expected=expected,
        repair=repair,
    )


def _case(document: Document) -> Case:
    found = tuple(records(document))
    by_table: dict[int, list[Record]] = {}
    for record in found:
        by_table.setdefault(record.table, []).append(record)
    return Case(tuple(contexts(document)), found, by_table)


def lint(document: Document) -> list[Finding]:
    from fourfold.tables import rules_copies, rules_shape, rules_speed, rules_work

    case = _case(document)
    found: list[Finding] = []
    for module in (rules_shape, rules_speed, rules_work, rules_copies):
        for rule in module.CHECKS:
            found += rule(case)
    order = list(RULES)
    return sorted(set(_settled(found)), key=lambda f: (f.row, f.place, order.index(f.rule)))


# When the first rule has explained a row, the second would only repeat it in other words.
_EXPLAINS = (
    ("gpus-axes", "batch-reach"),
    ("gpus-axes", "layers-stages"),
    ("batch-heading", "work-constant"),
    ("batch-heading", "batch-tokens"),
    ("swapped-values", "work-constant"),
    ("swapped-values", "throughput"),
    ("swapped-values", "hfu-mfu"),
    ("swapped-values", "utilisation"),
    ("duplicate-row", "copied-cell"),
    ("heading-count", "throughput"),
)


def _settled(found: list[Finding]) -> Iterator[Finding]:
    explained = {
        (second, item.place) for item in found for first, second in _EXPLAINS if item.rule == first
    }
    for item in found:
        if (item.rule, item.place) not in explained:
            yield item
