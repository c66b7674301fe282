"""One run in full: what its report says, and what follows from it, in base units."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from fourfold.result.files.store import Stored
from fourfold.result.quality import flags, straggler, throttles
from fourfold.result.report import RunReport
from fourfold.result.stored_run import StoredRun
from fourfold.spec import Batch, catalog, codec
from fourfold.spec.policy import Formats, running
from fourfold.spec.words import OURS
from fourfold.verbs import Answer
from fourfold.verbs.shapes import Utilisation, utilisation

# A longer list is told by counting equal neighbours: "8 x 32, 5".
_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A micro batch that was tried, and whether it ran."""

    micro_batch: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShown(Answer):
    """A run in full: its report, the run in short, and where it is stored. `trials`: of micro
    batches, before `bench` ran it; None: of a run that is only looked up."""

    report: RunReport
    run: StoredRun
    folder: str
    trials: tuple[Trial, ...] | None = None

    @classmethod
    def of(cls, stored: Stored, trials: tuple[Trial, ...] | None = None) -> RunShown:
        report = stored.report()
        run = StoredRun.of(report)
        return cls(report=report, run=run, folder=str(stored.folder), trials=trials)

    @property
    def engine(self) -> str:
        return self.run.engine or OURS

    @property
    def flags(self) -> list[str]:
        """What to doubt in the measurement."""
        return flags(self.report) if self.report.outcome == "ok" else []

    @property
    def most_reserved_bytes(self) -> int:
        return max((rank.reserved_bytes for rank in self.report.memory), default=0)

    @property
    def most_device_bytes(self) -> int:
        return max((rank.device_bytes for rank in self.report.memory), default=0)

    @property
    def data_wait_s(self) -> float | None:
        """The median wait for data of the rank that waits longest; None where none has data."""
        warm = [step.warmup for step in self.report.steps]
        waits = [
            [wait for wait, early in zip(rank.data_s, warm, strict=False) if not early]
            for rank in self.report.ranks
            if rank.data_s
        ]
        return max((median(rank) for rank in waits if rank), default=None)

    @property
    def compile_s(self) -> float:
        return max((rank.compile_s for rank in self.report.ranks), default=0.0)

    @property
    def skipped_steps(self) -> int:
        return sum(step.skipped for step in self.report.steps)

    @property
    def loss_scale(self) -> float | None:
        return self.report.steps[-1].loss_scale if self.report.steps else None

    @property
    def formats(self) -> Formats:
        """The number formats that the run used, by what they held."""
        return running(self.report.spec.policy, self.report.spec.layout)

    @property
    def micro_words(self) -> str:
        """The micro batches of a step, in words."""
        return micro_words(self.report.spec.batch, self.report.spec.layout.dp)

    @property
    def post_mortem(self) -> dict[str, Any]:
        return post_mortem(self.report)

    @property
    def samples(self) -> dict[str, tuple[float, float]]:
        """The least and the most of clock, power and temperature in the window."""
        samples = self.report.samples
        readings = {
            "clock_hz": [sample.clock_hz for sample in samples],
            "power_w": [sample.power_w for sample in samples],
            "temperature_c": [sample.temperature_c for sample in samples],
        }
        return {name: (min(values), max(values)) for name, values in readings.items() if values}

    def utilisation(self) -> dict[str, Utilisation]:
        """TFLOP/s and shares of the device's peak by every convention; empty without a speed."""
        if not self.run.tokens_s_gpu:
            return {}
        spec = self.report.spec
        peak = catalog.peak_of(self.run.device, spec.policy.precision_name)
        return utilisation(spec, None, self.run.tokens_s_gpu, peak)

    def plain(self) -> dict[str, Any]:
        report, run = self.report, self.run
        plain = self._settings() | {
            "start_s": report.start_s,
            "peak_bytes": run.peak_bytes,
            "reserved_bytes": self.most_reserved_bytes,
            "device_bytes": self.most_device_bytes,
            "loss": run.loss,
            "loss_step": run.loss_step,
            "flags": self.flags,
            "raw_step_s": [step.seconds for step in report.steps],
            "warmup": report.spec.warmup,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.loss_scale,
        }
        if report.predicted is not None:
            plain["predicted"] = codec.encode(report.predicted)
        if report.outcome == "oom":
            plain["post_mortem"] = self.post_mortem
        plain |= self._speed()
        if report.failure is not None:
            plain["failure"] = codec.encode(report.failure)
        plain |= self._surroundings() | _machine(self) | {"folder": self.folder}
        if self.trials is not None:
            plain["micro_batch_trials"] = codec.encode(self.trials)
        return plain

    def _settings(self) -> dict[str, Any]:
        spec, run = self.report.spec, self.run
        return {
            "run_id": run.run_id,
            "outcome": run.outcome,
            "model": spec.model.name,
            "layout": str(spec.layout),
            "seq_len": spec.batch.seq_len,
            "micro_batch": spec.batch.micro_batch,
            "global_batch": spec.batch.global_batch,
            "micro_sizes": [list(sizes) for sizes in spec.batch.micro_plan(spec.layout.dp)],
            "micro_words": self.micro_words,
            "precision": spec.policy.precision_name,
            "data": spec.data or "synthetic",
            "formats": dataclasses.asdict(self.formats),
            "optimizer": spec.policy.optimizer,
            "recompute": spec.policy.recompute,
            "sharding": spec.policy.sharding,
            "virtual_stages": spec.policy.virtual_stages,
            "settings": run.unlisted,
            "engine": self.engine,
            "device": run.device,
            "torch": run.torch,
        }

    def _speed(self) -> dict[str, Any]:
        run, batch = self.run, self.report.spec.batch
        if not (run.step and run.tokens_s_gpu):
            return {}
        counted = codec.encode(self.utilisation())
        for row in counted.values():
            del row["flops_per_token"]
        return {
            "step_s": run.step.step_s,
            "step_s_low": run.step.low_s,
            "step_s_high": run.step.high_s,
            "timed_steps": run.step.samples,
            "window_s": self.report.window_s,
            "samples_s": batch.global_batch / run.step.step_s,
            "tokens_s": batch.tokens / run.step.step_s,
            "tokens_s_gpu": run.tokens_s_gpu,
            "conventions": counted,
        }

    def _surroundings(self) -> dict[str, Any]:
        """What the steps needed besides themselves: warm-up, data, compiling, links."""
        report = self.report
        plain: dict[str, Any] = {}
        if report.warmup is not None:
            names = ("steps", "ended", "drift", "clock_drift", "words")
            plain = {f"warmup_{name}": getattr(report.warmup, name) for name in names}
        if self.data_wait_s is not None:
            plain["data_wait_s"] = self.data_wait_s
        if self.compile_s:
            plain["compile_s"] = self.compile_s
        if report.experts:
            plain["routing"] = report.spec.policy.routing
            plain["experts"] = codec.encode(report.experts)
        plain["recompiles"] = sum(rank.recompiles for rank in report.ranks)
        plain["retries"] = self.run.retries
        plain["memory"] = codec.encode(report.memory)
        plain["links"] = [
            codec.encode(link) | {"bytes_per_s": link.bytes_per_s} for link in report.links
        ]
        return plain


