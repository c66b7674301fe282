#!/usr/bin/env python3
"""Makes docs/pictures/experts.png: which of FSDP, EP and PP is fastest by rows per expert and size
of the fast domain, by the planner; and the fastest measured runs of tables that `collect` wrote, or
of published rows in that form, where any are given:

    .venv/bin/python scripts/experts_picture.py [ROWS.csv ...]
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

import fourfold
from fourfold.show.pictures import content, empty_figure
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster
from fourfold.verbs.requests import ClusterRequest, PlanRequest

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "experts.png"
MODEL, GPU, GPUS, SEQ_LEN, NETWORK_GBIT = "qwen3-30b-a3b", "h100-80gb", 64, 4096, 400
DOMAINS = (8, 16, 64)
BATCHES = (16, 64, 256, 1024, 4096)
# How experts are spread: axes that are fixed, how weights are, and a condition.
WAYS = {
    "FSDP": ("pp1 cp1 ep1 etp1", {"sharding": "zero3"}, ()),
    "EP": ("pp1 cp1", {}, ("ep > 1",)),
    "PP": ("cp1 ep1 etp1", {"virtual_stages": 1}, ("pp > 1",)),
    "EP and PP": ("cp1", {"virtual_stages": 1}, ("ep > 1 and pp > 1",)),
}
COLOURS = {"FSDP": "#7dbb8a", "EP": "#6ba3c8", "PP": "#f2b880", "EP and PP": "#b9a0d0"}
MARKS = {"FSDP": "s", "EP": "o", "PP": "^", "EP and PP": "D"}
DOMAIN_OF = {"GB200": 64, "GB300": 64}  # of 72; other machines have 8


def machines(domain: int) -> Cluster:
    """GPUs with a fast domain of so many, and the same network for each."""
    device = replace(catalog.device(GPU), domain=domain)
    asked = ClusterRequest(
        name=f"domains of {domain}", gpu=GPU, hosts=GPUS // domain, host_gpus=domain,
        network=f"{NETWORK_GBIT * domain}Gbit/s",
    )  # fmt: skip
    return replace(fourfold.new_cluster(asked).cluster, device=device)


def seconds(routing: str, domain: int, batch: int) -> dict[str, float]:
    """Of the first choice of each way that has one."""
    found = {}
    for way, (layout, policy, where) in WAYS.items():
        request = PlanRequest(
            model=MODEL, cluster=machines(domain), gpus=GPUS, seq_len=SEQ_LEN, global_batch=batch,
            stack="fourfold", layout=layout, policy={**policy, "routing": routing}, where=where,
            top=1, explore=True,
        )  # fmt: skip
        if (best := fourfold.plan(request).best) is not None:
            found[way] = best.step_s
    return found


def rows_per_expert(tokens: float, top_k: float, experts: float) -> float:
    """Of a GPU's tokens in a step."""
    return tokens * top_k / experts


def measured(paths: list[str]) -> Iterator[tuple[str, float, int, str]]:
    """(routing, rows per expert, domain, way) of the fastest run of each question: source,
    model, machines, number of GPUs, batch."""
    best: dict[tuple[Any, ...], dict[str, str]] = {}
    for path in paths:
        with open(path, newline="") as stream:
            for row in csv.DictReader(stream):
                if not all(row.get(name) for name in ("experts", "step_s", "ep", "pp", "gbs")):
                    continue
                if int(row["n_gpus"]) < 16 or int(row["d_model"]) < 2048:
                    continue  # one host, or no real model
                names = ("source", "model", "hardware", "n_gpus", "gbs", "seq_len", "routing")
                key = tuple(row[name] for name in names)
                if key not in best or float(row["step_s"]) < float(best[key]["step_s"]):
                    best[key] = row
    for row in best.values():
        tokens = float(row["gbs"]) * float(row["seq_len"]) / float(row["n_gpus"])
        spread, piped = int(row["ep"]) > 1, int(row["pp"]) > 1
        way = ("EP and PP" if piped else "EP") if spread else "PP" if piped else "FSDP"
        domain = next((n for gpu, n in DOMAIN_OF.items() if gpu in row["hardware"].upper()), 8)
        of = float(row["experts_per_token"]), float(row["experts"])
        routing = "natural" if row["routing"] == "natural" else "forced"
        yield routing, rows_per_expert(tokens, *of), domain, way


def panel(axes: Axes, cells: dict[tuple[int, int], dict[str, float]]) -> list[float]:
    """The fastest way in each cell, and how much the second loses; rows per expert of batches."""
    shape = catalog.model(MODEL)
    xs = [rows_per_expert(b * SEQ_LEN / GPUS, shape.top_k, shape.experts) for b in BATCHES]
    for (domain, batch), found in cells.items():
        x, ways = xs[BATCHES.index(batch)], sorted(found, key=lambda way: found[way])
        y = DOMAINS.index(domain)
        axes.fill_between([x / 2, 2 * x], y - 0.5, y + 0.5, color=COLOURS[ways[0]], lw=0)
        second = f"\n{ways[1]} +{found[ways[1]] / found[ways[0]] - 1:.0%}" if len(ways) > 1 else ""
        axes.text(x, y - 0.15, f"{ways[0]}{second}", ha="center", va="center", fontsize=7.5)
    axes.set(xscale="log", xlim=(xs[0] / 2, 2 * xs[-1]), xticks=xs, yticks=range(len(DOMAINS)),
             ylim=(-0.5, len(DOMAINS) - 0.5), ylabel="GPUs of the fast domain")  # fmt: skip
    axes.set_xticklabels([f"{x:,.0f}" for x in xs])
    axes.set_yticklabels(map(str, DOMAINS))
    axes.minorticks_off()
    return xs


def draw(
    cells: dict[str, dict[tuple[int, int], dict[str, float]]],
    points: list[tuple[str, float, int, str]],
) -> bytes:
    figure = empty_figure(str(PICTURE), 9.5, 7.0)
    every = figure.subplots(len(cells), 1)
    for axes, (routing, found) in zip(every, cells.items(), strict=True):
        panel(axes, found)
        own = sorted(point for point in points if point[0] == routing)
        for number, (_, x, domain, way) in enumerate(own):
            y = DOMAINS.index(domain) + 0.2 + 0.11 * (number % 3)  # above a cell's words
            axes.plot(x, y, MARKS[way], color="#222222", mfc=COLOURS[way], ms=5, mew=0.7)
        axes.set_title(f"{MODEL}, {GPUS} {GPU}, {routing} routing", fontsize=10)
    every[-1].set_xlabel("rows per expert of a GPU's tokens in a step")
    for way, mark in MARKS.items():
        every[0].plot([], [], mark, color="#222222", mfc=COLOURS[way], ms=5, mew=0.7, label=way)
    every[0].legend(title="fastest measured\nruns of a question", fontsize=8, title_fontsize=8,
                    loc="upper left", bbox_to_anchor=(1.0, 1.0))  # fmt: skip
    return content(figure, str(PICTURE))


def main() -> None:
    cells = {
        routing: {(domain, batch): seconds(routing, domain, batch)
                  for domain in DOMAINS for batch in BATCHES}
        for routing in ("forced", "natural")
    }  # fmt: skip
    for routing, found in cells.items():
        for place, ways in found.items():
            print(routing, *place, {way: round(value, 3) for way, value in ways.items()})
    PICTURE.write_bytes(draw(cells, list(measured(sys.argv[1:]))))


if __name__ == "__main__":
    main()
