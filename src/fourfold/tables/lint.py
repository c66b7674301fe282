"""Find rows of published tables that contradict themselves.

Every rule compares two things that one table says; a measured speed by itself is never doubted.
"""

from __future__ import annotations

from fourfold.tables import rules_layout, rules_rates, rules_work
from fourfold.tables.document import Document
from fourfold.tables.finding import Finding, TablesFile
from fourfold.tables.records import records, with_text
from fourfold.tables.row import grouped

# id -> what must hold. Ids are part of the interface: tools and notes refer to them.
RULES = {
    "gpus-axes": "GPUs (or nodes x GPUs per node) = dp x tp x cp x pp",
    "expert-ranks": "PP x EP x ETP divides the GPUs: experts divide the ranks of a stage again",
    "experts-divide": "EP divides the experts, ETP the width of one",
    "experts-counted": "TFLOPs count the experts a token meets, with all of their matrices",
    "batch-reach": "the global batch is a whole number of micro batches on every dp rank",
    "batch-heading": "batch and sequence length in the text above agree with the rows",
    "batch-tokens": "global batch in tokens = sequences x sequence length",
    "size-label": "the size label or parameter count fits the shape",
    "work-constant": "TFLOPs x seconds x GPUs / batch is the model's FLOPs per sequence",
    "convention-mix": "all rows count FLOPs by the same convention (and the one that is stated)",
    "throughput": "samples/s, tokens/s, tokens/s/GPU and seconds per step agree",
    "hfu-mfu": "HFU is MFU times what activation checkpointing runs again",
    "swapped-values": "two columns of a row are not exchanged",
}
# rule -> rules that would only repeat its finding in other words.
_EXPLAINS = {
    "gpus-axes": ("batch-reach",),
    "batch-heading": ("work-constant", "batch-tokens"),
    "swapped-values": ("work-constant", "throughput", "hfu-mfu"),
}
_ROW_CHECKS = (*rules_layout.ROW_CHECKS, *rules_rates.ROW_CHECKS)
_FILE_CHECKS = (*rules_layout.FILE_CHECKS, *rules_work.FILE_CHECKS, *rules_rates.FILE_CHECKS)


def lint(document: Document) -> list[Finding]:
    """Return the findings of all rules, by line, without those that another finding explains."""
    rows = tuple(records(document))
    file = TablesFile(tuple(with_text(document)), rows, grouped(rows, ("table",)))
    findings = [finding for row in rows for check in _ROW_CHECKS for finding in check.findings(row)]
    for check in _FILE_CHECKS:
        findings += check(file)
    rank = {rule: at for at, rule in enumerate(RULES)}
    return sorted(
        dict.fromkeys(_unexplained(findings)), key=lambda f: (f.row, f.place, rank[f.rule])
    )


def _unexplained(findings: list[Finding]) -> list[Finding]:
    explained = {
        (rule, finding.place) for finding in findings for rule in _EXPLAINS.get(finding.rule, ())
    }
    return [finding for finding in findings if (finding.rule, finding.place) not in explained]
