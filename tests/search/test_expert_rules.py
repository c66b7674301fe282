"""Layouts of models with experts: words, places, and why some cannot run."""

from __future__ import annotations

import pytest

from fourfold.search.legal import why_not
from fourfold.spec.batch import Batch
from fourfold.spec.catalog import model
from fourfold.spec.codec import decode, encode
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy


@pytest.mark.parametrize(
    "words", ["pp2 dp4 cp1 tp2 ep4", "pp1 dp4 cp1 tp2 ep2 etp2", "pp1 dp2x2 cp1 tp1 ep2"]
)
def test_words_round_trip(words: str) -> None:
    layout = Layout.parse(words)
    assert str(layout) == words
    assert decode(Layout, encode(layout)) == layout


def test_neighbours_share_an_expert_then_others_hold_the_rest() -> None:
    layout = Layout.parse("dp4 tp2 ep2 etp2")
    assert [layout.expert_place(rank) for rank in range(8)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip


def test_every_copy_holds_all_experts() -> None:
    layout = Layout.parse("dp2x2 ep2")
    assert [layout.expert_place(rank)[1] for rank in range(4)] == [0, 1, 0, 1]
    assert layout.edp == 1


REFUSED = {
    "experts": ("mixtral-tiny", "dp3 ep3", {}),
    "expert-ranks": ("mixtral-tiny", "dp2x2 ep4", {}),
    "expert-width": ("mixtral-tiny", "dp5 etp5", {}),
    "expert-dense": ("llama-tiny", "dp2 ep2", {}),
    "moe-tp": ("mixtral-tiny", "tp2", {"sequence_parallel": False}),
    "dispatcher": ("mixtral-tiny", "dp2 ep2", {"dispatcher": "local"}),
    "shared-width": ("deepseek-tiny", "tp64", {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_have_names_and_remedies(reason: str) -> None:
    name, words, policy = REFUSED[reason]
    batch = Batch(seq_len=1920, micro_batch=1, global_batch=60)
    found = why_not(model(name), Layout.parse(words), batch, Policy(**policy))
    refusal = next(one for one in found if one.reason == reason)
    assert refusal.hint.startswith("use ")
