"""What may be said to train, and what is meant: flags over a spec over the folder's own run."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from fourfold.commands import flags
from fourfold.commands.train_weights import begin_from
from fourfold.errors import UserError
from fourfold.result.checkpoint.folder import Checkpoint
from fourfold.result.files.training_folder import TrainingFolder
from fourfold.spec import AXES, codec
from fourfold.spec.batch import Ramp
from fourfold.spec.run import RunSpec
from fourfold.spec.train import LrSchedule, TrainSettings

# flag -> (field of TrainSettings, type, help); a flag mirrors its field.
_FLAGS: dict[str, tuple[str, Any, str]] = {
    "--steps": ("steps", flags.count, "steps in all, those before a resume included"),
    "--lr": ("lr", float, "highest learning rate (3e-4)"),
    "--min-lr": ("min_lr", float, "learning rate at the end of the decay (0)"),
    "--warmup-steps": ("warmup_steps", flags.count, "steps up to the highest rate (0)"),
    "--lr-schedule": ("lr_schedule", str, "cosine (default), linear, constant or wsd"),
    "--save-every": (
        "save_every",
        flags.count,
        "steps between checkpoints (100); 0: only at the end",
    ),
    "--keep": ("keep", flags.count, "checkpoints to keep (2); 0: all"),
    "--log-every": ("log_every", flags.count, "steps between looks at the loss (10)"),
    "--weights": ("weights", str, "begin from these: a Hugging Face folder (its --model too)"),
    "--wandb": ("wandb", str, "also log to this Weights & Biases project"),
}


def add(parser: argparse.ArgumentParser) -> None:
    flags.add_run(parser)
    flags.add_permit(parser)
    group = parser.add_argument_group("training (other fields by --set train.beta2=0.95)")
    group.add_argument("--out", metavar="DIR", help="the training's folder")
    group.add_argument("--data", metavar="NAME", help="a token file (default: synthetic tokens)")
    group.add_argument(
        "--ramp", metavar="START,INCREMENT,SAMPLES", help="batch ramp-up, in sequences"
    )
    for flag, (_, kind, text) in _FLAGS.items():
        name = "X" if kind is str else "N"
        choices = get_args(LrSchedule) if flag == "--lr-schedule" else None
        group.add_argument(flag, type=kind, metavar=name, choices=choices, help=text)
    group.add_argument(
        "--async",
        dest="async_save",
        action=argparse.BooleanOptionalAction,
        help="write checkpoints while training goes on (default)",
    )
    group.add_argument(
        "--tensorboard",
        action=argparse.BooleanOptionalAction,
        help="also write TensorBoard events",
    )
    which = group.add_mutually_exclusive_group()
    which.add_argument("--resume", action="store_true", help="refuse to start from nothing")
    which.add_argument("--fresh", action="store_true", help="forget what the folder holds")
    group.add_argument("--show", metavar="DIR", help="only say what this folder holds")
    group.add_argument("--plot", metavar="FILE", help="draw the loss curve: .png, .svg or .pdf")


def described(args: argparse.Namespace, folder: TrainingFolder) -> tuple[RunSpec, TrainSettings]:
    """What to train: a spec file or, without one, what the folder was trained with; then flags."""
    known = {} if args.spec or args.fresh else folder.described()
    if args.resume and not known and not folder.checkpoints.exists():
        raise UserError(
            "holds no training to resume",
            field="out",
            value=str(folder.root),
            hint="name the --out of an earlier 'fourfold train', or leave --resume out",
        )
    if any(getattr(args, axis) is not None for axis in ("gpus", *AXES)):
        known.pop("layout", None)  # a new layout is asked for, not a change of one axis
    table = flags.run_table(args, known)
    if args.data:
        table["data"] = args.data
    if args.ramp is not None:
        flags.put(table, "batch.ramp", codec.encode(Ramp.parse(args.ramp)))
    plain = table.pop("train", {})
    if not isinstance(plain, dict):
        raise UserError("must be a table", field="train", value=plain)
    for flag, (field, _, _) in _FLAGS.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None:
            plain[field] = value
    for field in ("async_save", "tensorboard"):
        if getattr(args, field) is not None:
            plain[field] = getattr(args, field)
    if "steps" not in plain:
        raise UserError("is missing", field="steps", hint="add --steps N")
    newest = None if args.fresh else folder.newest()
    if newest is None:
        begin_from(table, plain)
    elif args.weights:
        plain["weights"] = _same_weights(args.weights, newest)
    if "model" not in table:
        raise UserError("is missing", field="model", hint="add --model NAME ('fourfold models')")
    spec = codec.load(RunSpec, table)
    if spec.data:  # the ranks, and the next start, may work in another folder
        spec = replace(spec, data=str(Path(spec.data).absolute()))
    return spec, codec.decode(TrainSettings, plain, "train")


def _same_weights(asked: str, newest: Checkpoint) -> str:
    """Weights are where a training begins: one under way can't be given others."""
    began = newest.state.settings.weights if newest.state.settings else ""
    if str(Path(asked).absolute()) != began:
        raise UserError(
            f"the training in this folder is at step {newest.step} and began from "
            f"{began or 'random weights'}",
            field="weights",
            value=asked,
            hint="leave --weights out, name another --out, or start over with --fresh",
        )
    return began
