"""Is the list of a stage's kernels all of its matrix products and attention, and nothing else?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery
from fourfold.cost.count.params import layer_params, stage_layers
from fourfold.engine.microbench import kernel_times
from fourfold.engine.microbench.kernels import Attend, Kernel, Product, stage_kernels
from fourfold.engine.one_rank import fake_peers
from fourfold.engine.parallel.groups import World
from fourfold.spec.run import RunSpec
from tests.specs import run_spec

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def spec(model: str, layout: str, **policy: object) -> RunSpec:
    return run_spec(model, layout, seq_len=4096, global_batch=64, **policy)


@contextmanager
def world_of(one: RunSpec, rank: int) -> Iterator[World]:
    fake_peers.join(rank, one.gpus, fake_peers.TrafficLog())
    try:
        yield World.create(one.layout, "cpu")
    finally:
        dist.destroy_process_group()


def kernels_of(one: RunSpec, rank: int) -> list[Kernel]:
    stages = stage_layers(one.model, one.layout.pp, one.batch.seq_len)
    with world_of(one, rank) as world:
        layers = stages[world.stage]
        micro = one.batch.micro_batch
        return stage_kernels(one, world, layers, micro=micro, head=world.is_last)


def flops(kernels: list[Kernel]) -> int:
    return sum(kernel.calls * kernel.flops for kernel in kernels)


@pytest.mark.parametrize("model", ["llama-3.1-70b", "mpt-7b", "bloom-176b"])
def test_ranks_of_a_replica_share_the_flops_of_the_model(model: str) -> None:
    """Over tp and pp they add up to the convention that counts every pair; backward is 5/2 of the
    forward attention there (scores again), 2 in the convention."""
    one = spec(model, "pp4 tp2")
    found = [kernel for rank in range(8) for kernel in kernels_of(one, rank)]
    ask = FlopsQuery.of(model=one.model, seq_len=4096, layout=one.layout, policy=one.policy)
    said = CONVENTIONS["full-attention"].count(ask).model * 4096
    pairs = 4.0 * one.model.layers * one.model.attention_width * 4096 * 4096
    assert flops(found) == pytest.approx(said + 0.5 * pairs, rel=1e-12)


def test_products_of_a_layer_are_its_weights_three_times() -> None:
    one = spec("llama-3.1-70b", "pp4 dp16 tp8")
    products = [k for k in kernels_of(one, 0) if isinstance(k, Product)]
    local = layer_params(one.model).matmul // 8
    assert flops(list(products)) == 20 * 3 * 2 * 4096 * local


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-30b-a3b"])
def test_ranks_with_experts_compute_what_their_tokens_choose(name: str) -> None:
    """Each of 4 ranks has its own sequence; a router's product is not listed, and of the backward
    pass of attention scores come once more."""
    one = spec(name, "dp4 ep4")
    found = kernels_of(one, 1)
    model = one.model
    ask = FlopsQuery.of(model=model, seq_len=4096, layout=one.layout, policy=one.policy)
    said = CONVENTIONS["full-attention"].count(ask).model * 4096
    again = 2.0 * model.layers * model.attention_width * 4096 * 4096
    assert flops(found) == pytest.approx(said + again, rel=2e-3)
    grouped = [k for k in found if isinstance(k, Product) and k.groups > 1]
    assert {k.groups for k in grouped} == {model.experts // 4}
    assert {k.name for k in grouped} == {"experts_gate_up", "experts_down"}


@pytest.mark.parametrize("kind", ["ring", "allgather", "ulysses"])
def test_context_ranks_share_the_pairs(kind: str) -> None:
    """Blocks off the diagonal are whole, so a rank does half the square and a little more."""
    one = spec("llama-3.1-8b", "cp4", cp_kind=kind)
    cores = [[k for k in kernels_of(one, rank) if isinstance(k, Attend)] for rank in range(4)]
    pairs = [
        sum(k.calls * k.batch * k.heads * k.queries * k.keys for k in some if not k.backward)
        for some in cores
    ]
    square = one.model.layers * one.model.heads * 4096 * 4096
    # Of 8 x 8 chunks 36 are on or below the diagonal; a ring takes the four of its own as one.
    sixty_fourths = {"ulysses": 64, "allgather": 36, "ring": 40}[kind]
    assert sum(pairs) == square * sixty_fourths // 64
    assert len(set(pairs)) == 1


@pytest.mark.parametrize("recompute", ["none", "full", "every-2", "selective"])
def test_recompute_adds_forwards_in_the_backward(recompute: str) -> None:
    one = spec("llama-3.1-8b", "tp8", recompute=recompute)
    again = [k for k in kernels_of(one, 0) if k.when == "backward" and _is_forward(k)]
    names = {(k.name, k.calls) for k in again}
    share = {"none": 0, "full": 32, "every-2": 16, "selective": 0}[recompute]
    expected = {("qkv", share), ("out", share), ("gate_up", share), ("core", share)}
    if recompute == "selective":
        expected = {("core", 32)}
    assert names == (expected if recompute != "none" else set())


def _is_forward(kernel: Kernel) -> bool:
    return kernel.makes == "output" if isinstance(kernel, Product) else not kernel.backward


@pytest.mark.parametrize("layout", ["tp2", "cp2", "tp2 cp2"])
def test_every_kernel_of_the_list_runs_alone(layout: str) -> None:
    """With the shapes and FLOPs that it says."""
    for model in ("llama-tiny", "mpt-tiny"):
        one = run_spec(model, layout, seq_len=64, precision="fp32")
        kernels = kernels_of(one, 0)
        seconds = kernel_times.time_kernels(kernels, one, torch.device("cpu"), 0.02)
        assert len(seconds) == len(kernels)
        assert min(seconds) > 0
