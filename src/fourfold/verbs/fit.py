"""fit, score: a calibration from measured runs, what to measure next, and how good one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fourfold.cost.fit.accuracy import Result, study
from fourfold.cost.fit.calibration import Calibration, load, shipped, to_json
from fourfold.cost.fit.evidence import calibrate
from fourfold.cost.fit.fit import sample
from fourfold.cost.fit.suggest import suggest
from fourfold.cost.table.reference import read_table
from fourfold.cost.table.reports import report_rows
from fourfold.cost.table.rows import Rows, parse
from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore, notes, warnings
from fourfold.spec.catalog import generation_of
from fourfold.spec.layout import AXES
from fourfold.verbs import Facts
from fourfold.verbs.machine import known_cluster, read_calibration

_SUGGESTED = ("row_id", "stack", "cluster", "model", "seq_len", "n_gpus", *AXES, "mbs", "gbs",
              "sharding", "act_ckpt")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fitted:
    calibration: Calibration

    def json(self) -> str:
        """The file that 'plan', 'predict' and 'score' take as --calibration."""
        return to_json(self.calibration)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"stack": e.stack, "cluster": e.cluster, "rows": e.rows_time,
             "free_time": list(e.free_time), "free_memory": list(e.free_memory),
             **{f"{n}_pct": v for n, v in e.errors_pct.items()}}
            for e in self.calibration.entries
        ]  # fmt: skip


def measured_rows(
    paths: Sequence[str], runs: str | None, cluster: str | None, on_event: OnEvent
) -> list[Rows]:
    tables = [parse(read_table(path)) for path in paths]
    if runs:
        if not cluster:
            raise UserError("is required with --runs", field="cluster")
        tables.append(report_rows(runs, known_cluster(cluster), warnings(on_event)))
    if not tables:
        raise UserError("is required", field="ROWS.csv", hint="or pass --runs DIR")
    return tables


def fit(
    paths: Sequence[str] = (),
    *,
    runs: str | None = None,
    cluster: str | None = None,
    prior: str | None = None,
    name: str | None = None,
    on_event: OnEvent = ignore,
) -> Fitted:
    """To tables of measured runs, and the runs of a store that were made on `cluster`."""
    tables = measured_rows(paths, runs, cluster, on_event)
    if not len(sample(tables)):
        raise UserError(
            "have no measured step time, memory or out-of-memory outcome",
            field="rows",
            hint="fill in step_s, mem_gb or status",
        )
    known = load(prior) if prior else None
    title = name or "+".join(table.table.name for table in tables)
    return Fitted(calibrate(tables, name=title, prior=known, tell=notes(on_event)))


def suggest_runs(
    paths: Sequence[str] = (),
    count: int = 10,
    *,
    runs: str | None = None,
    cluster: str | None = None,
    prior: str | None = None,
    on_event: OnEvent = ignore,
) -> Facts:
    """The runs of the tables whose measurement would teach most, by configuration alone."""
    if count < 1:
        raise UserError("must be at least 1", field="suggest", value=count)
    tables = measured_rows(paths, runs, cluster, on_event)
    known = load(prior) if prior else shipped()
    picks = []
    for rows in tables:
        pairs = set(zip(rows.stack.tolist(), rows.cluster.tolist(), strict=True))
        for stack, place in sorted(pairs):
            index = np.flatnonzero(rows.usable & (rows.stack == stack) & (rows.cluster == place))
            if not index.size:
                continue
            entry, _ = known.entry(stack, place, generation_of(str(rows.hardware[index][0])))
            for i in suggest(rows.columns.take(index), entry, count):
                picks.append({n: rows.table.column(n)[index[i]] for n in _SUGGESTED})
    return Facts({"suggested": picks}, picks)


@dataclass(frozen=True, slots=True)
class Scores:
    results: tuple[Result, ...]

    def plain(self) -> dict[str, Any]:
        return {"scores": self.rows()}

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "how": one.how,
                **{n: (None if v != v else v) for n, v in asdict(one.score).items()},
                "free_parameters": one.free,
            }
            for one in self.results
        ]


def score(
    paths: Sequence[str],
    *,
    calibration: str | None = None,
    how: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> Scores:
    """Each table is one source; `how` may add cv, leave-out and few-shot."""
    tables = [parse(read_table(path)) for path in paths]
    known = read_calibration(calibration)
    return Scores(tuple(study(tables, known, asked=list(how), tell=notes(on_event))))
