"""What a user can fix: an error that states field, value, rule and way out."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """A bad request. `field` grows a path while it travels out of nested data."""

    status = 2

    def __init__(self, rule: str, *, field: str = "", value: object = None, hint: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        self.field = field
        self.value = value
        self.hint = hint

    def within(self, path: str) -> UserError:
        """The same error, seen from the table `path` that holds the field."""
        field = f"{path}.{self.field}" if path and self.field else path or self.field
        return type(self)(self.rule, field=field, value=self.value, hint=self.hint)

    def __str__(self) -> str:
        where = self.field
        if self.value is not None:
            where = f"{where}={shorten(self.value)}" if where else shorten(self.value)
        text = f"{where}: {self.rule}" if where else self.rule
        return f"{text}; {self.hint}" if self.hint else text


class MachineError(UserError):
    """The request was good, the machine could not do it: a full disk, a failing device."""

    status = 1


def shorten(value: object, limit: int = 80) -> str:
    """A value as one short printable line, whatever the user typed."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # whole numbers of 4300 digits and more, deep nesting
        text = f"({type(value).__name__} too large to print)"
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean ...' for a misspelt name, else the list of names."""
    import difflib  # 10 ms, only paid on an error

    names = sorted(known)
    close = difflib.get_close_matches(word[:200], names, n=1, cutoff=0.55)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}" if names else "nothing is known here"
