"""engine_memory: what a rank of another engine's job holds, counted by that engine's own code on
tensors without memory, against the memory of a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fourfold
from fourfold import files
from fourfold.conformance.install import Release, engines_folder, find
from fourfold.cost.memory.unseen import WORKSPACE, Unseen, unseen_parts
from fourfold.errors import MachineError, UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.launch.local import require_torch
from fourfold.launch.permit import core_count
from fourfold.result.one_rank import (
    AllocatorBytes,
    AllocatorFits,
    LiveTensor,
    RankMemoryCount,
    RankMemoryRequest,
)
from fourfold.search import export as exports
from fourfold.search.export.setup import Setup
from fourfold.search.predict import anywhere
from fourfold.spec import RunSpec, catalog, check, codec
from fourfold.spec.engine import ADAPTERS, EXPORTS, FOLDER, Engine, MemoryAdapter, engine_of
from fourfold.spec.layout import AXES
from fourfold.spec.run import AnyRun, nested, put_layout, run_of
from fourfold.verbs import Answer
from fourfold.verbs.engine_memory_request import EngineMemoryRequest

_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from fourfold.engine.one_rank.memory_host import main; main(sys.argv[2])"
)
# One rank of hundreds of layers takes minutes on a busy machine.
_LIMIT_S = 3600.0
_HOST_GPUS = 8
_NAMED_RANKS = ("first", "last", "worst")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryRow:
    """One of the ranks that were tried."""

    rank: int
    stage: int
    params: int
    allocated_bytes: int
    reserved_bytes: AllocatorBytes
    peak_phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory(Answer):
    """The fullest of the ranks that were tried. Bytes are those of torch's default allocator, where
    both kinds are not told apart; `peak_bytes` are of tensors, as `allocated_bytes`. `outside`:
    what a GPU holds besides what the allocator has, which no CPU sees. Of a limit, `left_bytes` are
    what it leaves beside what is reserved."""

    engine: str
    model: str
    layout: str
    gpus: int
    sharding: str
    recompute: str
    precision: str
    seq_len: int
    micro_batch: int
    global_batch: int
    rank: int
    stage: int
    params: int
    allocated_bytes: int
    reserved_bytes: AllocatorBytes
    peak_bytes: int
    outside_bytes: int
    outside: tuple[Unseen, ...]
    by_kind: dict[str, int]
    by_phase: dict[str, int]
    peak_phase: str
    peak: tuple[LiveTensor, ...]
    ranks: tuple[RankMemoryRow, ...]
    seconds: float
    host_bytes: int
    gpu: str | None = None
    limit_bytes: int | None = None
    fits: AllocatorFits | None = None
    left_bytes: AllocatorBytes | None = None

    @property
    def runs(self) -> bool:
        """Whether some kind of allocator runs within the limit; True without one."""
        return self.fits is None or {self.fits.segments, self.fits.expandable} != {"oom"}

    def rows(self) -> list[dict[str, Any]]:
        head = {"engine": self.engine, "model": self.model, "layout": self.layout}
        return [
            head
            | {name: value for name, value in codec.encode(row).items() if name != "reserved_bytes"}
            | {f"reserved_{n}_bytes": b for n, b in codec.encode(row.reserved_bytes).items()}
            for row in self.ranks
        ]


def engine_memory(
    run: AnyRun, request: EngineMemoryRequest, *, on_event: OnEvent = ignore
) -> EngineMemory:
    """Count the request's rank of a run by the engine that it names."""
    check.given(request.engine, "engine", "as NAME==VERSION")
    release = find(request.engine, engines_folder(request.engines))
    engine, adapter = _adapter_of(release)
    spec, is_own_sharding = _spec(run, request, engine)
    _require_counted(spec, adapter, release)
    ranks = _ranks(spec, request.rank)
    outside = tuple(part for part in unseen_parts(anywhere(spec)) if part.name != WORKSPACE)
    limit_bytes = catalog.device(request.gpu).memory_bytes if request.gpu else request.limit
    room = None if limit_bytes is None else limit_bytes - sum(part.bytes for part in outside)
    setup = Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=spec.policy,
        host_gpus=min(_HOST_GPUS, spec.gpus),
        engine=engine_of(engine.export.predicted_as),
        model_name=spec.model.name,
    )
    settings = exports.write_folder(engine.name, setup)
    require_torch()
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        for name, text in settings.items():
            files.write_text(Path(folder) / name, text)
        left = (*adapter.left, *(adapter.left_of_sharding if is_own_sharding else ()))
        arguments = _without(settings["engine.args"].splitlines(), left)
        requests = [
            RankMemoryRequest(
                rank=rank,
                world=spec.gpus,
                folder=folder,
                arguments=arguments,
                limit_bytes=None if room is None else max(0, room),
            )
            for rank in ranks
        ]
        path = os.path.join(FOLDER, engine.folder, f"{adapter.file}.py")

        def counted(each: RankMemoryRequest) -> RankMemoryCount:
            count = _counted(release, path, each)
            on_event(Event(f"rank {each.rank}: {count.seconds:.0f} s", "progress"))
            return count

        with ThreadPoolExecutor(min(len(ranks), core_count())) as pool:
            counts = list(pool.map(counted, requests))
    counts.sort(key=lambda count: -count.reserved_bytes.segments)
    answer = _answer(release, spec, counts, outside)
    if room is None:
        return answer
    reserved = answer.reserved_bytes
    left = AllocatorBytes(segments=room - reserved.segments, expandable=room - reserved.expandable)
    return replace(
        answer, gpu=request.gpu, limit_bytes=limit_bytes, fits=counts[0].fits, left_bytes=left
    )


