"""nanotron's YAML: the sections parallelism, tokens, optimizer and model.dtype, names of 2026.

Only this flat part is written and read: sections of `name: value` lines. The rest of a nanotron
configuration (data, logging, learning rate) is the user's.
"""

from __future__ import annotations

from itertools import pairwise

from fourfold.errors import UserError
from fourfold.search.export.setup import Setup, check_plain, comment, no_setting, number
from fourfold.spec import codec
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy

_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
_DTYPES = {"bf16-mixed": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}


def write(setup: Setup) -> str:
    check_plain("nanotron", setup)
    layout, batch, policy = setup.layout, setup.batch, setup.policy
    _refuse(setup)
    sections: dict[str, dict[str, object]] = {
        "parallelism": {
            "dp": layout.dp,
            "pp": layout.pp,
            "tp": layout.tp,
            "context_parallel_size": layout.cp,
            "expert_parallel_size": 1,
            "pp_engine": _ENGINES[policy.schedule],
            "tp_mode": "REDUCE_SCATTER" if policy.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": policy.async_tp,
            "recompute_layer": policy.recompute == "full",
        },
        "tokens": {
            "sequence_length": batch.seq_len,
            "micro_batch_size": batch.micro_batch,
            "batch_accumulation_per_replica": batch.global_batch // (layout.dp * batch.micro_batch),
        },
        "optimizer": {"zero_stage": policy.zero, "accumulate_grad_in_fp32": True},
        "model": {"dtype": _DTYPES[policy.precision]},
        "model_config": {_SIZES[name]: size for name, size in setup.shape},
    }
    lines = [
        comment("nanotron", setup),
        f"# torchrun --nnodes {setup.hosts} --nproc-per-node {setup.per_host};"
        " model_config belongs inside model",
    ]
    for section, fields in sections.items():
        lines += [f"{section}:", *(f"  {name}: {_word(v)}" for name, v in fields.items())]
    return "\n".join([*lines, ""])


def _refuse(setup: Setup) -> None:
    policy = setup.policy
    limits: tuple[tuple[str, object, bool, str], ...] = (
        ("policy.schedule", policy.schedule, policy.schedule in _ENGINES, "1f1b or gpipe"),
        ("policy.precision", policy.precision, policy.precision in _DTYPES, ", ".join(_DTYPES)),
        ("policy.sharding", policy.sharding, policy.zero <= 1, "zero0 or zero1"),
        ("policy.recompute", policy.recompute, policy.recompute in ("none", "full"), "none, full"),
        ("layout.dp", "hybrid", setup.layout.replicate == 1, "dp without x"),
        ("batch.ramp", "ramp", setup.batch.ramp is None, "a fixed global batch"),
        (
            "policy.cp_kind",
            policy.cp_kind,
            setup.layout.cp == 1 or policy.cp_kind == "ring",
            "ring",
        ),
    )
    for field, value, is_said, way_out in limits:
        if not is_said:
            raise no_setting("nanotron", field, value, way_out)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(text: str, *, layers: int) -> Setup:
    assert layers > 0
    found = _fields(text)
    layout = Layout(
        shard=number(found, "parallelism.dp"),
        pp=number(found, "parallelism.pp"),
        tp=number(found, "parallelism.tp"),
        cp=number(found, "parallelism.context_parallel_size", 1),
    )
    micro = number(found, "tokens.micro_batch_size")
    micros = number(found, "tokens.batch_accumulation_per_replica", 1)
    dtypes = {word: name for name, word in _DTYPES.items()}
    engines = {word: name for name, word in _ENGINES.items()}
    dtype, engine = found.get("model.dtype", "bfloat16"), found.get("parallelism.pp_engine", "afab")
    if dtype not in dtypes or engine not in engines:
        raise UserError("is not one fourfold knows", field="model.dtype, pp_engine", value=dtype)
    return Setup(
        layout=layout,
        batch=Batch(
            seq_len=number(found, "tokens.sequence_length"),
            micro_batch=micro,
            global_batch=micro * micros * layout.dp,
        ),
        policy=codec.decode(
            Policy,
            {
                "precision": dtypes[dtype],
                "sharding": f"zero{number(found, 'optimizer.zero_stage', 0)}",
                "sequence_parallel": found.get("parallelism.tp_mode", "").upper()
                == "REDUCE_SCATTER",
                "schedule": engines[engine],
                "async_tp": found.get("parallelism.tp_linear_async_communication") == "true",
                "recompute": "full"
                if found.get("parallelism.recompute_layer") == "true"
                else "none",
            },
            "policy",
        ),
        host_gpus=number(_torchrun(text), "--nproc-per-node", 1),
        shape=tuple(
            (name, number(found, f"model_config.{key}"))
            for name, key in _SIZES.items()
            if f"model_config.{key}" in found
        ),
    )


def _torchrun(text: str) -> dict[str, str]:
    """The launch line of the comment, where a file of ours has one."""
    words = text.replace(";", " ").split()
    return {name: value for name, value in pairwise(words) if name.startswith("--")}


def _fields(text: str) -> dict[str, str]:
    """section.name -> value of every `name: value` line, one level deep."""
    found: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        bare = line.split("#", 1)[0].rstrip()
        name, colon, value = bare.strip().partition(":")
        if not colon:
            continue
        if not bare.startswith(" "):
            section = name
        elif value.strip():
            found[f"{section}.{name}"] = value.strip()
    return found
