"""Temporary folders of commands: gone afterwards, also after a kill, and nobody else's ever."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fourfold.errors import MachineError
from fourfold.launch.folder import scratch

HOLD = """
import sys
from fourfold.launch.folder import scratch
with scratch() as folder:
    (folder / "rank-0.log").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def hold(tmp: Path) -> tuple[subprocess.Popen[str], Path]:
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "TMPDIR": str(tmp), "PYTHONPATH": source}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    return holder, Path(holder.stdout.readline().strip())


def test_what_a_killed_command_left_is_cleared_by_the_next(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, left = hold(tmp_path)
    killed.kill()
    killed.communicate()
    living, used = hold(tmp_path)  # clears the killed one's
    assert not left.exists()
    with scratch() as mine:
        assert mine.stat().st_mode & 0o777 == 0o700
        assert (used / "rank-0.log").exists()
    assert [path.name for path in tmp_path.iterdir()] == [used.name]
    living.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_one_stays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    precious = tmp_path / "precious"
    precious.mkdir(0o700)
    (precious / ".fourfold-scratch").touch()
    (tmp_path / "fourfold-abcdefgh").symlink_to(precious)
    shared = tmp_path / "fourfold-abcdefg1"
    shared.mkdir(0o755)
    unlocked = tmp_path / "fourfold-abcdefg2"
    unlocked.mkdir(0o700)
    (unlocked / "file").touch()
    linked = tmp_path / "fourfold-abcdefg3"
    linked.mkdir(0o700)
    (linked / ".fourfold-scratch").symlink_to(precious / ".fourfold-scratch")
    other = tmp_path / "fourfold-my-own-notes"
    other.mkdir(0o700)
    (other / ".fourfold-scratch").touch()
    before = sorted(tmp_path.rglob("*"))
    with scratch():
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_inside_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def stopped() -> None:
        with scratch() as folder:
            (folder / "x").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_the_machine_s_fault(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(MachineError, match="TMPDIR"), scratch():
        pass
