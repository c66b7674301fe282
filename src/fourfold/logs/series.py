"""The seconds of a step: the median of a run's iterations, from lines of its log.

Left out: the first line of every start, leading lines that still drift, iterations that were
skipped, lines that follow an evaluation or a checkpoint (their time is in it), and lines of another
batch size than the last. A line that averages over several iterations counts as many.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from dataclasses import dataclass, field, replace
from statistics import median

from fourfold.units import counted

# Beyond so many lines every second one is dropped, again and again.
MOST_LINES = 2**15
# Steps that interleaved ranks may be apart.
_WINDOW = 8
_DRIFT = 1.03
_TREND = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What one line says of a step: `seconds` of an iteration, or the rate instead.

    `span`: iterations that it averages (0: those since the line before). `loss` as printed and the
    `label` of the line tell whether two lines of a step are of several ranks.
    """

    step: int
    seconds: float | None = None
    tokens_s_gpu: float | None = None
    span: int = 0
    batch: int | None = None
    skipped: int = 0
    loss: str = ""
    label: str = ""
    tflops: float | None = None
    mem_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """`seconds` of an iteration, or `tokens_s_gpu`; `rule` says what they are the median of."""

    seconds: float | None
    tokens_s_gpu: float | None
    iterations: int
    rule: str
    batch: int | None
    tflops: float | None
    mem_gib: float | None
    drift: str = ""


