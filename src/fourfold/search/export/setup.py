"""What must an engine be told? Model, layout, batch, policy, and how hosts divide the ranks."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

from fourfold.cost.stacks import StackDefaults, stack_defaults
from fourfold.errors import UserError
from fourfold.spec.batch import Batch
from fourfold.spec.layout import AXES, Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy

# Fields of a model that every writer looks at; another one must have its default to be exported.
KNOWN_OF_MODEL = {
    "family", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "positions", "norm",
    "activation", "bias", "tied", "embedding_norm", "head_dim", "experts", "top_k", "norm_eps",
    "name", "qkv_bias", "out_bias", "mlp_bias", "qk_norm",
}  # fmt: skip
# Fields of a policy that only our own engine has.
OWN_OF_POLICY = (
    "param_dtype", "compute_dtype", "grad_dtype", "optimizer_dtype", "optimizer", "prefetch",
    "loss_chunks", "offload", "fused_projections",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run in fourfold's words. `model_name` is the name or path the user gave; `stack` says
    whose habits the predicted seconds assume; `notes` are sentences about this choice that belong
    into the files."""

    model: ModelShape
    layout: Layout
    batch: Batch
    policy: Policy
    host_gpus: int
    stack: str
    device: str = ""
    model_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        return -(-self.layout.world // self.host_gpus)

    @property
    def per_host(self) -> int:
        return min(self.host_gpus, self.layout.world)

    @property
    def defaults(self) -> StackDefaults:
        return stack_defaults(self.stack)

    @property
    def micro_batches(self) -> int:
        return self.batch.global_batch // (self.layout.dp * self.batch.micro_batch)

    @property
    def overlaps_tp(self) -> bool:
        """Whether the seconds assume tensor-parallel traffic under its matrix products."""
        policy = self.policy
        usual = self.defaults.overlap_tp and policy.sequence_parallel
        return self.layout.tp > 1 and (policy.async_tp or usual)


def no_setting(engine: str, field: str, value: object, hint: str) -> UserError:
    return UserError(f"is not supported by {engine}", field=field, value=value, hint=f"use {hint}")


# What an engine must find in a model that it knows only as a Llama.
LLAMA_SHAPE: dict[str, tuple[object, ...]] = {
    "family": ("llama",),
    "activation": ("swiglu",),
    "norm": ("rmsnorm",),
    "bias": (False,),
    "embedding_norm": (False,),
    "qkv_bias": (None, False),
    "out_bias": (None, False),
    "mlp_bias": (None, False),
    "qk_norm": ("none",),
}


def check_model(engine: str, model: ModelShape, allowed: dict[str, tuple[object, ...]]) -> None:
    """Refuse what the engine cannot express: `allowed` maps fields to the values it has."""
    for name, values in allowed.items():
        if name == "partial":
            continue
        value = getattr(model, name)
        if value not in values:
            words = ", ".join(str(item) for item in values)
            raise no_setting(engine, f"model.{name}", value, words)
    if model.positions.partial != 1.0 and "partial" not in allowed:
        raise no_setting(engine, "model.positions.partial", model.positions.partial, "1")
    for field in fields(model):
        default = field.default if field.default is not MISSING else None
        value = getattr(model, field.name)
        if field.name not in KNOWN_OF_MODEL and value != default:
            raise no_setting(engine, f"model.{field.name}", value, f"{default}")


def check_policy(engine: str, setup: Setup) -> None:
    """The limits all other engines share."""
    if setup.layout.order != AXES:
        order = " ".join(setup.layout.order)
        raise no_setting(engine, "layout.order", order, "pp dp cp tp")
    plain = Policy()
    for name in OWN_OF_POLICY:
        value = getattr(setup.policy, name)
        if value != getattr(plain, name):
            raise no_setting(engine, f"policy.{name}", value, f"{name} = {getattr(plain, name)}")
    whole = setup.layout.dp * setup.batch.micro_batch
    if setup.batch.global_batch % whole:
        raise UserError(
            f"is not divisible by dp x micro_batch = {whole}, as {engine} requires",
            field="batch.global_batch",
            value=setup.batch.global_batch,
            hint=f"use a layout from --stack {engine}",
        )


def check_choice(engine: str, field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        words = ", ".join(str(item) for item in allowed)
        raise no_setting(engine, field, value, words)
