"""Chrome traces (PyTorch's profiler, Kineto), plain or gzip, read in pieces: a gigabyte needs a few
megabytes beside what is kept of it."""

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
# No event, and nothing beside the events, is longer.
_MOST_CHARS = 64 * 2**20
_BETWEEN = re.compile(r"\}\s*,\s*(?=\{)")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_TRIES = 4
_MAKE = "profile again; such traces come from torch.profiler's export_chrome_trace"
GZIP_MAGIC = b"\x1f\x8b"


class ChromeReader:
    """`events` yields them in lists, as far as they are objects; then `meta` has what stands beside
    them."""

    def __init__(self, path: Path) -> None:
        self.path, self.meta = path, {}
        self._text, self._ended = "", False

    def events(self) -> Iterator[list[dict[str, Any]]]:
        try:
            with files.open_regular(self.path, field="trace") as plain:
                is_gzip = plain.read(2) == GZIP_MAGIC
                plain.seek(0)
                stream = gzip.GzipFile(fileobj=plain) if is_gzip else plain
                yield from self._events(stream)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            self._refuse("is cut off or damaged inside its gzip data")
        except OSError as error:
            raise refused(error, self.path, field="trace", verb="read") from None
        except RecursionError:
            self._refuse("is nested too deeply for a trace")

    def _events(self, stream: BinaryIO | gzip.GzipFile) -> Iterator[list[dict[str, Any]]]:
        decoder = getincrementaldecoder("utf-8")(errors="replace")

        def more() -> None:
            piece = stream.read(_PIECE_BYTES)
            self._ended = not piece
            self._text += decoder.decode(piece, final=self._ended)

        more()
        text = self._text.lstrip("\ufeff \t\r\n")
        if text[:1] not in ("{", "["):
            self._refuse("is not a trace: neither JSON nor an nsys export in SQLite")
        self._text = text[1:]
        is_object = text[0] == "{"
        if is_object:
            self._read_head(more)
        yield from self._read_array(more, must_close=is_object)
        while not self._ended and len(self._text) < _MOST_CHARS:
            more()
        if is_object:
            self.meta |= self._object("{" + self._text.strip().removeprefix(","))

    def _read_head(self, more: Any) -> None:
        """Up to the events: what stands before them is an object of its own."""
        at = 0
        while True:
            for found in _EVENTS.finditer(self._text, at):
                head = self._text[: found.start()].rstrip()
                try:
                    self.meta = json.loads("{" + head.removesuffix(",") + "}")
                except ValueError:
                    continue  # inside a text or a deeper object
                self._text = self._text[found.end() :]
                return
            if self._ended or len(self._text) > _MOST_CHARS:
                self._no_events()
            at = max(0, len(self._text) - 64)
            more()

    def _no_events(self) -> NoReturn:
        try:
            plain = json.loads("{" + self._text) if self._ended else {}
        except ValueError:
            self._refuse("is cut off, or no JSON, before its traceEvents begin")
        named = ", ".join(list(plain)[:5])
        self._refuse(f"has no traceEvents (it has {named})" if named else "has no traceEvents")

    def _read_array(self, more: Any, *, must_close: bool) -> Iterator[list[dict[str, Any]]]:
        while True:
            whole = self._whole_events()
            if whole is not None:
                yield _objects(whole)
                if not self._ended:
                    more()
                continue
            closed = self._closed_array()
            if closed is not None:
                yield _objects(closed)
                return
            if self._ended:
                if must_close:
                    self._refuse("is cut off or damaged: its list of events does not end")
                yield _objects(self._unclosed_array())
                return
            if len(self._text) > _MOST_CHARS:
                self._refuse("has an event of over 64 MB, or is no list of events")
            more()

    def _whole_events(self) -> list[Any] | None:
        """All that surely are complete, if more are to come after them; takes them off the text."""
        start = max(0, len(self._text) - 2**16)
        ends = [found.start() + 1 for found in _BETWEEN.finditer(self._text, start)]
        for end in reversed(ends[-_TRIES:]):
            try:
                events = json.loads("[" + self._text[:end] + "]")
            except ValueError:
                continue  # between objects of one event
            self._text = self._text[end:].lstrip(", \t\r\n")
            return events
        return None

    def _closed_array(self) -> list[Any] | None:
        try:
            events, end = json.JSONDecoder().raw_decode("[" + self._text)
        except ValueError:
            return None
        self._text = self._text[end - 1 :]
        return events

    def _unclosed_array(self) -> list[Any]:
        """Chrome's own list may lack its end."""
        try:
            return json.loads("[" + self._text.rstrip(", \t\r\n") + "]")
        except ValueError:
            self._refuse("is cut off, or no JSON, within its events")

    def _object(self, text: str) -> dict[str, Any]:
        try:
            return json.loads(text)
        except ValueError:
            self._refuse("is cut off or damaged after its events")

    def _refuse(self, rule: str) -> NoReturn:
        raise UserError(rule, field="trace", value=str(self.path), hint=_MAKE) from None


def _objects(events: list[Any]) -> list[dict[str, Any]]:
    return [event for event in events if isinstance(event, dict)]
