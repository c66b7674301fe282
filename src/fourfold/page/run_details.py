"""What the page knows of a stored run beyond its row: how to run it again, where it ran, every
step, memory by rank; and what the model says of it: memory by kind, and its pipeline.

The command line that asks the same again: of a stored run, of a plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fourfold import options
from fourfold.cost.columns import Floats
from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.memory.peak import stage_kinds
from fourfold.cost.predict import predictions
from fourfold.cost.run import columns_of
from fourfold.cost.schedule import Timeline
from fourfold.errors import UserError
from fourfold.escape import shell_line, toml_text
from fourfold.result.quality import flags
from fourfold.result.report import RankMemory, RunReport
from fourfold.search.explain import pipeline_timeline
from fourfold.search.resolve import resolve
from fourfold.spec import Cluster, Ramp, RunSpec, catalog, codec
from fourfold.spec.engine import engine_of
from fourfold.spec.sweep import leaves
from fourfold.spec.words import OURS
from fourfold.units import bytes_per_s_from
from fourfold.verbs.machine import local_guess, named_cluster
from fourfold.verbs.question import named_axes
from fourfold.verbs.report import Report
from fourfold.verbs.requests import PlanRequest, ReportRequest
from fourfold.verbs.run_shown import post_mortem

# Of a cluster that is described, not named.
CLUSTER_FILE, MODEL_FILE = "cluster.toml", "model.toml"
_RUN_FLAGS = ("steps", "warmup", "data", "tag", "note")


def bench_command(spec: RunSpec) -> str:
    """A line for a shell; a model that no preset has needs a file of the run, which is made."""
    plain = codec.encode(spec, sparse=True)
    model, env = plain.pop("model"), plain.get("policy", {}).pop("env", {})
    if spec.settle and "warmup" not in plain:
        plain.pop("settle")
    elif not spec.settle:
        plain["warmup"] = spec.warmup  # which says that it is not to be prolonged
    if not catalog.is_preset(spec.model):
        text = toml_text(
            {"model": model, **plain, "policy": plain.get("policy", {}) | {"env": env}}
        )
        return f"cat > run.toml <<'END'\n{text}END\nfourfold bench --spec run.toml"
    words = ["fourfold", "bench", "--model", spec.model.name, *_flags(plain)]
    words += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    return shell_line(words)


def _flags(plain: Mapping[str, Any]) -> Iterator[str]:
    """Every field by its own flag, or by --set."""
    flags = {one.dest: one.names[0] for one in options.run_options(*_RUN_FLAGS) if one.dest}
    for path, value in leaves(plain):
        leaf = path.rpartition(".")[2]
        if leaf in flags:
            yield from _words(flags[leaf], str(value))
        else:
            yield from ("--set", f"{path}={json.dumps(value)}")


def plan_command(request: PlanRequest) -> str:
    """A cluster or a model without a name needs a file, which is made."""
    name, file = request.model, ""
    if not isinstance(name, str):
        is_preset = catalog.is_preset(name)
        file = "" if is_preset else f"cat > {MODEL_FILE} <<'END'\n{codec.to_toml(name)}END\n"
        name = name.name if is_preset else MODEL_FILE
    sizes = ("seq_len", "micro_batch", "global_batch")
    run = {
        "gpus": request.gpus,
        "layout": layout_table(request.layout),
        "batch": {size: getattr(request, size) for size in sizes},
        "policy": dict(request.policy),
    }
    words = ["--model", name, *_flags(dict(_given(run))), *_request_flags(request)]
    if isinstance(request.cluster, Cluster):
        file += f"cat > {CLUSTER_FILE} <<'END'\n{codec.to_toml(request.cluster)}END\n"
    return file + shell_line(["fourfold", "plan", *words])


def report_command(request: ReportRequest) -> str:
    return shell_line(["fourfold", "report", *request.sources, *_request_flags(request)])


def _given(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Without what is None, also in tables below."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield name, dict(_given(value))
        elif value is not None:
            yield name, value


def layout_table(layout: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(layout, Mapping):
        return dict(layout)
    whole, named = named_axes(layout)
    return {axis: size for axis, size in whole.to_plain().items() if axis in named}


def _request_flags(request: Any) -> Iterator[str]:
    """Flags of the fields that differ from their defaults."""
    fields = {field.name: field for field in dataclasses.fields(request)}
    for one in options.of(type(request)):
        value, flag = getattr(request, one.dest), one.names[0]
        if value is None or value == fields[one.dest].default or not flag.startswith("-"):
            continue
        if isinstance(value, tuple):
            yield from (word for item in value for word in _words(flag, str(item)))
        elif value is True:
            yield flag
        else:
            yield from _words(flag, _rate(value) if one.read is bytes_per_s_from else _text(value))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9!r}GB/s"


def _words(flag: str, text: str) -> tuple[str, ...]:
    """A text that looks like a flag must not stand alone."""
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)


def _text(value: Any) -> str:
    if isinstance(value, Ramp):
        return ",".join(map(str, dataclasses.astuple(value)))
    return CLUSTER_FILE if isinstance(value, Cluster) else str(value)


# A page of thousands of runs stays small enough to be mailed.
_MOST_EVENTS = 100_000
# More boxes than this cannot be read in a chart of a page.
MOST_EVENTS = 2_000
# Of a run whose device the catalogue does not describe.
_UNKNOWN: dict[str, Any] = {
    "stages": [],
    "timeline": None,
    "no_timeline": "this device is not described",
}


def run_details(answer: Report, environments: list[dict[str, str]]) -> list[dict[str, Any] | None]:
    """One for each record, None for a row of a table. `environments` gets those that differ."""
    reports = {
        place: stored.report() for place, stored in enumerate(answer.stored) if stored is not None
    }
    drawings = _drawings(answer, reports)
    known: dict[tuple[tuple[str, str], ...], int] = {}
    found: list[dict[str, Any] | None] = []
    for place, stored in enumerate(answer.stored):
        if stored is None:
            found.append(None)
            continue
        environment = known.setdefault(reports[place].environment, len(known))
        one = {"folder": str(stored.folder), "environment": environment}
        found.append(_detail(reports[place]) | one | drawings[place])
    environments += [dict(one) for one in known]
    return found


def _drawings(answer: Report, reports: dict[int, RunReport]) -> dict[int, dict[str, Any]]:
    """The fastest runs first: a page has room for so many timelines."""
    order = sorted(reports, key=lambda place: -(answer.records[place].tokens_s_gpu or 0.0))
    specs = [reports[place].spec for place in order]
    devices = [dict(reports[place].environment).get("device", "") for place in order]
    return dict(zip(order, draw_runs(specs, devices, most_events=_MOST_EVENTS), strict=True))


def _detail(report: RunReport) -> dict[str, Any]:
    failure, limit = report.failure, report.predicted.limit_bytes if report.predicted else 0.0
    why = post_mortem(report)
    return {
        "command": bench_command(report.spec),
        "steps": [_rounded(step.seconds) for step in report.steps],
        "warmup_steps": [i for i, step in enumerate(report.steps) if step.warmup],
        "losses": [_rounded(step.loss) for step in report.steps],
        "memory": _fullest(report),
        "limit_bytes": why.get("limit_bytes") or report.spec.memory_limit or limit or None,
        "flags": flags(report) if report.outcome == "ok" else [],
        "failure": f"{failure.who}: {failure.message}" if failure else "",
        "held_bytes": why.get("kinds_bytes", {}),
        "fixes": [dataclasses.asdict(one) for one in report.remedies],
    }


def _rounded(value: float | None) -> float | None:
    """Seven digits: more than any clock has, half the bytes."""
    return None if value is None else float(f"{value:.7g}")


def _fullest(report: RunReport) -> list[list[int]]:
    """[stage, peak bytes, reserved bytes] of the fullest rank of each stage."""
    found: dict[int, RankMemory] = {}
    for one in report.memory:
        if one.stage not in found or one.peak_bytes > found[one.stage].peak_bytes:
            found[one.stage] = one
    return [[at, found[at].peak_bytes, found[at].reserved_bytes] for at in sorted(found)]


def draw_runs(
    specs: Sequence[RunSpec], devices: Sequence[str], *, most_events: int
) -> list[dict[str, Any]]:
    """Of each run: predicted bytes by kind on the fullest rank of the first, the fullest middle and
    the last stage, and its timeline or why it has none. `devices` are the names that the runs gave
    theirs. The first runs have their timelines, until those have `most_events` in all."""
    import numpy as np

    allowed = _within(specs, most_events)
    groups: dict[tuple[int, str, bool], list[int]] = {}
    for place, (spec, device) in enumerate(zip(specs, devices, strict=True)):
        groups.setdefault((spec.gpus, device, spec.model.moe is not None), []).append(place)
    drawn = [_UNKNOWN] * len(specs)
    for (gpus, device, experts), places in groups.items():
        machine = named_cluster(device, gpus) or local_guess(gpus)
        entry = resolve(OURS, machine, calibrations.shipped(), experts=experts).entry
        known = [place for place in places if _has_peak(specs[place], machine)]
        if not known:
            continue
        c = columns_of([specs[place] for place in known], cluster=machine, engine=engine_of(OURS))
        kinds, said = stage_kinds(c, entry.coefficients), predictions(c, entry)
        for i, place in enumerate(known):
            spec, why = specs[place], allowed[place]
            name, one = f"{spec.model.name}, {spec.layout}", said.take(np.array([i]))
            drawn[place] = {
                "stages": _stages(spec.layout.pp, kinds, i),
                "timeline": None if why else timeline_data(pipeline_timeline(one, name)),
                "no_timeline": why,
            }
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


def _has_peak(spec: RunSpec, machine: Cluster) -> bool:
    try:
        machine.device.peak(spec.policy.precision_name)
    except UserError:
        return False
    return True


def _stages(pp: int, kinds: list[dict[str, Floats]], i: int) -> list[tuple[str, dict[str, float]]]:
    """As many as there are."""
    middle = "stage 1" if pp == 3 else f"fullest of stages 1 to {pp - 2}"
    named = [("stage 0", kinds[0]), (middle, kinds[1]), (f"stage {pp - 1}", kinds[-1])]
    shown = {1: named[:1], 2: named[::2]}.get(pp, named)
    return [(name, {kind: float(part[i]) for kind, part in parts.items()}) for name, parts in shown]


def timeline_data(line: Timeline) -> dict[str, Any]:
    """Boxes as [rank, kind, chunk, micro batch, start, end]: times in units of a millionth of the
    step, which no screen can tell apart."""
    unit = line.step_s / 1e6
    return {
        "schedule": line.schedule,
        "stages": line.stages,
        "virtual_stages": line.virtual_stages,
        "micros": line.micros,
        "step_s": line.step_s,
        "bubble": line.bubble,
        "events": [
            [
                e.rank,
                e.action.kind,
                e.action.chunk,
                e.action.micro,
                round(e.start_s / unit),
                round(e.end_s / unit),
            ]
            for e in line.events
        ],
    }