def _answer(
    release: Release,
    spec: RunSpec,
    counts: Sequence[RankMemoryCount],
    outside: tuple[Unseen, ...],
) -> EngineMemory:
    """`counts`: the fullest rank first."""
    fullest, batch, policy = counts[0], spec.batch, spec.policy
    return EngineMemory(
        engine=release.name,
        model=spec.model.name,
        layout=str(spec.layout),
        gpus=spec.gpus,
        sharding=policy.sharding,
        recompute=policy.recompute,
        precision=policy.precision_name,
        seq_len=batch.seq_len,
        micro_batch=batch.micro_batch,
        global_batch=batch.global_batch,
        rank=fullest.rank,
        stage=fullest.stage,
        params=fullest.params,
        allocated_bytes=fullest.allocated_bytes.segments,
        reserved_bytes=fullest.reserved_bytes,
        peak_bytes=fullest.allocated_bytes.segments,
        outside_bytes=sum(part.bytes for part in outside),
        outside=outside,
        by_kind={kind.name: kind.bytes for kind in fullest.kinds},
        by_phase={phase.name: phase.bytes for phase in fullest.phases},
        peak_phase=fullest.peak_phase,
        peak=fullest.peak,
        ranks=tuple(
            RankMemoryRow(
                rank=count.rank,
                stage=count.stage,
                params=count.params,
                allocated_bytes=count.allocated_bytes.segments,
                reserved_bytes=count.reserved_bytes,
                peak_phase=count.peak_phase,
            )
            for count in counts
        ),
        seconds=sum(count.seconds for count in counts),
        host_bytes=max(count.host_bytes for count in counts),
    )


def _adapter_of(release: Release) -> tuple[Engine, MemoryAdapter]:
    """The release's settings as they are exported, and what counts its ranks."""
    adapters = ADAPTERS[release.engine][1].memory if release.engine in ADAPTERS else {}
    for name, adapter in adapters.items():
        if EXPORTS[name].release == release.name:
            return EXPORTS[name], adapter
    names = [
        EXPORTS[name].release.replace(" ", "==")
        for _, engine in ADAPTERS.values()
        for name in engine.memory
    ]
    rule = "has no dry run of its own code"
    value = f"{release.engine}=={release.version}"
    raise UserError(rule, field="--engine", value=value, hint=f"use {' or '.join(names)}")


def _spec(run: AnyRun, request: EngineMemoryRequest, engine: Engine) -> tuple[RunSpec, bool]:
    """The run with the request's layout, and with the engine's habits where nothing is said: its
    sharding, and as many sequences as a step needs to fill its pipeline. And whether the sharding
    is the engine's own."""
    table = nested(codec.encode(run) if isinstance(run, RunSpec) else run)
    if request.layout is not None:
        table = put_layout(table, request.layout)
    batch, policy = dict(table.get("batch") or {}), dict(table.get("policy") or {})
    habit = engine_of(engine.export.predicted_as).habits.sharding
    is_said = "sharding" in policy
    policy.setdefault("sharding", habit)
    spec = run_of({**table, "policy": policy})
    is_own = not is_said or (spec.policy.sharding == habit and spec.layout.pp == 1)
    if "global_batch" in batch:
        return spec, is_own
    in_flight = 1 if spec.layout.pp == 1 else 2 * spec.layout.pp
    sequences = spec.layout.dp * max(1, spec.batch.micro_batch) * in_flight
    return replace(spec, batch=replace(spec.batch, global_batch=sequences)), is_own


