"""Finds rows of a table that cannot be right: rules with fixed ids, and the likely repairs. Every
rule compares what a table says twice; measured speed itself is never doubted.
"""

from __future__ import annotations

from fourfold.result.record import grouped
from fourfold.tables import rules_copies, rules_shape, rules_speed, rules_work
from fourfold.tables.document import Document
from fourfold.tables.records import Finding, TablesFile, finding, records, with_text

# id -> what must hold. Ids are part of the interface: tools and notes refer to them.
RULES = {
    "heading-count": "a row has as many cells as the table has headings",
    "gpus-axes": "GPUs (or nodes x GPUs per node) = dp x tp x cp x pp",
    "expert-ranks": "PP x EP x ETP divides the GPUs: experts divide the ranks of a stage again",
    "experts-divide": "EP divides the experts, ETP the width of one",
    "experts-counted": "TFLOPs count the experts a token meets, with all of their matrices",
    "batch-reach": "the global batch is a whole number of micro batches on every dp rank",
    "batch-heading": "batch and sequence length in the text above agree with the rows",
    "batch-tokens": "global batch in tokens = sequences x sequence length",
    "layers-stages": "layers divide into the pipeline's stages (embedding and head may count)",
    "size-label": "the size label or parameter count fits the shape",
    "work-constant": "TFLOPs x seconds x GPUs / batch is the model's FLOPs per sequence",
    "convention-mix": "all rows count FLOPs by the same convention (and the one that is stated)",
    "throughput": "samples/s, tokens/s, tokens/s/GPU and seconds per step agree",
    "hfu-mfu": "HFU is MFU times what activation checkpointing runs again",
    "possible-number": "a number is one that can have been measured or counted",
    "utilisation": "no rate exceeds the device's dense peak, no share 100%",
    "memory-device": "memory does not exceed the device's",
    "memory-order": "a larger micro batch, all else equal, does not need less memory",
    "swapped-values": "two columns of a row are not exchanged",
    "duplicate-row": "no row stands twice in one table",
    "copied-cell": "no measured value stands in two layouts or two columns",
}
_ROW_CHECKS = {**rules_shape.ROW_CHECKS, **rules_speed.ROW_CHECKS}
_FILE_CHECKS = (*rules_shape.CHECKS, *rules_speed.CHECKS, *rules_work.CHECKS, *rules_copies.CHECKS)


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


def _unexplained(findings: list[Finding]) -> list[Finding]:
    explained = {
        (second, item.place)
        for item in findings
        for first, second in _EXPLAINS
        if item.rule == first
    }
    return [item for item in findings if (item.rule, item.place) not in explained]
