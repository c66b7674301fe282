"""Other engines against one process: verdicts of layouts, releases in folders, and the matrix."""

from __future__ import annotations

import csv
import io
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.conformance.cell import Cell, candidates
from fourfold.conformance.install import (
    OURS,
    Release,
    engines_folder,
    find,
    install,
    installed,
    split_name,
)
from fourfold.conformance.lab import Lab
from fourfold.conformance.verdicts import COLUMNS, REPRO_MARK, Verdict, examine, repro_script
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore, notes
from fourfold.flag import flag
from fourfold.launch.local import require_torch
from fourfold.spec import check, codec
from fourfold.verbs import Answer, Request
from fourfold.verbs.run_requests import ENGINES, VerifyRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesRequest(Request):
    """Releases that the matrix is of."""

    names: tuple[str, ...] = flag(
        "a release, such as torchtitan==0.3.0", "NAME", nargs="*", names=("names",), default=()
    )
    engines: str | None = flag(*ENGINES)
    seed: int = flag("seed of weights and tokens", default=0)
    jobs: int = flag("releases that run at once (default 1)", "N", default=1)
    limit: float = flag("seconds allowed per layout (default 180)", "S", rare=True, default=180.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance(Answer):
    """`columns`: of the matrix, the column of each verdict; '' of a list of layouts."""

    verdicts: tuple[Verdict, ...]
    columns: tuple[str, ...] = ()
    fault: str | None = None
    device: str = "cpu"

    @property
    def right(self) -> bool:
        return not any(one.verdict in ("fault", "blocked") for one in self.verdicts)

    def rows(self) -> list[dict[str, Any]]:
        names = self.columns or ("",) * len(self.verdicts)
        pairs = zip(names, self.verdicts, strict=True)
        return [({"column": name} if name else {}) | codec.encode(one) for name, one in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRelease:
    """A release of an engine, and the folder of its own that it is installed in."""

    engine: str
    version: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines(Answer):
    """The releases in a folder of engines."""

    TABLE = "releases"
    folder: str
    releases: tuple[InstalledRelease, ...] = ()


def conform(request: VerifyRequest, *, on_event: OnEvent = ignore) -> Conformance:
    """`verify --engine`: one layout, or a sample of those that the engine does not refuse."""
    release = find(str(request.engine), engines_folder(request.engines), request.source or "")
    if request.repro:
        files.require_mine(request.repro, mark=REPRO_MARK, force=False, field="repro")
    _refuse_others(request)
    _require_torch(release)
    limits = {"device": request.device, "limit_s": request.limit, "fault": request.fault or ""}
    with Lab(release, **limits) as lab:
        verdicts = []
        for cell in _cells(request, lab):
            verdicts.append(examine(lab, cell, request.seed))
            on_event(Event(f"{release.name} {cell}: {verdicts[-1].verdict}"))
    faults = [one for one in verdicts if one.verdict == "fault"]
    if request.repro and faults:
        files.write_text(
            request.repro, repro_script(release, faults[0], request.fault or ""), field="repro"
        )
        on_event(Event(f"repro of {faults[0].cell}: {release.python} {request.repro}"))
    elif request.repro:
        on_event(Event("no fault was found, so no repro was written", "warning"))
    return Conformance(verdicts=tuple(verdicts), fault=request.fault, device=request.device)


def _refuse_others(request: VerifyRequest) -> None:
    """Flags of our own proof that say nothing about another engine's."""
    ours = (
        "family",
        "models",
        "axis",
        "share_gpu",
        "precision",
        "global_batch",
        "micro_batch",
        "policy",
        "detach",
    )
    defaults = VerifyRequest()
    for name in ours:
        if getattr(request, name) != getattr(defaults, name):
            raise UserError("does not go with --engine", field=name, hint="leave it out")


def _require_torch(*releases: Release) -> None:
    """Other releases have the torch that they were installed with."""
    if any(release.python == sys.executable for release in releases):
        require_torch()


def _cells(request: VerifyRequest, lab: Lab) -> Iterator[Cell]:
    if request.layout is not None:
        for text in request.layout.split(";"):
            yield _asked(text, request.world)
        return
    if request.world is None:
        raise UserError("is required", field="world", hint="or pass --layout")
    check.whole(1, 64, world=request.world)
    check.whole(1, 1000, sample=request.sample or 12)
    every = list(candidates(request.world))
    random.Random(request.seed).shuffle(every)
    left = request.sample or 12
    for cell in every:
        if left and lab.legal(cell):
            left -= 1
            yield cell


def _asked(text: str, world: int | None) -> Cell:
    try:
        cell = Cell.parse(text)
    except ValueError as error:
        raise UserError(str(error), field="--layout", value=text) from None
    rule = f"has {cell.world} ranks, not the {world} of --world"
    check.that(world in (None, cell.world), "--layout", text, rule)
    return cell


def matrix(request: EnginesRequest, *, on_event: OnEvent = ignore) -> Conformance:
    """Every column for every release; without names, all that are installed and our own."""
    folder = engines_folder(request.engines)
    names = request.names or (*(f"{r.engine}=={r.version}" for r in installed(folder)), OURS)
    releases = [find(name, folder) for name in names]
    check.whole(1, 64, jobs=request.jobs)
    _require_torch(*releases)

    def row(release: Release) -> list[Verdict]:
        verdicts = []
        with Lab(release, limit_s=request.limit) as lab:
            for column, texts in COLUMNS.items():
                verdicts.append(_column(lab, texts, request.seed))
                on_event(Event(f"{release.name}, {column}: {verdicts[-1].verdict}", "progress"))
        return verdicts

    with ThreadPoolExecutor(request.jobs) as pool:
        rows = list(pool.map(row, releases))
    verdicts = tuple(one for verdicts in rows for one in verdicts)
    return Conformance(verdicts=verdicts, columns=tuple(COLUMNS) * len(releases))


def read_matrix(sheet: str) -> Conformance:
    """Of the text of a matrix's CSV file."""
    columns, verdicts = [], []
    try:
        for row in csv.DictReader(io.StringIO(sheet)):
            columns.append(row.pop("column"))
            verdicts.append(Verdict(**{name: _plain(name, text) for name, text in row.items()}))
    except (KeyError, TypeError, ValueError):
        rule, hint = "is no matrix of this version of fourfold", "take another folder"
        raise UserError(rule, field="out", value="matrix.csv", hint=hint) from None
    return Conformance(verdicts=tuple(verdicts), columns=tuple(columns))


def _plain(name: str, text: str) -> Any:
    if name in ("standins", "signature"):
        return tuple(text.split("; ")) if text else ()
    if name in ("difference", "norm", "parameters", "copies"):
        return float(text) if text else None
    if name in ("world", "seed"):
        return int(text)
    return text == "true" if name == "hidden" else text


def joined(earlier: Conformance, answer: Conformance) -> Conformance:
    """The answer, after releases that only the earlier matrix has."""
    new = {(one.engine, one.version) for one in answer.verdicts}
    pairs = zip(earlier.columns, earlier.verdicts, strict=True)
    kept = [pair for pair in pairs if (pair[1].engine, pair[1].version) not in new]
    both = [*kept, *zip(answer.columns, answer.verdicts, strict=True)]
    columns, verdicts = zip(*both, strict=True)
    return replace(answer, columns=columns, verdicts=verdicts)


def _column(lab: Lab, texts: tuple[str, ...], seed: int) -> Verdict:
    """The first of a column's cells that the engine runs; where it runs none, the first."""
    verdicts = (examine(lab, Cell.parse(text), seed) for text in texts)
    ran = (one for one in verdicts if one.verdict not in ("refused", "blocked"))
    return next(ran, None) or examine(lab, Cell.parse(texts[0]), seed)


def install_engines(request: EnginesRequest, *, on_event: OnEvent = ignore) -> Engines:
    check.given(request.names, "engine", "such as megatron-core==0.19.2")
    folder = engines_folder(request.engines)
    for name in request.names:
        split_name(name)
    require_torch()
    found = [install(name, folder, notes(on_event)) for name in request.names]
    return _listed(folder, found)


def engines(request: EnginesRequest) -> Engines:
    folder = engines_folder(request.engines)
    return _listed(folder, installed(folder))


def _listed(folder: Path, releases: list[Release]) -> Engines:
    rows = (
        InstalledRelease(
            engine=release.engine,
            version=release.version,
            folder=str(Path(release.python).parent.parent),
        )
        for release in releases
    )
    return Engines(folder=str(folder), releases=tuple(rows))
