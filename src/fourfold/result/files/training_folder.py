"""The folder of a training, and whether it may be continued as asked.

One training at a time may use it. What --fresh replaces waits in .before-fresh/ until the new
training has a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.escape import toml_text
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import Checkpoint, CheckpointState
from fourfold.result.files import curve, stored
from fourfold.result.files.curve import Curve
from fourfold.spec import RunSpec, check, codec, texts
from fourfold.spec.train import TrainSettings, lr_at
from fourfold.spec.words import WIDER

# Of the settings, what may change between starts without a word.
_FREE_SETTINGS = (
    "steps",
    "save_every",
    "keep",
    "async_save",
    "log_every",
    "tensorboard",
    "wandb",
    "weights",
)
# What --fresh replaces; the checkpoints are the last to come back, so that they prove all is back.
_REPLACED = (curve.METRICS_FILE, "train.toml", "tensorboard", "wandb", "wandb-id", "checkpoints")
_MAX_DESCRIPTION_BYTES, _MAX_HOLDER_BYTES = 2**24, 2**10


class TrainingFolder:
    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.checkpoints = self.root / "checkpoints"
        self.metrics = self.root / curve.METRICS_FILE
        self.job = self.root / "job"
        self.description = self.root / "train.toml"
        self.aside = self.root / ".before-fresh"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held until the process ends, however it ends: a lock on the file itself, so that another
        way to the same folder meets it too."""
        path = self.root / "lock"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = files.try_lock(path)
        except OSError as error:
            rule = f"cannot be used ({error.strerror})"
            raise self._refused(rule, "choose a writable folder") from None
        if lock is None:
            holder = stored.read_bytes(path, _MAX_HOLDER_BYTES).decode(errors="replace").strip()
            rule = f"is in use by another training run ({holder})"
            raise self._refused(rule, "wait for it, or choose another folder")
        try:
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
            yield
        finally:
            lock.release()

    def _refused(self, rule: str, hint: str) -> UserError:
        return UserError(rule, field="out", value=str(self.root), hint=hint)

    def describe(self, spec: RunSpec, settings: TrainSettings) -> None:
        plain = codec.dump(spec) | {"train": codec.encode(settings)}
        for name in ("steps", "warmup"):  # of a measurement; a training has its own
            del plain[name]
        files.write_bytes(self.description, toml_text(plain).encode(), own=True)

    def described(self) -> dict[str, Any]:
        """The table of train.toml; empty without one."""
        if not self.description.exists():
            return {}
        content = stored.read_bytes(self.description, _MAX_DESCRIPTION_BYTES)
        try:
            return texts.parse_toml(content.decode())
        except ValueError as error:  # a UserError is one
            rule = error.rule if isinstance(error, UserError) else "is not UTF-8 text"
            hint = "fix it, or describe the run again with --spec or flags"
            raise UserError(rule, value=str(self.description), hint=hint) from None

    def set_aside(self) -> None:
        """Make room for another training; what is here goes when that has a checkpoint."""
        if not (self.metrics.exists() or any(self.checkpoints.iterdir())):
            return
        self.aside.mkdir()
        for name in reversed(_REPLACED):
            if name == self.description.name:  # the next start reads it
                if self.description.exists():
                    shutil.copy2(self.description, self.aside / name)
            elif (self.root / name).exists():
                os.rename(self.root / name, self.aside / name)
        self.checkpoints.mkdir()

    def finish_fresh(self) -> str:
        """Forget what --fresh has replaced where the new training has a checkpoint; bring it back
        where it has none. What was done, in words."""
        if not self.aside.is_dir():
            return ""
        if self.newest() is not None:
            shutil.rmtree(self.aside, ignore_errors=True)
            return ""
        for name in _REPLACED:
            old, new = self.aside / name, self.root / name
            if not old.exists():
                continue
            if new == self.metrics and new.exists():
                os.replace(new, self.root / f"{name}.failed")
            elif new.is_dir():
                shutil.rmtree(new)
            os.rename(old, new)
        shutil.rmtree(self.aside)
        return f"--fresh saved no checkpoint: the old content of {self.root} is restored"

    def newest(self) -> Checkpoint | None:
        return checkpoints.newest(self.checkpoints)


