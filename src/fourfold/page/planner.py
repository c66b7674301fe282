"""Plans in a few processes of their own, small questions first, equal ones once, so that a query
that nobody waits for any more can be ended and a costly one keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import fourfold
from fourfold.cost.fit import calibration as calibrations
from fourfold.errors import UserError
from fourfold.page.plan import plan_data
from fourfold.page.run_details import layout_table, plan_command
from fourfold.page.turns import QueuedCall, Turns
from fourfold.search.compare import WORTH_TRYING
from fourfold.spec.layout import AXES, SIZES
from fourfold.verbs.question import EXPORTED, resolved
from fourfold.verbs.requests import PlanRequest

# Answers that are kept: some 50 KB each; longer tables are not.
MOST_KEPT, _KEPT_ROWS = 256, 100
# Layouts by policies that are tried: the largest question that is taken needs some twenty CPU
# seconds and a gigabyte.
MAX_CANDIDATES = 10_000_000
# An engine's search of one number of GPUs takes a while however few its candidates are.
_SEARCH_S, _CANDIDATES_PER_S = 0.15, 500_000.0
_MAX_CPU_S = MAX_CANDIDATES / _CANDIDATES_PER_S
MOST_CPU_S, MOST_BYTES = 120, 4 * 2**30
# How often a waiting query asks whether its client is still there.
_ASK_EVERY_S = 0.2
# Left open, these multiply the layouts by about so much; a first look does without them.
_FIRST_LOOK = {"virtual_stages": 1, "cp_kind": "ring"}
_BY_FIELD = {"virtual_stages": 8, "cp_kind": 3}


class SupersededError(Exception):
    """A newer query of the same view took this one's place, or its client left."""


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedPlan(QueuedCall):
    """A view's question; `turn` is also set when it was ended before."""

    view: str
    request: PlanRequest
    ended: bool = False
    process: BaseProcess | None = None

    def end(self) -> None:
        self.ended = True
        self.turn.set()
        if self.process is not None:
            self.process.kill()


class Planner(Turns[QueuedPlan]):
    """One question a view: the next query of a view ends the one before."""

    def __init__(self) -> None:
        super().__init__()
        self._context = multiprocessing.get_context("forkserver")
        # Imported once: a plan's process is a copy that begins at once.
        self._context.set_forkserver_preload([__name__])
        self.kept: dict[str, dict[str, Any]] = {}  # by question, the last asked for last

    async def plan(
        self,
        view: str,
        request: PlanRequest,
        gone: Callable[[], Awaitable[bool]],
        *,
        client: str = "",
        cost_s: float = 0.0,
    ) -> dict[str, Any]:
        """The data of a plan's view; `gone`: whether the client has left."""
        question = repr(request)
        if (known := self._known(question)) is not None:
            self._supersede(view)
            return known
        self._supersede(view)
        ticket = QueuedPlan(view=view, client=client, request=request, cost_s=cost_s)
        self.enter(ticket)
        try:
            while not await _within(ticket.turn.wait(), _ASK_EVERY_S):
                if await gone():
                    raise SupersededError
            if ticket.ended:
                raise SupersededError
            # Somebody else may have asked the same meanwhile.
            found = self._known(question) or await self._answer(ticket, gone)
            if request.top <= _KEPT_ROWS:
                self.kept[question] = found
            return found
        finally:
            self.leave(ticket)

    def _known(self, question: str) -> dict[str, Any] | None:
        """The answer that is kept, which makes it the last to be forgotten."""
        found = self.kept.pop(question, None)
        if found is not None:
            self.kept[question] = found
        while len(self.kept) > MOST_KEPT:
            del self.kept[next(iter(self.kept))]
        return found

    def _supersede(self, view: str) -> None:
        """End what waits or runs of the view's question before."""
        for other in [*self.waiting, *self.running]:
            if other.view == view:
                other.end()

    async def _answer(
        self, ticket: QueuedPlan, gone: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any]:
        ours, theirs = self._context.Pipe(duplex=False)
        given = (theirs, ticket.request, not ticket.is_small)
        ticket.process = process = self._context.Process(target=_work, args=given, daemon=True)
        process.start()
        theirs.close()
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(ours.fileno(), readable.set)
        try:
            while not await _within(readable.wait(), _ASK_EVERY_S):
                if await gone():
                    ticket.end()
            good, said = ours.recv()
        except (EOFError, OSError):
            process.join()
            raise _ended(process.exitcode, ticket) from None
        finally:
            loop.remove_reader(ours.fileno())
            process.join()
            ours.close()
        if not good:
            raise UserError(said)
        return said

    def close(self) -> None:
        for ticket in [*self.waiting, *self.running]:
            ticket.end()


