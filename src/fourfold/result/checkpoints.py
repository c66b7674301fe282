"""Which checkpoints does a folder hold, and which of them are whole?

A checkpoint is written into a hidden folder and renamed when every byte is on the disk, so one that
has its name is whole; sizes and checksums of its files are kept all the same, for copies that were
cut short and for disks that forget.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.train import TrainSettings

FORMAT = 1
STATE_FILE = "state.json"
LATEST_FILE = "latest"
_NAME = re.compile(r"step-([0-9]{8,})\Z")
# Unfinished or about to be deleted; never read, removed by the next start.
_HIDDEN = (".saving-", ".pruned-")
_DAMAGED = "damaged-"
_REASON_FILE = "damaged.txt"
_READ_BYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """All of a training that is not a tensor. `step`: steps done; `updates`: those that changed
    the weights (an overflow in fp16 skips one). `data` is the checksum of the tokens, '' for
    synthetic ones. `scalars` are numbers by name, as texts; `sums` the crc32 of each file."""

    step: int
    updates: int
    sequences: int
    spec: RunSpec
    settings: TrainSettings | None = None
    data: str = ""
    scalars: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    sums: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    saved_at: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format > FORMAT:
            raise UserError(
                f"was written by a newer fourfold (this one reads up to {FORMAT})",
                field="format",
                value=self.format,
                way_out="update fourfold",
            )


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


class ForeignError(UserError):
    """A checkpoint that is no torn one, but of a fourfold that knows more than this one."""


def read(folder: Path) -> Checkpoint:
    """A checkpoint by its folder, with a reason when it is none or not whole."""
    plain = codec.parse_json(files.read_text(folder / STATE_FILE, field="checkpoint"))
    try:
        state = codec.load(CheckpointState, plain)
    except UserError as error:
        raise ForeignError(
            f"can't be understood ({error})",
            field="checkpoint",
            value=str(folder),
            way_out="update fourfold, or move it away to continue from the one before",
        ) from None
    for name, size in state.files:
        path = folder / name
        if not path.is_file() or path.stat().st_size != int(size):
            raise UserError(
                f"its file {name} is missing or cut short",
                field="checkpoint",
                value=str(folder),
                way_out="use another checkpoint, or copy this one again",
            )
    return Checkpoint(folder, state)


def file_sum(path: Path, tick: Callable[[], None] | None = None) -> str:
    """The crc32 of a file, as eight digits; `tick` is called on the way."""
    value = 0
    with open(path, "rb") as stream:
        while part := stream.read(_READ_BYTES):
            value = zlib.crc32(part, value)
            if tick is not None:
                tick()
    return f"{value:08x}"


def damage(
    found: Checkpoint, share: tuple[int, int] = (0, 1), tick: Callable[[], None] | None = None
) -> str:
    """What is wrong with the contents of its files, '' for nothing. `share` is (number, count):
    several readers take a part of the files each. Old checkpoints have no sums to compare."""
    for name, known in found.state.sums[share[0] :: share[1]]:
        try:
            read_sum = file_sum(found.folder / name, tick)
        except OSError as error:
            return f"its file {name} can't be read ({error.strerror})"
        if read_sum != known:
            return (
                f"its file {name} has changed since it was written (crc32 {read_sum}, not {known})"
            )
    return ""


def keep_apart(folder: Path, reason: str) -> None:
    """Rename a damaged checkpoint, so that nothing counts it among the whole ones."""
    apart = folder.with_name(f"{_DAMAGED}{folder.name}")
    shutil.rmtree(apart, ignore_errors=True)
    os.rename(folder, apart)
    files.write_text(apart / _REASON_FILE, f"{reason}\n", field="checkpoint")


def kept_apart(root: Path) -> dict[str, str]:
    """Names of damaged checkpoints, and why."""
    found = sorted(root.glob(f"{_DAMAGED}*/{_REASON_FILE}"))
    return {path.parent.name: files.read_text(path, field="checkpoint").strip() for path in found}


def whole(root: Path) -> list[Checkpoint]:
    """Checkpoints that can be loaded, oldest first; what is torn is left out."""
    return [found for found in _all(root) if isinstance(found, Checkpoint)]


def torn(root: Path) -> list[tuple[str, UserError]]:
    """Names of the others, and what is wrong with them."""
    return [found for found in _all(root) if not isinstance(found, Checkpoint)]


def _all(root: Path) -> Iterator[Checkpoint | tuple[str, UserError]]:
    for path in sorted(root.glob("step-*"), key=lambda p: (len(p.name), p.name)):
        if _NAME.fullmatch(path.name) is None:
            continue
        try:
            yield read(path)
        except UserError as error:
            yield path.name, error


def newest(root: Path) -> Checkpoint | None:
    found = whole(root)
    return found[-1] if found else None


def clear_leftovers(root: Path) -> int:
    """Remove what killed saves and prunings left; how many there were."""
    left = [path for prefix in _HIDDEN for path in root.glob(f"{prefix}*")]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


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
    files.write_text(made / STATE_FILE, codec.to_json(whole_state), field="checkpoint")
    files.sync(made)
    final = root / name_of(state.step)
    if final.exists():  # the same step again, after going back to an earlier one
        _discard(final)
    os.rename(made, final)
    files.sync(root)
    files.write_text(root / LATEST_FILE, f"{final.name}\n", field="checkpoint")
    prune(root, keep)
    return final


def prune(root: Path, keep: int) -> None:
    """Keep the newest `keep` whole checkpoints; torn ones do not count, and stay."""
    if keep:
        for old in whole(root)[:-keep]:
            _discard(old.folder)


def _discard(folder: Path) -> None:
    """Renamed first: a kill halfway leaves no folder that looks like a checkpoint."""
    hidden = folder.parent / f"{_HIDDEN[1]}{folder.name}"
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    shutil.rmtree(hidden)
