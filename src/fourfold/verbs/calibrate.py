"""calibrate: this machine's kernels, memory and links, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold import files
from fourfold.cost.fit import calibration
from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore, progress
from fourfold.launch.folder import scratch
from fourfold.launch.local import must_be_ok, run_job
from fourfold.launch.permit import gpu_count
from fourfold.result.job import Job, Limits, answer_file
from fourfold.result.profile import HardwareProfile, cluster_of, coefficients_of
from fourfold.spec import codec
from fourfold.verbs import Answer
from fourfold.verbs.run_requests import CalibrateRequest

_QUICK_S, _WHOLE_S = 11.0, 130.0
_CPU_RANKS = 4


@dataclass(frozen=True, slots=True)
class Calibrated(Answer):
    """`ranks`: those of the cluster that this host is described as."""

    profile: HardwareProfile
    ranks: int

    def plain(self) -> dict[str, Any]:
        return codec.dump(self.profile) | {"knobs": coefficients_of(self.profile)}

    def rows(self) -> list[dict[str, Any]]:
        """One for each measured point, by kind."""
        kinds = ("gemms", "attentions", "copies", "collectives", "shared")
        plain = codec.encode(self.profile)
        return [{"kind": kind, **point} for kind in kinds for point in plain.get(kind, ())]

    def profile_json(self) -> str:
        return codec.to_json(self.profile)

    def cluster_toml(self) -> str:
        return codec.to_toml(cluster_of(self.profile, self.ranks))

    def calibration_json(self) -> str:
        cluster = cluster_of(self.profile, self.ranks)
        return calibration.to_json(calibration.calibration_of(self.profile, cluster))


def calibrate(request: CalibrateRequest | None = None, *, on_event: OnEvent = ignore) -> Calibrated:
    """The profile of this host; the torch processes are gone when it returns."""
    request = request or CalibrateRequest()
    ranks, device, quick = request.ranks, request.device, request.quick
    if ranks is not None and not 1 <= ranks <= 1024:
        raise UserError("must be from 1 to 1024", field="ranks", value=ranks)
    gpus = gpu_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise UserError("needs a GPU, and none is visible", field="device", value=device)
    options = {"quick": "true" if quick else "false", "device": "cuda" if gpus else "cpu"}
    options["seconds"] = str(_QUICK_S if quick else _WHOLE_S)
    job = Job(
        job="calibrate",
        ranks=gpus or _CPU_RANKS,
        options=tuple(sorted(options.items())),
        limits=Limits(start_s=300.0, step_s=120.0),
    )
    with scratch() as folder:
        must_be_ok(run_job(job, folder, progress=progress(on_event)))
        profile = codec.from_json(HardwareProfile, files.read_text(answer_file(folder, 0)))
    return Calibrated(profile, ranks or max(point.ranks for point in profile.shared))
