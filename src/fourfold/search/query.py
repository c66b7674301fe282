"""What is asked of the planner: a model, machines, a batch, an engine, and what is left open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.count.flops import DEFAULT
from fourfold.cost.dispatch import OVERLAPS, dispatcher_of
from fourfold.cost.memory.peak import USABLE
from fourfold.cost.run import varied_columns
from fourfold.events import OnEvent, ignore
from fourfold.search.choice import RISK
from fourfold.search.legal import Target
from fourfold.search.resolve import Resolved
from fourfold.spec.batch import Batch
from fourfold.spec.cluster import TYPICAL, Cluster, Device, Link
from fourfold.spec.engine import Engine
from fourfold.spec.expression import Expression
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.supported import remarks


@dataclass(frozen=True, slots=True)
class OwnRuns:
    """Measured runs of the user's own: their columns, and seconds of a step."""

    columns: Columns
    step_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuery:
    """`policy` holds what the search does not vary; `fixed` names fields the user has decided."""

    model: ModelShape
    resolved: Resolved  # the engine on its machine, with its coefficients
    gpus: int
    batch: Batch
    policy: Policy
    release: str = ""  # whose settings will be written: a release may lack what its stack has
    evidence: dict[str, int]  # measured rows by choice; {}: the calibration does not say
    fixed: dict[str, object]
    decided: frozenset[str] = frozenset()  # fields of the policy that are not an engine's habit
    # Whose numbers an export has, by its name.
    export_engines: Mapping[str, Engine] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # on the machines
    where: tuple[Expression, ...] = ()
    explore: bool = False
    safe: bool = False  # rank what surely fits, where anything does
    risk: float = RISK  # of not fitting, that the first choice may have
    own_runs: OwnRuns | None = field(default=None, compare=False, repr=False)
    tokens: float | None = None  # of the whole training, where that is known
    lost: float | None = None  # of a training's time, 0..1; None: what is usual
    convention: str = DEFAULT  # by which TFLOP/s and MFU are counted
    # hears how far a search is
    on_event: OnEvent = field(default=ignore, compare=False, repr=False)

    @property
    def target(self) -> Target:
        return Target(
            engine=self.resolved.engine,
            release=self.release,
            gpus=self.gpus,
            device=self.resolved.cluster.device,
            runs=False,
        )

    @property
    def spec(self) -> RunSpec:
        """What all candidates share; each chooses its own layout, micro batch and policy."""
        layout = Layout(shard=self.gpus)
        return RunSpec(
            model=self.model, gpus=self.gpus, layout=layout, batch=self.batch, policy=self.policy
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """What seconds and bytes leave out or approximate."""
        timed = self.resolved.engine.rules.predicts_further
        return remarks(self.model, self.batch.seq_len, further=timed)

    @property
    def dispatchers(self) -> tuple[str, ...]:
        """Those that the cluster says it has, of a model with experts."""
        return self.resolved.cluster.dispatchers if self.model.moe else ()

    @property
    def limit_bytes(self) -> float:
        """Above which a run does not fit: what the driver and the learned margin leave."""
        memory_bytes = self.resolved.cluster.device.memory_bytes
        return memory_bytes * USABLE * self.resolved.entry.coefficients["room"]

    def columns(self, points: Mapping[str, Any], *, is_open: bool = False) -> Columns:
        """The cost model's columns of candidates, given by columns of CHOSEN fields; `is_open`: of
        any shapes that broadcast, in which what all candidates share stays one number."""
        return varied_columns(
            self.spec,
            points,
            cluster=self.resolved.cluster,
            engine=self.resolved.engine,
            is_open=is_open,
        )


def usual_cluster(device: Device, gpus: int) -> Cluster:
    """Hosts of one GPU type with the fabric usual for its generation."""
    host_gpus, link = device.usual_host_gpus, device.usual_link_bytes_per_s
    inner = min(device.domain, gpus)
    links = [Link(name="nvlink", ranks=inner, bytes_per_s=link, latency_s=3e-6)]
    if gpus > inner:
        reach = -(-gpus // inner) * inner
        rate = device.network_bytes_per_s
        links.append(Link(name="network", ranks=reach, bytes_per_s=rate, latency_s=10e-6))
    return Cluster(
        name=f"{gpus} x {device.id}",
        device=device,
        gpus=gpus,
        host_gpus=min(host_gpus, gpus),
        links=tuple(links),
        source=TYPICAL,
    )


def with_gradient_dtypes(engine: Engine, policy: Policy) -> Policy:
    """Return the policy with the dtypes that an engine accumulates and reduces gradients in: those
    of the precision (fp32 unless it is a pure one), whatever its measured runs did, unless stated.
    Megatron has one buffer for both, so one stated dtype is both there."""
    usual, stated = engine.habits, policy.grad_dtype or policy.reduce_dtype
    if stated is None and min(usual.gradient_bytes(policy.dtypes.compute)) < 4.0:
        stated = "fp32" if policy.dtypes.grad == "fp32" else None
    elif not engine.rules.one_gradient_buffer:
        return policy
    wire, held = policy.reduce_dtype or stated, policy.grad_dtype or stated
    return replace(policy, reduce_dtype=wire, grad_dtype=held)


# Fields of a policy in which engines differ where the user decides nothing.
_HABITS = (
    "sequence_parallel",
    "compile",
    "attention",
    "grad_dtype",
    "reduce_dtype",
    "dispatcher",
    "overlap_exchange",
)


def usual_policy(
    engine: Engine,
    policy: Policy,
    decided: set[str],
    *,
    release: bool = False,
    dispatchers: Sequence[str] = (),
) -> Policy:
    """The engine's habits where the user decided nothing; `release`: of today's engine, priced by
    what was measured of this one; `dispatchers`: of the cluster, where it says which it has."""
    usual = engine.habits
    changes: dict[str, Any] = {}
    if "dispatcher" not in decided and dispatchers:
        has = engine.rules.dispatchers
        kind = dispatcher_of("auto", usual.dispatcher, has, dispatchers)
        changes |= {"dispatcher": kind} if kind != usual.dispatcher else {}
    if "sequence_parallel" not in decided and not engine.is_ours:
        changes["sequence_parallel"] = usual.sequence_parallel
    if "compile" not in decided and usual.compiles:
        # It does not compile a backward in two halves.
        changes["compile"] = policy.schedule != "zero-bubble"
    if "attention" not in decided and usual.attention and not release:
        changes["attention"] = usual.attention
    if "overlap_exchange" not in decided and OVERLAPS[usual.overlap].is_schedule:
        # DualPipe is how such an engine's pipeline runs.
        changes["overlap_exchange"] = True
    return with_gradient_dtypes(engine, replace(policy, **changes))


def policy_of_engine(query: PlanQuery, policy: Policy, engine: Engine) -> Policy:
    """Return a policy of the query as a plan for another engine has it: what was searched or
    decided by the user stays, habits are that engine's."""
    plain = Policy()
    open_habits = {name: getattr(plain, name) for name in _HABITS if name not in query.decided}
    return usual_policy(
        engine,
        replace(policy, **open_habits),
        {*query.decided},
        release=True,
        dispatchers=query.dispatchers,
    )
