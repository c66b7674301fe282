"""Are the field's words read everywhere a field is: flags, --set, files, axes, conditions?"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourfold.cli import main
from fourfold.errors import UserError
from fourfold.spec import codec, texts, words
from fourfold.spec.batch import Batch
from fourfold.spec.expression import parse
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.sweep import expand, read_sweep
from fourfold.units import bytes_per_s_from, count_from, size_from
from tests.cli import Cli

PLAN = ["plan", "--model", "llama-3.1-8b", "--seq-len", "8k", "--global-batch", "64", "--top", "1"]
TEXTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
LETTERS = {"k": 3, "M": 6, "B": 9, "T": 12}


@given(st.integers(0, 2**40), st.sampled_from(["", "k", "K", "M", "m"]))
def test_sizes_are_powers_of_two(number: int, letter: str) -> None:
    power = {"": 0, "k": 10, "m": 20}[letter.lower()]
    assert size_from(f"{number}{letter}") == number * 2**power
    assert size_from(f" {number} {letter}".rstrip()) == number * 2**power


@given(st.integers(0, 10**6), st.integers(0, 9), st.sampled_from(sorted(LETTERS)))
def test_counts_are_decimal_and_exact(whole: int, tenth: int, letter: str) -> None:
    wanted = (10 * whole + tenth) * 10 ** LETTERS[letter] // 10
    assert count_from(f"{whole}.{tenth}{letter}") == wanted
    assert count_from(f"{whole}.{tenth}{letter.lower()}") == wanted
    assert count_from(f"{whole}.{tenth}e{LETTERS[letter]}") == wanted
    assert count_from(str(wanted)) == wanted


def _is_number(text: str) -> bool:
    """Whole numbers in ASCII digits; the letters and fractions have tests of their own."""
    return re.fullmatch(r"\s*[+-]?[0-9][0-9_]*\s*", text, re.ASCII) is not None


@given(st.text(st.characters(exclude_characters="kKmMbBgGtTeE."), max_size=12))
@example("0\x1f")
def test_anything_else_is_refused_in_words(text: str) -> None:
    for read in (size_from, count_from):
        if _is_number(text):
            assert abs(read(text)) < 2**63
        else:
            with pytest.raises(UserError, match=r"write it as|too large"):
                read(text)


@pytest.mark.parametrize(
    "text", ["8q", "k", "1.5", "0.3k", "8 kk", "1e400", "9e18T", "0x10", "8B "]
)
def test_refusals(text: str) -> None:
    with pytest.raises(UserError):
        size_from(text)


@given(st.integers(1, 10**6))
def test_a_rate_needs_its_unit(number: int) -> None:
    with pytest.raises(UserError, match=f"{number}Gbit/s or {number}GB/s"):
        bytes_per_s_from(str(number))
    assert bytes_per_s_from(f"{number}Gbit/s") * 8 == bytes_per_s_from(f"{number}GB/s")


axes = st.sampled_from(("pp", "dp", "cp", "tp"))
styles = st.sampled_from(("{}{}", "{}={}", "{}:{}", "{} {}"))
between = st.sampled_from((" ", ",", ", ", "  ", "x", "; ", "/", "\t"))


@given(st.dictionaries(axes, st.integers(1, 64), min_size=1), styles, between, st.booleans())
def test_a_layout_in_anybodys_hand(sizes, style, between, upper) -> None:
    text = between.join(style.format(axis, size) for axis, size in sizes.items())
    plain = " ".join(f"{axis}{size}" for axis, size in sizes.items())
    assert Layout.parse(text.upper() if upper else text) == Layout.parse(plain)


@pytest.mark.parametrize(
    "text", ["TP8 PP2 TP4", "tp", "tp8pp2", "x8", "dp2x", "tp2x2", "8", "t p8"]
)
def test_no_layout(text: str) -> None:
    with pytest.raises(UserError, match="is not a layout"):
        Layout.parse(text)


def test_hybrid_layout_text() -> None:
    assert Layout.parse("DP2x4xTP8") == Layout(replicate=2, shard=4, tp=8)


@pytest.mark.parametrize(("field", "typed", "meant"), TEXTS["policies"])
def test_words_of_a_policy(field: str, typed: str, meant: str) -> None:
    assert getattr(codec.decode(Policy, {field: typed}), field) == meant


@pytest.mark.parametrize(("typed", "precision", "scaling", "shown"), TEXTS["scaled"])
def test_precision_with_its_scaling(typed: str, precision: str, scaling: str, shown: str) -> None:
    policy = codec.decode(Policy, {"precision": typed})
    assert (policy.precision, policy.scaling, policy.scaled_name) == (precision, scaling, shown)
    spec = codec.load(RunSpec, {"model": "llama-tiny", "gpus": 1, "policy": {"precision": typed}})
    assert spec.policy == policy


def test_precision_with_another_scaling_is_refused() -> None:
    with pytest.raises(UserError, match=r"scaling=block contradicts precision mxfp8.*omit one"):
        codec.decode(Policy, {"precision": "mxfp8", "scaling": "block"})
    same = codec.decode(Policy, {"precision": "mxfp8", "scaling": "mx"})
    assert same.scaling == "mx"


def test_precision_axis_of_a_sweep_keeps_its_scaling() -> None:
    text = 'model = "llama-tiny"\ngpus = 1\n[sweep]\nprecision = ["bf16", "mxfp8"]\n'
    runs = [one.spec.policy for one in expand(read_sweep(texts.parse_toml(text))).combinations]
    assert [(one.precision, one.scaling) for one in runs] == [("bf16-mixed", "auto"), ("fp8", "mx")]


@pytest.mark.parametrize(
    "recompute", ["none", "selective", "full", "every-3", "block-2", "block-9"]
)
def test_recomputed_layers_are_their_share(recompute: str) -> None:
    """Of 24 layers in 4 equal chunks: on two ranks with two each, and on four with one each."""
    chunks = [range(at, at + 6) for at in range(0, 24, 6)]
    for stages, virtual in ((2, 2), (4, 1)):
        policy = Policy(recompute=recompute, virtual_stages=virtual)
        again = sum(len(policy.recomputed_layers(chunk)) for chunk in chunks)
        assert again / 24 == policy.recompute_share(24, stages)
    assert Policy(recompute="block-2").recomputed_layers(range(6, 12)) == (6, 7)


@pytest.mark.parametrize("field", sorted(words.POLICY))
def test_every_alias_is_a_word_of_its_field(field: str) -> None:
    for typed in words.POLICY[field]:
        codec.decode(Policy, {field: typed})
    with pytest.raises(UserError):
        codec.decode(Policy, {field: "nonsense"})


def test_hsdp_needs_copies() -> None:
    table = {"model": "llama-tiny", "gpus": 8, "policy": {"sharding": "hsdp"}}
    with pytest.raises(UserError, match="--dp 2x4 gives 2 replicas"):
        codec.load(RunSpec, table)
    spec = codec.load(RunSpec, table | {"layout": {"dp": "2x4"}})
    assert (spec.policy.sharding, spec.layout.replicate) == ("zero3", 2)


def test_batches_in_tokens() -> None:
    said = codec.decode(Batch, {"seq_len": "8k", "global_batch": "4M"})
    assert (said.seq_len, said.global_batch) == (8192, 512)
    assert codec.decode(Batch, {"seq_len": 4096, "global_batch": "1k"}).global_batch == 1024
    asked = {"seq_len": 4096, "global_batch": "4194304 tokens"}
    assert codec.decode(Batch, asked).global_batch == 1024
    with pytest.raises(
        UserError, match=r"global_batch=5000tokens is 5,000 tokens, not a whole number"
    ):
        codec.decode(Batch, {"seq_len": 4096, "global_batch": "5000tokens"})
    with pytest.raises(UserError, match="needs a sequence length"):
        words.tidied({"batch": {"global_batch": "4M"}})


def test_words_in_conditions() -> None:
    assert parse("seq_len >= 8k and hidden < 1.5k").holds({"seq_len": 8192, "hidden": 1535})
    assert not parse("seq_len > 8k").holds({"seq_len": 8192})
    with pytest.raises(UserError):
        parse("seq_len > 8T")


def test_words_in_a_sweep_file() -> None:
    sweep = read_sweep(
        texts.parse_toml(
            'model = "llama-tiny"\ngpus = 2\n[sweep]\nseq_len = ["1k", 64]\n'
            'sharding = ["ddp", "fsdp"]\nglobal_batch = ["4k"]\nlayout = ["DP2", "tp=2"]\n'
        )
    )
    found = expand(sweep).combinations
    assert len(found) == 8
    assert {(one.spec.batch.seq_len, one.spec.policy.sharding) for one in found} == {
        (1024, "zero0"), (1024, "zero3"), (64, "zero0"), (64, "zero3"),
    }  # fmt: skip
    assert {one.spec.batch.global_batch for one in found} == {4096}
    assert "seq_len=1024" in found[0].label


def test_run_table_reads_flat_fields_as_those_of_its_tables() -> None:
    head = {"model": "llama-tiny", "gpus": 4}
    flat = {"tp": 2, "seq_len": "1k", "global_batch": 8, "precision": "mxfp8", "sharding": "ddp"}
    batch = {"seq_len": 1024, "global_batch": 8}
    policy = {"precision": "fp8", "scaling": "mx", "sharding": "zero0"}
    nested = {**head, "layout": {"tp": 2}, "batch": batch, "policy": policy}
    assert codec.load(RunSpec, head | flat) == codec.load(RunSpec, nested)
    assert RunSpec(**head, **flat, settle=True) == codec.load(RunSpec, nested)
    printed = RunSpec(**head, layout="pp2 dp2 v2 zero0", seq_len=1024)
    assert (str(printed.layout), printed.policy.virtual_stages) == ("pp2 dp2 cp1 tp1", 2)
    with pytest.raises(UserError, match=r"seq_len=64 contradicts batch\.seq_len = 1024; omit one"):
        codec.load(RunSpec, head | {"seq_len": 64, "batch": batch})
    with pytest.raises(UserError, match=r"tp=2 does not go beside layout = 'pp2'; .*'pp2 tp2'"):
        codec.load(RunSpec, head | {"tp": 2, "layout": "pp2"})
    with pytest.raises(TypeError, match="RunSpec has no field 'seqlen'; did you mean 'seq_len'"):
        RunSpec(**head, seqlen=64)


def test_plan_reads_words_and_says_so(cli: Cli) -> None:
    told = ["--gpu", "H200", "--gpus", "16", "--tokens", "1T", "--price", "2"]
    answer = cli.json(*PLAN, *told, "--stack", "megatron", "--sharding", "DDP", "--tp", "8")
    assert "seq-len 8k = 8,192 tokens; sharding DDP = zero0" in cli.err
    assert "stack megatron = megatron-" in cli.err
    row = answer["ranked"][0]
    assert (row["policy"]["sharding"], answer["seq_len"]) == ("zero0", 8192)
    assert row["cost"] == pytest.approx(2 * row["gpu_hours"])


def test_plan_hsdp_has_copies(cli: Cli) -> None:
    told = ["--gpu", "h200", "--gpus", "16", "--sharding", "hsdp", "--top", "5"]
    for row in cli.json(*PLAN, *told, "--stack", "fourfold")["ranked"]:
        assert Layout.parse(row["layout"]).replicate > 1
        assert row["policy"]["sharding"] == "zero3"


@pytest.mark.parametrize("bare", ["h100", "H100", "a100"])
def test_bare_name_of_a_gpu_is_its_usual_size(bare: str, cli: Cli) -> None:
    answer = cli.json(*PLAN, "--gpu", bare, "--gpus", "8", "--stack", "megatron")
    assert answer["gpu"] == f"{bare.lower()}-80gb"
    assert f"read as: gpu {bare} = {bare.lower()}-80gb" in cli.err


def test_plan_lists_stacks(cli: Cli) -> None:
    rows = {row["stack"]: row for row in cli.json("plan", "--stack", "list")}
    assert rows["megatron"]["stands_for"] == "megatron-bridge-2026"
    assert "meta-h100" in rows["torchtitan"]["measured"]
    out = cli("plan", "--stack", "list", "--cluster", "jean-zay")
    assert "megatron-deepspeed-2022" in out
    # What --cluster takes is told from what it does not.
    assert "jean-zay (" in out
    assert "meta-h100* (" in out
    assert out.endswith(
        "* not described here: 'fourfold clusters new' makes a file for --cluster\n"
    )


def test_spec_files_take_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "mpt-7b"\ngpus = "1k"\n[batch]\nseq_len = "2k"\nglobal_batch = "4M"\n')
    told = ["flops", "--spec", str(file), "--step-s", "2", "--set", "policy.precision=BF16"]
    assert main([*told, "--format", "json"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (said["gpus"], said["seq_len"], said["precision"]) == (1024, 2048, "bf16-mixed")
    assert said["tokens_per_s"] == 4 * 2**20 / 2
    assert "gpus 1k = 1,024" in err


def test_more_than_the_peak_is_doubted(cli: Cli) -> None:
    told = ["flops", "--model", "mpt-7b", "--seq-len", "2k", "--gpu", "h100-80gb", "--gpus", "8"]
    assert "is more than the GPU can do" in cli(*told, "--tokens-per-s", "8.5M")
    assert "can do" not in cli(*told, "--tokens-per-s", "85144")
