"""What is asked of a calendar, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from fourfold.cost.calendar.assumptions import Assumptions, defaults
from fourfold.errors import UserError
from fourfold.flag import flag
from fourfold.spec import Ramp, check, codec
from fourfold.units import budget_from, days_from
from fourfold.verbs import Answer, Request
from fourfold.verbs.requests import Count, PlanRequest, Share, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPhase(Request):
    """Tokens with a sequence length, batch or number of GPUs of their own; what is None is the
    plan's."""

    tokens: Count
    seq_len: Size | None = None
    global_batch: int | None = None
    gpus: Size | None = None
    ramp: Annotated[Ramp, Ramp.parse] | None = None


def _of_flat(given: dict[str, Any]) -> dict[str, Any]:
    """Return a CalendarRequest's fields of keywords that may be those of its plan."""
    names = [field.name for field in fields(CalendarRequest)]
    own = {name: value for name, value in given.items() if name in names}
    plan = {name: value for name, value in given.items() if name not in names}
    if not plan and not isinstance(own.get("plan"), Mapping):
        return own
    asked = own.get("plan", {})
    if isinstance(asked, Mapping):
        return own | {"plan": PlanRequest(**{**asked, **plan})}
    return own | {"plan": replace(asked, **plan)}


@codec.takes_more(_of_flat)
@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarRequest(Request):
    """A plan with its `tokens`, or phases that have their own, and what is assumed beside steps.
    Without a number of GPUs, `deadline` asks for the fewest and `budget` for the most."""

    plan: PlanRequest
    phases: tuple[TrainingPhase, ...] = ()
    assumptions: Mapping[str, Any] = field(default_factory=dict)
    assume: tuple[str, ...] = flag(
        "replace an assumption, such as detect_s=2min", "NAME=VALUE", repeated=True, default=()
    )
    deadline: Annotated[float, days_from] | None = flag(
        "deadline, such as 30d: shows the chance to meet it, and the fewest GPUs that do", "DAYS"
    )
    budget: Annotated[int, budget_from] | None = flag(
        "budget, such as 5M: shows the most GPUs whose cost stays within it (needs a price)", "X"
    )
    chance: Share = flag(
        "required chance to meet deadline and budget (default 80%)", "SHARE", default=0.8
    )
    curve: bool = False  # also other numbers of GPUs, for a picture

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        for name in ("deadline", "budget"):
            value = getattr(self, name)
            check.that(value is None or value > 0, name, value, "must be above 0")
        check.that(0 < self.chance < 1, "chance", self.chance, "must be between 0 and 1")
        asked = self.chance == 0.8 or self.deadline is not None or self.budget is not None
        check.that(asked, "chance", self.chance, "needs a deadline or a budget")
        if not self.phases and self.plan.tokens is None:
            raise UserError("is required", field="tokens", hint="such as --tokens 2T")

    def assumed(self) -> Assumptions:
        given = dict(self.assumptions)
        for text in self.assume:
            name, equals, value = text.partition("=")
            check.that(bool(equals), "assume", text, "must be NAME=VALUE")
            given[name.strip()] = value.strip()
        return defaults().changed(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarPoint:
    """A training on one number of GPUs; `low` and `high` are of the 80% interval. Shares are of its
    time, `goodput` the share of steps that count. GPU-hours, cost and energy are of these GPUs;
    `spare_gpu_hours` and `spare_cost` come on top where spare hosts are paid for."""

    gpus: int
    layouts: tuple[str, ...] = ()
    step_s: tuple[float, ...] = ()
    steps: int = 0
    days: float = 0.0
    days_low: float = 0.0
    days_high: float = 0.0
    gpu_hours: float = 0.0
    energy_mwh: float = 0.0
    cost: float | None = None
    goodput: float = 0.0
    interruptions: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_bytes: float = 0.0
    spare_hosts: int = 0
    spare_gpu_hours: float = 0.0
    spare_cost: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    in_time: float | None = None  # chances
    in_budget: float | None = None
    reason: str = ""
    step_times: tuple[str, ...] = ()  # whose they are, phase by phase

    def meets(self, request: CalendarRequest) -> bool:
        chances = (one for one in (self.in_time, self.in_budget) if one is not None)
        return not self.reason and all(chance >= request.chance for chance in chances)

    def flat(self) -> dict[str, Any]:
        shares = {f"{name}_share": share for name, share in self.shares.items()}
        texts = {"layouts": "; ".join(self.layouts), "step_times": "; ".join(self.step_times)}
        lists = {**texts, "step_s": sum(self.step_s[:1])}
        return {**codec.encode(self), **lists, **shares, "shares": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar(Answer):
    """`best`: the number of GPUs asked for, or found; None where none meets what is asked."""

    model: str
    gpu: str
    tokens: int
    chance: float
    deadline: float | None
    budget: int | None
    points: tuple[CalendarPoint, ...]
    best: CalendarPoint | None
    assumptions: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        return [one.flat() for one in self.points]
