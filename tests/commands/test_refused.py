"""What the command line refuses, it refuses in words, before anything is started or written."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from fourfold.launch import ranks

TESTS = Path(__file__).parents[1]
GROUPS = tomllib.loads(Path(__file__).with_name("refused.toml").read_text())
FILES = GROUPS.pop("files")
PLACES = {"SAMPLES": TESTS / "samples", "GOLDEN": TESTS / "golden"}
CASES = [
    (f"{group['base']} {words}".strip(), said)
    for group in GROUPS.values()
    for words, said in group.items()
    if words != "base"
]


@pytest.mark.parametrize(("line", "said"), CASES, ids=[line for line, _ in CASES])
def test_a_request_is_refused_in_words_and_leaves_nothing(line, said, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks, "subprocess", None)  # nothing can start
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name, place in PLACES.items():
        line = line.replace(name, str(place))
    error = cli(*shlex.split(line), status=2)
    for words in [said] if isinstance(said, str) else said:
        assert error.startswith(words) if words.startswith("error: ") else words in error
    assert {path.name for path in tmp_path.iterdir()} == {*FILES}
