"""A command called in this process, as a shell calls it: its exit status and what it printed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fourfold.cli import main


class Cli:
    """`cli("plan", ...)`: the text, on stderr where the request is bad; `cli.json(...)`: the answer
    itself. Both streams of the last call are kept."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.out, self.err = capsys, "", ""

    def __call__(self, *words: object, status: int = 0) -> str:
        ended = main([str(word) for word in words])
        self.out, self.err = self._capsys.readouterr()
        assert ended == status, self.err or self.out
        return self.err if status == 2 else self.out

    def json(self, *words: object, status: int = 0) -> Any:
        self(*words, "--format", "json", status=status)
        return json.loads(self.out)
