"""What may be replaced: nothing, an empty file, an earlier result; all else wants --force."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold import files
from fourfold.cli import main
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
def test_commands_replace_their_own_and_nothing_else(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    lines = (GOLDEN / "bloom.csv").read_text().splitlines()
    rows.write_text("\n".join(lines[:12]) + "\n")
    out = tmp_path / "out"
    words = [command, str(rows), "--out", str(out)]
    assert main(words) == 0
    first = out.read_text()
    assert main(words) == 0
    out.write_text("notes of a week\n")
    assert main(words) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert out.read_text() == "notes of a week\n"
    # Its own input is no result either.
    assert main([command, str(rows), "--out", str(rows)]) == 2
    assert main([*words, "--force"]) == 0
    assert out.read_text() == first
