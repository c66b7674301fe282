"""Do the light commands start light? As a ratio to a bare interpreter, measured in the same run."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
COMMANDS = (
    ["--help"],
    ["flops", "--help"],
    ["flops", "--model", "mpt-7b", "--seq-len", "2048"],
    ["models"],
    ["models", "llama-3.1-8b"],
)
HEAVY = ("torch", "numpy", "rich", "plotly", "matplotlib")
RATIO = 12


def _environment() -> dict[str, str]:
    """A user's: compiled modules are kept, whatever the shell of the tests says."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(SOURCE)}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_heavy_modules_stay_out(words: list[str]) -> None:
    program = (
        "import sys; from fourfold.cli import main; code = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "[]"


def _cpu_s(*words: str) -> float:
    """CPU seconds of one start, best of nine: on a loaded machine the clock says nothing."""
    seconds = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *words], env=_environment(), capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def test_start_up_is_within_twelve_bare_interpreters() -> None:
    bare = _cpu_s("-c", "pass")
    for words in (["--help"], ["flops", "--model", "mpt-7b", "--seq-len", "2048"], ["models"]):
        ratio = _cpu_s("-m", "fourfold", *words) / bare
        assert ratio < RATIO, f"{words}: {ratio:.1f} bare interpreters"
