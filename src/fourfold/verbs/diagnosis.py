"""What diagnose answers: parts, causes, settings, ranks.

A diagnosis as a stored run, a row like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fourfold.errors import UserError
from fourfold.result.files.store import Store
from fourfold.result.report import Prediction, RunReport, StepReport
from fourfold.spec import codec
from fourfold.traces import parts
from fourfold.traces.cause import Cause
from fourfold.traces.examined import NEEDED, Examined
from fourfold.traces.expect import Expected, Interval
from fourfold.traces.settings import Setting, preset_of
from fourfold.traces.what_if import WhatIf
from fourfold.verbs import Answer
from fourfold.verbs.best_engine import BestEngine


def keep(diagnosis: Diagnosis, root: str) -> str:
    spec = diagnosis.found.spec
    if diagnosis.found.lacks:
        raise UserError(
            "takes runs of training alone", field="runs", value=root, hint=diagnosis.scope
        )
    if spec is None:
        rule = "needs the run: the trace says too little of it"
        raise UserError(rule, field="runs", value=root, hint="give --model or --spec")
    value = {name: one.value for name, one in diagnosis.settings.items()}
    engine = str(value.get("engine", "unknown"))
    environment = {
        "device": str(value.get("gpu", "")),
        "torch": f"{engine} traced",
        "host": "",
        "engine": engine,
        "trace": diagnosis.found.linked.trace.path,
        "diagnosis": diagnosis.verdict,
    }
    steps = tuple(
        StepReport(step=number, seconds=step.seconds, loss=None, warmup=False)
        for number, step in enumerate(diagnosis.found.steps.steps)
    )
    expected = diagnosis.expected_step
    report = RunReport(
        spec=spec,
        outcome="ok",
        environment=tuple(sorted(environment.items())),
        steps=steps,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        predicted=Prediction(
            step_s=expected.mid,
            step_s_low=expected.low,
            step_s_high=expected.high,
            peak_bytes=0.0,
            basis=diagnosis.basis,
        )
        if expected
        else None,
    )
    return str(Store(root).keep(report).folder)


# Less than this is 0.0 ms in a table.
LEAST_SHOWN_S = 5e-5


Figure = Annotated[float | None, codec.NULL]  # None: nothing is expected of it


@dataclass(frozen=True, slots=True)
class PartRow:
    """Seconds of one component of a step, its share, and the seconds that are expected.
    `outside_s`: beyond the interval, above it or (negative) below; a wait is not expected."""

    name: Annotated[str, codec.JsonForm(key="part")]
    seconds: float
    share: float
    expected_s: Figure
    expected_low_s: Figure
    expected_high_s: Figure
    outside_s: float

    @classmethod
    def of_part(cls, name: str, seconds: float, share: float, expected: Interval | None) -> PartRow:
        if expected is None:
            outside_s = seconds if name in parts.WAITS else 0.0
            return cls(name, seconds, share, None, None, None, outside_s)
        above, below = seconds - expected.high, seconds - expected.low
        outside_s = above if above > 0 else min(0.0, below)
        interval = expected.mid, expected.low, expected.high
        return cls(name, seconds, share, *interval, outside_s)


@dataclass(frozen=True, slots=True)
class RankRow:
    rank: int
    file: str
    step_s: float
    busy_s: float
    exposed_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True)
class Diagnosis(Answer):
    """Of the slowest rank, `found`; `ranks` has all of them."""

    found: Examined
    settings: dict[str, Setting]
    expected: Expected | None
    basis: str
    best: BestEngine | None
    rows_of: tuple[PartRow, ...]
    causes: tuple[Cause, ...]
    ranks: tuple[RankRow, ...]
    what_ifs: tuple[WhatIf, ...]
    fixed: WhatIf | None
    stored: str = ""

    @property
    def step_s(self) -> float:
        return self.found.steps.seconds

    @property
    def expected_step(self) -> Interval | None:
        """None where the trace shows too little of the run to expect all of its parts."""
        is_known = self.expected is not None and self.found.spec is not None
        return self.expected.step if self.expected is not None and is_known else None

    @property
    def scope(self) -> str:
        """Why the step has no expectation, '' where it has one or runs on cores."""
        found = self.found
        if found.lacks:
            return f"no {' and no '.join(found.lacks)}: parts and waits only"
        if found.linked.on_host or found.is_graphed or found.spec is not None:
            return ""
        missing = ", ".join(n.replace("_", " ") for n in NEEDED if n not in found.settings)
        why = f"the trace does not show {missing}" if missing else "these sizes make no model"
        if not found.placed.weighed:
            why = "the trace has no shapes of operators"
        return f"no expected step: {why}; --spec or --log gives the run"

    @property
    def unplaced_share(self) -> float:
        return self.found.parts.get(parts.UNPLACED, 0.0) / self.step_s

    @property
    def tokens_s(self) -> float:
        """Per GPU."""
        spec = self.found.spec
        return spec.batch.tokens / spec.gpus / self.step_s if spec is not None else 0.0

    @property
    def model(self) -> str:
        """As the trace or the request says; else the preset of these widths."""
        name, differs = preset_of(self.settings)
        said = self.found.spec.model.name if self.found.spec else ""
        if said and said != name:
            return said
        return f"{name} ({differs})" if differs else name or "unknown"

    @property
    def verdict(self) -> str:
        if self.causes:
            first = self.causes[0]
            return f"{first.name}: {1e3 * first.seconds:.0f} ms of {1e3 * self.step_s:.0f} ms"
        if self.scope:
            return f"no cause found in the trace itself; {self.scope}"
        if self.expected is None:
            return "no cause found in the trace itself; nothing to compare it with on this device"
        return "nothing stands out"

    def plain(self) -> dict[str, Any]:
        expected = self.expected_step
        return {
            "file": self.found.linked.trace.path,
            "rank": self.found.rank,
            "steps": len(self.found.steps.steps),
            "steps_found_by": self.found.steps.found_by,
            "warmup_steps": self.found.steps.left_out,
            "step_s": self.step_s,
            "expected_step_s": codec.encode(expected) if expected else None,
            "basis": self.basis,
            "best_engine": codec.encode(self.best) if self.best else None,
            "tokens_s_gpu": self.tokens_s or None,
            "unplaced_share": self.unplaced_share,
            "verdict": self.verdict,
            "scope": self.scope or None,
            "model": self.model,
            "settings": {
                name: {k: v for k, v in codec.encode(one).items() if k != "name" and v != ""}
                for name, one in self.settings.items()
            },
            "parts": self.rows(),
            "causes": [codec.encode(cause) for cause in self.causes],
            "ranks": [codec.encode(rank) for rank in self.ranks],
            "what_if": [_what_if_plain(one) for one in self.what_ifs],
            "fix_all": _what_if_plain(self.fixed) if self.fixed else None,
            "stored": self.stored or None,
        }

    def rows(self) -> list[dict[str, Any]]:
        return codec.encode(self.rows_of)


def _what_if_plain(one: WhatIf) -> dict[str, Any]:
    tokens = {"tokens_before": one.tokens[0], "tokens_after": one.tokens[1]}
    return {
        "what": one.words,
        "step_s": one.step.mid,
        "step_s_low": one.step.low,
        "step_s_high": one.step.high,
        "speedup": one.speedup,
        **tokens,
        "changed_s": one.changed,
    }
