"""From answers to a verdict with a name. No engine is accused before it is right with one rank, the
difference holds over three seeds and two sizes, and no stand-in can be its cause.

A fault as one script that runs without fourfold: the files of `ranks` that a cell needs, joined
in the order of their imports, and what to ask.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from fourfold.conformance.cell import Cell
from fourfold.conformance.install import Release
from fourfold.conformance.lab import Lab, Told

Word = Literal["equal", "stand-in", "fault", "refused", "blocked"]
WORDS: dict[Word, str] = {
    "equal": "equal to one process",
    "stand-in": "equal, with a stand-in for a kernel that has no CPU form",
    "fault": "differs from one process, and nothing else explains it",
    "refused": "the engine does not offer it, or raises an error",
    "blocked": "nothing could be said",
}
# What each stand-in is first cleared by: the smallest cell that uses it.
_CLEARED_BY = {
    "attention": lambda cell: _plain(cp=cell.cp),
    "norm": lambda cell: replace(_plain(tp=cell.tp), options=frozenset({"sp"})),
}


def _plain(**degrees: Any) -> Cell:
    return replace(Cell(), **degrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`difference` is the largest of all gradients; `signature` names a fault."""

    engine: str
    version: str
    cell: str
    world: int
    verdict: Word
    why: str = ""
    difference: float | None = None
    norm: float | None = None
    parameters: float | None = None
    copies: float | None = None
    standins: tuple[str, ...] = ()
    convention: str = ""
    signature: tuple[str, ...] = ()
    hidden: bool = False
    resembles: str = ""
    seed: int = 0


def examine(lab: Lab, cell: Cell, seed: int = 0) -> Verdict:
    told = lab.ask(cell, seed=seed)
    if told["end"] != "done":
        word: Word = "refused" if told["end"] == "refused" else "blocked"
        return _verdict(lab, cell, seed, word, {}, why=told.get("why", ""))
    if told["equal"]:
        return _right(lab, cell, seed, told)
    # The same cell, called as other releases want to be called.
    other = replace(cell, options=cell.options | {"cp-tokens"})
    if not lab.fault and other != cell and not other.illegal() and lab.legal(other):
        again = lab.ask(other, seed=seed)
        if again.get("equal"):
            return _right(lab, cell, seed, again | {"convention": "cp-tokens"})
    doubt = _doubt(lab, cell, seed, told)
    if doubt:
        return _verdict(lab, cell, seed, "blocked", told, why=doubt)
    blamed = _blamed(lab, cell, told)
    if blamed:
        why = f"differs, but {blamed} stands in for a kernel and may be the cause"
        return _verdict(lab, cell, seed, "stand-in", told, why=why)
    own = lab.ask(cell.alone(), seed=seed, plant=False)
    if not own.get("equal"):  # then no axis is at fault
        words = "; ".join(own.get("signature", ()))
        told = told | {"signature": [*told["signature"], f"one rank of this copy, too: {words}"]}
    return _verdict(lab, cell, seed, "fault", told)


def _right(lab: Lab, cell: Cell, seed: int, told: Told) -> Verdict:
    return _verdict(lab, cell, seed, "stand-in" if told["standins"] else "equal", told)


def _doubt(lab: Lab, cell: Cell, seed: int, told: Told) -> str:
    """Why a difference is not called a fault; '' where it is one."""
    if not told["signature"]:
        most = max(told["grad"], told["norm"], told["loss"], told["copies"])
        return f"differs by {most:.1e}: more than rounding, less than a fault"
    alone = lab.alone(cell, seed)
    if not alone.get("equal"):  # the adapter may be as wrong as the engine
        words = alone.get("why") or "; ".join(alone.get("signature", ()))
        return f"one rank differs from the reference: {words}"
    for other_seed, size in ((seed + 1, 0), (seed + 2, 0), (seed, 1)):
        again = lab.ask(cell, seed=other_seed, size=size)
        if again["end"] != "done" or again["equal"]:
            end = "is equal" if again.get("equal") else again.get("why", "")
            return f"not repeated: seed {other_seed}, size {size + 1} {end}"
    return ""


def _blamed(lab: Lab, cell: Cell, told: Told) -> str:
    """A stand-in that may have caused it: one whose own smallest cell is not right, unless what
    differs is a norm, or one factor of all weights, which no kernel can bring about."""
    alone = lab.alone(cell, 0)
    lines = told["signature"]
    if lab.release.source and lab.installed().ask(cell).get("equal"):
        return ""  # the installed release is right with the same stand-ins
    if all(line.startswith(("norm", "loss", "gradients of every weight")) for line in lines):
        return ""
    for standin in sorted({*told["standins"]} - {*alone.get("standins", ())}):
        control = _CLEARED_BY[standin](cell) if standin in _CLEARED_BY else cell
        if control == cell or not lab.ask(control, plant=False).get("equal"):
            return standin
    return ""


