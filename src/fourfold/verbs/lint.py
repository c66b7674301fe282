"""lint: rows of published tables that cannot be right, and what they should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError, nearest
from fourfold.tables.document import Document
from fourfold.tables.finding import Finding
from fourfold.tables.forms import read_file
from fourfold.tables.lint import RULES
from fourfold.tables.lint import lint as findings_of
from fourfold.tables.styles import style_of
from fourfold.verbs import Answer


@dataclass(frozen=True, slots=True)
class Rules(Answer):
    rules: dict[str, str]

    def rows(self) -> list[dict[str, Any]]:
        return [{"rule": name, "what": what} for name, what in self.rules.items()]


@dataclass(frozen=True, slots=True)
class Findings(Answer):
    findings: tuple[tuple[str, Finding], ...]
    checked: str

    def plain(self) -> dict[str, Any]:
        return {"findings": self.rows(), "checked": self.checked}

    def rows(self) -> list[dict[str, Any]]:
        return [{"file": path, **dataclasses.asdict(item)} for path, item in self.findings]


def lint_rules() -> Rules:
    return Rules(RULES)


def lint(paths: Sequence[str], *, ignore: Sequence[str] = ()) -> Findings:
    """Of files with tables in Markdown, CSV or JSON, without those of the ignored rules."""
    for rule in ignore:
        if rule not in RULES:
            raise UserError("unknown rule", field="ignore", value=rule, hint=nearest(rule, RULES))
    if not paths:
        raise UserError("is required", field="FILE", hint="a .md, .csv or .json file")
    found: list[tuple[str, Finding]] = []
    tables = rows = 0
    for path in paths:
        document = read_file(path)
        tables, rows = tables + _known(document, path), rows + _rows(document)
        found += [(path, item) for item in findings_of(document) if item.rule not in ignore]
    return Findings(tuple(found), f"{tables} tables, {rows} rows checked")


def _known(document: Document, path: str) -> int:
    """Tables whose style is known. Checking none would look like a clean bill: that is an error."""
    known = sum(style_of(table) != "other" for table in document.tables)
    if not known:
        raise UserError(
            "contains no table of a known style",
            field="FILE",
            value=path,
            hint="known styles: mpt, topology, scaling, reference (docs/tables.md)",
        )
    return known


def _rows(document: Document) -> int:
    return sum(len(table.data) for table in document.tables if style_of(table) != "other")
