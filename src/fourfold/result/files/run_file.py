"""What does the file of a stored run hold? Its report, whose run it is, and the sum of it all."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.result.files.sealed import seal
from fourfold.result.files.stored import read_stored
from fourfold.result.files.work import is_folder
from fourfold.result.report import RunReport
from fourfold.spec import codec
from fourfold.spec.run import RunSpec

RUN_FILE = "run.json"
# run id, device, torch version, repeat
NAME = re.compile(r"([0-9a-f]{16})_([a-z0-9-]*)_([a-z0-9-]*)_([0-9]{1,6})\Z")
_RUN_KEYS = {"schema", "type", *(field.name for field in dataclasses.fields(RunReport))}


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48]


@dataclass(frozen=True, slots=True)
class RunKey:
    run_id: str
    device: str
    torch: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.run_id}_{slug(self.device)}_{slug(self.torch)}_{self.repeat}"


def key_of(report: RunReport) -> RunKey:
    known = dict(report.environment)
    return RunKey(
        report.spec.run_id, known.get("device", ""), known.get("torch", ""), report.repeat
    )


def run_bytes(report: RunReport) -> bytes:
    plain = {**codec.dump(report), "run_id": report.spec.run_id}
    return seal(codec.json_of(plain))


def read_run(path: Path) -> tuple[dict[str, Any], str]:
    """Plain data of a RunReport and the id of its run; both checked against each other."""
    plain = read_stored(path)
    spec = plain.get("spec")
    # A stored run holds its model; a name or a path there would be read from elsewhere.
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise UserError("is not a stored run", field="run", value=str(path))
    run_id = plain.pop("run_id", None)
    if run_id is None:  # stored before the id was
        run_id = codec.decode(RunSpec, spec, "spec").run_id
    unknown = plain.keys() - _RUN_KEYS
    if unknown:
        raise UserError(f"has unknown entries ({min(unknown)})", field="run", value=str(path))
    return plain, str(run_id)


def read_kept(folder: Path) -> dict[str, Any]:
    """Plain data of the run kept in `folder`, which must be the one that its name says."""
    match = NAME.match(folder.name)
    if match is None or not is_folder(folder):
        raise UserError("is not the folder of a run", field="run", value=str(folder))
    plain, run_id = read_run(folder / RUN_FILE)
    known = plain.get("environment")
    known = known if isinstance(known, dict) else {}
    key = RunKey(
        run_id, str(known.get("device", "")), str(known.get("torch", "")), plain.get("repeat", 0)
    )
    if key.name != f"{folder.name[: match.start(4)]}{int(match.group(4))}":
        raise UserError(
            f"contains another run ({key.name})", field="run", value=str(folder / RUN_FILE)
        )
    return plain
