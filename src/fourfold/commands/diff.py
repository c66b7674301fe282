"""What differs between two stored runs: settings, surroundings, result; same, different or unknown.

A and B are folders of runs, or beginnings of a run's id in the store of --runs ('3fa2', '3fa2#1'
for a repeat). Without '#' all repeats of a run count. The verdict needs repeats, of these runs
or of others on the same device; without any it is "can't tell".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fourfold.commands import flags
from fourfold.errors import UserError
from fourfold.result.files.store import RUN_FILE, Store, Stored
from fourfold.result.read.compare import compare, differences, stored_spread
from fourfold.show import bench as shown
from fourfold.show import oom as post_mortem
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.units import show_bytes, show_seconds

EXAMPLES = """\
examples:
  fourfold diff 3fa2 91bc
  fourfold diff '3fa2#0' '3fa2#1' --format json
  fourfold diff runs/3fa2..._0 colleague/runs/3fa2..._0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a run")
    parser.add_argument("b", metavar="B", help="another run")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="the store (default: runs)")
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    known = Store(args.runs).runs()
    one, other = repeats_of(args.a, known), repeats_of(args.b, known)
    first, second = one[-1].report(), other[-1].report()
    settings = differences(codec.encode(first.spec), codec.encode(second.spec))
    surroundings = differences(dict(first.environment), dict(second.environment))
    spread = None
    if one[-1].summary.device == other[-1].summary.device:
        spread = stored_spread([stored.summary for stored in known], one[-1].summary.device)
    failed = {
        name: post_mortem.facts(report)
        for name, report in (("a", first), ("b", second))
        if report.outcome == "oom"
    }
    verdict = compare(_times(one), _times(other), spread)
    results = _results(shown.facts(first), shown.facts(second))
    if args.format == "json":
        plain = {
            "settings": [_plain(row) for row in settings],
            "environment": [_plain(row) for row in surroundings],
            "result": [_plain(row) for row in results],
            "repeats": {"a": len(one), "b": len(other)},
            "ratio": verdict.ratio,
            "spread": verdict.spread,
            "verdict": verdict.verdict,
            "why": verdict.why,
            "post_mortem": failed,
        }
        print(json_text(plain))
        return 0
    rows = [["setting", *map(_text, row)] for row in settings]
    rows += [["environment", *map(_text, row)] for row in surroundings]
    rows += [["result", *row] for row in _pretty(results)]
    print(render(["what", "name", f"A ({one[-1].name[:8]})", f"B ({other[-1].name[:8]})"], rows,
                 args.format))  # fmt: skip
    if args.format != "csv":
        ratio = f"B takes {verdict.ratio:.4f} x A's time; " if verdict.ratio else ""
        print(f"\n{verdict.verdict}: {ratio}{verdict.why}")
        for name, said in failed.items():
            print(f"\n{name.upper()} {post_mortem.text(said, args.format).strip()}")
    return 0


def repeats_of(text: str, known: list[Stored]) -> list[Stored]:
    """The repeats that a folder or the beginning of an id names."""
    path = Path(text)
    if (path / RUN_FILE).is_file():
        name = path.absolute().name
        found = [stored for stored in Store(path.absolute().parent).runs() if stored.name == name]
        if found:
            return found
    head, _, repeat = text.partition("#")
    found = [stored for stored in known if head and stored.name.startswith(head)]
    if repeat:
        found = [stored for stored in found if str(stored.summary.repeat) == repeat]
    if not found:
        raise UserError(
            "names no stored run", field="run", value=text, hint="'fourfold runs' lists them"
        )
    if len({stored.summary.run_id for stored in found}) > 1:
        raise UserError(
            f"begins the id of {len({s.summary.run_id for s in found})} runs", field="run",
            value=text, hint="give more letters",
        )  # fmt: skip
    return found


def _times(repeats: list[Stored]) -> list[float]:
    return [stored.summary.step_s for stored in repeats if stored.summary.step_s]


# Of a run's facts, in the order of reading.
_COMPARED = (
    "outcome", "step_s", "step_s_low", "step_s_high", "tokens_s_gpu", "peak_bytes",
    "reserved_bytes", "device_bytes", "loss", "loss_step", "warmup_steps", "warmup_ended",
    "data_wait_s", "compile_s", "recompiles", "retries",
)  # fmt: skip


def _results(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Everything either run has; what is 0 or unknown in both says nothing."""
    rows = [(name, one.get(name), other.get(name)) for name in _COMPARED]
    for name in ("step_s", "peak_bytes"):
        said = [facts.get("predicted", {}).get(name) for facts in (one, other)]
        rows.append((f"predicted_{name}", said[0], said[1]))
    links = [{x["axis"]: x["bytes_per_s"] for x in facts["links"]} for facts in (one, other)]
    for axis in dict.fromkeys([*links[0], *links[1]]):
        rows.append(
            (f"link_{axis.replace(' ', '_')}_bytes_per_s", links[0].get(axis), links[1].get(axis))
        )
    rows.append(("flags", "; ".join(one["flags"]), "; ".join(other["flags"])))
    return [row for row in rows if row[0] in _COMPARED[:2] or row[1] or row[2]]


def _plain(row: tuple[str, Any, Any]) -> dict[str, Any]:
    return {"name": row[0], "a": row[1], "b": row[2]}


def _text(value: Any) -> str:
    return "-" if value is None else str(value)[:60]


def _pretty(results: list[tuple[str, Any, Any]]) -> list[list[str]]:
    def told(name: str, value: Any) -> str:
        if value is None or value == "":
            return "-"
        if name.startswith("link_"):
            return f"{value / 1e9:,.2f} GB/s"
        if name.endswith(("_s", "_low", "_high")):
            return show_seconds(value)
        if name.endswith("_bytes"):
            return show_bytes(value)
        return f"{value:,.6g}" if isinstance(value, float) else str(value)

    return [[name, told(name, a), told(name, b)] for name, a, b in results]
