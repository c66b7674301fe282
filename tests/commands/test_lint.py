"""The lint command: exit codes, forms of output, and that it never calls 'nothing read' clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import Cli

GOLDEN = Path(__file__).parent.parent / "golden"


def test_a_clean_file_leaves_with_zero(cli: Cli) -> None:
    assert "nothing found; 1 table, 188 rows checked" in cli("lint", GOLDEN / "par4d.csv")


def test_ignored_rules_do_not_count(cli: Cli) -> None:
    cli("lint", GOLDEN / "bloom.csv", status=1)
    cli("lint", GOLDEN / "bloom.csv", "--ignore", "size-label")
    assert "did you mean 'size-label'?" in cli(
        "lint", GOLDEN / "bloom.csv", "--ignore", "size-lable", status=2
    )


@pytest.mark.parametrize("form", ["text", "md", "csv", "json"])
def test_every_form_prints(form: str, cli: Cli) -> None:
    cli("lint", "--rules", "--format", form)
    assert "gpus-axes" in cli("lint", GOLDEN / "raw_samples.md", "--format", form, status=1)
