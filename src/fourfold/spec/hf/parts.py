"""Reads the parts that model types share: sizes, biases, activations, windows, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.spec.codec import decode_value
from fourfold.spec.hf.config import Config
from fourfold.spec.model import OF_SCALING, Variant

Fields = dict[str, Any]
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


def sizes(config: Config) -> Fields:
    return {
        "layers": config.whole("layers", *LAYERS),
        "hidden": config.whole("hidden", *HIDDEN),
        "heads": config.whole("heads", *HEADS),
        "vocab": config.whole("vocab", "vocab_size"),
    }


def head_dim(config: Config, default: int | None, keys: tuple[str, ...]) -> int | None:
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


def no_windows(config: Config, layers: int) -> Fields:
    return {}


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
    count = _listed(config, layers)
    if not enabled or not size:
        return {}
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 2**40:
        raise UserError("must be a whole number from 1 to 2^40", field=name, value=size)
    if count is None:
        count = sum(map(local, range(layers))) if layers <= 100_000 else 1
    return window_fields(size, count, layers)


def window_fields(size: int, count: int, layers: int) -> Fields:
    """The window that `count` of the layers have."""
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
        rule = "contains attention other than full and sliding, which is not modelled"
        raise UserError(rule, field=name, value=kinds)
    rule = f"must have one entry for each of {layers} layers"
    check.that(len(kinds) == layers, name, len(kinds), rule)
    return kinds.count("sliding_attention")


def qwen_windows(config: Config, layers: int) -> Fields:
    """The first `max_window_layers` see all."""
    first = decode_value(int, config.data.get("max_window_layers", 28), "max_window_layers")
    return windows(config, layers, local=lambda layer: layer >= first, default=4096, switched=True)


def local_except_every(config: Config, default: int) -> Callable[[int], bool]:
    """Every n-th layer sees all, the others a window; newer files list the layers instead."""
    step = config.whole("", "sliding_window_pattern", default=default)
    return lambda layer: (layer + 1) % step != 0


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
    known = {"rope_type", "type", "factor", _LENGTH, *names, *_THETA, *_PARTIAL}
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


def no_more(config: Config, fields: Fields) -> None:
    """A type whose keys say it all."""


# Whether a part of a layer has biases: always the same, or a key with its default.
Switch = bool | tuple[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """Keys in the order in which they are looked for, none where the type has no such key.

    `kv_heads` 0 and `head_dim` None stand for the usual: as many as heads, hidden / heads. `bias`:
    of queries, keys and values; of attention's output; of the MLP. `choices`: key, default, and
    the field with its value if true and if false. `required`: keys of which one value is modelled.
    `fixed`: fields without a key; `own` adds what needs more than a look-up.
    """

    family: str = "llama"
    kv_keys: tuple[str, ...] = ("num_key_value_heads",)
    kv_heads: int = 0
    ffn_keys: tuple[str, ...] = ("intermediate_size",)
    ffn_per_hidden: int = 0
    head_keys: tuple[str, ...] = ("head_dim",)
    head_dim: int | None = None
    norm: str = "rmsnorm"
    eps_keys: tuple[str, ...] = ("rms_norm_eps",)
    eps: float = 1e-6
    act_keys: tuple[str, ...] = ("hidden_act",)
    act: str = "silu"
    gated: bool = True
    bias: tuple[Switch, Switch, Switch] = (False, False, False)
    tied: bool = False
    positions: Callable[[Config], Fields] = rope
    windows: Callable[[Config, int], Fields] = no_windows
    choices: tuple[tuple[str, bool, str, str, str], ...] = ()
    required: Mapping[str, object] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    own: Callable[[Config, Fields], None] = no_more

    def __call__(self, config: Config) -> Fields:
        """The fields of a ModelShape, from a file of this type."""
        size = sizes(config)
        config.variants.update(self.variants)
        kv_heads, per_hidden = size["heads"], self.ffn_per_hidden
        if self.kv_keys:
            kv_heads = config.whole("kv_heads", *self.kv_keys, default=self.kv_heads or kv_heads)
        fields = {
            **size,
            "family": self.family,
            "kv_heads": kv_heads,
            "ffn": config.whole(
                "ffn", *self.ffn_keys, default=per_hidden * size["hidden"] if per_hidden else None
            ),
            "head_dim": head_dim(config, self.head_dim, self.head_keys),
            "positions": self.positions(config),
            "norm": self.norm,
            "norm_eps": config.number("norm_eps", *self.eps_keys, default=self.eps),
            "activation": activation(config, self.act, *self.act_keys, gated=self.gated),
            "tied": config.flag("tie_word_embeddings", default=self.tied),
            **biases(*(_is_on(config, switch) for switch in self.bias)),
            **self.windows(config, size["layers"]),
        }
        for key, default, name, if_true, if_false in self.choices:
            fields[name] = if_true if config.flag(key, default=default) else if_false
        for key, value in self.required.items():
            config.require(value, key)
        config.ignore(*self.ignored)
        fields |= self.fixed
        self.own(config, fields)
        return fields


def _is_on(config: Config, switch: Switch) -> bool:
    return switch if isinstance(switch, bool) else config.flag(switch[0], default=switch[1])
