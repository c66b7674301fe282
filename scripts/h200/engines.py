"""Which rows of other engines are measured on one H200, and which of them are kept apart.

python scripts/h200/engines.py draw        results/h200/engines: the grid, the rows drawn from it
python scripts/h200/engines.py predict     what `fourfold predict` says of them, before they are run
python scripts/h200/engines.py compare     what was measured beside that, by engine, as Markdown

The draw has a seed: drawn again, it is the same. A third of the rows of each kind is kept apart: no
coefficient may be fitted to them.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fourfold.cost.count.params import model_params
from fourfold.spec import catalog
from fourfold.spec.model import ModelShape
from fourfold.text_table import render

HERE = Path(__file__).parents[2] / "results" / "h200"
GRID, DRAWN = HERE / "engines" / "grid.csv", HERE / "engines" / "drawn.csv"
PREDICTED, MEASURED = HERE / "engines" / "predicted.csv", HERE / "engines.csv"
SEED = 20261119
APART = 1 / 3
MOST_GIB = 128.0  # of roughly counted memory: the rest is for what the count leaves out
COLUMNS = (
    "row_id", "kind", "held_out", "engine", "compiled", "weights", "recipe", "rank", "source",
    "stack", "cluster", "hardware", "gpus_per_node", "family", "model", "n_layers", "d_model",
    "n_heads", "n_kv_heads", "d_ff", "vocab", "tied", "seq_len", "n_gpus", "tp", "cp", "pp", "vpp",
    "dp", "sharding", "sequence_parallel", "mbs", "gbs", "precision", "act_ckpt", "attention",
    "note", "head_dim", "attn_kind", "q_lora_rank", "kv_lora_rank", "qk_rope_dim", "v_head_dim",
    "experts", "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers", "moe_every", "ep",
    "etp", "dispatcher", "routing", "rough_gib",
)  # fmt: skip
RELEASES = {"torchtitan": "0.2.2", "accelerate": "1.15", "deepspeed": "0.19.8"}
Row = dict[str, object]


class Draw(NamedTuple):
    """How many rows of a kind are run, as evenly as they go over `over`."""

    rows: int
    over: tuple[str, ...]


DRAWS = {
    "titan compiled": Draw(12, ("model",)),
    "titan eager": Draw(8, ("model",)),
    "titan fp8": Draw(4, ("recipe",)),
    "titan experts": Draw(4, ("model",)),
    "accelerate eager": Draw(5, ("sharding", "weights")),
    "accelerate compiled": Draw(4, ("sharding", "weights")),
    "deepspeed": Draw(5, ("sharding",)),
    "titan rank of many": Draw(10, ("n_gpus", "pp")),
}
ONE_B, THREE_B, EIGHT_B = "llama-3.2-1b-untied", "llama-3.2-3b-untied", "llama-3.1-8b"
BATCHES = {
    ONE_B: ((2048, 4), (2048, 8), (4096, 4), (8192, 2), (16384, 1), (32768, 1)),
    THREE_B: ((2048, 4), (4096, 2), (8192, 1), (16384, 1), (32768, 1)),
    EIGHT_B: ((2048, 4), (4096, 2), (8192, 1), (16384, 1), (32768, 1)),
    "qwen3-1.7b": ((2048, 4), (4096, 2), (8192, 1), (16384, 1)),
    "qwen3-4b": ((2048, 4), (4096, 1), (8192, 1)),
}
WIDE, NARROW = "float32", "bfloat16"


def grid() -> Iterator[Row]:
    """Return every candidate."""
    for model in (ONE_B, THREE_B, EIGHT_B):
        for recompute in ("none", "selective", "full"):
            for weights in (WIDE, NARROW):
                some = {"model": model, "act_ckpt": recompute, "weights": weights}
                for batch in BATCHES[model]:
                    yield _row("titan compiled", "torchtitan", some, batch, compiled=1)
                    yield _row("titan eager", "torchtitan", some, batch, compiled=0)
                    for recipe in ("tensorwise", "rowwise"):
                        eight = some | {"recipe": recipe}
                        yield _row("titan fp8", "torchtitan", eight, batch, compiled=1)
    for model in ("qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v2-lite"):
        for recompute in ("none", "full"):
            for compiled in (1, 0):
                for batch in ((4096, 1), (4096, 2), (4096, 4), (8192, 1)):
                    some = {"model": model, "act_ckpt": recompute, "weights": NARROW}
                    yield _row("titan experts", "torchtitan", some, batch, compiled=compiled)
    for model in (ONE_B, THREE_B, EIGHT_B, "qwen3-1.7b", "qwen3-4b"):
        for recompute in ("none", "full"):
            for batch in BATCHES[model]:
                some = {"model": model, "act_ckpt": recompute}
                for sharding in ("zero0", "zero3"):
                    for weights in (WIDE, NARROW):
                        here = some | {"sharding": sharding, "weights": weights}
                        for compiled, word in ((0, "eager"), (1, "compiled")):
                            kind = f"accelerate {word}"
                            yield _row(kind, "accelerate", here, batch, compiled=compiled)
                for sharding in ("zero1", "zero2", "zero3"):
                    here = some | {"sharding": sharding, "weights": "bfloat16+float32"}
                    yield _row("deepspeed", "deepspeed", here, batch, compiled=0)
    yield from _ranks()


def _ranks() -> Iterator[Row]:
    """One rank of several GPUs, on a fake process group: first and last of a pipeline."""
    for model in (EIGHT_B, ONE_B):
        for world, tp, pp in (
            (8, 1, 1), (64, 1, 1), (256, 1, 1), (64, 2, 1), (64, 4, 1), (64, 8, 1), (64, 1, 4),
            (64, 4, 4), (64, 8, 4), (64, 2, 8),
        ):  # fmt: skip
            for recompute in ("none", "selective", "full"):
                for compiled in (1, 0):
                    for length, batch in ((4096, 1), (8192, 1), (8192, 2), (16384, 1)):
                        for rank in (0, world - 1) if pp > 1 else (0,):
                            some = {"model": model, "act_ckpt": recompute, "weights": WIDE}
                            some |= {"n_gpus": world, "tp": tp, "pp": pp, "rank": rank}
                            yield _row(
                                "titan rank of many", "torchtitan", some, (length, batch),
                                compiled=compiled,
                            )  # fmt: skip


def _row(kind: str, engine: str, some: Row, batch: tuple[int, int], *, compiled: int) -> Row:
    name = str(some["model"])
    model = catalog.model(name)
    if model.moe:  # what one GPU holds
        model = replace(model, layers=min(8, model.layers)) if name != "olmoe-1b-7b" else model
    length, size = batch
    world, tp, pp = (int(str(some.get(axis, 1))) for axis in ("n_gpus", "tp", "pp"))
    dp = world // (tp * pp)
    micro_batches = 2 * pp if pp > 1 else 1
    release = f"{engine} {RELEASES[engine]}"
    words = ["compiled" if compiled else "eager", f"{release}, torch 2.11"]
    words += [f"weights {some['weights']}"] + (
        [f"recipe {some['recipe']}"] if "recipe" in some else []
    )
    if world > 1:
        words.append(f"rank {some['rank']} on a fake process group, without communication")
    precision = "fp8" if "recipe" in some else "bf16-pure" if some["weights"] == NARROW else "bf16"
    row: Row = dict.fromkeys(COLUMNS, "") | _shape_cells(model) | {
        "kind": kind, "engine": engine, "compiled": compiled, "source": "h200",
        "stack": f"{engine}-{RELEASES[engine]}", "cluster": "one-h200", "hardware": "h200",
        "gpus_per_node": min(8, world), "seq_len": length, "mbs": size,
        "gbs": size * micro_batches * dp, "n_gpus": world, "tp": tp, "cp": 1, "pp": pp, "vpp": 1,
        "dp": dp, "sharding": "zero3" if world > 1 else "zero0", "sequence_parallel": int(tp > 1),
        "rank": 0, "precision": precision, "note": "; ".join(words),
    } | some  # fmt: skip
    layers = f"-{model.layers}l" if model.layers != catalog.model(name).layers else ""
    return row | {"model": name + layers}


def _shape_cells(model: ModelShape) -> Row:
    cells: Row = {
        "family": "qwen-moe" if model.family == "olmoe" else model.family,
        "n_layers": model.layers, "d_model": model.hidden, "n_heads": model.heads,
        "n_kv_heads": model.kv_heads, "d_ff": model.ffn, "vocab": model.vocab,
        "tied": int(model.tied), "head_dim": model.head_dim or "",
    }  # fmt: skip
    if moe := model.moe:
        cells |= {
            "experts": model.experts, "experts_per_token": model.top_k, "expert_ffn": moe.ffn,
            "shared_ffn": moe.shared_ffn, "dense_layers": moe.dense_first, "moe_every": moe.every,
            "ep": 1, "etp": 1, "routing": "forced", "dispatcher": "local",
            "head_dim": model.head_dim or model.hidden // model.heads,
        }  # fmt: skip
    if latent := model.latent:
        cells |= {
            "attn_kind": "mla", "q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank,
            "qk_rope_dim": latent.rope, "v_head_dim": latent.v,
            "head_dim": latent.nope + latent.rope,
        }  # fmt: skip
    return cells


def rough_gib(row: Row) -> float:
    """Return a rough count of memory: weights, gradients and moments; what a layer keeps of a
    token; the loss over all words. It only keeps out what would surely end early, and says which
    rows may share the GPU while they compile."""
    name = str(row["model"]).removesuffix("-8l")
    model = catalog.model(name)
    if name + "-8l" == row["model"]:
        model = replace(model, layers=8)
    split = int(str(row["tp"])) * int(str(row["pp"]))
    shards = int(str(row["n_gpus"])) if row["sharding"] == "zero3" else split
    state = {NARROW: 8.0, WIDE: 16.0, "bfloat16+float32": 18.0}[str(row["weights"])]
    tokens = int(str(row["mbs"])) * int(str(row["seq_len"]))
    ffn = model.top_k * model.moe.ffn + model.moe.shared_ffn if model.moe else model.ffn
    kv = model.kv_heads * (model.head_dim or model.hidden // model.heads)
    kept = {"none": 1.0, "selective": 0.5}.get(str(row["act_ckpt"]), 0.0)
    layer = kept * (14 * model.hidden + 4 * kv + 8 * ffn) + 2 * model.hidden
    # A pipeline's first stage holds as many micro batches as there are stages.
    activations = tokens * model.layers * layer / int(str(row["tp"]))
    hugging_face = row["engine"] != "torchtitan"
    loss = tokens * model.vocab * (20 if hugging_face else 4 if row["compiled"] else 12)
    whole = state * model_params(model, 1) / shards + activations + loss / int(str(row["tp"]))
    return whole / 2**30


def draw(rows: list[Row]) -> list[Row]:
    """Rows of each kind in random order, taken in turn from the values of what they go over; then
    all kinds in turn, so that an early end takes from each. Rows of many GPUs come last."""
    dice = random.Random(SEED)
    kinds = []
    for kind, (many, over) in DRAWS.items():
        parts: dict[tuple[object, ...], list[Row]] = {}
        for row in rows:
            if row["kind"] == kind:
                parts.setdefault(tuple(row[name] for name in over), []).append(row)
        shuffled = list(parts.values())
        dice.shuffle(shuffled)
        for part in shuffled:
            dice.shuffle(part)
        taken = [part[at] for at in range(many) for part in shuffled if at < len(part)][:many]
        apart = set(dice.sample(range(len(taken)), round(APART * len(taken))))
        kinds.append([row | {"held_out": int(i in apart)} for i, row in enumerate(taken)])
    last = kinds.pop()
    return _in_turn(kinds) + last


def _in_turn(kinds: list[list[Row]]) -> list[Row]:
    placed = [
        ((place + 0.5) / len(kind), which, place)
        for which, kind in enumerate(kinds)
        for place in range(len(kind))
    ]
    return [kinds[which][place] for _, which, place in sorted(placed)]


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw_all() -> None:
    sized = [(row, rough_gib(row)) for row in grid()]
    rows = [row | {"rough_gib": f"{gib:.1f}"} for row, gib in sized if gib < MOST_GIB]
    rows = [row | {"row_id": f"g{at:04d}"} for at, row in enumerate(rows)]
    write(GRID, rows)
    drawn = draw(rows)
    write(DRAWN, drawn)
    apart = sum(bool(row["held_out"]) for row in drawn)
    print(f"{len(rows)} candidates, {len(drawn)} drawn, {apart} kept apart")


def predict_all() -> None:
    words = [sys.executable, "-m", "fourfold", "predict", str(DRAWN), "--out", str(PREDICTED)]
    subprocess.run(words, check=True)


def compare() -> str:
    """Return errors by kind: the median of all and of those kept apart, and how many lie inside."""
    said = {row["row_id"]: row for row in read(PREDICTED)}
    found = [row for row in read(MEASURED) if row["status"] == "ok"]
    cells = []
    for kind in dict.fromkeys(row["kind"] for row in found):
        rows = [row for row in found if row["kind"] == kind]
        pairs = [(row, said[row["row_id"]]) for row in rows if said[row["row_id"]]["step_s"]]
        off = [math.log(float(p["step_s"]) / float(r["step_s"])) for r, p in pairs]
        inside = [
            float(p["step_s_low"]) <= float(r["step_s"]) <= float(p["step_s_high"])
            for r, p in pairs
        ]
        memory = [float(p["mem_gb"]) / float(r["mem_gb"]) - 1 for r, p in pairs if p["mem_gb"]]
        cells.append(
            [kind, str(len(rows)), _percent(median(map(abs, off))), _percent(median(off), "+"),
             f"{sum(inside)} of {len(inside)}", _percent(median(map(abs, memory))),
             _percent(median(memory), "+")]
        )  # fmt: skip
    heads = ["kind", "rows", "seconds off", "bias", "inside 80%", "memory off", "bias"]
    return render(heads, cells, "md")


def _percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("draw", "predict", "compare"))
    what = parser.parse_args().what
    if what == "compare":
        print(compare())
    else:
        {"draw": draw_all, "predict": predict_all}[what]()


if __name__ == "__main__":
    main()
