"""A plan as one page: the answer, every ranked layout with its interval, and what to run.

request = PlanRequest(model="llama-3.1-8b", gpu="h100-80gb", gpus=64, seq_len=8192, ...)
text = plan_page(fourfold.plan(request), request)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import fourfold
from fourfold.events import OnEvent
from fourfold.page import document
from fourfold.page.run_details import MOST_EVENTS, plan_command, timeline_data
from fourfold.search.plan_answer import TRAINING, plain
from fourfold.show import plan as shown
from fourfold.show.plan_notes import capacities
from fourfold.spec import Cluster, ModelShape
from fourfold.spec.words import SHARDINGS
from fourfold.text_table import Grid, Part
from fourfold.units import counted, three_digits
from fourfold.verbs.export import Exported, NotExported, export_all
from fourfold.verbs.front import FrontPoint, front
from fourfold.verbs.plan import best_timeline
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest

if TYPE_CHECKING:
    from fourfold.cost.schedule import Timeline
    from fourfold.search.plan_answer import PlanAnswer, PlanRow

PLAN_SCRIPTS = ("timeline.js", "plan_charts.js", "plan.js")


def plan_page(
    answer: PlanAnswer,
    request: PlanRequest,
    *,
    exports: Sequence[Exported | NotExported] = (),
    timeline: Timeline | None = None,
    sizes: Sequence[FrontPoint] = (),
) -> str:
    """`exports`: of every engine (verbs.export.export_all); `timeline`: of the best layout;
    `sizes`: the best on fewer GPUs (verbs.front.front)."""
    if timeline and len(timeline.events) > MOST_EVENTS:
        timeline = None
    data = plan_data(answer, request) | {
        "exports": [_exported(one) for one in exports],
        "engines": _engines(answer) or [_beside(one) for one in exports],
        "timeline": timeline_data(timeline) if timeline else None,
        "sizes": [{"gpus": one.gpus} | _compared(one.row) for one in sizes],
        "facts": facts(answer, request),
        "words": words_of(answer.best) if answer.best else [],
    }
    return document.document(
        title=data["title"], body=document.asset("plan.html"), data=data, scripts=PLAN_SCRIPTS
    )


def write_plan(
    request: PlanRequest, path: str, name: str, *, browser: bool, force: bool, on_event: OnEvent
) -> PlanAnswer:
    """The plan, also written as a page with settings for every engine, where the model is called
    `name`, and the best layout's pipeline."""
    document.check_page(path, force=force)
    answer = fourfold.plan(request, on_event=on_event)
    exports = export_all(request, name=name, on_event=on_event)
    timeline = best_timeline(request, answer)
    sizes = front(request, "gpus", on_event=on_event).points if answer.best else ()
    text = plan_page(answer, request, exports=exports, timeline=timeline, sizes=sizes)
    document.write_page(path, text, on_event=on_event, browser=browser)
    return answer


def plan_data(answer: PlanAnswer, request: PlanRequest) -> dict[str, Any]:
    """What a page or a view of a plan holds, as plain data."""
    sentence, table, remarks = _parts(shown.page(answer, details=True))
    return {
        "kind": "plan",
        "title": f"{answer.model} on {answer.gpus} x {answer.gpu}",
        "version": fourfold.__version__,
        "sentence": f"{sentence} {answer.assumes.text}." if answer.assumes else sentence,
        "remarks": remarks,
        "command": plan_command(request),
        "headings": list(table.headings) if table else [],
        "cells": [list(row) for row in table.rows] if table else [],
        "rows": [plain(row) | {"name": str(row)} for row in answer.ranked],
        "memory_bytes": answer.memory_bytes,
        "gpus": answer.gpus,
        "host_gpus": answer.host_gpus,
        "flips": plain(answer.flips),
        "engines": _engines(answer),
        "capacities": [[grid.headings, *grid.rows] for grid in capacities(answer)],
    }


def _parts(parts: Iterable[Part]) -> tuple[str, Grid | None, list[str]]:
    """(the answer, the table, all else that is said) of the page for a terminal."""
    shown_parts = list(parts)
    texts = [part for part in shown_parts if isinstance(part, str) and part]
    grid = next((part for part in shown_parts if isinstance(part, Grid)), None)
    # What would change the order, and the engines, have places of their own.
    apart = ("sensitivity: ", "Assumes ", shown.BEST_OF_EACH)
    return texts[0], grid, [text for text in texts[1:] if not text.startswith(apart)]


