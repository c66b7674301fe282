"""What a plan says about the router of its first choice."""

from __future__ import annotations

import csv

import pytest

from fourfold import PlanRequest, plan


def test_ways_to_spread_experts_stand_side_by_side() -> None:
    answer = plan(
        PlanRequest(
            model="qwen3-30b-a3b", cluster="nvidia-h100", gpus=16, seq_len=4096, global_batch=512,
            stack="megatron", top=3,
        )
    )  # fmt: skip
    said = next(one for one in answer.routed.remarks if one.startswith("best with "))
    ways = dict(part.rsplit(" ", 2)[:2] for part in said.removeprefix("best with ").split(", "))
    assert {"EP+PP", "EP only"} <= ways.keys()
    best = min(row.step_s for row in answer.ranked)
    assert min(map(float, ways.values())) <= best * 1.01


ASK = [
    *("plan", "--model", "qwen3-30b-a3b", "--cluster", "nvidia-h100", "--gpus", 16),
    *("--seq-len", 4096, "--global-batch", 512, "--stack", "megatron"),
]


@pytest.mark.parametrize(
    ("layout", "status", "says"),
    [
        ("pp2 dp8 ep8", 0, "pp2 dp8 cp1 tp1 ep8"),
        ("pp2 dp8", 0, "pp2 dp8 cp1 tp1 ep4"),
        ("pp2 dp8 ep1", 1, "GiB of 79.6"),
        ("dp16 ep3", 1, "[experts] layout.ep=3"),
        ("pp2 dp8 ep8 v3", 0, "pp2 dp8 cp1 tp1 ep8 v3"),
    ],
)
def test_a_layout_is_explained_with_the_experts_it_names(cli, layout, status, says) -> None:
    text = cli(*ASK, "--explain", layout, status=status).partition("its best variants")[0]
    assert says in text
    assert ("GEMM " in text and "ep communication" in text) == (status == 0)


@pytest.mark.parametrize(
    ("words", "says", "differ"),
    [
        ([], "(--imbalance 1)", True),
        (["--imbalance", 0.5], "(--imbalance 0.5)", False),
        (["--pp", 8, "--recompute", "moe"], "recompute none or of experts: ", True),
    ],
)
def test_what_is_said_of_routing_holds_for_the_first_choice(cli, words, says, differ) -> None:
    said = cli(*ASK, "--details", *words)
    assert says in said
    assert (" as routers differ)" in said) is differ


def test_rows_of_a_table_say_how_experts_are_spread(cli) -> None:
    header, first, *_ = csv.reader(cli(*ASK, "--format", "csv").splitlines())
    assert int(dict(zip(header, first, strict=True))["ep"]) > 1
