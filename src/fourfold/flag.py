"""The command-line flag of a field, as data beside the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Option(NamedTuple):
    """A flag, or an argument without dashes. The field it sets says what is left out here: its
    name, how its text is read, whether it is a switch or a list."""

    names: tuple[str, ...] = ()
    help: str = ""
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    nargs: str | None = None
    repeated: bool = False  # may be given several times; the values are a list
    switch: bool = False
    pair: bool = False  # --name and --no-name
    required: bool = False
    dest: str = ""
    group: str = ""
    either: str = ""  # of the options that share this word at most one may be given
    rare: bool = False  # only in --help-all

    @property
    def key(self) -> str:
        """The name of its value among the parsed arguments."""
        return self.dest or self.names[-1].lstrip("-").replace("-", "_")


def flag(text: str, metavar: str | None = None, **rest: Any) -> dict[str, Option]:
    """Metadata of a dataclass field that a flag sets."""
    return {"flag": Option(help=text, metavar=metavar, **rest)}