class Series:
    """Values with weights in bounded memory: evenly thinned when there are too many."""

    def __init__(self) -> None:
        self.values, self.weights = array("d"), array("d")
        self._stride = self._seen = 1

    def add(self, value: float, weight: float = 1.0) -> None:
        self._seen += 1
        if self._seen % self._stride:
            return
        self.values.append(value)
        self.weights.append(weight)
        if len(self.values) > MOST_LINES:
            del self.values[::2], self.weights[::2]
            self._stride *= 2

    def drifting(self) -> int:
        """Leading lines that are still slower than the second half."""
        if len(self.values) < 6:
            return 0
        steady = _DRIFT * median(self.values[len(self.values) // 2 :])
        head = 0
        while head < len(self.values) // 2 and median(self.values[head : head + 3]) > steady:
            head += 1
        return head

    def trend(self, head: int) -> tuple[float, float] | None:
        """Medians of the first and the last quarter from `head` on, where they are far apart."""
        values = self.values[head:]
        part = len(values) // 4
        if part < 3:
            return None
        first, last = median(values[:part]), median(values[-part:])
        return (first, last) if max(first / last, last / first) > _TREND else None

    def median(self, head: int = 0) -> float | None:
        """Weighted, of the values from `head` on; between two that share the middle, their mean."""
        pairs = sorted(zip(self.values[head:], self.weights[head:], strict=True))
        if not pairs:
            return None
        sums = list(itertools.accumulate(weight for _, weight in pairs))
        half = sums[-1] / 2
        at = bisect.bisect_left(sums, half)
        if sums[at] == half and at + 1 < len(pairs):
            return (pairs[at][0] + pairs[at + 1][0]) / 2
        return pairs[at][0]


@dataclass(slots=True)
class StepSeries:
    """Steps of one run, in the order of its log; `restart` where it was started again."""

    first: int | None = None
    last: int = 0
    lines: int = 0
    _open: dict[int, StepLine] = field(default_factory=dict)
    _paused: set[int] = field(default_factory=set)
    _pause: bool = False
    _torn: set[int] = field(default_factory=set)
    _tear: bool = False
    _span: int = 0
    _usual: int = 0
    _starts: bool = True
    _before: int | None = None
    _times: Series = field(default_factory=Series)
    _tflops: Series = field(default_factory=Series)
    _is_rate: bool = False
    _batch: int | None = None
    _mem_gib: float | None = None
    _only: StepLine | None = None
    _counted: float = 0
    _left_out: dict[str, int] = field(default_factory=dict)

    def place(self, line: StepLine) -> str:
        """Where a line stands: 'next', another rank's of the 'same' step, or 'back'."""
        known = self._open.get(line.step)
        if known is not None and _is_other_rank(known, line):
            return "same"
        return "next" if line.step > self.last else "back"

    def add(self, line: StepLine) -> None:
        known = self._open.get(line.step)
        if known is not None:
            self._open[line.step] = _slowest(known, line)
            return
        if self._pause:
            self._paused.add(line.step)
            self._pause = False
        if self._tear:
            self._torn.add(line.step)
            self._tear = False
        self.first = line.step if self.first is None else self.first
        self.last = line.step
        self._open[line.step] = line
        if len(self._open) > _WINDOW:
            self._close(next(iter(self._open)))

    def pause(self) -> None:
        """An evaluation or a checkpoint: the next line's time is not of steps alone."""
        self._pause = True

    def break_average(self) -> None:
        """A line could not be read: the next one does not average over its iterations."""
        self._tear = True

    def restart(self, step: int) -> None:
        self._flush()
        self.last, self._starts, self._before, self._pause = step - 1, True, None, False

    def _flush(self) -> None:
        for step in list(self._open):
            self._close(step)

    def _close(self, step: int) -> None:
        line = self._open.pop(step)
        is_paused = step in self._paused
        self._paused.discard(step)
        # After a line that could not be read, as many as before: what it averaged is lost.
        since = step - self._before if self._before is not None else 0
        if self._usual:  # where lines were cut out, a line still averages no more than others do
            since = min(since, 2 * self._usual)
        elif self._before is not None:
            self._usual = since
        span = line.span or (self._span if step in self._torn else since) or self._span or 1
        self._torn.discard(step)
        self._span = span
        self._before, is_first, self._starts = step, self._starts, False
        self.lines += 1
        if line.mem_gib is not None:
            self._mem_gib = max(line.mem_gib, self._mem_gib or 0.0)
        value = line.seconds
        if value is None and line.tokens_s_gpu:
            value, self._is_rate = 1.0 / line.tokens_s_gpu, True
        if line.batch is not None and line.batch != self._batch:
            if self._batch is not None:
                left = self._left_out.get("of another batch size", 0) + int(self._counted)
                self._left_out["of another batch size"] = left
                self._times, self._tflops, self._counted = Series(), Series(), 0
            self._batch = line.batch
        if self.lines == 1:
            self._only = line
        if value is None:
            return
        why = "skipped" if line.skipped else "after an evaluation or checkpoint" * is_paused
        why = "warm-up" if is_first else why
        if why:
            self._left_out[why] = self._left_out.get(why, 0) + span
            return
        self._counted += span
        self._times.add(value, span)
        if line.tflops is not None:
            self._tflops.add(line.tflops, span)

    def measured(self, interval: int = 0) -> StepTimes:
        """`interval`: iterations between lines, where the configuration says so."""
        self._flush()
        head = self._times.drifting()
        value, tflops = self._times.median(head), self._tflops.median(head)
        count = int(self._counted - sum(self._times.weights[:head]))
        left = dict(self._left_out)
        if head:
            left["warm-up"] = left.get("warm-up", 0) + int(sum(self._times.weights[:head]))
        only = self._only
        if value is None and only is not None and self.lines == 1 and only.step > max(1, interval):
            # A single line that cannot hold the run's first iteration.
            rate = only.tokens_s_gpu
            value = only.seconds if only.seconds is not None else 1.0 / rate if rate else None
            tflops, count, left = only.tflops, 1, {}
        out = ", ".join(f"{n} {why}" for why, n in left.items() if n)
        middle = f"median of {counted(count, 'iteration')}"
        rule = "no timed iteration" if value is None else middle
        is_rate = self._is_rate and value is not None
        return StepTimes(
            seconds=None if is_rate else value,
            tokens_s_gpu=1.0 / value if is_rate and value else None,
            iterations=count if value is not None else 0,
            rule=f"{rule}; left out: {out}" if out else rule,
            batch=self._batch,
            tflops=tflops,
            mem_gib=self._mem_gib,
            drift=self._drift(head, is_rate=is_rate),
        )

    def _drift(self, head: int, *, is_rate: bool) -> str:
        trend = self._times.trend(head)
        if trend is None:
            return ""
        if is_rate:
            return (
                f"tokens/s/GPU drift from {1 / trend[0]:.4g} to {1 / trend[1]:.4g} within the log"
            )
        return f"steps drift from {trend[0]:.4g} to {trend[1]:.4g} s within the log"


def _is_other_rank(one: StepLine, other: StepLine) -> bool:
    """Ranks print the loss they share, under labels of their own; a stage that does not see it
    prints a negative number."""
    unseen = one.loss.startswith("-") or other.loss.startswith("-")
    return unseen or one.loss == other.loss or bool(one.label and one.label != other.label)


def _slowest(one: StepLine, other: StepLine) -> StepLine:
    """Of two ranks: a step lasts as long as on the slowest, and the fullest decides memory."""
    slower = (other.seconds or 0.0) > (one.seconds or 0.0) or (
        other.tokens_s_gpu is not None and other.tokens_s_gpu < (one.tokens_s_gpu or float("inf"))
    )
    base = other if slower else one
    memory = [m for m in (one.mem_gib, other.mem_gib) if m is not None]
    loss = other.loss if one.loss.startswith("-") else one.loss
    return replace(base, mem_gib=max(memory, default=None), loss=loss)
