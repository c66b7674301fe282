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
from typing import Annotated, Any, TypeVar

from fourfold import files
from fourfold.conformance.install import Release, engines_folder, find
from fourfold.cost.memory.unseen import WORKSPACE, Unseen, unseen_parts_of
from fourfold.errors import MachineError, UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.installed import SOURCE_FOLDER
from fourfold.launch.local import require_torch
from fourfold.launch.permit import core_count
from fourfold.result.one_rank import (
    AllocatorBytes,
    AllocatorFits,
    EngineJob,
    EngineJobReply,
    LiveTensor,
    RankMemoryCount,
    RankMemoryRequest,
)
from fourfold.search import export as exports
from fourfold.search.export.setup import Setup
from fourfold.spec import RunSpec, catalog, check, codec
from fourfold.spec.engine import (
    ADAPTERS,
    EXPORTS,
    Engine,
    MemoryAdapter,
    engine_of,
    version_key,
)
from fourfold.spec.layout import Layout
from fourfold.spec.run import AnyRun, nested, put_layout, run_of
from fourfold.units import size_from
from fourfold.verbs import Answer
from fourfold.verbs.engine_memory_models import write_model_job
from fourfold.verbs.engine_memory_request import EngineMemoryRequest

T = TypeVar("T")

_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from fourfold.engine.one_rank.memory_host import main; main(sys.argv[2], sys.argv[3])"
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
    """Count the request's rank of a run by the engine that it names. With the engine's own settings
    (`config`) a run is its number of GPUs."""
    check.given(request.engine, "engine", "as NAME==VERSION")
    release = find(request.engine, engines_folder(request.engines))
    engine, adapter = _adapter_of(release)
    path = os.path.join(ADAPTERS[release.engine][0], f"{adapter.file}.py")
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        if engine is None:
            job, arguments = _write_script(run, request, adapter, release, path, folder)
        elif request.config is None:
            job, arguments = _write_run(run, request, engine, adapter, release, folder)
        else:
            job, arguments = _copy_config(run, request, adapter, release, path, folder)
        ranks = _ranks(job.layout, request.rank)
        unseen = unseen_parts_of(job.layout)
        outside = tuple(part for part in unseen if part.name != WORKSPACE)
        limit_bytes = catalog.device(request.gpu).memory_bytes if request.gpu else request.limit
        room = None if limit_bytes is None else limit_bytes - sum(part.bytes for part in outside)
        require_torch()
        requests = [
            RankMemoryRequest(
                rank=rank,
                world=job.layout.world,
                folder=folder,
                arguments=arguments,
                limit_bytes=None if room is None else max(0, room),
                job=job if engine is None else None,
            )
            for rank in ranks
        ]

        def counted(each: RankMemoryRequest) -> RankMemoryCount:
            count = _counted(release, path, each)
            on_event(Event(f"rank {each.rank}: {count.seconds:.0f} s", "progress"))
            return count

        with ThreadPoolExecutor(min(len(ranks), core_count())) as pool:
            counts = list(pool.map(counted, requests))
    counts.sort(key=lambda count: -count.reserved_bytes.segments)
    answer = _answer(release, job, counts, outside)
    if room is None:
        return answer
    reserved = answer.reserved_bytes
    left = AllocatorBytes(segments=room - reserved.segments, expandable=room - reserved.expandable)
    return replace(
        answer, gpu=request.gpu, limit_bytes=limit_bytes, fits=counts[0].fits, left_bytes=left
    )


