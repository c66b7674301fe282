"""Find hidden sizes, heads, MLP widths, experts, vocabularies and micro batches that suit a GPU.

Judges sizes against tiles, waves, alignment and kernel rules with the cost model's formulas, and
names the nearest better value. With --params, --tokens and a machine it compares model shapes of
about that many parameters, each at its best layout, by days of training.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.events import OnEvent
from fourfold.output import Output
from fourfold.show.shapes import advice_page
from fourfold.verbs.advise import AdviseRequest

EXAMPLES = """\
examples:
  fourfold advise --gpu a100-80gb --tp 8 --hidden 14400
  fourfold advise --gpu a100-80gb --tp 8 --hidden 13824 --heads 128
  fourfold advise --gpu h100-80gb --model llama-3.1-8b --tp 2 --micro-batch 3 --seq-len 8192
  fourfold advise --gpu b200 --hidden 4096 --experts 128 --expert-ffn 1408 --top-k 8 --ep 8
  fourfold advise --cluster jean-zay --max-nodes 48 --params 176e9 --tokens 350e9 --seq-len 2048 \\
      --global-batch 2048 --tp 8
"""
OPTIONS = (*options.of(AdviseRequest), options.FORMAT)


def run(args: Any, show: OnEvent) -> Output:
    answer = fourfold.advise(options.load(AdviseRequest, args), on_event=show)
    return Output.of(answer, lambda: advice_page(answer), status=int(answer.none_fits))
