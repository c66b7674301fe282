"""Logs by the table of read.toml: what is read of each, cell by cell."""

from __future__ import annotations

import shlex
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from fourfold.logs.row import shown_layout
from tests.logs import written
from tests.logs.reading import BLOOM, collected

TABLE = tomllib.loads(Path(__file__).with_name("read.toml").read_text())
LINES = TABLE.pop("lines")
TEXTS = {
    "megatron": written.megatron(BLOOM[0]),
    # Without what most forks do not print.
    "megatron, words": "".join(
        line
        for line in written.megatron(BLOOM[0], deepspeed=False)
        .replace("consumed tokens", "words")
        .splitlines(keepends=True)
        if not line.startswith(("  num_query_groups", "  group_query_attention"))
    ),
    "torchtitan": written.titan([2000, 6600, 6650, 6640]),
    "torchtitan, no configuration": written.titan([2000, 6600, 6650, 6640], config=False),
    "composer": written.composer([0, 10600, 10643, 10650]),
    "trainer, its end": written.printed("trainer.txt")
    + "{'train_runtime': 6750.0, 'train_samples_per_second': 14.2, 'epoch': 1.0}\n",
}
CASES = [
    pytest.param(log, name, cells, id=f"{what}: {name}".removesuffix(": "))
    for what, log in TABLE.items()
    for name, cells in (
        log["says"].items() if isinstance(log["says"], dict) else [("", log["says"])]
    )
]


def text_of(name: str) -> str:
    is_print = name.endswith((".txt", ".yaml"))
    return written.printed(name) if is_print else TEXTS.get(name, name)


def made(log: dict[str, Any], name: str) -> str:
    """The text of a log, with the parts of its name in their places."""
    parts = [*name.split(" | "), ""]
    text = text_of(log.get("log", ""))
    for old, new in log.get("change", {}).items():
        assert old in text
        text = text.replace(old, new)
    if log.get("told"):
        text = written.told(dict(part.split("=", 1) for part in parts[:-1]), text)
    else:
        text = text.replace("{0}", parts[0]).replace("{1}", parts[1])
    steps = log.get("steps", ())
    return (
        text
        + "".join(LINES[log["lines"]].format(*step) for step in steps)
        + text_of(log.get("then", ""))
    )


@pytest.mark.parametrize(("log", "name", "cells"), CASES)
def test_a_log_is_read_as_its_table_says(
    tmp_path: Path, log: dict[str, Any], name: str, cells: str
) -> None:
    (tmp_path / "run.log").write_text(made(log, name))
    (row,) = collected(
        tmp_path / "run.log", out=tmp_path / "out.csv", **log.get("given", {})
    ).rows_read
    told = row.cells | {"layout": shown_layout(row)}
    wanted = dict(cell.split("=", 1) for cell in shlex.split(cells))
    found = {column: told.get(column, "") for column in wanted}
    wrong = {c: found[c] for c in wanted if not fnmatchcase(found[c], wanted[c])}
    assert not wrong
