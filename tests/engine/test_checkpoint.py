"""A checkpoint of any layout loads on any other, bit for bit; what could lose digits is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.engine.checkpoint.background import ShardInfo, assign_writers
from tests.engine.forked import findings


def ranks(which: str) -> dict[str, Any]:
    return findings("checkpoint_ranks.py", which)


def test_state_moves_between_layouts_and_formats() -> None:
    found = ranks("quick")
    assert len(found["gaps"]) == 3
    assert all(gap < 1e-9 for gap in found["gaps"].values()), found["gaps"]
    formats = found["formats"]
    assert formats["bf16 to fp32"] == formats["moments in bf16"] == 0.0
    assert "would lose digits as torch.bfloat16" in formats["fp32 to bf16"]


@pytest.mark.slow
def test_every_layout_loads_what_every_other_saved() -> None:
    found = ranks("pairs")
    assert len(found["gaps"]) == 56
    assert set(found["gaps"].values()) == {0.0}
    assert found["apart"] > 1e-3
    assert found["tensors"] % 3 == 0  # weights and both moments


@pytest.mark.slow
def test_the_curve_goes_on_from_layout_to_layout() -> None:
    found = ranks("resume")
    assert len(found["gaps"]) == 16
    assert max(found["gaps"]) < 1e-9


@pytest.mark.slow
def test_muon_goes_on_from_blocks_to_shards() -> None:
    """tp2 by blocks, then dp2 under ZeRO-3 by owners, against tp2 throughout."""
    found = ranks("muon")
    assert found["moved"] == 0.0
    assert len(found["gaps"]) == 6
    assert max(found["gaps"]) < 1e-12
    assert found["without momentum"] > 1e-6


@pytest.mark.slow
def test_copies_fusion_and_kinds_of_adamw_do_not_matter() -> None:
    gaps = ranks("policies")["gaps"]
    assert {gap for name, gap in gaps.items() if "next" not in name} == {0.0}
    assert max(gaps.values()) < 1e-9


def test_replicas_share_the_writing() -> None:
    """Every rectangle once, and nobody writes much more than the others."""
    slots = [ShardInfo(f"t{i}", (8,), (0,), (8,), 32) for i in range(12)]
    own = [[ShardInfo("cut", (16,), (4 * rank,), (4,), 16)] for rank in range(4)]
    held = [[*own[rank], *slots] for rank in range(4)]
    chosen = assign_writers(held)
    written = [held[rank][number] for rank in range(4) for number in chosen[rank]]
    assert sorted(map(repr, written)) == sorted(map(repr, {*slots, *(own[r][0] for r in range(4))}))
    assert {len(some) for some in chosen} == {4}


def test_a_hole_is_noticed() -> None:
    with pytest.raises(AssertionError, match="hold 4 of 16"):
        assign_writers([[ShardInfo("cut", (16,), (0,), (4,), 16)]])
