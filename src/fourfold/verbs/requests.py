"""Requests of the verbs; the command line's flags are made from their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal

from fourfold.cost.count.flops import DEFAULT
from fourfold.errors import UserError, nearest
from fourfold.flag import flag
from fourfold.result.report import OUTCOMES
from fourfold.search.choice import MOST_RISK, RISK
from fourfold.spec import (
    Batch,
    Cluster,
    Layout,
    ModelShape,
    Policy,
    Ramp,
    RunSpec,
    check,
    codec,
    words,
)
from fourfold.spec.engine import EXPORTS
from fourfold.spec.model import shape_of
from fourfold.spec.run import nested, short_names
from fourfold.spec.words import DTYPES
from fourfold.units import bytes_per_s_from, count_from, counted, price_from, share_from, size_from
from fourfold.verbs import Request, set_field

Count = Annotated[int, count_from]
Size = Annotated[int, size_from]
Share = Annotated[float, share_from]
Rate = Annotated[float, bytes_per_s_from]
CONVENTION = (f"FLOP convention (default {DEFAULT}; 'fourfold flops' lists them)", "ID")
CALIBRATION = ("calibration from 'fourfold fit' (default: the shipped one)", "FILE")
WEIGHT_DTYPES = tuple(name for name in DTYPES if name not in ("fp8", "fp4"))
STORE = ("run store (default: runs)", "DIR")


def decided(table: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PlanRequest that a run's table decides."""
    table = nested(table)
    known = [*codec.type_hints(RunSpec), "schema"]
    for name in table:
        if name not in known:
            is_flag = name in codec.type_hints(PlanRequest)
            hint = f"use --{name.replace('_', '-')}" if is_flag else nearest(name, short_names())
            raise UserError("unknown field", field=name, hint=hint)
    plain = table.get("batch", {})
    check.that(isinstance(plain, Mapping), "batch", plain, "must be a table")
    sizes = ((name, plain.get(name)) for name in ("seq_len", "global_batch"))
    for name, value in (("model", table.get("model")), *sizes):
        if value is None:
            hint = "'fourfold models' lists presets" if name == "model" else ""
            raise UserError("is required", field=name, hint=hint)
    batch = codec.decode(Batch, {**plain, "micro_batch": None}, "batch")
    return {
        "model": table["model"],
        "layout": table.get("layout", ""),
        "policy": table.get("policy", {}),
        "gpus": table.get("gpus"),
        "micro_batch": plain.get("micro_batch"),
        "seq_len": batch.seq_len,
        "global_batch": batch.global_batch,
        "ramp": batch.ramp,
    }


def layout_fields(
    layout: str, policy: Mapping[str, Any], micro_batch: int | None
) -> dict[str, Any]:
    """Return `layout`, `policy` and `micro_batch` of a PlanRequest from a layout as it is printed,
    such as 'pp4 dp2 cp2 tp1 ring v3'."""
    table = {"layout": layout, "policy": policy, "batch": {"micro_batch": micro_batch}}
    table = words.with_layout_words(table)
    batch = table.pop("batch")
    return {**table, **batch}


def _of_flat(given: dict[str, Any]) -> dict[str, Any]:
    """Return a PlanRequest's fields of keywords that are those of a run's table, all flat."""
    names = [field.name for field in fields(PlanRequest)]
    given = {name: shape_of(value) if name == "model" else value for name, value in given.items()}
    return given if given.keys() <= {*names} else nested(given, names)


