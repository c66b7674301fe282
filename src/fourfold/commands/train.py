"""Train a model: the engine with data, a learning-rate schedule, checkpoints and a kept loss curve.

A folder that has checkpoints is continued where it stands, on any layout and world that computes
the same training. SIGTERM, SIGUSR1 and Ctrl-C save after the step under way and end with status 75;
a second SIGTERM or Ctrl-C ends at once. --show prints what a folder holds without training.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from fourfold import files
from fourfold.commands import flags, progress, train_flags
from fourfold.commands.train_resume import end_killed, prepared
from fourfold.cost.count.flops import DEFAULT, FlopsQuery, convention
from fourfold.errors import UserError
from fourfold.launch.devices import require_gpus
from fourfold.launch.folder import exclusive
from fourfold.launch.local import run_job
from fourfold.launch.permit import Permit
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import Checkpoint
from fourfold.result.files import curve
from fourfold.result.files.training_folder import TrainingFolder
from fourfold.result.job import JobReport, answer_file
from fourfold.search.legal import require_legal
from fourfold.show import train as shown
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.job import Job
from fourfold.spec.run import RunSpec
from fourfold.spec.tokens import TokenInfo, read_info, require_fit
from fourfold.spec.train import TrainSettings
from fourfold.units import show_seconds

EXAMPLES = """\
examples:
  fourfold train --model llama-tiny --gpus 1 --seq-len 128 --global-batch 16 --precision fp32 \\
      --steps 300 --lr 1e-3 --warmup-steps 20 --out trained
  fourfold train --out trained --gpus 4 --tp 2            (continue it on another layout)
  fourfold train --show trained --plot loss.png

