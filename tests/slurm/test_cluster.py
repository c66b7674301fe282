"""Jobs on a real Slurm of two nodes: the same answers, outcomes and blame as on one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.launch.local import run_job
from fourfold.launch.slurm import Slurm
from fourfold.result.job import Job, JobReport
from fourfold.spec import catalog, codec, texts
from fourfold.spec.run import RunSpec
from fourfold.spec.site import Site, read_site
from tests.processes import with_words
from tests.slurm.user import FOREVER, SMALL, User, taken_port

pytestmark = pytest.mark.slow
RUN = ["bench", *SMALL, "--warmup", "1"]
BENCH = [*RUN, "--probe-s", "0"]


def ping(user: User, site: Site, monkeypatch: pytest.MonkeyPatch, **table: Any) -> JobReport:
    for name, value in user.cluster.env.items():
        monkeypatch.setenv(name, value)
    plain = {"model": "llama-tiny", "gpus": 4, "layout": {"dp": 4}, "device": "cpu", **table}
    batch = {"seq_len": 32, "global_batch": 4, "micro_batch": 1}
    job = Job(job="ping", specs=(codec.load(RunSpec, plain | {"batch": batch}),))
    return run_job(job, user.folder / "job", on=Slurm(site))


def hosts_of(run: dict[str, Any]) -> list[str]:
    return [rank["host"] for rank in sorted(run["ranks"], key=lambda rank: rank["rank"])]


def workers_of(folder: Path) -> dict[int, str]:
    """Command lines of processes that work for a job below this folder."""
    return with_words("fourfold.engine.worker", str(folder))


def test_a_bench_over_two_nodes(user: User) -> None:
    answer = user.ask(*RUN, "--steps", "3", "--probe-s", "0.1")
    assert answer["outcome"] == "ok"
    (run,) = user.runs()
    first, second = user.cluster.names
    assert hosts_of(run) == [first, first, second, second]
    known = run["environment"]
    assert known["slurm.ranks"] == f"{first}: 0-1, {second}: 2-3"
    assert known["slurm.job"].isdecimal()
    # Tensor parallel ranks share a host, pipeline stages are on two.
    assert {link["axis"]: link["level"] for link in run["links"]} == {"tp": "host", "pp": "network"}
    assert not (user.folder / "runs" / ".jobs").exists()


def test_ranks_follow_the_order_that_the_site_gives(user: User, monkeypatch) -> None:
    first, second = user.cluster.names
    user.write_site(hosts=[second, first])
    site = read_site(str(user.site))
    assert site is not None
    report = ping(user, site, monkeypatch)
    assert report.outcome == "ok"
    known = dict(report.runs[0].environment)
    assert known["slurm.ranks"] == f"{second}: 0-1, {first}: 2-3"


def test_the_rank_that_failed_is_blamed_with_its_node(user: User, monkeypatch) -> None:
    site = read_site(str(user.site))
    assert site is not None
    report = ping(user, site, monkeypatch, fault={"kind": "crash", "rank": 3, "step": 0})
    assert report.outcome == "crashed"
    assert report.failure.rank == 3
    assert f"on {user.cluster.names[1]}" in report.failure.message


def test_a_port_that_is_taken_is_passed_over(user: User, monkeypatch) -> None:
    site = read_site(str(user.site))
    assert site is not None
    with taken_port(user) as port:
        assert ping(user, site, monkeypatch).outcome == "ok"
    (told,) = (user.folder / "job").glob("slurm-port-*")
    assert int(told.read_text()) == port + 1


def test_a_script_is_submitted_by_hand_and_its_run_collected(user: User) -> None:
    text = user.call(*BENCH, "--steps", "2", "--print-launch")
    (path,) = (user.folder / "runs" / ".jobs").glob("*/slurm.sh")
    assert path.read_text().strip() == text.strip()
    edited = path.with_name("mine.sh")
    edited.write_text(text.replace("--job-name=fourfold-run", "--job-name=by-hand"))
    job = user.cluster.run(["sbatch", "--parsable", str(edited)])
    assert job.isdecimal(), "sbatch took it"
    user.cluster.wait_for(lambda: job not in user.cluster.jobs(), "the job to end")
    assert user.ask(*BENCH, "--steps", "2")["outcome"] == "ok"
    (run,) = user.runs()
    assert run["environment"]["slurm.job"] == job


def test_a_detached_run_is_followed_later(user: User) -> None:
    (job,) = user.ask(*BENCH, "--steps", "2", "--detach")["jobs"]
    assert user.ask(*BENCH, "--steps", "2")["outcome"] == "ok"
    (run,) = user.runs()
    assert run["environment"]["slurm.job"] == job["slurm_job"]


def test_ctrl_c_leaves_nothing_running(user: User) -> None:
    process = user.begin(*BENCH, "--steps", FOREVER)
    user.cluster.wait_for(user.at_work, "the first step")
    user.interrupt(process)
    user.finish(process, status=130)
    assert user.cluster.jobs() == []
    assert not workers_of(user.folder)
    assert user.runs() == []
    assert not (user.folder / "runs" / ".jobs").exists()


def test_a_lost_node_ends_the_run_and_is_named(user: User) -> None:
    process = user.begin(*BENCH, "--steps", FOREVER, "--format", "json")
    user.cluster.wait_for(user.at_work, "the first step")
    lost = user.cluster.names[1]
    user.cluster.kill_node(lost)
    try:
        user.finish(process, status=1)
    finally:
        user.cluster.start_node(lost)
    user.cluster.wait_for(lambda: user.cluster.ready() == 2, "the node to be back")
    (run,) = user.runs()
    assert run["outcome"] == "cancelled"
    assert lost in run["failure"]["message"]


def test_a_node_that_is_lost_before_its_ranks_start_is_named(user: User) -> None:
    with user.node_lost_before_srun() as lost:
        user.ask(*BENCH, "--steps", "2", status=1)
    (run,) = user.runs()
    assert run["outcome"] == "cancelled"
    assert lost in run["failure"]["message"]


def test_a_worker_that_cannot_start_says_why(user: User) -> None:
    user.write_site(python="/nowhere/python")
    run = user.ask(*BENCH, "--steps", "2", status=1)
    assert run["outcome"] == "crashed"
    (stored,) = user.runs()
    assert "/nowhere/python" in stored["failure"]["message"]


def test_a_site_that_slurm_rejects_is_an_error(user: User) -> None:
    user.write_site(partition="nowhere")
    process = user.begin(*BENCH)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "Slurm rejected the job" in errors
    assert "partition" in errors
    assert user.runs() == []


def test_verify_over_two_nodes_equals_one_process(user: User) -> None:
    user.write_site(gpus_per_node=4)
    words = ["verify", "--world", "8", "--layout", "pp2 dp2 tp2", "--family", "llama"]
    answer = user.ask(*words, "--sample", "2")
    assert (answer["passed"], answer["total"]) == (2, 2)
    broken = user.ask(*words, "--sample", "1", "--break", "loss-divisor", status=1)
    assert broken["passed"] == 0


def test_a_detached_verification_is_followed_later(user: User) -> None:
    words = ["verify", "--layout", "dp2 tp2", "--family", "llama", "--sample", "1"]
    (job,) = user.ask(*words, "--detach")["jobs"]
    assert user.ask(*words, "--detach")["jobs"] == [job], "it is submitted once"
    answer = user.ask(*words)
    assert (answer["passed"], answer["total"]) == (1, 1)
    assert not Path(job["folder"]).exists()
    assert user.cluster.jobs() == []


def test_a_verification_is_submitted_by_hand(user: User) -> None:
    words = ["verify", "--layout", "dp2 tp2", "--family", "llama", "--sample", "1"]
    text = user.call(*words, "--print-launch")
    (path,) = user.folder.glob("fourfold-verify-*/slurm.sh")
    assert path.read_text().strip() == text.strip()
    job = user.cluster.run(["sbatch", "--parsable", str(path)])
    user.cluster.wait_for(lambda: job not in user.cluster.jobs(), "the job to end")
    answer = user.ask(*words)
    assert (answer["passed"], answer["total"]) == (1, 1)
    assert not path.parent.exists()


def test_a_training_is_submitted_by_hand(user: User) -> None:
    """From another folder; the command that comes later finds it done, and trains nothing."""
    words = ["train", *SMALL, "--steps", "3", "--out", "trained", "--lr", "1e-3"]
    text = user.call(*words, "--print-launch")
    path = user.folder / "trained" / "job" / "slurm.sh"
    assert path.read_text().strip() == text.strip()
    job = user.cluster.run(["sbatch", "--parsable", "--chdir=/", str(path)])
    user.cluster.wait_for(lambda: job not in user.cluster.jobs(), "the job to end")
    curve = user.folder / "trained" / "metrics.jsonl"
    before = curve.read_text()
    assert len(before.splitlines()) == 3
    assert user.ask(*words)["steps"] == 3
    assert curve.read_text() == before
    known = user.cluster.run(["squeue", "-h", "-t", "all", "-o", "%A"]).split()
    assert max(known, key=int) == job, "no other job was submitted"


def test_a_training_survives_a_requeue_and_ends_with_75(user: User) -> None:
    """Slurm starts it over from what it saved, and its warning makes it save and end."""
    words = ["train", *SMALL, "--steps", FOREVER, "--out", "trained", "--lr", "1e-3"]
    curve = user.folder / "trained" / "metrics.jsonl"

    def steps() -> int:
        return len(curve.read_text().splitlines()) if curve.exists() else 0

    process = user.begin(*words)
    user.cluster.wait_for(lambda: steps() > 0, "the first step")
    (job,) = user.cluster.jobs()
    user.cluster.run(["scontrol", "requeue", job])

    news = user.folder / "trained" / "job" / "news-0.jsonl"
    user.cluster.wait_for(lambda: '"start": 1' in news.read_text(), "ranks that start over")
    saved = steps()
    assert saved > 0
    user.cluster.wait_for(lambda: steps() > saved, "a step after that")
    user.cluster.run(["scancel", "--signal=USR1", job])
    user.finish(process, status=75)
    numbers = [texts.parse_json(line)["step"] for line in curve.read_text().splitlines()]  # type: ignore
    assert numbers == list(range(1, len(numbers) + 1)), "no step is lost or done twice"
    assert user.cluster.jobs() == []


def test_links_are_measured_by_level(user: User) -> None:
    words = ["calibrate", "--quick", "--device", "cpu", "--cluster-out", "mine.toml"]
    profile = user.ask(*words)
    crossing = [point for point in profile["collectives"] if point["hosts"] == 2]
    assert {point["ranks"] for point in crossing} == {2}
    assert {point["ranks"] for point in profile["collectives"] if point["hosts"] == 1} == {2}
    cluster = catalog.cluster(str(user.folder / "mine.toml"))
    assert [(link.name, link.ranks) for link in cluster.links] == [("host", 2), ("network", 4)]
    assert (cluster.gpus, cluster.host_gpus) == (4, 2)


def test_a_calibration_is_submitted_by_hand_and_collected(user: User) -> None:
    words = ["calibrate", "--quick", "--device", "cpu"]
    text = user.call(*words, "--print-launch", "--out", "profile.json")
    (path,) = user.folder.glob("fourfold-calibrate-*/slurm.sh")
    assert path.read_text().strip() == text.strip()
    assert not (user.folder / "profile.json").exists()
    job = user.cluster.run(["sbatch", "--parsable", str(path)])
    assert user.ask(*words, "--detach")["jobs"][0]["slurm_job"] == job, "it is known"
    profile = user.ask(*words, "--out", "profile.json")
    assert profile["collectives"]
    assert (user.folder / "profile.json").exists()
    assert not path.parent.exists()


SWEEP = (Path(__file__).parent / "runs" / "sweep.toml").read_text()


def test_a_sweep_loses_nothing_to_a_cancelled_job_and_a_stopped_node(user: User) -> None:
    """Six configurations; workers wait at a gate, so that what happens to a job happens in it."""
    cluster, gate = user.cluster, user.folder / "gate"
    gate.touch()
    arrive = 'touch "$0-$SLURM_JOB_ID-$SLURM_PROCID"'
    waiting = f'{arrive}; while [ -e "$0" ]; do sleep 0.1; done; exec "$@"'
    user.write_site(wrapper=["sh", "-c", waiting, str(gate)])
    (user.folder / "sweep.toml").write_text(SWEEP)
    process = user.begin("sweep", "sweep.toml", "--format", "json")

    def runs(job: str) -> bool:
        """On both nodes, not only as a step that Slurm is about to launch."""
        return all(gate.with_name(f"gate-{job}-{node}").exists() for node in (0, 1))

    cluster.wait_for(lambda: len(cluster.jobs()) == 6, "six queued jobs")
    first, second, *_ = sorted(cluster.jobs(), key=int)
    cluster.wait_for(lambda: runs(first), "the first job")
    cluster.run(["scancel", first])
    cluster.wait_for(lambda: runs(second), "the second job")
    cluster.kill_node(cluster.names[1])
    cluster.wait_for(lambda: second not in cluster.jobs(), "Slurm to give up the node")
    gate.unlink()
    cluster.start_node(cluster.names[1])
    swept = texts.parse_json(user.finish(process))
    assert isinstance(swept, dict)
    assert (swept["total"], swept["ok"], swept["cancelled"]) == (6, 4, 2)
    reasons = [row["reason"] for row in swept["runs"][:2]]
    assert "CANCELLED" in reasons[0]
    # Slurm says it, or srun before Slurm has noticed.
    assert "NODE_FAIL" in reasons[1] or f"{cluster.names[1]} was lost" in reasons[1]

    again = user.ask("sweep", "sweep.toml")
    assert (again["total"], again["ok"]) == (6, 6)
    assert [row["resumed"] for row in again["runs"]] == [False, False, True, True, True, True]
    stored = user.runs()
    assert sorted(run["outcome"] for run in stored) == ["cancelled"] * 2 + ["ok"] * 6
    one, two = cluster.names
    assert {tuple(hosts_of(run)) for run in stored if run["outcome"] == "ok"} == {
        (one, one, two, two)
    }


@pytest.mark.parametrize("queue", ["array", "allocation"])
def test_runs_share_an_array_or_an_allocation(user: User, queue: str) -> None:
    user.write_site(queue=queue)
    text = SWEEP.replace(', "pp2 dp2"', "").replace("[1, 2]", "[1]")
    (user.folder / "sweep.toml").write_text(text)
    swept = user.ask("sweep", "sweep.toml")
    assert (swept["total"], swept["ok"]) == (2, 2)
    jobs = {run["environment"]["slurm.job"].partition("_")[0] for run in user.runs()}
    assert len(jobs) == 1
    assert not (user.folder / "runs" / ".jobs").exists()
