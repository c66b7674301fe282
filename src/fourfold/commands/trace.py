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
from fourfold.output import Output, Stderr
from fourfold.show import trace as shown
from fourfold.show import trace_run
from fourfold.show.table import Part
from fourfold.show.trace_picture import picture
from fourfold.spec import codec
from fourfold.verbs.tool_requests import TraceRequest

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


def run(args: Any) -> Output:
    show = Stderr()
    answer = fourfold.trace(options.load(TraceRequest, args), on_event=show)
    show.close()
    if args.picture:
        drawn = picture(answer.program, answer.steps, args.picture)
        files.write_bytes(args.picture, drawn, field="picture")
    wrong = answer.measured is not None and answer.measured.wrong
    return Output(
        lambda: _plain(answer),
        lambda: shown.tensor_rows(answer.steps),
        lambda: _page(answer, args.format or "text"),
        1 if wrong else 0,
    )


def _plain(answer: Any) -> dict[str, Any]:
    plain = shown.plain(answer.program, answer.steps, answer.cluster)
    if answer.measured is not None:
        pairs = trace_run.pairs(answer.program, answer.steps, answer.measured)
        plain["measured"] = trace_run.plain(pairs, answer.measured)
    elif answer.advice is not None:
        plain["recommendation"] = codec.encode(answer.advice)
    return plain


def _page(answer: Any, style: str) -> list[Part]:
    """The steps and which kind to take; of a run, computed beside measured."""
    program, cluster = answer.program, answer.cluster
    if answer.measured is not None:
        pairs = trace_run.pairs(program, answer.steps, answer.measured)
        text = trace_run.text(pairs, answer.measured, style)
        return [shown.header(program, cluster), "", text]
    parts: list[Part] = [shown.text(program, answer.steps, cluster, style)]
    if answer.advice is not None:
        parts += ["", shown.advice_text(answer.advice, program, cluster, style)]
    return parts
