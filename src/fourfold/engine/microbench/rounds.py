"""Works of a CPU's ranks timed in rounds. A neighbour that comes for a second then takes a reading
of each work and not all readings of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from fourfold.engine.observe.clock import lower_quartile, reading
from fourfold.engine.parallel.groups import Group
from fourfold.engine.process.task import CPU

Work = Callable[[], object]
# A reading's seconds. Where ranks share cores it is longer than a turn that the system gives to one
# of them: in a turn a rank is as fast as if it were alone.
_READING_S, _SHARED_READING_S = 0.012, 0.03
_ROUNDS, _MOST_ROUNDS, _MOST_CALLS = 5, 40, 1e5


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of a call of each work, by the lower quartile of rounds. `unsteady`: of most works,
    what the upper quartile takes more than the lower one, as a share."""

    seconds: list[float]
    unsteady: float


def in_rounds(works: Sequence[Work], group: Group, budget_s: float, cores: int) -> Rounds:
    """While all ranks of the group do the same on this host's cores. The last one to be done
    counts, since a step goes on when it is; everybody makes as many calls."""
    reading_s = _SHARED_READING_S if group.size > cores else _READING_S
    once = []
    for work in works:
        work()
        once.append(reading(work, CPU, 2))
    wanted = [min(max(1.0, reading_s / max(s, 1e-7)), _MOST_CALLS) for s in once]
    round_s = sum(calls * s for calls, s in zip(wanted, once, strict=True))
    wanted.append(min(max(_ROUNDS, budget_s / round_s), _MOST_ROUNDS))
    plan = torch.tensor(wanted)
    dist.broadcast(plan, group.ranks[0], group=group.handle)
    *calls, rounds = (int(number) for number in plan.tolist())
    taken = torch.zeros(rounds, len(works), dtype=torch.float64)
    for each in taken:
        for at, work in enumerate(works):
            dist.barrier(group=group.handle)
            each[at] = reading(work, CPU, calls[at])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group.handle)
    readings = [column.tolist() for column in taken.T]
    spreads = [_upper_quartile(one) / lower_quartile(one) - 1.0 for one in readings]
    return Rounds([lower_quartile(one) for one in readings], median(spreads))


def _upper_quartile(readings: Sequence[float]) -> float:
    return sorted(readings)[len(readings) * 3 // 4]
