"""Token files as a source: every sequence once an epoch, the same tokens under any layout."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.engine.data.rng import shuffled
from fourfold.engine.data.source import Synthetic, TokenFile, data_facts, source_of
from fourfold.engine.model.decoder import IGNORE
from fourfold.engine.parallel.context import zigzag
from fourfold.engine.parallel.shards import InitRule
from fourfold.engine.training.optimizer import OptimizerSettings
from fourfold.engine.verify.reference import Recipe, train_alone
from fourfold.errors import UserError
from fourfold.launch.local import run_job
from fourfold.result.job import Job
from fourfold.spec.run import RunSpec
from fourfold.spec.tokens import read_info
from tests.sampling import examples
from tests.spec.token_files import write_array
from tests.specs import run_spec

SEQ_LEN = 8
CPU = torch.device("cpu")


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Token i of the file is i: what is read says where it stood."""
    write_array(str(tmp_path / "count"), range(20 * SEQ_LEN + 5), vocab=400)
    return str(tmp_path / "count")


def source(name: str, **fields: int) -> TokenFile:
    return TokenFile(name, **({"vocab": 400, "seq_len": SEQ_LEN} | fields))


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
@settings(max_examples=examples(60))
def test_an_order_is_a_permutation(size: int, stream: int) -> None:
    found = shuffled(torch.arange(size), size, stream)
    assert torch.equal(found.sort().values, torch.arange(size))


def test_an_order_of_many_is_read_at_any_place_and_looks_random() -> None:
    size = 10**12 + 7
    some = torch.arange(10**11, 10**11 + 4096)
    found = shuffled(some, size, 3)
    assert found.unique().numel() == 4096
    assert found[17] == shuffled(some[17:18], size, 3)
    assert int(found.min()) >= 0
    assert int(found.max()) < size
    # A uniform mean of 4096 numbers has a deviation of 0.29 / 64 of the range.
    assert abs(float(found.double().mean()) / size - 0.5) < 5 * 0.2887 / 64
    steps = (found[1:] - found[:-1]).sign().double().mean()
    assert abs(float(steps)) < 0.1


def test_every_window_comes_once_an_epoch_in_an_order_of_its_own(name: str) -> None:
    tokens = source(name)
    assert tokens.windows == 20
    positions = torch.arange(SEQ_LEN)
    seen = []
    for epoch in range(3):
        starts, targets = tokens.batch(20 * epoch, torch.arange(20), positions)
        assert torch.equal(starts[:, 1:], targets[:, :-1])
        assert torch.equal(starts + 1, targets)
        assert sorted(starts[:, 0].tolist()) == [SEQ_LEN * i for i in range(20)]
        seen.append(starts[:, 0].tolist())
    assert seen[0] != seen[1] != seen[2]
    assert seen[0] != source(name, seed=1).batch(0, torch.arange(20), positions)[0][:, 0].tolist()
    # A step across the end of an epoch is the end of one and the start of the next.
    across, _ = tokens.batch(17, torch.arange(6), positions)
    assert across[:, 0].tolist() == seen[0][17:] + seen[1][:3]


def test_parts_of_a_batch_are_cut_from_the_whole(name: str) -> None:
    tokens = source(name)
    whole, targets = tokens.batch(12, torch.arange(6), torch.arange(SEQ_LEN))
    for rank in range(2):
        part = zigzag(SEQ_LEN, 2, rank, CPU)
        some, wanted = tokens.batch(12, torch.tensor([4, 1, -1]), part)
        assert torch.equal(some[:2], whole[[4, 1]][:, part])
        assert torch.equal(wanted[:2], targets[[4, 1]][:, part])
        assert (wanted[2] == IGNORE).all()


def test_reading_ahead_changes_nothing(name: str) -> None:
    plain, eager = source(name), source(name)
    positions = torch.arange(SEQ_LEN)
    micros = [torch.tensor([0, 1]), torch.tensor([2, -1])]
    for first in (0, 3, 6, 40, 43):  # 40 was not announced
        found = [eager.batch(first, micro, positions) for micro in micros]
        eager.ahead(first + 3, micros, positions)
        for micro, pair in zip(micros, found, strict=True):
            for ours, wanted in zip(pair, plain.batch(first, micro, positions), strict=True):
                assert torch.equal(ours, wanted)
    assert len(eager._ahead) == 2


