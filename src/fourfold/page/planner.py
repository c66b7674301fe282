"""Plans in processes of their own, so that a query that nobody waits for any more can be ended."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import fourfold
from fourfold.cost.fit import calibration as calibrations
from fourfold.errors import UserError
from fourfold.page.command import layout_table
from fourfold.page.plan import plan_data
from fourfold.verbs.requests import PlanRequest

# How often a waiting query asks whether its client is still there.
_ASK_EVERY_S = 0.1
# Left open, these multiply the layouts by fifty; a first look does without them.
_FIRST_LOOK = {"virtual_stages": 1, "cp_kind": "ring"}


class SupersededError(Exception):
    """A newer query of the same view took this one's place, or its client left."""


class Planner:
    """One running plan a view: the next query of a view ends the one before."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # Imported once: a plan's process is a copy that begins at once.
        self._context.set_forkserver_preload([__name__])
        self._running: dict[str, Any] = {}

    async def plan(
        self, view: str, request: PlanRequest, gone: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any]:
        """The data of a plan's view; `gone`: whether the client has left."""
        self.end(view)
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(theirs, request), daemon=True)
        process.start()
        theirs.close()
        self._running[view] = process
        answer = asyncio.get_running_loop().run_in_executor(None, ours.recv)
        try:
            while not (await asyncio.wait({answer}, timeout=_ASK_EVERY_S))[0]:
                if await gone():
                    process.kill()
            good, said = await answer
        except (EOFError, OSError):
            if process.exitcode is not None and process.exitcode > 0:
                raise UserError("planning failed", hint="the server's log says why") from None
            raise SupersededError from None
        finally:
            if self._running.get(view) is process:
                del self._running[view]
            process.join()
            ours.close()
        if not good:
            raise UserError(said)
        return said

    def end(self, view: str) -> None:
        process = self._running.pop(view, None)
        if process is not None:
            process.kill()

    def close(self) -> None:
        for view in list(self._running):
            self.end(view)


def first_look(request: PlanRequest) -> PlanRequest:
    """The same question without context parallelism and virtual stages, unless they are asked for:
    its answer is there while the whole search still runs."""
    axes = layout_table(request.layout)
    layout = request.layout if "cp" in axes else {**axes, "cp": 1}
    return replace(request, policy={**_FIRST_LOOK, **request.policy}, layout=layout)


def _work(answer: Connection, request: PlanRequest) -> None:
    """In the plan's own process."""
    try:
        found = fourfold.plan(request)
        answer.send((True, plan_data(found, request)))
    except UserError as error:
        answer.send((False, str(error)))


calibrations.shipped()  # read once, for every copy of this process
