"""A fault as one script that runs without fourfold: the files of `ranks` that a cell needs, joined
in the order of their imports, and what to ask."""

from __future__ import annotations

import re
from pathlib import Path

from fourfold.conformance.install import Release
from fourfold.conformance.verdicts import Verdict

MARK = "against one process without parallel code"
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


def script(release: Release, verdict: Verdict, fault: str = "") -> str:
    from fourfold.conformance.cell import Cell

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
        f'"""{release.name}, layout \'{verdict.cell}\', {MARK}:\n\n'
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
