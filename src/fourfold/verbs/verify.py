"""verify: train tiny models under a layout and in one process, and compare what they compute."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fourfold import files
from fourfold.cost.count.params import model_params
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.launch.local import run_job
from fourfold.launch.permit import Permit, require_gpus
from fourfold.result.job import Job, Limits
from fourfold.result.machine import host_memory_bytes
from fourfold.result.report import RunReport
from fourfold.spec import Layout, ModelShape, Policy, RunSpec, check, codec
from fourfold.spec.catalog import TINY, model
from fourfold.spec.supported import not_run
from fourfold.units import counted, show_bytes
from fourfold.verbs import Answer, verify_cases
from fourfold.verbs.bench import permit_of
from fourfold.verbs.requests import layout_fields
from fourfold.verbs.run_requests import VerifyRequest
from fourfold.verbs.run_shown import micro_words
from fourfold.verbs.sites import Submission, launcher_of, left_to, site_of, work_folder
from fourfold.verbs.verify_cases import Wish, describe, families

_MAX_WORLD = 1024  # ranks are processes of this machine, which has its own bound


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRouting:
    """The experts of a layout, in all steps: choices that differ from one process (`wrong`), the
    smallest margin of a choice, and experts without tokens, in all or of some rank."""

    margin: float
    seed: int
    wrong: int
    state_rel: float
    idle_rel: float
    idle: int
    idle_on_a_rank: int
    dropped: int


Gap = Annotated[float | None, codec.NULL]  # None: a difference that is not a number


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLayout:
    """A layout against one process: the largest differences, and names of what they look like."""

    family: str
    model: str
    layout: str
    policy: str
    micro_batch: int
    global_batch: int
    micro_sizes: tuple[tuple[int, ...], ...]
    loss_diff: Gap = None
    norm_rel: Gap = None
    grad_rel: Gap = None
    param_rel: Gap = None
    worst_grad: str | None = None
    worst_param: str | None = None
    passed: Annotated[bool, codec.JsonForm(key="pass")]
    routing: TokenRouting | None = None
    error: str | None = None
    signature: tuple[str, ...] | None = None
    seconds: float | None = None
    limits: Annotated[dict[str, float] | None, codec.HIDDEN] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(Answer):
    """`micro_batches`: those that all layouts have in common; None where they differ."""

    TABLE = "layouts"
    layouts: tuple[VerifiedLayout, ...]
    passed: int
    refused: dict[str, int]
    total: int
    world: int
    device: str
    share_gpu: bool
    precision: str
    limits: dict[str, float]
    micro_batches: Annotated[str | None, codec.NULL]
    fault: Annotated[str | None, codec.JsonForm(key="break", null=True)]
    iteration: str | None  # format of Muon's; None: of other optimizers


def verify(request: VerifyRequest, *, on_event: OnEvent = ignore) -> Verified:
    if request.layout:
        apart = layout_fields(request.layout, request.policy, request.micro_batch)
        request = replace(request, **apart)
    found, refused, world = _cases(request)
    layouts = _carry_out(found, request, on_event)
    limits = [layout.limits for layout in layouts if layout.limits is not None]
    micro = {micro_words(run.batch, run.layout.dp) for run in found}
    return Verified(
        layouts=tuple(layouts),
        passed=sum(layout.passed for layout in layouts),
        refused=dict(refused),
        total=len(layouts),
        world=world,
        device=request.device,
        share_gpu=request.share_gpu,
        precision=found[0].policy.precision,
        fault=request.fault,
        iteration=found[0].policy.muon.dtype if found[0].policy.optimizer == "muon" else None,
        limits=limits[0] if limits else {},
        micro_batches=micro.pop() if len(micro) == 1 else None,
    )


def _cases(request: VerifyRequest) -> tuple[list[RunSpec], Mapping[str, int], int]:
    """Layouts to check, how many others each rule refused, and the ranks of all."""
    wish = _wish(request, permit_of(request))
    found, refused = verify_cases.cases(wish)
    if not found:
        rules = "; ".join({one.reason: str(one) for one in reversed(refused)}.values())
        asked = request.layout or counted(wish.world, "rank")
        alone = f"none has {request.axis} above 1; change --world, --layout or --axis"
        raise UserError(f"no legal layout for {asked}: {rules or alone}")
    if request.sample is not None:
        found = verify_cases.sample(found, request.sample, request.seed)
    return found, Counter(one.reason for one in refused), wish.world


def _wish(request: VerifyRequest, permit: Permit) -> Wish:
    layout = Layout.parse(request.layout) if request.layout else None
    asked = request.world is not None or layout is not None
    check.given(asked, "world", "or pass --layout")
    world = request.world if request.world is not None else layout.world if layout else 0
    if layout:
        rule = f"has {layout.world} ranks, not the {world} of --world"
        check.that(layout.world == world, "layout", request.layout, rule)
    check.whole(1, _MAX_WORLD, world=world)
    _checked_sizes(request, world, permit)
    names = request.models or [TINY[family] for family in families(request, layout)]
    models = tuple(model(name) for name in names)
    for shape in models:
        _must_run(shape, is_here=request.device == "cpu" and site_of(request) is None)
    needed = verify_cases.FAULT_NEEDS.get(request.fault or "", {})
    fixed: dict[str, Any] = {"precision": request.precision, **needed, **request.policy}
    if isinstance(fixed.get("muon"), dict):
        fixed["muon"] = {**needed.get("muon", {}), **fixed["muon"]}
    for name, value in permit.env:
        codec.put(fixed, f"env.{name}", value)
    placed = _iterates_in(fixed) if fixed.get("optimizer") == "muon" else False
    # Unknown fields and values are refused here, with the codec's words; aliases are resolved.
    policy = codec.decode(Policy, fixed, "policy")
    decided = {name: getattr(policy, name) for name in fixed}
    return Wish(
        request=request, world=world, models=models, layout=layout, fixed=decided, placed=placed
    )


def _iterates_in(fixed: dict[str, Any]) -> bool:
    """Let Muon iterate in the format that everything is proven in, unless another is asked for;
    return whether it is said where."""
    muon = fixed.get("muon", {})
    if isinstance(muon, dict):
        precision = codec.decode(Policy, {"precision": fixed["precision"]}, "policy")
        compute = precision.dtypes.compute
        fixed["muon"] = {"dtype": compute if compute in ("fp32", "fp64") else "bf16", **muon}
    return isinstance(muon, dict) and "placement" in muon


def _must_run(shape: ModelShape, *, is_here: bool) -> None:
    """Refused before layouts are tried: no layout would help. Here both the reference and the ranks
    hold weights, gradients and two moments in fp32."""
    lacking = not_run(shape, verify_cases.SEQ_LEN)
    rule = f"needs {', '.join(lacking)}, which the engine does not support"
    check.that(not lacking, "models", shape.name, rule, "plan and models accept it")
    needed, room = 2 * 16 * model_params(shape, verify_cases.SEQ_LEN), host_memory_bytes()
    rule = f"needs {show_bytes(needed)} for states, and this host has {show_bytes(room)}"
    hint = "use a smaller model, such as its config.json with fewer layers"
    check.that(not is_here or needed <= room, "models", shape.name, rule, hint)


def _checked_sizes(request: VerifyRequest, world: int, permit: Permit) -> None:
    """0 is a mistake, not the absence of a wish; and GPUs are counted before ranks start."""
    check.whole(global_batch=request.global_batch, micro_batch=request.micro_batch)
    if request.share_gpu and request.device != "cuda":
        raise UserError("needs --device cuda", field="--share-gpu")
    if site_of(request) is not None:
        return
    hint = "--device cpu" if request.share_gpu else "--share-gpu, or --device cpu"
    require_gpus(request.device, world, hint=hint, shared=request.share_gpu)
    permit.require_room(world)


def submit_verify(request: VerifyRequest) -> Submission:
    """Leave it to the site's scheduler; `verify` with the same request follows it and has the
    answer. With `print_launch` nothing is submitted."""
    site = site_of(request)
    found, _, _ = _cases(request)
    return left_to(site, _job(found, request), only_print=request.print_launch)


def _job(found: list[RunSpec], request: VerifyRequest) -> Job:
    options = (("break", request.fault),) if request.fault else ()
    if request.share_gpu:
        options += (("share_gpu", "true"),)
    limits = Limits(start_s=max(600.0, request.limit), step_s=request.limit)
    specs, ranks = tuple(found), found[0].gpus
    return Job(job="verify", specs=specs, ranks=ranks, options=options, limits=limits)


def _carry_out(
    found: list[RunSpec], request: VerifyRequest, on_event: OnEvent
) -> list[VerifiedLayout]:
    site, job = site_of(request), _job(found, request)
    with work_folder(job, site) as folder:
        report = run_job(
            job,
            folder,
            progress=lambda line: on_event(Event(f"verify: {line}")),
            permit=permit_of(request),
            on=launcher_of(site),
        )
        ends = dict(enumerate(report.runs))
        return [_layout(i, spec, folder, ends.get(i)) for i, spec in enumerate(found)]


def _layout(index: int, spec: RunSpec, folder: Path, end: RunReport | None) -> VerifiedLayout:
    layout = VerifiedLayout(
        family=spec.model.family,
        model=spec.model.name,
        layout=str(spec.layout),
        policy=describe(spec),
        micro_batch=spec.batch.micro_batch,
        global_batch=spec.batch.global_batch,
        micro_sizes=tuple(map(tuple, spec.batch.micro_plan(spec.layout.dp))),
        passed=False,
    )
    path = folder / f"answer-{index}.json"
    if path.exists():
        verdict = json.loads(files.read_own_text(path))
        routing = verdict.pop("routing", None)
        routed = TokenRouting(**routing) if routing else None
        return replace(layout, passed=verdict.pop("pass"), routing=routed, **verdict)
    words = "no answer"
    if end is not None and end.failure is not None:
        words = f"{end.outcome}: {end.failure.who}: {end.failure.message}"
    return replace(layout, error=words)