_KNOWN = tomllib.loads(
    (resources.files("fourfold.conformance") / "known.toml").read_text(encoding="utf-8")
)
# Column of the matrix -> cells that show it.
COLUMNS: dict[str, tuple[str, ...]] = {k: tuple(cells) for k, cells in _KNOWN["columns"].items()}


def known_reports() -> list[dict[str, str]]:
    return _KNOWN["report"]


def resembling(engine: str, cell: Cell, signature: tuple[str, ...]) -> str:
    """Public reports of this engine with these words in the layout and in the signature."""
    said, words = "; ".join(signature), f" {cell} "
    return ", ".join(
        report["name"]
        for report in known_reports()
        if report["engine"] == engine
        and re.search(report["says"], said)
        and all(re.search(rf" {word}\d* ", words) for word in report["layout"].split())
    )


def _verdict(lab: Lab, cell: Cell, seed: int, word: Word, told: Told, why: str = "") -> Verdict:
    engine = lab.release.engine
    signature = tuple(told.get("signature", ())) if word == "fault" or why else ()
    return Verdict(
        engine=engine,
        version=lab.release.version,
        cell=str(cell),
        world=cell.world,
        verdict=word,
        why=why,
        difference=told.get("grad"),
        norm=told.get("norm"),
        parameters=told.get("param"),
        copies=told.get("copies"),
        standins=tuple(told.get("standins", ())),
        convention=told.get("convention", ""),
        signature=signature,
        hidden=word == "fault" and bool(told.get("hidden")),
        resembles=resembling(engine, cell, signature) if word == "fault" else "",
        seed=seed,
    )


REPRO_MARK = "against one process without parallel code"
_HERE = Path(__file__).parent
_OWN = re.compile(
    r"^from fourfold\.conformance\.[\w.]+ import (?:\([^)]*\)|[^\n]*)\n(?:\n(?=\n))?", re.M
)
_NAMED = re.compile(r"^from (fourfold\.conformance\.[\w.]+) import", re.M)
_MAIN = '''

def main() -> None:
    """The cell, then one rank of the same model."""
    for cell in {cells!r}:
        for seed in {seeds!r}:
            request = {{"cell": cell, "seed": seed, "limit_s": 300.0}}
            request["break"] = {fault!r} if cell == {cells!r}[0] else ""
            found = run_cell(ENGINE, request)
            words = f"{{found['end']}} {{found.get('why', '')}}"
            print(f"--- {{cell or 'one rank'}}, seed {{seed}}: {{words}}")
            for name in ("loss", "norm", "grad", "param", "copies"):
                if name in found:
                    print(f"    {{name}}: largest relative difference {{found[name]:.2e}}")
            for line in found.get("signature", ()):
                print("    " + line)


if __name__ == "__main__":
    os.environ |= {{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}}
    main()
'''


def repro_script(release: Release, verdict: Verdict, fault: str = "") -> str:
    cell = Cell.parse("" if verdict.cell == "one rank" else verdict.cell)
    alone = str(cell.alone())
    cells = (
        "" if verdict.cell == "one rank" else verdict.cell,
        "" if alone == "one rank" else alone,
    )
    signature = "\n".join(f"    {line}" for line in verdict.signature or (verdict.why,))
    source = f"\nThe engine is imported from PYTHONPATH={release.source}." if release.source else ""
    planted = f"\nThe fault {fault} is planted." if fault else ""
    resembles = f"\nIt resembles {verdict.resembles}." if verdict.resembles else ""
    head = (
        f'"""{release.name}, layout \'{verdict.cell}\', {REPRO_MARK}:\n\n'
        f"{signature}\n{resembles}{source}{planted}\n\n"
        f"Needs torch and {release.engine}=={release.version}; runs {cell.world} ranks on CPU over "
        'gloo.\n"""\n\nfrom __future__ import annotations\n'
    )
    parts = [_text(path) for path in _ordered(release.adapter_path)]
    main = _MAIN.format(cells=cells, seeds=(0, 1, 2), fault=fault)
    return head + "\n\n".join(parts) + main


def _ordered(adapter: Path) -> list[Path]:
    """Every file after those that it imports; the host, which runs them, last."""
    found: list[Path] = []

    def add(path: Path) -> None:
        for name in _NAMED.findall(path.read_text(encoding="utf-8")):
            add(_HERE / (name.removeprefix("fourfold.conformance.").replace(".", "/") + ".py"))
        if path not in found:
            found.append(path)

    add(adapter)
    add(_HERE / "ranks" / "host.py")
    return found


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8").replace("from __future__ import annotations\n", "")
    text = re.sub(r'^""".*?"""\n', "", text, count=1, flags=re.S)
    own = re.sub(_OWN, "", text)
    name = path.name.removesuffix(".py")
    return f"# --- {name}\n{own.strip()}\n"