async def _within(event: Awaitable[Any], seconds: float) -> bool:
    try:
        await asyncio.wait_for(event, seconds)
    except TimeoutError:
        return False
    return True


def _ended(code: int | None, ticket: QueuedPlan) -> Exception:
    """Why a process ended without an answer."""
    if ticket.ended:
        return SupersededError()
    if code == -signal.SIGXCPU:
        return too_much(ticket.request, f"{MOST_CPU_S} CPU seconds")
    return UserError("planning failed", hint="the server's log says why")


def too_much(request: PlanRequest, of: str) -> UserError:
    hint = (
        "fix some axes (such as tp8 pp4), or name fewer hosts; without a limit: "
        f"{plan_command(request)}"
    )
    return UserError(
        f"the question takes more than {of}, which is what this server gives", hint=hint
    )


def first_look(request: PlanRequest) -> PlanRequest:
    """The same question without context parallelism and virtual stages, unless they are asked for:
    its answer is there while the whole search still runs."""
    axes = layout_table(request.layout)
    layout = request.layout if "cp" in axes else {**axes, "cp": 1}
    return replace(request, policy={**_FIRST_LOOK, **request.policy}, layout=layout)


def estimated_cpu_s(request: PlanRequest) -> float:
    """Return the CPU seconds that a search takes, about, by its number of candidates; a question
    that is larger than this server answers is refused."""
    query, counts = resolved(request)
    fixed = query.fixed
    axes = [size for axis in AXES if isinstance(size := fixed.get(axis), int)]
    free = len(SIZES) - len(axes) - ("dp" in fixed)  # dp is two of the sizes
    policies = math.prod(times for name, times in _BY_FIELD.items() if name not in fixed)
    experts = query.model.experts if "ep" not in fixed else 1
    engines = 1 if request.stack or request.export else 1 + len(EXPORTED)  # each is asked
    cpu_s = 0.0
    for gpus in counts:
        if gpus < WORTH_TRYING * counts[0] or cpu_s > _MAX_CPU_S:
            break
        candidates = (
            policies
            * _products(gpus // math.prod(axes), free)
            * _products(math.gcd(experts, gpus), 2)
        )
        cpu_s += engines * (_SEARCH_S + candidates / _CANDIDATES_PER_S)
    if cpu_s > _MAX_CPU_S:
        raise too_much(request, f"{MAX_CANDIDATES:,} layouts and policies")
    return cpu_s


def _products(number: int, factors: int) -> int:
    """In how many ways a number is a product of so many factors, in their order."""
    ways, prime = 1, 2
    while number > 1 and factors > 1:
        power = 0
        while number % prime == 0:
            number, power = number // prime, power + 1
        ways *= math.comb(power + factors - 1, factors - 1)
        prime = prime + 1 if prime * prime <= number else max(number, prime + 1)
    return ways


def _work(answer: Connection, request: PlanRequest, large: bool) -> None:
    """In the plan's own process."""
    if large:
        os.nice(10)
    full = str(too_much(request, f"{MOST_BYTES >> 30} GiB"))
    answer_within_limits(answer, lambda: plan_data(fourfold.plan(request), request), full)


def answer_within_limits(answer: Connection, found: Callable[[], Any], full: str) -> None:
    """What a process of its own does, which ends where it takes too much time; `full`: what it
    says where it takes too much memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    try:
        answer.send((True, found()))
    except UserError as error:
        answer.send((False, str(error)))
    except MemoryError:
        answer.send((False, full))


calibrations.shipped()  # read once, for every copy of this process
