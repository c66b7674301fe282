"""A real engine on a real Slurm: torchtitan 0.2.2 trains over two nodes by its shipped template,
beside our own engine, into one store and one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fourfold
from tests.engines.titan_template import NAME, template
from tests.processes import with_words
from tests.slurm.user import User

pytestmark = pytest.mark.slow
RUN = (Path(__file__).parent / "runs" / "titan.toml").read_text()


def test_torchtitan_and_our_engine_over_two_nodes_are_one_table(user: User) -> None:
    interface = "eth0" if user.cluster.spaced else "lo"
    user.write_site(gpus_per_node=1, interface=interface)
    (user.folder / "run.toml").write_text(RUN)
    asked = ["bench", "--spec", "run.toml", "--cluster", "mosaic-a100"]
    theirs, ours = user.ask(*asked, "--engine", f"{template(user.folder)},fourfold")["runs"]
    logs = sorted(Path(theirs["folder"]).glob("engine-*.log"))
    assert theirs["outcome"] == "ok", logs[0].read_text()[-3000:]
    assert ours["outcome"] == "ok"
    first, second = user.cluster.names
    for run in user.runs():
        assert run["environment"]["slurm.ranks"] == f"{first}: 0-0, {second}: 1-1"
    for run in (theirs, ours):
        assert run["tokens_s_gpu"] == pytest.approx(8 * 128 / 2 / run["step_s"], rel=1e-3)
        assert 5.5 < run["loss"] < 7.5  # 512 tokens at random: ln(512) is 6.2

    report = fourfold.report(fourfold.ReportRequest(runs=str(user.folder / "runs")))
    assert sorted(row["stack"] for row in report.rows()) == ["fourfold", NAME]
    collected(user, logs)
    user.cluster.wait_for(lambda: not user.cluster.jobs(), "the jobs to be gone")
    assert not with_words("titan_cpu.py")


def collected(user: User, logs: list[Path]) -> None:
    """The real logs of both nodes are one row, with the whole configuration."""
    assert [log.name for log in logs] == ["engine-0.log", "engine-1.log"]
    request = fourfold.CollectRequest(
        logs=(str(user.folder / "runs"),),
        out=str(user.folder / "rows.csv"),
        fields={"hardware": "a100-80gb"},
    )
    answer = fourfold.collect(request)
    (row,) = answer.rows_read
    said = {
        "engine": "torchtitan", "status": "ok", "n_layers": "4", "d_model": "64", "vocab": "512",
        "n_gpus": "2", "dp": "2", "tp": "1", "pp": "1", "mbs": "2", "gbs": "8",
        "sharding": "zero3", "precision": "fp32", "act_ckpt": "none",
    }  # fmt: skip
    assert {name: row[name] for name in said} == said
    assert json.loads(row["unread_lines"]) == 0


def test_torchtitans_own_error_is_the_runs_failure(user: User) -> None:
    """A rank of the second node fails in its code; both nodes end, and that rank is blamed."""
    user.write_site(gpus_per_node=1, interface="eth0" if user.cluster.spaced else "lo")
    (user.folder / "run.toml").write_text(RUN)
    path = Path(template(user.folder))
    path.write_text(path.read_text() + 'FAIL_RANK = "1"\n')
    words = ["bench", "--spec", "run.toml", "--cluster", "mosaic-a100", "--engine", str(path)]
    run = user.ask(*words, status=1)
    assert run["outcome"] == "crashed"
    (stored,) = user.runs()
    failure = stored["failure"]
    assert (failure["rank"], user.cluster.names[1] in failure["message"]) == (1, True)
    user.cluster.wait_for(lambda: not user.cluster.jobs(), "the job to be gone")
    assert not with_words("titan_cpu.py")
