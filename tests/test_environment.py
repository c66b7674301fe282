"""Does the bootstrap install once, and again after the pins or the folder changed?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fourfold.cli import main
from fourfold.launch.local import require_torch

ROOT = Path(__file__).parent.parent


def _checkout(folder: Path) -> Path:
    """A checkout whose environment's python only writes down how it was called."""
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (folder / ".venv" / ".made").touch()
    (binaries / "python").write_text('#!/bin/sh\necho "$*" >>"$(dirname "$0")/calls"\n')
    (binaries / "python").chmod(0o755)
    (folder / "scripts").mkdir()
    for name in ("fourfold", "scripts/environment", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def _calls(folder: Path, *words: str) -> list[str]:
    """What the environment's python was asked to do by one ./fourfold call."""
    calls = folder / ".venv" / "bin" / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        [str(folder / "fourfold"), *words],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [
        line.split(" ", 3)[2] if "pip" in line else "run"
        for line in calls.read_text().split("\n")[:-1]
    ]


def test_installs_once_and_again_after_a_move(tmp_path: Path) -> None:
    here = _checkout(tmp_path / "a folder")
    assert _calls(here, "models") == ["install", "run"]
    assert _calls(here, "models") == ["run"]
    there = here.rename(tmp_path / "moved")
    assert _calls(there, "models") == ["install", "run"]
    with (there / "constraints.txt").open("a") as pins:
        pins.write("# another\n")
    assert _calls(there, "models") == ["install", "run"]


def _slow_install(folder: Path) -> Path:
    """Installing takes a while, and says when it begins and ends."""
    binaries = folder / ".venv" / "bin"
    (binaries / "python").write_text(
        '#!/bin/sh\nlog="$(dirname "$0")/calls"\n'
        'case "$*" in *pip*) echo begin >>"$log"; sleep 1; echo end >>"$log" ;; '
        '*) echo run >>"$log" ;; esac\n'
    )
    return binaries / "calls"


def _start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(folder / "fourfold"), "models"],
        env={"PATH": "/usr/bin:/bin"},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_first_uses_at_once_install_once(tmp_path: Path) -> None:
    here = _checkout(tmp_path / "here")
    calls = _slow_install(here)
    started = [_start(here) for _ in range(3)]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    lines = calls.read_text().split()
    assert (lines.count("begin"), lines.count("end"), lines.count("run")) == (1, 1, 3)
    assert lines.index("end") < lines.index("run")
    assert sum("waiting for another first use" in text for text in said) <= 2


def test_a_killed_first_use_holds_nobody_up(tmp_path: Path) -> None:
    here = _checkout(tmp_path / "here")
    calls = _slow_install(here)
    first = _start(here)
    while not calls.exists():
        time.sleep(0.01)
    first.kill()
    second = _start(here)
    said = second.communicate(timeout=300)[1]
    first.communicate(timeout=300)
    assert second.returncode == 0, said
    # What the first had started ran to its end before the second began.
    assert calls.read_text().split() == ["begin", "end", "begin", "end", "run"]


def test_torch_comes_when_a_command_has_something_to_run(tmp_path: Path, monkeypatch) -> None:
    here = _checkout(tmp_path / "here")
    assert _calls(here, "verify") == ["install", "run"]  # of the core
    assert _calls(here, "fetch-torch") == ["install"]
    asked = tmp_path / "asked"
    script = tmp_path / "fetch"
    script.write_text(f'#!/bin/sh\necho "$*" >>{asked}\n')
    script.chmod(0o755)
    monkeypatch.setenv("FOURFOLD_FETCH", str(script))
    illegal = ["--model", "llama-tiny", "--gpus", "3", "--tp", "3", "--seq-len", "128"]
    assert main(["bench", *illegal, "--runs", str(tmp_path / "runs")]) == 1
    assert not asked.exists()
    require_torch.cache_clear()
    require_torch()
    assert asked.read_text() == "fetch-torch\n"


def _index(folder: Path, releases: dict[str, str]) -> str:
    """Return the address of a package index in a folder, with one release of each package."""
    for package, version in releases.items():
        page = folder / package / "index.html"
        page.parent.mkdir(parents=True)
        wheel = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        page.write_text(f'<a href="{wheel}" data-requires-python="&gt;=3.99">{wheel}</a>')
    return folder.as_uri()


def test_newest_compares_the_index_with_the_pins(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
    }
    env["PIP_INDEX_URL"] = _index(tmp_path, {"torchtitan": "99.0", "megatron-core": "0.0.1"})
    command = [sys.executable, str(ROOT / "scripts" / "newest")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "release 99.0 is newer" in lines["torchtitan"]
    assert lines["megatron-core"].startswith("0.0.1 is the newest release")
    assert "the package index does not answer" in lines["deepspeed"]
