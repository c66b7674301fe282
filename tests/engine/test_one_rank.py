"""Does one rank alone hold, compute and send what the same rank does among its peers?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.launch.local import run_job
from fourfold.result.job import Job, answer_file
from fourfold.result.one_rank import OneRankResult, RankCount
from fourfold.result.report import RunReport
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from tests.specs import run_spec


def spec(layout: str, *, batch: int = 6, micro: int = 1, **policy: object) -> RunSpec:
    fields = {"seq_len": 64, "global_batch": batch, "micro_batch": micro, "precision": "fp32"}
    name = str(policy.pop("model", "llama-tiny"))
    return run_spec(name, layout, device="cpu", steps=1, warmup=2, **fields, **policy)


def among_peers(specs: list[RunSpec], folder: Path) -> list[tuple[RunReport, dict[int, RankCount]]]:
    """Every run, with the count of each of its ranks."""
    job = Job(job="run", specs=tuple(specs), options=(("count", "true"),))
    report = run_job(job, folder)
    assert report.outcome == "ok", report.failure
    found = []
    for task, one in enumerate(report.runs):
        parts = {rank: answer_file(folder, task, rank) for rank in range(one.spec.gpus)}
        counts = {
            rank: codec.from_json(RankCount, path.read_text()) for rank, path in parts.items()
        }
        found.append((one, counts))
    return found


def alone(
    asked: list[tuple[RunSpec, int]], folder: Path, micro_batches: tuple[int, ...] = ()
) -> list[OneRankResult]:
    """All micro batches are run unless so many are named."""
    ranks = ",".join(str(rank) for _, rank in asked)
    to_run = ",".join(map(str, micro_batches or (0,) * len(asked)))
    options = (("ranks", ranks), ("micro_batches", to_run))
    job = Job(job="one-rank", specs=tuple(one for one, _ in asked), options=options)
    report = run_job(job, folder)
    assert report.outcome == "ok", report.failure
    assert [run.outcome for run in report.runs] == ["ok"] * len(asked)
    return [
        codec.from_json(OneRankResult, answer_file(folder, task).read_text())
        for task in range(len(asked))
    ]


def compare(asked: list[tuple[RunSpec, int]], folder: Path) -> None:
    specs = list(dict.fromkeys(one for one, _ in asked))
    real = dict(zip(specs, among_peers(specs, folder / "real"), strict=True))
    for (one, rank), found in zip(asked, alone(asked, folder / "alone"), strict=True):
        run, counts = real[one]
        count, words = counts[rank], f"{one.layout} rank {rank}"
        assert found.stage == count.stage, words
        assert found.flops == count.flops, words
        assert found.peak_bytes == run.memory[rank].peak_bytes, words
        sent = {(one.axis, one.op): (one.bytes, one.calls) for one in found.comm}
        assert sent == {(one.axis, one.op): (one.bytes, one.calls) for one in count.comm}, words


@pytest.mark.parametrize(
    ("one", "rank"),
    [
        (spec("dp2 tp2", sharding="zero3"), 0),
        pytest.param(spec("pp2 tp2"), 3, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(getattr(value, "layout", value)),
)
def test_a_rank_alone_is_the_rank_among_its_peers(one: RunSpec, rank: int, tmp_path: Path) -> None:
    compare([(one, rank)], tmp_path)


@pytest.mark.slow
def test_first_middle_and_last_stages_and_every_kind_of_split(tmp_path: Path) -> None:
    four = {"model": "llama-tiny", "batch": 8}
    compare([(spec("pp4", **four), rank) for rank in range(4)], tmp_path / "pp")
    asked = [
        (spec("cp2 dp2", cp_kind="ring", sharding="zero2", micro=2), 3),
        (spec("cp4", cp_kind="allgather", sharding="zero0"), 1),
        (spec("cp2 tp2", cp_kind="ulysses", recompute="full"), 2),
        (spec("dp2x2", sharding="zero3", recompute="every-2", loss_chunks=3), 1),
        (spec("pp2 dp2", schedule="gpipe", recompute="selective", fused_projections=False), 1),
        (spec("dp4", batch=10, micro=2), 3),
        (spec("pp2 dp2", schedule="interleaved", virtual_stages=2, sharding="zero2"), 3),
        (spec("pp2 tp2", schedule="zero-bubble"), 1),
    ]
    compare(asked, tmp_path / "kinds")


def continued(
    one: RunSpec, rank: int, ran: int, folder: Path
) -> tuple[OneRankResult, OneRankResult]:
    """Fewer micro batches, continued, are all of them in FLOPs, traffic and memory."""
    few, whole = alone([(one, rank), (one, rank)], folder, (ran, 0))
    assert (few.ran, few.micro_batches, whole.ran) == (ran, whole.ran, whole.micro_batches)
    assert (few.flops, few.comm) == (whole.flops, whole.comm)
    # Other schedules leave some scalars of a micro batch behind: under 100 bytes of it.
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0, abs=100 * (whole.ran - ran))
    assert one.policy.schedule != "1f1b" or few.peak_bytes == whole.peak_bytes
    return few, whole


def test_what_is_not_run_is_continued(tmp_path: Path) -> None:
    for found in continued(spec("pp2 dp2 tp2", batch=12), 5, 4, tmp_path):
        once = ("data", "reduce", "optimizer", "once")
        micro_s = sum(phase.seconds for phase in found.phases if phase.name not in once)
        step_s = sum(phase.seconds for phase in found.phases if phase.name in once)
        assert found.compute_s == pytest.approx(found.micro_batches * micro_s + step_s)
        assert found.phase("layers").seconds > 0
        assert found.phase("layers back").seconds > 0
        assert all(kernel.seconds > 0 for kernel in found.kernels)
        assert {part.name for part in found.parts} >= {"matrix products", "attention"}
        assert found.watched == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_other_schedules_are_continued_too(rank: int, tmp_path: Path) -> None:
    late = {"schedule": "interleaved", "virtual_stages": 2, "model": "llama-mini"}
    continued(spec("pp4 dp2 tp2", batch=32, **late), 4 * rank, 10, tmp_path / "interleaved")
    continued(spec("pp4 dp2", batch=20, schedule="zero-bubble"), 2 * rank, 6, tmp_path / "zb")


def test_the_floor_is_measured_beside_the_step(tmp_path: Path) -> None:
    asked = (spec("tp1", batch=2), spec("tp1", batch=2, recompute="full"))
    least = "1e6 1e5 1e5 30,1e6 1e5 1e5 30"
    options = (("ranks", "0,0"), ("hot_s", "0.2"), ("least", least))
    job = Job(job="one-rank", specs=asked, options=options)
    assert run_job(job, tmp_path).outcome == "ok"
    plain, again = (
        codec.from_json(OneRankResult, answer_file(tmp_path, task).read_text()).floor
        for task in (0, 1)
    )
    assert min(plain.products_s, plain.attention_s, plain.bytes_per_s) > 0
    assert plain.moved_bytes == 4 * 1e6 + 2e5
    assert plain.update_bytes == 30 * 250_432
    assert plain.again_products_s == plain.again_attention_s == 0
    # The forward runs again but for its last product: less than half of what is needed.
    assert 0 < again.again_products_s < 0.5 * again.products_s


def test_a_compiled_rank_holds_its_memory_limit(tmp_path: Path) -> None:
    """Compiled code hides from the ledger, so with a limit it runs uncompiled, as in `bench`."""
    one = replace(spec("tp2", compile=True), memory_limit=1_500_000)
    job = Job(job="one-rank", specs=(one,), options=(("ranks", "0"),))
    (run,) = run_job(job, tmp_path).runs
    assert run.outcome == "oom"
    assert run.shortage.live_bytes > run.shortage.limit_bytes == 1_500_000
