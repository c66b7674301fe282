"""Requests of the verbs that start ranks. As in `requests`, their fields define the flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fourfold.cost.count.flops import DEFAULT
from fourfold.errors import UserError
from fourfold.flag import flag
from fourfold.result.report import OUTCOMES
from fourfold.spec.cluster import Cluster
from fourfold.spec.layout import AXES
from fourfold.spec.words import BUNDLES
from fourfold.verbs.requests import CONVENTION, Size, at_least_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What only the caller may allow a job on this host; see `launch.permit`."""

    env: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "set an environment variable of the ranks, for this start only",
            "NAME=VALUE",
            rare=True,
        ),
    )
    oversubscribe: bool = field(
        default=False, metadata=flag("allow more ranks than this host has room for", rare=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest(Start):
    """How a run is measured; `cluster` and `profile` say whom its prediction is by."""

    runs: str = field(default="runs", metadata=flag("run store (default: runs)", "DIR"))
    repeat: int = field(default=1, metadata=flag("number of runs (default 1)", "N"))
    probe_s: float = field(
        default=1.0,
        metadata=flag(
            "seconds of GEMM and copy probes before and after, to catch a machine that changed "
            "(default 1, 0 disables)",
            "S",
            rare=True,
        ),
    )
    force: bool = field(
        default=False, metadata=flag("run even if it certainly does not fit in memory", rare=True)
    )
    cluster: str | Cluster | None = field(
        default=None, metadata=flag("cluster for the prediction", "NAME")
    )
    profile: str | None = field(
        default=None, metadata=flag("profile for the prediction, from 'calibrate --out'", "FILE")
    )

    def __post_init__(self) -> None:
        at_least_one(repeat=self.repeat)


ONE_RANK = "one rank of a large run, on this device"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRankRequest(Start):
    """One rank, with real kernels and without its peers. `layouts`: one row each, as 'pp4 dp16
    tp8', then zero0-3 or FIELD=VALUE words."""

    as_rank: str = field(
        default="0",
        metadata=flag(
            "rank to run, or first, last, worst (the fullest stage)", "R", group=ONE_RANK
        ),
    )
    world: int | None = field(
        default=None, metadata=flag("total number of ranks", "W", group=ONE_RANK)
    )
    layouts: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "layout such as 'pp4 dp16 tp8', with zero0-3 or FIELD=VALUE; repeat for more rows",
            "TEXT",
            names=("--layout",),
            group=ONE_RANK,
        ),
    )
    micro_batches: int | None = field(
        default=None,
        metadata=flag(
            "micro batches to run (default: enough for the peak; 0: all)",
            "N",
            group=ONE_RANK,
            rare=True,
        ),
    )
    against: Literal["floor"] | None = field(
        default=None,
        metadata=flag(
            "on one GPU: compare a step with its floor, part by part", group=ONE_RANK, rare=True
        ),
    )
    cluster: str | Cluster | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.micro_batches is not None and self.micro_batches < 0:
            raise UserError("must be 0 or more", field="micro-batches", value=self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest(Start):
    """How the runs of a sweep are measured; `where` may ask about predicted mem_gib and step_s."""

    runs: str = field(default="runs", metadata=flag("run store (default: runs)", "DIR"))
    tag: str = field(default="", metadata=flag("tag stored with every run", "TEXT", rare=True))
    repeat: int = field(default=1, metadata=flag("runs per configuration (default 1)", "N"))
    again: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "re-run stored runs with this outcome",
            "OUTCOME",
            choices=OUTCOMES,
            rare=True,
        ),
    )
    where: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "only runs that satisfy a condition; mem_gib and step_s are predicted", "CONDITION"
        ),
    )
    cluster: str | Cluster | None = field(
        default=None, metadata=flag("cluster for the prediction", "NAME")
    )
    profile: str | None = field(
        default=None, metadata=flag("profile for the prediction, from 'calibrate --out'", "FILE")
    )
    calibration: str | None = field(
        default=None, metadata=flag("calibration from 'fit' or 'calibrate'", "FILE", rare=True)
    )

    force: bool = field(
        default=False, metadata=flag("run even if it certainly does not fit in memory", rare=True)
    )
    convention: str = field(default=DEFAULT, metadata=CONVENTION)

    def __post_init__(self) -> None:
        at_least_one(repeat=self.repeat)