def must_continue(state: CheckpointState, spec: RunSpec, data: str = "") -> None:
    """Refuse a run that would train something else than the checkpoint did; `data` is the checksum
    of its tokens, whose file may have moved."""
    hint = "keep it, choose another --out, or start over with --fresh"
    for field, (old, new) in _identity(state.spec, spec).items():
        rule = f"contradicts the checkpoints in this folder, which were trained with {old}"
        check.that(old == new, field, new, rule, hint)
    old, new = (one.data or "synthetic tokens" for one in (state.spec, spec))
    rule = f"has other tokens than the checkpoints in this folder were trained with: {old}"
    check.that(state.data == data, "data", new, rule, hint)
    for kind in ("param", "optimizer"):
        old, new = getattr(state.spec.policy.dtypes, kind), getattr(spec.policy.dtypes, kind)
        rule = f"is narrower than the checkpoint's {old} and would lose digits"
        hint, holds_all = f"keep {old}, or use a wider dtype", (old, *WIDER.get(old, ()))
        check.that(new in holds_all, f"policy.{kind}_dtype", new, rule, hint)


def must_follow(checkpoint: Checkpoint, curve_read: Curve) -> None:
    """Refuse a checkpoint that the curve contradicts: one of them is not of this training, or was
    changed. Steps without a readable line prove nothing."""
    why = contradiction(checkpoint.state, curve_read)
    belongs = f"restore the {curve.METRICS_FILE} or checkpoint that belongs here"
    hint = f"{belongs}, or move the wrong one out of the folder"
    rule = f"contradicts the loss curve: {why}"
    check.that(not why, "checkpoint", str(checkpoint.folder), rule, hint)


def contradiction(state: CheckpointState, curve_read: Curve) -> str:
    points = [point for point in curve_read.points if point.step <= state.step]
    skipped = sum(point.grad_norm is None for point in points)
    unknown, lacks = state.step - len(points), state.step - state.updates
    if not curve_read.points:
        return ""
    if not curve_read.ends_bad and curve_read.points[-1].step < state.step:
        return f"step {state.step}, where the curve ends with step {curve_read.points[-1].step}"
    if not skipped <= lacks <= skipped + unknown:
        return f"{state.updates} updates, where {skipped} of {state.step} steps were skipped"
    last = points[-1] if points else None
    seen = state.spec.batch.sequences_before(last.step) if last else 0
    if last and last.sequences != seen:
        saw = f"its step {last.step} has seen {last.sequences} sequences"
        return f"{saw} in the curve, {seen} in the checkpoint"
    return ""


def _identity(old: RunSpec, new: RunSpec) -> dict[str, tuple[Any, Any]]:
    """What decides the training, whatever the layout: field -> (checkpoint's, asked)."""
    differing: dict[str, tuple[Any, Any]] = {}
    one, other = codec.encode(old.model), codec.encode(new.model)
    for name in sorted({*one, *other} - {"name"}):
        differing[f"model.{name}"] = (one.get(name), other.get(name))
    for name in ("seq_len", "global_batch"):
        differing[f"batch.{name}"] = (getattr(old.batch, name), getattr(new.batch, name))
    differing["batch.ramp"] = (str(old.batch.ramp or "none"), str(new.batch.ramp or "none"))
    differing["seed"] = (old.seed, new.seed)
    return differing


def changes(state: CheckpointState, spec: RunSpec, settings: TrainSettings) -> list[str]:
    """What differs from the checkpoint's run and matters to the curve, in words."""
    differing = []
    if str(state.spec.layout) != str(spec.layout):
        differing.append(f"layout {state.spec.layout} -> {spec.layout}")
    if state.spec.policy.precision != spec.policy.precision:
        differing.append(f"precision {state.spec.policy.precision} -> {spec.policy.precision}")
    if state.settings is not None:
        old, new = codec.encode(state.settings), codec.encode(settings)
        differing += [
            f"{name} {old.get(name)} -> {new.get(name)}"
            for name in new
            if name not in _FREE_SETTINGS and old.get(name) != new.get(name)
        ]
        was, is_now = (lr_at(each, state.step) for each in (state.settings, settings))
        if state.settings.steps != settings.steps and was != is_now:
            stretched = f"steps {state.settings.steps} -> {settings.steps}"
            lrs = f"step {state.step + 1} has lr {is_now:.3g}, not {was:.3g}"
            differing.append(f"{stretched}: {lrs}")
    return differing
