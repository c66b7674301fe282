"""Which rotary positions does a config.json ask for? Plain, linear or llama3 scaling."""

from __future__ import annotations

from typing import Any

from fourfold.errors import UserError
from fourfold.spec.hf_config import Config, number

_THETA = ("rope_theta", "rotary_emb_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_percent", "rope_percentage")


def rope(config: Config, *, partial: float = 1.0, partial_ok: bool = False) -> dict[str, Any]:
    """`rope_parameters` of newer files, `rope_theta` and `rope_scaling` of older ones."""
    newer, older = config.table("rope_parameters"), config.table("rope_scaling")
    for value in newer.data.values():
        if isinstance(value, dict):
            raise UserError(
                "rotary settings per kind of layer are not modelled",
                field="rope_parameters",
                value=newer.data,
                way_out="one setting for all layers",
            )
    scalings = [_scaling(table, config) for table in (newer, older) if table.data]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise UserError(
            "contradicts rope_parameters",
            field="rope_scaling",
            value=older.data,
            way_out="keep one of the two",
        )
    given = [table.find(*_PARTIAL) for table in (config, newer, older)]
    _refuse_partial([pair for pair in given if pair[1] is not None] or [("", partial)], partial_ok)
    theta = config.number("theta", *_THETA, default=10000.0)
    theta = newer.number("theta", *_THETA, default=theta)
    scaling = scalings[0] if scalings else None
    return {"kind": "rope", "theta": theta} | ({"scaling": scaling} if scaling else {})


def _refuse_partial(shares: list[tuple[str, Any]], partial_ok: bool) -> None:
    for name, share in shares:
        if share != 1 and not (partial_ok and 0 < number(name, share) < 1):
            raise UserError(
                "rotary positions on a part of a head are not modelled",
                field=name or _PARTIAL[0],
                value=share,
                way_out="only 1.0, the whole head",
            )


def _scaling(table: Config, config: Config) -> dict[str, Any] | None:
    allowed = ("default", "linear", "llama3")
    kind = table.choice("default", allowed, "rope_type", "type")
    if kind == "default":
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