exit status: 0 all steps done; 75 saved and ended early on request: run it again to continue;
1 the training failed, the last checkpoint is whole; 2 bad request; 130 ended at once.
"""
STOPPED_EXIT = 75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train_flags.add(parser)
    flags.add_format(parser)
    flags.add_convention(parser)


def run(args: argparse.Namespace) -> int:
    if args.plot:
        shown.must_be_picture(args.plot)
    if args.show:
        return _show_only(args)
    if not args.out:
        raise UserError("is missing", field="out", hint="add --out DIR, the training's folder")
    folder = TrainingFolder(args.out)
    folder.must_be_plain()
    if folder.aside.exists():  # a --fresh was killed
        with folder.locked(), exclusive(folder.root):
            end_killed(folder)
            _settle(folder)
    spec, settings = train_flags.described(args, folder)
    permit = flags.permit(args)
    _must_be_legal(spec, permit)
    _must_have_packages(settings)
    data = _data(spec)
    with folder.locked(), exclusive(folder.root):
        try:
            start = prepared(args, folder, spec, settings, data.sha256 if data else "")
            if start is not None and start.step >= settings.steps:
                done = f"{start.step} steps are done, {settings.steps} are asked for"
                print(done, file=sys.stderr)
                return _shown(args, folder, settings, {"outcome": "ok"})
            folder.describe(spec, settings)
            report = _trained(folder, spec, settings, start, permit)
            return _answered(args, folder, settings, report)
        finally:
            _settle(folder)


def _data(spec: RunSpec) -> TokenInfo | None:
    """The token file, once it is seen to fit the model; None for synthetic tokens."""
    if not spec.data:
        return None
    info = read_info(spec.data)
    require_fit(info, name=spec.data, vocab=spec.model.vocab, seq_len=spec.batch.seq_len)
    return info


def _must_be_legal(spec: RunSpec, permit: Permit) -> None:
    if spec.batch.micro_batch == 0:
        raise UserError(
            "'auto' is chosen by bench", field="batch.micro_batch", value=0, hint="give a number"
        )
    require_gpus(spec.device, spec.gpus, hint="--set device=cpu")
    permit.require((spec,), ranks=spec.gpus)
    require_legal(spec)


def _must_have_packages(settings: TrainSettings) -> None:
    """Before minutes of start-up, not after."""
    for wanted, package in ((settings.tensorboard, "tensorboard"), (settings.wandb, "wandb")):
        if wanted and importlib.util.find_spec(package) is None:
            raise UserError(
                f"needs the package {package}, which is not installed",
                field=package,
                hint=f"pip install {package}, or leave --{package} out",
            )


def _settle(folder: TrainingFolder) -> None:
    said = folder.settle()
    if said:
        print(said, file=sys.stderr)


def _trained(
    folder: TrainingFolder,
    spec: RunSpec,
    settings: TrainSettings,
    start: Checkpoint | None,
    permit: Permit,
) -> JobReport:
    options = {"out": str(folder.root), "load": start.folder.name if start else ""}
    job = Job(job="train", specs=(spec,), options=tuple(options.items()), train=settings)
    apart = checkpoints.kept_apart(folder.checkpoints)
    report = run_job(job, folder.job, progress=_progress(folder, settings), permit=permit)
    progress.end_line()
    for name, reason in checkpoints.kept_apart(folder.checkpoints).items():
        if apart.get(name) != reason:
            said = f"passed over a checkpoint, kept as {name}, for the one before: {reason}"
            print(said, file=sys.stderr)
    return report


def _progress(folder: TrainingFolder, settings: TrainSettings) -> Callable[[str], None]:
    """Where the training stands, from its own curve; before the first step, what the ranks say."""
    show = progress.progress_lines()

    def say(text: str) -> None:
        if folder.aside.exists() and folder.newest() is not None:
            folder.settle()
        point = curve.last(folder.metrics)
        if point is None or "steps done" not in text or text.startswith("0 steps"):
            show(text)
            return
        left_s = (settings.steps - point.step) * point.step_s
        left = f", {show_seconds(left_s)} left" if left_s else ", saving"
        show(
            f"step {point.step} of {settings.steps}, loss {point.loss:.4f}, lr {point.lr:.3g}, "
            f"{point.tokens_per_s:,.0f} tokens/s{left}"
        )

    return say


def _answered(
    args: argparse.Namespace, folder: TrainingFolder, settings: TrainSettings, report: JobReport
) -> int:
    plain: dict[str, Any] = {"outcome": report.outcome}
    if report.failure is not None:
        said = report.failure
        plain["failure"] = {
            "rank": said.rank, "stage": said.stage, "phase": said.phase, "message": said.message,
        }  # fmt: skip
        first_line = said.message.partition("\n")[0]
        print(f"{report.outcome}: {said.who}: {first_line}", file=sys.stderr)
        print(f"logs of the ranks: {folder.job}", file=sys.stderr)
        _shown(args, folder, settings, plain)
        return 1
    stopped = _stopped(folder)
    if stopped:
        plain |= {"outcome": "stopped", "note": "as asked; the same command continues"}
    _shown(args, folder, settings, plain)
    return STOPPED_EXIT if stopped else 0


def _stopped(folder: TrainingFolder) -> bool:
    answer = codec.parse_json(files.read_text(answer_file(folder.job, 0), field="answer"))
    assert isinstance(answer, dict)
    return bool(answer["stopped"])


def _show_only(args: argparse.Namespace) -> int:
    folder = TrainingFolder(args.show)
    folder.must_be_plain()
    table = folder.described()
    if not table:
        raise UserError(
            "is not the folder of a training (it has no train.toml)",
            field="show",
            value=args.show,
            hint="name the --out of a 'fourfold train'",
        )
    settings = codec.decode(TrainSettings, table.get("train", {}), "train")
    return _shown(args, folder, settings, {"outcome": "shown"})


def _unigram_nats(folder: TrainingFolder) -> float | None:
    """What a model that knows only frequencies would reach; None without a readable token file."""
    name = folder.described().get("data")
    try:
        return read_info(name).unigram_nats if isinstance(name, str) and name else None
    except UserError:  # it has moved since
        return None


def _count_by(rule: str, folder: TrainingFolder, plain: dict[str, Any]) -> None:
    """MFU of the curve, which is kept by the default convention, by the asked one."""
    asked = convention(rule)
    plain["convention"] = asked.id
    if plain.get("mfu_pct") is None or asked.id == DEFAULT:
        return
    table = {name: part for name, part in folder.described().items() if name != "train"}
    spec = codec.load(RunSpec, table)
    ask = FlopsQuery.of(
        model=spec.model, seq_len=spec.batch.seq_len, layout=spec.layout, policy=spec.policy
    )
    plain["mfu_pct"] *= asked.count(ask).model / convention(DEFAULT).count(ask).model


def _shown(
    args: argparse.Namespace,
    folder: TrainingFolder,
    settings: TrainSettings,
    plain: dict[str, Any],
) -> int:
    read = curve.parse(folder.metrics)
    points, newest = read.points, folder.newest()
    if read.bad:
        lines = "a line" if len(read.bad) == 1 else f"{len(read.bad)} lines"
        print(f"left out {lines} of {folder.metrics} that can't be read", file=sys.stderr)
    for name, error in checkpoints.torn(folder.checkpoints):
        print(f"passed over {name}: {error.rule}", file=sys.stderr)
    plain = {
        **plain,
        "folder": str(folder.root),
        "steps": settings.steps,
        "checkpoint": newest.folder.name if newest else None,
        "unigram_nats": _unigram_nats(folder),
        **shown.facts(points),
    }
    _count_by(args.convention, folder, plain)
    if plain["outcome"] == "shown":
        done = newest is not None and newest.step >= settings.steps
        plain["outcome"] = "done" if done else "not finished"
    if args.plot:
        title = f"{folder.root.name}: {len(points):,} steps"
        files.write_bytes(args.plot, shown.picture(points, title, args.plot), field="plot")
    if args.format == "json":
        print(json_text(plain))
        return 0
    print(render(["quantity", "value", "note"], shown.rows(plain), args.format))
    if args.format != "csv":
        print(f"\nkept in {folder.root}")
    return 0