def _exported(one: Exported | NotExported) -> dict[str, Any]:
    if isinstance(one, NotExported):
        return {"engine": one.engine, "script": "", "said": [one.reason]}
    return {"engine": one.engine, "script": one.script, "said": list(one.notes)}


def _engines(answer: PlanAnswer) -> list[dict[str, Any]]:
    return [
        {"engine": one.engine, "choice": _compared(one.row) if one.row else None}
        for one in answer.engines
    ]


def _beside(one: Exported | NotExported) -> dict[str, Any]:
    choice = None if isinstance(one, NotExported) else _compared(one.choice)
    return {"engine": one.engine, "choice": choice}


def _compared(row: PlanRow) -> dict[str, Any]:
    """What engines and numbers of GPUs are compared by."""
    names = (
        "micro_batch",
        "step_s",
        "step_s_low",
        "step_s_high",
        "peak_bytes",
        "fit_chance",
        "tflops_gpu",
        "mfu_pct",
        *TRAINING,
    )
    policy = {"sharding": row.policy.sharding, "recompute": row.policy.recompute}
    return {"name": str(row)} | policy | {name: getattr(row, name) for name in names}


_SHARDED = (
    "nothing is sharded: every rank has weights, gradients and optimizer state whole",
    "optimizer state is sharded over the ranks of dp",
    "optimizer state and gradients are sharded over the ranks of dp",
    "weights, gradients and optimizer state are sharded over the ranks of dp (FSDP)",
)
_EXPERT_AXES = {
    "ep": "experts: those of a layer are divided over {} ranks, to which tokens travel",
    "etp": "experts: each is cut over {} ranks",
}
_RECOMPUTE = {
    "moe": "routing and experts are computed again in the backward pass",
    "moe-act": "activations inside of experts are computed again in the backward pass",
    "none": "activations are kept until the backward pass",
    "full": "activations of every layer are computed again in the backward pass",
    "selective": "attention is computed again in the backward pass",
}


def facts(answer: PlanAnswer, request: PlanRequest) -> list[tuple[str, str]]:
    """(what, its value) of the model, the machines and the training."""
    query, _ = resolved(request)
    return [
        ("Model", _model(query.model, answer.params)),
        ("Machines", _machines(query.resolved.cluster, answer)),
        ("Network", _network(query.resolved.cluster, answer.gpus)),
        (
            "A step",
            f"{answer.global_batch:,} sequences of {answer.seq_len:,} tokens, "
            f"{answer.seq_len * answer.global_batch / 1e6:.3g} million tokens",
        ),
        ("Arithmetic", answer.precision),
        ("Engine", "not chosen" if answer.stack == "generic" else answer.stack),
        *_training(answer, request, query.resolved.cluster.price_per_gpu_hour),
    ]


def _model(model: ModelShape, params: int) -> str:
    heads = f"{model.heads} heads" + (
        f" on {model.kv_heads} of keys and values" if model.kv_heads != model.heads else ""
    )
    sizes = f"{model.layers} layers, hidden {model.hidden:,}, {_mlp(model)}, {heads}"
    return f"{model.name}, {params / 1e9:.3g} billion parameters: {sizes}, {model.vocab:,} tokens"


def _mlp(model: ModelShape) -> str:
    if model.moe is None:
        return f"MLP {model.ffn:,}"
    shared = f" and a shared one of {model.moe.shared_ffn:,}" if model.moe.shared_ffn else ""
    dense = model.count_layers("dense")
    first = f", MLP {model.ffn:,} in {counted(dense, 'layer')} without" if dense else ""
    chosen = f"{model.top_k} of {model.experts} experts of {model.moe.ffn:,}"
    return f"{chosen}{shared} for each token{first}"


