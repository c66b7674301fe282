"""Show what is known of a model: counted, run, priced and exported, by engine and GPU.

priced: measured (runs of this engine on these machines), near (on machines like them), blended
(its engine elsewhere, or other engines on such GPUs) or physics (formulas and data sheets alone).
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.events import OnEvent
from fourfold.output import Output
from fourfold.show.table import Part, named, table
from fourfold.verbs.export import Support, SupportRequest, SupportRow

EXAMPLES = """\
examples:
  fourfold support llama-3.1-70b
  fourfold support mixtral-8x7b megatron h100-80gb
"""
OPTIONS = (*options.of(SupportRequest), options.FORMAT)


def run(args: Any, show: OnEvent) -> Output:
    answer = fourfold.support(options.load(SupportRequest, args))
    return Output.of(answer, lambda: _page(answer))


def _page(answer: Support) -> list[Part]:
    refused = {line.engine: line.settings for line in answer.lines if line.settings != "yes"}
    lines: tuple[SupportRow, ...] = answer.lines
    return [
        f"{answer.model}: {answer.params:,} parameters counted; run by our own engine: "
        f"{answer.runs_here}",
        "",
        table(
            list(lines),
            *named("engine", "GPU=gpu", "priced", "rows", "by runs of=stack"),
            ("settings", lambda line: "yes" if line.settings == "yes" else "no"),
        ),
        "",
        *(f"{engine}: {why}" for engine, why in refused.items()),
    ]
