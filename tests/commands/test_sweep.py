"""The sweep command: plans, counts that add up, and nothing run that was not asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.result.files.store import Store
from fourfold.spec.run import RunSpec
from tests.cli import Cli
from tests.spec.token_files import write_array

SWEEP = """
gpus = 4
device = "cpu"
[batch]
seq_len = 64
global_batch = 12
[policy]
precision = "fp32"
[sweep]
model = ["llama-tiny", "mpt-tiny"]
tp = [1, 8]
micro_batch = [1, 2, 3]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return str(tmp_path / "sweep.toml")


def test_counts_add_up_and_resuming_runs_nothing(tmp_path, file, ran, cli) -> None:
    words = ["sweep", file, "--runs", str(tmp_path / "runs")]
    data = cli.json(*words)
    assert data["total"] == 12 == sum(data["counts"].values())
    assert {k: v for k, v in data["counts"].items() if v} == {"ok": 5, "oom": 1, "illegal": 6}
    assert "tp" in data["runs"][3]["reason"]
    assert len(ran) == 6
    again = cli.json(*words)
    assert again["counts"] == data["counts"]
    assert len(ran) == 6


def test_impossible_axes_are_stored_like_other_refusals(tmp_path, file, ran, cli) -> None:
    out = cli("sweep", file, "--runs", tmp_path / "runs")
    assert "12 of 12 runs recorded: 5 ok, 6 illegal, 1 oom" in out
    stored = [item.summary for item in Store(tmp_path / "runs").runs()]
    refused = [item for item in stored if item.outcome == "illegal"]
    assert len(stored) == 12
    assert len(refused) == 6
    assert all("is not divisible by" in item.failure and item.spec.gpus == 4 for item in refused)
    for style in ("topology", "mpt", "scaling"):  # rows of our own, and no mistakes in them
        out = str(tmp_path / style)
        words = ["report", "--runs", str(tmp_path / "runs"), "--style", style]
        cli(*words, "--out", out)
        cli("lint", f"{out}.md")


def test_what_surely_does_not_fit_is_refused_unless_forced(tmp_path, ran, cli) -> None:
    file = tmp_path / "huge.toml"
    file.write_text(SWEEP.replace('"mpt-tiny"', '"llama-3.1-405b"').replace("[1, 8]", "[1]"))
    words = ["sweep", str(file), "--runs", str(tmp_path / "runs")]
    data = cli.json(*words)
    assert {k: v for k, v in data["counts"].items() if v} == {"ok": 3, "illegal": 3}
    reasons = {row["reason"] for row in data["runs"] if row["outcome"] == "illegal"}
    assert all("certainly does not fit: weights, gradients and moments" in why for why in reasons)
    assert {spec.model.name for spec in ran} == {"llama-tiny"}
    cli(*words, "--force", "--runs", tmp_path / "more")
    assert "llama-3.1-405b" in {spec.model.name for spec in ran}


def test_speed_is_counted_by_the_asked_convention(tmp_path, file, ran, cli) -> None:
    found = {}
    for rule in ("causal", "full-attention"):
        words = ["sweep", file, "--runs", str(tmp_path / rule)]
        rows = cli.json(*words, "--convention", rule)["runs"]
        assert {row["flop_rule"] for row in rows} == {rule}
        found[rule] = [row["tflops_gpu"] for row in rows if row["outcome"] == "ok"]
    assert found["causal"]
    tokens = [row["tokens_s_gpu"] for row in rows if row["outcome"] == "ok"]
    assert all(tokens)
    cli("sweep", file, "--convention", "guess", status=2)


def test_tokens_that_do_not_fit_are_refused_by_combination(tmp_path, ran, cli) -> None:
    name = tmp_path / "tokens"
    write_array(str(name), range(300), vocab=400)
    text = f'model = "llama-tiny"\ngpus = 1\ndata = "{name}"\n[sweep]\nseq_len = [64, 300]\n'
    (tmp_path / "sweep.toml").write_text(text)
    words = ["sweep", str(tmp_path / "sweep.toml"), "--runs", str(tmp_path / "runs")]
    cli(*words)
    assert "has 300 tokens, but" in cli.err
    assert [spec.batch.seq_len for spec in ran] == [64]
    name.with_suffix(".json").unlink()
    cli(*words, status=2)


