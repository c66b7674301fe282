"""Environment variables that a file may set for a run.

What names a file, a folder, a plugin, a loader, a compiler or an interpreter loads code or writes
where it says; that is taken from the command line only (`--env NAME=VALUE`), for this one start.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from fourfold.errors import UserError, nearest
from fourfold.spec import catalog

Env = tuple[tuple[str, str], ...]
MAX_VARIABLES, MAX_NAME_CHARS, MAX_VALUE_CHARS = 64, 128, 1024
_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{MAX_NAME_CHARS - 1}}}")
# What the launcher itself tells its processes; another value would make it lose them.
_RESERVED = re.compile(
    r"FOURFOLD_[A-Z0-9_]*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR"
    r"|MASTER_PORT|TORCHELASTIC_[A-Z0-9_]*"
)


@functools.cache
def plain_forms() -> dict[str, str]:
    """Variable that a file may set -> the form of its values (data/variables.toml)."""
    forms = catalog.data("variables.toml")["forms"]
    return {name: form["values"] for form in forms for name in form["names"].split()}


def require_form(env: Env) -> None:
    """What holds for every variable, whoever sets it: a name, and one short line as its value."""
    if len(env) > MAX_VARIABLES:
        raise UserError(f"has more than {MAX_VARIABLES} variables", field="env", value=len(env))
    if len({name for name, _ in env}) != len(env):
        raise UserError("names a variable twice", field="env", value=[name for name, _ in env])
    for name, value in env:
        if not _NAME.fullmatch(name):
            raise UserError("is not a variable name", field="env", value=name)
        if len(value) > MAX_VALUE_CHARS or not value.isprintable():
            rule = f"must be printable text of at most {MAX_VALUE_CHARS} characters"
            raise UserError(rule, field=f"env.{name}", value=value)


def is_plain(name: str, value: str) -> bool:
    """Whether a file may set it."""
    form = plain_forms().get(name)
    return form is not None and re.fullmatch(form, value) is not None


def require_plain(env: Env, *, granted: Env = ()) -> None:
    """Refuse what a file may not set, unless the command line `granted` it with this very value."""
    for name, value in env:
        field, hint = f"policy.env.{name}", "remove it"
        if _RESERVED.fullmatch(name):
            rule = "is set by fourfold for its own processes"
            raise UserError(rule, field=field, value=value, hint=hint)
        if is_plain(name, value) or (name, value) in granted:
            continue
        rule = "has a value that a file may not give it"
        if name not in plain_forms():
            rule, guess = "is not a variable that a file may set", nearest(name, plain_forms())
            hint += f" ({guess})" if guess.startswith("did you mean") else ""
        hint += f" or, if you trust it, pass --env {name}=VALUE on the command line of every start"
        raise UserError(rule, field=field, value=value, hint=hint)


def parse_assignments(words: Iterable[str]) -> Env:
    """`--env NAME=VALUE`, in order; the same name twice must say the same."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError("must be NAME=VALUE", field="--env", value=word)
        if values.setdefault(name, value) != value:
            raise UserError("is given two values", field="--env", value=name)
    env = tuple(values.items())
    require_form(env)
    return env
