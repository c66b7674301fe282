"""Famous public runs: what was run, what the planner says of it, and what it would choose.

    python scripts/famous.py FOLDER > results/famous.md
    python scripts/famous.py FOLDER --rows FILE.csv    the table, without figures that are bounds

FOLDER holds the reference tables, famous.csv among them; they stay outside. Each run is predicted
by a calibration without any row of its source.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fourfold.cost.fit.calibration import Calibration, FittedStack, to_json
from fourfold.cost.fit.fit import fit_entries
from fourfold.cost.fit.folds import keys_of, sample
from fourfold.cost.fit.validate import only
from fourfold.cost.table.predict import RowPredictions, predict
from fourfold.cost.table.reference import read_table
from fourfold.cost.table.rows import Rows
from fourfold.errors import UserError
from fourfold.search.plan_answer import PlanRow
from fourfold.search.rows.read import parse
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster, Link
from fourfold.spec.engine import engine_of
from fourfold.spec.model import ModelShape, Positions
from fourfold.spec.words import DTYPES, PRICED_ATTENTION
from fourfold.verbs.plan import plan
from fourfold.verbs.requests import PlanRequest

TABLES = ("mpt", "bloom", "par4d", "nanotron", "aleph", "newer", "newer2")
SPEEDS = ("tflops_gpu", "step_s", "tokens_s_gpu")


def is_speed(row: dict[str, str]) -> bool:
    """Figures of whole runs contain stops and count as bounds, but where steps were logged. At 128k
    tokens the unstated FLOP convention moves a rate 1.4 times."""
    if row["seq_len"] == "131072":
        return False
    return row["speed_kind"] in SPEEDS or "exact to 3 digits" in row["note"]


@dataclass(frozen=True)
class Famous:
    """One table row with what was predicted for it."""

    row: dict[str, str]
    rows: Rows
    said: RowPredictions
    at: int
    choice: PlanRow | None  # None: nothing to choose from, or nothing that fits


def famous_rows(folder: Path) -> tuple[list[dict[str, str]], Rows]:
    with (folder / "famous.csv").open(newline="") as stream:
        raw = list(csv.DictReader(stream))
    rows = parse(read_table(folder / "famous.csv"))
    speeds = np.array([is_speed(row) for row in raw])
    return raw, replace(rows, step_s=np.where(speeds, rows.step_s, np.nan))


def written_rows(folder: Path, out: Path) -> None:
    raw, _ = famous_rows(folder)
    with out.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(raw[0]))
        writer.writeheader()
        for row in raw:
            kept = (
                row if is_speed(row) else row | {"step_s": "", "tokens_s_gpu": "", "tflops_gpu": ""}
            )
            writer.writerow(kept)


def without(entries: tuple[FittedStack, ...], tables: list[Rows], source: str) -> Calibration:
    gone = {
        key
        for rows in tables
        for key, name in zip(keys_of(rows).tolist(), rows.table.column("source"), strict=True)
        if name == source
    }
    kept = tuple(entry for entry in entries if entry.key not in gone)
    return Calibration(name=f"without {source}", sources=(), entries=kept)


def answers(folder: Path, *, choose: bool = True) -> list[Famous]:
    raw, rows = famous_rows(folder)
    tables = [parse(read_table(folder / f"{name}.csv")) for name in TABLES] + [rows]
    entries = fit_entries(sample(tables))
    sources = np.array([row["source"] for row in raw])
    found = []
    for source in dict.fromkeys(sources.tolist()):
        known = without(entries, tables, source)
        said = predict(only(rows, sources == source), known)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "calibration.json"
            file.write_text(to_json(known))
            for i in np.flatnonzero(sources == source).tolist():
                choice = chosen(rows, i, str(file)) if choose and rows.usable[i] else None
                found.append(Famous(raw[i], rows, said, i, choice))
    return found


def model_of(rows: Rows, i: int) -> ModelShape:
    c = rows.columns
    sizes = {name: int(getattr(c, name)[i]) for name in
             ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")}  # fmt: skip
    gated = bool(c.gated[i])
    return ModelShape(
        **sizes,
        family="llama" if gated else "gpt",
        positions=Positions(kind="rope" if gated else "learned"),
        norm="rmsnorm" if gated else "layernorm",
        activation="swiglu" if gated else "gelu",
        bias=not gated,
        tied=bool(c.tied[i]),
        head_dim=int(c.width[i] / c.heads[i]),
    )


def cluster_of(rows: Rows, i: int) -> Cluster:
    """The machines of a row, with the links that its prediction takes."""
    c, device = rows.columns, catalog.device(str(rows.hardware[i]))
    gpus, host, inner = int(c.gpus[i]), int(c.node[i]), int(min(c.domain[i], c.gpus[i]))
    links = [Link(name="nvlink", ranks=inner, bytes_per_s=float(c.link[i]), latency_s=3e-6)]
    if gpus > inner:
        rate = float(c.net[i] / c.node[i])
        reach = -(-gpus // inner) * inner
        links.append(Link(name="network", ranks=reach, bytes_per_s=rate, latency_s=10e-6))
    name, source = str(rows.cluster[i]), "as published"
    return Cluster(name=name, device=device, gpus=gpus, host_gpus=min(host, gpus),
                   links=tuple(links), source=source)  # fmt: skip


def chosen(rows: Rows, i: int, calibration: str) -> PlanRow | None:
    """What the planner would run there: same model, GPUs, batch, format and attention."""
    c = rows.columns
    precision = DTYPES[int(c.precision[i])]
    attention = PRICED_ATTENTION[int(c.attention[i])]
    policy = {"precision": "bf16-mixed" if precision == "bf16" else precision}
    if attention in ("fused-softmax", "unfused"):
        policy["attention"] = attention
    try:
        answer = plan(
            PlanRequest(
                model=model_of(rows, i),
                seq_len=int(c.seq[i]),
                global_batch=int(c.batch[i]),
                gpus=int(c.gpus[i]),
                cluster=cluster_of(rows, i),
                stack=engine_of(rows.measured_as[i]).rules.name,
                policy=policy,
                calibration=calibration,
                top=1,
            )
        )
    except UserError as error:
        print(f"{rows.table.column('model')[i]}: {error}", file=sys.stderr)
        return None
    return answer.ranked[0] if answer.ranked else None


def layout(one: Famous) -> str:
    row, c, i = one.row, one.rows.columns, one.at
    if not row["tp"]:
        return "not published"
    words = [
        f"{axis}{row[axis]}" for axis in ("pp", "dp", "cp", "tp") if row[axis] not in ("", "1")
    ]
    words += [f"v{int(c.vpp[i])}{'' if row['vpp'] else '*'}"] if c.vpp[i] > 1 else []
    words += [f"micro batch {int(c.micro[i])}{'' if row['mbs'] else '*'}", row["sharding"]]
    again = "full" if c.full_ckpt[i] else "parts" if c.attn_ckpt[i] + c.mlp_ckpt[i] else "none"
    return " ".join(words) + f", recompute {again}{'' if row['act_ckpt'] else '*'}"


def line(one: Famous) -> list[str]:
    row, said, i = one.row, one.said, one.at
    name = f"[{row['run']}]({row['url']})" if row["url"] else row["run"]
    known = one.rows.usable[i]
    step = f"{said.step_s[i]:.2f} ({said.low_s[i]:.2f} to {said.high_s[i]:.2f})" if known else "-"
    truth = one.rows.step_s[i]
    figure = f"{row['speed_value']} {row['speed_kind']}".strip() or "-"
    measured = f"{truth:.2f}" if np.isfinite(truth) else "-"
    off = f"{100 * (said.step_s[i] / truth - 1):+.0f}%" if known and np.isfinite(truth) else "-"
    fits = f"{100 * said.fit_chance[i]:.0f}%" if known else "-"
    gpus = f"{row['n_gpus'] or '?'} x {row['hardware']}"
    return [name, gpus, layout(one), figure, measured, step, off, fits, choice(one)]


def choice(one: Famous) -> str:
    best = one.choice
    if best is None:
        return "-"
    words = f"{best} micro batch {best.micro_batch} {best.policy.sharding}"
    return f"{words}, recompute {best.policy.recompute} (fits {100 * best.fit_chance:.0f}%)"


def page(found: list[Famous]) -> str:
    head = ["run", "GPUs", "layout", "published", "s/step", "predicted s (80%)", "off", "fits",
            "what the planner would choose"]  # fmt: skip
    lines = [line(one) for one in found]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    table += ["| " + " | ".join(cells) + " |" for cells in lines]
    return TEXT.format(table="\n".join(table), **summary(found))


def summary(found: list[Famous]) -> dict[str, object]:
    scored = [one for one in found if one.rows.usable[one.at] and one.rows.step_s[one.at] > 0]
    ratio = np.array([one.said.step_s[one.at] / one.rows.step_s[one.at] for one in scored])
    inside = [
        one.said.low_s[one.at] <= one.rows.step_s[one.at] <= one.said.high_s[one.at]
        for one in scored
    ]
    ran = [one for one in found if one.rows.usable[one.at] and one.row["tp"]]
    fits = [bool(one.said.fits[one.at]) for one in ran]
    return {
        "runs": len(found),
        "scored": len(scored),
        "median": f"{100 * np.median(np.abs(ratio - 1)):.0f}",
        "p90": f"{100 * np.percentile(np.abs(ratio - 1), 90):.0f}",
        "inside": f"{100 * np.mean(inside):.0f}",
        "fits": sum(fits),
        "ran": len(ran),
    }


TEXT = """\
# Famous runs