MPT_GROUP = "a sweep from flags (nothing runs without --run)"


def _many(text: str, metavar: str, *names: str, **rest: Any) -> dict[str, Any]:
    return flag(text, metavar, names=names, nargs="+", group=MPT_GROUP, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MptSweep:
    """A sweep in the style of the MPT scripts: models, exponents, precisions."""

    models: tuple[str, ...] = field(
        metadata=_many("model presets or config.json files", "NAME", "-m", "--models")
    )
    seq_exp: tuple[int, ...] = field(
        default=(),
        metadata=_many(
            "sequence lengths 2^N; two numbers are a range, both ends included",
            "N", "-s", "--seq-exp",
        ),
    )  # fmt: skip
    batch_exp: tuple[int, ...] = field(
        default=(),
        metadata=_many(
            "global batches of 2^N tokens; two numbers are a range, both ends included",
            "N", "-b", "--batch-exp",
        ),
    )  # fmt: skip
    precisions: tuple[str, ...] = field(
        default=(), metadata=_many("precisions: bf16, fp8, fp32, ...", "P", "-t", "--precisions")
    )
    gpus: tuple[int, ...] = field(
        default=(), metadata=_many("total numbers of GPUs (or CPU ranks)", "N", "-g", "--gpus")
    )
    micro_batch: tuple[str, ...] = field(
        default=(), metadata=_many("micro-batch sizes, or auto", "N", "--micro-batch")
    )
    layouts: tuple[str, ...] = field(
        default=(), metadata=_many("layouts, such as 'dp4' 'pp2 tp2'", "L", "--layouts", rare=True)
    )


# Planted on purpose: each must fail.
Fault = Literal[
    "loss-divisor", "tied-grad", "cp-positions", "norm-grad",
    "layer-skip", "kv-head", "stale-weight", "norm-twice",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest(Start):
    """Which layouts are trained both ways. `policy`: fields that all of them have."""

    world: int | None = field(
        default=None, metadata=flag("number of ranks (default: as the layout needs)", "N")
    )
    sample: int | None = field(
        default=None, metadata=flag("check only K layouts, stratified by axis", "K")
    )
    seed: int = field(default=0, metadata=flag("seed of the sample, weights and tokens"))
    layout: str | None = field(
        default=None, metadata=flag("check only this layout, such as 'pp2 dp2 tp2'", "L")
    )
    family: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "check only this model family (default: mpt, gpt, llama)",
            choices=("mpt", "gpt", "llama", "qwen", "olmo2"),
        ),
    )
    models: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "check another (small) model: a preset or a file", "NAME", names=("--model",)
        ),
    )
    axis: str | None = field(
        default=None, metadata=flag("check only layouts with this axis above 1", choices=AXES)
    )
    device: Literal["cpu", "cuda"] = field(
        default="cpu", metadata=flag("device to run on (default cpu)")
    )
    share_gpu: bool = field(
        default=False,
        metadata=flag("put several ranks on one GPU, with gloo through host memory between them"),
    )
    fault: Fault | None = field(
        default=None, metadata=flag("plant a bug, which must be detected", names=("--break",))
    )
    precision: str = field(
        default="fp32", metadata=flag(f"one of {', '.join(BUNDLES)} (default fp32)", "X")
    )
    global_batch: Size | None = field(default=None, metadata=flag("sequences per step", "N"))
    micro_batch: Size | None = field(
        default=None, metadata=flag("sequences per micro batch; any number", "N")
    )
    limit: float = field(
        default=180.0,
        metadata=flag("time limit per layout, in seconds (default 180)", "S", rare=True),
    )
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest(Start):
    """Where a training is kept and how it starts. It continues where its folder stands, unless it
    is to be `fresh`; `resume`: and fails if there is nothing to continue."""

    out: str | None = field(default=None, metadata=flag("training folder", "DIR"))
    resume: bool = field(
        default=False, metadata=flag("fail if there is no checkpoint", either="start")
    )
    fresh: bool = field(
        default=False,
        metadata=flag(
            "start over (old checkpoints are kept until the new run saves one)", either="start"
        ),
    )
    convention: str = field(default=DEFAULT, metadata=CONVENTION)