@codec.takes_more(_of_flat, short_names)
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(Request):
    """A run with parts left open, the machines, and what to list.

    `layout` names the axes that are decided ('tp8 pp2', or a table; a `Layout` decides all), and
    `policy` the fields; the search chooses the others. `micro_batch` None: searched too. Sizes may
    be texts with units: '8k'; a `global_batch` of '4M' counts tokens.
    """

    model: str | ModelShape
    seq_len: Size
    global_batch: int
    gpus: Size | None = None
    layout: str | Mapping[str, Any] = ""
    policy: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: Size | None = None
    cluster: str | Cluster | None = flag("a known cluster ('fourfold clusters') or a file", "NAME")
    gpu: str | None = flag("instead of a cluster: GPUs of this kind in typical hosts", "ID")
    network: Rate | None = flag("rate of a host's network (default: typical)", "RATE", rare=True)
    profile: str | None = flag("instead of both: profile from 'calibrate --out'", "FILE", rare=True)
    calibration: str | None = flag(*CALIBRATION, rare=True)
    measured: str | None = flag("your measured rows or a store: these runs fit", "PATH", rare=True)
    max_nodes: Size | None = flag("use at most N hosts, trying fewer too", "N", rare=True)
    stack: str | None = flag(
        "engine to predict; 'list' prints them (default: the one measured on the cluster; "
        "'fourfold' is our own)",
        "NAME",
    )
    ramp: Annotated[Ramp, Ramp.parse] | None = flag(
        "batch ramp-up, in sequences", "START,INCREMENT,SAMPLES", rare=True
    )
    tokens: Count | None = flag("training tokens, such as 1.5T; adds days, GPU-hours and cost", "T")
    lost: Share | None = flag(
        "share of training time spent outside steps, such as 10% (default: typical for this many "
        "GPUs, see 'fourfold calendar')",
        "SHARE",
        rare=True,
    )
    price: Annotated[float, price_from] | None = flag(
        "price of a GPU-hour, such as 2.5 or $2.5 (default: the cluster file's)", "X", rare=True
    )
    where: tuple[str, ...] = flag(
        "only layouts that satisfy a condition, such as 'dp % 4 == 0 and mem_gib < 70'",
        "CONDITION",
        default=(),
    )
    capacity: bool = flag(
        "show what a capacity factor of experts would change of #1", rare=True, default=False
    )
    explore: bool = flag("also rank layouts with never-measured features", rare=True, default=False)
    safe: bool = flag("rank only layouts that certainly fit, if any do", rare=True, default=False)
    risk: Share = flag(
        "risk that the first choice does not fit (default 10%)", "SHARE", rare=True, default=RISK
    )
    export: str | None = flag(
        f"write settings for {', '.join(EXPORTS)} (our own engine); implies --stack",
        "ENGINE",
    )
    top: Size = flag("number of layouts to list (default 10)", "N", default=10)
    convention: str = flag(*CONVENTION, rare=True, default=DEFAULT)

    def __post_init__(self) -> None:
        if isinstance(self.global_batch, str):
            plain = {"seq_len": self.seq_len, "global_batch": self.global_batch}
            set_field(self, "global_batch", codec.decode(Batch, plain).global_batch)
        if isinstance(self.layout, Layout):  # it has every axis, unlike a text that names some
            rule = f"uses {counted(self.layout.world, 'GPU')}, not {self.gpus}"
            hint = "a Layout decides every axis; 'tp2' as a text decides one"
            same = self.gpus in (None, self.layout.world)
            check.that(same, "layout", str(self.layout), rule, hint)
            set_field(self, "layout", str(self.layout))
        if isinstance(self.policy, Policy):
            set_field(self, "policy", codec.encode(self.policy))
        if isinstance(self.layout, str):
            for name, value in layout_fields(self.layout, self.policy, self.micro_batch).items():
                set_field(self, name, value)
        Request.__post_init__(self)
        check.whole(1, 10_000, top=self.top)
        check.whole(1, 2**17, max_nodes=self.max_nodes)
        check.whole(0, 2**16, micro_batch=self.micro_batch)
        check.that(0 <= self.risk <= MOST_RISK, "risk", self.risk, "must be from 0 to 0.5")
        check.that(0 <= (self.lost or 0.0) < 1, "lost", self.lost, "must be below 1")
        if self.tokens is not None and not 0 < self.tokens < 1e18:
            raise UserError("must be above 0", field="tokens", value=self.tokens)
        step = self.seq_len * (self.ramp.start if self.ramp else self.global_batch)
        if self.tokens is not None and self.tokens < step:
            rule = f"is less than a step, which takes {step:,} tokens"
            hint = "write 15B for 15e9, 1.5T for 1.5e12"
            raise UserError(rule, field="tokens", value=self.tokens, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter(Request):
    """Which runs of a store; all conditions must hold."""

    runs: str = flag(*STORE, default="runs")
    where: tuple[str, ...] = flag("only runs that satisfy a condition", "CONDITION", default=())
    outcome: tuple[str, ...] = flag("only runs with this outcome", choices=OUTCOMES, default=())
    model: str | None = flag("only runs of this model", "NAME")
    tag: str | None = flag("only runs with this tag", "TAG")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsRequest(RunFilter):
    sort: Literal["started_at", "step_s", "peak_bytes", "model", "outcome"] = flag(
        "sort order (default started_at)", default="started_at"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest(RunFilter):
    """`sources` are stores and files of tables; without any, the store."""

    sources: tuple[str, ...] = flag(
        "stores and files of tables", "SOURCE", names=("sources",), nargs="*", default=()
    )
    style: Literal["mpt", "topology", "scaling"] = flag(
        "table style (default topology)", default="topology"
    )
    convention: str | None = flag(
        f"FLOP convention (default {DEFAULT}; mpt for the mpt style, as published)", "ID"
    )
    cluster: str | Cluster | None = flag(
        "score today's predictions for this cluster", "NAME", rare=True
    )
    profile: str | None = flag("score today's predictions for a profile", "FILE", rare=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest(Request):
    """What is known of a cluster. A measurement replaces the data sheet's rate, a value given here
    replaces both."""

    gpu: str | None = flag("a GPU's id or file", "ID")
    name: str | None = flag("name of the cluster", "NAME")
    hosts: int | None = flag("number of hosts", "N")
    host_gpus: int | None = flag("GPUs per host", "N")
    nvlink_ranks: int | None = flag("GPUs joined by NVLink (default: those of a host)", "N")
    nvlink: str | None = flag("NVLink rate of one GPU per direction, such as 450GB/s", "RATE")
    nvlink_latency: str | None = flag("NVLink latency, such as 3us", "TIME")
    pcie: str | None = flag("PCIe rate of one GPU per direction, beyond NVLink", "RATE")
    network: str | None = flag("network rate of one host per direction, such as 3200Gbit/s", "RATE")
    network_latency: str | None = flag("network latency, such as 10us", "TIME")
    nics: int | None = flag("network cards per host", "N")
    nic_rate: str | None = flag("rate of one network card, such as 400Gbit/s", "RATE")
    price: float | None = flag("price of a GPU-hour, in any currency", "X")
    dispatchers: tuple[str, ...] = flag(
        "libraries for experts built there: deepep, hybridep; or alltoall alone",
        "NAME",
        nargs="+",
        default=(),
    )
    topo: str | None = flag("output of 'nvidia-smi topo -m' on one host", "FILE")
    nccl_tests: tuple[str, ...] = flag("logs of nccl-tests", "FILE", nargs="+", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest(Request):
    """Measured runs: tables, and the runs of a store that were made on `cluster`. `suggest`: name
    that many runs whose measurement would teach most."""

    rows: tuple[str, ...] = flag(
        "measured runs", "ROWS.csv", names=("rows",), nargs="*", default=()
    )
    runs: str | None = flag("also use the runs of this store", "DIR")
    cluster: str | Cluster | None = flag("cluster of those runs", "NAME")
    prior: str | None = flag("calibration to start from", "FILE")
    fix: tuple[str, ...] = flag(
        "a coefficient that was measured apart and is not fitted",
        "NAME=VALUE",
        default=(),
        repeated=True,
        rare=True,
    )
    suggest: int | None = flag("suggest the K most informative runs", "K")
    name: str | None = flag("name of the calibration", "TEXT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(Request):
    """Tables of measured runs, each one source, and how they are predicted besides."""

    rows: tuple[str, ...] = flag(
        "measured runs, one per source", "ROWS.csv", names=("rows",), nargs="+", default=MISSING
    )
    calibration: str | None = flag(*CALIBRATION)
    cv: bool = flag("cross-validated by layout", default=False)
    leave_out: bool = flag("predict each source from the others", default=False)
    few_shot: bool = flag("fit 10 chosen runs per stack and cluster", default=False)
    folds: bool = flag("leave out each source, GPU type and axis value", default=False)
    pairs: bool = flag("runs that differ in one setting: which is faster?", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensRequest(Request):
    """Texts, and the token file to make of them; `vocab` of a model must suffice."""

    files: tuple[str, ...] = flag(
        "text, .jsonl or .parquet; - is text from stdin",
        "FILE",
        names=("files",),
        nargs="+",
        default=MISSING,
    )
    out: str = flag(
        "name of the token file: NAME.bin and NAME.json", "NAME", required=True, default=MISSING
    )
    tokenizer: str = flag(
        "bytes (default), or a Hugging Face tokenizer.json", "FILE", default="bytes"
    )
    text_field: str = flag("field of .jsonl and .parquet that is the text", "NAME", default="text")
    vocab: int | None = flag("vocabulary of the model, to check against", "N")
    end_token: str | None = flag("token after each document, or 'none'", "TEXT")
    force: bool = flag("overwrite an existing NAME", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRequest(Request):
    """One checkpoint, or the newest of a training, and the folder to write."""

    checkpoint: str = flag(
        "training folder, or one checkpoint", "CHECKPOINT", names=("checkpoint",), default=MISSING
    )
    out: str = flag("folder to create", "OUT", names=("out",), default=MISSING)
    dtype: str | None = flag("dtype of the values (default: unchanged)", choices=WEIGHT_DTYPES)
    folder_format: Literal["hf", "dcp"] = "hf"
    force: bool = flag("replace an earlier export", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseRequest(Request):
    """`traces` of one run: files, or a folder of ranks. `what_if`: FIELD=VALUE, several with
    commas. `spec`: a run's table that is known better than
    the trace tells it."""

    traces: tuple[str, ...] = flag(
        "traces of one run: files, or a folder of ranks",
        "TRACE",
        names=("traces",),
        nargs="+",
        default=(),
    )
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
    fix: str | None = flag("also predict the step with all remedies", "all", choices=("all",))
    runs: str | None = flag("also keep it as a run of this store", "DIR")
    spec: Mapping[str, Any] = field(default_factory=dict)
