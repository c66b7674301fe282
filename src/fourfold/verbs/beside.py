"""A function's answer from a second process, beside what this one does: threads that share an
interpreter don't search side by side. Whatever goes wrong there is done here instead."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")
_CHILD = "from fourfold.verbs.beside import answer; answer()"


@contextlib.contextmanager
def beside(function: Callable[..., T], *given: Any) -> Iterator[Callable[[], T]]:
    """Begins at once; the call waits for the answer, and nothing is left behind without it.
    `function` is found by its name; what it gets and gives is pickled."""
    try:
        asked = pickle.dumps((function.__module__, function.__qualname__, given))
        child = subprocess.Popen(
            [sys.executable or "python3", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, TypeError, AttributeError, pickle.PicklingError):
        yield lambda: function(*given)
        return
    with child:
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
                pipe.write(asked)
            yield lambda: _answered(child, lambda: function(*given))
        finally:
            child.kill()


def _answered(child: subprocess.Popen[bytes], here: Callable[[], T]) -> T:
    assert child.stdout is not None
    told = child.stdout.read()
    try:
        return pickle.loads(told) if child.wait() == 0 else here()
    except (pickle.UnpicklingError, EOFError):  # something else was printed there
        return here()


def answer() -> None:
    """What the second process does."""
    module, name, given = pickle.load(sys.stdin.buffer)
    found = getattr(import_module(module), name)(*given)
    sys.stdout.buffer.write(pickle.dumps(found))


def is_worth_it(gpus: int) -> bool:
    """A second process begins after half a second, and takes a core."""
    return gpus >= _MANY_GPUS and (os.cpu_count() or 1) > 1


_MANY_GPUS = 256