def _machines(cluster: Cluster, answer: PlanAnswer) -> str:
    hosts = counted(-(-answer.gpus // cluster.host_gpus), "host")
    each = f"{hosts} of {min(answer.gpus, cluster.host_gpus)}"
    memory = f"{cluster.device.memory_bytes / 2**30:.0f} GiB each"
    of = "" if cluster.name == cluster.device.id else f" ({cluster.name})"
    return f"{counted(answer.gpus, 'GPU')}, {each} x {cluster.device.name}, {memory}{of}"


def _network(cluster: Cluster, gpus: int) -> str:
    inner, last = cluster.links[:-1] or cluster.links, cluster.links[-1]
    said = [f"{link.bytes_per_s / 1e9:.0f} GB/s per GPU within {link.name}" for link in inner]
    if gpus > inner[-1].ranks:
        rate = 8 * last.bytes_per_s * cluster.host_gpus / 1e9
        said.append(f"{rate:,.0f} Gbit/s per host ({last.name})")
    return ", ".join(said) if gpus > 1 else "one GPU"


def _training(
    answer: PlanAnswer, request: PlanRequest, price: float | None
) -> Iterator[tuple[str, str]]:
    best = answer.best
    if best is None or best.training_s is None:
        return
    ends = best.training_s_low or 0.0, best.training_s_high or 0.0
    quick, slow = (end / best.training_s for end in ends)
    seconds = best.training_s, *ends
    days, low, high = (three_digits(one / 86400.0) for one in seconds)
    took = f"{days} days (80%: {low} to {high})"
    share = answer.training["lost_share"]
    lost = f", goodput {100 * (1 - share):.1f}% (the rest: restarts, checkpoints, slow hosts)"
    tokens = f"{(request.tokens or 0) / 1e9:,.4g} billion tokens"
    yield "Training", f"{tokens}, {counted(answer.training['steps'], 'step')}: {took}{lost}"
    hours = best.gpu_hours
    span = f"80%: {hours * quick:,.0f} to {hours * slow:,.0f}"
    yield "GPU-hours", f"{hours:,.0f} ({span})"
    if best.cost is not None and price is not None:
        span = f"80%: {best.cost * quick:,.0f} to {best.cost * slow:,.0f}"
        at = f"in the currency of the price, {price:g} per GPU-hour"
        yield "Cost", f"{best.cost:,.0f} ({span}), {at}"


def words_of(row: PlanRow) -> list[tuple[str, str]]:
    """(a word of the first layout, what it means there)."""
    layout, policy = row.layout, row.policy
    copies = f", in {layout.replicate} groups that hold copies" if layout.replicate > 1 else ""
    said = [
        (
            f"pp{layout.pp}",
            "pipeline: "
            + (
                f"the layers are cut into {layout.pp} stages"
                if layout.pp > 1
                else "layers are not cut"
            ),
        ),
        (
            f"dp{layout.dp}",
            "data: "
            + (
                f"{layout.dp} ranks train on different sequences{copies}"
                if layout.dp > 1
                else "one group of ranks trains on all sequences"
            ),
        ),
        (
            f"cp{layout.cp}",
            "context: "
            + (
                f"each sequence is cut into {layout.cp} parts"
                if layout.cp > 1
                else "sequences are not cut"
            ),
        ),
        (
            f"tp{layout.tp}",
            "tensor: "
            + (
                f"every matrix is cut over {layout.tp} GPUs"
                if layout.tp > 1
                else "matrices are whole"
            ),
        ),
        *[
            (f"{axis}{size}", text.format(size))
            for axis, text in _EXPERT_AXES.items()
            if (size := getattr(layout, axis)) > 1
        ],
        (
            f"micro batch {row.micro_batch}",
            f"sequences that a rank computes at once: {row.micro_batch}",
        ),
    ]
    if policy.virtual_stages > 1:
        parts = f"each pipeline rank has {policy.virtual_stages} separate parts of the layers"
        said.insert(1, (f"v{policy.virtual_stages}", f"virtual stages: {parts}"))
    by_name = zip(SHARDINGS, _SHARDED, strict=True)
    sharding = next((text for name, text in by_name if name in policy.sharding), "")
    recompute = _RECOMPUTE.get(policy.recompute, "parts of the layers are computed again")
    said += [(policy.sharding, sharding)] if sharding else []
    return [*said, (f"recompute {policy.recompute}", recompute)]
