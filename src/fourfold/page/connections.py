"""Connections of the server: so many and no more, each with some seconds for its next request."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

REQUEST_WITHIN_S = 10.0
# Connections that are taken at once; three times as many may be before the first is looked at.
BACKLOG = 32
# Files that the app itself needs open: plans, runs that it reads.
_OWN_FILES = 32
_SAY_EVERY_S = 60.0


def most_connections() -> int:
    """As the limit on open files allows."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(8, min(512, allowed - 4 * BACKLOG - _OWN_FILES))


def protocol() -> type:
    """uvicorn's own, with limits."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return type("Connection", (Limited, H11Protocol), {"most": most_connections()})


class Limited:
    """Closed where a request takes too long to arrive. Where there are too many, the one that has
    waited longest for a request gives way; the new one is among them."""

    most: int
    loop: asyncio.AbstractEventLoop
    connections: set[Any]
    transport: Any
    cycle: Any
    _said_at, _closed = -_SAY_EVERY_S, 0
    _timer: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._await_request()
        if len(self.connections) > self.most:
            min((one for one in self.connections if one.idle), key=lambda one: one.since_s).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)  # type: ignore[misc]

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        self._await_request()

    @property
    def idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_request(self) -> None:
        self.since_s = self.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_WITHIN_S, lambda: self.idle and self.drop())

    def drop(self) -> None:
        self.connections.discard(self)
        self.transport.abort()
        Limited._closed += 1
        if self.loop.time() - Limited._said_at >= _SAY_EVERY_S:
            text = "closed %d connections: at most %d, each with a request within %.0f s"
            said = (Limited._closed, self.most, REQUEST_WITHIN_S)
            logging.getLogger("uvicorn.error").error(text, *said)
            Limited._said_at, Limited._closed = self.loop.time(), 0
