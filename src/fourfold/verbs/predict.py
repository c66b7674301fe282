"""predict: seconds, memory and fit of runs before any of them runs; of specs, or of a table."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

from fourfold.cost.memory.peak import USABLE
from fourfold.cost.table.predict import FIELDS, RowPredictions
from fourfold.cost.table.predict import predict as predict_rows
from fourfold.cost.table.reference import read_table
from fourfold.cost.table.rows import parse
from fourfold.escape import csv_text
from fourfold.events import Event, OnEvent, ignore
from fourfold.launch.permit import core_count
from fourfold.result.report import Prediction
from fourfold.search.predict import predict as predict_specs
from fourfold.spec.cluster import Cluster
from fourfold.spec.run import RunSpec
from fourfold.verbs.machine import GUESS, known_cluster, read_calibration, read_profile


@dataclass(frozen=True, slots=True)
class Predicted:
    """One prediction for each run, in their order."""

    specs: tuple[RunSpec, ...]
    predictions: tuple[Prediction, ...]

    def plain(self) -> list[dict[str, Any]]:
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "model": spec.model.name,
                "gpus": spec.gpus,
                "layout": str(spec.layout),
                "micro_batch": spec.batch.micro_batch,
                "global_batch": spec.batch.global_batch,
                "seq_len": spec.batch.seq_len,
                **asdict(said),
                "fits": said.fits,
            }
            for spec, said in zip(self.specs, self.predictions, strict=True)
        ]


@overload
def predict(
    run: RunSpec,
    stack: str = ...,
    *,
    cluster: str | Cluster | None = ...,
    profile: str | None = ...,
    calibration: str | None = ...,
) -> Prediction: ...
@overload
def predict(
    run: Sequence[RunSpec],
    stack: str = ...,
    *,
    cluster: str | Cluster | None = ...,
    profile: str | None = ...,
    calibration: str | None = ...,
) -> Predicted: ...
def predict(
    run: RunSpec | Sequence[RunSpec],
    stack: str = "fourfold",
    *,
    cluster: str | Cluster | None = None,
    profile: str | None = None,
    calibration: str | None = None,
) -> Prediction | Predicted:
    """What one run or several will take as `stack` would run them: the same numbers as in 'plan'.
    Without a cluster or a profile, a rough guess from this host's cores."""
    specs = (run,) if isinstance(run, RunSpec) else tuple(run)
    named = known_cluster(cluster) if cluster else None
    said = predict_specs(
        specs,
        cluster=named,
        profile=read_profile(profile) if profile else None,
        calibration=read_calibration(calibration) if calibration else None,
        stack=stack,
        cores=core_count(),
    )
    basis = named.name if named else profile or GUESS
    limit = USABLE * named.device.memory_bytes if named else 0.0
    found = tuple(
        replace(one, limit_bytes=float(spec.memory_limit or limit), basis=basis)
        for spec, one in zip(specs, said, strict=True)
    )
    return found[0] if isinstance(run, RunSpec) else Predicted(specs, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTable:
    """A table's rows with seconds, memory and fit; NaN where a row cannot be expressed."""

    row_ids: list[str]
    answers: RowPredictions
    calibration: str
    predicted: int
    fit: int
    tight: int

    def rows(self) -> list[dict[str, Any]]:
        return [dict(zip(FIELDS, row, strict=True)) for row in self._cells()]

    def csv(self) -> str:
        return csv_text(itertools.chain([FIELDS], self._cells()))

    def _cells(self) -> itertools.chain[Any] | Any:
        said = self.answers
        numeric = (
            said.step_s, said.low_s, said.high_s, said.tokens_s_gpu, said.tflops_gpu,
            said.mfu_pct, said.mem_gb,
        )  # fmt: skip
        texts = [["" if v != v else f"{v:.6g}" for v in column.tolist()] for column in numeric]
        known = [value == value for value in said.step_s.tolist()]
        verdicts = [
            [
                ("1" if yes else "0") if is_known else ""
                for yes, is_known in zip(c, known, strict=True)
            ]
            for c in (said.fits.tolist(), said.tight.tolist())
        ]
        return zip(self.row_ids, *texts, *verdicts, said.reasons, strict=True)


def predict_table(
    path: str, *, calibration: str | None = None, on_event: OnEvent = ignore
) -> PredictedTable:
    """Every row of a table in the reference schema."""
    known = read_calibration(calibration)
    gc.disable()  # a large table is millions of texts and no cycles: walking them costs seconds
    try:
        table = read_table(path)
        if table.length > 50_000:
            on_event(Event(f"predicting {table.length} rows"))
        rows = parse(table)
        answers = predict_rows(rows, known)
    finally:
        gc.enable()
    fits, tight = answers.fits[rows.usable], answers.tight[rows.usable]
    return PredictedTable(
        row_ids=table.column("row_id"),
        answers=answers,
        calibration=known.name,
        predicted=int(rows.usable.sum()),
        fit=int((fits & ~tight).sum()),
        tight=int(tight.sum()),
    )
