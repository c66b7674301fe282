"""The file of collected rows: new ones join those that are there, whoever else writes it."""

from __future__ import annotations

import fnmatch
from collections import Counter
from pathlib import Path

from fourfold import files
from fourfold.escape import csv_text
from fourfold.logs.row import COLUMNS, EXTRA, Row
from fourfold.logs.tables import read_table
from fourfold.result.job import LOG_FILES

_NAMES = (*COLUMNS, *EXTRA)
# In the headings of every such file.
_MARK = ",".join(EXTRA)


def check_out(out: str, *, force: bool) -> None:
    """Before logs are read: is the file ours to write?"""
    files.require_mine(out, mark=_MARK, force=force)


def keep(rows: list[Row], out: str, *, force: bool) -> int:
    """Write them with the others of the file, but for those of the same logs; how many it has."""
    if not rows:
        return len(_existing(out, force=force))
    with files.locked(out):
        logs = {row["log"] for row in rows}
        kept = [row for row in _existing(out, force=force) if row["log"] not in logs]
        _name(rows, {row["row_id"] for row in kept})
        table = [_NAMES, *([row[name] for name in _NAMES] for row in (*kept, *rows))]
        files.write_text(out, csv_text(table))
    return len(kept) + len(rows)


def _existing(out: str, *, force: bool) -> list[Row]:
    check_out(out, force=force)
    if force or not Path(out).is_file() or not Path(out).stat().st_size:
        return []
    return read_table(out, None).rows


def _name(rows: list[Row], taken: set[str]) -> None:
    """A row is called as its file, with a number where that has several runs."""
    per_log = Counter(row["log"] for row in rows)
    seen: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for row in rows:
        log = Path(row["log"])
        seen[row["log"]] += 1
        number = f"-{seen[row['log']]}" if per_log[row["log"]] > 1 else ""
        names = [row["row_id"]] if row["row_id"] else []
        if fnmatch.fnmatch(log.name, LOG_FILES):  # of a run in a store, whose folder has its name
            names.append(f"{log.parent.name}{number}")
        last = f"{log.stem}{number}"
        names += [last, f"{log.parent.name}-{last}"]
        free = next((name for name in names if name not in taken), None)
        while free is None or free in taken:
            tried[last] += 1
            free = f"{last}.{tried[last] + 1}"
        row.cells["row_id"] = free
        taken.add(free)
