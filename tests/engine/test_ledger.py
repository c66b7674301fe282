"""The ledger against numbers worked out by hand, on real and on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fourfold.engine.observe.ledger import Ledger, MemoryLimitError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def world() -> Iterator[int]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield 4
    dist.destroy_process_group()


def tensors(fake: bool) -> contextlib.AbstractContextManager[object]:
    return FakeTensorMode() if fake else contextlib.nullcontext()


@pytest.mark.parametrize("fake", [False, True])
def test_storages_are_counted_once_and_while_they_live(fake) -> None:
    with tensors(fake), Ledger() as ledger:
        a = torch.empty(1024)
        view = a.view(32, 32).t()[:4]
        assert ledger.live_bytes == 4096
        b = a + 1
        assert ledger.live_bytes == 8192
        del a, b
        assert ledger.live_bytes == 4096  # the view keeps it
        del view
        assert ledger.live_bytes == 0
        assert ledger.peak_bytes == 8192
        assert ledger.peak.size == 8192
        assert [allocation.op for allocation in ledger.peak.largest] == ["aten::empty", "aten::add"]


@pytest.mark.parametrize("fake", [False, True])
def test_products_on_the_shapes_they_got(fake) -> None:
    with tensors(fake), Ledger() as ledger:
        layer = torch.nn.Linear(64, 32)
        x = torch.empty(2, 8, 64, requires_grad=True)
        layer(x).sum().backward()
        assert ledger.flops == 3 * 2 * 16 * 64 * 32


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_counts_every_pair(kv_heads) -> None:
    with FakeTensorMode(), Ledger() as ledger:
        q = torch.empty(2, 4, 16, 8, requires_grad=True)
        k, v = (torch.empty(2, kv_heads, 16, 8, requires_grad=True) for _ in range(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 4)
        assert ledger.flops == 2 * 2 * (2 * 4 * 16 * 16 * 8)
        out.sum().backward()
        assert ledger.flops == 7 * 2 * (2 * 4 * 16 * 16 * 8)


def test_a_storage_that_is_freed_in_place() -> None:
    with Ledger() as ledger:
        a = torch.empty(1000, dtype=torch.uint8)
        a.untyped_storage().resize_(0)
        assert ledger.live_bytes == 0
        a.untyped_storage().resize_(1000)
        assert ledger.live_bytes == 1000
        assert ledger.kinds["gathered"] == 1000
    a.untyped_storage().resize_(0)  # no longer watched
    assert ledger.live_bytes == 1000


def step(ledger: Ledger, recompute: bool) -> None:
    """Two layers and AdamW, with owners as the engine names them."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def owners():
        for parameter in model.parameters():
            yield "parameters", parameter
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for state in optimizer.state.values():
            yield from (("optimizer", value) for value in state.values())

    ledger.owners = owners
    ledger.mark("forward")
    ledger.begin()
    x = torch.zeros(128, 64)
    for layer in model:
        both = lambda x, layer=layer: F.gelu(layer(x))  # noqa: E731
        x = checkpoint(both, x, use_reentrant=False) if recompute else both(x)
    x.sum().backward()
    del x
    ledger.mark("optimizer")
    optimizer.step()
    ledger.mark("end")


@pytest.mark.parametrize("recompute", [False, True])
def test_fake_equals_real(recompute) -> None:
    found = []
    for fake in (False, True):
        with tensors(fake), Ledger() as ledger:
            step(ledger, recompute)
            found.append((ledger.flops, ledger.peak_bytes, dict(ledger.kinds)))
    assert found[0] == found[1]
    flops, _, kinds = found[0]
    product = 2 * 128 * 64 * 64
    # The first layer's input needs no gradient; recompute runs each forward twice.
    assert flops == product * (4 + 4 + 3) + product * 4 * recompute
    parameters = 4 * 4 * (64 * 64 + 64)
    assert kinds["parameters"] == kinds["gradients"] == parameters
    assert kinds["optimizer"] == 2 * parameters + 8 * 4  # and one step counter per tensor


def test_recompute_holds_less() -> None:
    peaks = []
    for recompute in (False, True):
        with FakeTensorMode(), Ledger() as ledger:
            step(ledger, recompute)
            peaks.append(ledger.peak_bytes)
    assert peaks[1] < peaks[0]


def test_a_limit_stops_the_allocation_that_passes_it() -> None:
    with Ledger(limit_bytes=10_000) as ledger:
        ledger.mark("forward")
        kept = [torch.empty(1000) for _ in range(2)]
        with pytest.raises(MemoryLimitError, match=r"12000 live bytes pass memory_limit=10000"):
            torch.empty(1000)
        assert len(kept) == 2
        torch.empty(1000)  # the limit is told once; cleaning up may allocate


def test_traffic_by_axis(world) -> None:
    axes = {dist.group.WORLD.group_name: "dp"}
    with Ledger(axes) as ledger:
        part, whole = torch.ones(256), torch.ones(1024)
        dist.all_reduce(whole)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(torch.empty(1024), whole)
        dist.all_gather([torch.empty(256) for _ in range(4)], part)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, part, 2), dist.P2POp(dist.irecv, part, 0)]
        ):
            work.wait()
        dist.barrier()
    assert dict(ledger.traffic) == {
        ("dp", "all-reduce"): 4096,
        ("dp", "all-gather"): 2 * 4096,
        ("dp", "reduce-scatter"): 4096,
        ("dp", "all-to-all"): 4096,
        ("dp", "send"): 1024,
        ("dp", "recv"): 1024,
    }
    assert ledger.calls["dp", "all-gather"] == 2


def test_what_was_waited_for_is_counted_once(world) -> None:
    """A real wait hands back the tensor it waited for; a fake one hands back another."""
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
        part = torch.empty(256)
        whole = ops.wait_tensor(ops.all_gather_into_tensor(part, 4, name))
        assert whole.numel() == 1024
        assert ledger.peak_bytes == 4 * (256 + 1024)


def test_tensor_parallel_work_is_counted_per_rank(world) -> None:
    """DTensor also runs every operator at global size to learn shapes; that must not count."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)
        )
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    axes = {mesh.get_group("tp").group_name: "tp"}
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger(axes) as ledger:
        model.to_empty(device="cpu")
        assert ledger.live_bytes == 2 * 4 * 64 * 256 // 4
        ledger.begin()
        model(torch.empty(32, 64)).sum().backward()
        assert ledger.flops == (2 + 2 + 1) * 2 * 32 * 64 * 256 // 4
        assert ledger.traffic["tp", "all-reduce"] == 4 * 32 * 64
        assert ledger.peak_bytes < 2**20


def test_fully_sharded_weights_come_and_go(world) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    axes = {mesh.get_group("dp").group_name: "dp"}
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger(axes) as ledger:
        model.to_empty(device="cpu")
        weights = 4 * 64 * 64
        assert ledger.live_bytes == 3 * weights // 4
        model(torch.empty(8, 64)).sum().backward()
        assert ledger.traffic["dp", "all-gather"] >= 5 * weights  # the last is not gathered again
        assert ledger.traffic["dp", "reduce-scatter"] == 3 * weights
        shards = 3 * weights // 4
        assert ledger.live_bytes < 2 * shards + 2 * weights  # weights, gradients, no whole model
