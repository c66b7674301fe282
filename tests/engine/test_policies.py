"""Policies do what they name: bytes, collectives and FLOPs as a ledger counts them. No rank of
tensor parallelism ever holds a tensor as wide as the vocabulary: all that a step makes are seen."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold.cost.count.params import layer_params
from fourfold.engine.jobs import dryrun
from fourfold.engine.jobs.dryrun import count_rank
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.observe.phases import mark_phases, watch
from fourfold.engine.parallel.groups import World
from fourfold.engine.process.task import CPU
from fourfold.engine.training.trainer import Trainer
from fourfold.result.one_rank import RankCount
from fourfold.spec.catalog import shape
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.words import BUNDLES
from tests.specs import run_spec

# Weights outweigh activations here, as they do where sharding matters.
HEAVY = shape("llama", layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, vocab=512)
# Activations outweigh weights here.
LONG = shape("llama", layers=2, hidden=32, ffn=64, heads=4, kv_heads=2, vocab=64)


@functools.cache
def count(model, layout: str, **fields: Any) -> RankCount:
    usual = {} if "policy" in fields else {"precision": "fp32"}
    return count_rank(run_spec(model, layout, **(usual | fields)), 0)


def traffic(counted: RankCount, axis: str) -> dict[str, int]:
    return {line.op: line.bytes for line in counted.comm if line.axis == axis}


def peaks(layout: str, micros: int, **fields: str) -> list[int]:
    sizes = {"seq_len": 16, "global_batch": 4 * micros}
    # Two layers a stage: of one, a sharded gradient and the buffer it is reduced from are all.
    heavy = replace(HEAVY, layers=HEAVY.layers * Layout.parse(layout).pp)
    return [
        count(heavy, layout, sharding=f"zero{zero}", **sizes, **fields).peak_bytes
        for zero in range(4)
    ]


@pytest.mark.parametrize("layout", ["dp4", pytest.param("pp2 dp4", marks=pytest.mark.slow)])
def test_each_level_of_sharding_needs_less_memory(layout):
    zero0, zero1, zero2, zero3 = peaks(layout, micros=2)
    assert zero0 > zero1 > zero2 > zero3


def test_with_one_micro_batch_gradients_are_reduced_at_once_either_way():
    zero0, zero1, zero2, zero3 = peaks("dp4", micros=1)
    assert zero0 > zero1 == zero2 > zero3


def test_sharding_changes_what_is_sent_how_often():
    counted = {
        zero: count(HEAVY, "dp4", sharding=zero, seq_len=16, global_batch=8).comm
        for zero in ("zero0", "zero1", "zero2", "zero3")
    }
    calls = {
        zero: {line.op: line.calls for line in comm if line.axis == "dp"}
        for zero, comm in counted.items()
    }
    groups, micros = HEAVY.layers + 1, 2  # every layer, and what is left
    assert "reduce-scatter" not in calls["zero0"]
    assert calls["zero1"]["reduce-scatter"] == groups
    assert calls["zero2"]["reduce-scatter"] == calls["zero3"]["reduce-scatter"] == groups * micros
    assert calls["zero1"]["all-gather"] == calls["zero2"]["all-gather"] == groups
    # Forward and backward of each micro batch gather; the last layer and the ends only once.
    assert calls["zero3"]["all-gather"] == micros * (2 * (HEAVY.layers - 1) + 2)


def test_context_parallel_kinds_send_what_they_should():
    ranks, seq_len, wide = 4, 64, 4  # fp32
    sizes = {"seq_len": seq_len, "micro_batch": 2, "global_batch": 2}
    tokens = 2 * seq_len // ranks
    layers, kv = LONG.layers, 2 * tokens * LONG.kv_width * wide
    sent = {
        kind: traffic(count(LONG, "cp4", cp_kind=kind, **sizes), "cp")
        for kind in ("ring", "allgather", "ulysses")
    }
    # Keys and values hop P-1 times each way, their gradients P times (home again).
    assert sent["ring"] == {"all-to-all": layers * kv * ((ranks - 1) * 2 + ranks)}
    assert sent["allgather"] == {
        "all-gather": layers * kv * ranks,
        "reduce-scatter": layers * kv * ranks,
    }
    # Queries and output, and keys and values repeated to one head a rank; there and back.
    heads = tokens * LONG.attention_width * wide
    repeated = kv * ranks // LONG.kv_heads
    assert sent["ulysses"] == {"all-to-all": 2 * layers * (2 * heads + repeated)}


def test_sequence_parallelism_gathers_and_scatters_where_tensor_parallelism_sums():
    sizes = {"seq_len": 64, "micro_batch": 2, "global_batch": 2}
    on = traffic(count(LONG, "tp2", **sizes), "tp")
    off = traffic(count(LONG, "tp2", sequence_parallel=False, **sizes), "tp")
    activation = 2 * 64 * LONG.hidden * 4
    # Forward: two gathers a layer and one before the logits; backward: the scatters' gathers, and
    # the embedding's. Scatters are their mirror.
    assert on["all-gather"] == activation * (4 * LONG.layers + 2)
    assert on["reduce-scatter"] == activation * (4 * LONG.layers + 2)
    assert off["all-reduce"] > activation * (4 * LONG.layers + 2)
    assert set(off) == {"all-reduce"}


def held(schedule: str, micros: int, layout: str = "pp2") -> int:
    found = count(LONG, layout, seq_len=256, global_batch=micros, schedule=schedule)
    return found.activation_bytes


def test_gpipe_holds_every_micro_batch_and_1f1b_no_more_than_stages():
    one_more = held("gpipe", 4) - held("gpipe", 3)
    assert held("gpipe", 5) - held("gpipe", 4) == one_more > 0
    # Two more micro batches add their tokens and targets, no activations.
    assert held("1f1b", 5) - held("1f1b", 3) < 0.02 * one_more
    gap = held("gpipe", 5) - held("1f1b", 5)
    assert gap == pytest.approx(3 * one_more, rel=0.05)


@pytest.mark.parametrize(("kind", "share"), [("full", 1.0), ("every-2", 0.5)])
def test_recompute_adds_exactly_the_forward_flops_of_its_layers(kind, share):
    """But for the last product of a layer: nothing in the backward pass needs its result."""
    sizes = {"seq_len": 64, "micro_batch": 2, "global_batch": 4}
    none = count(LONG, "dp1", **sizes)
    again = count(LONG, "dp1", recompute=kind, **sizes)
    tokens = 4 * 64
    products = 2 * tokens * (layer_params(LONG).matmul - LONG.ffn * LONG.hidden)
    attention = 4 * tokens * 64 * LONG.attention_width  # every pair is counted, masked or not
    assert again.flops - none.flops == share * LONG.layers * (products + attention)
    assert again.peak_bytes < none.peak_bytes


def test_chunked_loss_holds_a_part_of_the_logits():
    wide = replace(LONG, vocab=4096)
    whole, parts = (count(wide, "dp1", seq_len=256, loss_chunks=n) for n in (1, 8))
    logits = 256 * 4096 * 4
    assert whole.activation_bytes - parts.activation_bytes > 2 * logits
    assert parts.flops - whole.flops == 2 * 256 * 4096 * LONG.hidden


@pytest.mark.slow
@pytest.mark.parametrize("precision", [name for name in BUNDLES if name not in ("fp8", "fp4")])
def test_every_format_is_held_in_its_own_size(precision):
    policy = Policy(precision=precision, sharding="zero1")
    counted = count(HEAVY, "dp2", seq_len=16, global_batch=4, policy=policy)
    kinds = {kind.name: kind.bytes for kind in counted.kinds}
    sizes = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
    dtypes = policy.dtypes
    shard = counted.params // 2
    # The rank's shard, and what of the whole is gathered at the fullest moment.
    gathered = kinds["parameters"] - shard * sizes[dtypes.param]
    assert 0 < gathered <= counted.params * sizes[dtypes.compute]
    moments = 2 * shard * sizes[dtypes.optimizer]
    assert moments <= kinds["optimizer"] < moments * 1.001


def test_a_plain_optimizer_makes_temporaries_where_a_fused_one_makes_none():
    def updating(optimizer: str) -> int:
        run = run_spec(HEAVY, seq_len=16, precision="fp32", optimizer=optimizer)
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
        try:
            trainer = Trainer(run, World.create(run.layout, "cpu"), device=CPU)
            with Ledger() as ledger:
                watch(trainer, ledger)
                mark_phases(trainer, ledger.mark)
                trainer.step(0)
                ledger.begin()
                trainer.step(1)
                ledger.mark("end")
            return ledger.phase_bytes["optimizer"]
        finally:
            dist.destroy_process_group()

    largest = 4 * max(2 * HEAVY.ffn * HEAVY.hidden, HEAVY.vocab * HEAVY.hidden)
    assert largest <= updating("adamw-plain") - updating("adamw") <= 3 * largest


# A prime: no other size of the model is a multiple of it, and the two ranks' parts differ.
_VOCAB, _PARTS = 521, (261, 260)


def recorder(shapes: set[tuple[int, ...]]) -> type[Ledger]:
    """A ledger that also keeps the shapes of all it sees, views too."""

    class Recorder(Ledger):
        def see(self, tensor, op="given"):
            shapes.add(tuple(tensor.shape))
            super().see(tensor, op)

    return Recorder


@pytest.mark.parametrize(
    ("tied", "sequence_parallel"),
    [(True, True), (False, False)]
    + [pytest.param(*one, marks=pytest.mark.slow) for one in ((True, False), (False, True))],
)
def test_no_rank_holds_the_whole_vocabulary(monkeypatch, tied, sequence_parallel):
    model = replace(
        shape("llama", layers=2, hidden=32, ffn=64, heads=4, kv_heads=2, vocab=_VOCAB), tied=tied
    )
    fields = {"seq_len": 16, "global_batch": 2, "precision": "fp32", "sharding": "zero1"}
    spec = run_spec(model, "tp2", sequence_parallel=sequence_parallel, **fields)
    for rank, part in enumerate(_PARTS):
        shapes: set[tuple[int, ...]] = set()
        monkeypatch.setattr(dryrun, "Ledger", recorder(shapes))
        dryrun.count_rank(spec, rank)
        assert (16, part) in shapes, "its own logits must have been seen"
        assert (part, 32) in shapes, "and its rows of the table"
        assert not [one for one in shapes if _VOCAB in one or 16 * _VOCAB in one]
