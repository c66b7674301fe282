"""Two commands that measure on one host say so; one alone says nothing."""

from __future__ import annotations

import tempfile

import pytest

from fourfold.launch.permit import measuring, said_if_not_alone


def test_a_second_measurement_is_said_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    run = said_if_not_alone(lambda number: number + 1, said.append)
    assert run(1) == 2
    assert said == []
    with measuring() as is_alone:  # a lock of another open file, as of another process
        assert is_alone
        assert [run(2), run(3)] == [3, 4]
    assert [words.partition(":")[0] for words in said] == [
        "another fourfold command measures on this host"
    ]
    run(4)
    assert len(said) == 1
