"""Errors that a user can fix: what is wrong, the rule it breaks, and what to do instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """A bad request, as a sentence: subject, rule, hint.

    `rule` is a predicate ("must be above 0") of the subject that `field` and `value` make, or
    "unknown THING". Without either it is a whole sentence. A field is a path in nested data and
    grows while the error travels out; it may be a flag. `source` is the file that holds it.
    """

    status = 2

    def __init__(
        self, rule: str, *, field: str = "", value: object = None, hint: str = "", source: str = ""
    ) -> None:
        super().__init__(rule)
        self.rule = rule
        self.field = field
        self.value = value
        self.hint = hint
        self.source = source

    def within(self, path: str) -> UserError:
        """The same error, seen from the table `path` that holds the field."""
        field = f"{path}.{self.field}" if path and self.field else path or self.field
        return self._with(field=field)

    def inside(self, source: object) -> UserError:
        """The same error, of a value that stands in the file `source`."""
        return self._with(source=self.source or str(source))

    def named(self, flag: str) -> UserError:
        """The same error, of a value that the command line gave by `flag`."""
        return self._with(field=flag, source="")

    def _with(self, **changes: str) -> UserError:
        parts = {"field": self.field, "hint": self.hint, "source": self.source} | changes
        return type(self)(self.rule, value=self.value, **parts)

    def __str__(self) -> str:
        text = sentence(self.rule, field=self.field, value=self.value, source=self.source)
        return f"{text}; {self.hint}" if self.hint else text


@contextlib.contextmanager
def inside(source: object) -> Iterator[None]:
    """What is wrong with a value that is read here stands in the file `source`."""
    try:
        yield
    except UserError as error:
        raise error.inside(source) from None


class MachineError(UserError):
    """The request was good, the machine could not do it: a full disk, a failing device."""

    status = 1


def sentence(rule: str, *, field: str = "", value: object = None, source: str = "") -> str:
    """'--gpus 4 must be ...', 'batch.seq_len = 0 in run.toml must be ...', 'unknown GPU 'h10''."""
    field = shorten(field, 200) if len(field) > 200 else field
    if rule.startswith("unknown ") and (field or value is not None):
        what = field if value is None else f"'{shorten(value) if value else ''}'"
        return f"{rule} {what}{f' in {source}' if source else ''}"
    subject = _subject(field, value, source)
    return f"{subject} {rule}" if subject else rule


def _subject(field: str, value: object, source: str) -> str:
    if value is None:
        return f"{field} in {source}" if field and source else field or source
    shown = shorten(value)
    if isinstance(value, str) and (" " in shown or not field) and not shown.startswith("'"):
        shown = f"'{shown}'"
    if source:
        return f"{field} = {shown} in {source}" if field else f"{shown} in {source}"
    # A name reads as one ("model mpt-7b"), a number as a setting ("gpus=4"), a flag as typed.
    is_name = isinstance(value, str) and "." not in field
    is_flag = field.startswith("--") and " " not in field
    return f"{field} {shown}".strip() if is_name or is_flag else f"{field}={shown}"


def shorten(value: object, limit: int = 80) -> str:
    """A value as one short printable line, whatever the user typed."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # whole numbers of 4300 digits and more, deep nesting
        text = f"({type(value).__name__} too large to print)"
    text = text if text and text.isprintable() else ascii(text)
    if len(text) <= limit:
        return text
    # The end of a path names the file.
    return f"...{text[3 - limit :]}" if text.startswith("/") else f"{text[: limit - 3]}..."


def install(package: str) -> str:
    """How to add a package where this process would find it: './fourfold' has its own folder."""
    import sys

    return f"run '{sys.executable} -m pip install {package}'"


def lacks(package: str) -> UserError:
    """What to say where a package of the extra [run] is missing: planning works without."""
    rule = f"this command needs the package {package}, which is not installed"
    return UserError(rule, hint=install("'fourfold[run]'"))


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean ...' for a misspelt or shortened name, else the list of names."""
    import difflib  # 10 ms, only paid on an error

    names, plain = sorted(known), word[:200].replace("-", "")
    longer = [name for name in names if plain and name.replace("-", "").startswith(plain)]
    cutoff = 0.0 if longer else 0.55
    close = difflib.get_close_matches(word[:200], longer or names, n=1, cutoff=cutoff)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}" if names else "none are known"
