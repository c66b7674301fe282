"""A stored run in short: what lists, tables and pages say of it, without its steps and ranks."""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from fourfold.errors import UserError
from fourfold.escape import flattened
from fourfold.result.report import Failure, Outcome, Prediction, RankMemory, RunReport
from fourfold.result.timing import Timing, timing
from fourfold.spec import ModelShape, RunSpec, check, codec
from fourfold.spec.expression import memory_values
from fourfold.spec.layout import AXES

# A value of a run's row; the environment variables are a table.
Cell = str | int | float | bool | Mapping[str, str] | None
NO_SEQUENCE_PARALLEL = "no sequence parallel"

# 'fourfold.engine.process.health.MemoryLimitError: ...' says no more than its last word.
_MODULE = re.compile(r"^(\w+\.)+(?=\w+: )")
# Counted from 0; runs that end earlier give their last loss.
LOSS_STEP = 4
# The largest number that a stored run may hold: its readers divide by it and draw it.
_MOST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run with what was measured of it. `model`: the model's name, which `named_apart` tells from
    others. `engine`: '' is ours. `timing`: of the steps after warm-up, however the run ended.
    `memory`: of the fullest rank. `retries`: of the allocators of all ranks."""

    run_id: str
    spec: RunSpec
    outcome: Outcome
    model: str = ""
    repeat: int = 0
    device: str = ""
    torch: str = ""
    host: str = ""
    engine: str = ""
    nodes: int = 1
    timing: Timing | None = None
    start_s: float = 0.0
    loss: float | None = None
    loss_step: int | None = None
    memory: RankMemory | None = None
    retries: int = 0
    failure: str = ""
    predicted: Prediction | None = None
    started_at: str = ""

    @classmethod
    def from_plain(cls, data: object, path: str = "") -> StoredRun:
        """Return the run that `codec.encode` wrote: its model is a table, never a name."""
        spec = data.get("spec") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(spec, dict):
            raise UserError("must be a table with a spec", field=path, value=data)
        model = _model_of(json.dumps(spec.get("model")))
        spec = codec.decode_fields(RunSpec, spec | {"model": model}, "spec")
        return codec.decode_fields(cls, data | {"spec": spec}, path)

    @classmethod
    def of(cls, report: RunReport, run_id: str = "") -> StoredRun:
        """`run_id`: where it is known; working it out takes as long as all else."""
        spec, environment = report.spec, dict(report.environment)
        losses = [(i, step.loss) for i, step in enumerate(report.steps) if step.loss is not None]
        # The same step in every run, whatever their number of steps: weights and data are then
        # alike.
        at, loss = next(
            (pair for pair in losses if pair[0] >= LOSS_STEP), (losses or [(None, None)])[-1]
        )
        fullest = max(report.memory, key=lambda rank: rank.peak_bytes, default=None)
        return cls(
            run_id=run_id or spec.run_id,
            spec=spec,
            outcome=report.outcome,
            model=spec.model.name,
            repeat=report.repeat,
            device=environment.get("device", ""),
            torch=environment.get("torch", ""),
            host=environment.get("host", ""),
            engine=environment.get("engine", ""),
            nodes=max(1, len({rank.host for rank in report.ranks})),
            timing=timing([step.seconds for step in report.steps if not step.warmup]),
            start_s=report.start_s,
            loss=loss,
            loss_step=at,
            memory=fullest if fullest and fullest.peak_bytes > 0 else None,
            retries=sum(rank.retries for rank in report.memory),
            failure=_failure(report.failure) if report.failure else "",
            predicted=report.predicted,
            started_at=report.started_at,
        ).checked()

    def checked(self) -> StoredRun:
        """Return the run; its readers divide by its numbers and draw them."""
        measured = {
            "repeat": self.repeat,
            "start_s": self.start_s,
            "retries": self.retries,
            **(codec.encode(self.timing) if self.timing else {}),
            **(codec.encode(self.memory) if self.memory else {}),
        }
        measured.pop("rank", None)  # -1 where nobody knows which
        if self.predicted:
            measured |= {
                name: getattr(self.predicted, name)
                for name in ("step_s", "step_s_low", "step_s_high", "peak_bytes", "limit_bytes")
            }
        for name, value in measured.items():
            check.that(0 <= value <= _MOST, name, value, "is not what a stored run has there")
        check.that(1 <= self.nodes <= _MOST, "nodes", self.nodes, "must be at least 1")
        return self

    @property
    def step(self) -> Timing | None:
        """The timing of a run that went well."""
        return self.timing if self.outcome == "ok" else None

    @property
    def step_s(self) -> float | None:
        return self.step.step_s if self.step else None

    @property
    def tokens_s_gpu(self) -> float | None:
        return self.spec.batch.tokens / self.step_s / self.spec.gpus if self.step_s else None

    @property
    def peak_bytes(self) -> int | None:
        return self.memory.peak_bytes if self.memory else None

    @property
    def settings(self) -> str:
        """Whatever is not as usual and no column says ('loss_chunks=4 optimizer=...'): a field that
        a run or its policy gets later is told apart by itself."""
        spec = self.spec
        plain = codec.encode(spec.policy, sparse=True)
        policy = {name: plain[name] for name in sorted(plain.keys() - _LISTED)}
        if spec.policy.precision_name != spec.policy.precision:
            del policy["compute_dtype"]  # the name says it
        rest = {n: getattr(spec, n) for n, usual in _REST.items() if getattr(spec, n) != usual}
        words = flattened(policy | codec.encode(rest, sparse=True))
        return " ".join(f"{name}={_text(value)}" for name, value in words.items())

    @property
    def unlisted(self) -> str:
        """Settings that make another configuration, though few tables have a column for them. What
        has no effect on these axes is left out."""
        layout, policy = self.spec.layout, self.spec.policy
        order = " ".join(layout.order)
        words = [
            policy.cp_kind if layout.cp > 1 and policy.cp_kind != "ring" else "",
            policy.schedule if layout.pp > 1 and policy.schedule != "1f1b" else "",
            "compiled" if policy.compile else "",
            "" if policy.attention == "auto" else f"attention={policy.attention}",
            "" if policy.offload == "none" else f"offload={policy.offload}",
            "" if policy.sequence_parallel or layout.tp == 1 else NO_SEQUENCE_PARALLEL,
            f"copies {layout.replicate}" if layout.replicate > 1 else "",
            "" if self.spec.gpus == 1 or layout.order == AXES else f"order {order}",
            self.settings,
            *(f"{name}={value}" for name, value in sorted(policy.env)),
        ]
        return " ".join(filter(None, words))

    def values(self) -> dict[str, float | None]:
        """What a `where` condition may ask (spec/expression.py)."""
        spec = self.spec
        sizes = {**spec.layout.sizes, "gpus": spec.gpus, "nodes": self.nodes}
        batch = {
            name: getattr(spec.batch, name) for name in ("seq_len", "micro_batch", "global_batch")
        }
        model = {name: getattr(spec.model, name) for name in ("layers", "hidden", "heads")}
        rest = {"step_s": self.step_s, "vp": spec.policy.virtual_stages}
        return {**sizes, **batch, **model, **rest, **memory_values(self.peak_bytes)}

    def row(self) -> dict[str, Cell]:
        """Every column of a list of runs, in order."""
        spec, predicted, memory = self.spec, self.predicted, self.memory
        model, layout, batch, policy = spec.model, spec.layout, spec.batch, spec.policy
        return {
            "run_id": self.run_id,
            "repeat": self.repeat,
            "device": self.device,
            "torch": self.torch,
            "host": self.host,
            "stack": self.engine,
            "outcome": self.outcome,
            "model": self.model,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "gpus": spec.gpus,
            "nodes": self.nodes,
            "pp": layout.pp,
            "dp": layout.dp,
            "replicate": layout.replicate,
            "cp": layout.cp,
            "tp": layout.tp,
            "ep": layout.ep,
            "etp": layout.etp,
            "experts": model.experts or None,
            "order": " ".join(layout.order),
            "virtual_stages": policy.virtual_stages,
            "seq_len": batch.seq_len,
            "micro_batch": batch.micro_batch,
            "global_batch": batch.global_batch,
            "precision": policy.precision_name,
            "sharding": policy.sharding,
            "recompute": policy.recompute,
            "offload": policy.offload,
            "cp_kind": policy.cp_kind,
            "schedule": policy.schedule,
            "sequence_parallel": policy.sequence_parallel,
            "compiled": policy.compile,
            "attention": policy.attention,
            "settings": self.settings,
            "env": dict(sorted(policy.env)),
            "tag": spec.tag,
            "note": spec.note,
            "started_at": self.started_at,
            "step_s": self.step_s,
            "low_s": self.step.low_s if self.step else None,
            "high_s": self.step.high_s if self.step else None,
            "samples": self.timing.samples if self.timing else 0,
            "start_s": self.start_s,
            "loss": self.loss,
            "loss_step": self.loss_step,
            "peak_bytes": self.peak_bytes,
            "peak_rank": memory.rank if memory else None,
            "peak_stage": memory.stage if memory else None,
            "retries": self.retries,
            "failure": self.failure,
            "predicted_s": predicted.step_s if predicted else None,
            "predicted_low_s": predicted.step_s_low if predicted else None,
            "predicted_high_s": predicted.step_s_high if predicted else None,
            "predicted_bytes": predicted.peak_bytes if predicted else None,
            "predicted_limit_bytes": (predicted.limit_bytes or None) if predicted else None,
            "predicted_by": predicted.basis if predicted else "",
            "tokens_s_gpu": self.tokens_s_gpu,
            "layout": str(layout),
        }


@functools.lru_cache(maxsize=4096)
def _model_of(text: str) -> ModelShape:
    """Return the model of a JSON text; a store has many runs of few models."""
    return codec.decode(ModelShape, json.loads(text), "spec.model")


# Fields of a policy that are columns of a row; those of a run that are, or in which repeats of one
# configuration may differ.
_LISTED = {
    "precision",
    "sharding",
    "sequence_parallel",
    "cp_kind",
    "schedule",
    "virtual_stages",
    "recompute",
    "attention",
    "offload",
    "env",
    "compile",
}
_ROW = {"model", "gpus", "layout", "batch", "policy", "note", "tag"}
_OF_A_REPEAT = {
    "device",
    "steps",
    "warmup",
    "settle",
    "seed",
    "start_limit_s",
    "step_limit_s",
    "refused",
}
_REST = {one.name: one.default for one in fields(RunSpec) if one.name not in _ROW | _OF_A_REPEAT}


def named_apart(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Models that share a name and differ say in what, as presets with other sizes do:
    'mine layers=4'."""
    by_name: dict[str, dict[ModelShape, None]] = defaultdict(dict)
    for run in runs:
        by_name[run.model][run.spec.model] = None
    words: dict[ModelShape, str] = {}
    for models in by_name.values():
        flat = {model: flattened(codec.encode(model, sparse=True)) for model in models}
        names = dict.fromkeys(name for sizes in flat.values() for name in sizes)
        differ = [n for n in names if len({str(sizes.get(n)) for sizes in flat.values()}) > 1]
        for model, sizes in flat.items():
            words[model] = "".join(f" {n}={_text(sizes[n])}" for n in differ if n in sizes)
    return [replace(run, model=run.model + words[run.spec.model]) for run in runs]


def short_name(run_id: str, repeat: int, repeated: Container[str]) -> str:
    """The start of a run's id; with its number where it was run again, since an id alone names all
    its repeats."""
    return run_id[:8] + (f"#{repeat}" if run_id in repeated else "")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _failure(failure: Failure) -> str:
    first = _MODULE.sub("", failure.said)[:160]
    where = f"rank {failure.rank}" if failure.rank >= 0 else ""
    return ", ".join(part for part in (where, failure.phase, first) if part)
