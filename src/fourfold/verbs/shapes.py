"""models, clusters, gpus: the catalogue, and what a rank holds of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fourfold.cost.count.params import (
    active_params,
    first_routed,
    layer_params,
    model_params,
    mtp_params,
    rank_params,
    stage_layers,
)
from fourfold.errors import UserError
from fourfold.spec import Cluster, Device, ModelShape, RunSpec, catalog, codec
from fourfold.spec.supported import not_run, remarks
from fourfold.verbs import Answer

DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True)
class OneCluster(Answer):
    """`toml` keeps rates and times as they were given."""

    cluster: Cluster
    toml: str

    def plain(self) -> dict[str, Any]:
        return codec.dump(self.cluster)

    def rows(self) -> list[dict[str, Any]]:
        """One for each level, from inner to outer."""
        return [{"cluster": self.cluster.name, **codec.encode(link)} for link in self.cluster.links]


@dataclass(frozen=True, slots=True)
class Catalogue(Answer):
    """Known clusters and GPUs; the GPUs alone are a list."""

    clusters: tuple[Cluster, ...]
    gpus: tuple[Device, ...]

    def plain(self) -> Any:
        return codec.encode(self) if self.clusters else codec.encode(self.gpus)

    def rows(self) -> list[dict[str, Any]]:
        if not self.clusters:
            return self.plain()
        return [codec.encode(one) | {"device": one.device.id} for one in self.clusters]


def clusters() -> Catalogue:
    known = tuple(catalog.cluster(name) for name in catalog.cluster_names())
    return Catalogue(known, gpus().gpus)


def gpus() -> Catalogue:
    return Catalogue((), tuple(catalog.device(name) for name in catalog.device_names()))


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
    models: tuple[Model, ...]

    def plain(self) -> list[dict[str, Any]]:
        return codec.encode(self.models)

    def rows(self) -> list[dict[str, Any]]:
        return [row for one in self.models for row in one.rows()]


def models(seq_len: int = DEFAULT_SEQ_LEN) -> Models:
    names = catalog.model_names()
    return Models(tuple(Model(**_described(catalog.model(name), seq_len)) for name in names))


def model(run: Mapping[str, Any], *, rank: int | None = None) -> Model:
    """One model. Where the run has several ranks, or one is asked for: what the first of each
    pipeline stage (or `rank`) holds and owns."""
    spec = codec.decode(RunSpec, dict(run))
    described = _described(spec.model, spec.batch.seq_len)
    if spec.gpus == 1 and rank is None:
        return Model(**described)
    shares = _shares(spec, rank)
    layout, sharding = str(spec.layout), spec.policy.sharding
    return Model(**described, layout=layout, sharding=sharding, stages=shares)


def _described(shape: ModelShape, seq_len: int) -> dict[str, Any]:
    notes = [f"plan approximates: {words}" for words in remarks(shape, seq_len)]
    lacking = not_run(shape, seq_len)
    if lacking:
        notes.append(f"planned, not run here (at {seq_len} tokens): {', '.join(lacking)}")
    active = active_params(shape, seq_len)
    experts = {
        "active_params": active.all,
        "active_params_no_embedding": active.without_both,
        "mtp_params": mtp_params(shape) or None,
    }
    return {
        "name": shape.name,
        "params": model_params(shape, seq_len),
        "layer_params": layer_params(shape, first_routed(shape)),
        **(experts if shape.moe else {}),
        "seq_len": seq_len,
        "shape": shape,
        "remarks": tuple(notes),
    }


def _shares(spec: RunSpec, rank: int | None) -> tuple[StageShare, ...]:
    from fourfold.search.legal import require_legal

    layout, seq_len = spec.layout, spec.batch.seq_len
    require_legal(spec, only=("stages", "heads", "kv-heads"))
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
