"""Do the scripts offer what the parsers take? bash for real, zsh and fish where installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fourfold.commands import COMMANDS
from fourfold.commands.serve import candidates
from fourfold.spec import catalog

SOURCE = Path(__file__).parents[2] / "src"
CASES = tomllib.loads(Path(__file__).with_name("completed.toml").read_text())
MPT = ["mpt-760m", "mpt-7b", "mpt-70b"]


@pytest.mark.parametrize(("words", "expected"), CASES.items())
def test_candidates(words, expected):
    assert candidates(shlex.split(words)) == expected


def test_all_commands_and_all_of_their_flags_complete():
    assert set(COMMANDS) < set(candidates([""]))
    for command in COMMANDS:
        assert "--help" in candidates([command, "--"])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A `fourfold` on PATH that runs this source."""
    path = tmp_path / "fourfold"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{SOURCE}" exec "{sys.executable}" -m fourfold "$@"\n')
    path.chmod(0o755)
    return path


def _shell(words: list[str], program: Path) -> str:
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_fills_in_what_is_typed(program):
    script = """
eval "$(fourfold completion bash)"
COMP_WORDS=(fourfold flops --gpu h100-) COMP_CWORD=3
_fourfold
printf '%s\\n' "${COMPREPLY[@]}"
COMP_WORDS=(fourfold cl) COMP_CWORD=1
_fourfold
printf '%s\\n' "${COMPREPLY[@]}"
complete -p fourfold
"""
    printed = _shell(["bash", "-c", script], program).splitlines()
    gpus = [name for name in catalog.device_names() if name.startswith("h100-")]
    assert printed[:-1] == [*gpus, "clusters"]
    assert printed[-1].startswith("complete -o bashdefault -o default -F _fourfold")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_script(program):
    script = """
autoload -Uz compinit; compinit -D -u
eval "$(fourfold completion zsh)"
print -r -- "$_comps[fourfold]"
compadd() { shift; print -rl -- "${(P@)1}" }
words=(fourfold models mpt-7) CURRENT=3
_fourfold
"""
    printed = _shell(["zsh", "-f", "-c", script], program).split()
    assert printed == ["_fourfold", "mpt-760m", "mpt-7b", "mpt-70b"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(program, tmp_path):
    (tmp_path / "fourfold.fish").write_text(_shell([str(program), "completion", "fish"], program))
    script = f"source {tmp_path}/fourfold.fish; complete -C 'fourfold models mpt-7'"
    printed = _shell(["fish", "--no-config", "-c", script], program).split()
    assert sorted(printed) == sorted(MPT)
