"""The lint command: exit codes, forms of output, and that it never calls 'nothing read' clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli import main

GOLDEN = Path(__file__).parent.parent / "golden"


def test_findings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(GOLDEN / "raw_samples.md"), "--format", "json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"row", "rule", "value", "expected", "repair"} <= set(findings[0])
    by_rule = {item["rule"]: item for item in findings}
    assert by_rule["gpus-axes"]["row"] == 120
    assert {"gpus-axes", "batch-heading", "size-label"} <= set(by_rule)


def test_a_clean_file_leaves_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(GOLDEN / "par4d.csv")]) == 0
    assert "nothing found; 1 table, 188 rows checked" in capsys.readouterr().out


def test_ignored_rules_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(GOLDEN / "bloom.csv")]) == 1
    assert main(["lint", str(GOLDEN / "bloom.csv"), "--ignore", "size-label"]) == 0
    assert main(["lint", str(GOLDEN / "bloom.csv"), "--ignore", "size-lable"]) == 2
    assert "did you mean 'size-label'?" in capsys.readouterr().err


def test_a_file_without_tables_is_a_bad_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.md").write_text("# nothing here\n")
    assert main(["lint", str(tmp_path / "notes.md")]) == 2
    assert main(["lint", str(tmp_path / "missing.md")]) == 2
    assert main(["lint"]) == 2
    assert "contains no table of a known style" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "md", "csv", "json"])
def test_every_form_prints(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--rules", "--format", form]) == 0
    assert main(["lint", str(GOLDEN / "raw_samples.md"), "--format", form]) == 1
    assert "gpus-axes" in capsys.readouterr().out
