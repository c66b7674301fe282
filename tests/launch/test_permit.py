"""A file alone can't run code or fill the machine with ranks; the command line can insist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.errors import UserError
from fourfold.launch import campaign, local, permit
from fourfold.launch.permit import RANK_BYTES, Permit, most_ranks
from fourfold.launch.ranks import worker_env
from fourfold.result import machine
from fourfold.result.job import Job
from fourfold.spec.run import RunSpec
from fourfold.verbs import train as train_command
from tests.specs import run_spec

RUN = """\
model = "llama-tiny"
gpus = 1
device = "cpu"
[batch]
seq_len = 32
global_batch = 4
[policy]
env = {{ {name} = "{value}" }}
"""


def spec(ranks: int = 1, **env: str) -> RunSpec:
    fields = {"seq_len": 32, "global_batch": ranks, "env": tuple(env.items())}
    return run_spec("llama-tiny", f"dp{ranks}", device="cpu", **fields)


@pytest.fixture
def trap(tmp_path: Path) -> tuple[Path, Path]:
    """A folder whose code runs in every Python that has it on its path, and what it then makes."""
    folder, sprung = tmp_path / "trap", tmp_path / "sprung"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"open({str(sprung)!r}, 'w').close()\n")
    return folder, sprung


def test_no_command_starts_a_file_s_code(tmp_path: Path, trap, capsys, monkeypatch) -> None:
    folder, sprung = trap
    monkeypatch.chdir(tmp_path)
    text = RUN.format(name="PYTHONPATH", value=folder)
    Path("run.toml").write_text(text)
    Path("sweep.toml").write_text(f"{text}[sweep]\nseed = [1, 2]\n")
    Path("axis.toml").write_text(
        'model = "llama-tiny"\ngpus = 1\n[sweep]\n"env.LD_PRELOAD" = ["/x.so"]\n'
    )
    Path("out").mkdir()
    Path("out/train.toml").write_text(text)
    value = ["--set", f"policy.env={{PYTHONPATH='{folder}'}}"]
    for words in (
        "bench --spec run.toml", "bench --spec run.toml --as-rank 0", "sweep sweep.toml",
        "sweep sweep.toml --dry-run", "sweep axis.toml", "train --out out --steps 1",
        "train --out new --spec run.toml --steps 1", "verify --world 1 SET",
        "bench --model llama-tiny --gpus 1 SET",
    ):  # fmt: skip
        asked = [*words.removesuffix("SET").split(), *(value if "SET" in words else ())]
        assert main(asked) == 2, words
        said = capsys.readouterr().err
        name = "LD_PRELOAD" if "axis" in words else "PYTHONPATH"
        assert f"--env {name}=VALUE" in said, words
    assert not sprung.exists()
    assert not list(tmp_path.glob("runs/*"))


def test_the_gate_is_where_processes_start(tmp_path: Path) -> None:
    job = Job(job="run", specs=(spec(), spec(LD_PRELOAD="x.so")))
    with pytest.raises(UserError, match="LD_PRELOAD"):
        local.run_job(job, tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_the_command_line_may_set_it_once(tmp_path: Path, monkeypatch, cli) -> None:
    """A resume has the variable in train.toml, and needs the flag again."""
    seen: list[tuple[Job, Permit]] = []

    def launched(job: Job, folder: Path, *, permit: Permit, **how: object) -> None:
        permit.require_job(job)
        seen.append((job, permit))
        raise KeyboardInterrupt

    monkeypatch.setattr(train_command, "run_job", launched)
    words = ["train", "--model", "llama-tiny", "--gpus", "1", "--steps", "2", "--seq-len", "32"]
    words += ["--out", str(tmp_path / "out")]
    flag = ["--env", "NCCL_TOPO_FILE=/etc/topo.xml", "--env", "NCCL_DEBUG=WARN"]
    cli(*words, *flag, status=130)
    (job, _) = seen.pop()
    assert dict(job.specs[0].policy.env) == {
        "NCCL_TOPO_FILE": "/etc/topo.xml", "NCCL_DEBUG": "WARN",
    }  # fmt: skip
    assert worker_env(job, 0)["NCCL_TOPO_FILE"] == "/etc/topo.xml"
    resume = ["train", "--out", str(tmp_path / "out")]
    assert "policy.env.NCCL_TOPO_FILE=/etc/topo.xml" in cli(*resume, status=2)
    cli(*resume, "--env", "NCCL_TOPO_FILE=/tmp/other.xml", status=130)
    assert ("NCCL_TOPO_FILE", "/tmp/other.xml") in seen.pop()[0].specs[0].policy.env
    cli(*resume, *flag, status=130)
    cli(*resume, "--set", "policy.env={}", status=130)  # without any
    assert seen.pop()[0].specs[0].policy.env == ()


def test_our_own_source_comes_first(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/shell")
    job = Job(job="run", specs=(spec(PYTHONPATH="/asked"),))
    first, *rest = worker_env(job, 0)["PYTHONPATH"].split(":")
    assert Path(first, "fourfold", "launch").is_dir()
    assert rest == ["/asked"]


def test_ranks_are_bounded_by_the_host(tmp_path: Path) -> None:
    for job in (Job(job="ping", specs=(spec(100_000),)), Job(job="trace", ranks=100_000)):
        with pytest.raises(UserError, match="room for"):
            local.run_job(job, tmp_path / "job")


@pytest.mark.parametrize(
    ("memory", "cores", "gpus", "most"),
    [
        (24 * 2**30, 2, 0, 64),
        (2000 * 2**30, 192, 8, 16 * 192),
        (2**30, 2, 0, 2**30 // RANK_BYTES),
        (64 * 2**30, 2, 72, 72),
        (1, 1, 0, 1),
    ],
)
def test_the_bound(monkeypatch, memory, cores, gpus, most) -> None:
    monkeypatch.setattr(permit, "host_memory_bytes", lambda: memory)
    monkeypatch.setattr(permit, "core_count", lambda: cores)
    monkeypatch.setattr(permit, "gpu_count", lambda: gpus)
    assert most_ranks()[0] == most
    Permit().require_room(most)
    with pytest.raises(UserError, match="room for"):
        Permit().require_room(most + 1)
    Permit(oversubscribe=True).require_room(2**24)


FORK = """
import errno, os, sys
from pathlib import Path
from fourfold.engine.worker import Host

