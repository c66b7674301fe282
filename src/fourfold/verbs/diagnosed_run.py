"""A diagnosis as a stored run, a row like any other."""

from __future__ import annotations

from datetime import UTC, datetime

from fourfold.errors import UserError
from fourfold.result.files.store import Store
from fourfold.result.report import Prediction, RunReport, StepReport
from fourfold.verbs.diagnosis import Diagnosis


def keep(diagnosis: Diagnosis, root: str) -> str:
    spec = diagnosis.found.spec
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
    expected = diagnosis.expected.step if diagnosis.expected else None
    report = RunReport(
        spec=spec,
        outcome="ok",
        environment=tuple(sorted(environment.items())),
        steps=steps,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        predicted=Prediction(
            step_s=expected.mid, step_s_low=expected.low, step_s_high=expected.high,
            peak_bytes=0.0, basis=diagnosis.basis,
        ) if expected else None,
    )  # fmt: skip
    return str(Store(root).keep(report).folder)
