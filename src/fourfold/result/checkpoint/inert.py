"""A pickle as plain data, without doing any of what it says.

Python's own unpickler looks names up and calls them, so a file decides what runs. This one builds
records: a name is two texts, a call is a record of what would be called with what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fourfold.result.files.stored import UnreadableError

MAX_PICKLE_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function by its name, as text."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """`what(*args)`, not done; `state` is what the file would then give the result."""

    what: Any
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class Outside:
    """Something kept beside the pickle, by its identity."""

    key: Any


class _Mark:
    pass


@dataclass(slots=True)
class _Machine:
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self) -> Any:
        if not self.stack or isinstance(self.stack[-1], _Mark):
            raise refused("it ends in the middle")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise refused("it puts things where they do not belong")
        return self.stack[-1]

    def to_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], _Mark):
                taken = self.stack[place + 1 :]
                del self.stack[place:]
                return taken
        raise refused("it ends in the middle")

    def take(self, count: int) -> tuple[Any, ...]:
        return tuple([self.pop() for _ in range(count)][::-1])


def loads(content: bytes) -> Any:
    """The plain data of a pickle; what is no such data is refused."""
    import pickletools  # 10 ms, only paid on old files

    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return machine.pop()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise refused(f"it holds an instruction {opcode.name}")
            action(machine, argument)
    except UnreadableError:
        raise
    except (ValueError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise refused(f"it can't be followed ({error})") from None
    raise refused("it ends in the middle")


def refused(what: str) -> UnreadableError:
    return UnreadableError(
        f"its metadata cannot be read: {what}",
        hint="use another checkpoint, or copy this one again from its source",
    )


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _constant(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(make())


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(machine.take(count))


def _put(machine: _Machine, place: Any) -> None:
    if not machine.stack:
        raise refused("it ends in the middle")
    machine.memo[place] = machine.stack[-1]


def _get(machine: _Machine, place: Any) -> None:
    if place not in machine.memo:
        raise refused("it asks for what it has not named")
    machine.stack.append(machine.memo[place])


def _set_items(machine: _Machine, items: list[Any] | tuple[Any, ...]) -> None:
    target = machine.top(dict)
    if len(items) % 2:
        raise refused("it ends in the middle")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # A record is a key by itself, not by its fields: they may still be filled. No tuples: the
        # hash of one that is nested deeply enough ends the process.
        if not isinstance(key, str | Call):
            raise refused("it has a key that is no text and no record")
        target[key] = value


def _name(machine: _Machine, module: Any, name: Any) -> None:
    if not isinstance(module, str) or not isinstance(name, str):
        raise refused("a name in it is no text")
    machine.stack.append(Name(module, name))


def _call(machine: _Machine, _: Any) -> None:
    what, args = machine.take(2)
    if not isinstance(args, tuple):
        raise refused("it calls something without arguments")
    machine.stack.append(Call(what, args))


def _build(machine: _Machine, _: Any) -> None:
    state = machine.pop()
    target = machine.top(Call)
    if target.state is not None:
        raise refused("it fills something twice")
    target.state = state


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": _constant(_Mark),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_LIST": _constant(list),
    "EMPTY_TUPLE": _constant(tuple),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        _push,
    ),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.to_mark())),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
    "SETITEM": lambda machine, _: _set_items(machine, machine.take(2)),
    "SETITEMS": lambda machine, _: _set_items(machine, machine.to_mark()),
    "APPEND": lambda machine, _: _append(machine, machine.take(1)),
    "APPENDS": lambda machine, _: _append(machine, machine.to_mark()),
    "GLOBAL": lambda machine, text: _name(machine, *str(text).partition(" ")[::2]),
    "STACK_GLOBAL": lambda machine, _: _name(machine, *machine.take(2)),
    "REDUCE": _call,
    "NEWOBJ": _call,
    "BUILD": _build,
    "BINPERSID": lambda machine, _: machine.stack.append(Outside(machine.pop())),
}


def _append(machine: _Machine, items: list[Any] | tuple[Any, ...]) -> None:
    machine.top(list).extend(items)
