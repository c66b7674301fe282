"""The log of another engine's run as it grows: how far it has come, and in the end its report."""

from __future__ import annotations

import re
from collections.abc import Callable

from fourfold.launch.command import Ended
from fourfold.logs.book import LogReader, LogRun
from fourfold.logs.lines import clean
from fourfold.logs.series import StepLine
from fourfold.result.report import Failure, Outcome, RankMemory, RunReport, StepReport
from fourfold.spec.run import RunSpec

# How a log says that a run ended -> how a report does; of several logs, the first of these counts.
_OUTCOMES: dict[str, Outcome] = {"oom": "oom", "hang": "hung", "fail": "crashed"}


# How torchrun names the rank that failed first on its host.
_ROOT_CAUSE = "Root Cause (first observed failure)"
_RANK = re.compile(r"\s*rank\s*: (\d+) \(local_rank: \d+\)")


class _OneLog:
    """One file of it: on a site, each node writes its own. `failed`: the rank that its launcher
    blames, -1 where it names none."""

    def __init__(self, reader: str, on_step: Callable[[StepLine], None]) -> None:
        self._reader = LogReader(reader, on_step=on_step)
        self._reader.begin()  # what goes wrong before its first words counts too
        self._rest, self._number = b"", 0
        self.failed, self._blames = -1, False

    def take(self, content: bytes) -> None:
        *whole, self._rest = (self._rest + content).split(b"\n")
        for raw in whole:
            self._line(raw)
        self._rest = self._rest[-(2**20) :]

    def _line(self, raw: bytes) -> None:
        self._number += 1
        text = raw.decode("utf-8", "replace")
        self._blames = self._blames or _ROOT_CAUSE in text
        if self._blames and self.failed < 0 and (named := _RANK.match(text)):
            self.failed = int(named[1])
        self._reader.take(clean(text, self._number))

    def finish(self) -> list[LogRun]:
        if self._rest:  # its last line was cut off
            self._line(self._rest)
        return self._reader.finish().runs


class EngineLog:
    """`name` and `stack` of the engine; `reader`: how its log is read ('': recognised); `device`:
    on which it runs ('': this host's)."""

    def __init__(
        self, spec: RunSpec, *, name: str, stack: str, reader: str = "", device: str = ""
    ) -> None:
        self._spec, self._name, self._reader = spec, name, reader
        self._environment = {"engine": name, "stack": stack, "torch": name}
        self._environment |= {"device": device} if device else {}
        self._logs: dict[str, _OneLog] = {}
        self._steps: dict[int, StepLine] = {}

    def _step(self, line: StepLine) -> None:
        known = self._steps.get(line.step)
        slower = known is None or self._seconds(line) > self._seconds(known)
        self._steps[line.step] = line if slower or known is None else known

    def take(self, log: str, content: bytes) -> int:
        """How far it has come, after this much more of a log."""
        if log not in self._logs:
            self._logs[log] = _OneLog(self._reader, self._step)
        self._logs[log].take(content)
        return max(self._steps) - self._before if self._steps else 0

    @property
    def _before(self) -> int:
        """The step before the first that was printed: a run may go on where another ended."""
        return min(self._steps) - 1

    def _seconds(self, line: StepLine) -> float:
        if line.seconds is not None:
            return line.seconds
        batch, gpus = self._spec.batch, self._spec.gpus
        rate = line.tokens_s_gpu or 0.0
        return batch.seq_len * batch.global_batch / gpus / rate if rate else 0.0

    def report(self, ended: Ended, last_words: str) -> RunReport:
        books = [log.finish() for log in self._logs.values()]
        ends = {runs[-1].end for runs in books if runs}
        end = next((word for word in _OUTCOMES if word in ends), "")
        outcome, message = self._outcome(ended, end, last_words)
        memory = [m for m in (line.mem_gib for line in self._steps.values()) if m]
        memory += [run.mem_gib for runs in books for run in runs if run.mem_gib]
        peak = RankMemory(rank=0, stage=0, peak_bytes=round(max(memory, default=0.0) * 2**30))
        return RunReport(
            spec=self._spec,
            outcome=outcome,
            environment=tuple(sorted({**self._environment, **dict(ended.environment)}.items())),
            steps=tuple(self._report(line) for _, line in sorted(self._steps.items())),
            memory=(peak,) if memory else (),
            start_s=ended.start_s,
            failure=None
            if outcome == "ok"
            else Failure(rank=self._failed(ended), stage=0, phase=self._name, message=message),
        )

    def _failed(self, ended: Ended) -> int:
        """The rank that was blamed in the log of the node that failed first."""
        own = self._logs.get(ended.log.name)
        return own.failed if own is not None and ended.by_scheduler is None else -1

    def _report(self, line: StepLine) -> StepReport:
        try:
            loss = float(line.loss.split()[0]) if line.loss else None
        except ValueError:
            loss = None
        return StepReport(
            step=line.step,
            seconds=self._seconds(line),
            loss=loss,
            warmup=line.step - self._before <= self._spec.warmup,
            skipped=line.skipped > 0,
        )

    def _outcome(self, ended: Ended, end: str, last_words: str) -> tuple[Outcome, str]:
        timed = [step for step in self._steps if step - self._before > self._spec.warmup]
        if ended.by_scheduler is not None and ended.code != 0:
            return ended.by_scheduler[0], f"{ended.how}\n{last_words}"
        if end == "oom" or (ended.kernel_kills and ended.code in (-9, 137)):
            return "oom", f"{ended.how}\n{last_words}"
        if ended.limit:
            return "hung", f"{ended.how}\n{last_words}"
        if ended.code not in (0, None):
            return _OUTCOMES.get(end, "crashed"), f"{ended.how}\n{last_words}"
        if not timed:
            words = (
                f"{ended.how} without a step after the {self._spec.warmup} of warm-up in its log"
            )
            return "crashed", f"{words}\n{last_words}"
        return "ok", ""