def _machine(shown: RunShown) -> dict[str, Any]:
    report = shown.report
    plain: dict[str, Any] = {
        name: {"low": low, "high": high} for name, (low, high) in shown.samples.items()
    }
    if report.samples:
        plain["throttle"] = sorted({sample.throttle for sample in report.samples})
        plain["throttled_by"] = sorted({w for s in report.samples for w in throttles(s.throttle)})
    for probe in report.probes:
        rates = {"flops_per_s": probe.flops_per_s, "bytes_per_s": probe.bytes_per_s}
        plain[f"probe_{probe.when}"] = rates
    slowest = straggler(report)
    if slowest is not None:
        plain["straggler"] = {"rank": slowest[0], "busy_share": slowest[1]}
    return plain


def post_mortem(report: RunReport) -> dict[str, Any]:
    """Base units; empty unless the run ended in `oom`."""
    if report.outcome != "oom":
        return {}
    predicted, short, failure = report.predicted, report.shortage, report.failure
    limit = (short.limit_bytes if short else 0) or (predicted.limit_bytes if predicted else 0)
    return {
        **{name: getattr(failure, name, None) for name in ("rank", "stage", "phase")},
        "limit_bytes": limit or None,
        "predicted_bytes": predicted.peak_bytes if predicted else None,
        "predicted_fits": predicted.fits if predicted else None,
        "live_bytes": short.live_bytes if short else None,
        "asked_bytes": short.asked_bytes or None if short else None,
        "reserved_bytes": short.reserved_bytes or None if short else None,
        "kinds_bytes": {one.name: one.bytes for one in short.kinds} if short else {},
        "largest": codec.encode(short.largest) if short else [],
        "source": short.source if short else "",
        "fixes": codec.encode(report.remedies),
    }


def micro_words(batch: Batch, dp: int) -> str:
    """Ranks with the same sizes together, and the padding that keeps ranks in step."""
    count = batch.micro_count(dp)
    plans = []
    for sizes in batch.micro_plan(dp):
        padding = f" and {count - len(sizes)} of padding" if len(sizes) < count else ""
        plans.append(_sizes(sizes) + padding)
    groups, first = [], 0
    for words, same in groupby(plans):
        last = first + len(list(same)) - 1
        groups.append((f"{first}-{last}" if last > first else f"{first}", words))
        first = last + 1
    if len(groups) == 1:
        return groups[0][1]
    return "; ".join(f"dp {ranks}: {words}" for ranks, words in groups)


def _sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= _LISTED:
        return ", ".join(map(str, sizes))
    runs = ((size, len(list(same))) for size, same in groupby(sizes))
    return ", ".join(f"{size} x {times}" if times > 1 else f"{size}" for size, times in runs)
