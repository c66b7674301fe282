"""Whatever happens to a store's files: no traceback, nothing false shown without a warning.

A quick sample runs always; the long set has 1,000 mutations and 3,000 commands (fixed seeds).
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.result.files.run_file import INDEX, RUN_FILE
from fourfold.result.files.store import Store
from fourfold.result.files.stored import seal
from tests.fuzz import call, damaged, revalue
from tests.page.sample import report, specs

DEEP = "[" * 3000 + "]" * 3000
TEXTS = ("", "[]", "null", "5", '"x"', "{", "{}", DEEP, '{"a":1,"a":2}', "NaN", "\ufeff{}",
         '{"runs": {}, "crc32": "0"}', "1" * 6000, '{"spec": ' + "9" * 5000 + "}")  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    store = Store(tmp_path / "runs")
    # Three that ended well, one out of memory, one crashed.
    for number, spec in zip((0, 1, 10, 28, 2), specs(5), strict=True):
        store.keep(report(replace(spec, note=f"note {number}", tag="=tag"), number))
    store.runs()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.json").write_text("{}")
    (outside / RUN_FILE).write_text("{}")
    return tmp_path / "runs"


def commands(runs: Path, names: list[str]) -> list[list[str]]:
    one, other = names[0][:16], names[-1][:16]
    at = ["--runs", str(runs)]
    return [
        ["runs", *at, "--format", "json"],
        ["runs", *at, "--sort", "step_s", "--where", "tp == 2"],
        ["runs", *at, "--format", "csv"],
        ["runs", "show", one, *at],
        ["runs", "show", other, *at, "--format", "json"],
        ["diff", one, other, *at],
        ["diff", one, other, *at, "--format", "json"],
        ["report", *at, "--style", "mpt"],
        ["report", *at, "--style", "topology", "--format", "md"],
        ["report", *at, "--style", "scaling", "--format", "json"],
        ["fit", *at, "--cluster", "jean-zay", "--suggest", "1"],
    ]


# --- mutations: each changes one thing at `path`


def damage(path: Path, dice: random.Random) -> None:
    path.write_bytes(damaged(path.read_bytes(), dice))


def other_text(path: Path, dice: random.Random) -> None:
    path.write_text(dice.choice(TEXTS))


def new_value(path: Path, dice: random.Random) -> None:
    """Another value somewhere, or an entry less; the sum stays as it was."""
    plain = json.loads(path.read_text())
    revalue(plain, dice)
    path.write_text(json.dumps(plain, indent=2))


def new_value_and_seal(path: Path, dice: random.Random) -> None:
    """The same by somebody who knows how sums are made."""
    plain = json.loads(path.read_text())
    plain.pop("crc32", None)
    revalue(plain, dice)
    path.write_bytes(seal(json.dumps(plain, indent=2)))


def stand_in(path: Path, dice: random.Random) -> None:
    """Something else under its name: a pipe, a folder, a link."""
    path.unlink()
    kind = dice.randrange(6)
    outside = path.parents[1] / "outside" if path.name == INDEX else path.parents[2] / "outside"
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    else:
        targets = [path.name, "/dev/zero", outside / "precious.json", "/nowhere"]
        path.symlink_to(targets[kind - 2])


def swap(path: Path, dice: random.Random) -> None:
    """Another run's file."""
    others = [other for other in path.parents[1].glob(f"*/{RUN_FILE}") if other != path]
    path.write_bytes(dice.choice(others or [path]).read_bytes())


def other_digit(path: Path, dice: random.Random) -> None:
    """Still JSON, with the sum at its place."""
    text = path.read_text()
    places = [found.start() for found in re.finditer(r"[1-9]", text[: text.rindex('"crc32"')])]
    at = dice.choice(places)
    path.write_text(f"{text[:at]}{10 - int(text[at])}{text[at + 1 :]}")


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    damage, damage, other_digit, other_digit, other_text, new_value, new_value, new_value_and_seal,
    new_value_and_seal, stand_in, swap,
)  # fmt: skip


def attack(runs: Path, count: int, per: int, seed: int) -> None:
    names = sorted(path.name for path in runs.iterdir() if not path.name.startswith("."))
    asked = commands(runs, names)
    truth = {tuple(words): call(words) for words in asked}
    assert all(code == 0 and "warning" not in err for code, _, err in truth.values())
    outside = {path: path.read_bytes() for path in (runs.parent / "outside").iterdir()}
    dice = random.Random(seed)
    for _ in range(count):
        Store(runs).runs()  # the cache is fresh
        path = dice.choice([runs / INDEX, *(runs / name / RUN_FILE for name in names)])
        kind = dice.choice(KINDS)
        if path.name == INDEX and kind is swap:
            kind = new_value
        before = path.read_bytes()
        kind(path, dice)
        changed = path.is_file() and not path.is_symlink() and path.read_bytes()
        for words in dice.sample(asked, per):
            code, out, err = call(words)
            assert code in (0, 1, 2), (words, kind.__name__)
            told = "warning: " in err or err.startswith("error: ")
            honest = kind is new_value_and_seal or told or out == truth[tuple(words)][1]
            assert honest, (words, kind.__name__, path.name, len(changed or b""), code, err)
            if path.name == RUN_FILE:  # a run's file is left as it is, however damaged
                assert (path.is_file() and not path.is_symlink() and path.read_bytes()) == changed
        assert {p: p.read_bytes() for p in outside} == outside
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
        path.write_bytes(before)
        if path.name == INDEX:
            path.unlink()


@pytest.mark.parametrize(
    "seed", [10, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10))]
)
def test_a_mutated_store_shows_nothing_false(runs: Path, seed: int) -> None:
    attack(runs, count=60 if seed == 10 else 100, per=2 if seed == 10 else 3, seed=seed)
