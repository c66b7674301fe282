"""What may be replaced: nothing, an empty file, an earlier result; all else wants --force."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold import files
from fourfold.errors import UserError

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("content", "mark", "free"),
    [
        ("", "made by me", True),
        ("made by me\n" + "x" * 10_000, "made by me", True),
        ("x" * 10_000 + "\nmade by me\n", "made by me", True),
        ("x" * 10_000 + "made by me" + "x" * 10_000, "made by me", False),
        ("something else", "made by me", False),
        ("made by me", "", False),
        ("", "", True),
    ],
)
def test_what_may_be_replaced(tmp_path: Path, content: str, mark: str, free: bool) -> None:
    path = tmp_path / "x"
    files.require_mine(path, mark=mark, force=False)  # not there yet
    path.write_text(content)
    files.require_mine(path, mark=mark, force=True)
    if free:
        files.require_mine(path, mark=mark, force=False)
        return
    with pytest.raises(UserError, match="--force"):
        files.require_mine(path, mark=mark, force=False)


def test_pipes_are_written_to() -> None:
    files.require_mine("/dev/null", mark="", force=False)


@pytest.mark.parametrize("command", ["predict", "fit"])
def test_commands_replace_their_own_and_nothing_else(tmp_path, command, cli) -> None:
    rows = tmp_path / "rows.csv"
    lines = (GOLDEN / "bloom.csv").read_text().splitlines()
    rows.write_text("\n".join(lines[:12]) + "\n")
    out = tmp_path / "out"
    words = [command, str(rows), "--out", str(out)]
    cli(*words)
    first = out.read_text()
    cli(*words)
    out.write_text("notes of a week\n")
    assert "was not written by this command" in cli(*words, status=2)
    assert out.read_text() == "notes of a week\n"
    # Its own input is no result either.
    cli(command, rows, "--out", rows, status=2)
    cli(*words, "--force")
    assert out.read_text() == first
