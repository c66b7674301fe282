"""nanotron's YAML, whole: its Config class takes the file as it is. Of 0.4, the newest release."""

from __future__ import annotations

import json
from string import Template

import numpy as np

from fourfold.cost.count.params import passing_unit
from fourfold.cost.step.pipeline import passing_edges
from fourfold.search.export.setup import LLAMA_SHAPE, MARK, Package, Setup, check_model, no_setting
from fourfold.spec.model import ModelShape

RELEASE = "nanotron 0.4"
CHOICES = {
    "layout.replicate": (1,),
    "policy.attention": ("auto", "flash"),
    "policy.compile": (False,),
    "policy.reduce_dtype": (None, "fp32"),
}
_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
_DTYPES = {"bf16-mixed": "bfloat16", "fp16": "float16", "fp32": "float32"}
_THETA = 10000.0  # built in
_SIZES = ("hidden", "ffn", "heads", "layers", "kv_heads", "norm_eps", "tied", "vocab")
_CONFIG = Template("""$mark nanotron, for $release
general:
  project: "fourfold"
  run: "run"
  seed: 42
parallelism:
  dp: $dp
  pp: $pp
  tp: $tp
  expert_parallel_size: 1
  pp_engine: $pp_engine
  tp_mode: $tp_mode
  tp_linear_async_communication: $tp_linear_async
tokens:
  sequence_length: $seq_len
  train_steps: 100
  micro_batch_size: $micro_batch
  batch_accumulation_per_replica: $micro_batches
optimizer:
  zero_stage: $zero
  weight_decay: 0.1
  clip_grad: 1.0
  accumulate_grad_in_fp32: $accumulate_in_fp32
  adam_eps: 1.0e-08
  adam_beta1: 0.9
  adam_beta2: 0.95
  torch_adam_is_fused: true
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_warmup_steps: 10
    lr_warmup_style: "linear"
    lr_decay_style: "cosine"
    min_decay_lr: 3.0e-05
tokenizer:
  tokenizer_name_or_path: null
data:
  dataset: null
  seed: 42
  num_loading_workers: 1
checkpoints:
  checkpoints_path: "checkpoints"
  checkpoint_interval: 1000
logging:
  log_level: "info"
  iteration_step_info_interval: 1
model:
  dtype: $dtype
  make_vocab_size_divisible_by: 1
  init_method:
    std: 0.02
  model_config:
    is_llama_config: true
    hidden_act: "silu"
    hidden_size: $hidden
    intermediate_size: $ffn
    max_position_embeddings: $positions
    num_attention_heads: $heads
    num_hidden_layers: $layers
    num_key_value_heads: $kv_heads
    rms_norm_eps: $norm_eps
    tie_word_embeddings: $tied
    vocab_size: $vocab
""")


def check(model: ModelShape) -> None:
    check_model("nanotron", model, LLAMA_SHAPE)
    place = model.positions
    if place.kind != "rope":
        raise no_setting("nanotron", "model.positions.kind", place.kind, "rope")
    if place.theta != _THETA or place.scaling is not None:
        value = f"theta {place.theta:g}" + (", scaled" if place.scaling else "")
        hint = "rope with theta 10000 and no scaling, as in Llama 2 (release 0.4)"
        raise no_setting("nanotron", "model.positions", value, hint)
    if model.head_size * model.heads != model.hidden:
        raise no_setting("nanotron", "model.head_dim", model.head_dim, "hidden / heads")


def package(setup: Setup) -> Package:
    if setup.policy.zero > 1:  # legal where one data rank has nothing to divide, but not written
        raise no_setting("nanotron", "policy.sharding", setup.policy.sharding, "zero0 or zero1")
    return Package(
        engine="nanotron",
        release=RELEASE,
        entry='"${RUN_TRAIN:-run_train.py}" --config-file "$here/config.yaml"',
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1", **setup.env},
        files={"config.yaml": _config(setup)},
        own="data, tokenizer, optimizer's numbers, train_steps and checkpoints, all in config.yaml",
        about=_about(setup.model, setup.layout.pp),
    )


def stages(model: ModelShape, pp: int) -> list[int]:
    """Layers of each stage in this release."""
    head = model.vocab / passing_unit(model.hidden, model.ffn)
    layers, stages = np.array(float(model.layers)), np.array(float(pp))
    edges = passing_edges(layers, np.array(head), stages, np.arange(pp + 1.0))
    return [int(count) for count in np.diff(edges)]


def _about(model: ModelShape, pp: int) -> tuple[str, ...]:
    if pp == 1:
        return ()
    counts = " ".join(str(count) for count in stages(model, pp))
    return (f"this release splits the layers into stages of {counts}, as timed here",)


def _config(setup: Setup) -> str:
    layout, batch, policy, model = setup.layout, setup.batch, setup.policy, setup.model
    values = {
        "pp_engine": _ENGINES[policy.schedule],
        "tp_mode": "REDUCE_SCATTER" if policy.sequence_parallel else "ALL_REDUCE",
        "tp_linear_async": setup.overlaps_tp,
        "seq_len": batch.seq_len,
        "micro_batch": batch.micro_batch,
        "micro_batches": batch.global_batch // (layout.dp * batch.micro_batch),
        "zero": policy.zero,
        "accumulate_in_fp32": policy.precision != "fp32",
        "dtype": _DTYPES[policy.precision],
        "positions": max(batch.seq_len, model.positions.made_for or 0),
        **layout.sizes,
        **{name: getattr(model, name) for name in _SIZES},
    }
    texts = {name: _scalar(value) for name, value in values.items()}
    return _CONFIG.substitute(texts, mark=MARK, release=RELEASE)


def _scalar(value: object) -> str:
    """A scalar in JSON is one in YAML, but for exponents, which YAML 1.1 wants with a point."""
    number, e, power = json.dumps(value).partition("e-" if isinstance(value, float) else "\0")
    return f"{number}{'.0' if e and '.' not in number else ''}{e}{power}"
