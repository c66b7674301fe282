"""Show what every step of a parallel layer does on one rank: computed, or run with --run.

Prints tensors as `name [symbolic] = [numbers]`, elements and bytes, FLOPs of one rank and of all,
bytes sent and over which link, copy or view, and live and peak memory after every step.

ulysses, allgather and ring split the sequence over all ranks (tp x cp x dp); mlp splits over tp; in
mlp2d a rank has tokens/dp (gathered over tp) and ffn/tp; layer is a whole decoder layer of a model
under tp x cp x dp, forward and backward.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.events import OnEvent
from fourfold.output import Output
from fourfold.show.pictures import trace_picture
from fourfold.show.trace import page
from fourfold.verbs.run_requests import TraceRequest

EXAMPLES = """\
examples:
  fourfold trace ulysses --tokens 60000 --hidden 16384 --heads 128 --tp 8 --dp 2 --attention naive
  fourfold trace ring --model llama-3.1-8b --tokens 131072 --cp 16 --cluster nvidia-h100
  fourfold trace layer --model llama-3.1-70b --tokens 32768 --tp 8 --cp 2 --dp 4 --sharding zero3
  fourfold trace ring --tokens 512 --hidden 256 --heads 8 --cp 4 --dtype fp32 --run
  fourfold trace mlp2d --tokens 60000 --hidden 16384 --ffn 53248 --layers 126 --tp 8 --dp 2
"""
OPTIONS = (
    *options.of(TraceRequest),
    options.option("--picture", "draw memory over the steps", "FILE.png"),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    answer = fourfold.trace(options.load(TraceRequest, args), on_event=show)
    if args.picture:
        drawn = trace_picture(answer.program, answer.steps, args.picture)
        files.write_bytes(args.picture, drawn, field="picture")
    is_wrong = answer.measured is not None and bool(answer.measured.wrong)
    return Output.of(answer, lambda: page(answer, args.format or "text"), status=int(is_wrong))
