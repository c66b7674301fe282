"""Parts that readers of config.json share: sizes, biases, activations, windows, rotary
positions (plain, linear or llama3 scaling; others are noted, not modelled: they change no count).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fourfold.errors import UserError
from fourfold.spec.hf.config import Config, number

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
POSITIONS = ("max_position_embeddings", "n_positions")
# The forms of GELU (erf, tanh, sigmoid) cost the same and have no weights: one name here.
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu")
_PLAIN = dict.fromkeys(GELU, "gelu") | {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_GATES = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}


def sizes(config: Config) -> dict[str, Any]:
    return {
        "layers": config.whole("layers", *LAYERS),
        "hidden": config.whole("hidden", *HIDDEN),
        "heads": config.whole("heads", *HEADS),
        "vocab": config.whole("vocab", "vocab_size"),
    }


def kv_heads(config: Config, default: int) -> int:
    return config.whole("kv_heads", "num_key_value_heads", default=default)


def head_dim(config: Config, default: int | None = None, also: str = "head_dim") -> int | None:
    names = ("head_dim", also)
    return config.whole("head_dim", *names) if config.find(*names)[1] is not None else default


def activation(config: Config, default: str, *names: str, gated: bool = False) -> str:
    """Our name of the first activation that the file gives."""
    known = tuple(name for name, ours in _PLAIN.items() if not gated or ours in _GATES)
    for name in names:
        if config.find(name)[1] is not None:
            default = config.choice(default, known, name)
            break
    ours = _PLAIN[default]
    return _GATES[ours] if gated else ours


def biases(*, qkv: bool, out: bool, mlp: bool) -> dict[str, Any]:
    """As few words as say it: `bias` for all, and what differs from it."""
    found: dict[str, Any] = {"bias": mlp}
    return (
        found
        | ({"qkv_bias": qkv} if qkv != mlp else {})
        | ({"out_bias": out} if out != mlp else {})
    )


def windows(
    config: Config,
    layers: int,
    *,
    default: int | None = None,
    local: Callable[[int], bool] = lambda layer: True,
    switched: bool = False,
) -> dict[str, Any]:
    """Which layers look back only a window. `default`: where the file does not name it; `local`:
    which layers have it where no list says so; `switched`: only if use_sliding_window is true."""
    size = config.data.get("sliding_window", default)
    name, _ = config.find("sliding_window")
    enabled = config.flag("use_sliding_window", default=not switched)
    count = _listed(config, layers)
    if not enabled or not size:
        return {}
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 2**40:
        raise UserError("must be a whole number from 1 to 2^40", field=name, value=size)
    if count is None:
        count = sum(map(local, range(layers))) if layers <= 100_000 else 1
    if count == 0:
        return {}
    return {"window": size} | ({} if count == layers else {"local_layers": count})


def _listed(config: Config, layers: int) -> int | None:
    """How many layers `layer_types` calls sliding; None: there is no list."""
    name, kinds = config.find("layer_types")
    if not kinds:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise UserError(
            "contains attention other than full and sliding, which is not modelled",
            field=name,
            value=kinds,
        )
    if len(kinds) != layers:
        raise UserError(
            f"must have one entry for each of {layers} layers", field=name, value=len(kinds)
        )
    return kinds.count("sliding_attention")


def every(config: Config, default: int) -> Callable[[int], bool]:
    """Every n-th layer sees all, the others a window; newer files list the layers instead."""
    step = config.whole("", "sliding_window_pattern", default=default)
    return lambda layer: (layer + 1) % step != 0


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
