"""Do 'models' and 'flops' mean the run that was asked for? GPUs and axes must agree.

Does `support` say of every engine and GPU what is known?
"""

from __future__ import annotations

import json
import tomllib
from math import ceil
from pathlib import Path

import pytest

import fourfold
from fourfold import SupportRequest
from fourfold.cost.fit.calibration import PROVENANCES
from fourfold.errors import UserError
from fourfold.escape import toml_text
from fourfold.spec.engine import EXPORTS


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


def test_flops_of_a_spec_file(tmp_path, cli) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text('model = "mpt-7b"\ngpus = 8\n[batch]\nseq_len = 2048\nglobal_batch = 256\n')
    words = ("--step-s", str(256 * 2048 / 85144), "--gpu", "h100-80gb")
    answer = cli.json("flops", "--spec", spec, *words)
    assert answer["conventions"]["mpt"]["mfu_pct"] == pytest.approx(46.44, abs=0.005)
    plain = tomllib.loads(spec.read_text())
    spec.with_suffix(".json").write_text(json.dumps(plain))
    assert cli.json("flops", "--spec", spec.with_suffix(".json"), *words) == answer


def test_flops_say_that_a_window_was_counted(cli) -> None:
    words = ["flops", "--model", "mistral-7b-v0.1", "--seq-len"]
    assert "by its window of 4096 tokens in layers with one" in cli(*words, "8192")
    assert "window" not in cli(*words, "4096")


def test_one_table_of_all_engines() -> None:
    found = fourfold.support(SupportRequest(model="llama-3.1-70b"))
    assert found.runs_here == "yes"
    assert {line.engine for line in found.lines} == {*EXPORTS}
    assert {line.priced for line in found.lines} <= {*PROVENANCES}
    by = {(line.engine, line.gpu): line for line in found.lines}
    assert by["megatron", "h100-80gb"].priced == "near"
    assert by["megatron", "h100-80gb"].rows > 0
    assert by["torchrun", "mi300x"].priced == "blended"
    assert by["megatron", "b200"].settings == "yes"


@pytest.mark.parametrize("model", ["gpt-oss-120b", "llama4-scout"])
def test_every_engine_that_has_no_settings_says_what_it_lacks(model: str) -> None:
    found = fourfold.support(SupportRequest(model=model, gpu="h100-80gb"))
    said = {line.engine: line.settings for line in found.lines}
    lacks = "clipped and shifted SwiGLU" if model == "gpt-oss-120b" else "chunked attention"
    assert {text for text in said.values() if lacks not in text} == {"yes"}
    written = {"megatron", "megatron-bridge"} if model == "gpt-oss-120b" else set()
    written |= {"accelerate", "deepspeed"}
    assert {engine for engine, text in said.items() if text == "yes"} == written


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


def test_a_model_may_be_a_file_in_our_own_words(tmp_path: Path, cli) -> None:
    """What 'models' prints of one, its shape alone, or a family with sizes."""
    known = cli.json("models", "llama-3.2-3b")
    names = ("family", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "tied")
    sizes = {name: known["shape"][name] for name in names}
    for plain in (known, known["shape"], sizes):
        (tmp_path / "mine.json").write_text(json.dumps(plain))
        assert cli.json("models", tmp_path / "mine.json")["params"] == known["params"]
    (tmp_path / "mine.toml").write_text(toml_text(sizes))
    assert cli.json("models", tmp_path / "mine.toml")["name"] == "mine"
    (tmp_path / "mine.toml").write_text(toml_text(dict.fromkeys(names[1:4], 64)))
    assert "family in" in cli("models", tmp_path / "mine.toml", status=2)
