"""Every schedule, run by real ranks, against one process; in fp64, so that only exact order counts.

One launch of four ranks runs all of them: starting ranks costs more than the tiny models do.
"""

from __future__ import annotations

import json
import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourfold.cli import main
from fourfold.engine.parallel.products import DeferredWeightGrads
from fourfold.launch.local import run_job
from fourfold.result.job import Job, answer_file
from fourfold.spec.catalog import model
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from tests.engine.verified import verified
from tests.specs import run_spec

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2))
RECOMPUTE = ("none", "full", "every-2", "selective", "block-1")


def spec(layout: str, sequences: tuple[int, int] = (8, 2), family: str = "llama", **policy):
    """`sequences`: of a step, of a micro batch."""
    where = Layout.parse(layout)
    shape = model(f"{family}-tiny")
    if where.pp * policy.get("virtual_stages", 1) > shape.layers:
        shape = replace(shape, layers=8)
    sizes = {"seq_len": 16, "global_batch": sequences[0], "micro_batch": sequences[1]}
    fields = {"precision": "fp64", "sequence_parallel": False, **sizes, **policy}
    return run_spec(shape, where, device="cpu", steps=3, warmup=0, **fields)


def must_equal_one_process(specs: list[RunSpec], folder: Path) -> None:
    for one, row in zip(specs, verified(specs, folder), strict=True):
        assert row["pass"], (str(one.layout), one.policy, row)
        gaps = [row[name] for name in ("loss_diff", "norm_rel", "grad_rel", "param_rel")]
        assert max(gaps) <= 1e-9, (str(one.layout), one.policy, row)


def named(schedule: tuple[str, int]) -> dict[str, object]:
    return {"schedule": schedule[0], "virtual_stages": schedule[1]}


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_schedule_under_every_kind_of_recompute(share, tmp_path):
    """The kinds meet tensor parallelism, tied ends, loss chunks and each level of sharding. A fifth
    has every schedule and every kind once."""
    layouts = ("pp2 tp2", "pp2 dp2", "pp4", "pp2 dp2")
    specs = []
    for number, schedule in enumerate(SCHEDULES):
        for turn, recompute in enumerate(RECOMPUTE):
            if (2 * number - turn) % share:
                continue
            layout = layouts[(number + turn) % 4]
            zero = f"zero{(number + turn) % 4}" if "dp" in layout else "zero1"
            how = {"recompute": recompute, "sharding": zero, "sequence_parallel": turn == 0}
            how |= {"family": ("llama", "gpt")[turn % 2], "loss_chunks": 1 + number % 2}
            specs.append(spec(layout, **how, **named(schedule)))
    must_equal_one_process(specs, tmp_path)


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_micro_batches_of_any_number_and_size(share, tmp_path):
    """Not a multiple of the stages, fewer than them, one; the last smaller; dp shares unequal."""
    specs = [
        spec(layout, sequences, sharding=zero, **named(schedule))
        for schedule in SCHEDULES[2:]
        for layout, sequences, zero in (
            ("pp4", (7, 2), "zero1"),
            ("pp4", (3, 2), "zero1"),
            ("pp2 dp2", (7, 3), "zero2"),
            ("pp2 dp2", (11, 2), "zero3"),
            ("pp2 tp2", (2, 2), "zero1"),
        )
    ]
    must_equal_one_process(specs[::share], tmp_path)


def drawn(path: Path) -> list[list[list[object]]]:
    """The boxes of a page, rank by rank from left to right."""
    boxes = re.findall(r'<rect x="([\d.]+)".*?data-rank="(\d+)" data-action="(\w) (\d+) (\d+)"',
                       path.read_text())  # fmt: skip
    rows: dict[int, list[tuple[float, list[object]]]] = {}
    for x, rank, kind, chunk, micro in boxes:
        rows.setdefault(int(rank), []).append((float(x), [kind, int(chunk), int(micro)]))
    return [[action for _, action in sorted(rows[rank], key=lambda one: one[0])] for rank in rows]


def test_the_timeline_is_the_executed_order(tmp_path):
    """What `plan --explain --timeline` draws against what every rank of a real run did."""
    runs = [spec("pp2", (7, 2), **named(schedule)) for schedule in SCHEDULES]
    runs = [replace(run, steps=1, warmup=0) for run in runs]
    report = run_job(Job(job="run", specs=tuple(runs), options=(("actions", "true"),)), tmp_path)
    assert report.outcome == "ok", report.failure
    for index, (schedule, virtual) in enumerate(SCHEDULES):
        page = tmp_path / f"{index}.html"
        words = ["plan", "--model", "llama-tiny", "--gpu", "h100-80gb", "--gpus", "2", "--stack",
                 "fourfold", "--seq-len", "16", "--global-batch", "7", "--micro-batch", "2",
                 "--schedule", schedule, "--virtual-stages", str(virtual), "--explain", "pp2",
                 "--timeline", str(page)]  # fmt: skip
        assert main(words) == 0
        rows = drawn(page)
        for rank in range(2):
            answer = json.loads(answer_file(tmp_path, index, rank).read_text())
            assert answer["actions"] == rows[answer["stage"]]
            assert len(answer["actions"]) == 4 * virtual * (3 if schedule == "zero-bubble" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_every_sharding(schedule, tmp_path):
    specs = [
        spec(layout, sharding=zero, recompute=recompute, prefetch=prefetch, **named(schedule))
        for layout in ("pp2 dp2", "pp2 cp2")
        for zero in ("zero0", "zero1", "zero2", "zero3")
        for recompute, prefetch in (("none", 1), ("full", 0))
    ]
    specs += [spec("pp4", (9, 1), "mpt", recompute=kind, **named(schedule)) for kind in RECOMPUTE]
    must_equal_one_process(specs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_three_axes_and_copies_of_shards(schedule, tmp_path):
    choices = (("gpt", "zero1"), ("llama", "zero2"), ("mpt", "zero3"), ("gpt", "zero0"))
    specs = [
        spec("pp2 dp2 tp2", (7, 2), family, sharding=zero, **named(schedule))
        for family, zero in choices
    ]
    specs.append(replace(specs[0], policy=replace(specs[0].policy, sequence_parallel=True)))
    specs.append(spec("pp2 dp2x2", (9, 2), sharding="zero2", **named(schedule)))
    must_equal_one_process(specs, tmp_path)


def test_weights_that_wait_hold_no_input_of_their_stage() -> None:
    """Only what the product multiplies: not the graph before it, which holds the input and its
    gradient."""
    deferred, weight = DeferredWeightGrads(), torch.nn.Parameter(torch.randn(5, 4))
    given = torch.randn(3, 4, requires_grad=True)
    expected = torch.ones(5, 3) @ (2.0 * given.detach())
    there = weakref.ref(given)
    deferred.product(0)(2.0 * given, weight, None).sum().backward()
    deferred.keep(0)
    del given
    assert there() is None
    deferred.multiply(0, 0)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)
