"""models, clusters, gpus: the catalogue, and what a rank holds of a model; flops: what a speed is
worth by every FLOP convention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery, convention, utilisation_pct
from fourfold.cost.count.params import (
    active_params,
    layer_params,
    model_params,
    mtp_params,
    rank_params,
    stage_layers,
)
from fourfold.errors import UserError
from fourfold.flag import flag
from fourfold.spec import Batch, Cluster, Device, ModelShape, catalog, check, codec
from fourfold.spec.run import AnyRun, RunSpec, nested, run_of
from fourfold.spec.supported import not_run, remarks, windowed
from fourfold.units import number_from
from fourfold.verbs import Answer, Request

DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True)
class OneCluster(Answer):
    """A cluster as its file; a row is a level of its links, from inner to outer. `toml` keeps rates
    and times as they were given."""

    TABLE, SHARED = "links", ("cluster=name",)
    cluster: Annotated[Cluster, codec.AS_FILE]
    toml: Annotated[str, codec.HIDDEN]


@dataclass(frozen=True, slots=True)
class OneGpu(Answer):
    """A GPU as its file."""

    device: Annotated[Device, codec.AS_FILE]


@dataclass(frozen=True, slots=True)
class Gpus(Answer):
    """The GPUs of the catalogue."""

    TABLE, LIST = "gpus", True
    gpus: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Catalogue(Answer):
    """The clusters and GPUs of the catalogue; a row is a cluster, with its GPU's name."""

    clusters: tuple[Cluster, ...]
    gpus: tuple[Device, ...]

    def rows(self) -> list[dict[str, Any]]:
        return [codec.encode(one) | {"device": one.device.id} for one in self.clusters]


def clusters() -> Catalogue:
    known = tuple(catalog.cluster(name) for name in catalog.cluster_names())
    return Catalogue(known, gpus().gpus)


def gpus() -> Gpus:
    return Gpus(tuple(catalog.device(name) for name in catalog.device_names()))


def gpu(name: str) -> OneGpu:
    """Return a GPU of the catalogue, or of a file."""
    return OneGpu(catalog.device(name))


