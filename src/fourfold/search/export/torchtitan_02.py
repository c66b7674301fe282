"""torchtitan 0.2's --section.option flags, with the model in a module that it imports."""

from __future__ import annotations

from fourfold.search.export import titan
from fourfold.search.export.package import MARK, Package
from fourfold.search.export.setup import Setup, no_setting
from fourfold.spec.model import ModelShape

RELEASE = "torchtitan 0.2.2"
_ENGINE = "torchtitan-0.2"


def check(model: ModelShape) -> None:
    titan.check_llama(_ENGINE, model)
    if model.tied:
        raise no_setting(_ENGINE, "model.tied", True, "release 0.3 (--export torchtitan)")
    if model.attention_width != model.hidden:
        raise no_setting(_ENGINE, "model.head_dim", model.head_dim, "hidden / heads")


def package(setup: Setup) -> Package:
    check(setup.model)
    titan.check_titan(_ENGINE, setup)
    policy = setup.policy
    if setup.layout.tp > 1 and not policy.sequence_parallel:
        raise no_setting(_ENGINE, "policy.sequence_parallel", False, "sequence_parallel = true")
    options: dict[str, object] = {
        "model.name": "fourfold",
        "model.flavor": "model",
        "experimental.custom_import": "fourfold_model",
    }
    options |= {f"parallelism.{k}": v for k, v in titan.parallelism(_ENGINE, setup).items()}
    if setup.layout.cp > 1:
        options["parallelism.context_parallel_rotate_method"] = "allgather"
    options |= {f"training.{name}": value for name, value in titan.training(setup).items()}
    options |= _recompute(policy.recompute)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--compile.enable"] if policy.compile else []
    words += ["--parallelism.enable_async_tensor_parallel"] if policy.async_tp else []
    return Package(
        engine=_ENGINE,
        release=RELEASE,
        entry="-m torchtitan.train",
        env=titan.environment(setup),
        engine_args=tuple(words),
        files={"fourfold_model.py": _module(setup)},
        python_path=True,
        own=f"{titan.OWN} (as arguments of run.sh)",
    )


def _recompute(kind: str) -> dict[str, object]:
    """Its "selective" with a number recomputes each N-th layer whole."""
    if kind.startswith("every-"):
        every = kind.removeprefix("every-")
        return {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": every,
        }
    if kind == "selective":
        raise no_setting(_ENGINE, "policy.recompute", kind, "none, full or every-N")
    return {"activation_checkpoint.mode": kind}


def _module(setup: Setup) -> str:
    """Registers the model. Its MLP width is a rounded multiple: one multiple, as wide as asked."""
    model = setup.model
    usual = 2 * 4 * model.hidden // 3
    place, scaling = model.positions, model.positions.scaling
    # A factor of 1 leaves the frequencies as they are.
    factors = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor,
               scaling.original_length) if scaling else (1.0, 1.0, 4.0, 8192)  # fmt: skip
    return f"""{MARK} torchtitan, for {RELEASE}
from dataclasses import replace

from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols.train_spec import register_train_spec

MODEL = TransformerModelArgs(
    dim={model.hidden},
    n_layers={model.layers},
    n_heads={model.heads},
    n_kv_heads={model.kv_heads},
    vocab_size={model.vocab},
    multiple_of={model.ffn},
    ffn_dim_multiplier={0.5 * model.ffn / usual!r},
    norm_eps={model.norm_eps!r},
    rope_theta={place.theta!r},
    rope_scaling_args=RoPEScalingArgs(
        scaling_factor={factors[0]!r},
        low_freq_factor={factors[1]!r},
        high_freq_factor={factors[2]!r},
        original_max_position_embeddings={factors[3]!r},
    ),
    max_seq_len={max(setup.batch.seq_len, place.length or 0)},
)
register_train_spec("fourfold", replace(get_train_spec(), model_args={{"model": MODEL}}))
"""
