"""Check that layouts compute what one process computes.

Trains tiny models both ways and compares the loss, every gradient, the global norm, and the
parameters after three clipped AdamW steps. With --engine another engine is checked, by its own
parallel code, and a difference gets a name; 'fourfold engines' installs releases.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import fourfold
from fourfold import options
from fourfold.errors import UserError
from fourfold.events import OnEvent
from fourfold.output import Output, submitted
from fourfold.show.machines import verdicts_page
from fourfold.show.runs import verified_page
from fourfold.spec import codec
from fourfold.verbs.run_requests import VerifyRequest

EXAMPLES = """\
examples:
  fourfold verify --world 4                       every legal layout of 4 ranks, three families
  fourfold verify --world 8 --sample 40 --seed 1  a stratified sample
  fourfold verify --world 16 --layout "pp2 dp2 cp2 tp2" --set policy.cp_kind=ulysses
  fourfold verify --world 4 --layout "dp2 tp2" --break norm-grad   must fail: it sees mistakes
  fourfold verify --world 8 --device cuda         on your GPUs, over NCCL
  fourfold verify --world 8 --sample 20 --device cuda --share-gpu    all ranks on one GPU
  fourfold verify --engine megatron-core==0.19.2 --layout "tp2 sp ep2 etp1 experts"
  fourfold verify --engine torchtitan==0.2.2 --layout dp2 --repro fault.py
"""
OPTIONS = (
    *options.of(VerifyRequest),
    options.SET._replace(help="set a policy field, such as policy.cp_kind=ring"),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    policy = {}
    for path, text in options.assignments(args):
        name = path.removeprefix("policy.")
        if not text or "." in name:
            raise UserError("must be policy.FIELD=VALUE", field="--set", value=f"{path}={text}")
        policy[name] = codec.toml_value(text)
    request = options.load(VerifyRequest, args, policy=policy)
    if request.engine:
        verdicts = fourfold.conform(request, on_event=show)
        pages = partial(verdicts_page, verdicts)
        return Output.of(verdicts, pages, status=0 if verdicts.right else 1)
    if request.detach or request.print_launch:
        return submitted(fourfold.submit_verify(request))
    answer = fourfold.verify(request, on_event=show)
    status = 0 if answer.passed == answer.total else 1
    return Output.of(answer, lambda: verified_page(answer), status=status)
