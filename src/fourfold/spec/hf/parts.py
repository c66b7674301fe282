"""Reads the parts that model types share: sizes, biases, activations, windows, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.spec.codec import decode_value
from fourfold.spec.hf.config import Config
from fourfold.spec.layers import Mixer, shortest_cycle
from fourfold.spec.model import OF_SCALING

Fields = dict[str, Any]
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
POSITIONS = ("max_position_embeddings", "n_positions")
# The forms of GELU (erf, tanh, sigmoid) cost the same and have no weights: one name here.
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu")
_PLAIN = dict.fromkeys(GELU, "gelu") | {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
_GATES = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}


def sizes(config: Config) -> Fields:
    return {
        "layers": config.whole("layers", *LAYERS),
        "hidden": config.whole("hidden", *HIDDEN),
        "heads": config.whole("heads", *HEADS),
        "vocab": config.whole("vocab", "vocab_size"),
    }


def head_dim(config: Config, default: int | None, keys: Sequence[str]) -> int | None:
    given = keys and config.find(*keys)[1] is not None
    return config.whole("head_dim", *keys) if given else default


def activation(config: Config, default: str, *names: str, gated: bool = False) -> str:
    """Our name of the first activation that the file gives."""
    known = tuple(name for name, ours in _PLAIN.items() if not gated or ours in _GATES)
    for name in names:
        if config.find(name)[1] is not None:
            default = config.choice(default, known, name)
            break
    ours = _PLAIN[default]
    return _GATES[ours] if gated else ours


def biases(qkv: bool, out: bool, mlp: bool) -> Fields:
    """As few words as say it: `bias` for all, and what differs from it."""
    parts = {"qkv_bias": qkv, "out_bias": out}
    return {"bias": mlp} | {name: has_bias for name, has_bias in parts.items() if has_bias != mlp}


def windows(
    config: Config,
    layers: int,
    *,
    default: int | None = None,
    local: Callable[[int], bool] = lambda layer: True,
    switched: bool = False,
) -> Fields:
    """Which layers look back only a window. `default`: where the file does not name it; `local`:
    which layers have it where no list says so; `switched`: only if use_sliding_window is true."""
    size = config.data.get("sliding_window", default)
    name, _ = config.find("sliding_window")
    enabled = config.flag("use_sliding_window", default=not switched)
    mixers = _listed(config, layers)
    if not enabled or not size:
        return {}
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 2**40:
        raise UserError("must be a whole number from 1 to 2^40", field=name, value=size)
    if mixers is None:
        mixers = window_where(map(local, range(min(layers, 100_000))))
    return window_fields(size, mixers)


def window_where(has_window: Iterable[bool]) -> list[Mixer]:
    return ["window" if has else "full" for has in has_window]


def window_fields(size: int, mixers: list[Mixer]) -> Fields:
    """The window, and the layers that have it where not all do."""
    if "window" not in mixers:
        return {}
    return {"window": size} | ({"mixers": [*shortest_cycle(mixers)]} if "full" in mixers else {})


def _listed(config: Config, layers: int) -> list[Mixer] | None:
    """What `layer_types` says of each layer; None: there is no list."""
    name, kinds = config.find("layer_types")
    if not kinds:
        return None
    known: dict[str, Mixer] = {"full_attention": "full", "sliding_attention": "window"}
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        rule = "contains attention other than full and sliding, which is not modelled"
        raise UserError(rule, field=name, value=kinds)
    rule = f"must have one entry for each of {layers} layers"
    check.that(len(kinds) == layers, name, len(kinds), rule)
    return [known[kind] for kind in kinds]


def qwen_windows(config: Config, layers: int) -> Fields:
    """The first `max_window_layers` see all."""
    first = decode_value(int, config.data.get("max_window_layers", 28), "max_window_layers")
    return windows(config, layers, local=lambda layer: layer >= first, default=4096, switched=True)


def some_windows(config: Config, layers: int, *, step: int) -> Fields:
    """Every n-th layer sees all, the others a window; newer files list the layers instead."""
    step = config.whole("", "sliding_window_pattern", default=step)
    return windows(config, layers, default=4096, local=lambda layer: (layer + 1) % step != 0)


_THETA = ("rope_theta", "rotary_emb_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent", "rope_percentage")
_LENGTH = "original_max_position_embeddings"
# Noted, not modelled: they change no count.
_OTHERS = ("longrope", "su", "dynamic", "ntk", "mrope", "proportional")


def rope(config: Config, *, share: float = 1.0, theta: float = 10000.0) -> Fields:
    """`rope_parameters` of newer files, `rope_theta` and `rope_scaling` of older ones; `share`
    and `theta` are the type's own where the file says nothing."""
    newer, older = _of_full_layers(config), config.table("rope_scaling")
    scalings = [_scaling(table, config) for table in (newer, older) if table.data]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        rule, hint = "contradicts rope_parameters", "keep one of them"
        raise UserError(rule, field="rope_scaling", value=older.data, hint=hint)
    for table in (config, newer, older):
        share = table.number("positions.partial", *_PARTIAL, default=share)
    if not 0 < share <= 1:
        name = config.find(*_PARTIAL)[0]
        raise UserError("must be above 0 and at most 1", field=name, value=share)
    theta = config.number("theta", *_THETA, default=theta)
    theta = newer.number("theta", *_THETA, default=theta)
    positions: Fields = {"kind": "rope", "theta": theta}
    if isinstance(length := config.find(*POSITIONS)[1], int) and length > 0:
        positions["made_for"] = length
    if scalings and scalings[0]:
        positions["scaling"] = scalings[0]
    return positions | ({"partial": share} if share != 1 else {})


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


def _scaling(table: Config, config: Config) -> Fields | None:
    kind = table.choice("default", ("default", *OF_SCALING, *_OTHERS), "rope_type", "type")
    config.used.update(table.path(name) for name in table.data)
    names = OF_SCALING.get(kind, ())
    # YaRN has further keys, which other models of the kind do not.
    known = {"rope_type", "type", "factor", "truncate", _LENGTH, *names, *_THETA, *_PARTIAL}
    odd = kind == "yarn" and (table.data.keys() - known or _LENGTH not in table.data)
    if kind in _OTHERS or odd:
        config.variants.add("other-rope")
    if kind not in OF_SCALING or odd:
        return None
    scaling: Fields = {"kind": kind, "factor": table.number("factor", "factor")}
    for name in names:
        if name == "original_length":
            scaling[name] = table.whole(name, _LENGTH)
        elif kind != "yarn" or name in table.data:
            scaling[name] = table.number(name, name)
    if kind == "yarn" and not table.flag("truncate", default=True):
        scaling["truncate"] = False
    config.keys.update(table.keys)
    return scaling


def rotary_dims(config: Config, head_size: int, default: int) -> float:
    """GPT-J's kin say how many channels of a head turn, not which share."""
    name, value = config.find("rotary_dim")
    dims = decode_value(float, default if value is None else value, name)
    check.that(0 < dims <= head_size, name, dims, f"must be from 1 to {head_size}, the head size")
    return dims / head_size


def learned(config: Config, default: int | None = None, more: int = 0) -> Fields:
    length = config.whole("positions.length", *POSITIONS, default=default)
    return {"kind": "learned", "length": length + more}


def alibi(config: Config) -> Fields:
    return {"kind": "alibi"}
