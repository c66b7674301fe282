"""Where is a trainer's step? It tells whoever has asked, so that nobody replaces its methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fourfold.engine.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A phase begins: `data` (the step itself), `backward` of one micro batch through `chunk`
    (`kind` B, or I and W of a split one), `reduce`, `optimizer` (`norm` is known, weights have not
    changed; a callback may raise); or the step is at its `end`."""

    phase: Literal["data", "backward", "reduce", "optimizer", "end"]
    chunk: Decoder | None = None
    kind: str = ""
    norm: Tensor | None = None


class StepHooks:
    """Callbacks of a trainer, called in the order they were added."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[StepEvent], None]] = []

    def add(self, callback: Callable[[StepEvent], None]) -> None:
        self._callbacks.append(callback)

    def tell(self, event: StepEvent) -> None:
        for callback in self._callbacks:
            callback(event)
