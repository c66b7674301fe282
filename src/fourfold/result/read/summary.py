"""What does a stored run say on one line? Facts from its file, read without building every type.

Ten thousand runs are listed in seconds this way. Seconds are of the steps after warm-up, bytes of
the fullest rank; ratios such as MFU are computed by whoever shows them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError
from fourfold.result.read.timing import timing
from fourfold.result.report import OUTCOMES, RunReport
from fourfold.spec import codec
from fourfold.spec.expression import in_gib

# 'fourfold.engine.process.failure.MemoryLimitError: ...' says no more than its last word.
_MODULE = re.compile(r"^(\w+\.)+(?=\w+: )")
# Counted from 0; runs that end earlier give their last loss.
LOSS_STEP = 4
NO_LOSS: tuple[int | None, float | None] = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`model_json` is the whole shape as sorted JSON: equal texts are equal models."""

    run_id: str
    repeat: int
    device: str
    torch: str
    host: str
    outcome: str
    model: str
    model_json: str
    layers: int
    hidden: int
    heads: int
    gpus: int
    nodes: int
    pp: int
    dp: int
    replicate: int
    cp: int
    tp: int
    order: str
    virtual_stages: int
    seq_len: int
    micro_batch: int
    global_batch: int
    precision: str
    sharding: str
    recompute: str
    offload: str
    cp_kind: str
    schedule: str
    sequence_parallel: bool
    compiled: bool
    attention: str
    env: tuple[tuple[str, str], ...]
    tag: str
    note: str
    started_at: str
    step_s: float | None
    low_s: float | None
    high_s: float | None
    samples: int
    start_s: float
    loss: float | None
    loss_step: int | None
    peak_bytes: int | None
    peak_rank: int | None
    peak_stage: int | None
    retries: int
    failure: str
    predicted_s: float | None = None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    predicted_bytes: float | None = None
    predicted_limit_bytes: float | None = None
    predicted_by: str = ""

    @property
    def tokens(self) -> int:
        return self.seq_len * self.global_batch

    @property
    def tokens_s_gpu(self) -> float | None:
        return self.tokens / self.step_s / self.gpus if self.step_s else None

    @property
    def layout(self) -> str:
        dp = f"{self.replicate}x{self.dp // self.replicate}" if self.replicate > 1 else f"{self.dp}"
        sizes = {"pp": str(self.pp), "dp": dp, "cp": str(self.cp), "tp": str(self.tp)}
        return " ".join(f"{axis}{sizes[axis]}" for axis in self.order.split())

    def values(self) -> dict[str, float | None]:
        """What a `where` condition may ask (spec/expression.py)."""
        names = (
            "dp", "tp", "cp", "pp", "micro_batch", "global_batch", "seq_len", "gpus", "nodes",
            "layers", "hidden", "heads", "step_s",
        )  # fmt: skip
        found: dict[str, float | None] = {name: getattr(self, name) for name in names}
        found["vp"] = self.virtual_stages
        found |= in_gib(self.peak_bytes)
        return found


def of_report(report: RunReport) -> Summary:
    return summarise(codec.dump(report), report.spec.run_id)


def summarise(plain: Any, run_id: str) -> Summary:
    """From the plain data of a stored RunReport."""
    try:
        return checked(_summary(plain, run_id))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"is not a stored run ({type(error).__name__}: {error})") from None


_KINDS = {field.name: str(field.type) for field in dataclasses.fields(Summary)}
# Divided by, or counted with.
_FROM_ONE = {"gpus", "nodes", "pp", "dp", "replicate", "cp", "tp", "layers", "hidden", "heads",
             "seq_len", "global_batch", "virtual_stages"}  # fmt: skip
_SIGNED = {"loss", "peak_rank"}


def checked(summary: Summary) -> Summary:
    """The summary, whose every value is of the kind that its readers count on."""
    for name, kind in _KINDS.items():
        value = getattr(summary, name)
        if not _is(kind, value) or (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and name not in _SIGNED
            and value < (name in _FROM_ONE)
        ):
            raise UserError("is not what a stored run has there", field=name, value=value)
    if summary.outcome not in OUTCOMES:
        raise UserError("is no outcome", field="outcome", value=summary.outcome)
    if sorted(summary.order.split()) != ["cp", "dp", "pp", "tp"]:
        raise UserError("is no order of the axes", field="order", value=summary.order)
    return summary


def _is(kind: str, value: object) -> bool:
    if value is None:
        return kind.endswith(" | None")
    match kind.removesuffix(" | None"):
        case "str":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "int":
            return type(value) is int and abs(value) <= codec.MAX_INT
        case "float":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return number and abs(value) <= 1e300
        case _:  # env
            return isinstance(value, tuple) and all(map(_is_pair, value))


