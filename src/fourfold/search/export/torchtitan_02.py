"""torchtitan 0.2's --section.option flags, with the model in a module that it imports."""

from __future__ import annotations

from fourfold.search.export import torchtitan as titan
from fourfold.search.export.setup import MARK, Package, Setup, no_setting
from fourfold.spec.model import ModelShape

RELEASE = "torchtitan 0.2.2"
CHOICES = titan.CHOICES
_ENGINE = "torchtitan-0.2"
_FP8 = "quantize.linear.float8"


def check(model: ModelShape) -> None:
    titan.check_shape(_ENGINE, model)
    if titan.is_qwen3(model):
        return
    if model.tied:
        raise no_setting(_ENGINE, "model.tied", True, "release 0.3 (--export torchtitan)")
    if model.attention_width != model.hidden:
        raise no_setting(_ENGINE, "model.head_dim", model.head_dim, "hidden / heads")


def package(setup: Setup) -> Package:
    policy = setup.policy
    titan.check_async_tp(_ENGINE, policy)
    if titan.is_qwen3(setup.model) and setup.layout.pp > 1:
        raise no_setting(_ENGINE, "layout.pp", setup.layout.pp, "pp = 1 for a Qwen, or release 0.3")
    options: dict[str, object] = {
        "model.name": "fourfold",
        "model.flavor": "model",
        "experimental.custom_import": "fourfold_model",
    }
    options |= {f"parallelism.{k}": v for k, v in titan.parallelism(setup).items()}
    if setup.layout.cp > 1:
        options["parallelism.context_parallel_rotate_method"] = "allgather"
    options |= {f"training.{name}": value for name, value in titan.training(setup).items()}
    kind, _, every = policy.recompute.partition("-")
    options["activation_checkpoint.mode"] = "selective" if every else kind
    if every or kind == "selective":  # with a number it recomputes each N-th layer whole
        options["activation_checkpoint.selective_ac_option"] = every or "op"
    if policy.precision == "fp8":
        options |= {"model.converters": _FP8, f"{_FP8}.filter_fqns": "output"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--compile.enable"] if policy.compile else []
    words += ["--parallelism.enable_async_tensor_parallel"] if policy.async_tp else []
    if policy.precision == "fp8" and policy.zero > 0:  # as in its published runs
        words += [f"--{_FP8}.enable_fsdp_float8_all_gather"]
        words += [f"--{_FP8}.precompute_float8_dynamic_scale_for_fsdp"]
    return Package(
        engine=_ENGINE,
        release=RELEASE,
        entry="-m torchtitan.train",
        env=setup.env,
        engine_args=tuple(words),
        files={
            "fourfold_model.py": (_qwen3 if titan.is_qwen3(setup.model) else _llama)(setup),
            "fourfold_random.py": _RANDOM,
        },
        python_path=True,
        own=f"{titan.OWN} (as arguments of run.sh)",
    )


def _module(setup: Setup, package: str, arguments: str, imports: str = "", more: str = "") -> str:
    """A module that registers the model: what its two kinds of model share, and `more`."""
    model = setup.model
    return f"""{MARK} torchtitan, for {RELEASE}
from dataclasses import replace

from torchtitan.models.{package} import {arguments}, get_train_spec
{imports}from torchtitan.protocols.train_spec import register_train_spec

MODEL = {arguments}(
    dim={model.hidden},
    n_layers={model.layers},
    n_heads={model.heads},
    n_kv_heads={model.kv_heads},
    vocab_size={model.vocab},
    norm_eps={model.norm_eps!r},
    rope_theta={model.positions.theta!r},
    max_seq_len={max(setup.batch.seq_len, model.positions.made_for or 0)},
{more})
SPEC = replace(get_train_spec(), model_args={{"model": MODEL}})
register_train_spec("fourfold", SPEC)
"""


# For benchmarks: its packages come without a dataset and a tokenizer.
_RANDOM = f'''{MARK} torchtitan, for {RELEASE}
"""Random tokens instead of a dataset and its tokenizer, to time steps:
--experimental.custom_import fourfold_random --model.name fourfold_random"""
from dataclasses import replace

import torch
from fourfold_model import MODEL, SPEC
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.protocols.train_spec import register_train_spec


class RandomTokens(BaseDataLoader):
    def __init__(self, dp_rank, job_config, **_):
        training = job_config.training
        self.shape = (training.local_batch_size, training.seq_len + 1)
        self.dice = torch.Generator().manual_seed(1 + dp_rank)

    def __iter__(self):
        while True:
            tokens = torch.randint(MODEL.vocab_size, self.shape, generator=self.dice)
            yield {{"input": tokens[:, :-1].contiguous()}}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {{}}

    def load_state_dict(self, state):
        pass


register_train_spec(
    "fourfold_random",
    replace(
        SPEC, build_tokenizer_fn=None, build_dataloader_fn=RandomTokens,
        build_validator_fn=None, state_dict_adapter=None,
    ),
)
'''


def _qwen3(setup: Setup) -> str:
    model = setup.model
    more = f"""    head_dim={model.head_size},
    hidden_dim={model.ffn},
    qk_norm=True,
    enable_weight_tying={model.tied},
"""
    return _module(setup, "qwen3", "Qwen3ModelArgs", more=more)


def _llama(setup: Setup) -> str:
    """Its MLP width is a rounded multiple: one multiple, as wide as asked."""
    model, scaling = setup.model, setup.model.positions.scaling
    usual = 2 * 4 * model.hidden // 3
    # A factor of 1 leaves the frequencies as they are.
    factors = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor,
               scaling.original_length) if scaling else (1.0, 1.0, 4.0, 8192)  # fmt: skip
    more = f"""    multiple_of={model.ffn},
    ffn_dim_multiplier={0.5 * model.ffn / usual!r},
    rope_scaling_args=RoPEScalingArgs(
        scaling_factor={factors[0]!r},
        low_freq_factor={factors[1]!r},
        high_freq_factor={factors[2]!r},
        original_max_position_embeddings={factors[3]!r},
    ),
"""
    scaled = "from torchtitan.models.llama3.model.args import RoPEScalingArgs\n"
    return _module(setup, "llama3", "TransformerModelArgs", scaled, more)
