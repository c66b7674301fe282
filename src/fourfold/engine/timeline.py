"""Where in its step is a trainer, and since when? Marks on the device's own clock.

A micro batch passes embed, layers, head, between, head back, layers back, embed back (weights,
where they come later); a step has data, reduce and optimizer once. A phase lasts until the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fourfold.engine.trainer import Trainer

MICRO_PHASES = (
    "embed", "layers", "head", "between", "head back", "layers back", "embed back", "weights",
)  # fmt: skip
STEP_PHASES = ("data", "reduce", "optimizer")

Stamp = torch.cuda.Event | float


class Timeline:
    """`listeners` are told the name of every phase that begins."""

    def __init__(self, device: torch.device, listeners: Sequence[Callable[[str], None]]) -> None:
        self.device, self.listeners = device, listeners
        self.marks: list[tuple[str, Stamp]] = []

    def mark(self, name: str) -> None:
        for listener in self.listeners:
            listener(name)
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def take(self) -> dict[str, list[float]]:
        """Seconds of every interval so far by phase, only after the device has caught up."""
        found: dict[str, list[float]] = {}
        for (name, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if name != "end":
                found.setdefault(name, []).append(_between(begin, end))
        self.marks.clear()
        return found


def _between(begin: Stamp, end: Stamp) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    return begin.elapsed_time(end) / 1e3


def steady(intervals: dict[str, list[float]], passes: int, chunks: int) -> dict[str, float]:
    """Seconds of one ordinary micro batch by phase, from `passes` of them.

    With one chunk the median of its passes: the first forward gathers and the last backward
    reduces besides. Chunks differ in layers, so there it is the mean.
    """
    found = {}
    for name in MICRO_PHASES:
        seconds = intervals.get(name, [])
        if seconds:
            alike = chunks == 1 and len(seconds) % passes == 0
            one = median(seconds) if alike else sum(seconds) / len(seconds)
            found[name] = one * len(seconds) / passes
    return found


def attach(trainer: Trainer, mark: Callable[[str], None]) -> None:
    """From here on the trainer's steps call `mark` at the beginning of every phase.

    The trainer looks its methods up on itself at every step, so that they can be replaced.
    """
    for name, phase in (("accumulate", "data"), ("reduce", "reduce")):
        _before(trainer, name, lambda _, phase=phase: mark(phase))
    _before(trainer, "update", lambda _: mark("optimizer"), lambda: mark("end"))
    # A split backward says its kind: W makes the gradients of weights, after those of inputs.
    _before(
        trainer, "before_backward", lambda args: mark("weights" if "W" in args else "head back")
    )
    for chunk in trainer.chunks:
        layers = list(chunk.layers.values())
        chunk.register_forward_pre_hook(lambda *_: mark("embed"), prepend=True)
        chunk.register_forward_hook(lambda *_: mark("between"))
        layers[0].register_forward_pre_hook(_into_layers(mark), prepend=True)
        layers[-1].register_forward_hook(_out_of_layers(mark))


def _before(
    trainer: Trainer,
    name: str,
    begin: Callable[[tuple[Any, ...]], None],
    end: Callable[[], None] = lambda: None,
) -> None:
    method = getattr(trainer, name)

    def wrapped(*args: Any) -> Any:
        begin(tuple(arg for arg in args if isinstance(arg, str)))
        found = method(*args)
        end()
        return found

    setattr(trainer, name, wrapped)


def _into_layers(mark: Callable[[str], None]) -> Callable[..., None]:
    def hook(_: object, args: tuple[Any, ...]) -> None:
        mark("layers")
        if isinstance(args[0], Tensor) and args[0].requires_grad:
            args[0].register_hook(lambda _: mark("embed back"))

    return hook


def _out_of_layers(mark: Callable[[str], None]) -> Callable[..., None]:
    def hook(_: object, args: tuple[Any, ...], out: Tensor) -> None:
        mark("head")
        if out.requires_grad:
            out.register_hook(lambda _: mark("layers back"))

    return hook
