"""Ask every question of scripts/questions.toml, and print a table of the first choices.

python scripts/questions.py > answers.md
python scripts/questions.py --only mixtral
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold.cli import main
from fourfold.units import short_s

QUESTIONS = Path(__file__).with_name("questions.toml")
HEADINGS = ("question", "first choice", "s/step", "80%", "chance", "assumes", "engine",
            "expert", "published s")  # fmt: skip


def questions(only: str = "") -> list[dict[str, Any]]:
    """Return the questions whose name or command contains a text."""
    listed = tomllib.loads(QUESTIONS.read_text())["questions"]
    return [one for one in listed if only.lower() in f"{one['name']} {one['command']}".lower()]


def asked(question: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the answer to a question and what was said on stderr; {} where it was refused."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main([*shlex.split(question["command"]), "--format", "json"])
    text = out.getvalue()
    return (json.loads(text) if text.strip() else {}), err.getvalue().strip()


def cells(question: dict[str, Any], answer: dict[str, Any], said: str) -> list[str]:
    """Return a row of the table."""
    published = " to ".join(f"{s:g}" for s in question.get("published_s", ()))
    known = [question.get("expert", ""), published]
    if not answer.get("ranked"):
        reason = answer.get("reason") or said.splitlines()[-1]
        return [question["name"], reason, "", "", "", "", answer.get("stack", ""), *known]
    first = answer["ranked"][0]
    policy = first["policy"]
    virtual = policy["virtual_stages"]
    named = [first["layout"], f"v{virtual}" if virtual > 1 else "", f"mb{first['micro_batch']}"]
    named += [policy["sharding"], policy["recompute"]]
    return [
        question["name"],
        " ".join(filter(None, named)),
        short_s(first["step_s"]),
        f"{short_s(first['step_s_low'])} to {short_s(first['step_s_high'])}",
        f"{first['fit_chance']:.0%}",
        (answer.get("assumes") or {}).get("text", ""),
        answer["stack"],
        *known,
    ]


def table(only: str = "") -> Iterator[str]:
    """Yield the lines of a Markdown table, each as soon as its question is answered."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|{'---|' * len(HEADINGS)}"
    for question in questions(only):
        yield f"| {' | '.join(cells(question, *asked(question)))} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask every question of scripts/questions.toml.")
    parser.add_argument("--only", default="", help="questions that contain this text", metavar="T")
    for line in table(parser.parse_args().only):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
