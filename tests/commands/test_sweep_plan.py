"""The planner's best as a sweep: the same question as 'plan', predictions kept beside results."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.result.files.store import Store
from fourfold.spec import codec
from tests.result.test_profile import make

QUESTION = [
    "--model", "llama-tiny", "--gpus", "4", "--seq-len", "64", "--global-batch", "8",
    "--precision", "fp32",
]  # fmt: skip


@pytest.fixture
def profile(tmp_path: Path) -> list[str]:
    path = tmp_path / "profile.json"
    path.write_text(codec.to_json(make(cores=4, units=4, memory_bytes=2**30)))
    return ["--profile", str(path)]


def test_the_top_of_the_plan_is_measured(tmp_path, profile, ran, cli) -> None:
    asked = [*QUESTION, *profile]
    ranked = cli.json("plan", *asked, "--stack", "fourfold", "--top", "3")["ranked"]
    words = ["sweep", "--from-plan", "3", *asked, "--runs", str(tmp_path / "runs")]
    words += ["--set", "steps=4", "--set", "device=cpu"]
    planned = cli.json(*words, "--dry-run")
    assert ran == []
    assert [row["layout"] for row in planned["planned"]] == [row["layout"] for row in ranked]
    assert planned["predicted_s"] > sum(row["step_s"] for row in ranked)
    data = cli.json(*words)
    assert data["total"] == data["ok"] == len(ran) == 3
    for spec, row, said in zip(ran, ranked, data["runs"], strict=True):
        assert (str(spec.layout), spec.batch.micro_batch) == (row["layout"], row["micro_batch"])
        assert (spec.policy.sharding, spec.steps) == (row["policy"]["sharding"], 4)
        assert said["predicted"]["step_s"] == row["step_s"]
    stored = Store(tmp_path / "runs").runs()
    assert {item.summary.predicted.basis for item in stored} == {
        "plan on here-cpu, calibration profile of here"
    }
    again = cli.json(*words)  # resumed: nothing runs again, predictions stay
    assert len(ran) == 3
    assert all(row["resumed"] for row in again["runs"])
    assert "predicted step time" in cli(*words)


def test_constraints_bind_the_plan(tmp_path, profile, ran, cli) -> None:
    words = ["sweep", "--from-plan", "9", *QUESTION, *profile, "--runs", str(tmp_path / "runs")]
    cli(*words, "--tp", "2", "--micro-batch", "1", "--where", "pp == 1")
    assert {(spec.layout.tp, spec.layout.pp, spec.batch.micro_batch) for spec in ran} == {(2, 1, 1)}
    assert "found no legal layout that fits" in cli(*words, "--set", "memory_limit=1000", status=2)
