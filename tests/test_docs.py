"""Is what the README and docs show what the commands print?

A ```console block is run: each `$ fourfold ...` line through the command line; the lines below it
must be its output, where a line of three dots stands for any lines left out. Blocks marked
```console measured hold numbers of one machine; they and the ```sh blocks are walked in the order
of the pages, in a copy of the checkout (in the longer set). A block marked `gpu` or `cluster` needs
one; its commands must parse.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli import COMMANDS, command_parser, main
from fourfold.commands import load

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"^```(?:console|sh)(?P<marks>[a-z ]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL
)
# Where a walk can't go on: the suite itself, and machines that are not here.
_ELSEWHERE = ("gpu", "cluster")


def _commands(block: str) -> list[tuple[list[str], list[str]]]:
    """(words after `fourfold`, lines printed below) of a block; other programs are left out."""
    found: list[tuple[list[str], list[str]]] = []
    current: list[str] | None = None
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if line.startswith(("$ ", "fourfold ", "./fourfold ")):
            current = []
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and words[0] in ("fourfold", "./fourfold"):
                found.append((words[1:], current))
        elif current is not None:
            current.append(line)
    return found


def _pages() -> list[Path]:
    """The front page, then the others in the order it names them."""
    named = re.findall(r"\]\((docs/[a-z-]+\.md)\)", (ROOT / "README.md").read_text())
    known = [ROOT / name for name in dict.fromkeys(named)]
    return [ROOT / "README.md", *known, *(page for page in PAGES[1:] if page not in known)]


def _cases() -> list[tuple[str, str, list[str], list[str]]]:
    """(page, marks of the block; 'sh' among them where it shows no output, words, lines shown)."""
    cases = []
    for page in _pages():
        for block in _BLOCK.finditer(page.read_text()):
            marks = block["marks"] + (" sh" if block[0].startswith("```sh") else "")
            for words, shown in _commands(block["body"]):
                cases.append((page.name, marks, words, shown))
    return cases


CASES = _cases()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        pytest.param(w, s, id=f"{page}: {' '.join(w)}")
        for page, marks, w, s in CASES
        if not marks.strip()
    ],
)
def test_console_blocks_are_real(words: list[str], shown: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(words)
    lines = (err.getvalue() + out.getvalue()).rstrip("\n").splitlines()
    printed = [line for line in lines if not line.startswith("searching ")]  # of a slow machine
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.rstrip()) + "\n"
        for line in shown
    )
    text = "".join(f"{line.rstrip()}\n" for line in printed)
    assert re.fullmatch(pattern.rstrip("\n") + r"\n*", text), text


@pytest.mark.parametrize("words", [w for _, marks, w, _ in CASES if marks.strip()], ids=" ".join)
def test_other_commands_still_parse(words: list[str]) -> None:
    assert words[0] in COMMANDS
    action = words[1] if words[1:] and words[1] in load(words[0]).actions else ""
    command_parser(words[0], action).parse_args(words[2 if action else 1 :])


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_command_runs_in_the_order_of_the_pages(tmp_path: Path) -> None:
    """From a copy of what git has, in one folder, as somebody who follows the pages would."""
    here = tmp_path / "a checkout"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, tracked):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, here / name)
    walked = 0
    for page, marks, words, shown in CASES:
        if not marks.strip() or set(marks.split()) & set(_ELSEWHERE):
            continue
        done = subprocess.run(
            [sys.executable, "-m", "fourfold", *words],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(here / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{page}: {' '.join(words)}\n{done.stderr}"
        said = done.stdout + done.stderr
        for line in shown:
            first = line.partition("  ")[0].strip()
            if re.fullmatch(r"[a-z/ ]{3,}", first):  # the name of a row, not a number of that run
                assert first in said, f"{page}: {' '.join(words)} no longer says '{first}'"
        walked += 1
    assert walked > 8


def test_the_front_page_shows_both_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:40]
    text = "\n".join(first_screen)
    assert "./fourfold demo" in text
    assert "./test" in text


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_named_anywhere_exist() -> None:
    """Also in ```sh blocks and in the text, where nothing is run."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`?(?:\./|\$ |`)fourfold ([a-z]+)\b", page.read_text()):
            assert name in COMMANDS, f"{page.name} names 'fourfold {name}'"


def test_source_files_named_in_the_pages_exist() -> None:
    """`engine/worker.py` and `worker.py` both: a moved file takes its mention along."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    known = [f"/{name}" for name in tracked.splitlines()]
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`([a-z_0-9/]+\.py)`", page.read_text()):
            if name not in ("fourfold_config.py", "fourfold_model.py", "pretrain.py"):  # exported
                assert any(one.endswith(f"/{name}") for one in known), f"{page.name}: {name}"
