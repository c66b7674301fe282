"""The history of storages against steps worked out by hand, on real and on fake tensors."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fourfold.cost.memory.allocator import StorageEvent
from fourfold.engine.observe.history import StorageLedger
from fourfold.engine.observe.operators import workspace_bytes
from fourfold.engine.one_rank.counted import CountedRank
from fourfold.result.one_rank import RankMemoryCount

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

HERE = Path(__file__).parent
FAKE = pytest.mark.parametrize("fake", [False, True])


def tensors(fake: bool) -> contextlib.AbstractContextManager[object]:
    return FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()


def kinds(count: RankMemoryCount) -> dict[str, int]:
    return {kind.name: kind.bytes for kind in count.kinds}


@FAKE
def test_history_has_births_and_deaths_in_order(fake) -> None:
    with tensors(fake), StorageLedger(HERE) as ledger:
        a = torch.empty(1024)
        view = a.view(32, 32)
        b = a.double()
        del a
        del b, view
    assert ledger.history == [
        StorageEvent(0, 4096),
        StorageEvent(1, 8192),
        StorageEvent(1, 8192, is_free=True),
        StorageEvent(0, 4096, is_free=True),
    ]
    assert [record.op for record in ledger.records] == ["aten::empty", "aten::_to_copy"]


@FAKE
def test_resized_storage_is_a_new_one(fake) -> None:
    with tensors(fake), StorageLedger(HERE) as ledger:
        a = torch.empty(1024)
        a.untyped_storage().resize_(0)
        a.untyped_storage().resize_(2048)
    assert ledger.history[:3] == [
        StorageEvent(0, 4096),
        StorageEvent(0, 4096, is_free=True),
        StorageEvent(1, 2048),
    ]
    assert ledger.records[1].kind == "gathered"


def test_streams_are_told_apart() -> None:
    side = torch.cpu.Stream()
    with FakeTensorMode(), StorageLedger(HERE) as ledger:
        kept = [torch.empty(1024)]
        with torch.cpu.stream(side):
            kept.append(torch.empty(1024))
        kept.append(torch.empty(1024))
    assert [event.stream for event in ledger.history] == [0, 1, 0]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


@FAKE
def test_live_tensors_name_module_and_line(fake) -> None:
    """Gradients carry the place of the forward operator whose gradient they are."""
    with tensors(fake), StorageLedger(HERE) as ledger:
        model = Twice()
        ledger.modules.add(model)
        x = torch.empty(512, 64)
        ledger.mark("forward")
        ledger.begin()
        out = model(x)
        ledger.mark("backward")
        out.sum().backward()
        count = ledger.count(rank=0, stage=0, params=0)
    made = {(t.module, t.op, t.phase, t.bytes) for t in count.peak}
    assert ("up", "aten::mm", "forward", 512 * 256 * 4) in made
    assert ("act", "aten::gelu", "forward", 512 * 256 * 4) in made
    assert ("down", "aten::mm", "backward", 512 * 256 * 4) in made  # of its input
    assert ("down", "aten::mm", "backward", 256 * 64 * 4) in made  # of its weight
    lines = {t.line.partition(":")[0] for t in count.peak}
    assert lines == {"engine/test_history.py"}
    source = Path(__file__).read_text().splitlines()
    tensor = next(t for t in count.peak if t.module == "down" and t.phase == "backward")
    assert "self.down(self.act(self.up(x)))" in source[int(tensor.line.partition(":")[2]) - 1]


@FAKE
def test_kinds_follow_from_owner_and_life(fake) -> None:
    """Saved for backward: inputs of `up`, `act` and `down`. The output is not."""
    with tensors(fake), StorageLedger(HERE) as ledger:
        model = Twice()
        for parameter in model.parameters():
            ledger.own("parameters", parameter)
        ledger.mark("forward")
        ledger.begin()
        loss = model(torch.empty(512, 64)).sum()
        ledger.mark("backward")
        loss.backward()
        ledger.mark("end")
        count = ledger.count(rank=3, stage=1, params=7)
    assert (count.rank, count.stage, count.params) == (3, 1, 7)
    assert count.peak_phase == "backward"
    assert kinds(count)["parameters"] == 2 * 64 * 256 * 4
    # The loss of 4 bytes was made there, too.
    assert kinds(count)["activations"] == 512 * 64 * 4 + 2 * 512 * 256 * 4 + 4
    phases = {phase.name: phase.bytes for phase in count.phases}
    assert phases["backward"] == count.allocated_bytes.segments > phases["forward"]


def test_unknown_values_are_answered_and_counted() -> None:
    with FakeTensorMode(), StorageLedger(HERE) as ledger:
        assert torch.empty(1).item() == 1.0
        assert torch.empty(1, dtype=torch.int64).item() == 1
    assert ledger.num_unknown_values == 2


def test_kernels_ask_for_workspaces() -> None:
    """Of an embedding of 8,192 tokens: four lists of indices, three of begins, 8,192 + 64 sums."""
    with FakeTensorMode():
        grad, tokens = torch.empty(8192, 48), torch.empty(8192, dtype=torch.int64)
        embedding = torch.ops.aten.embedding_dense_backward.default
        sums = 8192 + 64
        sizes = workspace_bytes(embedding, (grad, tokens, 10_000))
        assert sizes == (8192 * 8 * 4, sums * 8 * 3, sums * 64 * 4)
        assert workspace_bytes(embedding, (grad[:3072], tokens[:3072], 10_000)) == ()
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        query, key = (torch.empty(2, h, 256, 64, dtype=torch.bfloat16) for h in (8, 2))
        rows = 2 * 8 * 256
        same = (rows * 64 * 4 + 2 * rows * 4,)
        assert workspace_bytes(attention, (query, query, query)) == same
        grouped = 2 * 2 * 8 * 256 * 64 * 2
        assert workspace_bytes(attention, (query, query, key)) == (same[0] + grouped,)


WORLD, WIDTH = 4, 512


@FAKE
def test_sharded_rank_holds_its_quarter(fake) -> None:
    """Two layers of 512 x 512 over 4 ranks, fp32 with bf16 products: after a step the rank keeps a
    quarter of weights and of both moments, and after the backward pass a quarter of gradients."""
    quarter = 2 * WIDTH * WIDTH * 4 // WORLD
    with CountedRank(1, WORLD, HERE, is_fake=fake) as rank:
        mesh = init_device_mesh("cpu", (WORLD,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        rank.begin_storage()
        model.to_empty(device="cpu")
        rank.own_model([model])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            rank.ledger.mark("forward")
            rank.ledger.begin()
            loss = model(torch.empty(16, WIDTH)).sum()
            rank.ledger.mark("backward")
            loss.backward()
            rank.own_gradients([model])
            rank.ledger.mark("optimizer")
            optimizer.step()
            rank.own_optimizer([optimizer])
            live = dict(rank.ledger.kinds)
            optimizer.zero_grad()
        rank.ledger.mark("end")
        count = rank.ledger.count(rank=1, stage=0, params=2 * WIDTH * WIDTH)
    assert live["parameters"] == live["gradients"] == quarter
    assert live["optimizer"] == 2 * quarter + 2 * 4  # two counters of steps
    assert kinds(count)["workspace"] == 64 * 2**20
    assert kinds(count)["parameters"] == quarter
    assert count.reserved_bytes.segments >= count.allocated_bytes.segments


def test_fake_tensors_on_meta_have_no_storage() -> None:
    with tensors(True), StorageLedger(HERE) as ledger:
        torch.zeros_like(torch.empty(1024), device="meta")
    assert [event.bytes for event in ledger.history] == [4096, 4096]  # birth and death of the first


def test_lines_are_those_of_every_folder_of_the_engine() -> None:
    with StorageLedger(HERE / "elsewhere", HERE) as ledger:
        kept = torch.empty(1024)
    assert kept.numel() == 1024
    assert ledger.records[0].place.line.startswith("engine/test_history.py:")
