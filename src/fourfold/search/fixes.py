"""What would make a run fit that went out of memory, and what that would cost: one change, or two
where no single one is enough. Those that fit come first, the fastest of them on top."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd

from fourfold.errors import UserError
from fourfold.result.report import Prediction, Remedy
from fourfold.search.candidates import candidates
from fourfold.search.legal import certain_refusals, why_not_spec
from fourfold.search.query import PlanQuery
from fourfold.search.rules.case import divisors
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from fourfold.spec.words import RECOMPUTE

# What a reader looks at, and a stored run keeps.
MOST = 8
# Parts of the tokens whose logits exist at a time: more gain little, and make smaller products.
_LOSS_CHUNKS = 8
Predictor = Callable[[list[RunSpec]], list[Prediction]]


@dataclass(frozen=True, slots=True)
class Fix:
    words: str
    spec: RunSpec


def fixes(spec: RunSpec, *, two: bool = False) -> list[Fix]:
    """Legal runs of the same work on the same ranks, one change away, or (`two`) exactly two."""
    changes = _pairs(spec) if two else _changes(spec)
    return [Fix(words, changed) for words, changed in changes if not why_not_spec(changed)]


def _changes(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    micro = spec.batch.micro_batch
    while micro > 1:
        micro //= 2
        batch = replace(spec.batch, micro_batch=micro)
        yield f"micro_batch = {micro}", replace(spec, batch=batch)
    for kind in RECOMPUTE[1:]:
        if spec.policy.recompute != kind:
            policy = replace(spec.policy, recompute=kind)
            yield f"recompute = {kind}", replace(spec, policy=policy)
    if spec.policy.loss_chunks < _LOSS_CHUNKS:
        policy = replace(spec.policy, loss_chunks=_LOSS_CHUNKS)
        yield f"loss_chunks = {_LOSS_CHUNKS}", replace(spec, policy=policy)
    sharders = spec.layout.shard * spec.layout.cp
    for zero in range(spec.policy.zero + 1, 4 if sharders > 1 else 0):
        policy = replace(spec.policy, sharding=f"zero{zero}")  # type: ignore[arg-type]
        yield f"sharding = zero{zero}", replace(spec, policy=policy)
    for axis in ("tp", "pp", "cp"):
        layout = _moved(spec.layout, axis)
        if layout is not None:
            yield f"layout = {layout}", replace(spec, layout=layout)


def _pairs(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Two changes of different kinds; the same pair in the other order is not told again."""
    seen = {spec.run_id}
    for first, changed in _changes(spec):
        for second, again in _changes(changed):
            other = second.partition(" = ")[0]
            if other not in first.partition(" = ")[0] and again.run_id not in seen:
                seen.add(again.run_id)
                yield f"{first}, {second}", again


def _moved(layout: Layout, axis: str) -> Layout | None:
    """Twice as much of an axis, half as much data parallelism."""
    if layout.shard % 2:
        return None
    try:
        return replace(
            layout,
            shard=layout.shard // 2,
            **{axis: 2 * layout.size(axis)},  # type: ignore[arg-type]
        )
    except UserError:
        return None


def remedies(
    spec: RunSpec, predict: Predictor, *, limit_bytes: float, used_bytes: float = 0.0
) -> tuple[Remedy, ...]:
    """What would fit, fastest first, then what would come nearest. `used_bytes`: what the run held
    when it failed; where that is more than predicted, every prediction is raised in proportion."""
    (own,) = predict([spec])
    raised = max(1.0, used_bytes / own.peak_bytes) if own.peak_bytes else 1.0
    # It ran out, whatever was predicted: what needs as much does not fit either.
    limit_bytes = min(limit_bytes, 0.999 * own.peak_bytes * raised)
    for two in (False, True):
        tried = fixes(spec, two=two)
        answers = predict([fix.spec for fix in tried]) if tried else []
        rows = [
            Remedy(
                change=fix.words,
                fits=answer.peak_bytes * raised <= limit_bytes,
                peak_bytes=answer.peak_bytes * raised,
                step_s=answer.step_s,
                slower_pct=100 * (answer.step_s / own.step_s - 1),
            )
            for fix, answer in zip(tried, answers, strict=True)
        ]
        if any(row.fits for row in rows):
            break
    rows.sort(key=lambda row: (not row.fits, row.step_s if row.fits else row.peak_bytes))
    return tuple(rows[:MOST])


TRIES = 12  # hosts on each side, and batches
NEAR = 0.1  # how far another batch may be from the one asked for
_ROUNDER = 4  # times as many GPUs have to divide a batch that is worth a second search


def ways_out(query: PlanQuery) -> list[str]:
    """In words, as flags have them; [] where nothing near helps."""
    if certain_refusals(query.model, query.batch, query.policy, query.target):
        return []
    host, gpus = query.resolved.cluster.host_gpus, query.gpus
    below = range(gpus - gpus % host - host * (gpus % host == 0), 0, -host)
    above = range((gpus // host + 1) * host, 2 * gpus + host, host)
    counts = [_first(query, "gpus", sizes) for sizes in (below[:TRIES], above[:TRIES])]
    found = [f"--gpus {count}" for count in counts if count]
    if query.batch.ramp is None:
        batch = _first(query, "global_batch", _batches(query))
        found += [f"--global-batch {batch}"] if batch else []
    return found


def rounder_batch(query: PlanQuery) -> int | None:
    """Return a batch near the asked one that far more of the GPUs divide; None where there is none,
    or the batch grows in a ramp."""
    gpus, asked = query.gpus, query.batch.global_batch
    near = [] if query.batch.ramp else _batches(query)
    rounder = [size for size in near if gcd(size, gpus) >= _ROUNDER * gcd(asked, gpus)]
    return next(iter(rounder), None)


def _batches(query: PlanQuery) -> list[int]:
    """Sequences a step that the GPUs, or most of them, divide."""
    asked = query.batch.global_batch
    near = [max(1, round(asked / size)) * size for size in divisors(query.gpus)[::-1]]
    return [size for size in dict.fromkeys(near) if abs(size / asked - 1.0) <= NEAR][:TRIES]


def _first(query: PlanQuery, name: str, values: Iterable[int]) -> int:
    for value in values:
        batch = replace(query.batch, global_batch=value) if name == "global_batch" else query.batch
        gpus = value if name == "gpus" else query.gpus
        if candidates(replace(query, gpus=gpus, batch=batch)).legal:
            return value
    return 0
