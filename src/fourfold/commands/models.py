"""List model presets, or show one model's shape and size.

Without a name it lists every preset. With a name, or the path of a Hugging Face config.json, it
shows the shape and exact parameter count; with layout flags also what the first rank of each
pipeline stage (or --rank) holds and owns. Stages are balanced by cost, so their layers may differ.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.errors import UserError
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output

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
    option("name", "a preset, or the path of a config.json or of its folder", "NAME", nargs="?"),
    option("--rank", "show one rank instead of the first of each stage", "R", read=int),
    *options.layout_options(),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    from fourfold.show import shapes

    table = options.run_table(args)
    table.setdefault("batch", {}).setdefault("seq_len", 2048)
    if args.name is None:
        if "layout" in table or "gpus" in table or args.rank is not None:
            raise UserError("is required", field="name", hint="a layout is of one model")
        listed = fourfold.models(int(table["batch"]["seq_len"]))
        return Output.of(listed, lambda: shapes.models_page(listed))
    answer = fourfold.model(table | {"model": args.name}, rank=args.rank)
    return Output.of(answer, lambda: shapes.model_page(answer))
