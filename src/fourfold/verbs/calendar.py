"""calendar: days, GPU-hours, cost and energy of a whole training, with chances; and how many GPUs
end it in time, or within a budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fourfold.cost.calendar.assumptions import Assumptions
from fourfold.cost.calendar.training import DAY_S, Phase, Spent, Training, training
from fourfold.cost.count.params import active_params
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.search.answer import answer
from fourfold.search.plan_answer import PlanAnswer
from fourfold.search.ranking import rank_layouts
from fourfold.spec import catalog, codec
from fourfold.verbs.calendar_request import Calendar, CalendarPoint, CalendarRequest, TrainingPhase
from fourfold.verbs.machine import known_cluster
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest

MOST_GPUS = 2**17
FAR_OVER = 4.0  # times the budget: no smaller number of GPUs is that much cheaper
USUAL_USE = 0.35  # of a GPU's peak: where the search for a number of GPUs begins


def calendar(request: CalendarRequest, *, on_event: OnEvent = ignore) -> Calendar:
    """The training on the GPUs asked for, or on as many as the deadline or the budget needs."""
    if not isinstance(request, CalendarRequest):
        hint = "make one: CalendarRequest(plan=PLAN_REQUEST, tokens='1T')"
        raise TypeError(f"needs a CalendarRequest, not a {type(request).__name__}; {hint}")
    search = _SizesTried(request, request.assumed(), on_event)
    search.check()
    best = search.best()
    if request.curve:
        search.around(best)
    points = tuple(search.tried[gpus] for gpus in sorted(search.tried))
    fails = [one for one in points if one.reason]
    if best is None and len(fails) == len(points):
        raise UserError(fails[-1].reason, field="gpus", value=fails[-1].gpus)
    return Calendar(
        model=search.model,
        gpu=search.gpu,
        tokens=sum(phase.tokens for phase in search.phases),
        chance=request.chance,
        deadline=request.deadline,
        budget=request.budget,
        points=points,
        best=best,
        assumptions=codec.encode(search.assumed),
    )


class _SizesTried:
    """Numbers of GPUs, each planned and dated once."""

    def __init__(self, request: CalendarRequest, assumed: Assumptions, on_event: OnEvent) -> None:
        self.request, self.assumed, self.on_event = request, assumed, on_event
        plan = request.plan
        self.phases = request.phases or (TrainingPhase(tokens=plan.tokens or 0, ramp=plan.ramp),)
        self.tried: dict[int, CalendarPoint] = {}
        self.model = self.gpu = ""
        self.most = known_cluster(plan.cluster, 0).gpus if plan.cluster else MOST_GPUS
        self.is_fixed = plan.gpus is not None or any(one.gpus for one in self.phases)

    def check(self) -> None:
        asked = self.request.deadline is not None or self.request.budget is not None
        if not asked and not self.is_fixed and not self.request.plan.cluster:
            hint = "or --deadline 30d or --budget 5M, which find it"
            raise UserError("is required", field="gpus", hint=hint)

    def best(self) -> CalendarPoint | None:
        request = self.request
        if self.is_fixed or (request.deadline is None and request.budget is None):
            fixed = [one.gpus or 0 for one in self.phases]
            return self.at(request.plan.gpus or max(fixed) or self.most)
        ladder = [gpus for gpus in _ladder() if gpus <= self.most]
        place = min(range(len(ladder)), key=lambda i: abs(ladder[i] - self.guess()))
        if request.deadline is not None:
            return self.fewest(ladder, place)
        return self.largest(ladder, place)

    def fewest(self, ladder: list[int], place: int) -> CalendarPoint | None:
        while place > 0 and self.at(ladder[place]).reason:  # more than the batch can feed, perhaps
            place -= 1
        while place > 0 and self.meets(ladder[place]):
            place -= 1
        while place < len(ladder) and not self.meets(ladder[place]):
            if (self.at(ladder[place]).in_time or 0.0) >= self.request.chance:
                return None  # in time, but over the budget, as more are
            place += 1
        if place == len(ladder):
            return None
        below = ladder[place - 1] if place else 0
        return next(
            self.at(gpus)
            for gpus in (*_between(below, ladder[place]), ladder[place])
            if self.meets(gpus)
        )

    def largest(self, ladder: list[int], place: int) -> CalendarPoint | None:
        """The most GPUs within the budget: the fastest, where more are faster."""
        while place + 1 < len(ladder) and self.meets(ladder[place]):
            place += 1
        while place >= 0 and not self.meets(ladder[place]):
            if (self.at(ladder[place]).cost or 0.0) > FAR_OVER * (self.request.budget or 0):
                break
            place -= 1
        within = [one for one in self.tried.values() if one.meets(self.request)]
        return min(within, key=lambda one: one.days, default=None)

    def around(self, best: CalendarPoint | None) -> None:
        """From an eighth to eight times as many."""
        middle = best.gpus if best is not None else max(self.tried)
        for gpus in _ladder():
            if middle <= 8 * gpus <= 64 * middle and gpus <= self.most and not self.is_phased():
                self.at(gpus)

    def is_phased(self) -> bool:
        return any(one.gpus for one in self.phases)

    def meets(self, gpus: int) -> bool:
        return self.at(gpus).meets(self.request)

    def guess(self) -> float:
        """GPUs that the deadline, or a month, needs at a usual share of the peak."""
        plan = self.request.plan
        shape = catalog.model(plan.model) if isinstance(plan.model, str) else plan.model
        device = (
            known_cluster(plan.cluster, 0).device
            if plan.cluster
            else catalog.device(plan.gpu or "")
        )
        tokens = sum(one.tokens for one in self.phases)
        flops = 6.0 * active_params(shape, plan.seq_len).all * tokens
        days = self.request.deadline or 30.0
        return flops / (USUAL_USE * device.peak("bf16") * days * DAY_S)

    def at(self, gpus: int) -> CalendarPoint:
        if gpus not in self.tried:
            self.on_event(Event(f"{gpus} GPUs", "progress"))
            self.tried[gpus] = self.dated(gpus)
        return self.tried[gpus]

    def dated(self, gpus: int) -> CalendarPoint:
        plans = []
        for one in self.phases:
            try:
                found = self.planned(one, one.gpus or gpus)
            except UserError as error:
                if self.is_fixed:
                    raise
                return CalendarPoint(gpus=gpus, reason=str(error))
            if found.best is None and self.is_fixed:
                raise UserError(found.reason, field="gpus", value=gpus)
            if found.best is None:
                return CalendarPoint(gpus=gpus, reason=found.reason)
            plans.append(found)
        self.model, self.gpu = plans[0].model, plans[0].gpu
        estimate = training([_phase(plan) for plan in plans], self.assumed)
        if not estimate.ends:
            most = max(plan.gpus for plan in plans)
            a_day = most * self.assumed.failures_per_gpu_day.value
            rule = (
                f"are interrupted {a_day:.3g} times a day, so that this training does not end: "
                "detection, restart and lost steps take almost all of the time"
            )
            hint = "use fewer GPUs or a lower --assume failures_per_gpu_day"
            if self.is_fixed:
                raise UserError(rule, field="gpus", value=gpus, hint=hint)
            return CalendarPoint(gpus=gpus, reason=rule)
        return _point(self.request, gpus, plans, estimate, self.assumed)

    def planned(self, one: TrainingPhase, gpus: int) -> PlanAnswer:
        """The phase's first choice; its seconds are those of the steps alone."""
        changes = {
            name: getattr(one, name)
            for name in ("seq_len", "global_batch")
            if getattr(one, name) is not None
        }
        plan = replace(
            self.request.plan,
            gpus=gpus,
            max_nodes=None,
            tokens=one.tokens,
            ramp=one.ramp,
            lost=0.0,
            top=1,
            **changes,
        )
        quiet = self.on_event if not self.tried else ignore
        query, _ = resolved(plan, quiet)
        return answer(rank_layouts(query, least=1), top=1)


