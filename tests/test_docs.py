"""Is what the README and docs show what the commands print?

A ```console block is run: each `$ fourfold ...` line through the command line; the lines below it
must be its output, where a line of three dots stands for any lines left out. Blocks marked
```console measured were run on hardware and hold numbers of that run; their commands must parse.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from fourfold.cli import COMMANDS, command_parser, main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```console( measured)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _commands(block: str) -> list[tuple[list[str], list[str]]]:
    """(words after `fourfold`, lines printed below) of a block; other programs are left out."""
    found: list[tuple[list[str], list[str]]] = []
    current: list[str] | None = None
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if line.startswith("$ "):
            current = []
            words = shlex.split(line[2:], comments=True)
            if words and words[0] in ("fourfold", "./fourfold"):
                found.append((words[1:], current))
        elif current is not None:
            current.append(line)
    return found


def _cases() -> list[tuple[str, bool, list[str], list[str]]]:
    cases = []
    for page in PAGES:
        for measured, block in _BLOCK.findall(page.read_text()):
            for words, shown in _commands(block):
                cases.append((page.name, bool(measured), words, shown))
    return cases


CASES = _cases()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        pytest.param(w, s, id=f"{page}: {' '.join(w)}")
        for page, measured, w, s in CASES
        if not measured
    ],
)
def test_console_blocks_are_real(words: list[str], shown: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(words)
    printed = (err.getvalue() + out.getvalue()).rstrip("\n").splitlines()
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.rstrip()) + "\n"
        for line in shown
    )
    text = "".join(f"{line.rstrip()}\n" for line in printed)
    assert re.fullmatch(pattern.rstrip("\n") + r"\n*", text), text


@pytest.mark.parametrize("words", [w for _, measured, w, _ in CASES if measured], ids=" ".join)
def test_measured_commands_still_parse(words: list[str]) -> None:
    assert words[0] in COMMANDS
    command_parser(words[0]).parse_args(words[1:])


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
