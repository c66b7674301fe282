"""The planner's answer as types, in base units; its JSON and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from fourfold.cost.memory.peak import SURE
from fourfold.escape import html_table
from fourfold.search.choice import RISK
from fourfold.spec import codec
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import chosen_layout, chosen_policy
from fourfold.units import counted

SHOWN_OF_POLICY = (
    "precision",
    "sharding",
    "sequence_parallel",
    "cp_kind",
    "schedule",
    "virtual_stages",
    "recompute",
    "attention",
)
TRAINING = ("training_s", "training_s_low", "training_s_high", "gpu_hours", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What names a candidate."""

    layout: Layout
    policy: Policy
    micro_batch: int

    @classmethod
    def at(cls, i: int, points: Mapping[str, Any], policy: Policy) -> Choice:
        """One of many points, whose columns say what they do not share."""
        return Choice(
            layout=chosen_layout(points, i),
            policy=chosen_policy(policy, points, i),
            micro_batch=int(points["micro_batch"][i]),
        )

    def __str__(self) -> str:
        """`pp8 dp4 cp2 tp8 ulysses v4`: the layout and the kinds that go with it."""
        parts = [str(self.layout)]
        if self.layout.cp > 1:
            parts.append(self.policy.cp_kind)
        if self.policy.virtual_stages > 1:
            parts.append(f"v{self.policy.virtual_stages}")
        if self.policy.schedule in ("gpipe", "zero-bubble") and self.layout.pp > 1:
            parts.append(self.policy.schedule)
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow(Choice):
    """One ranked layout. `exposed_s` are seconds by part that nothing hides; `fit_chance` is of its
    memory; `note`: why it stands lower than its seconds say, and what is unusual about it; `tied`:
    it ties for the first place; `exported`: --export writes it for the engine whose seconds these
    are; `runs_in`: engines that we write settings for and that can run it; `wide`: why its interval
    is wide, '' where it is not; `provenance`: what its seconds rest on
    (cost/fit/calibration.py)."""

    rank: int
    step_s: float
    step_s_low: float
    step_s_high: float
    closed_form_s: float
    parts_s: dict[str, float]
    exposed_s: dict[str, float]
    peak_bytes: float
    peak_bytes_low: float
    peak_bytes_high: float
    fit_chance: float
    note: str
    tied: bool
    exported: bool
    runs_in: tuple[str, ...]
    measured_s: float | None  # of the user's own run of it
    wide: str
    memory_bytes: dict[str, float]
    tokens_s_gpu: float
    tflops_gpu: float
    mfu_pct: float
    power_w: float  # of one GPU, mean over a step
    joule_per_token: float
    gpu_hours: float
    gpu_hours_of: str
    ramp_s: float | None
    cost: float | None
    evidence: dict[str, int]
    outside: tuple[str, ...]
    provenance: str
    training_s: float | None = None  # with the time beside the steps
    training_s_low: float | None = None
    training_s_high: float | None = None

    @property
    def surely_fits(self) -> bool:
        return self.fit_chance >= SURE

    def flat(self) -> dict[str, Any]:
        numbers = (
            "step_s",
            "step_s_low",
            "step_s_high",
            "peak_bytes",
            "peak_bytes_low",
            "peak_bytes_high",
            "fit_chance",
            "tokens_s_gpu",
            "tflops_gpu",
            "mfu_pct",
            "power_w",
            "joule_per_token",
        )
        return {
            "layout": str(self),
            "micro_batch": self.micro_batch,
            **self.layout.sizes,
            "dp_replicate": self.layout.replicate,
            "dp_shard": self.layout.shard,
            **plain(self.policy),
            **{name: getattr(self, name) for name in numbers},
            **{f"{name}_s": seconds for name, seconds in self.exposed_s.items()},
            **{name: getattr(self, name) for name in TRAINING},
            "provenance": self.provenance,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout beside the first choice: faster but not likely to fit or not `exported`, over the
    memory by the best estimate, or never measured."""

    layout: Layout
    cp_kind: str
    sharding: str
    recompute: str
    virtual_stages: int
    micro_batch: int
    step_s: float
    fit_chance: float | None = None
    exported: bool | None = None
    peak_bytes: float | None = None
    without_rows: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reversal:
    """Moving an uncertain coefficient from `value` to `other` makes the layout at place `winner`
    the fastest; `gain`: the first over it there, above 1."""

    knob: str  # the name that answers have for a coefficient
    about: str
    value: float
    other: float
    winner: int
    layout: Layout
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFacts:
    name: str
    rows: int
    memory_rows: int
    error_median_pct: float | None
    error_p90_pct: float | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBest:
    """What one engine would do: its first choice, or the `reason` why there is none. `held_back`:
    why the plan is not for it although it is faster; '' where it is not."""

    engine: str  # as --stack and --export have it
    stack: str = ""  # whose measured runs its seconds come from
    row: PlanRow | None = None
    reason: str = ""
    held_back: str = ""

    @property
    def choice(self) -> EngineChoice:
        """What engines are compared by; a plan with --stack has all of one."""
        row = self.row
        own: dict[str, Any] = {"engine": self.engine, "stack": self.stack, "reason": self.reason}
        if row is None:
            return EngineChoice(**own)
        own |= {"layout": str(row), "sharding": row.policy.sharding}
        own |= {"recompute": row.policy.recompute, "held_back": self.held_back}
        names = {field.name for field in fields(EngineChoice)} - {*own}
        return EngineChoice(**own, **{name: getattr(row, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine's first choice in few fields, as JSON has it; without one there is a `reason`."""

    engine: str
    stack: str
    layout: str | None = None
    micro_batch: int | None = None
    sharding: str | None = None
    recompute: str | None = None
    step_s: float | None = None
    step_s_low: float | None = None
    step_s_high: float | None = None
    peak_bytes: float | None = None
    fit_chance: float | None = None
    tokens_s_gpu: float | None = None
    mfu_pct: float | None = None
    provenance: str | None = None
    held_back: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBest:
    """The best measured run of the same model and sequence; 0 s where `source` has none."""

    source: str
    row: str = ""
    name: str = ""
    micro_batch: int = 0
    sharding: str = ""
    gpus: int = 0
    step_s: float = 0.0
    tokens_s_gpu: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RounderBatch:
    """A batch near the asked one, which more GPUs divide, at its own fastest layout."""

    global_batch: int
    layout: str
    step_s: float
    tokens_s_gpu: float
    faster_pct: float  # tokens per second, against the first choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """An expert takes at most `factor` times its even share (0: no limit). `dropped` is the share
    of tokens beyond that; `overflows` the chance that a rank of a layer exceeds as much in a step,
    where steps with too many tokens run again instead: `again_s` on average."""

    factor: float
    step_s: float
    peak_bytes: float
    dropped: float
    overflows: float
    again_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Of the first choice. `imbalance`: standard deviation over mean of the experts' tokens, which
    nobody knows better than by a factor; `fullest`: the fullest rank against the mean. Bytes are
    that rank's."""

    imbalance: float
    fullest: float
    forced_s: float
    forced_range_s: tuple[float, float]
    forced_bytes: float
    natural_s: float
    natural_range_s: tuple[float, float]
    natural_bytes: float
    rows_per_expert: float
    remarks: tuple[str, ...]
    capacities: tuple[Capacity, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unassumed:
    """Seconds of the first choice without one thing that it assumes: `what` is graphs, overlap, or
    the dispatcher that it has then; `best_layout` is what would come first then, in `best_s`."""

    what: str
    step_s: float
    best_layout: str = ""
    best_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """How tokens of the first choice reach experts: `graphs` is what is captured as CUDA graphs,
    `overlap` under what the exchange hides ('': neither); `text` says all of it."""

    dispatcher: str
    graphs: str
    overlap: str
    without: tuple[Unassumed, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The ranking, the first choice first, and what makes it believable; base units. `risk`: of not
    fitting, that the first choice may have; `faster`: the fastest where the first is not it, maybe
    another way to run a listed layout; `bf16_gradients`: the first choice with sums of gradients in
    bf16; `engines`: the best of each engine, the fastest first, where none was asked for."""

    model: str
    params: int
    remarks: tuple[str, ...]
    cluster: str
    gpu: str
    gpus: int
    host_gpus: int
    memory_bytes: float
    seq_len: int
    global_batch: int
    stack: str
    precision: str
    calibration: CalibrationFacts
    candidates: int
    legal: int
    too_slow: int  # of these, by a bound: whether they fit was not asked
    fitting: int
    dropped_by_where: int
    set_aside: int
    ranked_in_all: int
    played: int
    axes: dict[str, list[Any]]
    refused: dict[str, int]
    flop_rule: str
    ranked: tuple[PlanRow, ...]
    flips: tuple[Reversal, ...]
    deciding: tuple[Choice, ...]
    faster: Alternative | None
    unproven_best: Alternative | None
    near_miss: Alternative | None
    training: dict[str, Any]
    reason: str
    risk: float = RISK
    tied: int = 0
    like: str = ""  # the measured cluster that it is priced as
    bf16_gradients: Alternative | None = None
    assumes: Assumed | None = None  # of models with experts
    routed: Routed | None = None  # likewise
    engines: tuple[EngineBest, ...] = ()
    measured: MeasuredBest | None = None  # where the request names runs to compare with
    tried_gpus: tuple[dict[str, Any], ...] = ()
    rounder_batch: RounderBatch | None = None  # where it is clearly faster

    @property
    def best(self) -> PlanRow | None:
        return self.ranked[0] if self.ranked else None

    @property
    def step_times(self) -> str:
        """Whose step times they are: 'step times (near) for ENGINE on CLUSTER (...)'; and
        the format of Muon's iterations."""
        return self._times_of_stack + self._optimizer

    @property
    def _optimizer(self) -> str:
        if self.best is None or self.best.policy.optimizer != "muon":
            return ""
        return f"; {self.best.policy.optimizer_name}"

    @property
    def _times_of_stack(self) -> str:
        known = self.calibration
        stack = "a typical engine" if self.stack == "generic" else self.stack
        times = f"step times ({self.best.provenance})" if self.best else "step times"
        if known.note:
            return f"{times} for {stack}: {known.note}"
        p90 = f", 9 in 10 within {known.error_p90_pct:.1f}%" if known.error_p90_pct else ""
        runs = f"(calibration '{known.name}', {counted(known.rows, 'measured run')}{p90})"
        return f"{times} for {stack} on {self.cluster} {runs}"

    def plain(self) -> dict[str, Any]:
        absent = {
            name for name in ("routed", "assumes", "rounder_batch") if getattr(self, name) is None
        }
        return {name: value for name, value in plain(self).items() if name not in absent}

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict for each ranked layout, a key for every axis, field and number."""
        names = ("model", "cluster", "gpu", "stack", "gpus", "seq_len", "global_batch")
        shared = {name: getattr(self, name) for name in names}
        return [{"rank": row.rank, **shared, **row.flat()} for row in self.ranked]

    def _repr_html_(self) -> str:
        named = [
            {"layout": str(row), "micro_batch": row.micro_batch, "sharding": row.policy.sharding}
            | {"recompute": row.policy.recompute, "step_s": row.step_s}
            | {"peak_gib": row.peak_bytes / 2**30, "fit_chance": row.fit_chance}
            | {"tflops_gpu": row.tflops_gpu, "mfu_pct": row.mfu_pct, "cost": row.cost}
            for row in self.ranked
        ]
        return html_table(named) if named else html_table([{"reason": self.reason}])


def plain(value: Any) -> Any:
    """Answers as plain data: layouts as texts, of a policy what the search decides."""
    if isinstance(value, Policy):
        encoded = codec.encode(value)
        return {name: encoded[name] for name in SHOWN_OF_POLICY}
    if isinstance(value, Layout):
        return str(value)
    if isinstance(value, EngineBest):
        value = value.choice
    if is_dataclass(value):
        by_name = {one.name: plain(getattr(value, one.name)) for one in fields(value)}
        optional = isinstance(value, Alternative | EngineChoice)
        return {k: v for k, v in by_name.items() if v is not None or not optional}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value
