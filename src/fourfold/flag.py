"""The command-line flag of a field, as data beside the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the values of a command's flags by name
    from argparse import Namespace as Arguments  # noqa: F401, TID251 -- the type alone


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

    @property
    def takes_value(self) -> bool:
        return not self.switch and not self.pair


def flag(text: str, metavar: str | None = None, *, default: Any = None, **rest: Any) -> Any:
    """A field of a dataclass that a flag sets; `default` MISSING: it must be given."""
    return field(default=default, metadata={"flag": Option(help=text, metavar=metavar, **rest)})
