"""The train command for real: stopped by a signal, resumed elsewhere, killed, out of room."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fourfold.cli import main
from fourfold.engine.training.optimizer import Optimizer, OptimizerSettings
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.files import curve
from fourfold.result.job import beat_file, read_beat
from fourfold.spec.tokens import read_info
from fourfold.spec.train import TrainSettings
from tests import warm
from tests.processes import children, wait_for

ROOT = Path(__file__).parents[2]


def words(text: str) -> list[str]:
    return text.split()


RUN = words(
    "--model llama-tiny --seq-len 16 --global-batch 4 --micro-batch 2 --precision fp64 "
    "--lr 1e-3 --log-every 1"
)


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:  # its ranks die with it
            process.kill()
            process.communicate()


def start(out: Path, *words: str, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    process = warm.Popen(
        warm.command("train", "--out", str(out), *words),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit,
    )  # fmt: skip
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str], code: int = 0, *, limit_s: float = 300) -> str:
    """What it said; with this exit code."""
    process.printed, said = process.communicate(timeout=limit_s)
    assert process.returncode == code, said
    return said


def train(out: Path, *words: str, limit_s: float = 300) -> str:
    return finish(start(out, *words), limit_s=limit_s)


def newest(out: Path) -> checkpoints.Checkpoint | None:
    return checkpoints.newest(out / "checkpoints")


def steps_of(out: Path) -> list[int]:
    return [point.step for point in curve.parse(out / curve.METRICS_FILE).points]


def steps_done(out: Path) -> int:
    point = curve.last(out / curve.METRICS_FILE)
    return point.step if point else 0


def rank_pids(out: Path, ranks: int) -> list[int]:
    beats = [read_beat(beat_file(out / "job", rank)) for rank in range(ranks)]
    return [beat.pid for beat in beats if beat is not None]


def test_asked_to_stop_it_saves_and_another_layout_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = "--gpus 2 --steps 100000 --save-every 0 --lr-schedule constant"
    process = start(out, *RUN, *words(more))
    wait_for(lambda: steps_done(out) >= 2, process)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: saving after this step, then stopping" in finish(process, 75)
    assert "stopped" in process.printed
    found = newest(out)
    assert found.step == found.state.updates == steps_done(out)
    assert found.state.sequences == 4 * found.step
    last = found.step + 2
    process = start(out, *words(f"--gpus 2 --pp 2 --steps {last} --format json"))
    said = finish(process)
    assert f"continuing after step {found.step}" in said
    assert "layout pp1 dp2 cp1 tp1 -> pp2 dp1 cp1 tp1" in said
    assert json.loads(process.printed)["steps_done"] == last
    assert steps_of(out) == list(range(1, last + 1))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(out, *RUN, *words("--gpus 2 --steps 4 --save-every 2"))
    data = out / "checkpoints" / "step-00000004" / "tensors-00001.safetensors"
    stored = json.loads((data.parent / "index.json").read_text())["tensors"]
    weights = [one for name, one in stored.items() if name.startswith("model.")]
    chunks = [chunk for one in weights for chunk in one["chunks"] if chunk["file"] == data.name]
    content = bytearray(data.read_bytes())
    content[chunks[3]["start"] + 5] ^= 1
    data.write_bytes(content)
    export = warm.command("weights", "export", str(out), str(tmp_path / "hf"))
    done = warm.run(export, capture_output=True, text=True)
    assert done.returncode == 1
    assert "has changed since it was written" in done.stderr
    assert "Traceback" not in done.stderr
    assert "--fresh" not in done.stderr
    assert "kept as damaged-step-00000004" in train(out, *words("--steps 5 --save-every 0"))
    reason = (out / "checkpoints" / "damaged-step-00000004" / "damaged.txt").read_text()
    assert "its file tensors-00001.safetensors has changed since it was written" in reason
    assert steps_of(out) == [1, 2, 3, 4, 5]
    names = [found.folder.name for found in checkpoints.whole(out / "checkpoints")]
    assert names == ["step-00000002", "step-00000005"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path, number: int) -> None:
    out = tmp_path / "out"
    process = start(out, *RUN, *words("--gpus 2 --tp 2 --steps 100000"))
    wait_for(lambda: steps_done(out) >= 2, process)
    os.kill(rank_pids(out, 2)[1], number)
    finish(process, 75)
    assert newest(out).step == steps_done(out)


@pytest.mark.slow
def test_a_batch_system_signals_everybody_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(out, *RUN, *words("--gpus 2 --steps 100000"))
    wait_for(lambda: steps_done(out) >= 2, process)
    for number in (signal.SIGUSR1, signal.SIGTERM):  # as Slurm: a warning, then the time limit
        for pid in (*rank_pids(out, 2), *children(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    finish(process, 75)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = "--gpus 1 --steps 100000 --save-every 1 --keep 0 --set fault.kind=hang"
    process = start(out, *RUN, *words.split(), "--set", "fault.step=3")
    # Else the end may come before it is saved.
    wait_for(lambda: (found := newest(out)) is not None and found.step == 3, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None  # it waits for a step that never ends
    process.send_signal(signal.SIGTERM)
    finish(process, 130)
    assert newest(out).step == 3


@pytest.mark.slow
def test_nothing_finite_is_lost_to_a_nan(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = "--gpus 2 --steps 9 --save-every 2 --set fault.kind=nonfinite --set fault.step=5"
    words += " --log-every 9"  # lines not yet read when it ends are kept too
    process = start(out, *RUN, *words.split(), "--format", "json")
    said = finish(process, 1)
    assert json.loads(process.printed)["outcome"] == "nonfinite", said
    assert newest(out).step == 4
    assert steps_done(out) in (5, 6)  # the bad weight may be of a token that step 6 has not


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "outcome"), [(signal.SIGKILL, "crashed"), (signal.SIGSTOP, "hung")]
)
def test_a_lost_rank_is_an_outcome_and_the_next_start_goes_on(tmp_path, number, outcome) -> None:
    out = tmp_path / "out"
    more = "--gpus 2 --steps 100000 --save-every 2 --set step_limit_s=30 --format json"
    process = start(out, *RUN, *words(more))
    wait_for(lambda: newest(out) is not None, process)
    os.kill(rank_pids(out, 2)[1], number)
    said = finish(process, 1)
    plain = json.loads(process.printed)
    assert (plain["outcome"], plain["failure"]["rank"]) == (outcome, 1), said
    step = newest(out).step
    said = train(out, *words(f"--gpus 1 --save-every 0 --steps {step + 1}"))
    assert f"continuing after step {step}" in said


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """As soon as they are forked."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        for worker in children(process.pid):
            found = children(worker)
            if len(found) >= 2:
                return found[:2]
        time.sleep(0.001)
    raise AssertionError("no ranks came up")


