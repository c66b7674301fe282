"""Lists of actions against each other: they pair up, keep order, and hold what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.engine.parallel.schedule import Compute, Exchange, actions, held_at_once

PEER = {
    "send-output": (1, "receive-input"),
    "receive-input": (-1, "send-output"),
    "send-grad": (-1, "receive-grad"),
    "receive-grad": (1, "send-grad"),
}


def play(kind: str, stages: int, micros: int) -> None:
    """Rendezvous semantics: an exchange ends when every transfer in it met its counterpart, which
    must be the next one between the two ranks in that direction."""
    plans = [list(actions(kind, stage, stages, micros)) for stage in range(stages)]
    open_: list[list] = [[] for _ in plans]
    done: list[list[Compute]] = [[] for _ in plans]
    while any(plans) or any(open_):
        moved = False
        for stage in range(stages):
            if not open_[stage] and plans[stage]:
                action = plans[stage].pop(0)
                moved = True
                if isinstance(action, Compute):
                    done[stage].append(action)
                else:
                    open_[stage] = list(action.transfers)
        for stage in range(stages):
            for transfer in list(open_[stage]):
                step, what = PEER[transfer.what]
                other = open_[stage + step]
                match = next((t for t in other if t.what == what), None)
                if match is not None:
                    assert match.micro == transfer.micro, "neighbours disagree about whose turn"
                    other.remove(match)
                    open_[stage].remove(transfer)
                    moved = True
        assert moved, f"deadlock: {open_}"
    for computed in done:
        for kind_ in ("forward", "backward"):
            assert [c.micro for c in computed if c.kind == kind_] == list(range(micros))


@given(kind=st.sampled_from(["gpipe", "1f1b"]), stages=st.integers(1, 9), micros=st.integers(1, 20))
def test_schedules_never_deadlock_and_do_everything_once(kind, stages, micros):
    play(kind, stages, micros)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micros", [1, 3, 12])
def test_gpipe_holds_every_micro_batch_and_1f1b_at_most_the_stages_ahead(stages, micros):
    for stage in range(stages):
        assert held_at_once(actions("gpipe", stage, stages, micros)) == micros
        expected = min(micros, stages - stage)
        assert held_at_once(actions("1f1b", stage, stages, micros)) == expected


def test_one_stage_exchanges_nothing():
    for kind in ("gpipe", "1f1b"):
        plan = actions(kind, 0, 1, 3)
        assert not any(isinstance(action, Exchange) for action in plan)
        assert held_at_once(plan) == 1
