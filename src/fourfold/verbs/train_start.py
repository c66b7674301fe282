"""Where a training starts: its description, the newest whole checkpoint, the curve up to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.cost.count import params
from fourfold.errors import UserError, install
from fourfold.events import Event, OnEvent
from fourfold.launch.folder import end_processes_of
from fourfold.launch.permit import Permit, require_gpus
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import Checkpoint
from fourfold.result.files import curve, stored
from fourfold.result.files.stored import NotWholeError
from fourfold.result.files.training_folder import (
    TrainingFolder,
    changes,
    must_continue,
    must_follow,
)
from fourfold.search.legal import require_legal
from fourfold.spec import check, codec
from fourfold.spec.hf.folder import CONFIG, HfFolder
from fourfold.spec.hf.tensors import approximation
from fourfold.spec.run import RunSpec, run_of
from fourfold.spec.train import TrainSettings
from fourfold.units import counted
from fourfold.verbs.run_requests import TrainRequest
from fourfold.verbs.weights import must_have_safetensors


def known_table(folder: TrainingFolder, request: TrainRequest) -> dict[str, Any]:
    """What the folder was trained with; refuses to resume where nothing is."""
    known = {} if request.fresh else folder.described()
    if request.resume and not known and not folder.checkpoints.exists():
        hint = "pass the --out of an earlier 'fourfold train', or omit --resume"
        raise UserError("has no training to resume", field="out", value=str(folder.root), hint=hint)
    return known


def described(
    run: Mapping[str, Any], folder: TrainingFolder, request: TrainRequest, on_event: OnEvent
) -> tuple[RunSpec, TrainSettings]:
    table = dict(run)
    plain = dict(table.pop("train", {}))
    if not (plain or "model" in table):
        hint = "a new one needs --model and --steps"
        rule, out = "has no training to continue", str(folder.root)
        raise UserError(rule, field="out", value=out, hint=hint)
    check.given("steps" in plain, "steps")
    newest, weights = None if request.fresh else folder.newest(), None
    asked = plain.get("weights")
    if newest is None:
        weights = _begin_from(table, plain, on_event)
    elif asked:
        plain["weights"] = _same_weights(asked, newest)
    spec = run_of(table)
    if weights is not None:
        weights.require(spec.model, params.tensors(spec.model, spec.batch.seq_len))
    if spec.data:  # the ranks, and the next start, may work in another folder
        spec = replace(spec, data=str(Path(spec.data).absolute()))
    return spec, codec.decode(TrainSettings, plain, "train")


def _same_weights(asked: str, newest: Checkpoint) -> str:
    """Weights are where a training begins: one under way can't be given others."""
    began = newest.state.settings.weights if newest.state.settings else ""
    where = f"is at step {newest.step} and started from {began or 'random weights'}"
    hint = "omit it, choose another --out, or start over with --fresh"
    same = str(Path(asked).absolute()) == began
    check.that(same, "weights", asked, f"contradicts this folder, which {where}", hint)
    return began


def _begin_from(
    table: dict[str, Any], settings: dict[str, Any], on_event: OnEvent
) -> HfFolder | None:
    """Complete a training's tables where it begins from a folder: the model is the folder's unless
    another is named, and the path holds wherever the ranks work."""
    if not settings.get("weights"):
        return None
    folder = Path(settings["weights"]).absolute()
    settings["weights"] = str(folder)
    must_have_safetensors("train --weights")
    weights = HfFolder(folder)
    approximated = approximation(weights.kind, weights.config)
    if approximated:
        on_event(Event(f"note: {approximated}"))
    table.setdefault("model", str(folder / CONFIG))
    return weights


def must_be_legal(spec: RunSpec, permit: Permit, *, is_here: bool) -> None:
    rule = "must be a number here; only bench supports 'auto'"
    check.that(spec.batch.micro_batch != 0, "batch.micro_batch", 0, rule, "give a number")
    if is_here:
        require_gpus(spec.device, spec.gpus, hint="--set device=cpu")
    permit.require((spec,), ranks=spec.gpus if is_here else 1)
    require_legal(spec)


def must_have_packages(settings: TrainSettings) -> None:
    """Before minutes of start-up, not after."""
    for wanted, package in ((settings.tensorboard, "tensorboard"), (settings.wandb, "wandb")):
        if wanted and importlib.util.find_spec(package) is None:
            rule = f"needs the package {package}, which is not installed"
            raise UserError(rule, field=package, hint=f"{install(package)}, or omit --{package}")


def end_killed(folder: TrainingFolder, on_event: OnEvent) -> None:
    ended = end_processes_of(folder.job)
    if ended:
        on_event(Event(f"ended {counted(ended, 'process')} of a killed training"))


def prepared(
    request: TrainRequest,
    folder: TrainingFolder,
    spec: RunSpec,
    settings: TrainSettings,
    data: str,
    on_event: OnEvent,
) -> Checkpoint | None:
    """Clear what a killed training left; the checkpoint to continue from, None to begin."""
    end_killed(folder, on_event)
    if request.fresh:
        folder.set_aside()
    if checkpoints.clear_leftovers(folder.checkpoints):
        on_event(Event("removed an unfinished checkpoint"))
    start = _newest(folder, on_event)
    if start is None:
        _may_begin(request, folder, on_event)
        return None
    must_continue(start.state, spec, data)
    if start.step >= settings.steps:
        return start
    cut = curve.cut(folder.metrics, start.step)
    if cut.unreadable:
        lines = counted(cut.unreadable, "line")
        on_event(Event(f"{lines} of the curve can't be read, and kept in {cut.aside}"))
    again = f"; {counted(cut.steps, 'later step')} done again" if cut.steps else ""
    on_event(Event(f"continuing after step {start.step}{again}"))
    for change in changes(start.state, spec, settings):
        on_event(Event(f"changed since then: {change}"))
    return start


def _newest(folder: TrainingFolder, on_event: OnEvent) -> Checkpoint | None:
    """The newest whole checkpoint. Ones with changed or missing bytes are named and kept apart, if
    there is another; what can't be read for any other reason, or contradicts, stops the start."""
    whole, torn = checkpoints.whole(folder.checkpoints), checkpoints.damaged(folder.checkpoints)
    for _, error in torn:
        if not isinstance(error, NotWholeError):
            raise error
    if torn and not whole:
        name, error = torn[-1]
        rule = f"has {counted(len(torn), 'checkpoint')}, none of them intact: {name}: {error.rule}"
        hint = "copy one again from its source; nothing was changed"
        raise UserError(rule, field="out", value=str(folder.root), hint=hint)
    points = curve.parse(folder.metrics)
    for checkpoint in whole:
        must_follow(checkpoint, points)
    for name, error in torn:
        apart = checkpoints.move_apart(folder.checkpoints / name, error.rule)
        on_event(Event(f"skipped {name}, kept as {apart.name}: {error.rule}"))
    return whole[-1] if whole else None


def _may_begin(request: TrainRequest, folder: TrainingFolder, on_event: OnEvent) -> None:
    """From nothing, unless a checkpoint is asked for."""
    hint = "omit --resume to start from scratch"
    check.that(not request.resume, "out", str(folder.root), "has no intact checkpoint", hint)
    if folder.metrics.exists() and stored.size_of(folder.metrics):
        old = folder.metrics.with_name(f"{folder.metrics.name}.old")
        renamed = folder.metrics.rename(stored.free_name(old))
        on_event(Event(f"no checkpoint yet: starting over, the curve is kept as {renamed}"))