def cluster(name: str) -> OneCluster:
    """Of the catalogue, or of a file."""
    known = catalog.cluster(name)
    return OneCluster(known, codec.to_toml(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Parameters that a rank holds while it computes, and those it owns in the update."""

    stage: int
    rank: int
    layers: int
    held: int
    owned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Answer):
    """A model's shape and size; `stages` of a layout. With experts: the parameters that a token
    meets, and those of them besides input embedding and output layer; `layer_params` are those of
    a layer with experts."""

    name: str
    params: int
    layer_params: int
    seq_len: int
    shape: ModelShape
    remarks: tuple[str, ...]
    active_params: int | None = None
    active_params_no_embedding: int | None = None
    mtp_params: int | None = None
    layout: str | None = None
    sharding: str | None = None
    stages: tuple[StageShare, ...] | None = None

    def rows(self) -> list[dict[str, Any]]:
        if self.stages is not None:
            head = {"name": self.name, "layout": self.layout, "sharding": self.sharding}
            return [head | codec.encode(stage) for stage in self.stages]
        head = {"name": self.name, "params": self.params, "layer_params": self.layer_params}
        names = ("active_params", "active_params_no_embedding", "mtp_params")
        head |= {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return [head | codec.encode(self.shape)]


@dataclass(frozen=True, slots=True)
class Models(Answer):
    """The presets of the catalogue; the row of each is that of the model alone."""

    TABLE, LIST = "models", True
    models: tuple[Model, ...]

    def rows(self) -> list[dict[str, Any]]:
        return [row for one in self.models for row in one.rows()]


def models(seq_len: int = DEFAULT_SEQ_LEN) -> Models:
    names = catalog.model_names()
    return Models(tuple(_described(catalog.model(name), seq_len) for name in names))


def model(run: AnyRun | str, *, rank: int | None = None) -> Model:
    """One model, by its name or of a run. Where the run has several ranks, or one is asked for:
    what the first of each pipeline stage (or `rank`) holds and owns."""
    spec = run_of({"model": run} if isinstance(run, str) else run)
    described = _described(spec.model, spec.batch.seq_len)
    if spec.gpus == 1 and rank is None:
        return described
    shares = _shares(spec, rank)
    layout, sharding = str(spec.layout), spec.policy.sharding
    return replace(described, layout=layout, sharding=sharding, stages=shares)


def _described(shape: ModelShape, seq_len: int) -> Model:
    notes = [f"plan approximates: {words}" for words in remarks(shape, seq_len)]
    lacking = not_run(shape, seq_len)
    if lacking:
        notes.append(f"planned, not run here (at {seq_len} tokens): {', '.join(lacking)}")
    active = active_params(shape, seq_len) if shape.moe else None
    return Model(
        name=shape.name,
        params=model_params(shape, seq_len),
        layer_params=layer_params(shape).all,
        active_params=active.all if active else None,
        active_params_no_embedding=active.without_both if active else None,
        mtp_params=mtp_params(shape) or None if active else None,
        seq_len=seq_len,
        shape=shape,
        remarks=tuple(notes),
    )


# Rules of what divides a model over ranks, whichever engine may run it.
_OF_A_CUT = (
    "stages",
    "heads",
    "kv-heads",
    "expert-dense",
    "experts",
    "expert-ranks",
    "expert-width",
)


def _shares(spec: RunSpec, rank: int | None) -> tuple[StageShare, ...]:
    from fourfold.search.legal import require_legal

    layout, seq_len = spec.layout, spec.batch.seq_len
    require_legal(spec, only=_OF_A_CUT)
    if rank is not None and not 0 <= rank < layout.world:
        raise UserError(f"must be from 0 to {layout.world - 1}", field="rank", value=rank)
    stages = stage_layers(spec.model, layout.pp, seq_len)
    firsts = [stage * layout.stride("pp") for stage in range(layout.pp)]
    shares = []
    for each in firsts if rank is None else [rank]:
        count = rank_params(
            spec.model, layout, seq_len=seq_len, stages=stages, rank=each, zero=spec.policy.zero
        )
        stage = layout.coordinates(each)["pp"]
        layers = len(stages[stage])
        shares.append(
            StageShare(stage=stage, rank=each, layers=layers, held=count.held, owned=count.owned)
        )
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """By one convention; None where no speed, or no GPU, is known."""

    flops_per_token: float
    tflops_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None


def utilisation(
    spec: RunSpec, rule: str | None, tokens_s_gpu: float | None, peak: float | None
) -> dict[str, Utilisation]:
    """By every convention, or by `rule`."""
    ask = FlopsQuery.of_spec(spec)
    counted = {}
    for one in (convention(rule),) if rule else CONVENTIONS.values():
        count, speed = one.count(ask), tokens_s_gpu
        shares = (None, None)
        if speed is not None and peak is not None:
            shares = tuple(utilisation_pct(n, speed, peak) for n in (count.model, count.hardware))
        tflops = None if speed is None else count.printed * speed / 1e12
        counted[one.id] = Utilisation(count.printed, tflops, *shares)
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsRequest(Request):
    """A measured speed, and the GPU it is a share of. `convention` None: all of them."""

    gpu: str | None = flag("GPU for MFU and HFU, such as h100-80gb", "ID")
    convention: str | None = flag("only this convention (default: all)", "ID")
    tokens_per_s: Annotated[float, number_from] | None = flag(
        "tokens/s over all GPUs: 85144 or 3.2M", "X", either="speed"
    )
    step_s: float | None = flag("seconds per step, with --global-batch", "X", either="speed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops(Answer):
    """FLOPs per token and, of a measured speed, TFLOP/s; with a GPU MFU and HFU."""

    TABLE, NAMES = "conventions", "convention"
    model: str
    params: int
    active_params: int | None
    seq_len: int
    gpus: int
    precision: str
    recompute: str
    window: int | None
    gpu: str | None
    peak_flops: float | None
    tokens_per_s: float | None
    conventions: dict[str, Utilisation]


def flops(run: AnyRun, request: FlopsRequest | None = None) -> Flops:
    request = request or FlopsRequest()
    spec = run_of(run)
    is_spec = isinstance(run, RunSpec)
    given = {"seq_len", "global_batch"} if is_spec else nested(run).get("batch", {})
    check.given("seq_len" in given, "seq-len")
    model, batch, policy = spec.model, spec.batch, spec.policy
    speed = _tokens_per_s(batch, request, batch_given="global_batch" in given)
    device = catalog.device(request.gpu) if request.gpu is not None else None
    peak = device.peak(policy.precision_name) if device else None
    speed_gpu = None if speed is None else speed / spec.gpus
    return Flops(
        model=model.name,
        params=model_params(model, batch.seq_len),
        active_params=active_params(model, batch.seq_len).all if model.moe else None,
        seq_len=batch.seq_len,
        gpus=spec.gpus,
        precision=policy.precision_name,
        recompute=policy.recompute,
        window=model.window if windowed(model, batch.seq_len) else None,
        gpu=device.id if device else None,
        peak_flops=peak,
        tokens_per_s=speed,
        conventions=utilisation(spec, request.convention, speed_gpu, peak),
    )


def _tokens_per_s(batch: Batch, request: FlopsRequest, *, batch_given: bool) -> float | None:
    field, value, speed = "tokens-per-s", request.tokens_per_s, request.tokens_per_s
    if request.step_s is not None:
        field, value = "step-s", request.step_s
        check.that(0 < value < 1e12, field, value, "must be above 0")
        hint = "a step has that many sequences"
        check.given(batch_given, "global-batch", hint)
        speed = batch.tokens / value
    if speed is not None and not 0 < speed < 1e18:
        raise UserError("must be a speed above 0 and below 1e18 tokens/s", field=field, value=value)
    return speed
