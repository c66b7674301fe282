"""What is asked of the planner: a model, machines, a batch, an engine, and what is left open; and
which engine and calibration a name stands for."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.count.flops import DEFAULT
from fourfold.cost.dispatch import OVERLAPS, dispatcher_of
from fourfold.cost.fit.calibration import Calibration, FittedStack, gpu_entry
from fourfold.cost.memory.peak import USABLE
from fourfold.cost.run import varied_columns
from fourfold.events import OnEvent, ignore
from fourfold.search.choice import RISK
from fourfold.search.legal import Target
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.catalog import generation_of
from fourfold.spec.cluster import TYPICAL, Cluster, Device, Link
from fourfold.spec.engine import OURS, MeasuredAs, engine_of
from fourfold.spec.expression import Expression
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.supported import remarks
from fourfold.spec.words import SHARDINGS

ALIKE = 1.1  # rates of links within 10%
# Of an engine's measured runs: what fewer have is no habit of it (Megatron's FSDP: 2 of 381).
FEW_OF_ENGINE = 0.01


@dataclass(frozen=True, slots=True)
class OwnRuns:
    """Measured runs of the user's own: their columns, and seconds of a step."""

    columns: Columns
    step_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuery:
    """`policy` holds what the search does not vary; `fixed` names fields the user has decided."""

    model: ModelShape
    cluster: Cluster
    gpus: int
    batch: Batch
    policy: Policy
    stack: str
    release: str = ""  # whose settings will be written: a release may lack what its stack has
    entry: FittedStack
    calibration: str
    no_rows: str  # why the calibration is a blend, '' when it has rows
    evidence: dict[str, int]  # measured rows by choice; {}: the calibration does not say
    fixed: dict[str, object]
    decided: frozenset[str] = frozenset()  # fields of the policy that are not an engine's habit
    export_stacks: Mapping[str, str] = field(default_factory=dict)  # whose numbers an export has
    remarks: tuple[str, ...] = ()  # on the machines
    where: tuple[Expression, ...] = ()
    explore: bool = False
    safe: bool = False  # rank what surely fits, where anything does
    risk: float = RISK  # of not fitting, that the first choice may have
    like: str = ""  # the measured cluster that it is priced as
    own_runs: OwnRuns | None = field(default=None, compare=False, repr=False)
    tokens: float | None = None  # of the whole training, where that is known
    lost: float | None = None  # of a training's time, 0..1; None: what is usual
    convention: str = DEFAULT  # by which TFLOP/s and MFU are counted
    # hears how far a search is
    on_event: OnEvent = field(default=ignore, compare=False, repr=False)

    @property
    def target(self) -> Target:
        return Target(
            stack=self.stack,
            release=self.release,
            gpus=self.gpus,
            device=self.cluster.device,
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
        timed = engine_of(self.stack).rules.predicts_further
        return remarks(self.model, self.batch.seq_len, further=timed)

    @property
    def dispatchers(self) -> tuple[str, ...]:
        """Those that the cluster says it has, of a model with experts."""
        return self.cluster.dispatchers if self.model.moe else ()

    @property
    def limit_bytes(self) -> float:
        """Above which a run does not fit: what the driver and the learned margin leave."""
        return self.cluster.device.memory_bytes * USABLE * self.entry.coefficients["room"]

    def columns(self, points: Mapping[str, Any], *, is_open: bool = False) -> Columns:
        """The cost model's columns of candidates, given by columns of CHOSEN fields; `is_open`: of
        any shapes that broadcast, in which what all candidates share stays one number."""
        return varied_columns(
            self.spec,
            points,
            cluster=self.cluster,
            stack=self.stack,
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


def default_stack(cluster: Cluster, calibration: Calibration) -> str:
    """The stack with most measured rows on the cluster, else no engine in particular."""
    known = [e for e in calibration.of(experts=False) if e.cluster == cluster.name]
    if not known:
        return "generic"
    return max(known, key=lambda entry: (entry.rows_time, entry.stack)).stack


def with_gradient_dtypes(stack: str, policy: Policy) -> Policy:
    """Return the policy with the dtypes that a stack accumulates and reduces gradients in: those of
    the precision (fp32 unless it is a pure one), whatever its measured runs did, unless stated.
    Megatron has one buffer for both, so one stated dtype is both there."""
    usual, stated = engine_of(stack).habits, policy.grad_dtype or policy.reduce_dtype
    if stated is None and min(usual.gradient_bytes(policy.dtypes.compute)) < 4.0:
        stated = "fp32" if policy.dtypes.grad == "fp32" else None
    elif not engine_of(stack).rules.one_gradient_buffer:
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
    stack: str,
    policy: Policy,
    decided: set[str],
    *,
    release: bool = False,
    dispatchers: Sequence[str] = (),
) -> Policy:
    """The engine's habits where the user decided nothing; `release`: of today's engine, priced by
    what was measured of this stack; `dispatchers`: of the cluster, where it says which it has."""
    usual = engine_of(stack).habits
    changes: dict[str, Any] = {}
    if "dispatcher" not in decided and dispatchers:
        has = engine_of(stack).rules.dispatchers
        kind = dispatcher_of("auto", usual.dispatcher, has, dispatchers)
        changes |= {"dispatcher": kind} if kind != usual.dispatcher else {}
    if "sequence_parallel" not in decided and stack != OURS:
        changes["sequence_parallel"] = usual.sequence_parallel
    if "compile" not in decided and usual.compiles:
        # It does not compile a backward in two halves.
        changes["compile"] = policy.schedule != "zero-bubble"
    if "attention" not in decided and usual.attention and not release:
        changes["attention"] = usual.attention
    if "overlap_exchange" not in decided and OVERLAPS[usual.overlap].is_schedule:
        # DualPipe is how such an engine's pipeline runs.
        changes["overlap_exchange"] = True
    return with_gradient_dtypes(stack, replace(policy, **changes))


def policy_of_engine(query: PlanQuery, policy: Policy, stack: str) -> Policy:
    """Return a policy of the query as a plan for another stack has it: what was searched or decided
    by the user stays, habits are that stack's."""
    plain = Policy()
    open_habits = {name: getattr(plain, name) for name in _HABITS if name not in query.decided}
    return usual_policy(
        stack,
        replace(policy, **open_habits),
        {*query.decided},
        release=True,
        dispatchers=query.dispatchers,
    )


def entry_for(
    calibration: Calibration, stack: str, cluster: Cluster, *, experts: bool = False
) -> tuple[FittedStack, str]:
    """(coefficients, why they are not this machine's own: '' when they are, or a twin's); of a
    model with `experts` or of others."""
    stack = str(MeasuredAs.of(stack).with_experts()) if experts else stack
    like = twin(calibration, stack, cluster) or cluster.name
    generation = generation_of(cluster.device)
    entry, why = calibration.entry(stack, MeasuredAs.of(stack).place(like), generation)
    if like != cluster.name and not why:
        entry = replace(entry, basis="near")
    own = gpu_entry(stack, cluster.device.id) if why else None
    if own is not None and cluster.gpus == 1:
        entry, why = own, ""
    elif own is not None:  # its kernels are known, its links are not
        entry = replace(
            entry, coefficients=entry.coefficients | {k: own.coefficients[k] for k in own.free_time}
        )
    if not why and not entry.rows_time:
        why = f"calibration '{calibration.name}' has kernels and links but no runs"
        entry = replace(entry, basis="physics")
    if cluster.device.id.startswith("cpu"):
        # No CUDA context, no communicator buffers: only tensors count there.
        entry = replace(entry, coefficients={**entry.coefficients, "base_gib": 0.0})
    return entry, why


def twin(calibration: Calibration, stack: str, cluster: Cluster) -> str:
    """The cluster of the catalogue with the same GPUs and links on which most runs of this stack
    were measured; '' where there is none, or runs of this very cluster are known."""
    measured = {e.cluster: e.rows_time for e in calibration.entries if e.stack == stack}
    alike = () if MeasuredAs.of(stack).place(cluster.name) in measured else _alike(cluster)
    rows = {name: measured.get(MeasuredAs.of(stack).place(name), 0) for name in alike}
    return max(filter(rows.get, rows), key=lambda name: rows[name], default="")


@functools.cache
def _alike(cluster: Cluster) -> tuple[str, ...]:
    """Clusters of the catalogue that one outside of it is priced as."""
    names = catalog.cluster_names()
    if cluster.name in names or cluster.like == "none":
        return ()
    if cluster.like:
        return (cluster.like,)
    return tuple(name for name in names if _same_machines(cluster, catalog.cluster(name)))


def _same_machines(one: Cluster, other: Cluster) -> bool:
    """The same GPU, and links of about the same rates as far as the first reaches."""
    if one.device.id != other.device.id:
        return False
    if len(one.links) > 1 and one.host_gpus != other.host_gpus:
        return False
    ends = (0,) if len(one.links) == 1 else (0, -1)
    rates = [one.links[at].bytes_per_s / other.links[at].bytes_per_s for at in ends]
    return all(1 / ALIKE <= rate <= ALIKE for rate in rates)


def evidence_for(calibration: Calibration, entry: FittedStack) -> dict[str, int]:
    """Rows by choice: of the entry, or of all entries where it is a blend of them; a kind of
    sharding must be one that the engine itself is run with."""
    total, dense = dict(entry.counts), calibration.of(experts=False)
    if not (entry.counts or entry.rows_time):
        for known in dense:
            for name, count in known.counts.items():
                total[name] = total.get(name, 0) + count
    rules = engine_of(entry.stack).rules.name
    kin = [e for e in dense if engine_of(e.stack).rules.name == rules]
    runs = sum(e.rows_time for e in kin)
    for name in SHARDINGS:
        count = sum(e.counts.get(name, 0) for e in kin)
        if runs and rules != "generic" and count < FEW_OF_ENGINE * runs:
            total[name] = 0
    return total
