"""Which rows of a table cannot be right? Invariants with fixed rule ids, and the likely repair.

Every rule compares what a table says twice: GPUs against axes, seconds against TFLOPs, labels
against shapes. A row on its own can only be judged by arithmetic; measured
speed itself is never doubted.
"""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.result.record import Record
from fourfold.tables import rules_copies, rules_shape, rules_speed, rules_work
from fourfold.tables.document import Document
from fourfold.tables.finding import RULES, Case, Finding
from fourfold.tables.records import contexts, records


def _case(document: Document) -> Case:
    rows = tuple(records(document))
    by_table: dict[int, list[Record]] = {}
    for record in rows:
        by_table.setdefault(record.table, []).append(record)
    return Case(tuple(contexts(document)), rows, by_table)


def lint(document: Document) -> list[Finding]:
    case = _case(document)
    findings: list[Finding] = []
    for module in (rules_shape, rules_speed, rules_work, rules_copies):
        for rule in module.CHECKS:
            findings += rule(case)
    order = list(RULES)
    return sorted(set(_settled(findings)), key=lambda f: (f.row, f.place, order.index(f.rule)))


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


def _settled(findings: list[Finding]) -> Iterator[Finding]:
    explained = {
        (second, item.place)
        for item in findings
        for first, second in _EXPLAINS
        if item.rule == first
    }
    for item in findings:
        if (item.rule, item.place) not in explained:
            yield item
