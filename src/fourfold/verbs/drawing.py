"""What the model says of stored runs, beside what was measured: bytes by kind of the first, the
fullest middle and the last stage, and the pipeline's timeline; of many runs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.memory.peak import stage_kinds
from fourfold.cost.predict import predictions
from fourfold.cost.run import columns_of
from fourfold.cost.schedule import Timeline
from fourfold.errors import UserError
from fourfold.launch.permit import core_count
from fourfold.search.explain import pipeline_timeline
from fourfold.search.predict import rough_cpu
from fourfold.search.query import entry_for, usual_cluster
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster, device_id
from fourfold.spec.run import RunSpec

STACK = "fourfold"
# More boxes than this cannot be read in a chart of a page.
MOST_EVENTS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Predicted bytes by kind on the fullest rank of a stage, or of several alike."""

    stage: str
    kinds_bytes: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """`machine`: whose speed the timeline has. `no_timeline`: why there is none."""

    machine: str
    stages: tuple[StageMemory, ...]
    timeline: Timeline | None
    no_timeline: str


def draw_runs(
    specs: Sequence[RunSpec], devices: Sequence[str], *, most_events: int
) -> list[Drawing | None]:
    """One for each run, in order; `devices` are the names that the runs gave theirs. None where
    the machine's description lacks what a run needs (a format's peak). The first runs have their
    timelines, until those have `most_events` in all."""
    allowed = _within(specs, most_events)
    groups: dict[tuple[int, str], list[int]] = {}
    for place, (spec, device) in enumerate(zip(specs, devices, strict=True)):
        groups.setdefault((spec.gpus, device), []).append(place)
    drawn: list[Drawing | None] = [None] * len(specs)
    for (gpus, device), places in groups.items():
        machine = _machine(device, gpus)
        entry, _ = entry_for(calibrations.shipped(), STACK, machine)
        known = [place for place in places if _has_peak(specs[place], machine)]
        if not known:
            continue
        c = columns_of([specs[place] for place in known], cluster=machine, stack=STACK)
        kinds, said = stage_kinds(c, entry.coefficients), predictions(c, entry)
        for i, place in enumerate(known):
            spec, why = specs[place], allowed[place]
            one = said.take(np.array([i]))
            name = f"{spec.model.name}, {spec.layout}"
            drawn[place] = Drawing(
                machine=machine.name,
                stages=_stages(spec.layout.pp, kinds, i),
                timeline=None if why else pipeline_timeline(one, name),
                no_timeline=why,
            )
    return drawn


def _within(specs: Sequence[RunSpec], most_events: int) -> list[str]:
    """Why each run's timeline is not drawn, '' where it is."""
    why, left = [], most_events
    for spec in specs:
        stages = spec.layout.pp * spec.policy.virtual_stages
        events = 2 * stages * spec.batch.micro_count(spec.layout.dp)
        if spec.layout.pp == 1:
            why.append("one stage: no pipeline")
        elif events > MOST_EVENTS:
            why.append(f"{events:,} actions are too many for a chart")
        elif events > left:
            why.append("timelines of faster runs fill this page")
        else:
            left -= events
            why.append("")
    return why


def _machine(device: str, gpus: int) -> Cluster:
    known = device_id(device, catalog.device_names())
    return usual_cluster(catalog.device(known), gpus) if known else rough_cpu(gpus, core_count())


def _has_peak(spec: RunSpec, machine: Cluster) -> bool:
    try:
        machine.device.peak(spec.policy.precision)
    except UserError:
        return False
    return True


def _stages(pp: int, kinds: list[dict[str, Floats]], i: int) -> tuple[StageMemory, ...]:
    """The first, the fullest middle and the last, as many as there are."""
    middle = "stage 1" if pp == 3 else f"fullest of stages 1 to {pp - 2}"
    named = [("stage 0", kinds[0]), (middle, kinds[1]), (f"stage {pp - 1}", kinds[-1])]
    shown = {1: named[:1], 2: named[::2]}.get(pp, named)
    return tuple(
        StageMemory(stage=stage, kinds_bytes={name: float(part[i]) for name, part in parts.items()})
        for stage, parts in shown
    )
