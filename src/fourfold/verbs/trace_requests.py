"""What can be asked of traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fourfold.flag import flag
from fourfold.spec.cluster import Cluster
from fourfold.verbs.requests import STORE


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseRequest:
    """`what_if`: FIELD=VALUE, several with commas. `spec`: a run's table that is known better than
    the trace tells it."""

    model: str | None = flag("the model, where the trace's shapes do not say it", "NAME")
    log: str | None = flag("the run's log, where it says more than the trace", "FILE")
    cluster: str | Cluster | None = flag("cluster whose GPUs it ran on", "NAME")
    gpu: str | None = flag("GPU it ran on (default: as the trace says)", "ID")
    profile: str | None = flag("rates from 'calibrate --out' on that machine", "FILE")
    calibration: str | None = flag("calibration from 'fit' or 'calibrate'", "FILE", rare=True)
    what_if: tuple[str, ...] = flag(
        "predict the step with this changed: tp=4, recompute=none, compile=true, loader=0 ...",
        "FIELD=VALUE",
        names=("--what-if",),
        default=(),
    )
    fix: str | None = flag("'all': the step with every remedy", "all", choices=("all",))
    runs: str | None = flag(f"also keep it as a run: {STORE[0]}", STORE[1])
    spec: dict[str, Any] = field(default_factory=dict)