def stop_in(process: subprocess.Popen[str], out: Path, phase: str, pids: list[int]) -> None:
    """Stop rank 1 in a phase, whatever number of attempts it takes."""
    if phase == "start":
        os.kill(pids[1], signal.SIGSTOP)
        return
    if phase == "join":  # rank 0 keeps it waiting there
        os.kill(pids[0], signal.SIGSTOP)
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        found = read_beat(beat_file(out / "job", 1))
        if found is None or found.phase != phase:
            time.sleep(0.0005)
            continue
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.05)
        found = read_beat(beat_file(out / "job", 1))
        if found is not None and found.phase == phase:
            break
        os.kill(pids[1], signal.SIGCONT)
    else:
        raise AssertionError(f"never seen in {phase}")
    if phase == "join":
        os.kill(pids[0], signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "join", "forward", "backward", "optimizer", "save"])
def test_a_rank_stopped_in_any_phase_is_named(tmp_path: Path, phase: str) -> None:
    """Within half a minute, by default."""
    out = tmp_path / "out"
    more = "--gpus 2 --seq-len 64 --steps 100000 --save-every 1 --keep 1 --no-async --format json"
    process = start(out, *RUN, *words(more))
    pids = ranks_of(process)
    stop_in(process, out, phase, pids)
    began = time.monotonic()
    said = finish(process, 1)
    print(f"{phase}: named and ended after {time.monotonic() - began:.1f} s")
    plain = json.loads(process.printed)
    assert (plain["outcome"], plain["failure"]["rank"]) == ("hung", 1), said
    assert plain["failure"]["phase"] == phase
    message = plain["failure"]["message"]
    assert message.startswith(f"rank 1 (pid {pids[1]} on {socket.gethostname()}, stage 0, {phase})")
    # 15 s, and more on a busy machine.
    assert re.search(r"has been suspended by SIGSTOP for \d\d s", message)
    assert f"hung: rank 1, stage 0, {phase}: {message}" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_settings_reach_the_optimizer() -> None:
    settings = TrainSettings(
        steps=1, lr=0.1, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.2, max_norm=0.0
    )
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    twin = torch.nn.Parameter(weight.detach().clone())
    mine = Optimizer([weight], OptimizerSettings.of(settings), kind="adamw", dtype=torch.float64)
    torchs = torch.optim.AdamW([twin], lr=0.01, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    mine.set_lr(0.01)
    for _ in range(3):
        weight.grad, twin.grad = weight.detach() * 3, twin.detach() * 3
        mine.step()
        torchs.step()
    torch.testing.assert_close(weight, twin, rtol=1e-12, atol=0)
    assert mine.updates == 3
    assert OptimizerSettings.of(settings).max_norm is None


@pytest.fixture
def small_files() -> Callable[[], None]:
    """What a full disk does, without one: no file may grow beyond this many bytes."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    return limit


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--async", "--no-async"])
def test_no_room_is_an_outcome_and_the_old_checkpoint_stays(tmp_path, how, small_files) -> None:
    out = tmp_path / "out"
    train(out, *RUN, *words("--gpus 1 --steps 2"))
    said = finish(start(out, *words(f"--steps 8 --save-every 2 {how}"), limit=small_files), 1)
    assert re.search(r"checkpoint of step 4 could not be written.*File too large", said), said
    assert "the last good one is step-00000002" in said
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000002"]
    assert "continuing after step 2" in train(out, "--steps", "5")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_random_moments_of_a_save(tmp_path: Path) -> None:
    """kill -9 of every process while a checkpoint is being written, 20 times in one training."""
    out, chance = tmp_path / "out", random.Random(4)
    every, before, caught, old = 2, 0, 0, set[int]()
    for kill in range(20):
        how = ("--async", "--no-async")[kill % 2]
        process = start(out, *RUN, *words(f"--gpus 2 --steps 100000 --save-every {every} {how}"))
        # Not by what the one before left behind: its curve and its half of a checkpoint.
        wait_for(lambda old=old: len(set(rank_pids(out, 2)) - old) == 2, process)
        old = set(rank_pids(out, 2))
        least = before + chance.choice((1, 3, 5))
        wait_for(lambda least=least: steps_done(out) >= least and bool(_saving(out)), process)
        time.sleep(chance.random() * 0.04)
        saving, reached = _saving(out), steps_done(out)
        for pid in (process.pid, *children(process.pid), *old):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        caught += bool(list((out / "checkpoints").glob(".saving-*")))
        before = found.step if (found := newest(out)) else 0
        # Steps wait for a foreground save; in the background they go on beside it.
        assert (saving or reached) - before <= every, (kill, saving, reached, before)
        assert how == "--async" or reached - before <= every, (kill, reached, before)
    print(f"{caught} of 20 kills left half a checkpoint; the training stands at step {before}")
    assert caught >= 8, f"only {caught} of 20 kills fell into a save"
    said = train(out, *words(f"--gpus 2 --tp 2 --steps {before + 3}"))
    assert f"continuing after step {before}" in said
    assert steps_of(out) == list(range(1, before + 4))


def _saving(out: Path) -> int:
    """The step whose checkpoint is being written; 0 when none is."""
    found = [int(path.name[-8:]) for path in (out / "checkpoints").glob(".saving-step-*")]
    return max(found, default=0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_real_text_is_learned_alike_on_one_process_and_on_eight(tmp_path: Path) -> None:
    """300 steps on this repository's license; the loss ends below the entropy of single bytes."""
    tokens = str(tmp_path / "license")
    assert main(["data", "make", "--out", tokens, str(ROOT / "LICENSE")]) == 0
    run = words(
        "--model llama-tiny --seq-len 32 --global-batch 8 --micro-batch 4 --precision fp64 "
        "--lr 3e-3 --warmup-steps 20 --steps 300 --save-every 100"
    )
    losses = []
    for name, layout in (("one", "--gpus 1"), ("eight", "--gpus 8 --pp 2 --dp 2 --tp 2")):
        train(tmp_path / name, *run, *words(layout), "--data", tokens, limit_s=1400)
        points = list(curve.parse(tmp_path / name / curve.METRICS_FILE).points)
        assert [point.step for point in points] == list(range(1, 301))
        losses.append([point.loss for point in points])
    entropy = read_info(tokens).unigram_nats
    recent = sum(losses[0][-20:]) / 20
    assert losses[0][0] > 5.5
    assert recent < entropy - 0.3, (recent, entropy)
    gap = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    print(f"entropy {entropy:.4f}, last loss {recent:.4f}, largest difference {gap:.2e}")
    assert gap < 1e-6
