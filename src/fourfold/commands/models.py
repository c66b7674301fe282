"""List model presets, or show one model's shape and size.

Without a name it lists every preset. With a name, or the path of a Hugging Face config.json, it
shows the shape and exact parameter count; with layout flags also what the first rank of each
pipeline stage (or --rank) holds and owns. Stages are balanced by cost, so their layers may differ.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import fourfold
from fourfold import options
from fourfold.errors import UserError
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.table import Grid, Part
from fourfold.spec.model import ModelShape

EXAMPLES = """\
examples:
  fourfold models
  fourfold models llama-3.1-8b
  fourfold models gpt-181b --tp 8 --pp 12 --dp 4 --sharding zero1
  fourfold models gpt-3-175b --gpus 64 --tp 8 --pp 4 --rank 63
  fourfold models ./config.json --format json
  fourfold models ./Qwen3-8B                  a downloaded model's folder
"""
OPTIONS = (
    option("name", "a preset, or the path of a config.json or of its folder", nargs="?"),
    option("--rank", "show one rank instead of the first of each stage", "R", read=int),
    *options.layout_options(),
    options.FORMAT,
)
_COLUMNS = ("family", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab")


def run(args: Any) -> Output:
    table = options.run_table(args)
    table.setdefault("batch", {}).setdefault("seq_len", 2048)
    if args.name is None:
        if "layout" in table or "gpus" in table or args.rank is not None:
            raise UserError("is required", field="name", hint="a layout is of one model")
        answer = fourfold.models(int(table["batch"]["seq_len"]))
        return Output.of(answer, lambda: _list_page(answer.facts))
    answer = fourfold.model(table | {"model": args.name}, rank=args.rank)
    page = _stages_page if "stages" in answer.facts else _shape_page
    return Output.of(answer, lambda: page(answer.facts))


def _list_page(found: list[dict[str, Any]]) -> list[Part]:
    rows = [
        [one["name"], *(str(one["shape"][name]) for name in _COLUMNS),
         "yes" if one["shape"]["tied"] else "no", f"{one['params']:,}"]
        for one in found
    ]  # fmt: skip
    headings = ["model", *(name.removesuffix("_heads") for name in _COLUMNS), "tied", "params"]
    note = f"learned positions of MPT follow the sequence: counted at {found[0]['seq_len']} tokens"
    return [Grid(headings, rows), "", note]


def _shape_page(answer: dict[str, Any]) -> list[Part]:
    shape = dict(answer["shape"])
    positions = dict(shape.pop("positions"))
    rows = [
        ["parameters", f"{answer['params']:,}"],
        ["of one layer", f"{answer['layer_params']:,}"],
    ]
    unsaid = _usual()
    rows += [
        [key, ", ".join(value) if isinstance(value, list) else str(value)]
        for key, value in shape.items()
        if key not in unsaid or value != unsaid[key]
    ]
    scaling = positions.pop("scaling", {})
    if positions["partial"] == 1:
        del positions["partial"]
    rows += [[f"positions.{key}", str(value)] for key, value in positions.items()]
    rows += [[f"positions.scaling.{key}", str(value)] for key, value in scaling.items()]
    return [Grid([answer["name"], "value"], rows), "", *answer["remarks"]]


def _usual() -> dict[str, Any]:
    """Fields that most models leave at their default, and are then not worth a line."""
    said = ("norm_eps", "embedding_norm", "head_dim", "name")
    return {
        field.name: [] if field.default == () else field.default
        for field in fields(ModelShape)
        if field.default is not MISSING and field.name not in said
    }


def _stages_page(answer: dict[str, Any]) -> list[Part]:
    rows = [
        [
            str(row["stage"]),
            str(row["rank"]),
            str(row["layers"]),
            f"{row['held']:,}",
            f"{row['owned']:,}",
        ]
        for row in answer["stages"]
    ]
    table = Grid(["stage", "rank", "layers", "held", "owned"], rows)
    total = f"{answer['name']}: {answer['params']:,} parameters"
    meaning = (
        "held: of its stage and tensor shard, while it computes; owned: its share of the "
        "optimizer's\nupdate (under zero3 also all it keeps between uses; a tied copy is not owned)"
    )
    return [table, "", f"{total}; {answer['layout']}; {answer['sharding']}", meaning]
