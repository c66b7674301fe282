"""Real ranks against one process: a sample of layouts, planted faults, and failures contained."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.spec import catalog, codec
from tests import warm


def verify(*words: str, rc: int = 0) -> dict:
    command = warm.command("verify", *words, "--format", "json")
    done = warm.run(command, capture_output=True, text=True)
    assert done.returncode == rc, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout)


def all_pass(count: int, *words: str) -> dict:
    """As many layouts, each equal to one process; in fp64 nearly to the last digit."""
    report = verify(*words)
    assert report["passed"] == report["total"] == count
    assert "fp64" not in words or set(report["limits"].values()) == {1e-9}
    return report


@pytest.mark.parametrize("count", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_a_sample_of_four_ranks_equals_one_process(count):
    report = all_pass(count, "--world", "4", "--sample", str(count), "--seed", "3")
    for row in report["layouts"]:
        assert row["loss_diff"] <= 1e-5
        assert row["grad_rel"] <= 1e-4
        assert row["param_rel"] <= 1e-3
    assert {row["family"] for row in report["layouts"]} == {"mpt", "gpt", "llama"}


def test_biases_and_norms_of_queries_under_tensor_parallelism_in_fp64():
    # tp4 on two key heads: a head is held twice, and must count once in a norm over all of them.
    words = ("--layout", "tp4", "--family", "qwen", "--family", "olmo2", "--precision", "fp64")
    all_pass(2, *words, "--set", "policy.sequence_parallel=true")


@pytest.mark.slow
def test_a_norm_of_all_heads_needs_the_gradients_of_all_ranks():
    report = verify("--layout", "tp2", "--family", "qwen", "--break", "norm-grad", rc=1)
    assert report["passed"] == 0  # one weight for all heads: a rank alone sees half of them


@pytest.mark.parametrize(
    ("family", "layout", "policy"),
    [
        ("mixtral", "dp2 ep2", "sharding=zero3"),
        ("deepseek", "dp2 tp2 ep2 etp2", "sharding=zero1"),
        pytest.param("deepseek", "pp2 cp2 ep2", "schedule=zero-bubble", marks=pytest.mark.slow),
    ],
)
def test_experts_equal_one_process(family, layout, policy):
    fixed = ("--set", f"policy.{policy}", "--set", "policy.cp_kind=ring")
    if "pp" in layout:
        fixed += ("--set", "policy.sharding=zero2")
    all_pass(1, "--layout", layout, "--family", family, "--precision", "fp64", *fixed)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)  # with experts, 468 layouts each
@pytest.mark.parametrize("family", ["qwen", "olmo2", "mixtral", "deepseek"])
def test_every_layout_of_four_ranks_of_a_family(family):
    report = verify("--world", "4", "--family", family)
    assert report["passed"] == report["total"] > 100


def _that_drops(folder: Path) -> str:
    """A model whose experts drop what is above their share."""
    shape = catalog.model("mixtral-tiny")
    path = folder / "drops.toml"
    path.write_text(codec.to_toml(replace(shape, moe=replace(shape.moe, capacity=1.0))))
    return str(path)


def test_padding_reaches_no_router(tmp_path):
    # 5 sequences over 2 ranks, one at a time: the second rank's last micro batch is padding.
    words = ("--layout", "dp2 ep2", "--model", _that_drops(tmp_path))
    words += ("--set", "policy.sharding=zero2")
    report = all_pass(1, *words, "--global-batch", "5", "--micro-batch", "1", "--precision", "fp64")
    assert report["micro_batches"] == "dp 0: 1, 1, 1; dp 1: 1, 1 and 1 of padding"
    routing = report["layouts"][0]["routing"]
    assert routing["wrong"] == 0
    assert routing["margin"] > 1e-13
    assert routing["dropped"] > 0


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_micro_batches_need_not_divide_anything(count):
    # 7 sequences over 2 replicas: 4 and 3, in micro batches of 3: 3 + 1 and 3 + one of padding.
    words = ("--layout", "pp2 dp2", "--family", "gpt", "--global-batch", "7", "--micro-batch", "3")
    report = all_pass(count, *words, "--precision", "fp64", "--sample", str(count))
    assert report["micro_batches"] == "dp 0: 3, 1; dp 1: 3 and 1 of padding"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("pp2 dp1 cp2 tp2", ("48", "11")),  # 11, 11, 11, 11, 4
        ("pp2 dp2 tp2", ("13", "5")),  # 5, 2 and 5, 1
        ("pp2 dp2 tp2", ("5", "4")),  # one micro batch for two stages: 3 and 2
    ],
)
def test_uneven_batches_under_three_axes_in_fp64(layout, sizes):
    words = ("--global-batch", sizes[0], "--micro-batch", sizes[1], "--precision", "fp64")
    report = all_pass(12, "--layout", layout, *words, "--sample", "12")
    for gap in ("loss_diff", "norm_rel", "grad_rel", "param_rel"):
        assert max(row[gap] for row in report["layouts"]) <= 1e-9


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_fp64_agrees_far_beyond_fp32(count):
    report = all_pass(count, "--layout", "cp2 tp2", "--family", "llama", "--precision", "fp64",
                    "--set", "policy.sharding=zero3", "--sample", str(count))  # fmt: skip
    assert max(row["grad_rel"] for row in report["layouts"]) < 1e-12


# One of each axis, and two of experts; the others are for --all.
OFTEN = ("loss-divisor", "tied-grad", "cp-positions", "kv-head", "expert-scale", "idle-decay")


def rarely(faults):
    return [pytest.param(f, marks=[] if f in OFTEN else pytest.mark.slow) for f in faults]


# fault -> (layout and family where it acts, where it can't)
ACTS = {
    "loss-divisor": (("dp2", "llama"), ("tp2", "llama")),
    "tied-grad": (("pp2", "gpt"), ("pp2", "llama")),
    "cp-positions": (("cp2", "mpt"), ("cp2", "gpt")),  # ALiBi makes its distances in attention
    "norm-grad": (("tp2", "llama"), ("dp2", "llama")),
    "layer-skip": (("pp2", "llama"), ("tp2", "llama")),
    "kv-head": (("tp4", "llama"), ("tp4", "gpt")),
    "stale-weight": (("dp2", "gpt"), ("pp2", "gpt")),
    "norm-twice": (("tp2", "llama"), ("dp2", "llama")),
}


@pytest.mark.parametrize("fault", rarely(ACTS))
def test_a_planted_fault_is_seen_where_it_acts(fault):
    (layout, family), _ = ACTS[fault]
    words = ("--layout", layout, "--family", family, "--set", "policy.sequence_parallel=true")
    report = verify(*words, "--set", "policy.sharding=zero2", "--break", fault, rc=1)
    assert report["passed"] == 0
    for row in report["layouts"]:
        assert "error" not in row, "it must fail through the numbers"
        gaps = (row["loss_diff"], row["norm_rel"], row["grad_rel"], row["param_rel"])
        assert any(gap > limit for gap, limit in zip(gaps, (1e-5, 1e-5, 1e-4, 1e-3), strict=True))


# fault -> (layout, family, sharding, what the report calls it)
EXPERT_FAULTS = {
    "expert-scale": ("dp2 tp2 ep2", "mixtral", "zero1", r"gradients of the experts x .*\bep\b"),
    "expert-group": ("dp2 ep2", "mixtral", "zero2",
                     r"experts are sums over ep \(2\), each of diff"),
    "expert-norm": ("dp2 tp2 ep4", "deepseek", "zero2", "only ep rank 0's part of experts counted"),
    "expert-norm-twice": ("dp4 ep2", "mixtral", "zero0", "experts counted .*copies of experts"),
    "router-sum": ("dp2 tp2 ep4", "deepseek", "zero3", "copies of the router differ in gradient"),
    "scores-left": ("dp2 ep2", "mixtral", "zero2", "added up without their scores"),
    "scores-twice": ("dp2 ep2", "deepseek", "zero2", "scores were applied twice"),
    "scores-cut": ("dp2 ep2", "deepseek", "zero2", "no gradient through the scores"),
    "shared-sum": ("dp2 ep2", "deepseek", "zero2", "gradients of the shared experts off"),
    "balance-micro": ("dp2 ep2", "mixtral", "zero2", "over each rank and micro batch apart"),
    "balance-scale": ("dp2 ep2", "mixtral", "zero1", "the routers' losses x .*dp or ep"),
    "balance-lost": ("dp2 ep2", "deepseek", "zero1", "the routers' losses had no gradient"),
    "balance-rank": ("dp2 ep2", "deepseek", "zero1",
                     "copies of the routers' state differ in value after"),
    "bias-twice": ("dp2 ep2", "deepseek", "zero1", "the routers' bias moved 2 times as far"),
    "idle-decay": ("dp2 ep2", "deepseek", "zero1", "only experts without tokens off"),
}  # fmt: skip


@pytest.mark.parametrize("fault", rarely(EXPERT_FAULTS))
def test_a_fault_with_experts_is_seen_and_named(fault):
    layout, family, sharding, called = EXPERT_FAULTS[fault]
    words = ("--layout", layout, "--family", family, "--set", f"policy.sharding={sharding}")
    report = verify(*words, "--break", fault, rc=1)
    assert report["passed"] == 0
    for row in report["layouts"]:
        assert "error" not in row, row
        assert re.search(called, "; ".join(row["signature"])), row["signature"]


@pytest.mark.slow
def test_drops_in_another_order_are_named(tmp_path):
    words = ("--layout", "cp2 ep2", "--model", _that_drops(tmp_path))
    words += ("--set", "policy.sharding=zero2")
    words += ("--set", "policy.cp_kind=ring")
    assert verify(*words)["passed"] == 1
    (row,) = verify(*words, "--break", "drop-order", rc=1)["layouts"]
    assert row["signature"] == ["as if a full expert dropped its first tokens, not its last"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ACTS)
def test_a_planted_fault_changes_nothing_where_it_cannot_act(fault):
    _, (layout, family) = ACTS[fault]
    report = verify("--layout", layout, "--family", family, "--break", fault)
    assert report["passed"] == report["total"]


@pytest.mark.slow
def test_eight_ranks_stratified():
    report = all_pass(40, "--world", "8", "--sample", "40", "--seed", "1")
    sizes = [[word for word in row["layout"].split() if not word.endswith("1") or "x" in word]
             for row in report["layouts"]]  # fmt: skip
    assert sum(len(words) >= 3 for words in sizes) >= 12
    assert report["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_four_axes_at_once(kind):
    all_pass(8, "--world", "16", "--layout", "pp2 dp2 cp2 tp2", "--family", "llama",
                    "--set", f"policy.cp_kind={kind}", "--set", "policy.schedule=1f1b")  # fmt: skip


@pytest.mark.slow
def test_alibi_and_an_odd_vocabulary_under_every_kind_of_context_parallelism(tmp_path):
    shape = catalog.shape(
        "gpt", name="bloom-odd", layers=3, hidden=48, heads=6, vocab=301, embedding_norm=True,
        positions={"kind": "alibi"},
    )  # fmt: skip
    path = tmp_path / "model.toml"
    path.write_text(codec.to_toml(shape))
    report = verify("--layout", "cp2 tp2", "--model", str(path), "--set", "policy.sharding=zero2")
    # Three heads on each tensor rank cannot be dealt to two context ranks.
    assert report["refused"] == {"ulysses-heads": 2}
    assert report["passed"] == report["total"] == 4
    report = verify("--layout", "cp2 pp2", "--model", str(path), "--set", "policy.sharding=zero3")
    assert report["refused"] == {"virtual-stages": 3}
    assert report["passed"] == report["total"] == 9


def test_a_layout_that_crashes_is_a_row_and_the_others_still_run():
    # cuDNN attention does not exist on CPU, and is used only without context parallelism.
    report = verify("--world", "2", "--family", "gpt", "--sample", "8", "--set",
                    "policy.attention=cudnn", "--set", "policy.sharding=zero1", rc=1)  # fmt: skip
    assert report["total"] == 8
    failed = [row for row in report["layouts"] if not row["pass"]]
    assert failed
    assert len(failed) < 8
    assert all("rank" in row["error"] for row in failed)
    assert all("only on GPUs" in row["error"] for row in failed)
    assert all(row["grad_rel"] is None for row in failed)
