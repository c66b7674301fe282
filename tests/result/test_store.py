"""The run store: complete or not there, many writers, repeats kept, a cache that may be lost."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.result.files.run_file import INDEX, RUN_FILE, WORK, RunKey, key_of
from fourfold.result.files.store import Store
from fourfold.result.files.stored import seal
from fourfold.result.job import REPORT_FILE, JobReport
from fourfold.result.report import Failure, Outcome, RankMemory, RunReport, StepReport
from fourfold.result.stored_run import StoredRun
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from tests.specs import run_spec


def spec(micro_batch: int = 2, **fields: object) -> RunSpec:
    sizes = {"seq_len": 64, "micro_batch": micro_batch, "global_batch": 8}
    return run_spec("llama-tiny", "dp2 tp2", precision="fp32", **sizes, **fields)


def report(micro_batch: int = 2, outcome: Outcome = "ok", **fields: object) -> RunReport:
    steps = [
        StepReport(step=i, seconds=9.0 if i < 2 else 0.5 + i / 100, warmup=i < 2) for i in range(9)
    ]
    return RunReport(
        spec=spec(micro_batch, **fields),
        outcome=outcome,
        environment=(("device", "Some CPU @ 2"), ("torch", "2.13.0+cpu")),
        steps=tuple(steps),
        memory=tuple(RankMemory(rank=r, stage=0, peak_bytes=n) for r, n in enumerate((10, 30))),
        started_at="2026-01-02T03:04:05+00:00",
        failure=None if outcome == "ok" else Failure(rank=1, stage=0, phase="step", message="no"),
    )


def test_a_kept_run_reads_back_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    kept = store.keep(report())
    (found,) = store.runs()
    assert found == kept
    assert found.report() == report()
    assert found.name == f"{spec().run_id}_some-cpu-2_2-13-0-cpu_0"
    assert [path.name for path in found.folder.iterdir()] == [RUN_FILE]


def test_summary_takes_steps_after_warmup_and_the_fullest_rank() -> None:
    summary = StoredRun.of(report())
    assert summary.step_s == pytest.approx(0.55)
    row = summary.row()
    assert row["low_s"] < 0.55 < row["high_s"]
    assert (row["peak_bytes"], row["peak_rank"]) == (30, 1)
    assert (row["layout"], row["dp"]) == ("pp1 dp2 cp1 tp2", 2)
    assert summary.tokens_s_gpu == pytest.approx(64 * 8 / 0.55 / 4)
    assert StoredRun.of(report(outcome="hung")).step_s is None


def test_repeats_are_kept_beside_each_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = [store.keep(report()).name for _ in range(3)]
    assert [name.rpartition("_")[2] for name in names] == ["0", "1", "2"]
    assert [stored.report().repeat for stored in store.runs()] == [0, 1, 2]
    other = replace(report(), environment=(("device", "Other"), ("torch", "2.13.0+cpu")))
    assert store.keep(other).summary.repeat == 0


def test_a_failed_run_keeps_its_logs_a_good_one_does_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for outcome, kept in (("ok", [RUN_FILE]), ("crashed", ["rank-0.log", RUN_FILE])):
        place = store.new_work_folder()
        (place / "rank-0.log").write_text("words")
        (place / "beat-0.json").write_text("{}")
        stored = store.keep(report(outcome=outcome), place)  # type: ignore[arg-type]
        assert sorted(path.name for path in stored.folder.iterdir()) == kept


def _write(root: str, count: int) -> None:
    store = Store(root)
    for _ in range(count):
        store.keep(report())


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(str(tmp_path), 12)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert sorted(stored.summary.repeat for stored in Store(tmp_path).runs()) == list(range(48))
    assert list((tmp_path / WORK).iterdir()) == []


def test_the_index_is_only_a_cache(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for micro_batch in (1, 2, 3):
        store.keep(report(micro_batch))
    first = store.runs()
    assert (tmp_path / INDEX).exists()
    assert store.runs() == first
    (tmp_path / INDEX).write_text("{damaged")
    assert store.runs() == first
    (tmp_path / INDEX).unlink()
    assert store.runs() == first


def test_a_changed_file_is_read_again_and_a_broken_one_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = store.keep(report())
    store.runs()
    plain = json.loads((kept.folder / RUN_FILE).read_text())
    changed = json.dumps(plain | {"outcome": "oom"}, indent=2)
    for text, reason in ((changed, "checksum"), ("{}", "is not a stored run")):
        (kept.folder / RUN_FILE).write_text(text)
        unreadable: list[str] = []
        assert store.runs(unreadable=unreadable) == []
        assert kept.name in unreadable[0]
        assert reason in unreadable[0]
    del plain["crc32"]  # a change on purpose, as the message says
    (kept.folder / RUN_FILE).write_text(json.dumps(plain | {"outcome": "oom"}))
    assert store.runs()[0].summary.outcome == "oom"


def test_a_half_made_folder_is_no_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    place = store.new_work_folder()
    (place / RUN_FILE).write_text("{")
    assert store.runs() == []
    assert store.leftovers() == []  # its owner, this process, lives


def _dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def orphaned(place: Path) -> Path:
    """The same work folder, of a process that has ended."""
    host, _, token = place.name.rsplit("-", 2)
    pid = _dead_pid()
    owner = json.dumps({"host": host, "pid": pid, "born": "1"})
    (place / "owner.json").write_bytes(seal(owner))
    return place.rename(place.with_name(f"{host}-{pid}-{token}"))


def test_what_a_dead_writer_left_is_recovered_or_cleared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    finished, half, cancelled = (
        store.new_work_folder(),
        store.new_work_folder(),
        store.new_work_folder(),
    )
    good = JobReport(job="run", outcome="ok", seconds=1.0, runs=(report(),))
    stopped = JobReport(job="run", outcome="cancelled", seconds=1.0, runs=(report(3, "cancelled"),))
    (finished / REPORT_FILE).write_text(codec.to_json(good))
    (cancelled / REPORT_FILE).write_text(codec.to_json(stopped))
    torn = codec.to_json(good)[:200]
    (half / REPORT_FILE).write_text(torn)
    left = [orphaned(place) for place in (finished, half, cancelled)]
    assert set(store.leftovers()) == set(left)
    recovered = [store.recover(place) for place in left]
    assert recovered[1:] == [None, None]
    assert [stored.name for stored in store.runs()] == [recovered[0].name]
    assert list((tmp_path / WORK).iterdir()) == []
    # What could not be read is set aside, whole.
    assert (tmp_path / ".damaged" / left[1].name / REPORT_FILE).read_text() == torn


def test_another_hosts_work_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    place = store.new_work_folder()
    (place / "owner.json").write_text(json.dumps({"host": "elsewhere", "pid": 1, "born": "1"}))
    assert store.leftovers() == []
    other = place.rename(place.with_name("elsewhere-1-00000000"))
    assert store.leftovers() == []
    assert other.is_dir()


def test_note_and_tag_do_not_change_the_key() -> None:
    assert key_of(report(note="a", tag="b")) == key_of(report())
    assert RunKey("0" * 16, "NVIDIA H200", "2.13", 1).name == "0" * 16 + "_nvidia-h200_2-13_1"
