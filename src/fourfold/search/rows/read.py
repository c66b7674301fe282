"""The runs that a table describes: a row of the reference schema -> a RunSpec on a machine -> the
cost model's Columns, by the mapping that plans go through. Rows that describe the same run in other
layouts are mapped together.

A row that cannot be expressed keeps its place: `usable` is False there and `reasons` says why.
Blank policy fields take the stack's usual value, and `reasons` says that too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import DEFAULTS, NAMES, Sequences, columns
from fourfold.cost.run import run_facts
from fourfold.cost.table.cells import (
    MEASURED,
    Bools,
    Cells,
    Draft,
    Engines,
    Floats,
    blank,
    each,
    engines,
    measured,
    numbers,
)
from fourfold.cost.table.open_fields import fill_layouts, fill_open, open_fields, open_layouts
from fourfold.cost.table.reference import (
    DATE_COLUMNS,
    INCOMPLETE,
    REFERENCE_COLUMNS,
    SCHEMA,
    RowTable,
    note_words,
)
from fourfold.cost.table.rows import Rows
from fourfold.errors import UserError
from fourfold.search.legal import RULES, Target, case_of
from fourfold.search.rows.run import Described, described
from fourfold.spec.cluster import Cluster
from fourfold.spec.engine import MeasuredAs, engine_of, is_known
from fourfold.spec.layers import LayerRun
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES

# Fields of a run by the columns that say them.
_COLUMN = {
    **{field: column for column, field in REFERENCE_COLUMNS.items() if field},
    **{axis: axis for axis in EXPERT_AXES},
    "top_k": "experts_per_token",
}
# What differs between rows of one run: a label, what was measured, its batch and layout.
_STATED = ("seq_len", "global_batch", "gpus")
_OWN = {"row_id", "source", "model", "note", "flop_rule", "status", *MEASURED, *DATE_COLUMNS}
_OWN |= {_COLUMN[name] for name in (*_STATED, *MODEL_AXES, *EXPERT_AXES)}
_OWN |= {_COLUMN[name] for name in ("dp", "virtual_stages", "micro_batch")}
_SHARED = tuple(name for name in SCHEMA if name not in _OWN)
# Rules that no engine gets around, and the columns of the cost model that they read.
_UNAVOIDABLE = {
    "world",
    "heads",
    "kv-heads",
    "ffn",
    "seq-cp",
    "stages",
    "experts",
    "expert-ranks",
    "expert-width",
    "dp-batch",
}
_ASKED = {axis: axis for axis in (*MODEL_AXES, *EXPERT_AXES)}
_ASKED |= {"gpus": "gpus", "shard": "dp", "seq_len": "seq"}
_ANY_ENGINE = Target(engine=engine_of("generic"), runs=False)
# Rows of the same run in other layouts, and that run.
Group = tuple[NDArray[np.intp], Described]


def parse(table: RowTable, clusters: Mapping[str, Cluster] | None = None) -> Rows:
    """`clusters`: machines by name beside those of the catalogue."""
    draft = Draft(table)
    _name_releases(draft)
    incomplete = [i for i, cell in enumerate(table.column("status")) if cell == INCOMPLETE]
    draft.refuse(incomplete, "the run is incomplete; 'fourfold collect' names its missing fields")
    no_layout = open_layouts(table)
    facts, sequences, runs = _facts(draft, clusters or {}, no_layout)
    _measured_network(table, facts)
    fill_layouts(draft, facts, sequences, no_layout)
    _refuse_impossible(draft, runs, facts)
    facts["micro"] = np.minimum(
        facts["micro"], np.maximum(1.0, np.ceil(facts["batch"] / facts["dp"]))
    )
    unknown = np.array(each(table.column("stack"), lambda stack: not is_known(stack)), dtype=bool)
    draft.assume(np.flatnonzero(unknown), ["stack unknown: generic habits"])
    fill_open(draft, facts, sequences, open_fields(table, facts["pp"]))
    usable = np.ones(table.length, dtype=bool)
    usable[list(draft.bad)] = False
    measured_as, cluster = _keys(table)
    return Rows(
        table=table,
        columns=columns(table.length, sequences, **facts),
        usable=usable,
        reasons=draft.reasons(),
        measured_as=measured_as,
        cluster=cluster,
        hardware=np.array(each(table.column("hardware"), str.lower), dtype=str),
        step_s=measured(table.column("step_s")),
        mem_gb=measured(table.column("mem_gb")),
        status=np.array(table.column("status"), dtype=str),
    )


def _name_releases(draft: Draft) -> None:
    """Give stacks the year of the release that a row names."""
    stacks, releases = draft.table.column("stack"), draft.table.column("engine_release")
    for i in np.flatnonzero(~blank(draft.table, "engine_release")).tolist():
        try:
            stacks[i] = str(MeasuredAs.of(stacks[i]).released(releases[i]))
        except UserError as error:
            draft.refuse([i], f"{error.field} {error.value} {error.rule}")


def _keys(table: RowTable) -> tuple[Engines, NDArray[np.str_]]:
    """Return what each row was measured as, and the cluster or the site that its coefficients are
    kept under: a calibration's keys."""
    stacks = each(table.column("stack"), MeasuredAs.of)
    has_experts = numbers(table.column("experts")) > 0
    runs = [
        engine.with_experts() if has else engine
        for engine, has in zip(stacks, has_experts.tolist(), strict=True)
    ]
    places = zip(runs, table.column("cluster"), strict=True)
    return engines(runs), np.array([run.place(cluster) for run, cluster in places], dtype=str)