def _answer(
    release: Release,
    job: EngineJob,
    counts: Sequence[RankMemoryCount],
    outside: tuple[Unseen, ...],
) -> EngineMemory:
    """`counts`: the fullest rank first."""
    fullest = counts[0]
    return EngineMemory(
        engine=release.name,
        model=job.model,
        layout=str(job.layout),
        gpus=job.layout.world,
        sharding=job.sharding,
        recompute=job.recompute,
        precision=job.precision_name,
        seq_len=job.seq_len,
        micro_batch=job.micro_batch,
        global_batch=job.global_batch,
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


def _adapter_of(release: Release) -> tuple[Engine | None, MemoryAdapter]:
    """What counts ranks of the release, and its settings as they are exported; None where its jobs
    are scripts around a model of transformers."""
    for name, adapter in ADAPTERS[release.engine][1].memory.items():
        if adapter.transformers_since:
            if version_key(release.version) >= version_key(adapter.transformers_since):
                return None, adapter
        elif EXPORTS[name].release.rpartition(" ")[2] == release.version:
            return EXPORTS[name], adapter
    names = [
        f"{package}=={adapter.transformers_since} or newer"
        if adapter.transformers_since
        else f"{package}=={EXPORTS[name].release.rpartition(' ')[2]}"
        for package, (_, engine) in ADAPTERS.items()
        for name, adapter in engine.memory.items()
    ]
    rule = "has no dry run of its own code"
    value = f"{release.engine}=={release.version}"
    raise UserError(rule, field="--engine", value=value, hint=f"use {', '.join(names)}")


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


def _write_run(
    run: AnyRun,
    request: EngineMemoryRequest,
    engine: Engine,
    adapter: MemoryAdapter,
    release: Release,
    folder: str,
) -> tuple[EngineJob, tuple[str, ...]]:
    """Return the job of a run and its arguments, as they are exported, with their files in
    `folder`."""
    spec, is_own_sharding = _spec(run, request, engine)
    policy = spec.policy
    job = EngineJob(
        model=spec.model.name,
        has_experts=spec.model.moe is not None,
        layout=spec.layout,
        sharding=policy.sharding,
        recompute=policy.recompute,
        precision=policy.precision,
        precision_name=policy.precision_name,
        is_compiled=policy.compile,
        seq_len=spec.batch.seq_len,
        micro_batch=spec.batch.micro_batch,
        global_batch=spec.batch.global_batch,
    )
    _require_counted(job, adapter, release)
    _ranks(job.layout, request.rank)
    setup = Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=policy,
        host_gpus=min(_HOST_GPUS, spec.gpus),
        engine=engine_of(engine.export.predicted_as),
        model_name=spec.model.name,
    )
    texts = exports.write_folder(engine.name, setup)
    for name, text in texts.items():
        files.write_text(Path(folder) / name, text)
    left = (*adapter.left, *(adapter.left_of_sharding if is_own_sharding else ()))
    return job, _without(texts["engine.args"].splitlines(), left)


def _write_script(
    run: AnyRun,
    request: EngineMemoryRequest,
    adapter: MemoryAdapter,
    release: Release,
    adapter_path: str,
    folder: str,
) -> tuple[EngineJob, tuple[str, ...]]:
    """Return the job of a script around a model of transformers, and the arguments that name the
    copy of the engine's own settings, where the request has them."""
    job = write_model_job(run, request.layout, adapter, release.name, folder)
    if request.config is None:
        job = replace(job, micro_batch=job.micro_batch or 1)
        _require_counted(job, adapter, release)
        return job, ()
    _require_option(request.config, adapter, release)
    table = nested(codec.encode(run) if isinstance(run, RunSpec) else run)
    for path in adapter.config_fields:
        section, _, name = path.partition(".")
        value = (table.get(section) or {}).get(name)
        rule, hint = "does not go with --config", "omit it: that file decides it"
        check.that(value is None, path, value, rule, hint)
    copy = Path(folder) / f"settings{Path(request.config).suffix}"
    files.write_bytes(copy, files.read_bytes(request.config, field="config"))
    arguments = (f"--{adapter.config_option}", str(copy))
    asked = RankMemoryRequest(
        rank=0, world=job.layout.world, folder=folder, arguments=arguments, job=job
    )
    job = _read_job(asked, request.config, copy, release, adapter_path)
    job = replace(job, micro_batch=job.micro_batch or 1)
    _require_counted(job, adapter, release, request.config)
    return job, arguments


def _require_option(config: str, adapter: MemoryAdapter, release: Release) -> None:
    rule = f"is not read by the dry run of {release.name}"
    check.that(adapter.config_option, "config", config, rule, "use --model and --layout")


def _read_job(
    asked: RankMemoryRequest, config: str, copy: Path, release: Release, adapter_path: str
) -> EngineJob:
    """Return the job that the engine reads from a copy of the user's file `config`."""
    require_torch()
    reply = _answered(EngineJobReply, release, adapter_path, "read_job", asked)
    if reply.job is None:
        refusal = reply.refusal.replace(str(copy), config).removesuffix(".")
        rule = f"is refused by {release.name}: {refusal}"
        hint = "change the file, or --gpus where it does not go with it"
        raise UserError(rule, field="config", value=config, hint=hint)
    return reply.job


def _copy_config(
    run: AnyRun,
    request: EngineMemoryRequest,
    adapter: MemoryAdapter,
    release: Release,
    adapter_path: str,
    folder: str,
) -> tuple[EngineJob, tuple[str, ...]]:
    """Return the job that the engine reads from a file of its own settings, and the arguments that
    name the file's copy in `folder`."""
    config = check.given(request.config, "config", "name a file of the engine's settings")
    _require_option(config, adapter, release)
    gpus = _gpus_beside_config(run, request)
    copy = Path(folder) / "config.toml"  # its own name could be that of a module
    files.write_bytes(copy, files.read_bytes(config, field="config"))
    arguments = (f"--{adapter.config_option}", str(copy))
    asked = RankMemoryRequest(rank=0, world=gpus, folder=folder, arguments=arguments)
    job = _read_job(asked, config, copy, release, adapter_path)
    _require_counted(job, adapter, release, config)
    return job, arguments


