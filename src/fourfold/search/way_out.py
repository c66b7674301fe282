"""What to change where no layout is legal: the nearest numbers of GPUs, or of sequences a step,
with which one is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fourfold.search.candidates import candidates
from fourfold.search.query import PlanQuery
from fourfold.search.rules.case import divisors

TRIES = 12  # hosts on each side, and batches
NEAR = 0.1  # how far another batch may be from the one asked for


def ways_out(query: PlanQuery) -> list[str]:
    """In words, as flags have them; [] where nothing near helps."""
    host, gpus = query.cluster.host_gpus, query.gpus
    below = range(gpus - gpus % host - host * (gpus % host == 0), 0, -host)
    above = range((gpus // host + 1) * host, 2 * gpus + host, host)
    counts = [_first(query, "gpus", sizes) for sizes in (below[:TRIES], above[:TRIES])]
    found = [f"--gpus {count}" for count in counts if count]
    if query.batch.ramp is None:
        batch = _first(query, "global_batch", _batches(query))
        found += [f"--global-batch {batch}"] if batch else []
    return found


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
