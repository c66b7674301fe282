"""Which rotary positions does a config.json ask for? Plain, linear or llama3 scaling; others are
noted, not modelled: they change no count.
"""

from __future__ import annotations

from typing import Any

from fourfold.errors import UserError
from fourfold.spec.hf.config import Config, number

_THETA = ("rope_theta", "rotary_emb_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent", "rope_percentage")
_OURS = ("default", "linear", "llama3")
_OTHERS = ("yarn", "longrope", "su", "dynamic", "ntk", "mrope", "proportional")


def rope(config: Config, *, partial: float = 1.0, theta: float = 10000.0) -> dict[str, Any]:
    """`rope_parameters` of newer files, `rope_theta` and `rope_scaling` of older ones; `partial`
    and `theta` are the type's own where the file says nothing."""
    newer, older = _of_full_layers(config), config.table("rope_scaling")
    scalings = [_scaling(table, config) for table in (newer, older) if table.data]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise UserError(
            "contradicts rope_parameters",
            field="rope_scaling",
            value=older.data,
            hint="keep one of them",
        )
    for table in (config, newer, older):
        partial = table.number("positions.partial", *_PARTIAL, default=partial)
    if not 0 < partial <= 1:
        raise UserError(
            "must be above 0 and at most 1", field=config.find(*_PARTIAL)[0], value=partial
        )
    theta = config.number("theta", *_THETA, default=theta)
    theta = newer.number("theta", *_THETA, default=theta)
    positions: dict[str, Any] = {"kind": "rope", "theta": theta}
    if scalings and scalings[0]:
        positions["scaling"] = scalings[0]
    return positions | ({"partial": partial} if partial != 1 else {})


def _of_full_layers(config: Config) -> Config:
    """Newer files may give one table per kind of layer: that of the layers without a window."""
    table = config.table("rope_parameters")
    kinds = {name: value for name, value in table.data.items() if isinstance(value, dict)}
    if not kinds:
        return table
    if any(value != next(iter(kinds.values())) for value in kinds.values()):
        config.variants.add("two-ropes")
    for name in kinds:
        table.table(name)
    return table.table("full_attention" if "full_attention" in kinds else next(iter(kinds)))


def _scaling(table: Config, config: Config) -> dict[str, Any] | None:
    kind = table.choice("default", (*_OURS, *_OTHERS), "rope_type", "type")
    config.used.update(table.path(name) for name in table.data)
    if kind in _OTHERS:
        config.variants.add("other-rope")
    if kind not in ("linear", "llama3"):
        return None
    scaling: dict[str, Any] = {"kind": kind, "factor": table.number("factor", "factor")}
    if kind == "llama3":
        low, high, length = (
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        scaling |= {
            "low_freq_factor": table.number(low, low),
            "high_freq_factor": table.number(high, high),
            "original_length": table.whole("original_length", length),
        }
    config.keys.update(table.keys)
    return scaling


def rotary_dims(config: Config, head_size: int, default: int) -> float:
    """GPT-J's kin say how many channels of a head turn, not which share."""
    name, value = config.find("rotary_dim")
    dims = number(name, default if value is None else value)
    if not 0 < dims <= head_size:
        raise UserError(f"must be from 1 to {head_size}, the head size", field=name, value=dims)
    return dims / head_size
