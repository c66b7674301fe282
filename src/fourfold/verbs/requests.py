"""What may be asked of the verbs? One frozen dataclass each; the command line's flags are made from
the same fields. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fourfold.cost.count.flops import DEFAULT
from fourfold.errors import UserError
from fourfold.flag import flag
from fourfold.result.report import OUTCOMES
from fourfold.spec import codec
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.cluster import Cluster
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from fourfold.units import count_from, size_from

Count = Annotated[int, count_from]
Size = Annotated[int, size_from]
CONVENTION = flag(
    f"FLOP convention (default {DEFAULT}; 'fourfold flops' lists them)", "ID", rare=True
)
CALIBRATION = flag("calibration from 'fourfold fit' (default: the shipped one)", "FILE", rare=True)
WHERE = "only layouts that satisfy a condition, such as 'dp % 4 == 0 and mem_gib < 70'"


def decided(table: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PlanRequest that a run's table decides."""
    plain, policy = (_table(table, name) for name in ("batch", "policy"))
    sizes = ((name, plain.get(name)) for name in ("seq_len", "global_batch"))
    for name, value in (("model", table.get("model")), *sizes):
        if value is None:
            hint = "'fourfold models' lists presets" if name == "model" else ""
            raise UserError("is required", field=name, hint=hint)
    batch = codec.decode(Batch, {**plain, "micro_batch": None}, "batch")
    model, layout = table["model"], table.get("layout", "")
    if not isinstance(layout, str | Mapping):
        raise UserError("must be a table or a text such as 'tp8 pp2'", field="layout", value=layout)
    fields = (
        (RunSpec, "gpus", table.get("gpus")),
        (Batch, "micro_batch", plain.get("micro_batch")),
    )
    return {
        "model": model if isinstance(model, str) else codec.decode(ModelShape, model, "model"),
        "layout": layout,
        "policy": policy,
        **{
            name: codec.decode_value(codec.type_hints(cls)[name], value, name)
            for cls, name, value in fields
            if value is not None
        },
        "seq_len": batch.seq_len,
        "global_batch": batch.global_batch,
        "ramp": batch.ramp,
    }


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, Mapping):
        raise UserError("must be a table", field=name, value=value)
    return value


def at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError("must be 1 or more", field=name.replace("_", "-"), value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A run with parts left open, the machines, and what to list.

    `layout` names the axes that are decided ('tp8 pp2', or a table), `policy` the fields; the
    search chooses the others. `micro_batch` None: searched too.
    """

    model: str | ModelShape
    seq_len: int
    global_batch: int
    gpus: int | None = None
    layout: str | Mapping[str, Any] = ""
    policy: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    cluster: str | Cluster | None = field(
        default=None,
        metadata=flag("a known cluster (see 'fourfold clusters') or a TOML file", "NAME"),
    )
    gpu: str | None = field(
        default=None,
        metadata=flag("instead of a cluster: GPUs of this kind in typical hosts", "ID"),
    )
    profile: str | None = field(
        default=None,
        metadata=flag("instead of both: a profile from 'calibrate --out'", "FILE", rare=True),
    )
    calibration: str | None = field(default=None, metadata=CALIBRATION)
    max_nodes: int | None = field(
        default=None, metadata=flag("use at most N hosts, trying fewer too", "N", rare=True)
    )
    stack: str | None = field(
        default=None,
        metadata=flag(
            "engine to predict; 'list' prints them (default: the one measured on the cluster; "
            "'fourfold' is our own)",
            "NAME",
        ),
    )
    ramp: Annotated[Ramp, Ramp.parse] | None = field(
        default=None,
        metadata=flag("batch ramp-up, in sequences", "START,INCREMENT,SAMPLES", rare=True),
    )
    tokens: Count | None = field(
        default=None,
        metadata=flag("training tokens, such as 1.5T; adds days, GPU-hours and cost", "T"),
    )
    price: float | None = field(
        default=None,
        metadata=flag("price of a GPU-hour (default: from the cluster file)", "X", rare=True),
    )
    where: tuple[str, ...] = field(default=(), metadata=flag(WHERE, "CONDITION"))
    explore: bool = field(
        default=False,
        metadata=flag("also rank layouts with features that have no measured runs", rare=True),
    )
    safe: bool = field(
        default=False,
        metadata=flag("rank only layouts that are certain to fit, if there are any", rare=True),
    )
    export: str | None = field(
        default=None,
        metadata=flag(
            "write settings for megatron, torchtitan, torchtitan-0.2, nanotron or torchrun (our "
            "own engine); implies --stack",
            "ENGINE",
        ),
    )
    top: int = field(default=10, metadata=flag("number of layouts to list (default 10)", "N"))
    convention: str = field(default=DEFAULT, metadata=CONVENTION)

    def __post_init__(self) -> None:
        at_least_one(top=self.top)
        if self.max_nodes is not None:
            at_least_one(max_nodes=self.max_nodes)
        if self.tokens is not None and not 0 < self.tokens < 1e18:
            raise UserError("must be above 0", field="tokens", value=self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs of a store; all conditions must hold."""

    runs: str = field(default="runs", metadata=flag("run store (default: runs)", "DIR"))
    where: tuple[str, ...] = field(
        default=(), metadata=flag("only runs that satisfy a condition", "CONDITION")
    )
    outcome: tuple[str, ...] = field(
        default=(), metadata=flag("only runs with this outcome", choices=OUTCOMES)
    )
    model: str | None = field(default=None, metadata=flag("only runs of this model", "NAME"))
    tag: str | None = field(default=None, metadata=flag("only runs with this tag", "TAG"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsRequest(RunFilter):
    sort: Literal["started_at", "step_s", "peak_bytes", "model", "outcome"] = field(
        default="started_at", metadata=flag("sort order (default started_at)")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest(RunFilter):
    """`sources` are stores and files of tables; without any, the store."""

    sources: tuple[str, ...] = field(
        default=(),
        metadata=flag("stores and files of tables", "SOURCE", names=("sources",), nargs="*"),
    )
    style: Literal["mpt", "topology", "scaling"] = field(
        default="topology", metadata=flag("table style (default topology)")
    )
    convention: str | None = field(
        default=None,
        metadata=flag(
            f"FLOP convention (default {DEFAULT}; mpt for the mpt style, as published)", "ID"
        ),
    )
    cluster: str | Cluster | None = field(
        default=None, metadata=flag("score today's predictions for this cluster", "NAME", rare=True)
    )
    profile: str | None = field(
        default=None, metadata=flag("score today's predictions for a profile", "FILE", rare=True)
    )
