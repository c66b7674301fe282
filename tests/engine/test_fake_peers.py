"""Do the values that stand for absent peers have an ordinary size?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fourfold.engine.data.source import Synthetic
from fourfold.engine.microbench import kernel_times
from fourfold.engine.model.decoder import IGNORE
from fourfold.engine.one_rank import fake_peers, totals
from fourfold.engine.one_rank.fake_peers import Fill, OwnTokens, TrafficLog
from fourfold.engine.parallel.groups import World
from fourfold.spec.layout import Layout


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("large_bytes", [0, 2**30])
@pytest.mark.parametrize("place", [None, 0, 1, -1])
def test_every_part_is_a_copy_of_the_own(monkeypatch, parts, large_bytes, place) -> None:
    monkeypatch.setattr(fake_peers, "_LARGE_BYTES", large_bytes)
    whole = torch.full((parts, 5), -1.0)
    own = torch.arange(5.0)
    if place is not None:
        whole[place % parts], own = own, whole[place % parts]
    fake_peers.gather(whole.view(-1), own, parts)
    assert torch.equal(whole, torch.arange(5.0).expand(parts, 5))


def test_a_rank_sees_tokens_of_its_own_part_of_the_vocabulary() -> None:
    source = OwnTokens(Synthetic(vocab=100, seq_len=64, masked=0.3), 30, 40)
    tokens, targets = source.batch(0, torch.arange(8), torch.arange(64))
    assert {*tokens.flatten().tolist()} == {*range(30, 40)}
    assert {*targets.flatten().tolist()} == {*range(30, 40), IGNORE}


@pytest.mark.parametrize(("device", "in_the_way"), [("cpu", 3.0), ("cuda", 1.0)])
def test_weights_that_come_beside_the_compute_of_a_gpu_cost_it_nothing(
    monkeypatch, device: str, in_the_way: float
) -> None:
    monkeypatch.setattr(kernel_times, "time_fills", lambda fills, *_: [1.0 for _ in fills])
    log = TrafficLog()
    log.enter("layers")
    for axis in ("tp", "dp", "edp"):
        log.filled(axis, Fill("copies", 4, 2, torch.float32))
    assert totals.fill_seconds(log, {}, torch.device(device)) == {"layers": in_the_way}


def test_layouts_of_one_world_share_the_groups_of_an_axis() -> None:
    fake_peers.join(0, 4, fake_peers.TrafficLog())
    try:
        first, again, other = (
            World.create(Layout.parse(word), "cpu") for word in ("dp2 tp2", "dp2 tp2", "dp4")
        )
        assert again.tp.handle is first.tp.handle
        assert first.fsdp.handle is again.fsdp.handle
        assert {*first.fsdp.ranks} != {*other.fsdp.ranks}
        assert other.fsdp.handle is not first.fsdp.handle
        assert other.tp.handle is other.this_rank.handle is first.this_rank.handle
        before = first.tp.handle
    finally:
        dist.destroy_process_group()
    fake_peers.join(0, 4, fake_peers.TrafficLog())
    try:
        assert World.create(Layout.parse("dp2 tp2"), "cpu").tp.handle is not before
    finally:
        dist.destroy_process_group()


def test_every_rank_makes_as_many_groups_whatever_stages_hold_an_end(monkeypatch) -> None:
    """Else the next group, which torch names by their number, would never come about."""
    layouts = [Layout.parse(word) for word in ("pp4 dp2", "dp2 pp4", "pp8", "pp2 dp4", "pp4 dp2")]
    sizes, make = [], dist.new_group

    def noted(ranks: list[int], **how: Any) -> Any:
        sizes.append(len(ranks))
        return make(ranks, **how)

    monkeypatch.setattr(dist, "new_group", noted)
    made = []
    for rank in range(8):
        fake_peers.join(rank, 8, fake_peers.TrafficLog())
        try:
            made.append([])
            for layout in layouts:
                sizes.clear()
                World.create(layout, "cpu")
                made[-1].append(len(sizes))
        finally:
            dist.destroy_process_group()
    assert all(one == made[0] for one in made)
    assert made[0][-1] == 0 < made[0][0]