Written by `python scripts/famous.py FOLDER` from a folder of reference tables, which stays outside;
the published facts and their sources are in the table. Each run is predicted without any row of its
source, as the engine that ran it where that is known, else as a typical one.

Of {runs} runs {scored} have a published speed that is no bound: the median error is {median}% (p90
{p90}%), and {inside}% lie in the 80% interval. {fits} of {ran} runs with a published layout are
said to fit (a chance of at least a half).

`*`: not published; the fastest value that fits is taken. Figures of whole runs (GPU hours, days)
contain stops: they are bounds and not compared. `fits` is the chance that it fits. The last column
is the first choice of `plan` for the same model, GPUs, batch, format and attention, with the
engine's family where that is known; runs of Megatron's fused softmax, which today's engine lacks,
have none.

{table}

## Where it is off, and why

- **ZeRO-3 of 2021 across 96 and 192 nodes** (sc21, deepspeed-zero3) ran two to three times slower
  than predicted: its gathers hardly overlapped, which no engine measured since shows.
- **Unfused engines** (GPT-NeoX, OLMo) are predicted 20% too fast, **llm.c**, where everything is
  one hand-written kernel, 15 to 36% too slow: what a stack fuses is not in its layout. Ten measured
  runs of one's own stack (`fourfold fit`) settle that.
- **Llama 3 405B** without recompute needs all that a lean engine can do: tensors freed as soon as
  they are used. With every tensor as counted and nothing wasted a rank holds 72 GiB on 16,384 GPUs;
  on 8,192 one or two micro batches more are in flight, and our estimate for a stack nobody measured
  lies above the card.
- **Choices** recompute parts of a layer (norms, activations, the attention core) where these runs
  recomputed whole layers or nothing: most engines of their years had no such switch. They use fewer
  pipeline stages with more shards of the optimizer, and fill the card further: whoever trains for
  months prefers a layout that surely fits (`--safe`).
"""


def main() -> None:
    folder = Path(sys.argv[1])
    if "--rows" in sys.argv:
        written_rows(folder, Path(sys.argv[sys.argv.index("--rows") + 1]))
    else:
        print(page(answers(folder)), end="")


if __name__ == "__main__":
    main()