def _gpus_beside_config(run: AnyRun, request: EngineMemoryRequest) -> int:
    """Return the number of GPUs, all that a run may say where the engine's settings say the
    rest."""
    table = nested(codec.encode(run) if isinstance(run, RunSpec) else run)
    fields = {"layout": request.layout} if request.layout is not None else {}
    for name, value in table.items():
        inner = value if isinstance(value, Mapping) and name != "model" else {}
        fields |= {f"{name}.{key}": v for key, v in inner.items()} if inner else {name: value}
    gpus = fields.pop("gpus", None)
    for name, value in fields.items():
        hint = "omit it and set it in that file, or omit --config"
        raise UserError("does not go with --config", field=name, value=value, hint=hint)
    check.that(gpus is not None, "gpus", None, "is required", "say how many ranks the job has")
    count = codec.decode_value(Annotated[int, size_from], gpus, "gpus")
    check.whole(1, 2**24, gpus=count)
    return count


def _require_counted(
    job: EngineJob, adapter: MemoryAdapter, release: Release, config: str = ""
) -> None:
    """Refuse what this release is not counted with yet, by the engine's own name of a setting where
    the job was read from its settings in the file `config`."""
    what = f"is not counted yet by the dry run of {release.name}"

    def require(holds: bool, path: str, value: object, rule: str, hint: str) -> None:
        setting = job.settings.get(path)
        if setting is None:
            check.that(holds, path, value, rule, hint)
        elif not holds:
            raise UserError(rule, field=setting.name, value=setting.value, hint=hint).inside(config)

    for axis, size in job.layout.sizes.items():
        is_counted = size == 1 or axis in adapter.axes
        hint = f"use {axis}1" if f"layout.{axis}" not in job.settings else "use 1"
        require(is_counted, f"layout.{axis}", size, what, hint)
    hint = f"use {' or '.join(adapter.precisions)}"
    is_counted = job.precision in adapter.precisions
    require(is_counted, "policy.precision", job.precision, what, hint)
    shards = job.layout.shard
    hint = f"use {' or '.join(adapter.shardings)}"
    is_counted = job.sharding in adapter.shardings
    require(is_counted, "policy.sharding", job.sharding, what, hint)
    hint = f"shard it over {adapter.min_shards} ranks or more"
    require(shards >= adapter.min_shards, "layout.dp", job.layout.dp, what, hint)
    rule = f"has experts, and {what.removeprefix('is ')}"
    is_counted = adapter.experts or not job.has_experts
    require(is_counted, "model", job.model, rule, "take a dense one")
    is_counted = adapter.compiled or not job.is_compiled
    hint = "use policy.compile=false" if "policy.compile" not in job.settings else "use false"
    require(is_counted, "policy.compile", job.is_compiled, what, hint)
    for setting, value in job.uncounted:
        hint = f"use {value}"
        raise UserError(what, field=setting.name, value=setting.value, hint=hint).inside(config)
    check.that(job.micro_batch, "micro_batch", "auto", "must be a number here")


def _ranks(layout: Layout, wanted: str) -> list[int]:
    """Ranks to count. Of a stage the first holds most: what does not divide evenly over dp or tp is
    padded at the last. So the worst rank is the first of one of the stages."""
    stage_ranks = [stage * layout.stride("pp") for stage in range(layout.pp)]
    if wanted in _NAMED_RANKS:
        named: Mapping[str, Sequence[int]] = {
            "first": [0],
            "last": [layout.world - 1],
            "worst": stage_ranks,
        }
        return list(named[wanted])
    rule = f"must be a rank of {layout}, 0 to {layout.world - 1}, or {', '.join(_NAMED_RANKS)}"
    hint = f"the last rank is {layout.world - 1}"
    check.that(wanted.isdecimal() and int(wanted) < layout.world, "rank", wanted, rule, hint)
    return [int(wanted)]


def _counted(release: Release, adapter_path: str, request: RankMemoryRequest) -> RankMemoryCount:
    """Count one rank in a process of the engine's environment."""
    return _answered(RankMemoryCount, release, adapter_path, "count_rank", request)


def _answered(
    kind: type[T], release: Release, adapter_path: str, function: str, request: RankMemoryRequest
) -> T:
    """Return what a function of the adapter makes of a request, in a process of the engine's
    environment."""
    root = SOURCE_FOLDER
    env = {name: value for name, value in os.environ.items() if name not in _OUTER}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            [release.python, "-P", "-c", _BOOT, root, adapter_path, function],
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
    return codec.from_json(kind, ended.stdout.decode())


def _last_words(text: str) -> str:
    """The error that ended a process, else its last line; '' where it said nothing."""
    lines = [_RANK_PREFIX.sub("", line).strip() for line in text.splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    return next(iter([*errors[-1:], *filter(None, reversed(lines))]), "")[:300]


_RANK_PREFIX = re.compile(r"^(\[rank\d+\]:\s*)+")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
# Ranks of another start must not speak for this one.
_OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
