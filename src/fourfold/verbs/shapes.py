"""models, clusters, flops: the catalogue, what a rank holds of a model, what a speed is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fourfold.cost.count.params import layer_params, model_params, rank_params
from fourfold.cost.count.stages import stage_layers
from fourfold.errors import UserError
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.cluster import Cluster
from fourfold.spec.model import ModelShape, not_run, remarks, windowed
from fourfold.spec.run import RunSpec
from fourfold.verbs import Facts

DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True)
class OneCluster:
    """`toml` keeps rates and times as they were given."""

    cluster: Cluster
    toml: str

    def plain(self) -> dict[str, Any]:
        return codec.dump(self.cluster)

    def rows(self) -> list[dict[str, Any]]:
        return link_rows(self.cluster)


def link_rows(cluster: Cluster) -> list[dict[str, Any]]:
    """One for each level, from inner to outer."""
    return [{"cluster": cluster.name, **codec.encode(link)} for link in cluster.links]


def clusters() -> Facts:
    """All clusters, and all GPUs."""
    found = [codec.encode(catalog.cluster(name)) for name in catalog.cluster_names()]
    everything = {"clusters": found, "gpus": gpus().facts}
    return Facts(everything, [{**one, "device": one["device"]["id"]} for one in found])


def gpus() -> Facts:
    found = [codec.encode(catalog.device(name)) for name in catalog.device_names()]
    return Facts(found, found)


def cluster(name: str) -> OneCluster:
    """One cluster of the catalogue, or of a file."""
    found = catalog.cluster(name)
    return OneCluster(found, codec.to_toml(found))


def models(seq_len: int = DEFAULT_SEQ_LEN) -> Facts:
    """Every preset, at this sequence length."""
    found = [_describe(catalog.model(name), seq_len) for name in catalog.model_names()]
    return Facts(
        found, [{"name": one["name"], "params": one["params"]} | one["shape"] for one in found]
    )


def model(run: Mapping[str, Any], *, rank: int | None = None) -> Facts:
    """One model's shape and size; where the run has several ranks, or one is asked for, what the
    first of each pipeline stage (or `rank`) holds and owns."""
    spec = codec.decode(RunSpec, dict(run))
    found = _describe(spec.model, spec.batch.seq_len)
    if spec.gpus == 1 and rank is None:
        head = {"name": found["name"], "params": found["params"]}
        return Facts(found, [head | {"layer_params": found["layer_params"]} | found["shape"]])
    found |= _shares(spec, rank)
    head = {"name": found["name"], "layout": found["layout"], "sharding": found["sharding"]}
    return Facts(found, [head | row for row in found["stages"]])


def _describe(model: ModelShape, seq_len: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "params": model_params(model, seq_len),
        "layer_params": layer_params(model),
        "seq_len": seq_len,
        "shape": codec.encode(model),
        "remarks": _remarks(model, seq_len),
    }


def _remarks(model: ModelShape, seq_len: int) -> list[str]:
    said = [f"plan approximates: {words}" for words in remarks(model, seq_len)]
    lacking = not_run(model, seq_len)
    if lacking:
        said.append(f"planned, not run here (at {seq_len} tokens): {', '.join(lacking)}")
    return said


def _shares(spec: RunSpec, rank: int | None) -> dict[str, Any]:
    """What one rank, or the first of every stage, holds and owns."""
    from fourfold.search.legal import require_legal

    model, layout, seq_len = spec.model, spec.layout, spec.batch.seq_len
    require_legal(spec, only=("stages", "heads", "kv-heads"))
    if rank is not None and not 0 <= rank < layout.world:
        raise UserError(f"must be from 0 to {layout.world - 1}", field="rank", value=rank)
    stages = stage_layers(model, layout.pp, seq_len)
    firsts = [stage * layout.stride("pp") for stage in range(layout.pp)]
    rows = []
    for each in firsts if rank is None else [rank]:
        count = rank_params(
            model, layout, seq_len=seq_len, stages=stages, rank=each, zero=spec.policy.zero
        )
        stage = layout.coordinates(each)["pp"]
        rows.append(
            {"stage": stage, "rank": each, "layers": len(stages[stage]), "held": count.held,
             "owned": count.owned}
        )  # fmt: skip
    return {"layout": str(layout), "sharding": spec.policy.sharding, "stages": rows}


def flops(
    run: Mapping[str, Any],
    *,
    gpu: str | None = None,
    rule: str | None = None,
    tokens_per_s: float | None = None,
    step_s: float | None = None,
) -> Facts:
    """FLOPs per token by every convention, or by `rule`; of a measured speed (tokens/s over all
    GPUs, or seconds of a step) TFLOP/s too, and with a GPU MFU and HFU."""
    if "model" not in run:
        raise UserError("is required", field="model", hint="'fourfold models' lists presets")
    spec = codec.load(RunSpec, dict(run))
    given = run.get("batch", {})
    if "seq_len" not in given:
        raise UserError("is required", field="seq-len")
    model, batch, policy = spec.model, spec.batch, spec.policy
    speed = _tokens_per_s(batch, step_s, tokens_per_s, batch_given="global_batch" in given)
    answer: dict[str, Any] = {
        "model": model.name,
        "params": model_params(model, batch.seq_len),
        "seq_len": batch.seq_len,
        "gpus": spec.gpus,
        "precision": policy.precision,
        "recompute": policy.recompute,
    }
    if windowed(model, batch.seq_len):
        answer["window"] = model.window
    peak = None
    if gpu is not None:
        device = catalog.device(gpu)
        peak = device.peak(policy.precision)
        answer |= {"gpu": device.id, "peak_flops": peak}
    if speed is not None:
        answer["tokens_per_s"] = speed
    counted = _counted(spec, rule, speed, peak)
    table = [{"convention": name, **row} for name, row in counted.items()]
    return Facts(answer | {"conventions": counted}, table)


def _counted(
    spec: RunSpec, rule: str | None, speed: float | None, peak: float | None
) -> dict[str, dict[str, float]]:
    from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery, convention, utilisation_pct

    ask = FlopsQuery.of(
        model=spec.model, seq_len=spec.batch.seq_len, layout=spec.layout, policy=spec.policy
    )
    counted: dict[str, dict[str, float]] = {}
    for one in (convention(rule),) if rule else CONVENTIONS.values():
        count = one.count(ask)
        row = counted[one.id] = {"flops_per_token": count.printed}
        if speed is not None:
            row["tflops_gpu"] = count.printed * speed / spec.gpus / 1e12
            if peak is not None:
                for name, work in (("mfu_pct", count.model), ("hfu_pct", count.hardware)):
                    row[name] = utilisation_pct(work, speed / spec.gpus, peak)
    return counted


def _tokens_per_s(
    batch: Batch, step_s: float | None, tokens_per_s: float | None, *, batch_given: bool
) -> float | None:
    if step_s is not None:
        if not 0 < step_s < 1e12:
            raise UserError("must be above 0", field="step-s", value=step_s)
        if not batch_given:
            raise UserError(
                "is required", field="global-batch", hint="a step has that many sequences"
            )
        return _in_range("step-s", step_s, batch.tokens / step_s)
    if tokens_per_s is not None:
        _in_range("tokens-per-s", tokens_per_s, tokens_per_s)
    return tokens_per_s


def _in_range(field: str, value: float, tokens_per_s: float) -> float:
    if not 0 < tokens_per_s < 1e18:
        raise UserError("must be a speed above 0 and below 1e18 tokens/s", field=field, value=value)
    return tokens_per_s
