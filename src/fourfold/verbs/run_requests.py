"""Requests of the verbs that start ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from functools import partial
from typing import Any, Literal

from fourfold.cost.count.flops import DEFAULT
from fourfold.cost.trace.steps import KINDS, Kind
from fourfold.errors import UserError
from fourfold.flag import flag
from fourfold.result.report import OUTCOMES
from fourfold.spec import Cluster, catalog, check
from fourfold.spec.engine import TEMPLATES
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.spec.site import LOCAL
from fourfold.spec.words import BUNDLES, DTYPES, OURS, CpKind, Dtype, Fault
from fourfold.verbs import Request, set_field
from fourfold.verbs.engine_memory_request import ENGINES
from fourfold.verbs.requests import CONVENTION, STORE, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Request):
    """What only the caller may allow a job on this host; see `launch.permit`."""

    env: tuple[str, ...] = flag(
        "set an environment variable of the ranks, for this start only",
        "NAME=VALUE",
        rare=True,
        default=(),
    )
    oversubscribe: bool = flag("allow more ranks than this host can hold", rare=True, default=False)


# Our own engine, where engines are named.
ON = ("where to run: local (default), slurm, or a site file or name", "SITE")
_OTHER = "another engine"
PRINT = "print the site's batch script, ready for sbatch, and start nothing"
DETACH = "leave it to the site's scheduler; the same command without it follows the job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Start):
    """Where a job runs; see `spec.site`."""

    on: str = flag(*ON, default=LOCAL)
    print_launch: bool = flag(PRINT, rare=True, default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest(Launch):
    """How runs are measured and kept; `cluster` and `profile` say whom their predictions are by."""

    runs: str = flag(*STORE, default="runs")
    engine: str | None = flag(
        f"run by another engine: {', '.join(sorted(TEMPLATES))}, or a template file; in bench "
        "also a list such as torchtitan-0.2,fourfold",
        "NAME",
    )
    stack: str | None = flag("stack to predict that engine by (default its own)", "NAME", rare=True)
    detach: bool = flag(DETACH, rare=True, default=False)
    repeat: int = flag("runs of each configuration (default 1)", "N", default=1)
    force: bool = flag("run even if it certainly does not fit in memory", rare=True, default=False)
    cluster: str | Cluster | None = flag("cluster for the prediction", "NAME")
    profile: str | None = flag("profile for the prediction, from 'calibrate --out'", "FILE")
    calibration: str | None = flag("calibration from 'fit' or 'calibrate'", "FILE", rare=True)
    convention: str = flag(*CONVENTION, rare=True, default=DEFAULT)

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        check.that(self.repeat >= 1, "repeat", self.repeat, "must be 1 or more")
        if self.engine == OURS:
            set_field(self, "engine", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest(MeasureRequest):
    probe_s: float = flag(
        "seconds of GEMM and copy probes before and after, to catch a machine that changed "
        "(default 1, 0 disables)",
        "S",
        rare=True,
        default=1.0,
    )
    trace: str | None = flag(
        "also write a profiler trace of three further steps, for 'fourfold diagnose'",
        "FILE.json.gz",
        rare=True,
    )


ONE_RANK = "one rank of a large run, on this device"
_rank = partial(flag, group=ONE_RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRankRequest(Start):
    """One rank, with real kernels and without its peers. `layouts`: one row each, as 'pp4 dp16
    tp8', then zero0-3 or FIELD=VALUE words."""

    as_rank: str = _rank("rank to run, or first, last, worst (the fullest stage)", "R", default="0")
    world: int | None = _rank("total number of ranks", "W")
    layouts: tuple[str, ...] = _rank(
        "layout such as 'pp4 dp16 tp8', with zero0-3 or FIELD=VALUE; repeat for more rows",
        "TEXT",
        names=("--layout",),
        default=(),
    )
    micro_batches: int | None = _rank(
        "micro batches to run (default: enough for the peak; 0: all)", "N", rare=True
    )
    cluster: str | Cluster | None = None
    profile: str | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        if self.micro_batches is not None and self.micro_batches < 0:
            raise UserError("must be 0 or more", field="micro-batches", value=self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest(MeasureRequest):
    """`where` may ask about predicted mem_gib and step_s."""

    tag: str = flag("tag stored with every run", "TEXT", rare=True, default="")
    again: tuple[str, ...] = flag(
        "re-run stored runs with this outcome", "OUTCOME", choices=OUTCOMES, rare=True, default=()
    )
    where: tuple[str, ...] = flag(
        "only runs that satisfy a condition; mem_gib and step_s are predicted",
        "CONDITION",
        default=(),
    )


MPT_GROUP = "a sweep from flags (nothing runs without --run)"


def _many(text: str, metavar: str, *names: str, default: Any = (), **rest: Any) -> Any:
    group = MPT_GROUP
    return flag(text, metavar, names=names, nargs="+", group=group, default=default, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MptSweep(Request):
    """A sweep in the style of the MPT scripts; two exponents are a range, both ends included.
    `base`: what all runs share, as a run's table."""

    models: tuple[str, ...] = _many(
        "model presets or config.json files", "NAME", "-m", "--models", default=MISSING
    )
    seq_exp: tuple[int, ...] = _many(
        "sequence lengths 2^N; two make a range", "N", "-s", "--seq-exp"
    )
    batch_exp: tuple[int, ...] = _many(
        "global batches of 2^N tokens; two make a range", "N", "-b", "--batch-exp"
    )
    precisions: tuple[str, ...] = _many(
        "precisions: bf16, fp8, fp32 ...", "P", "-t", "--precisions"
    )
    gpus: tuple[int, ...] = _many("total numbers of GPUs (or CPU ranks)", "N", "-g", "--gpus")
    micro_batch: tuple[str, ...] = _many("micro-batch sizes, or auto", "N", "--micro-batch")
    layouts: tuple[str, ...] = _many("layouts such as 'dp4' 'pp2 tp2'", "L", "--layouts", rare=True)
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSweep(Request):
    """The planner's `count` best layouts for the run of `table`."""

    table: Mapping[str, Any]
    count: int = flag("measure the planner's K best", "K", names=("--from-plan",), default=MISSING)
    gpu: str | None = flag("instead of a cluster: GPUs of this kind in typical hosts", "ID")
    max_nodes: int | None = flag("use at most N hosts, trying fewer too", "N")
    explore: bool = flag("also rank layouts with never-measured features", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest(Launch):
    """Which layouts are trained both ways. `policy`: fields that all of them have."""

    world: int | None = flag("number of ranks (default: as the layout needs)", "N")
    sample: int | None = flag("check only K layouts, stratified by axis", "K")
    seed: int = flag("seed of the sample, weights and tokens", default=0)
    layout: str | None = flag("check only this layout, such as 'pp2 dp2 tp2'", "L")
    family: tuple[str, ...] = flag(
        "check only this model family (default: mpt, gpt, llama; for ep and etp mixtral, deepseek)",
        choices=tuple(catalog.TINY),
        default=(),
    )
    models: tuple[str, ...] = flag(
        "check another (small) model: a preset or a file", "NAME", names=("--model",), default=()
    )
    axis: str | None = flag(
        "check only layouts with this axis above 1", choices=(*AXES, *EXPERT_AXES)
    )
    device: Literal["cpu", "cuda"] = flag("device to run on (default cpu)", default="cpu")
    share_gpu: bool = flag("put several ranks on one GPU, with gloo between them", default=False)
    fault: Fault | None = flag("plant a bug, which must be detected", names=("--break",))
    detach: bool = flag(DETACH, rare=True, default=False)
    precision: str = flag(f"one of {', '.join(BUNDLES)} (default fp32)", "X", default="fp32")
    global_batch: Size | None = flag("sequences per step", "N")
    micro_batch: Size | None = flag("sequences per micro batch; any number", "N")
    limit: float = flag("seconds allowed per layout (default 180)", "S", rare=True, default=180.0)
    policy: Mapping[str, Any] = field(default_factory=dict)
    engine: str | None = flag(
        "check another engine's release, such as torchtitan==0.3.0", "NAME==V", group=_OTHER
    )
    repro: str | None = flag(
        "write the first fault as a script that needs no fourfold", "FILE", group=_OTHER
    )
    source: str | None = flag(
        "import the engine from this folder (a checkout, an edited copy)", "DIR", group=_OTHER
    )
    engines: str | None = flag(*ENGINES, group=_OTHER, rare=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest(Launch):
    """Where a training is kept and how it starts. It continues where its folder stands, unless it
    is to be `fresh`; `resume`: and fails if there is nothing to continue."""

    out: str | None = flag("training folder", "DIR")
    resume: bool = flag("fail if there is no checkpoint", either="start", default=False)
    fresh: bool = flag(
        "start over (old checkpoints are kept until the new run saves one)",
        either="start",
        default=False,
    )
    detach: bool = flag(DETACH, rare=True, default=False)
    convention: str = flag(*CONVENTION, rare=True, default=DEFAULT)
    trace_steps: str | None = flag(
        "write profiler traces of these steps to OUT/traces, for 'fourfold diagnose'",
        "A:B",
        rare=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest(Request):
    """`ranks`: those of the cluster that this host is described as."""

    quick: bool = flag("20 seconds instead of 2.5 minutes", default=False)
    device: Literal["auto", "cpu", "cuda"] = flag("what to measure (default auto)", default="auto")
    ranks: int | None = flag("ranks of the cluster file (default: all measured)", "N")
    on: str = flag("where to measure: local (default), slurm, or a site", "SITE", default=LOCAL)
    nodes: int = flag("nodes to measure with --on (default 2)", "N", default=2)
    print_launch: bool = flag(PRINT, rare=True, default=False)
    detach: bool = flag(DETACH, rare=True, default=False)


_SIZES, _LAYER = "sizes (each overrides the model's)", "only for kind layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest(Request):
    """One rank's part of a parallel layer."""

    kind: Kind = flag(", ".join(KINDS), "KIND", names=("kind",), choices=KINDS, default=MISSING)
    tokens: Size = flag("sequence length in tokens", "N", required=True, default=MISSING)
    model: str | None = flag("model preset or config.json for the sizes", "NAME")
    hidden: Size | None = flag("hidden size", "N", group=_SIZES)
    heads: Size | None = flag("query heads", "N", group=_SIZES)
    kv_heads: Size | None = flag("key-value heads (default: as many as heads)", "N", group=_SIZES)
    ffn: Size | None = flag("width of the MLP", "N", group=_SIZES)
    layers: Size | None = flag("layers whose weights are held (mlp, mlp2d)", "N", group=_SIZES)
    tp: int = flag("tensor parallel ranks", "N", group="layout", default=1)
    cp: int = flag("context parallel ranks", "N", group="layout", default=1)
    dp: int = flag("data parallel ranks", "N", group="layout", default=1)
    ep: int = flag("expert parallel ranks, of tp x cp x dp", "N", group="layout", default=1)
    etp: int = flag("tensor parallel ranks of experts", "N", group="layout", rare=True, default=1)
    rank: int = flag("rank to show", "R", group="layout", default=0)
    cp_kind: CpKind | None = flag("context-parallel attention (default ring)", group=_LAYER)
    sharding: str | None = flag("zero0, zero1 (default), zero2 or zero3", "X", group=_LAYER)
    dtype: Dtype = flag(
        "dtype of tensors and weights (default bf16)",
        choices=tuple(name for name in DTYPES if name != "fp4"),
        default="bf16",
    )
    attention: Literal["flash", "naive"] = flag("naive keeps the N x N scores", default="flash")
    cluster: str | None = flag(
        "cluster for link levels (default: hosts of 8 H100, 400 Gbit/s per GPU)", "NAME"
    )
    run_steps: bool = flag(
        "run the steps on this host, one process per rank, and compare",
        names=("--run",),
        default=False,
    )
    device: Literal["auto", "cpu", "cuda"] = flag("device for --run (default auto)", default="auto")
