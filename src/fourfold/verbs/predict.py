"""predict, predict_table: seconds, memory and fit of runs before any of them runs.

dryrun: what any rank of any world would hold, compute and send, counted by the engine itself
without hardware: every operator and collective of a step happens on tensors without memory.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack, overload

from fourfold.cost.memory.peak import REFUSED, SURE, USABLE
from fourfold.cost.memory.unseen import Unseen, unseen_parts
from fourfold.cost.table.predict import FIELDS, RowPredictions
from fourfold.cost.table.predict import predict as predict_rows
from fourfold.cost.table.reference import read_table
from fourfold.errors import UserError
from fourfold.escape import csv_text
from fourfold.events import Event, OnEvent, ignore, progress
from fourfold.launch.local import answers
from fourfold.launch.permit import core_count
from fourfold.result.job import Job, Limits
from fourfold.result.one_rank import RankCount
from fourfold.result.report import Prediction
from fourfold.search.legal import require_legal
from fourfold.search.predict import anywhere
from fourfold.search.predict import predict as predict_specs
from fourfold.search.rows.engines import resolve_rows
from fourfold.search.rows.read import parse
from fourfold.spec import Cluster, RunSpec, codec
from fourfold.spec.layout import AXES
from fourfold.spec.run import AnyRun, run_of
from fourfold.spec.words import OURS
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.machine import GUESS, Machine, known_cluster, machine_of_run, read_calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """What a line about a run begins with."""

    model: str
    gpus: int
    layout: str
    micro_batch: int
    global_batch: int
    seq_len: int


def _named(spec: RunSpec) -> NamedRun:
    batch = spec.batch
    return NamedRun(
        model=spec.model.name,
        gpus=spec.gpus,
        layout=str(spec.layout),
        micro_batch=batch.micro_batch,
        global_batch=batch.global_batch,
        seq_len=batch.seq_len,
    )


@dataclass(frozen=True, slots=True)
class Predicted(Answer):
    specs: tuple[RunSpec, ...]
    predictions: tuple[Prediction, ...]

    def plain(self) -> list[dict[str, Any]]:
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        return [
            {**asdict(_named(spec)), **asdict(one), "fits": one.fits}
            for spec, one in zip(self.specs, self.predictions, strict=True)
        ]


@overload
def predict(run: AnyRun, stack: str = ..., **machine: Unpack[Machine]) -> Prediction: ...
@overload
def predict(run: Sequence[AnyRun], stack: str = ..., **machine: Unpack[Machine]) -> Predicted: ...
def predict(
    run: AnyRun | Sequence[AnyRun], stack: str = OURS, **machine: Unpack[Machine]
) -> Prediction | Predicted:
    """Return what one run or several will take as `stack` would run them: the same numbers as in
    'plan'. Runs of our own engine without a machine are predicted on this host."""
    is_one = not isinstance(run, Sequence)
    specs = tuple(map(run_of, [run] if is_one else run))
    known, cluster_of = machine_of_run(stack, **machine)
    predictions = predict_specs(
        specs,
        cluster=cluster_of,
        profile=known.profile,
        calibration=known.calibration,
        stack=stack,
        cores=core_count(),
    )
    found = tuple(
        _with_basis(one, spec, cluster_of(spec), machine.get("profile") or GUESS)
        for spec, one in zip(specs, predictions, strict=True)
    )
    return found[0] if is_one else Predicted(specs, found)


def _with_basis(
    prediction: Prediction, spec: RunSpec, cluster: Cluster | None, other: str
) -> Prediction:
    limit = USABLE * cluster.device.memory_bytes if cluster else 0.0
    basis = cluster.name if cluster else other
    return replace(prediction, limit_bytes=float(spec.memory_limit or limit), basis=basis)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTable(Answer):
    """A table's rows with seconds, memory and fit; NaN where a row cannot be expressed."""

    row_ids: list[str]
    answers: RowPredictions
    calibration: str
    predicted: int
    fit: int
    may_fit: int

    def plain(self) -> list[dict[str, Any]]:
        """Return the rows with numbers as numbers; None where a row cannot be predicted."""
        return [{name: _value(name, cell) for name, cell in row.items()} for row in self.rows()]

    def rows(self) -> list[dict[str, Any]]:
        return [dict(zip(FIELDS, row, strict=True)) for row in self._cells()]

    def csv(self) -> str:
        return csv_text(itertools.chain([FIELDS], self._cells()))

    def _cells(self) -> Iterator[tuple[str, ...]]:
        rows = self.answers
        numbers = (
            rows.step_s,
            rows.low_s,
            rows.high_s,
            rows.tokens_s_gpu,
            rows.tflops_gpu,
            rows.mfu_pct,
            rows.mem_gb,
        )
        # Every digit: a run's seconds and bytes are those of its plan to the last bit.
        texts = [["" if v != v else repr(v) for v in column.tolist()] for column in numbers]
        known = [bool(text) for text in texts[0]]
        verdicts = [
            f"{yes:d}" if is_known else ""
            for yes, is_known in zip(rows.fits.tolist(), known, strict=True)
        ]
        chances = ["" if v != v else repr(v) for v in rows.fit_chance.tolist()]
        return zip(
            self.row_ids, *texts, verdicts, chances, rows.reasons, rows.provenance, strict=True
        )


