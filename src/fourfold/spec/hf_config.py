"""What does a Hugging Face config.json say, and what in it do we not model?

Config files carry dozens of harmless fields, so only what would change the count, the cost or the
function is refused; a key that is absent, null, false or 0 asks for nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from fourfold.errors import UserError
from fourfold.spec.codec import MAX_INT

# Dropout of heads that pretraining does not have: GPT-2's summary head, classifiers.
_OTHER_HEADS = ("summary_first_dropout", "classifier_dropout")
# (key, reason, way out); a pattern is matched against the whole key, here and one table deep.
_UNMODELLED = (
    (r".*expert.*|(.*_)?moe(_.*)?", "mixture of experts is not modelled", "use a dense model"),
    (r".*drop(out|path)?(_.*)?|.*_pdrop", "dropout is not modelled", "set it to 0"),
    (
        r"sliding_window(_size)?|attention_window(_size)?|attention_chunk_size|local_attention.*",
        "sliding windows are not modelled: attention is full and causal",
        "set it to null if the run's sequences fit in the window",
    ),
    (
        r"(use_)?(qk|query_key)_?(layer_?)?(norm|ln)|use_qk_norm.*|qk_gn",
        "norms of queries and keys are not modelled",
        "only models without them can be expressed",
    ),
    (
        r"(use_)?parallel_(residual|attn|attention|block)|use_parallel_attn",
        "attention and MLP side by side are not modelled",
        "only the sequential block can be expressed",
    ),
    (r"(q|kv)_lora_rank", "latent attention is not modelled", "only plain or grouped heads"),
    (r".*soft_?cap.*", "soft-capped logits are not modelled", "set it to null"),
    (r"clip_qkv", "clipped queries and keys are not modelled", "set it to null"),
    (
        r"logit_scale|logits_scaling|(embedding|residual|attention)_multiplier|softmax_scale",
        "scaled activations are not modelled",
        "set it to null",
    ),
    (r"prefix_lm", "attention over a prefix is not modelled", "set it to false"),
    (
        r"scale_attn_by_inverse_layer_idx|apply_residual_connection_post_layernorm",
        "this variant of the block is not modelled",
        "set it to false",
    ),
    (
        r"num_nextn_predict_layers|num_mtp_layers",
        "layers that predict further tokens are not modelled",
        "set it to 0",
    ),
    (r"no_rope_layers?.*", "layers without rotary positions are not modelled", "set it to null"),
    (
        r"is_encoder_decoder|add_cross_attention|cross_attention.*",
        "only decoders without cross attention are modelled",
        "use a decoder-only model",
    ),
    (
        r"(vision|audio|image|text|speech|video)_(config|tower)|mm_.*",
        "only text is modelled, not several kinds of input",
        "use the config.json of a plain language model",
    ),
    (
        r"quantization(_config)?|compression_config",
        "quantised weights are not modelled: formats are the policy's",
        "remove it and choose --precision",
    ),
)  # fmt: skip
_PATTERNS = tuple((re.compile(pattern), reason, out) for pattern, reason, out in _UNMODELLED)


def number(field: str, value: object) -> float:
    """A finite number of the file, else an error that names its field."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserError("must be a number", field=field, value=value)
    if not abs(value) <= 1e300 or not math.isfinite(value):
        raise UserError("must be a finite number", field=field, value=value)
    return float(value)


@dataclass(frozen=True, slots=True)
class Config:
    """Typed look-ups; `keys` remembers which key of the file gave which of our fields."""

    data: dict[str, Any]
    where: str = ""
    keys: dict[str, str] = field(default_factory=dict)

    def find(self, *names: str) -> tuple[str, Any]:
        """The first spelling that is given; two spellings that disagree are refused."""
        given = [(name, self.data[name]) for name in names if self.data.get(name) is not None]
        for name, value in given[1:]:
            if value != given[0][1]:
                raise UserError(
                    f"contradicts {given[0][0]}",
                    field=self.path(name),
                    value=value,
                    way_out="keep one of the two",
                )
        return given[0] if given else (names[0], None)

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def whole(self, ours: str, *names: str, default: int | None = None) -> int:
        name, value = self.find(*names)
        self.keys[ours] = self.path(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise UserError("is missing", field=self.path(name), way_out=f'add "{name}": ...')
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError("must be a whole number", field=self.path(name), value=value)
        if not 1 <= value <= MAX_INT:
            raise UserError("must be from 1 to 2^63 - 1", field=self.path(name), value=value)
        return value

    def number(self, ours: str, *names: str, default: float | None = None) -> float:
        name, value = self.find(*names)
        self.keys[ours] = self.path(name)
        if value is None and default is None:
            raise UserError("is missing", field=self.path(name), way_out=f'add "{name}": ...')
        return default if value is None else number(self.path(name), value)  # type: ignore[return-value]

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserError("must be true or false", field=self.path(name), value=value)
        return default if value is None else value

    def table(self, name: str) -> Config:
        value = self.data.get(name)
        if value is not None and not isinstance(value, dict):
            raise UserError("must be an object", field=self.path(name), value=value)
        return Config(value or {}, self.path(name))

    def choice(self, default: str, allowed: tuple[str, ...], *names: str) -> str:
        name, value = self.find(*names)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise UserError(
                "is not modelled for this model type",
                field=self.path(name),
                value=value,
                way_out=f"modelled: {', '.join(allowed)}",
            )
        return value


def refuse_unmodelled(data: dict[str, Any]) -> None:
    """Raise for the first thing that our types cannot express."""
    _refuse_in(data, "")
    for name, value in data.items():
        if isinstance(value, dict):
            _refuse_in(value, f"{name}.")
    layer_types = data.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UserError(
            "only full attention in every layer is modelled", field="layer_types", value=layer_types
        )


def _refuse_in(table: dict[str, Any], path: str) -> None:
    window_off = table.get("use_sliding_window") is False
    for name, value in table.items():
        if name in _OTHER_HEADS or (window_off and name == "sliding_window"):
            continue
        if not value or (name.endswith("_multiplier") and value == 1):
            continue
        # llm-foundry writes "no window" as -1; newer files name the kernel that experts would use.
        if (name == "sliding_window_size" and value == -1) or name == "experts_implementation":
            continue
        if name.endswith("_fusion"):  # BLOOM's bias_dropout_fusion names a kernel, not a rate
            continue
        for pattern, reason, way_out in _PATTERNS:
            if pattern.fullmatch(name):
                raise UserError(reason, field=f"{path}{name}", value=value, way_out=way_out)
