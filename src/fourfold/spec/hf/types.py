"""Model types of Hugging Face that are read: data/hf_types.toml, as readers of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.spec import codec, texts
from fourfold.spec.hf import own, parts
from fourfold.spec.hf.config import Config, tables
from fourfold.spec.hf.parts import Fields
from fourfold.spec.model import Variant

# Whether a part of a layer has biases: always the same, or a key with its default.
Switch = bool | Mapping[str, bool]
# A function of parts.py or own.py by name, with what it is given beside the file.
Call = str | Mapping[str, Mapping[str, Any]]
_FUNCTIONS = {**vars(parts), **vars(own)}
# Numbers that null or 0 switches off.
_MAY_BE_0 = ("moe.dense_first", "latent.q_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """Keys in the order in which they are looked for, none where the type has no such key.

    `kv_heads` 0 and `head_dim` None stand for the usual: as many as heads, hidden / heads. `bias`:
    of queries, keys and values; of attention's output; of the MLP. `reads`: further fields, by
    their keys and the default. `choices`: key, default, and the field with its value if true and
    if false. `required`: keys of which one value is modelled. `fixed`: fields without a key; `own`
    adds what needs more than a look-up. `writes`: keys that a file of ours has besides.
    """

    family: str = "llama"
    kv_keys: Sequence[str] = ("num_key_value_heads",)
    kv_heads: int = 0
    ffn_keys: Sequence[str] = ("intermediate_size",)
    ffn_per_hidden: int = 0
    head_keys: Sequence[str] = ("head_dim",)
    head_dim: int | None = None
    norm: str = "rmsnorm"
    eps_keys: Sequence[str] = ("rms_norm_eps",)
    eps: float = 1e-6
    act_keys: Sequence[str] = ("hidden_act",)
    act: str = "silu"
    gated: bool = True
    bias: Sequence[Switch] = (False, False, False)
    tied: bool = False
    positions: Call = "rope"
    windows: Call = ""
    reads: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    choices: Sequence[tuple[str, bool, str, str, str]] = ()
    required: Mapping[str, object] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    variants: Sequence[Variant] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    own: Call = ""
    writes: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, config: Config) -> Fields:
        """The fields of a ModelShape, from a file of this type."""
        size = parts.sizes(config)
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
            "head_dim": parts.head_dim(config, self.head_dim, self.head_keys),
            "positions": _called(self.positions, config),
            "norm": self.norm,
            "norm_eps": config.number("norm_eps", *self.eps_keys, default=self.eps),
            "activation": parts.activation(config, self.act, *self.act_keys, gated=self.gated),
            "tied": config.flag("tie_word_embeddings", default=self.tied),
            **parts.biases(*(_is_on(config, switch) for switch in self.bias)),
            **(_called(self.windows, config, size["layers"]) if self.windows else {}),
        }
        self._more(config, fields)
        return fields

    def _more(self, config: Config, fields: Fields) -> None:
        for name, (*keys, default) in self.reads.items():
            codec.put(fields, name, _found(config, name, keys, default))
        for key, default, name, if_true, if_false in self.choices:
            chosen = if_true if config.flag(key, default=default) else if_false
            codec.put(fields, name, chosen)
        for key, value in self.required.items():
            config.require(value, key)
        config.ignore(*self.ignored)
        for name, value in self.fixed.items():
            codec.put(fields, name, value)
        if "experts" in self.reads:
            fields["moe"].setdefault("ffn", fields["ffn"])
            if config.find("router_jitter_noise")[1]:
                config.variants.add("router-noise")
        if self.own:
            _called(self.own, config, fields)


def _called(call: Call, *arguments: Any) -> Any:
    ((name, given),) = [(call, {})] if isinstance(call, str) else call.items()
    return _FUNCTIONS[name](*arguments, **given)


def _found(config: Config, name: str, keys: Sequence[str], default: Any) -> Any:
    """By the kind of the default."""
    if isinstance(default, bool):
        return config.flag(*keys, default=default)
    if isinstance(default, float):
        return config.number(name, *keys, default=default)
    whole = config.whole_or_0 if name in _MAY_BE_0 else config.whole
    return whole(name, *keys, default=default)


def _is_on(config: Config, switch: Switch) -> bool:
    if isinstance(switch, bool):
        return switch
    ((key, default),) = switch.items()
    return config.flag(key, default=default)


_TABLES = tables("hf_types.toml", "types")
TYPES: dict[str, Callable[[Config], Fields]] = {
    **{name: ModelType(**table) for name, table in _TABLES.items()},
    "mpt": own.mpt,
}
WITH_EXPERTS = {name for name, table in _TABLES.items() if "experts" in table.get("reads", ())}
UNKNOWN: dict[str, tuple[str, str]] = texts.data("hf_types.toml")["unknown"]
