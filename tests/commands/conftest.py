"""A runner in the launcher's place, for commands that make many runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.result.report import RunReport, StepReport
from fourfold.spec.run import RunSpec
from fourfold.verbs import sites


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """The specs that reached the launcher; mpt-tiny with micro batch 3 goes out of memory."""
    seen: list[RunSpec] = []

    def runner(spec: RunSpec, folder: Path, say: object, **how: object) -> RunReport:
        seen.append(spec)
        bad = spec.model.name == "mpt-tiny" and spec.batch.micro_batch == 3
        steps = (StepReport(step=0, seconds=0.5 + len(seen) / 37),)
        return RunReport(spec=spec, outcome="oom" if bad else "ok", steps=steps)

    monkeypatch.setattr(sites, "launch_run", runner)
    return seen
