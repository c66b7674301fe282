"""Chrome traces (PyTorch's profiler, Kineto), plain or gzip, read in pieces: a gigabyte needs a few
megabytes beside what is kept of it, and the time grows with the bytes, whatever they hold."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from fourfold import files
from fourfold.errors import UserError
from fourfold.files import refused

_PIECE_BYTES = 4 * 2**20
_MAX_TRACE_CHARS = 16 * 2**30
_MAX_EVENT_CHARS = 2**20
# A member beside the events: the process groups of 16,000 ranks have a few megabytes.
_MAX_MEMBER_CHARS = 16 * 2**20
# The last event of a piece that surely ends there is looked for in so many characters.
_TAIL_CHARS = 2**16
_BETWEEN = re.compile(r"\}\s*,\s*(?=\{)")
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_MAKE = "profile again; such traces come from torch.profiler's export_chrome_trace"
_LOG_OR_MAKE = "a run's log is read by 'fourfold collect'; traces come from torch.profiler or nsys"
GZIP_MAGIC = b"\x1f\x8b"
_read_value = json.JSONDecoder().raw_decode


class ChromeReader:
    """Reader of one file. `events` yields lists of objects; afterwards `meta` has the members that
    stand beside the events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        # What is read and not yet taken: the text from `_at` on.
        self._text, self._at, self._ended = "", 0, False
        self._num_chars = 0
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def events(self) -> Iterator[list[dict[str, Any]]]:
        try:
            with files.open_regular(self.path, field="trace") as plain:
                is_gzip = plain.read(2) == GZIP_MAGIC
                plain.seek(0)
                self._stream = gzip.GzipFile(fileobj=plain) if is_gzip else plain
                yield from self._events()
        except (gzip.BadGzipFile, EOFError, zlib.error):
            self._refuse("is cut off or damaged inside its gzip data")
        except OSError as error:
            raise refused(error, self.path, field="trace", verb="read") from None
        except RecursionError:
            self._refuse("is nested too deeply for a trace")

    _stream: BinaryIO | gzip.GzipFile

    def _events(self) -> Iterator[list[dict[str, Any]]]:
        self._more()
        self._text = self._text.removeprefix("\ufeff")
        first = self._next()
        if first not in ("{", "["):
            rule = "is not a trace: neither JSON nor an nsys export in SQLite"
            self._refuse(rule, _LOG_OR_MAKE)
        self._at += 1
        if first == "[":  # Chrome's own list of events, which may lack its end
            if self._next() not in ("{", "]"):
                self._refuse("is not a trace: a list, but not of events", _LOG_OR_MAKE)
            yield from self._read_array(must_close=False)
            return
        self._read_head()
        yield from self._read_array(must_close=True)
        self._read_tail()

    def _more(self, num_bytes: int = _PIECE_BYTES) -> None:
        piece = self._stream.read(num_bytes)
        self._ended = not piece
        text = self._decoder.decode(piece, final=self._ended)
        self._num_chars += len(text)
        if self._num_chars > _MAX_TRACE_CHARS:
            rule = f"has over {_MAX_TRACE_CHARS / 2**30:g} GiB of text"
            self._refuse(rule, "profile fewer steps")
        self._text, self._at = self._text[self._at :] + text, 0

    def _next(self) -> str:
        """Return the next character that is no white space, '' at the end of the file."""
        while True:
            match = _NOT_SPACE.search(self._text, self._at)
            self._at = match.start() if match else len(self._text)
            if match or self._ended:
                return match[0] if match else ""
            self._more()

    def _read_head(self) -> None:
        """Read the members before the events, each of them once, and the bracket of the events."""
        while True:
            name = self._member() if self._next() == '"' else None
            if not isinstance(name, str) or self._next() != ":":
                self._no_events()
            self._at += 1
            if self._next() == "[" and name == "traceEvents":
                self._at += 1
                return
            self.meta[name] = self._member()
            if self._next() != ",":
                self._no_events()
            self._at += 1

    def _member(self) -> Any:
        """Take one value. An incomplete one is tried again with twice the text, so that the time
        grows with its length."""
        while True:
            try:
                value, end = _read_value(self._text, self._at)
            except ValueError:
                if self._ended or len(self._text) - self._at > _MAX_MEMBER_CHARS:
                    self._refuse(
                        "is cut off, or no JSON, before its traceEvents begin", _LOG_OR_MAKE
                    )
            else:
                if end < len(self._text) or self._ended:  # else a number may go on
                    self._at = end
                    return value
            self._more(max(_PIECE_BYTES, len(self._text) - self._at))

    def _no_events(self) -> NoReturn:
        if self._next() != "}":
            self._refuse("is cut off, or no JSON, before its traceEvents begin", _LOG_OR_MAKE)
        names = ", ".join(list(self.meta)[:5])
        rule = f"has no traceEvents (it has {names})" if names else "has no traceEvents"
        self._refuse(rule, _LOG_OR_MAKE)

    def _read_array(self, *, must_close: bool) -> Iterator[list[dict[str, Any]]]:
        while True:
            events = self._events_of_piece()
            if not events:
                events, is_closed = self._events_in_turn()
                if is_closed or (self._ended and not must_close and not self._next()):
                    yield self._checked(events)
                    return
                if self._ended:
                    within = (
                        "its list of events does not end" if must_close else "within its events"
                    )
                    self._refuse(f"is cut off or damaged: {within}")
                if len(self._text) - self._at > _MAX_EVENT_CHARS:
                    self._refuse("has an event of over 1 MB, or is no list of events")
            yield self._checked(events)
            if not self._ended:
                self._more()

    def _events_of_piece(self) -> list[Any]:
        """Take all events before the last boundary in sight, at once; none where that boundary lies
        inside of an event."""
        start = max(self._at, len(self._text) - _TAIL_CHARS)
        ends = [match.start() + 1 for match in _BETWEEN.finditer(self._text, start)]
        if not ends:
            return []
        try:
            events = json.loads("[" + self._text[self._at : ends[-1]] + "]")
        except ValueError:
            return []
        self._at = ends[-1]
        self._comma()
        return events

    def _comma(self) -> None:
        if self._next() == ",":
            self._at += 1

    def _events_in_turn(self) -> tuple[list[Any], bool]:
        """Take (events up to the first incomplete one, whether the list ended)."""
        events: list[Any] = []
        text = self._text
        while True:
            match = _NOT_SPACE.search(text, self._at)
            at = match.start() if match else len(text)
            if match and match[0] == "]":
                self._at = at + 1
                return events, True
            try:
                event, end = _read_value(text, at)
            except ValueError:
                return events, False
            match = _NOT_SPACE.search(text, end)
            if match is None and not self._ended:
                return events, False
            if match is not None and match[0] not in ",]":
                return events, False
            events.append(event)
            self._at = match.start() + (match[0] == ",") if match else len(text)

    def _checked(self, events: list[Any]) -> list[dict[str, Any]]:
        if not all(type(event) is dict for event in events):
            self._refuse("has events that are no objects")
        return events

    def _read_tail(self) -> None:
        """Read the members behind the events."""
        while not self._ended and len(self._text) - self._at < _MAX_MEMBER_CHARS:
            self._more(max(_PIECE_BYTES, len(self._text) - self._at))
        try:
            self.meta |= json.loads("{" + self._text[self._at :].strip().removeprefix(","))
        except ValueError:
            self._refuse("is cut off or damaged after its events")

    def _refuse(self, rule: str, hint: str = _MAKE) -> NoReturn:
        raise UserError(rule, field="trace", value=str(self.path), hint=hint) from None
