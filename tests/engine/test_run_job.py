"""Real runs through the seam: facts of every rank, the ledger's counts, failures with a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.engine.jobs import dryrun
from fourfold.engine.jobs.dryrun import count_rank, with_micro_batches
from fourfold.engine.model.decoder import Layer
from fourfold.launch.local import run_job
from fourfold.result.job import Job, answer_file
from fourfold.result.one_rank import RankCount
from fourfold.result.report import RunReport
from fourfold.result.timing import LEAD, MOST_STEPS, WINDOW
from fourfold.spec import codec
from fourfold.spec.run import Fault, RunSpec
from tests.specs import run_spec

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def spec(layout: str, **fields: object) -> RunSpec:
    plain = {
        "seq_len": 32, "micro_batch": 3, "global_batch": 14, "precision": "fp32", "steps": 1,
        "warmup": 1, "device": "cpu", "step_limit_s": 120.0,
    }  # fmt: skip
    return run_spec("llama-tiny", layout, **(plain | fields))


def one(folder: Path, run: RunSpec, **options: str) -> RunReport:
    job = Job(job="run", specs=(run,), options=tuple(sorted(options.items())))
    (report,) = run_job(job, folder).runs
    return report


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[RunSpec, RunReport, Path]]:
    """Layouts that use every axis and kind of sharding between them, in one start."""
    folder = tmp_path_factory.mktemp("run")
    runs = (
        spec("pp2 tp2", steps=2),
        spec("dp2 cp2", sharding="zero3", recompute="full"),
        spec("dp2x2", settle=True, steps=1),
    )
    job = Job(job="run", specs=runs, options=(("count", "true"), ("probe_s", "0.02")))
    report = run_job(job, folder)
    assert report.outcome == "ok", report.failure
    return [(run, done, folder) for run, done in zip(runs, report.runs, strict=True)]


def test_the_report_holds_raw_facts(real) -> None:
    run, report, _ = real[0]
    assert [step.warmup for step in report.steps] == [True, False, False]
    assert all(step.loss is not None and 5 < step.loss < 8 for step in report.steps)
    assert all(step.grad_norm is not None and step.grad_norm > 0 for step in report.steps)
    assert [memory.stage for memory in report.memory] == [0, 0, 1, 1]
    assert all(memory.peak_bytes > 10**5 for memory in report.memory)
    assert all(len(rank.busy_s) == len(rank.step_s) == 3 for rank in report.ranks)
    assert [one.when for one in report.probes] == ["before", "after"]
    environment = dict(report.environment)
    assert {"torch", "host", "device", "env.OMP_NUM_THREADS"} <= set(environment)
    assert report.window_s > 0
    assert report.spec == run


def test_all_ranks_stop_warming_up_after_the_same_step(real) -> None:
    _, report, _ = real[2]
    count = report.warmup.steps
    assert LEAD + 2 * WINDOW <= count <= MOST_STEPS
    assert report.warmup.ended in ("steady", "most steps", "most seconds")
    assert [step.warmup for step in report.steps] == [True] * count + [False]
    assert {len(rank.step_s) for rank in report.ranks} == {count + 1}
    fixed = real[0][1].warmup
    assert (fixed.ended, fixed.steps) == ("count", 1)


def test_links_of_the_layout_and_waits_for_data(real) -> None:
    found = [{(link.axis, link.ranks, link.op) for link in done.links} for _, done, _ in real]
    assert found[0] == {("tp", 2, "all-reduce"), ("pp", 2, "send")}
    assert found[1] == {("cp", 2, "all-reduce"), ("dp", 4, "all-reduce")}
    assert found[2] == {("dp", 2, "all-reduce"), ("dp copies", 2, "all-reduce")}
    for _, report, _ in real:
        assert all(link.level == "host" and link.bytes_per_s > 1e6 for link in report.links)
        assert all(len(rank.data_s) == len(rank.step_s) for rank in report.ranks)
        assert {sum(rank.data_s) for rank in report.ranks} == {0.0}  # made by the ranks
        assert all(rank.compile_s == 0 for rank in report.ranks)


@pytest.mark.parametrize("which", [0, 1])
def test_fake_equals_real(real, which) -> None:
    """FLOPs and traffic equal, peak within 2%, on the first and the last rank."""
    run, _, folder = real[which]
    for rank in (0, 3):
        path = answer_file(folder, which, rank)
        counted = codec.from_json(RankCount, path.read_text())
        fake = count_rank(run, rank)
        assert fake.flops == counted.flops
        assert fake.comm == counted.comm
        assert fake.params == counted.params
        assert fake.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.02)
        assert fake.state_bytes + fake.activation_bytes == fake.peak_bytes
        assert sum(kind.bytes for kind in fake.kinds) == fake.peak_bytes


def test_a_straight_line_is_exact() -> None:
    """11 micro batches counted at 4 and 5, against all 11 run; uneven last one included."""
    run = spec("pp2 dp2", seq_len=16, global_batch=62)
    assert run.batch.micro_count(2) == 11
    line, whole = count_rank(run, 0), dryrun._count(run, 0)
    assert line.counted_at == (4, 5)
    assert (line.flops, line.comm) == (whole.flops, whole.comm)
    assert line.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert with_micro_batches(run, 4).batch.micro_sizes(10) == (3, 3, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved", 2), ("zero-bubble", 1)])
def test_a_straight_line_is_exact_for_other_schedules(schedule, virtual) -> None:
    sizes = {"seq_len": 16, "global_batch": 65}
    run = spec("pp2 dp2", schedule=schedule, virtual_stages=virtual, **sizes)
    plain = spec("pp2 dp2", **sizes)
    for rank in (0, 3):
        line, whole = count_rank(run, rank), dryrun._count(run, rank)
        assert line.counted_at
        assert (line.flops, line.comm) == (whole.flops, whole.comm)
        assert line.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
        assert line.flops == count_rank(plain, rank).flops


def test_a_tensor_added_inside_the_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = spec("dp2")
    before = count_rank(run, 0)
    forward = Layer.forward

    def wider(self, x, tables):
        return forward(self, x, tables) + (x * x).exp().log()

    monkeypatch.setattr(Layer, "forward", wider)
    after = count_rank(run, 0)
    # Kept for backward: x * x's input is x itself; exp keeps its output, log its input: one
    # more tensor of the layer's size each for x*x -> exp, in every layer.
    one_tensor = 3 * 32 * run.model.hidden * 4
    assert after.peak_bytes >= before.peak_bytes + run.model.layers * one_tensor
    assert after.flops == before.flops


def test_memory_limit_is_an_outcome(tmp_path: Path) -> None:
    report = one(tmp_path, spec("dp2", memory_limit=1_500_000))
    assert report.outcome == "oom"
    assert "memory_limit=1500000" in report.failure.message
    assert "largest:" in report.failure.message
    short = report.shortage
    assert short.live_bytes > short.limit_bytes == 1_500_000
    assert sum(kind.bytes for kind in short.kinds) == short.live_bytes
    sizes = [one.bytes for one in short.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert any(one.name == "embedding.weight" for one in short.largest)
    assert all(one.op and one.dtype and one.phase for one in short.largest)


def test_an_allocators_refusal_shows_what_was_held(tmp_path: Path) -> None:
    """The second run of a job: what the first failure left is set aside."""
    bad = spec("dp2", fault=Fault(kind="oom", rank=1, step=1))
    job = Job(job="run", specs=(bad, spec("dp1")))
    report, fine = run_job(job, tmp_path).runs
    assert (report.outcome, fine.outcome) == ("oom", "ok")
    assert report.failure.rank == 1
    assert report.shortage.asked_bytes == 2**50
    assert {kind.name for kind in report.shortage.kinds} >= {"parameters", "optimizer"}


@pytest.mark.slow
def test_compiled_steps_on_a_cpu_are_measured_too(tmp_path: Path) -> None:
    """Within a fifth of the same run uncompiled: fusing keeps fewer tensors, none is invented."""
    plain = one(tmp_path / "a", spec("dp1", warmup=2))
    compiled = one(tmp_path / "b", spec("dp1", warmup=2, compile=True))
    assert compiled.outcome == "ok", compiled.failure
    assert 0.5 < compiled.memory[0].peak_bytes / plain.memory[0].peak_bytes < 1.2
    assert compiled.ranks[0].compile_s > 1.0
    assert compiled.ranks[0].recompiles == 0


def test_an_illegal_run_is_an_outcome(tmp_path: Path) -> None:
    report = one(tmp_path, spec("tp3 dp1"))
    assert report.outcome == "illegal"
    assert "tp" in report.failure.message


def test_who_holds_the_bad_weight_is_named(tmp_path: Path) -> None:
    run = spec("pp2 dp2", fault=Fault(kind="nonfinite", rank=2, step=1))
    report = one(tmp_path, run)
    assert report.outcome == "nonfinite"
    assert (report.failure.rank, report.failure.stage) == (2, 1)
    assert report.failure.phase == "optimizer"


def test_a_hang_names_the_missing_rank(tmp_path: Path) -> None:
    """Between stages there are only sends and receives; the stack tells who waits for nobody."""
    run = spec("pp4", step_limit_s=8.0, fault=Fault(kind="hang", rank=1, step=1), warmup=2)
    report = one(tmp_path, run)
    assert report.outcome == "hung"
    assert (report.failure.rank, report.failure.stage) == (1, 1)
