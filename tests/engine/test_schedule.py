"""Lists of steps against each other: they pair up, keep order, and hold what they promise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.schedule import Action, rank_actions
from fourfold.engine.parallel.pipeline import Exchange, Transfer, plan
from tests.laws.test_pipeline_events import held_at_once

KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def counterpart(transfer: Transfer, rank: int) -> Transfer:
    kind, chunk, micro = transfer.kind, transfer.chunk, transfer.micro
    return Transfer(not transfer.is_send, kind, chunk, micro, rank)


def play(schedule: str, stages: int, virtual: int, micros: int) -> list[list[Action]]:
    """The strictest meeting: an exchange holds its rank until every transfer in it met its
    counterpart, which must be the next one between the two ranks in that direction."""
    run = {"stages": stages, "virtual_stages": virtual, "micros": micros}
    plans = [plan(schedule, rank=rank, **run) for rank in range(stages)]
    open_: list[list[Transfer]] = [[] for _ in plans]
    done: list[list[Action]] = [[] for _ in plans]
    arrived: list[set[tuple[str, int, int]]] = [set() for _ in plans]
    while any(plans) or any(open_):
        moved = False
        for rank in range(stages):
            if not open_[rank] and plans[rank]:
                step = plans[rank].pop(0)
                moved = True
                if isinstance(step, Exchange):
                    open_[rank] = list(step.transfers)
                else:
                    must_have_input(step, arrived[rank], stages * virtual)
                    done[rank].append(step)
        for rank in range(stages):
            for transfer in list(open_[rank]):
                theirs = [t for t in open_[transfer.peer] if t.peer == rank]
                match = next((t for t in theirs if t.is_send != transfer.is_send), None)
                if match is None:
                    continue
                assert match == counterpart(transfer, rank), "two ranks disagree about the turn"
                open_[rank].remove(transfer)
                open_[transfer.peer].remove(match)
                to = transfer.peer if transfer.is_send else rank
                arrived[to].add((transfer.kind, transfer.chunk, transfer.micro))
                moved = True
        assert moved, f"deadlock: {open_}"
    return done


def must_have_input(action: Action, arrived: set[tuple[str, int, int]], chunks: int) -> None:
    kind, chunk, micro = action
    if kind == "F":
        assert chunk == 0 or ("F", chunk, micro) in arrived
    elif kind in "BI":
        assert chunk == chunks - 1 or ("B", chunk, micro) in arrived


@given(
    schedule=st.sampled_from(KINDS),
    stages=st.integers(1, 7),
    virtual=st.integers(2, 4),
    micros=st.integers(1, 20),
)
def test_no_list_can_deadlock_and_each_runs_what_the_planner_simulates(
    schedule, stages, virtual, micros
):
    if schedule in ("gpipe", "1f1b") or stages == 1:
        virtual = 1
    done = play(schedule, stages, virtual, micros)
    run = {"stages": stages, "virtual_stages": virtual, "micros": micros}
    assert done == [rank_actions(schedule, rank=rank, **run) for rank in range(stages)]


def test_pairs_meet_in_one_message_where_both_have_something_to_send():
    """In the steady state of 1F1B neighbours send each other something: one batch, both ways."""
    steps = plan("1f1b", stages=2, virtual_stages=1, micros=8, rank=1)
    both = [
        s for s in steps if isinstance(s, Exchange) and len({t.is_send for t in s.transfers}) > 1
    ]
    assert len(both) >= 5


def test_one_stage_exchanges_nothing():
    for kind in ("gpipe", "1f1b"):
        steps = plan(kind, stages=1, virtual_stages=1, micros=3, rank=0)
        assert not any(isinstance(step, Exchange) for step in steps)
        assert held_at_once([step for step in steps if isinstance(step, Action)]) == 1
