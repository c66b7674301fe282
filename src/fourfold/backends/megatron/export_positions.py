"""Megatron-LM's flags of positions, and which scalings of rotary ones it has."""

from __future__ import annotations

from fourfold.search.export.setup import Flags, no_setting
from fourfold.spec.batch import Batch
from fourfold.spec.engine import Engine
from fourfold.spec.model import ModelShape

# Numbers of its scalings that no flag sets.
_BUILT_IN: dict[str, dict[str, float]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192},
    "yarn": {"original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}


def check_positions(model: ModelShape, engine: Engine) -> None:
    """Latent attention scales by YaRN, and by nothing else; other attention by YaRN since 0.19."""
    place, scaling, name = model.positions, model.positions.scaling, "model.positions.scaling"
    if place.kind == "rope" and place.theta != int(place.theta):
        raise no_setting("megatron", "model.positions.theta", place.theta, "a whole number")
    if scaling is None:
        return
    is_plain_yarn = scaling.kind == "yarn" and model.latent is None
    if (scaling.kind != "yarn" and model.latent) or (is_plain_yarn and engine.export.before):
        hint = "none, or yarn" if model.latent else "none, linear or llama3"
        raise no_setting("megatron", f"{name}.kind", scaling.kind, hint)
    if is_plain_yarn:
        return  # flags set all of it
    for one, value in _BUILT_IN.get(scaling.kind, {}).items():
        if getattr(scaling, one) != value:
            hint = f"{value:g}, or no scaling, which comes after pretraining at the first length"
            raise no_setting("megatron", f"{name}.{one}", getattr(scaling, one), hint)
    if scaling.kind == "linear" and scaling.factor != int(scaling.factor):
        raise no_setting("megatron", f"{name}.factor", scaling.factor, "a whole number")


def position_flags(model: ModelShape, batch: Batch) -> Flags:
    place = model.positions
    length = max(batch.seq_len, place.length or batch.seq_len)
    flags: Flags = {"--max-position-embeddings": length}
    if place.kind == "learned":
        return flags | {"--position-embedding-type": "learned_absolute"}
    is_plain_yarn = model.latent is None and place.scaling and place.scaling.kind == "yarn"
    kind = "yarn" if is_plain_yarn else "rope"
    flags |= {"--position-embedding-type": kind, "--rotary-base": int(place.theta)}
    flags["--rotary-percent"] = place.partial
    return flags | _scaling_flags(model)


def _scaling_flags(model: ModelShape) -> Flags:
    scaling = model.positions.scaling
    if scaling is None:  # of latent attention, its fused kernel knows YaRN only
        return {"--rope-type": "rope", "--no-rope-fusion": None} if model.latent else {}
    if scaling.kind == "llama3":
        return {"--use-rope-scaling": None, "--rope-scaling-factor": scaling.factor}
    if scaling.kind == "linear":
        return {"--rotary-seq-len-interpolation-factor": int(scaling.factor)}
    yarn: Flags = {
        "--rotary-scaling-factor": scaling.factor,
        "--mscale": scaling.mscale,
        "--mscale-all-dim": scaling.mscale_all_dim,
    }
    if model.latent:
        return {"--rope-type": "yarn", **yarn}
    rounded = "" if scaling.truncate else "no-"
    return yarn | {
        "--yarn-original-max-position-embeddings": scaling.original_length,
        "--yarn-beta-fast": scaling.beta_fast,
        "--yarn-beta-slow": scaling.beta_slow,
        f"--{rounded}yarn-correction-range-round-to-int": None,
        "--no-rope-fusion": None,  # which it turns off itself
    }