def _value(name: str, cell: str) -> str | float | bool | None:
    if name in ("row_id", "reason", "provenance"):
        return cell
    number = float(cell) if cell else None
    return bool(number) if name == "fits" and number is not None else number


def predict_table(
    path: str,
    *,
    cluster: str | Cluster | None = None,
    calibration: str | None = None,
    on_event: OnEvent = ignore,
) -> PredictedTable:
    """Every row of a table in the reference schema; `cluster`: as if it ran there."""
    known = read_calibration(calibration)
    place = known_cluster(cluster) if cluster else None
    gc.disable()  # a large table is millions of texts and no cycles: walking them costs seconds
    try:
        table = read_table(path)
        if table.length > 50_000:
            on_event(Event(f"predicting {counted(table.length, 'row')}"))
        if place is not None:
            cells = {
                "cluster": place.name,
                "hardware": place.device.id,
                "nvlink_domain": "",
                "gpus_per_node": str(place.host_gpus),
            }
            table.texts.update({name: [cell] * table.length for name, cell in cells.items()})
        engines = resolve_rows(table, known, place)
        rows = parse(table, {place.name.lower(): place} if place else {})
        answers = predict_rows(rows, known, [row.priced for row in engines])
        reasons = [
            "; ".join(filter(None, (row.note, reason)))
            for row, reason in zip(engines, answers.reasons, strict=True)
        ]
        answers = replace(answers, reasons=reasons)
    finally:
        gc.enable()
    chance = answers.fit_chance[rows.usable]
    return PredictedTable(
        row_ids=table.column("row_id"),
        answers=answers,
        calibration=known.name,
        predicted=int(rows.usable.sum()),
        fit=int((chance > SURE).sum()),
        may_fit=int(((chance >= REFUSED) & (chance <= SURE)).sum()),
    )


_LIMITS = Limits(start_s=1800.0, step_s=1800.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(Answer):
    """Counts of ranks, one a stage; `unseen` is what a GPU holds and a dry run cannot see."""

    model: str
    layout: str
    gpus: int
    optimizer: str  # with the format of Muon's iterations
    stages: tuple[RankCount, ...]
    worst_stage: int
    unseen: tuple[Unseen, ...]
    unseen_bytes: int
    peak_with_unseen_bytes: int
    extrapolation: str

    @classmethod
    def of_counts(cls, spec: RunSpec, counts: Sequence[RankCount]) -> DryRun:
        worst, unseen = _worst(counts), unseen_parts(anywhere(spec))
        unseen_bytes = sum(part.bytes for part in unseen)
        return cls(
            model=spec.model.name,
            layout=str(spec.layout),
            gpus=spec.gpus,
            optimizer=spec.policy.optimizer_name,
            stages=tuple(counts),
            worst_stage=worst.stage,
            unseen=unseen,
            unseen_bytes=unseen_bytes,
            peak_with_unseen_bytes=worst.peak_bytes + unseen_bytes,
            extrapolation=_extrapolation(counts[0]),
        )

    @property
    def worst(self) -> RankCount:
        return _worst(self.stages)

    def moved_bytes(self, count: RankCount, axis: str) -> int:
        return sum(traffic.bytes for traffic in count.comm if traffic.axis == axis)

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of each rank, and bytes of its collectives by axis."""
        shared = {"model": self.model, "layout": self.layout}
        return [
            shared
            | {n: v for n, v in codec.encode(count).items() if not isinstance(v, list | dict)}
            | {f"{axis}_bytes": self.moved_bytes(count, axis) for axis in (*AXES, "ep")}
            for count in self.stages
        ]


def _worst(counts: Sequence[RankCount]) -> RankCount:
    return max(counts, key=lambda count: count.peak_bytes)


def _extrapolation(count: RankCount) -> str:
    if not count.counted_at:
        return ""
    few, more = count.counted_at
    return (
        f"counted at {few} and {more} micro batches, extrapolated linearly "
        f"to the {count.micro_batches} of the step"
    )


def dryrun(
    run: AnyRun, *, rank: int | None = None, stages: bool = False, on_event: OnEvent = ignore
) -> DryRun:
    """Of rank 0 or `rank`, or of one rank of every pipeline stage; cores share the work."""
    spec, ranks = run_of(run), [rank or 0]
    if stages:
        ranks = [stage * spec.layout.stride("pp") for stage in range(spec.layout.pp)]
    elif not 0 <= ranks[0] < spec.gpus:
        raise UserError(f"must be from 0 to {spec.gpus - 1}", field="rank", value=rank)
    require_legal(spec)
    job = Job(
        job="dryrun",
        # Variables of the ranks change no count.
        specs=(replace(spec, device="cpu", policy=replace(spec.policy, env=())),),
        ranks=min(len(ranks), core_count()),
        options=(("ranks", ",".join(map(str, ranks))),),
        limits=_LIMITS,
    )
    return DryRun.of_counts(spec, answers(job, RankCount, ranks, progress(on_event)))
