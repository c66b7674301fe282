"""Do 'models' and 'flops' mean the run that was asked for? GPUs and axes must agree.

Does `support` say of every engine and GPU what is known?
"""

from __future__ import annotations

import json
from math import ceil

import pytest

import fourfold
from fourfold import SupportRequest
from fourfold.cli import main
from fourfold.cost.fit.calibration import PROVENANCES
from fourfold.cost.stacks import EXPORTS
from fourfold.errors import UserError


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def _error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_gpus_fill_dp(capsys) -> None:
    answer = _json(capsys, "models", "gpt-181b", "--tp", "8", "--pp", "12", "--gpus", "384")
    assert answer["layout"] == "pp12 dp4 cp1 tp8"
    assert [row["rank"] for row in answer["stages"]] == list(range(0, 384, 32))


def test_any_rank_with_an_odd_vocabulary(capsys) -> None:
    layout = ("--gpus", "16", "--tp", "8", "--pp", "2", "--sharding", "zero0")
    words = ("models", "gpt-3-175b", *layout)
    first, last = (_json(capsys, *words, "--rank", rank)["stages"][0] for rank in ("0", "7"))
    rows = ceil(50257 / 8)
    assert first["held"] - last["held"] == (rows - (50257 - 7 * rows)) * 12288
    assert "from 0 to 15" in _error(capsys, *words, "--rank", "16")


@pytest.mark.parametrize("command", [["models", "mpt-7b"], ["flops", "--model", "mpt-7b"]])
def test_axes_must_make_the_gpus(command, capsys) -> None:
    words = [*command, "--seq-len", "64", "--gpus", "8"]
    assert "needs 16 GPUs, but there are 8; omit dp and it becomes 2" in _error(
        capsys, *words, "--tp", "4", "--dp", "4"
    )
    assert "is not divisible by" in _error(capsys, *words, "--tp", "3")


def test_a_layout_needs_a_model(capsys) -> None:
    assert "name is required" in _error(capsys, "models", "--tp", "2")


def test_flops_of_a_spec_file(tmp_path, capsys) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text('model = "mpt-7b"\ngpus = 8\n[batch]\nseq_len = 2048\nglobal_batch = 256\n')
    words = ("--step-s", str(256 * 2048 / 85144), "--gpu", "h100-80gb")
    answer = _json(capsys, "flops", "--spec", str(spec), *words)
    assert answer["conventions"]["mpt"]["mfu_pct"] == pytest.approx(46.44, abs=0.005)
    assert "--seq-len is required" in _error(capsys, "flops", "--model", "mpt-7b")
    assert "batch" in _error(capsys, "flops", "--model", "mpt-7b", "--set", "batch=3")


def test_dp_is_called_dp(capsys) -> None:
    assert "--dp 0 must be from 1" in _error(capsys, "models", "mpt-7b", "--dp", "0")


def test_a_broken_spec_file_is_named(tmp_path, capsys) -> None:
    (tmp_path / "run.toml").write_text("{")
    assert f"error: {tmp_path}/run.toml is not TOML" in _error(
        capsys, "flops", "--spec", f"{tmp_path}/run.toml"
    )


@pytest.mark.parametrize("kind", ["gpu", "cluster"])
def test_a_broken_hardware_file_is_named(kind, tmp_path, capsys) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("nme = 1\n")
    words = ["clusters", "--gpu", str(path)] if kind == "gpu" else ["clusters", str(path)]
    assert f"error: unknown field nme in {path}" in _error(capsys, *words)


def test_flops_say_that_a_window_was_counted(capsys) -> None:
    words = ["flops", "--model", "mistral-7b-v0.1", "--seq-len"]
    assert main([*words, "8192"]) == 0
    assert "by its window of 4096 tokens" in capsys.readouterr().out
    assert main([*words, "4096"]) == 0
    assert "window" not in capsys.readouterr().out


def test_one_table_of_all_engines() -> None:
    found = fourfold.support(SupportRequest(model="llama-3.1-70b"))
    assert found.runs_here == "yes"
    assert {line.engine for line in found.lines} == {*EXPORTS}
    assert {line.priced for line in found.lines} <= {*PROVENANCES}
    by = {(line.engine, line.gpu): line for line in found.lines}
    assert by["megatron", "h100-80gb"].priced == "near"
    assert by["megatron", "h100-80gb"].rows > 0
    assert by["torchrun", "mi300x"].priced == "physics"
    assert by["megatron", "b200"].settings == "yes"
    assert "theta" in by["nanotron", "b200"].settings


def test_one_line_of_one_question() -> None:
    (line,) = fourfold.support(SupportRequest(model="mpt-7b", engine="deepspeed", gpu="h200")).lines
    assert (line.engine, line.gpu) == ("deepspeed", "h200")


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'megatron'"):
        fourfold.support(SupportRequest(model="mpt-7b", engine="megatrn"))