real, count = os.fork, []


def fork():
    count.append(1)
    if len(count) > 2:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()


os.fork = fork
Host(Path(sys.argv[1]), 0).fork(range(9), lambda rank: __import__("time").sleep(600) or 0)
"""


def test_no_room_for_another_process_is_said(tmp_path: Path) -> None:
    """The ranks that came up are ended, not left waiting for the one that can't."""
    environment = {**os.environ, "PYTHONPATH": str(Path(local.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "rank 2 of 9 could not be started (Resource temporarily unavailable)" in done.stderr


@pytest.mark.parametrize("flags", ["Features : fp asimd asimdhp", "flags : fpu avx2 avx512f"])
def test_emulated_instructions_are_told_before_ranks_start(
    flags: str, tmp_path: Path, cli, monkeypatch
) -> None:
    def launched(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("cpuinfo").write_text(f"model name : some\n{flags}\n")
    monkeypatch.setattr(machine, "CPU_INFO", Path("cpuinfo").absolute())
    for module in (campaign, train_command):
        monkeypatch.setattr(module, "run_job", launched)
    run = (
        'model = "llama-tiny"\ngpus = 1\ndevice = "cpu"\n[batch]\nseq_len = 32\nglobal_batch = 2\n'
    )
    Path("run.toml").write_text(run)
    Path("sweep.toml").write_text(f'{run}[sweep]\nprecision = ["bf16", "bf16-pure", "fp32"]\n')
    said = "note: this CPU has no bf16 instructions"
    train = ("train", "--spec", "run.toml", "--steps", "1", "--out", "out")
    for words in (("bench", "--spec", "run.toml"), ("sweep", "sweep.toml"), train):
        cli(*words, status=130)
        assert cli.err.count(said) == 1, words
    cli(*train, "--precision", "fp32", status=130)
    assert said not in cli.err
