"""flops: what a speed is worth by every FLOP convention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery, convention, utilisation_pct
from fourfold.cost.count.params import active_params, model_params
from fourfold.errors import UserError
from fourfold.flag import flag
from fourfold.spec import Batch, catalog, check, codec
from fourfold.spec.run import RunSpec, run_of
from fourfold.spec.supported import windowed
from fourfold.units import number_from
from fourfold.verbs import Answer


@dataclass(frozen=True, slots=True)
class Utilisation:
    """By one convention; None where no speed, or no GPU, is known."""

    flops_per_token: float
    tflops_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None


def utilisation(
    spec: RunSpec, rule: str | None, tokens_s_gpu: float | None, peak: float | None
) -> dict[str, Utilisation]:
    """By every convention, or by `rule`."""
    ask = FlopsQuery.of_spec(spec)
    counted = {}
    for one in (convention(rule),) if rule else CONVENTIONS.values():
        count, speed = one.count(ask), tokens_s_gpu
        shares = (None, None)
        if speed is not None and peak is not None:
            shares = tuple(utilisation_pct(n, speed, peak) for n in (count.model, count.hardware))
        tflops = None if speed is None else count.printed * speed / 1e12
        counted[one.id] = Utilisation(count.printed, tflops, *shares)
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsRequest:
    """A measured speed, and the GPU it is a share of. `convention` None: all of them."""

    gpu: str | None = flag("GPU for MFU and HFU, such as h100-80gb", "ID")
    convention: str | None = flag("only this convention (default: all)", "ID")
    tokens_per_s: Annotated[float, number_from] | None = flag(
        "tokens/s over all GPUs: 85144 or 3.2M", "X", either="speed"
    )
    step_s: float | None = flag("seconds per step, with --global-batch", "X", either="speed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops(Answer):
    """FLOPs per token and, of a measured speed, TFLOP/s; with a GPU MFU and HFU."""

    model: str
    params: int
    active_params: int | None
    seq_len: int
    gpus: int
    precision: str
    recompute: str
    window: int | None
    gpu: str | None
    peak_flops: float | None
    tokens_per_s: float | None
    conventions: dict[str, Utilisation]

    def rows(self) -> list[dict[str, Any]]:
        counted = self.conventions.items()
        return [{"convention": name, **codec.encode(row)} for name, row in counted]


def flops(run: Mapping[str, Any], request: FlopsRequest | None = None) -> Flops:
    request = request or FlopsRequest()
    spec = run_of(run)
    given = run.get("batch", {})
    check.given("seq_len" in given, "seq-len")
    model, batch, policy = spec.model, spec.batch, spec.policy
    speed = _tokens_per_s(batch, request, batch_given="global_batch" in given)
    device = catalog.device(request.gpu) if request.gpu is not None else None
    peak = device.peak(policy.precision) if device else None
    speed_gpu = None if speed is None else speed / spec.gpus
    return Flops(
        model=model.name,
        params=model_params(model, batch.seq_len),
        active_params=active_params(model, batch.seq_len).all if model.moe else None,
        seq_len=batch.seq_len,
        gpus=spec.gpus,
        precision=policy.precision,
        recompute=policy.recompute,
        window=model.window if windowed(model, batch.seq_len) else None,
        gpu=device.id if device else None,
        peak_flops=peak,
        tokens_per_s=speed,
        conventions=utilisation(spec, request.convention, speed_gpu, peak),
    )


def _tokens_per_s(batch: Batch, request: FlopsRequest, *, batch_given: bool) -> float | None:
    field, value, speed = "tokens-per-s", request.tokens_per_s, request.tokens_per_s
    if request.step_s is not None:
        field, value = "step-s", request.step_s
        check.that(0 < value < 1e12, field, value, "must be above 0")
        hint = "a step has that many sequences"
        check.given(batch_given, "global-batch", hint)
        speed = batch.tokens / value
    if speed is not None and not 0 < speed < 1e18:
        raise UserError("must be a speed above 0 and below 1e18 tokens/s", field=field, value=value)
    return speed
