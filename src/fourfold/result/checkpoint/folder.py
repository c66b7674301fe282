"""The checkpoints of a folder, and which of them are whole.

A checkpoint is written into a hidden folder and renamed when every byte is on the disk; sizes and
checksums find copies cut short and disks that forget. What is not whole is renamed; it stays."""

from __future__ import annotations

import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.checkpoint import index
from fourfold.result.checkpoint.index import INDEX_FILE, Index
from fourfold.result.files import stored
from fourfold.result.files.stored import NotWholeError, UnreadableError
from fourfold.spec import RunSpec, check, codec, texts
from fourfold.spec.train import TrainSettings
from fourfold.units import counted

# safetensors' layout, an index and a sealed state; 1 was never released.
FORMAT = 2
STATE_FILE = "state.json"
_SIZE, _SUM = re.compile(r"[0-9]{1,18}\Z"), re.compile(r"[0-9a-f]{8}\Z")
_MOST_STEPS, _LARGEST_SCALAR = 10**12, 2.0**62


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """All of a training that is not a tensor. `step`: steps done; `updates`: those that changed
    the weights, `skipped` the others (an overflow in fp16). `data` is the checksum of the tokens,
    '' for synthetic ones. `scalars` are numbers by name, as texts; `sums` the crc32 of each file.
    """

    step: int
    updates: int
    sequences: int
    spec: RunSpec
    settings: TrainSettings | None = None
    skipped: int = 0
    data: str = ""
    scalars: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    sums: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    saved_at: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        rule = f"was written by another fourfold (this one reads format {FORMAT})"
        check.that(self.format == FORMAT, "format", self.format, rule, "update fourfold")
        check.whole(0, _MOST_STEPS, step=self.step, updates=self.updates, skipped=self.skipped)
        rule = "must be a number from 0 to 2^62"
        for name, text in self.scalars:
            check.that(0 <= _number(text) <= _LARGEST_SCALAR, name, text, rule)
        for field, named, form in (("files", self.files, _SIZE), ("sums", self.sums, _SUM)):
            for name, text in named:
                check.that(form.fullmatch(text), f"{field}.{name}", None, "is malformed")


def _number(text: str) -> float:
    """NaN where it is none: no comparison holds."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def disagreement(state: CheckpointState, named: int) -> str:
    """What of a state can't be true; `named`: the step in the name of its folder."""
    step, seen = state.step, state.spec.batch.sequences_before(state.step)
    if step != named:
        return f"step {step} in {STATE_FILE}, {named} in the folder's name"
    if state.updates + state.skipped != step:
        done = f"{counted(state.updates, 'update')} and {state.skipped} skipped"
        return f"{done} make not {counted(step, 'step')}"
    if state.sequences != seen:
        return f"{counted(state.sequences, 'sequence')}, where {counted(step, 'step')} have {seen}"
    if dict(state.files).keys() != dict(state.sums).keys():
        return "not every file has a size and a checksum"
    return ""


LATEST_FILE = "latest"
_NAME = re.compile(r"step-([0-9]{8,18})\Z")
# Unfinished or about to be deleted; never read, removed by the next start.
_HIDDEN = (".saving-", ".pruned-")
_DAMAGED, _REASON_FILE = "damaged-", "damaged.txt"
_READ_BYTES, _MAX_STATE_BYTES = 2**22, 2**26


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    state: CheckpointState

    @property
    def step(self) -> int:
        return self.state.step


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def saving_folder(root: Path, step: int) -> Path:
    return root / f"{_HIDDEN[0]}{name_of(step)}"


def read(folder: Path) -> Checkpoint:
    """A checkpoint by its folder, with a reason when it is none or not whole."""
    try:
        state = _state(stored.read_bytes(folder / STATE_FILE, _MAX_STATE_BYTES))
        checkpoint = Checkpoint(folder, state)
        named = _NAME.fullmatch(folder.name)
        contradiction = disagreement(state, int(named[1]) if named else state.step)
        if contradiction:
            hint = "copy it again from its source, or move it away to resume from the one before"
            raise UnreadableError(f"it contradicts itself: {contradiction}", hint=hint)
        real = real_sizes(checkpoint)
        for name, size in state.files:
            if str(real[name]) != size:
                raise NotWholeError(f"its file {name} has {real[name]:,} bytes, not {size}")
    except UserError as error:
        raise of_checkpoint(error, folder) from None
    return checkpoint


def of_checkpoint(error: UserError, folder: Path) -> UserError:
    """The same trouble, said of the checkpoint."""
    rule = error.rule
    if error.field == "file" and str(error.value) != str(folder):
        rule = f"its file {Path(str(error.value)).name} {rule}"
    elif error.field not in ("", "file", "checkpoint"):
        rule = f"{rule} ({error.field}={error.value!r})"
    if rule.startswith(("it ", "its ")):
        rule = f"{'is damaged' if isinstance(error, NotWholeError) else 'cannot be used'}: {rule}"
    hint = error.hint or "use another checkpoint, or copy this one again"
    return type(error)(rule, field="checkpoint", value=str(folder), hint=hint)


def _state(content: bytes) -> CheckpointState:
    text = stored.unseal(content, STATE_FILE)
    try:
        plain = texts.parse_json(text)
    except UserError:
        raise stored.changed(STATE_FILE) from None
    if not isinstance(plain, dict) or "crc32" in plain:
        raise stored.changed(STATE_FILE)
    try:
        return codec.load(CheckpointState, plain)
    except UserError as error:
        hint = "update fourfold, or move it away to resume from the one before"
        rule = f"its {STATE_FILE} cannot be parsed ({error})"
        raise UnreadableError(rule, hint=hint) from None