def _is_pair(value: object) -> bool:
    is_tuple = isinstance(value, tuple) and len(value) == 2
    return is_tuple and all(isinstance(text, str) for text in value)


def _summary(plain: dict[str, Any], run_id: str) -> Summary:
    spec = plain["spec"]
    model, layout, batch, policy = spec["model"], spec["layout"], spec["batch"], spec["policy"]
    environment = plain.get("environment", {})
    replicate, shard = _dp(layout["dp"])
    steps = plain.get("steps", [])
    timed = timing([step["seconds"] for step in steps if not step.get("warmup", False)])
    losses = [(i, step["loss"]) for i, step in enumerate(steps) if step.get("loss") is not None]
    # The same step in every run, whatever their number of steps: weights and data are then alike.
    last = losses[-1] if losses else NO_LOSS
    loss_step, loss = next((one for one in losses if one[0] >= LOSS_STEP), last)
    fullest = max(plain.get("memory", []), key=lambda rank: rank["peak_bytes"], default=None)
    known = fullest is not None and fullest["peak_bytes"] > 0
    hosts = {rank.get("host", "") for rank in plain.get("ranks", [])}
    failure = plain.get("failure")
    return Summary(
        run_id=run_id,
        repeat=plain.get("repeat", 0),
        device=environment.get("device", ""),
        torch=environment.get("torch", ""),
        host=environment.get("host", ""),
        outcome=plain["outcome"],
        model=model.get("name", "custom"),
        model_json=json.dumps(model, sort_keys=True),
        layers=model["layers"],
        hidden=model["hidden"],
        heads=model["heads"],
        gpus=spec["gpus"],
        nodes=max(1, len(hosts)),
        pp=layout["pp"],
        dp=replicate * shard,
        replicate=replicate,
        cp=layout["cp"],
        tp=layout["tp"],
        order=layout.get("order", "pp dp cp tp"),
        virtual_stages=policy.get("virtual_stages", 1),
        seq_len=batch["seq_len"],
        micro_batch=batch["micro_batch"],
        global_batch=batch["global_batch"],
        precision=policy["precision"],
        sharding=policy["sharding"],
        recompute=policy["recompute"],
        offload=policy.get("offload", "none"),
        cp_kind=policy.get("cp_kind", "ring"),
        schedule=policy.get("schedule", "1f1b"),
        sequence_parallel=bool(policy.get("sequence_parallel", True)),
        compiled=bool(policy.get("compile", False)),
        attention=str(policy.get("attention", "")),
        env=tuple(sorted(policy.get("env", {}).items())),
        tag=spec.get("tag", ""),
        note=spec.get("note", ""),
        started_at=plain.get("started_at", ""),
        step_s=timed.step_s if timed and plain["outcome"] == "ok" else None,
        low_s=timed.low_s if timed and plain["outcome"] == "ok" else None,
        high_s=timed.high_s if timed and plain["outcome"] == "ok" else None,
        samples=timed.samples if timed else 0,
        start_s=plain.get("start_s", 0.0),
        loss=loss,
        loss_step=loss_step,
        peak_bytes=fullest["peak_bytes"] if known else None,
        peak_rank=fullest["rank"] if known else None,
        peak_stage=fullest["stage"] if known else None,
        retries=sum(rank.get("retries", 0) for rank in plain.get("memory", [])),
        failure=_failure(failure) if failure else "",
        **_predicted(plain.get("predicted")),
    )


def _predicted(said: dict[str, Any] | None) -> dict[str, Any]:
    if said is None:
        return {}
    return {
        "predicted_s": said["step_s"],
        "predicted_low_s": said["step_s_low"],
        "predicted_high_s": said["step_s_high"],
        "predicted_bytes": said["peak_bytes"],
        "predicted_limit_bytes": said.get("limit_bytes") or None,
        "predicted_by": said.get("basis", ""),
    }


def _dp(value: int | str) -> tuple[int, int]:
    if isinstance(value, int):
        return 1, value
    replicate, _, shard = value.partition("x")
    return int(replicate), int(shard)


def _failure(failure: dict[str, Any]) -> str:
    lines = str(failure.get("message", "")).strip().split("\n")
    # Of a traceback the last line says what happened; of words the first one does.
    is_trace = any(line.lstrip().startswith(("Traceback", "File ")) for line in lines)
    first = _MODULE.sub("", (lines[-1] if is_trace else lines[0]).strip())[:160]
    where = f"rank {failure['rank']}" if failure.get("rank", -1) >= 0 else ""
    parts = [part for part in (where, failure.get("phase", ""), first) if part]
    return ", ".join(parts)
