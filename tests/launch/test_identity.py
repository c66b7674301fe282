"""Whose process is whose? By a token in folder and process, never by the text of a path; and one
start at a time in a folder, however it is named."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fourfold.errors import UserError
from fourfold.launch.folder import end_processes_of, job_folder
from fourfold.launch.identity import TOKEN_FILE, VARIABLE, claim, new_mark
from fourfold.result import machine

SLEEP = "import time; time.sleep(600)"
STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _end_what_was_started() -> Iterator[None]:
    yield
    while STARTED:
        one = STARTED.pop()
        one.kill()
        one.wait()


def sleeper(mark: object, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, VARIABLE: str(mark)}
    one = subprocess.Popen([sys.executable, "-c", SLEEP, *words], env=environment)
    STARTED.append(one)
    return one


def test_a_leftover_is_ended_through_any_name(tmp_path: Path, monkeypatch) -> None:
    job = tmp_path / "real" / "job"
    job.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    for name in (job, tmp_path / "link" / "job", Path("job"), Path("..", "real", "job")):
        one = sleeper(new_mark(job))
        assert end_processes_of(name) == 1
        assert one.wait(120) == -9
    one = sleeper(new_mark(job))
    moved = (tmp_path / "real").rename(tmp_path / "moved")
    assert end_processes_of(moved / "job") == 1
    assert one.wait(120) == -9


def test_one_that_is_just_being_started_is_ended(tmp_path: Path, monkeypatch) -> None:
    """While a program is being loaded, its process has no environment to be known by; on a busy
    machine that is what a look at it usually finds."""
    for _ in range(2 * (os.cpu_count() or 1)):
        STARTED.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    for _ in range(30):
        one = sleeper(new_mark(tmp_path))
        monkeypatch.setattr(psutil, "pids", lambda pid=one.pid: [pid])  # the first to be seen
        assert end_processes_of(tmp_path) == 1
        assert one.wait(120) == -9


def test_one_that_starts_between_two_looks_is_ended(tmp_path: Path, monkeypatch) -> None:
    """It shows no environment at the first look, and is no longer starting at the second."""
    one, environ, looks = sleeper(new_mark(tmp_path)), psutil.Process.environ, []

    def environ_later(process: psutil.Process) -> dict[str, str]:
        looks.append(process.pid)
        return {} if len(looks) == 1 else environ(process)

    monkeypatch.setattr(psutil.Process, "environ", environ_later)
    monkeypatch.setattr(psutil, "pids", lambda: [one.pid])
    assert end_processes_of(tmp_path) == 1
    assert one.wait(120) == -9
    assert len(looks) > 1


def test_one_without_an_environment_is_left_alone(tmp_path: Path) -> None:
    new_mark(tmp_path)
    one = subprocess.Popen([sys.executable, "-c", SLEEP], env={})
    STARTED.append(one)
    assert end_processes_of(tmp_path) == 0
    assert one.poll() is None


def test_a_stopped_leftover_is_ended(tmp_path: Path) -> None:
    one = sleeper(new_mark(tmp_path))
    os.kill(one.pid, 19)
    assert end_processes_of(tmp_path) == 1
    assert one.wait(120) == -9


def test_nobody_else_is_ended(tmp_path: Path) -> None:
    """Each of these resembles a leftover of the folder in all but one thing."""
    job, copy, other = tmp_path / "job", tmp_path / "copy", tmp_path / "other" / "job"
    job.mkdir()
    other.mkdir(parents=True)
    mark = new_mark(job)
    shutil.copytree(job, copy)
    theirs = new_mark(other)
    token, number = mark.split(":")
    spared = [
        sleeper(theirs),  # another training's
        sleeper(f"{'0' * 32}:{number}"),  # of an earlier start in this folder
        sleeper(f"{token}:{int(number) + 10**6}"),
        sleeper(f"{mark}0"),
        sleeper(f"x{mark}"),
        sleeper("", "fourfold.engine.worker", f"{job}/job.json", f"{VARIABLE}={mark}"),
        sleeper(theirs, mark, f"{job}/job.json"),
    ]
    mine = sleeper(mark)
    assert end_processes_of(copy) == 0
    assert end_processes_of(tmp_path) == 0
    assert end_processes_of(tmp_path / "nowhere") == 0
    assert end_processes_of(job) == 1
    assert mine.wait(120) == -9
    assert [one.poll() for one in spared] == [None] * len(spared)


def test_where_a_living_launcher_works_nothing_is_ended(tmp_path: Path, monkeypatch) -> None:
    """Where no folder can be locked, a start ends nothing by itself; who asks may know more."""
    with job_folder(tmp_path):
        one = sleeper(new_mark(tmp_path))
        assert end_processes_of(tmp_path) == 0

    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fourfold.launch.folder.fcntl.flock", refuse)
    token = (tmp_path / TOKEN_FILE).read_bytes()
    with job_folder(tmp_path):
        assert one.poll() is None
        (tmp_path / TOKEN_FILE).write_bytes(token)  # a start takes it away
    assert end_processes_of(tmp_path) == 1


def test_a_folder_is_one_start_s_at_a_time(tmp_path: Path, monkeypatch) -> None:
    job = tmp_path / "real" / "job"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    with job_folder(job):
        for name in (job, tmp_path / "link" / "job", Path("job"), Path("..", "link", "job")):
            with pytest.raises(UserError, match="another start"), job_folder(name):
                pass
        (tmp_path / "real").rename(tmp_path / "moved")
        with pytest.raises(UserError, match="another start"), job_folder(tmp_path / "moved/job"):
            pass
    with job_folder(tmp_path / "moved" / "job"):
        pass


@pytest.mark.parametrize("kind", ["fifo", "folder", "garbage", "long", "missing"])
def test_an_odd_token_is_none(tmp_path: Path, kind: str) -> None:
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    job.mkdir()
    one = sleeper(new_mark(job))
    token = job / TOKEN_FILE
    token.rename(elsewhere)
    if kind == "fifo":
        os.mkfifo(token)
    elif kind == "folder":
        token.mkdir()
    elif kind != "missing":
        token.write_bytes(b"\xff" * 40 if kind == "garbage" else elsewhere.read_bytes()[:32] * 9)
    assert end_processes_of(job) == 0
    assert one.poll() is None
    with job_folder(job):  # and a start is not hindered by it
        assert not token.exists()


def test_links_in_a_job_folder_lead_nowhere(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.log").write_text("years")
    (precious / "beat-0.json").write_text("data")
    job = tmp_path / "job"
    job.mkdir()
    for name in ("job.json", "report.json", "beat-0.json", "rank-0.log", "host.log", TOKEN_FILE):
        (job / name).symlink_to(precious / "thesis.log")
    (job / "failed-0").symlink_to(precious)
    (job / "stack-1.txt").mkdir()
    (job / "stack-1.txt" / "inside").symlink_to(precious)
    with job_folder(job):
        assert list(job.iterdir()) == []
        new_mark(job)
    assert (precious / "thesis.log").read_text() == "years"
    assert sorted(path.name for path in precious.iterdir()) == ["beat-0.json", "thesis.log"]
    link = tmp_path / "link"
    link.symlink_to(precious)
    with pytest.raises(UserError, match="is a symbolic link"), job_folder(link):
        pass
    assert end_processes_of(link) == 0


def test_what_is_not_the_job_s_stays(tmp_path: Path) -> None:
    for name in ("owner.json", "predicted.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    with job_folder(tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 3


def test_a_process_is_known_by_its_birth_while_it_lives() -> None:
    one = sleeper("")
    born = machine.process_born(one.pid)
    assert born
    assert not machine.is_suspended(one.pid)
    os.kill(one.pid, 19)
    os.waitpid(one.pid, os.WUNTRACED)
    assert machine.is_suspended(one.pid)
    assert machine.process_born(one.pid) == born
    one.kill()
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    assert (machine.is_suspended(one.pid), machine.process_born(one.pid)) == (False, None)
    one.wait()
    assert (machine.is_suspended(one.pid), machine.process_born(one.pid)) == (False, None)
    assert machine.process_born(2**30) is None


def test_a_birth_outlasts_a_clock_that_is_set(monkeypatch) -> None:
    """psutil counts it from the clock; both of its times move together when that is set."""
    before, shift_s = machine.process_born(os.getpid()), 86_400.0
    created, boot_time = psutil.Process.create_time, psutil.boot_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda own: created(own) + shift_s)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + shift_s)
    assert machine.process_born(os.getpid()) == before


@pytest.mark.parametrize("package", ["filelock", "psutil"])
def test_a_missing_package_of_those_who_run_is_named(tmp_path: Path, monkeypatch, package) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"needs the package {package}, .*fourfold\\[run\\]"):
        claim(tmp_path) if package == "filelock" else machine.process_born(os.getpid())
