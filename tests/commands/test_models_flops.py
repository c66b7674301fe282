"""Do 'models' and 'flops' mean the run that was asked for? GPUs and axes must agree.

Does `support` say of every engine and GPU what is known?
"""

from __future__ import annotations

from math import ceil

import pytest

import fourfold
from fourfold import SupportRequest
from fourfold.cost.fit.calibration import PROVENANCES
from fourfold.cost.stacks import EXPORTS
from fourfold.errors import UserError


def test_gpus_fill_dp(cli) -> None:
    answer = cli.json("models", "gpt-181b", "--tp", "8", "--pp", "12", "--gpus", "384")
    assert answer["layout"] == "pp12 dp4 cp1 tp8"
    assert [row["rank"] for row in answer["stages"]] == list(range(0, 384, 32))


def test_any_rank_with_an_odd_vocabulary(cli) -> None:
    layout = ("--gpus", "16", "--tp", "8", "--pp", "2", "--sharding", "zero0")
    words = ("models", "gpt-3-175b", *layout)
    first, last = (cli.json(*words, "--rank", rank)["stages"][0] for rank in ("0", "7"))
    rows = ceil(50257 / 8)
    assert first["held"] - last["held"] == (rows - (50257 - 7 * rows)) * 12288
    assert "from 0 to 15" in cli(*words, "--rank", "16", status=2)


@pytest.mark.parametrize("command", [["models", "mpt-7b"], ["flops", "--model", "mpt-7b"]])
def test_axes_must_make_the_gpus(command, cli) -> None:
    words = [*command, "--seq-len", "64", "--gpus", "8"]
    assert "needs 16 GPUs, but there are 8; omit dp and it becomes 2" in cli(
        *words, "--tp", "4", "--dp", "4", status=2
    )
    assert "is not divisible by" in cli(*words, "--tp", "3", status=2)


def test_a_layout_needs_a_model(cli) -> None:
    assert "name is required" in cli("models", "--tp", "2", status=2)


def test_flops_of_a_spec_file(tmp_path, cli) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text('model = "mpt-7b"\ngpus = 8\n[batch]\nseq_len = 2048\nglobal_batch = 256\n')
    words = ("--step-s", str(256 * 2048 / 85144), "--gpu", "h100-80gb")
    answer = cli.json("flops", "--spec", spec, *words)
    assert answer["conventions"]["mpt"]["mfu_pct"] == pytest.approx(46.44, abs=0.005)
    assert "--seq-len is required" in cli("flops", "--model", "mpt-7b", status=2)
    assert "batch" in cli("flops", "--model", "mpt-7b", "--set", "batch=3", status=2)


def test_dp_is_called_dp(cli) -> None:
    assert "--dp 0 must be from 1" in cli("models", "mpt-7b", "--dp", "0", status=2)


def test_a_broken_spec_file_is_named(tmp_path, cli) -> None:
    (tmp_path / "run.toml").write_text("{")
    assert f"error: {tmp_path}/run.toml is not TOML" in cli(
        "flops", "--spec", f"{tmp_path}/run.toml", status=2
    )


@pytest.mark.parametrize("kind", ["gpu", "cluster"])
def test_a_broken_hardware_file_is_named(kind, tmp_path, cli) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("nme = 1\n")
    words = ["clusters", "--gpu", str(path)] if kind == "gpu" else ["clusters", str(path)]
    assert f"error: unknown field nme in {path}" in cli(*words, status=2)


def test_flops_say_that_a_window_was_counted(cli) -> None:
    words = ["flops", "--model", "mistral-7b-v0.1", "--seq-len"]
    assert "by its window of 4096 tokens" in cli(*words, "8192")
    assert "window" not in cli(*words, "4096")


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


def test_fp8_products_in_a_bf16_run_are_measured_against_the_fp8_peak(cli) -> None:
    words = ("flops", "--model", "llama-3.1-8b", "--seq-len", "4096", "--tokens-per-s", "100000",
             "--gpus", "8", "--gpu", "h100-80gb")  # fmt: skip
    said = cli(*words, "--set", "policy.compute_dtype=fp8")
    assert said == cli(*words, "--precision", "fp8")
    assert "; fp8, recompute none; GPUs: 8 of h100-80gb at 1979 TFLOP/s dense" in said