def test_only_tokens_that_are_late_count_as_waiting(name: str, monkeypatch) -> None:
    late, early = source(name), source(name)
    positions, micro = torch.arange(SEQ_LEN), torch.tensor([0, 1])
    read = type(late)._read

    def slow(self, *args: object) -> torch.Tensor:
        time.sleep(0.2)
        return read(self, *args)

    monkeypatch.setattr(type(late), "_read", slow)
    late.batch(0, micro, positions)
    assert late.waited_s >= 0.2
    early.ahead(0, [micro], positions)
    next(iter(early._ahead.values()))[0].result()  # the step before takes longer than reading
    early.batch(0, micro, positions)
    assert early.waited_s < late.waited_s


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_nothing_waits_for_the_device(name: str) -> None:
    plain, eager = source(name), source(name)
    device = torch.device("cuda")
    positions, micros = torch.arange(SEQ_LEN), [torch.tensor([0, 1]), torch.tensor([2, -1])]
    there, moved = positions.to(device), [micro.to(device) for micro in micros]
    found = []
    for first in (0, 3, 6, 9):
        found.append([eager.batch(first, micro, there) for micro in moved])
        eager.ahead(first + 3, moved, there)
        torch.cuda.set_sync_debug_mode("error")  # index tensors are known from here on
    torch.cuda.set_sync_debug_mode("default")
    for first, pairs in zip((0, 3, 6, 9), found, strict=True):
        for micro, pair in zip(micros, pairs, strict=True):
            for ours, wanted in zip(pair, plain.batch(first, micro, positions), strict=True):
                assert torch.equal(ours.cpu(), wanted)


def test_what_cannot_be_trained_on_is_refused(name: str, tmp_path: Path) -> None:
    for fields, words in (
        ({"vocab": 256}, "tokens up to 399"),
        ({"seq_len": 400}, "a sequence needs 401"),
    ):
        with pytest.raises(UserError, match=words):
            source(name, **fields)
    # Damage inside the file, which its ends do not show: the side file promises less than 165.
    write_array(str(tmp_path / "small"), [7] * (3 * 2**20), vocab=10)
    path = tmp_path / "small.bin"
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        stream.write(b"\xff" * (2 * SEQ_LEN + 2))
    damaged = source(str(tmp_path / "small"))
    with pytest.raises(UserError, match="has token 65535"):
        damaged.batch(0, torch.arange(damaged.windows), torch.arange(SEQ_LEN))


def run_of(name: str, layout: str) -> RunSpec:
    fields = {"seq_len": 32, "micro_batch": 2, "global_batch": 5, "precision": "fp64"}
    return run_spec("llama-tiny", layout, steps=2, warmup=1, device="cpu", data=name, **fields)


def test_a_run_names_its_source(name: str) -> None:
    run = run_of(name, "tp1")
    assert isinstance(source_of(run), TokenFile)
    assert isinstance(source_of(replace(run, data="")), Synthetic)
    assert data_facts(replace(run, data="")) == {}
    assert replace(run, data="").run_id != run.run_id


def test_layouts_learn_the_same_from_a_file(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 300, 32 * 9 + 1).tolist()
    name = str(tmp_path / "data")
    write_array(name, values, vocab=300)
    runs = tuple(run_of(name, layout) for layout in ("dp2", "pp2", "cp2"))
    report = run_job(Job(job="run", specs=runs), tmp_path / "job")
    assert report.outcome == "ok", report.failure
    alone = run_of(name, "tp1")
    recipe = Recipe(source=source_of(alone), settings=OptimizerSettings(), rule=InitRule(), steps=3)
    truth = train_alone(alone, recipe, CPU)
    for run in report.runs:
        losses = [step.loss for step in run.steps]
        assert losses == pytest.approx(truth.losses, rel=1e-10), run.spec.layout
        assert dict(run.environment)["data.sha256"] == read_info(name).sha256