def _without(arguments: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Arguments of an engine without options, each of which has one value."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word.removeprefix("--") in names:
            next(words)
        else:
            kept.append(word)
    return tuple(kept)


def _require_counted(spec: RunSpec, adapter: MemoryAdapter, release: Release) -> None:
    """Refuse what this release is not counted with yet."""
    what = f"is not counted yet by the dry run of {release.name}"
    sizes = spec.layout.sizes
    for axis in (*AXES, "ep", "etp"):
        is_counted = sizes[axis] == 1 or axis in adapter.axes
        check.that(is_counted, f"layout.{axis}", sizes[axis], what, f"use {axis}1")
    policy, model = spec.policy, spec.model
    hint = f"use {' or '.join(adapter.precisions)}"
    check.that(
        policy.precision in adapter.precisions, "policy.precision", policy.precision, what, hint
    )
    hint = f"use {' or '.join(adapter.shardings)}"
    check.that(policy.sharding in adapter.shardings, "policy.sharding", policy.sharding, what, hint)
    shards = spec.layout.shard
    check.that(shards > 1, "layout.dp", spec.layout.dp, what, "shard it over 2 ranks or more")
    rule = f"has experts, and {what.removeprefix('is ')}"
    check.that(adapter.experts or model.moe is None, "model", model.name, rule, "take a dense one")
    is_counted = adapter.compiled or not policy.compile
    check.that(is_counted, "policy.compile", policy.compile, what, "use policy.compile=false")
    check.that(spec.batch.micro_batch, "micro_batch", "auto", "must be a number here")


def _ranks(spec: RunSpec, wanted: str) -> list[int]:
    """Ranks to count. Of a stage the first holds most: what does not divide evenly over dp or tp is
    padded at the last. So the worst rank is the first of one of the stages."""
    stage_ranks = [stage * spec.layout.stride("pp") for stage in range(spec.layout.pp)]
    if wanted in _NAMED_RANKS:
        named: Mapping[str, Sequence[int]] = {
            "first": [0],
            "last": [spec.gpus - 1],
            "worst": stage_ranks,
        }
        return list(named[wanted])
    rule = f"must be a rank of {spec.layout}, 0 to {spec.gpus - 1}, or {', '.join(_NAMED_RANKS)}"
    hint = f"the last rank is {spec.gpus - 1}"
    check.that(wanted.isdecimal() and int(wanted) < spec.gpus, "rank", wanted, rule, hint)
    return [int(wanted)]


def _counted(release: Release, adapter_path: str, request: RankMemoryRequest) -> RankMemoryCount:
    """Count one rank in a process of the engine's environment."""
    root = str(Path(fourfold.__file__).parent.parent)
    env = {name: value for name, value in os.environ.items() if name not in _OUTER}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            [release.python, "-P", "-c", _BOOT, root, adapter_path],
            input=codec.to_json(request).encode(),
            capture_output=True,
            env=env,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        rule = f"gave no answer for rank {request.rank} within {_LIMIT_S:g} s"
        raise MachineError(rule, field="--engine", value=release.name) from None
    if ended.returncode or not ended.stdout:
        why = _last_words(ended.stderr.decode(errors="replace"))
        why = why or f"it ended with status {ended.returncode}"
        rule = f"could not build rank {request.rank}: {why}"
        raise MachineError(rule, field="--engine", value=release.name)
    return codec.from_json(RankMemoryCount, ended.stdout.decode())


def _last_words(text: str) -> str:
    """The error that ended a process, else its last line; '' where it said nothing."""
    lines = [_RANK_PREFIX.sub("", line).strip() for line in text.splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    return next(iter([*errors[-1:], *filter(None, reversed(lines))]), "")[:300]


_RANK_PREFIX = re.compile(r"^(\[rank\d+\]:\s*)+")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
# Ranks of another start must not speak for this one.
_OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