def real_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """The sizes of its files as they are; each is a regular file of the folder itself."""
    for name, _ in checkpoint.state.files:
        if not index.is_name(name) or name == STATE_FILE:
            raise UnreadableError(f"it names a file {name[:80]!r}, which is not in its folder")
    return {name: stored.size_of(checkpoint.folder / name) for name, _ in checkpoint.state.files}


def read_index(checkpoint: Checkpoint) -> Index:
    """Where its tensors are, once that is seen to be sound."""
    try:
        sizes, sums = real_sizes(checkpoint), dict(checkpoint.state.sums)
        if INDEX_FILE not in sizes:
            raise NotWholeError(f"it has no {INDEX_FILE}")
        content = stored.read_bytes(checkpoint.folder / INDEX_FILE, index.MAX_INDEX_BYTES)
        if sums[INDEX_FILE] != stored.digits(zlib.crc32(content)):
            raise stored.changed(INDEX_FILE)
        made = index.loads(content, sizes)
        for file, entry in made.files.items():
            if sums.get(file) != entry.crc32:
                raise index.refused(f"the checksum of {file} is another in {STATE_FILE}")
        return made
    except UserError as error:
        raise of_checkpoint(error, checkpoint.folder) from None


def file_sum(path: Path) -> str:
    """The crc32 of a file, as eight digits."""
    value = 0
    with stored.opened(path) as (stream, size):
        while size > 0 and (part := stream.read(min(size, _READ_BYTES))):
            value, size = zlib.crc32(part, value), size - len(part)
    return stored.digits(value)


def move_apart(folder: Path, reason: str) -> Path:
    """Rename what is not whole, so that nothing counts it among the others or writes over it."""
    apart = stored.free_name(folder.with_name(f"{_DAMAGED}{folder.name}"))
    os.rename(folder, apart)
    files.write_text(apart / _REASON_FILE, f"{reason}\n", own=True)
    return apart


def set_apart(root: Path) -> dict[str, str]:
    """Names of those, and why."""
    reasons = {}
    for path in sorted(root.glob(f"{_DAMAGED}*/{_REASON_FILE}")):
        try:
            reason = stored.read_bytes(path, _READ_BYTES)
        except UserError as error:
            reason = error.rule.encode()
        reasons[path.parent.name] = reason.decode(errors="replace").strip()
    return reasons


def whole(root: Path) -> list[Checkpoint]:
    """Checkpoints that can be loaded, oldest first; what is torn is left out."""
    return [checkpoint for checkpoint in _all(root) if isinstance(checkpoint, Checkpoint)]


def damaged(root: Path) -> list[tuple[str, UserError]]:
    """Names of the others, and what is wrong with them."""
    return [broken for broken in _all(root) if not isinstance(broken, Checkpoint)]


def _all(root: Path) -> Iterator[Checkpoint | tuple[str, UserError]]:
    named = (path for path in root.glob("step-*") if _NAME.fullmatch(path.name))
    for path in sorted(named, key=lambda p: (len(p.name), p.name)):
        try:
            yield read(path)
        except UserError as error:
            yield path.name, error


def newest(root: Path) -> Checkpoint | None:
    return next(reversed(whole(root)), None)


def clear_leftovers(root: Path) -> int:
    """Remove what killed saves and prunings left; how many there were."""
    left = [path for prefix in _HIDDEN for path in root.glob(f"{prefix}*")]
    for path in left:
        _remove(path)
    return len(left)


def _remove(path: Path) -> None:
    """A folder with what is in it; of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish(
    root: Path, state: CheckpointState, *, keep: int, sums: Mapping[str, str] | None = None
) -> Path:
    """Give a written folder its name, point `latest` at it, remove old ones (`keep` 0: none).
    `sums`: of files whose writers have summed them; the others are summed here."""
    made, known = saving_folder(root, state.step), sums or {}
    paths = sorted(made.iterdir())
    sizes = {path.name: str(path.stat().st_size) for path in paths}
    all_sums = {path.name: known.get(path.name) or file_sum(path) for path in paths}
    whole_state = replace(state, files=tuple(sizes.items()), sums=tuple(all_sums.items()))
    files.write_bytes(made / STATE_FILE, stored.seal(codec.to_json(whole_state)), own=True)
    files.sync(made)
    final = root / name_of(state.step)
    _make_room(final)
    os.rename(made, final)
    files.sync(root)
    files.write_bytes(root / LATEST_FILE, f"{final.name}\n".encode(), own=True)
    for old in whole(root)[:-keep] if keep else ():  # torn ones do not count, and stay
        _discard(old.folder)
    return final


def _make_room(final: Path) -> None:
    """The same step again, after going back to an earlier one: a whole one goes, others stay."""
    if not os.path.lexists(final):
        return
    try:
        _discard(read(final).folder)
    except UserError as error:
        if final.is_dir():
            move_apart(final, error.rule)
        else:
            os.rename(final, stored.free_name(final.with_name(f"{_DAMAGED}{final.name}")))


def _discard(folder: Path) -> None:
    """Renamed first: a kill halfway leaves no folder that looks like a checkpoint."""
    hidden = folder.with_name(f"{_HIDDEN[1]}{folder.name}")
    _remove(hidden)
    os.rename(folder, hidden)
    _remove(hidden)
