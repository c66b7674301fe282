"""Which model shapes are known, and how large are they?

Without a name: every preset. With a name, or the path of a Hugging Face config.json: its shape and
exact parameter count, and with layout flags what the first rank of each pipeline stage (or --rank)
holds and owns. A stage has more or fewer layers where embedding and output layer take their time.
"""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any

from fourfold.commands import flags
from fourfold.cost.count.params import layer_params, model_params, rank_params
from fourfold.cost.count.stages import stage_layers
from fourfold.errors import UserError
from fourfold.show.table import json_text, render
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.model import ModelShape, not_run, remarks
from fourfold.spec.run import RunSpec

EXAMPLES = """\
examples:
  fourfold models
  fourfold models llama-3.1-8b
  fourfold models gpt-181b --tp 8 --pp 12 --dp 4 --sharding zero1
  fourfold models gpt-3-175b --gpus 64 --tp 8 --pp 4 --rank 63
  fourfold models ./config.json --format json
  fourfold models ./Qwen3-8B                  a downloaded model's folder
"""
DEFAULT_SEQ_LEN = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", help="a preset, or the path of a config.json or of its folder"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="one rank, not the first of a stage")
    flags.add_layout(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    table = flags.run_table(args)
    table.setdefault("batch", {}).setdefault("seq_len", DEFAULT_SEQ_LEN)
    if args.name is None:
        if "layout" in table or "gpus" in table or args.rank is not None:
            raise UserError("is missing", field="name", hint="a layout is of one model: name it")
        return _list_all(args.format, codec.decode(Batch, table["batch"], "batch").seq_len)
    spec = codec.decode(RunSpec, table | {"model": args.name})
    answer = _describe(spec.model, spec.batch.seq_len)
    if spec.gpus > 1 or args.rank is not None:
        answer |= _shares(spec, args.rank)
    if args.format == "json":
        print(json_text(answer))
    elif "stages" not in answer:
        print(_shape_text(answer, args.format))
    else:
        print(_stages_text(answer, args.format))
    return 0


def _list_all(style: str, seq_len: int) -> int:
    shapes = [catalog.model(name) for name in catalog.model_names()]
    if style == "json":
        print(json_text([_describe(shape, seq_len) for shape in shapes]))
        return 0
    rows = [
        [
            shape.name, shape.family, str(shape.layers), str(shape.hidden), str(shape.ffn),
            str(shape.heads), str(shape.kv_heads), str(shape.vocab), "yes" if shape.tied else "no",
            f"{model_params(shape, seq_len):,}",
        ]
        for shape in shapes
    ]  # fmt: skip
    headings = [
        "model",
        "family",
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv",
        "vocab",
        "tied",
        "params",
    ]
    print(render(headings, rows, style))
    if style != "csv":
        print(f"\nlearned positions of MPT follow the sequence: counted at {seq_len} tokens")
    return 0


def _describe(model: ModelShape, seq_len: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "params": model_params(model, seq_len),
        "layer_params": layer_params(model),
        "seq_len": seq_len,
        "shape": codec.encode(model),
        "remarks": _remarks(model, seq_len),
    }


def _remarks(model: ModelShape, seq_len: int) -> list[str]:
    said = [f"plan approximates: {words}" for words in remarks(model, seq_len)]
    lacking = not_run(model, seq_len)
    if lacking:
        said.append(f"planned, not run here (at {seq_len} tokens): {', '.join(lacking)}")
    return said


def _shares(spec: RunSpec, rank: int | None) -> dict[str, Any]:
    """What one rank, or the first of every stage, holds and owns."""
    from fourfold.search.legal import require_legal

    model, layout, seq_len = spec.model, spec.layout, spec.batch.seq_len
    require_legal(spec, only=("stages", "heads", "kv-heads"))
    if rank is not None and not 0 <= rank < layout.world:
        raise UserError(f"must be from 0 to {layout.world - 1}", field="rank", value=rank)
    stages = stage_layers(model, layout.pp, seq_len)
    firsts = [stage * layout.stride("pp") for stage in range(layout.pp)]
    rows = []
    for each in firsts if rank is None else [rank]:
        count = rank_params(
            model, layout, seq_len=seq_len, stages=stages, rank=each, zero=spec.policy.zero
        )
        stage = layout.coordinates(each)["pp"]
        rows.append(
            {"stage": stage, "rank": each, "layers": len(stages[stage]), "held": count.held,
             "owned": count.owned}
        )  # fmt: skip
    return {"layout": str(layout), "sharding": spec.policy.sharding, "stages": rows}


def _shape_text(answer: dict[str, Any], style: str) -> str:
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
    table = render([answer["name"], "value"], rows, style)
    lines = [] if style == "csv" else answer["remarks"]
    return "\n".join([table, *([""] if lines else []), *lines])


def _usual() -> dict[str, Any]:
    """Fields that most models leave at their default, and are then not worth a line."""
    said = ("norm_eps", "embedding_norm", "head_dim", "name")
    return {
        field.name: [] if field.default == () else field.default
        for field in fields(ModelShape)
        if field.default is not MISSING and field.name not in said
    }


def _stages_text(answer: dict[str, Any], style: str) -> str:
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
    table = render(["stage", "rank", "layers", "held", "owned"], rows, style)
    if style == "csv":
        return table
    total = f"{answer['name']}: {answer['params']:,} parameters"
    meaning = (
        "held: of its stage and tensor shard, while it computes; owned: its share of the "
        "optimizer's\nupdate (under zero3 also all it keeps between uses; a tied copy is not owned)"
    )
    return f"{table}\n\n{total}; {answer['layout']}; {answer['sharding']}\n{meaning}"
