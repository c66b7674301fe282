"""Does the built package work where there is no checkout? Data files, commands, workers."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLAN = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8", "--seq-len", "4k",
        "--global-batch", "64", "--top", "2", "--format", "json"]  # fmt: skip


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`fourfold` of a fresh environment. numpy and torch are those of this one: a path in a .pth
    file brings packages along, and not this one's link to the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("fourfold-*.whl")
    venv.create(folder / "env", with_pip=False)
    python = str(folder / "env" / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", str(wheel)], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    said = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    packages = sysconfig.get_path("purelib")
    (Path(said.stdout.strip()) / "borrowed.pth").write_text(f"{packages}\n")
    return str(folder / "env" / "bin" / "fourfold")


def _run(command: str, *words: str, cwd: Path) -> str:
    done = subprocess.run([command, *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_planning_without_the_checkout(command: str, tmp_path: Path) -> None:
    python = str(Path(command).with_name("python"))
    where = subprocess.run(
        [python, "-c", "import fourfold; print(fourfold.__file__)"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not Path(where.stdout.strip()).is_relative_to(ROOT)
    assert len(json.loads(_run(command, *PLAN, cwd=tmp_path))["ranked"]) == 2
    assert "h100-80gb" in _run(command, "clusters", "--gpu", "all", cwd=tmp_path)


@pytest.mark.slow
def test_the_demo_without_the_checkout(command: str, tmp_path: Path) -> None:
    words = ["demo", "--layouts", "1", "--steps", "2", "--format", "json"]
    (run,) = json.loads(_run(command, *words, cwd=tmp_path))["runs"]
    assert run["outcome"] == "ok"
