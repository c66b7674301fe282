"""Large and deep inputs: refused with a named limit, or read in time that grows as they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold import files
from fourfold.cli import main
from fourfold.errors import UserError
from fourfold.spec import texts
from fourfold.tables.forms import parse
from fourfold.tables.lint import lint
from tests.growth import QUADRATIC, grows

GOLDEN = Path(__file__).parents[1] / "golden"
MPT = (GOLDEN / "mpt.csv").read_text().splitlines()
TOPOLOGY = "| Nodes | Size | DP | TP | PP | MBS | GBS | Mem | Sec/it | TFLOPs | Notes |"
RULE = "|---|---|---|---|---|---|---|---|---|---|---|"
ROW = "| 48 | 181B | 4 | 8 | 12 | 2 | 2048 | 37GB | 120.29 | 134.02 | 02-21 |"


def equal_csv(count: int) -> str:
    return "\n".join([MPT[0], *([MPT[1]] * count)]) + "\n"


def equal_rows(count: int) -> str:
    return "\n".join([TOPOLOGY, RULE, *([ROW] * count)]) + "\n"


def near_rows(count: int) -> str:
    """Seconds a last digit apart, two layouts in turn: every rule that compares has work."""
    rows = [
        ROW.replace("120.29", f"{100 + i % 997 / 100:.2f}").replace("| 2 |", f"| {1 + i % 2} |")
        for i in range(count)
    ]
    return "\n".join([TOPOLOGY, RULE, *rows]) + "\n"


def swapped_rows(count: int) -> str:
    swapped = ROW.replace("120.29 | 134.02", "134.02 | 120.29")
    return "\n".join([TOPOLOGY, RULE, *([ROW, swapped] * (count // 2))]) + "\n"


@pytest.mark.parametrize("rows", [200, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [equal_csv, equal_rows, near_rows, swapped_rows])
def test_lint_is_linear(make: Callable[[int], str], rows: int) -> None:
    form = "csv" if make is equal_csv else "md"
    assert grows(lambda count: lint(parse(make(count), form)), rows) < QUADRATIC


def test_readers_are_linear() -> None:
    tables = {
        "csv": lambda count: parse("# note\n" * count + "a,b\n" + "1,2\n" * count, "csv"),
        "md": lambda count: parse("| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * count, "md"),
        "text": lambda count: parse("a | b\n" * count, "md"),
        "toml": lambda count: texts.parse_toml("".join(f"k{i} = 1\n" for i in range(count))),
        "tables": lambda count: texts.parse_toml("".join(f"[a.k{i}]\n" for i in range(count))),
        "json": lambda count: texts.parse_json("[" + "{}," * (50 * count) + "{}]"),
    }
    for name, work in tables.items():
        assert grows(work, 4000) < QUADRATIC, name


def test_sizes_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    for text, parser in (
        ("k = 1\n" * 800_000, texts.parse_toml),
        (" " * (texts.MAX_JSON_LETTERS + 1), texts.parse_json),
    ):
        with pytest.raises(UserError, match="MiB"):
            parser(text)
    large = tmp_path / "large.json"
    with open(large, "wb") as stream:
        stream.truncate(files.MAX_TEXT_BYTES + 1)  # a hole: takes no space
    with pytest.raises(UserError, match="512 MiB"):
        files.read_text(large)
    with pytest.raises(UserError, match="64 MiB"):
        files.read_own(large)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100 + "]" * 100,
        '{"a":' * 500 + "1" + "}" * 500,
        "[" * 100_000,
        "[" * 5000 + "]" * 5000,
    ],
)
def test_depth_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"deep|JSON"):
        texts.parse_json(text)
    for toml in (f"a = {text}", "a" + ".a" * 100_000 + " = 1", "[" + "a." * 5000 + "a]"):
        with pytest.raises(UserError, match=r"deep|TOML|parts"):
            texts.parse_toml(toml)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(UserError, match="twice"):
        texts.parse_json('{"a": {"b": 1, "c": 2, "b": 3}}')


LONG = "x" * 300
WORDS = [
    ["plan", "--model", f"./{LONG}", "--gpus", "8", "--gpu", "h100-80gb"],
    ["plan", "--model", "mpt-7b", "--cluster", f"./{LONG}.toml"],
    ["plan", "--model", "mpt-7b", "--cluster", "jean-zay", "--calibration", LONG],
    ["plan", "--model", "mpt-7b", "--cluster", "jean-zay", "--profile", LONG],
    ["models", f"./{LONG}.json"], ["clusters", f"./{LONG}.toml"],
    ["clusters", "--gpu", f"./{LONG}.toml"], ["runs", "--runs", LONG],
    ["runs", "show", LONG, "--runs", LONG], ["diff", LONG, LONG], ["report", LONG],
    ["report", "--runs", LONG], ["lint", f"{LONG}.md"], ["lint", f"{LONG}.csv"],
    ["predict", LONG, "--out", "x"], ["score", LONG], ["fit", LONG, "--out", "x"],
    ["fit", "--runs", LONG, "--cluster", "jean-zay", "--out", "x"], ["data", "show", LONG],
    ["data", "make", LONG, "--out", "x"], ["sweep", LONG], ["train", "--resume", "--out", LONG],
    ["weights", "export", LONG, "--out", "x"], ["bench", "--spec", LONG], ["trace", "--spec", LONG],
    ["dryrun", "--spec", LONG], ["flops", "--model", f"./{LONG}.json", "--seq-len", "64"],
    ["report", str(GOLDEN / "bloom.csv"), "--out", LONG],
    ["predict", str(GOLDEN / "bloom.csv"), "--out", LONG],
    ["verify", "--spec", LONG], ["sweep", LONG, "--runs", LONG],
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=lambda words: "-".join(words)[:24])
def test_a_name_of_300_letters(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(words)
    said = capsys.readouterr().err
    assert code in (0, 2), said
    assert code == 0 or said.startswith("error: ")
    assert list(tmp_path.iterdir()) == []
