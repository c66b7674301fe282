"""The launcher as a program: its usage and its errors, without any rank.

Two commands that measure on one host say so; one alone says nothing.
"""

from __future__ import annotations

import tempfile

import pytest

from fourfold.engine import worker
from fourfold.launch.__main__ import main
from fourfold.launch.permit import measuring, warned_if_shared


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m fourfold.launch [OPTION]")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "error: expected RUN.toml and FOLDER, not 0 arguments"),
        (["run.toml", "a", "b"], "error: expected RUN.toml and FOLDER, not 3 arguments"),
        (["run.toml", "a", "--jobs", "ping"], "error: option --jobs not recognized"),
        (["run.toml", "a", "--job", "train"], "error: --job is run or ping, not 'train'"),
        (["run.toml", "a", "--env"], "error: option --env requires argument"),
    ],
)
def test_wrong_arguments_show_the_usage(words, error, capsys) -> None:
    assert main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith("usage: python -m fourfold.launch")
    assert text.splitlines()[-1] == error


def test_a_run_file_that_is_missing_is_a_users_error(tmp_path, capsys) -> None:
    folder = tmp_path / ("long" * 20)
    assert main([str(folder / "run.toml"), "--env", "A=1", str(tmp_path / "job")]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "run.toml" in text


@pytest.mark.parametrize("words", [[], ["a/job.json", "b/job.json"], ["job.json", "--ranks=1"]])
def test_a_worker_says_how_it_is_called(words, capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        worker.main(words)
    assert leaving.value.code == 2
    assert capsys.readouterr().err == f"{worker.USAGE}\n"


def test_a_second_measurement_is_said_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    run = warned_if_shared(lambda number: number + 1, said.append)
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
