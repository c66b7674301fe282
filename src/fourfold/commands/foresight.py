"""Who predicts runs for a command? A named cluster, a profile of this machine, a GPU the catalogue
knows, or else a rough guess from the cores; the same for bench, sweep and report.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.campaign import kind_of
from fourfold.launch.devices import core_count
from fourfold.result.machine import gpu_name, host_memory_bytes
from fourfold.result.prediction import Prediction, Remedy
from fourfold.result.profile import HardwareProfile
from fourfold.result.profile import read_profile as profile_of
from fourfold.result.report import RunReport
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster
from fourfold.spec.device import device_id
from fourfold.spec.run import RunSpec
from fourfold.units import show_bytes

if TYPE_CHECKING:
    from fourfold.cost.fit.calibration import Calibration

GUESS = "a rough guess from the cores"
# Of a host's memory, shared by its ranks: the rest is the system's and Python's.
_HOST_SHARE = 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="NAME", help="for the prediction")
    parser.add_argument(
        "--profile", metavar="FILE", help="this machine, from 'calibrate --out', or h200"
    )


def read_profile(name: str) -> HardwareProfile:
    """Of a file, or of a machine whose profile comes with the package ('h200')."""
    return profile_of(catalog.profile_text(name) or files.read_text(name, field="profile"))


class Foresight:
    """`told` are predictions made elsewhere (by the planner), by run id; they come first."""

    def __init__(
        self,
        *,
        cluster: str | None = None,
        profile: str | None = None,
        calibration: str | None = None,
    ) -> None:
        self._named = catalog.cluster(cluster) if cluster else None
        self._profile = read_profile(profile) if profile else None
        self._calibration = _calibration(calibration) if calibration else None
        parts = [cluster or ""]
        if self._profile is not None:
            parts.append(f"profile of {self._profile.host}, {self._profile.made_at[:16]}")
        if self._calibration is not None:
            parts.append(f"calibration {self._calibration.name}")
        self._basis = ", ".join(filter(None, parts))
        self.told: dict[str, Prediction] = {}
        self._gpu: str | None = None

    @property
    def is_guess(self) -> bool:
        """Nothing better than the number of cores is known (a GPU may still be)."""
        return not self._basis

    def cluster(self, spec: RunSpec) -> Cluster | None:
        """The named cluster; on a GPU that the catalogue knows, this host with its usual links."""
        from fourfold.search.query import usual_cluster

        if self._named is not None or self._profile is not None:
            return self._named
        if kind_of(spec) != "cuda":
            return None
        if self._gpu is None:
            self._gpu = device_id(gpu_name(), catalog.device_names()) or ""
        return usual_cluster(catalog.device(self._gpu), spec.gpus) if self._gpu else None

    def basis(self, spec: RunSpec) -> str:
        if self._basis:
            return self._basis
        here = self.cluster(spec)
        return f"this host as {here.name}" if here else GUESS

    def limit_bytes(self, spec: RunSpec) -> float:
        """What a rank may use: the run's own limit, the device's memory, a share of the host's."""
        from fourfold.cost.memory.peak import USABLE

        if spec.memory_limit is not None:
            return float(spec.memory_limit)
        here = self.cluster(spec)
        if here is not None and not here.device.id.startswith("cpu"):
            return USABLE * here.device.memory_bytes
        return _HOST_SHARE * host_memory_bytes() / spec.gpus

    def forecasts(self, specs: list[RunSpec]) -> list[Prediction]:
        """One for each, in order. A host's usual links depend on the number of ranks."""
        from fourfold.search.predict import predict

        answers: dict[int, Prediction] = {}
        by_ranks: dict[int, list[int]] = {}
        for at, spec in enumerate(specs):
            by_ranks.setdefault(spec.gpus, []).append(at)
        for places in by_ranks.values():
            found = predict(
                [specs[at] for at in places],
                cluster=self.cluster(specs[places[0]]),
                profile=self._profile,
                calibration=self._calibration,
                cores=core_count(),
            )
            answers |= dict(zip(places, found, strict=True))
        return [answers[at] for at in range(len(specs))]

    def predictions(self, specs: list[RunSpec]) -> list[Prediction]:
        found = self.forecasts(specs)
        return [
            self.told.get(spec.run_id)
            or replace(answer, limit_bytes=self.limit_bytes(spec), basis=self.basis(spec))
            for spec, answer in zip(specs, found, strict=True)
        ]

    def predicted(self, spec: RunSpec) -> Prediction | None:
        """None where this machine's description lacks what the run needs (a format's peak)."""
        try:
            return self.told.get(spec.run_id) or self.predictions([spec])[0]
        except UserError:
            return None

    def too_large(self, spec: RunSpec) -> str:
        """Why a run surely does not fit the hardware, whatever its limit: weights, gradients and
        moments alone are more than there is. '' where it may fit, or nobody knows."""
        from fourfold.search.predict import state_bytes

        state, here = state_bytes(spec), self.cluster(spec)
        if here is not None and not here.device.id.startswith("cpu"):
            room, ranks, whose = here.device.memory_bytes, 1, ("a rank", here.device.id)
        else:
            room, ranks, whose = host_memory_bytes(), spec.gpus, ("all ranks", "this host")
        if not room or state * ranks <= room:
            return ""
        return (
            f"weights, gradients and moments of {whose[0]} take {show_bytes(state * ranks)}, and "
            f"{whose[1]} has {show_bytes(room)}"
        )

    def remedies(self, report: RunReport) -> tuple[Remedy, ...]:
        from fourfold.search.fixes import remedies

        spec, short = report.spec, report.shortage
        limit = (short.limit_bytes if short else 0) or self.limit_bytes(spec)
        used = float(short.live_bytes) if short else 0.0
        try:
            return remedies(spec, self.forecasts, limit_bytes=limit, used_bytes=used)
        except UserError:
            return ()


def _calibration(path: str) -> Calibration:
    from fourfold.cost.fit.calibration import load

    return load(path)