def _ladder() -> Iterator[int]:
    """1, 2, 4, 8, 16, 24, 32, 48 and so on: whole hosts, by half or a third more each time."""
    yield from (1, 2, 4, 8)
    hosts = 2
    while 8 * hosts <= MOST_GPUS:
        yield 8 * hosts
        if hosts > 1 and 12 * hosts <= MOST_GPUS:
            yield 12 * hosts
        hosts *= 2


def _between(below: int, above: int) -> list[int]:
    """Whole hosts between two numbers of GPUs, at most three."""
    found = (below + round((above - below) * part / 32.0) * 8 for part in (1, 2, 3))
    return sorted({gpus for gpus in found if below < gpus < above and below >= 8})


def _point(
    request: CalendarRequest,
    gpus: int,
    plans: list[PlanAnswer],
    found: Training,
    assumed: Assumptions,
) -> CalendarPoint:
    rows = [plan.ranked[0] for plan in plans]
    price = _price(request.plan)
    spares = found.spare_hosts * plans[0].host_gpus * found.total_s / 3600.0
    cost = None if price is None else price * found.gpu_hours
    if request.budget is not None and cost is None:
        raise UserError("is required with a budget", field="price", hint="such as --price 2.5")
    deadline, budget = request.deadline, request.budget
    return CalendarPoint(
        gpus=gpus,
        layouts=tuple(f"{row} micro batch {row.micro_batch}" for row in rows),
        step_s=tuple(row.step_s for row in rows),
        steps=sum(plan.training["steps"] for plan in plans),
        days=found.total_s / DAY_S,
        days_low=found.within_s(0.1) / DAY_S,
        days_high=found.within_s(0.9) / DAY_S,
        gpu_hours=found.gpu_hours,
        energy_mwh=found.energy_j / 3.6e9,
        cost=cost,
        goodput=found.goodput,
        interruptions=found.interruptions,
        checkpoint_s=float(found.parts[0].interval_s[0]),
        checkpoint_bytes=plans[0].params * assumed.state_bytes_per_param.value,
        spare_hosts=found.spare_hosts,
        spare_gpu_hours=spares,
        spare_cost=None if price is None else price * spares,
        shares=_shares(found),
        step_times=tuple(dict.fromkeys(plan.step_times for plan in plans)),
        in_time=None if deadline is None else found.chance(deadline * DAY_S),
        in_budget=None
        if budget is None or cost is None
        else found.chance(found.total_s * budget / cost),
    )


def _phase(plan: PlanAnswer) -> Phase:
    row = plan.ranked[0]
    return Phase(
        gpus=plan.gpus,
        host_gpus=plan.host_gpus,
        work_s=row.training_s or 0.0,
        params=plan.params,
        low=row.step_s_low / row.step_s,
        high=row.step_s_high / row.step_s,
        power_w=row.power_w,
    )


def _price(plan: PlanRequest) -> float | None:
    if plan.price is not None or not plan.cluster:
        return plan.price
    return known_cluster(plan.cluster, plan.gpus or 0).price_per_gpu_hour


def _shares(found: Training) -> dict[str, float]:
    return {
        name: sum(float(getattr(part, f"{name}_s")[0]) for part in found.parts) / found.total_s
        for name in Spent.PARTS
    }
