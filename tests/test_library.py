"""Is there a library under the command line? Its names, its silence, its page, and CSV as rows."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fourfold
from fourfold.cli import main
from fourfold.commands import COMMANDS, load

ROOT = Path(__file__).parent.parent
VERBS = ("plan", "predict", "bench", "sweep", "train", "verify", "dryrun", "report")
TYPES = ("RunSpec", "Layout", "Batch", "Policy", "Cluster")
SMALL = ["--model", "llama-3.1-8b", "--gpus", "8", "--seq-len", "4096", "--global-batch", "64"]
RECORDED = str(Path(__file__).parent / "recorded" / "runs")
# Commands that need no rank, each with --format csv.
TABLES = (
    ["plan", *SMALL, "--gpu", "h100-80gb"],
    ["plan", *SMALL, "--gpu", "h100-80gb", "--explain", "dp8"],
    ["plan", *SMALL, "--gpu", "h100-80gb", "--explain", "dp3"],
    ["plan", "--stack", "list"],
    ["advise", "--gpu", "h100-80gb", "--hidden", "4096", "--tp", "2"],
    ["models"],
    ["models", "llama-3.1-8b"],
    ["models", "gpt-181b", "--tp", "8", "--pp", "12", "--dp", "4"],
    ["clusters"],
    ["clusters", "jean-zay"],
    ["clusters", "--gpu", "all"],
    ["clusters", "--gpu", "h100-80gb"],
    ["flops", "--model", "mpt-7b", "--seq-len", "2048"],
    ["trace", "ring", "--model", "llama-3.1-8b", "--tokens", "8192", "--cp", "4"],
    ["runs", "--runs", RECORDED],
    ["report", RECORDED, "--style", "mpt"],
    ["report", RECORDED, str(ROOT / "tests/golden/raw_samples.md"), "--style", "topology"],
    ["report", RECORDED, "--style", "scaling"],
    ["lint", "--rules"],
    ["lint", str(ROOT / "tests/golden/raw_samples.md")],
    ["score", str(ROOT / "tests/golden/mpt.csv")],
)


def test_names_are_callable_after_every_submodule_is_imported() -> None:
    for module in pkgutil.walk_packages(fourfold.__path__, "fourfold."):
        if ".engine" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in (*VERBS, *TYPES):
        assert callable(getattr(fourfold, name)), name
        assert name in dir(fourfold)
    with pytest.raises(AttributeError):
        fourfold.nothing  # noqa: B018


def test_the_verbs_need_neither_argparse_nor_torch() -> None:
    program = (
        f"import sys; from fourfold import {', '.join((*VERBS, *TYPES))};"
        "print([name for name in ('argparse', 'torch') if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_page_runs_and_prints_only_what_it_shows() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    scope: dict[str, object] = {}
    for code, shown in re.findall(
        r"^```python\n(.*?)^```\n(?:```\n(.*?)^```\n)?", page, re.M | re.S
    ):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            exec(code, scope)
        assert (out.getvalue(), err.getvalue()) == (shown, ""), code


@pytest.mark.parametrize("words", TABLES, ids=" ".join)
def test_csv_is_one_table_with_one_header(words: list[str], capsys) -> None:
    main([*words, "--format", "csv"])
    text = capsys.readouterr().out
    rows = list(csv.reader(io.StringIO(text)))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(set(rows[0])) == len(rows[0])
    named = list(csv.DictReader(io.StringIO(text)))
    assert all(None not in row and None not in row.values() for row in named)


def test_first_help_is_short() -> None:
    for name in COMMANDS:
        shown = [one for one in load(name).options if not one.rare and one.names[0][0] == "-"]
        assert len(shown) <= 25, f"{name}: {len(shown)}"
