"""How long a training takes from its first step to its last, and with what chance.

Steps are stretched by slow hosts, evaluations and repeated steps; interruptions come at random
(exponential), each costs its recovery and the steps since the last whole checkpoint. A checkpoint
is written behind the training's back: it stalls the time of a copy to the host, so the interval is
Young's and Daly's square root with that stall as its cost, and no shorter than one write. The time
of an interval with interruptions is Daly's closed form (FGCS 2006, eq. 20). Hosts in repair are a
queue with Poisson arrivals; the training waits while more are away than there are spares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fourfold.cost.calendar.assumptions import NINTH, Assumptions
from fourfold.cost.columns import Floats

DAY_S = 86400.0
ENOUGH_SPARES = 0.99
MAX_STRETCH = 100.0  # of a training that ends: nine of ten take at most so many times its steps
# Of each of three standard normal variables: the middles of equally likely parts.
_NORMAL = NormalDist()
_QUANTILES = np.array([_NORMAL.inv_cdf((k + 0.5) / 9) for k in range(9)])
_AT = np.linspace(-6.0, 6.0, 1201)
_BELOW = np.array([_NORMAL.cdf(float(z)) for z in _AT])


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps of one kind of batch on one number of GPUs. `low` and `high`: the step's 80% interval
    over its estimate."""

    gpus: int
    host_gpus: int
    work_s: float
    params: int
    low: float
    high: float
    power_w: float = 0.0  # of one GPU

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.host_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a phase by what they go to; together its time. `first_s`: steps that count."""

    first_s: Floats
    slow_s: Floats
    evaluating_s: Floats
    repeated_s: Floats
    saving_s: Floats
    recovering_s: Floats
    redone_s: Floats
    waiting_s: Floats
    interval_s: Floats
    interruptions: Floats
    spare_hosts: int

    PARTS = ("first", "slow", "evaluating", "repeated", "saving", "recovering", "redone", "waiting")

    @property
    def total_s(self) -> Floats:
        return sum((getattr(self, f"{name}_s") for name in self.PARTS), np.zeros(1))

    @property
    def effective(self) -> Floats:
        """Of the time, what goes to steps that count, slow ones too, and to evaluations."""
        return (self.first_s + self.slow_s + self.evaluating_s) / self.total_s


def spent(phase: Phase, assumed: Assumptions, rare: Floats, recover: Floats, rest: Floats) -> Spent:
    """Where the three groups of assumptions are at these standard normal values: how often it
    fails, how long that takes, and all else."""
    rate = phase.gpus * assumed.failures_per_gpu_day.at(rare) / DAY_S
    slow_hosts = phase.hosts * assumed.slow_hosts_per_host_day.at(rest)
    is_slow = -np.expm1(-slow_hosts * assumed.slow_found_days.value)
    slow_s = phase.work_s * is_slow * assumed.slow_stretch.value
    steps_s = phase.work_s + slow_s
    evaluating_s = steps_s * assumed.evaluation_share.at(rest)
    repeated_s = steps_s * assumed.repeated_share.at(rest)
    state = phase.params * assumed.state_bytes_per_param.value
    transfer_s = state / phase.hosts / assumed.host_storage_bytes_per_s.at(-recover)
    pause_s = assumed.save_pause_s.at(recover) + state / phase.gpus / (
        assumed.gpu_copy_bytes_per_s.at(-recover)
    )
    interval_s = checkpoint_interval_s(rate, pause_s, transfer_s)
    recover_s = assumed.detect_s.at(recover) + assumed.restart_s.at(recover) + transfer_s
    base_s = steps_s + evaluating_s + repeated_s
    stretch = daly(rate, interval_s, pause_s, recover_s + transfer_s)
    saving_s = base_s * pause_s / interval_s
    interruptions = rate * base_s * stretch
    recovering_s = interruptions * recover_s
    short, spares = shortage(phase, assumed, rate)
    return Spent(
        first_s=np.full_like(rate, phase.work_s),
        slow_s=slow_s,
        evaluating_s=evaluating_s,
        repeated_s=repeated_s,
        saving_s=saving_s,
        recovering_s=recovering_s,
        redone_s=base_s * (stretch - 1.0) - saving_s - recovering_s,
        waiting_s=base_s * stretch * short / (1.0 - short),
        interval_s=interval_s,
        interruptions=interruptions,
        spare_hosts=spares,
    )


def checkpoint_interval_s(rate: Floats, pause_s: Floats, write_s: Floats) -> Floats:
    """The best time between saves that pause for `pause_s` and end `write_s` later; a write ends
    before the next begins, and where nothing fails one a day is kept."""
    best_s = np.sqrt(2.0 * pause_s / np.maximum(rate, 1e-12))
    return np.clip(best_s, np.maximum(write_s, 1.0), np.maximum(write_s, DAY_S))


def daly(rate: Floats, interval_s: Floats, pause_s: Floats, recover_s: Floats) -> Floats:
    """Expected time over work, where interruptions come at `rate`."""
    segment = rate * (interval_s + pause_s)
    stretched = np.where(segment > 1e-9, np.expm1(segment) / np.maximum(segment, 1e-30), 1.0)
    return np.exp(rate * recover_s) * stretched * (interval_s + pause_s) / interval_s


def shortage(phase: Phase, assumed: Assumptions, rate: Floats) -> tuple[Floats, int]:
    """(share of time in which more hosts are away than spares, spares)."""
    away = rate * DAY_S * assumed.replaced_share.value * assumed.repair_days.value
    spares = assumed.spare_hosts
    if spares is None:
        # Enough at the expected rate; where it is higher, more are assumed to be found.
        usual = phase.gpus * assumed.failures_per_gpu_day.value * assumed.replaced_share.value
        return np.zeros_like(away), spares_for(usual * assumed.repair_days.value)
    within = sum(
        (
            np.exp(k * np.log(np.maximum(away, 1e-300)) - away - math.lgamma(k + 1))
            for k in range(spares + 1)
        ),
        np.zeros_like(away),
    )
    return np.clip(1.0 - within, 0.0, 0.95), spares


def spares_for(away: float) -> int:
    """The fewest that suffice 99% of the time where `away` are away on average."""
    chance = term = math.exp(-away)
    count = 0
    while chance < ENOUGH_SPARES and count < 10_000:
        count += 1
        term *= away / count
        chance += term
        if away > 500.0:  # exp underflows: normal
            return math.ceil(away + 2.33 * math.sqrt(away))
    return count


@dataclass(frozen=True, slots=True)
class Training:
    """All phases, one after the other. Steps that are slower than predicted are so in all of
    them."""

    phases: tuple[Phase, ...]
    parts: tuple[Spent, ...]  # at the assumptions' own values
    _spread: Floats  # seconds by all combinations of assumptions, sorted
    _low: float
    _high: float

    @property
    def total_s(self) -> float:
        return float(sum(part.total_s[0] for part in self.parts))

    @property
    def ends(self) -> bool:
        """Whether it advances: nine of ten take at most MAX_STRETCH times its steps."""
        work_s = sum(phase.work_s for phase in self.phases)
        return self.total_s < math.inf and self.within_s(0.9) <= MAX_STRETCH * work_s

    @property
    def effective(self) -> float:
        used = sum(float((part.effective * part.total_s)[0]) for part in self.parts)
        return used / self.total_s

    @property
    def goodput(self) -> float:
        """Return the share of the time in steps that count, at their predicted seconds."""
        return sum(phase.work_s for phase in self.phases) / self.total_s

    @property
    def gpu_hours(self) -> float:
        pairs = zip(self.phases, self.parts, strict=True)
        return sum(phase.gpus * float(part.total_s[0]) for phase, part in pairs) / 3600.0

    @property
    def interruptions(self) -> float:
        return sum(float(part.interruptions[0]) for part in self.parts)

    @property
    def spare_hosts(self) -> int:
        return max(part.spare_hosts for part in self.parts)

    @property
    def energy_j(self) -> float:
        pairs = zip(self.phases, self.parts, strict=True)
        return sum(phase.gpus * phase.power_w * float(part.total_s[0]) for phase, part in pairs)

    def chance(self, within_s: float) -> float:
        """That it ends within this time."""
        if within_s <= 0.0:
            return 0.0
        away = np.log(within_s / self._spread)
        sigma = np.where(away < 0.0, -math.log(self._low), math.log(self._high)) / NINTH
        return float(np.interp(away / np.maximum(sigma, 1e-6), _AT, _BELOW).mean())

    def within_s(self, chance: float) -> float:
        """The time that it ends within with this chance."""
        low, high = self.total_s / 1e3, self.total_s * 1e3
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.chance(middle) < chance else (low, middle)
        return high


def training(phases: Sequence[Phase], assumed: Assumptions) -> Training:
    with np.errstate(over="ignore", invalid="ignore"):  # what never ends takes infinite seconds
        return _training(phases, assumed)


def _training(phases: Sequence[Phase], assumed: Assumptions) -> Training:
    middle = np.zeros(1)
    parts = tuple(spent(phase, assumed, middle, middle, middle) for phase in phases)
    work_s = sum(phase.work_s for phase in phases)
    axes = np.meshgrid(_QUANTILES, _QUANTILES, _QUANTILES, indexing="ij")
    grid = [axis.reshape(-1) for axis in axes]
    spread = sum((spent(phase, assumed, *grid).total_s for phase in phases), np.zeros(1))
    low = sum(phase.work_s * phase.low for phase in phases) / work_s
    high = sum(phase.work_s * phase.high for phase in phases) / work_s
    return Training(tuple(phases), parts, np.sort(spread), min(low, 1.0), max(high, 1.0))
