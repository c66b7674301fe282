"""Where does a training go on? The newest whole checkpoint, what is said of the others, and the
curve up to it."""

from __future__ import annotations

import argparse
import sys

from fourfold.errors import UserError
from fourfold.launch.folder import end_processes_of
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import Checkpoint
from fourfold.result.files import curve, inside
from fourfold.result.files.inside import NotWholeError
from fourfold.result.files.training_folder import (
    TrainingFolder,
    changes,
    must_continue,
    must_follow,
)
from fourfold.spec.run import RunSpec
from fourfold.spec.train import TrainSettings


def end_killed(folder: TrainingFolder) -> None:
    ended = end_processes_of(folder.job)
    if ended:
        print(f"ended {ended} processes of a killed training", file=sys.stderr)


def prepared(
    args: argparse.Namespace,
    folder: TrainingFolder,
    spec: RunSpec,
    settings: TrainSettings,
    data: str,
) -> Checkpoint | None:
    """Clear what a killed training left; the checkpoint to continue from, None to begin."""
    end_killed(folder)
    if args.fresh:
        folder.set_aside()
    if checkpoints.clear_leftovers(folder.checkpoints):
        print("removed an unfinished checkpoint", file=sys.stderr)
    start = _newest(folder)
    if start is None:
        _may_begin(args, folder)
        return None
    must_continue(start.state, spec, data)
    if start.step >= settings.steps:
        return start
    cut = curve.cut(folder.metrics, start.step)
    if cut.unreadable:
        lines = "a line" if cut.unreadable == 1 else f"{cut.unreadable} lines"
        print(f"{lines} of the curve can't be read, and kept in {cut.aside}", file=sys.stderr)
    again = f"; {cut.steps} later steps are done again" if cut.steps else ""
    print(f"continuing after step {start.step}{again}", file=sys.stderr)
    for change in changes(start.state, spec, settings):
        print(f"changed since then: {change}", file=sys.stderr)
    return start


def _newest(folder: TrainingFolder) -> Checkpoint | None:
    """The newest whole checkpoint. Ones with changed or missing bytes are named and kept apart, if
    there is another; what can't be read for any other reason, or contradicts, stops the start."""
    whole, torn = checkpoints.whole(folder.checkpoints), checkpoints.torn(folder.checkpoints)
    for _, error in torn:
        if not isinstance(error, NotWholeError):
            raise error
    if torn and not whole:
        raise UserError(
            f"has checkpoints, but none of the {len(torn)} is whole: "
            f"{torn[-1][0]}: {torn[-1][1].rule}",
            field="out",
            value=str(folder.root),
            hint="copy one again from where it was written; nothing was changed",
        )
    points = curve.parse(folder.metrics)
    for found in whole:
        must_follow(found, points)
    for name, error in torn:
        kept = checkpoints.keep_apart(folder.checkpoints / name, error.rule)
        print(f"passed over {name}, kept as {kept.name}: {error.rule}", file=sys.stderr)
    return whole[-1] if whole else None


def _may_begin(args: argparse.Namespace, folder: TrainingFolder) -> None:
    """From nothing, unless a checkpoint is asked for."""
    if args.resume:
        raise UserError(
            "holds no whole checkpoint",
            field="out",
            value=str(folder.root),
            hint="leave --resume out to start from nothing",
        )
    if inside.kind_of(folder.metrics) and inside.size_of(folder.metrics):
        old = folder.metrics.with_name(f"{folder.metrics.name}.old")
        kept = folder.metrics.rename(inside.free_name(old))
        print(f"no checkpoint yet: starting over, the curve is kept as {kept}", file=sys.stderr)
