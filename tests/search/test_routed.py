"""What a plan says about the router of its first choice."""

from __future__ import annotations

from fourfold import PlanRequest, plan


def test_ways_to_spread_experts_stand_side_by_side() -> None:
    answer = plan(
        PlanRequest(
            model="qwen3-30b-a3b", cluster="nvidia-h100", gpus=16, seq_len=4096, global_batch=512,
            stack="megatron", top=3,
        )
    )  # fmt: skip
    said = next(one for one in answer.routed.remarks if one.startswith("fastest of each kind"))
    ways = dict(part.rsplit(" ", 2)[:2] for part in said.partition(": ")[2].split(", "))
    assert {"EP and a pipeline", "EP without a pipeline"} <= ways.keys()
    best = min(row.step_s for row in answer.ranked)
    assert min(map(float, ways.values())) <= best * 1.01
