"""Which model shapes are known, and how large are they?

Without a name: every preset. With a name, or the path of a Hugging Face config.json: its shape and
exact parameter count, and with layout flags what each pipeline stage and rank holds.
"""

from __future__ import annotations

import argparse
from typing import Any

from fourfold.commands import flags
from fourfold.cost.params import layer_params, model_params, rank_params
from fourfold.cost.stages import stage_layers
from fourfold.errors import UserError
from fourfold.show.table import json_text, render
from fourfold.spec import catalog, codec
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy

EXAMPLES = """\
examples:
  fourfold models
  fourfold models llama-3.1-8b
  fourfold models gpt-181b --tp 8 --pp 12 --dp 4 --sharding zero1
  fourfold models ./config.json --format json
"""
DEFAULT_SEQ_LEN = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a preset, or the path of a config.json")
    flags.add_layout(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    seq_len = DEFAULT_SEQ_LEN if args.seq_len is None else args.seq_len
    if not 1 <= seq_len <= 2**32:
        raise UserError("must be from 1 to 2^32", field="seq-len", value=seq_len)
    if args.name is None:
        return _list_all(args.format, seq_len)
    model = catalog.model(args.name)
    table = flags.run_table(args)
    layout = Layout.from_plain(table.get("layout", {}), "layout")
    policy = codec.decode(Policy, table.get("policy", {}), "policy")
    answer = _describe(model, layout, policy, seq_len)
    if args.format == "json":
        print(json_text(answer))
    elif layout.world == 1:
        print(_shape_text(answer, args.format))
    else:
        print(_stages_text(answer, args.format))
    return 0


def _list_all(style: str, seq_len: int) -> int:
    shapes = [catalog.model(name) for name in catalog.model_names()]
    if style == "json":
        print(json_text([_describe(shape, Layout(), Policy(), seq_len) for shape in shapes]))
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


def _describe(model: ModelShape, layout: Layout, policy: Policy, seq_len: int) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "name": model.name,
        "params": model_params(model, seq_len),
        "layer_params": layer_params(model),
        "seq_len": seq_len,
        "shape": codec.encode(model),
    }
    if layout.world > 1:
        _refuse_uneven(model, layout)
        stages = stage_layers(model, layout.pp, seq_len)
        answer |= {"layout": str(layout), "sharding": policy.sharding, "stages": []}
        for stage, layers in enumerate(stages):
            rank = stage * layout.stride("pp")
            count = rank_params(
                model, layout, seq_len=seq_len, stages=stages, rank=rank, zero=policy.zero
            )
            answer["stages"].append(
                {"stage": stage, "rank": rank, "layers": len(layers), "held": count.held,
                 "owned": count.owned}
            )  # fmt: skip
    return answer


def _refuse_uneven(model: ModelShape, layout: Layout) -> None:
    if layout.pp > model.layers:
        raise UserError(f"exceeds layers={model.layers}", field="pp", value=layout.pp)
    if model.heads % layout.tp:
        raise UserError(f"must divide heads={model.heads}", field="tp", value=layout.tp)
    if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        raise UserError(
            f"must divide kv_heads={model.kv_heads} or be a multiple of it",
            field="tp",
            value=layout.tp,
        )


def _shape_text(answer: dict[str, Any], style: str) -> str:
    shape = dict(answer["shape"])
    positions = dict(shape.pop("positions"))
    rows = [
        ["parameters", f"{answer['params']:,}"],
        ["of one layer", f"{answer['layer_params']:,}"],
    ]
    rows += [[key, str(value)] for key, value in shape.items() if key not in ("experts", "top_k")]
    scaling = positions.pop("scaling", {})
    rows += [[f"positions.{key}", str(value)] for key, value in positions.items()]
    rows += [[f"positions.scaling.{key}", str(value)] for key, value in scaling.items()]
    return render([answer["name"], "value"], rows, style)


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
    table = render(["stage", "first rank", "layers", "held", "owned by its optimizer"], rows, style)
    if style == "csv":
        return table
    total = f"{answer['name']}: {answer['params']:,} parameters"
    return f"{table}\n\n{total}; {answer['layout']}; {answer['sharding']}"