def _facts(
    draft: Draft, clusters: Mapping[str, Cluster], no_layout: Bools
) -> tuple[dict[str, Floats], Sequences, list[Group]]:
    table = draft.table
    beside = Draft(table)
    points = _points(beside)
    facts = {name: np.full(table.length, float(DEFAULTS.get(name, 1.0))) for name in NAMES}
    sequences: dict[tuple[LayerRun, ...], int] = {}
    said = each(table.column("note"), lambda note: tuple(vars(note_words(note)).values()))
    shared = zip(*(table.column(name) for name in _SHARED), strict=True)
    left_out = zip(*(blank(table, axis).tolist() for axis in MODEL_AXES), strict=True)
    alike: dict[tuple[Any, ...], list[int]] = {}
    runs: list[Group] = []
    for i, key in enumerate(zip(shared, said, left_out, no_layout.tolist(), strict=True)):
        alike.setdefault(key, []).append(i)
    for (texts, _, axes, is_open), found in alike.items():
        unsaid = None if is_open else tuple(compress(MODEL_AXES, axes))
        words, rows = note_words(table.column("note")[found[0]]), np.array(found)
        cells = Cells(dict(zip(_SHARED, texts, strict=True)), words)
        try:
            run = described(cells, clusters, unsaid)
            here = {name: values[rows] for name, values in points.items()}
            here |= _shards(run, here)
            mapped = run_facts(run.spec, run.cluster, engine_of(cells["stack"].strip()), here)
        except UserError as error:
            draft.refuse(rows, f"{_COLUMN.get(error.field, error.field)} {error.rule}")
            continue
        draft.assume(rows, cells.assumed)
        runs.append((rows, run))
        mapped |= run.beyond
        mapped["sequence"] = sequences.setdefault(mapped.pop("layer_runs"), len(sequences))
        for name, value in mapped.items():
            facts[name][rows] = value
    for row, why in beside.bad.items():  # what is wrong with the model comes first
        draft.refuse([row], why)
    return facts, tuple(sequences), runs


def _points(draft: Draft) -> dict[str, Floats]:
    """Layout and batch of each row, by the fields that a search varies."""
    points = {name: draft.counts(_COLUMN[name]) for name in _STATED}
    points |= {axis: draft.counts(axis, 1.0) for axis in MODEL_AXES}
    points |= {axis: draft.counts(axis, 1.0, none=("", "0")) for axis in EXPERT_AXES}
    ranks = points["tp"] * points["cp"] * points["pp"]
    return points | {
        "virtual_stages": draft.counts(_COLUMN["virtual_stages"], 1.0),
        "dp": draft.counts("dp", np.floor(points["gpus"] / ranks)),
        "micro_batch": draft.counts(_COLUMN["micro_batch"], 1.0),
    }


def _shards(run: Described, point: Mapping[str, Floats]) -> dict[str, Floats]:
    """Replicas of a state that is sharded over a group of ranks, where they come out even."""
    dp, everyone = point["dp"], point["dp"] * point["cp"]
    group = np.where(everyone >= run.grouped_from, run.shard_group or everyone, everyone)
    copies = np.maximum(1.0, np.floor(everyone / group))
    copies = np.where(np.mod(dp, copies) == 0, copies, 1.0)
    return {"replicate": copies, "shard": dp / copies}


def _measured_network(table: RowTable, facts: dict[str, Floats]) -> None:
    """Rates that were measured within a job."""
    nodes = facts["gpus"] / facts["node"]
    seen = np.nan_to_num(measured(table.column("net_gbs"))) * 1e9
    facts["net_seen"] = np.where(nodes > 1.0, seen, 0.0)
    facts["net_open"] = np.where(seen > 0, 0.0, facts["net_open"])
    inside = np.nan_to_num(measured(table.column("net_node_gbs"))) * 1e9
    facts["link"] = np.where(inside > 0, np.minimum(facts["link"], inside), facts["link"])
    # In the slow state the measured rate falls with the nodes; where it does not, the state was
    # fast whatever the note says (nanotron, 512 GPUs).
    fast = facts["net_seen"] * nodes > 3.0 * facts["net"]
    facts["slow"] = np.where(fast, 0.0, facts["slow"])


def _refuse_impossible(draft: Draft, runs: Iterable[Group], f: Mapping[str, Floats]) -> None:
    """Refuse what no engine could run, by the rules that plans ask."""
    for rows, run in runs:
        sizes = {name: f[column][rows] for name, column in _ASKED.items()}
        spec = run.spec
        case = case_of(spec.model, spec.layout, spec.batch, spec.policy, _ANY_ENGINE)
        columns = case.with_columns(sizes | {"batch_sizes": (f["batch"][rows],)})
        for rule in RULES:
            if rule.reason not in _UNAVOIDABLE:
                continue
            broken = np.broadcast_to(np.asarray(rule.broken(columns), dtype=bool), len(rows))
            for i, row in zip(np.flatnonzero(broken), rows[broken], strict=True):
                here = {name: int(values[i]) for name, values in sizes.items()}
                one = case.with_columns(here | {"batch_sizes": (int(f["batch"][row]),)})
                field, value, why, _ = rule.words(one)
                name = field.rpartition(".")[2]
                draft.refuse([row], f"{_COLUMN.get(name, name)} {value} {why}")