def test_predictions_are_kept_with_the_runs(tmp_path, file, ran, cli) -> None:
    words = ["sweep", file, "--runs", str(tmp_path / "runs")]
    cli(*words)
    stored = Store(tmp_path / "runs").runs()
    for item in stored:
        said = item.report().predicted
        assert (said is None) == (item.summary.outcome == "illegal")
        if said is not None:
            assert 0 < said.step_s_low < said.step_s < said.step_s_high
            assert said.peak_bytes < said.limit_bytes
            assert said.basis == "a rough guess from the cores"
    (bad,) = [item for item in stored if item.summary.outcome == "oom"]
    assert [one.change for one in bad.report().remedies][:1]
    (score,) = cli.json("report", "--runs", tmp_path / "runs")["scores"]
    assert (score["runs"], score["fit_runs"], score["fit_right"]) == (5, 6, 5)
    assert score["missed_oom"] == 1
    out = cli("report", "--runs", tmp_path / "runs")
    assert "Planner's score (a rough guess from the cores): median error" in out
    assert "whether it fits right for 5 of 6, 1 out-of-memory not foreseen" in out


def test_conditions_on_predictions_skip_runs(tmp_path, file, ran, cli) -> None:
    words = ["sweep", file, "--runs", str(tmp_path / "runs")]
    planned = cli.json(*words, "--dry-run")["planned"]
    sizes = sorted(row["peak_bytes"] / 2**30 for row in planned)
    middle = (sizes[2] + sizes[3]) / 2
    data = cli.json(*words, "--where", f"mem_gib < {middle!r}")
    assert len(ran) == 3
    assert (data["total"], data["dropped"], data["counts"]["illegal"]) == (9, 3, 6)
    assert all(one["peak_bytes"] / 2**30 > middle for one in data["skipped"])
    assert "does not hold: predicted mem_gib" in cli.err
    cli(*words, "--where", "step_s < 0", "--where", "tp < 8", status=2)


def test_auto_is_decided_run_by_run(tmp_path: Path, ran: list[RunSpec], cli: Cli) -> None:
    text = SWEEP.replace("tp = [1, 8]", "").replace("[1, 2, 3]", '["auto"]')
    (tmp_path / "auto.toml").write_text(text)
    words = ["sweep", str(tmp_path / "auto.toml"), "--runs", str(tmp_path / "runs")]
    rows = cli.json(*words)["runs"]
    assert [(row["outcome"], row["micro_batch"]) for row in rows] == [("ok", 3), ("ok", 2)]
    trials = len(ran)
    assert "micro_batch=auto (micro_batch=2)" in cli(*words)
    assert len(ran) == trials


def test_the_dry_run_lists_refusals_first_and_runs_nothing(tmp_path, file, ran, cli) -> None:
    out = cli("sweep", file, "--runs", tmp_path / "runs", "--dry-run")
    assert out.startswith("illegal")
    assert "12 combinations: 6 illegal, 6 legal" in out
    assert "to run: 6, about" in out
    assert ran == []
    assert not (tmp_path / "runs").exists()
    assert cli.json("sweep", file, "--dry-run")["predicted_s"] > 0


FLAGS = ["sweep", "-m", "llama-tiny", "mpt-tiny", "-s", "5", "6", "-b", "9", "-t", "fp32", "-g",
         "1"]  # fmt: skip


def test_the_flag_form_needs_run(tmp_path: Path, ran: list[RunSpec], cli: Cli) -> None:
    where = ["--runs", str(tmp_path / "runs"), "--micro-batch", "1", "2", "--tag", "night"]
    said = cli(*FLAGS, *where)
    assert "nothing was run; add --run to start" in said
    assert "settings" not in said  # what varies has columns
    assert ran == []
    cli(*FLAGS, *where, "--run")
    assert len(ran) == 8
    assert {(s.batch.seq_len, s.batch.global_batch) for s in ran} == {(32, 16), (64, 8)}
    assert {stored.summary.spec.tag for stored in Store(tmp_path / "runs").runs()} == {"night"}


def test_flags_change_the_runs_of_a_file(file, cli) -> None:
    planned = cli.json("sweep", file, "--dry-run", "--set", "batch.seq_len=32", "--set", "gpus=2")
    assert {(row["seq_len"], row["gpus"]) for row in planned["planned"]} == {(32, 2)}


def test_planned_runs_that_differ_in_a_policy_alone_are_told_apart(cli: Cli, tmp_path: Path):
    axes = 'model = ["mixtral-tiny"]\nep = [1, 2]\n"policy.dispatcher" = ["alltoall", "allgather"]'
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP.partition("model =")[0] + axes)
    for row in cli.json("sweep", file, "--dry-run")["planned"]:
        assert row["combination"].keys() == {"model", "ep", "policy.dispatcher"}
    table = cli("sweep", file, "--dry-run").splitlines()[2:6]
    assert [row.split()[-1] for row in table] == [
        f"policy.dispatcher={name}" for name in ("alltoall", "allgather") * 2
    ]
    rows = cli("sweep", file, "--dry-run", "--format", "csv").splitlines()
    place = rows[0].split(",").index("policy.dispatcher")
    assert [row.split(",")[place] for row in rows[1:]] == ["alltoall", "allgather"] * 2
