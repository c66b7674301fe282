"""Do the commands still answer what they answered? Every number of a recorded answer of each.

A difference is a bug unless README.md here names its cause. To record again:
python tests/recorded/test_recorded.py [NAME ...]
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main

FOLDER = Path(__file__).parent
COMMANDS: dict[str, list[str]] = tomllib.loads((FOLDER / "commands.toml").read_text())
# Kernels of NumPy round differently on other processors.
RELATIVE = 1e-9
NONE = 1e-12  # what is left of a bubble of nothing


def answer_of(name: str) -> dict[str, Any]:
    """Exit status and answer of one recorded command, as plain data."""
    words = COMMANDS[name]
    text, was = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.csv"
        writes = "OUT" in words
        words = [str(out) if word == "OUT" else word for word in words]
        os.chdir(FOLDER)
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
                status = main(words if writes else [*words, "--format", "json"])
        finally:
            os.chdir(was)
            (FOLDER / "runs" / ".index.json").unlink(missing_ok=True)
        if writes:
            return {"status": status, "answer": list(csv.reader(out.read_text().splitlines()))}
    answer = json.loads(text.getvalue().replace(str(FOLDER), "HERE")) if text.getvalue() else None
    if words[0] == "dryrun":
        for stage in answer["stages"]:
            del stage["seconds"]  # how long the count itself took
    return {"status": status, "answer": answer}


def differences(then: Any, now: Any, path: str = "") -> list[str]:
    """Places where two answers differ by more than rounding."""
    if isinstance(then, dict) and isinstance(now, dict):
        lines = [
            f"{path}.{key}: only {'now' if key in now else 'then'}" for key in then.keys() ^ now
        ]
        for key in then.keys() & now.keys():
            lines += differences(then[key], now[key], f"{path}.{key}")
        return lines
    if isinstance(then, list) and isinstance(now, list):
        if len(then) != len(now):
            return [f"{path}: {len(then)} entries then, {len(now)} now"]
        return [
            line
            for at, pair in enumerate(zip(then, now, strict=True))
            for line in differences(*pair, f"{path}[{at}]")
        ]
    return [] if _same(then, now) else [f"{path}: {then!r} then, {now!r} now"]


def _same(then: Any, now: Any) -> bool:
    if isinstance(then, bool) or isinstance(now, bool) or then is None or now is None:
        return then is now
    with contextlib.suppress(TypeError, ValueError):
        return math.isclose(float(then), float(now), rel_tol=RELATIVE, abs_tol=NONE)
    return then == now


# A minute of a core: what it counts is compared with the planner in tests/engine.
SLOW = {"dryrun-3b"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in COMMANDS],
)
def test_the_answer_is_the_recorded_one(name: str) -> None:
    recorded = json.loads((FOLDER / "answers" / f"{name}.json").read_text())
    differing = differences(recorded, answer_of(name))
    assert not differing, "\n".join(sorted(differing)[:20])


if __name__ == "__main__":
    for name in sys.argv[1:] or COMMANDS:
        (FOLDER / "answers" / f"{name}.json").write_text(json.dumps(answer_of(name)) + "\n")
