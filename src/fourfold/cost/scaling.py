"""Kinds of scales for products in few bits: data/scalings.toml."""

from __future__ import annotations

from dataclasses import dataclass, field

from fourfold.spec import catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingKind:
    cast_bytes: float
    rate: dict[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    needs: str = ""  # of GPUs: tensor cores of this format, which take such scales too


KINDS = catalog.kinds(ScalingKind, "scalings.toml")
CALLED: dict[str, str] = {word: name for name, kind in KINDS.items() for word in kind.names}


def scaling_facts(name: str, generation: str) -> dict[str, float]:
    """Of products on a generation of GPUs."""
    kind = KINDS[name]
    return {"cast_bytes": kind.cast_bytes, "scaled_rate": kind.rate.get(generation, 1.0)}
