"""The settings of a traced run, each with the evidence for it."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.spec import catalog
from fourfold.spec.engine import TRACES, engine_of
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.spec.words import OURS
from fourfold.traces import parts
from fourfold.traces.counted import Counts
from fourfold.traces.linked import Linked
from fourfold.traces.placing import Placed, axis_sizes, descriptions, world_size
from fourfold.traces.shapes import Shapes

FSDP2 = "fsdp2"  # among the wrappers of data/traces.toml


@dataclass(frozen=True, slots=True)
class Setting:
    """`doubt`: what in the trace, or in what was given, says otherwise."""

    name: str
    value: Any
    evidence: str
    doubt: str = ""

    def overruled(self, value: Any, by: str) -> Setting:
        if value == self.value:
            return replace(self, evidence=f"{by}; {self.evidence}")
        return Setting(self.name, value, by, f"the trace says {self.value}: {self.evidence}")


def infer(
    linked: Linked, placed: Placed, shapes: Shapes, counts: Counts, steps: int
) -> dict[str, Setting]:
    """`steps`: how many the trace has."""
    found: list[Setting] = []

    def say(name: str, value: Any, evidence: str) -> None:
        if value not in (0, "", None):
            found.append(Setting(name, value, evidence))

    say("gpu", _gpu(linked), "the trace's device")
    say("engine", *_engine(linked))
    rank_layers = (
        f"{counts.backwards} backward passes of attention in {counts.micro_batches} micro batches"
    )
    say("layers", counts.layers, rank_layers)
    say("hidden", shapes.hidden, "rows of the embedding, and all GEMMs")
    say("ffn", counts.ffn, "inputs of the GEMM before the residual")
    sizes = (shapes.sequences, shapes.heads, shapes.length, shapes.head_dim)
    shape = f"{shapes.attention_op} {list(sizes)}"
    say("heads", shapes.heads, shape)
    say("kv_heads", shapes.kv_heads, shape)
    say("head_dim", shapes.head_dim, shape)
    say("vocab", shapes.vocab, "the embedding and the head's GEMM")
    if shapes.vocab:
        found.append(Setting("tied", *_tied(linked, shapes, counts, steps)))
    found += _experts(shapes)
    say("seq_len", shapes.length, shape)
    say("micro_batch", shapes.sequences, shape)
    say("micro_batches", counts.micro_batches, "tokens of the head, or looked up, in a step")
    say("precision", *_precision(linked, placed))
    say("weights", *_masters(linked))
    found.append(Setting("recompute", *_recompute(counts)))
    say("attention", *_attention(linked, placed))
    found.append(Setting("compile", *_compiled(linked)))
    found += _layout(linked)
    return {one.name: one for one in found}


def _experts(shapes: Shapes) -> list[Setting]:
    if not shapes.experts:
        return []
    rows = f"{shapes.expert_rows:,} rows of grouped GEMMs for {shapes.tokens:,} tokens"
    top_k = shapes.expert_rows // max(1, shapes.tokens)
    return [
        Setting("experts", shapes.experts, f"groups of GEMMs: {rows}"),
        Setting("top_k", top_k, rows),
        Setting("expert_ffn", shapes.expert_ffn, "width between grouped GEMMs"),
    ]


def _gpu(linked: Linked) -> str:
    told = linked.trace.meta.get("deviceProperties")
    first = told[0] if isinstance(told, list) and told else {}
    return str(first.get("name", "")) if isinstance(first, dict) else ""


def _engine(linked: Linked) -> tuple[str, str]:
    trace = linked.trace
    if isinstance(trace.meta.get("fourfold"), dict):
        return OURS, "the trace says so"
    for names, where in (
        (list(descriptions(trace).values()), "process groups"),
        ([mark.name for mark in trace.marks[:2000]], "marks"),
        (trace.texts, "operators"),
    ):
        for engine, pattern in (TRACES | parts.NAMES["wrappers"]).items():
            hit = next((name for name in names if re.search(pattern, name)), None)
            if hit is not None:
                return engine, f"{where}: {hit[:40]}"
    return "", ""


def shards_weights(engine: str) -> bool:
    """Return whether runs of an engine, or of torch's wrapper alone, divide their weights with
    FSDP2 where nobody says otherwise."""
    habits = engine_of(engine).habits
    return engine == FSDP2 or (habits.counted and habits.sharding == "zero3")


def _tied(linked: Linked, shapes: Shapes, counts: Counts, steps: int) -> tuple[bool, str]:
    """The gradients of both ends meet in an addition of two tables. Those of successive micro
    batches meet, too, but where autograd keeps them."""
    table = (shapes.vocab, shapes.hidden)
    ops, texts = linked.trace.ops, linked.trace.texts
    adds = [i for i, text in enumerate(texts) if text in ("aten::add", "aten::add_")]
    kept = [i for i, text in enumerate(texts) if text == "torch::autograd::AccumulateGrad"]
    keeping = np.flatnonzero(np.isin(ops.name, kept))
    seen = 0
    for at in np.flatnonzero(np.isin(ops.name, adds)):
        dims = linked.parsed(int(ops.shape[at]))
        if len(dims) >= 2 and dims[0] == dims[1] == table:
            before = keeping[ops.start[keeping] <= ops.start[at]]
            before = before[ops.thread[before] == ops.thread[at]]
            seen += not len(before) or bool(ops.end[before[-1]] < ops.end[at])
    if seen >= steps * counts.micro_batches:
        return True, "gradients of embedding and head are added"
    return False, "gradients of embedding and head are not added"


def _precision(linked: Linked, placed: Placed) -> tuple[str, str]:
    spent: Counter[str] = Counter()
    for at, one in placed.weighed.items():
        types = [parts.NAMES["formats"].get(name, "") for name in linked.types(at)]
        kind = next((name for name in types if name), "")
        spent[kind] += int(one.product.flops / 1e6)
    if not spent or not spent.most_common(1)[0][0]:
        return "", ""
    kind, flops = spent.most_common(1)[0]
    share = 100.0 * flops / max(1, sum(spent.values()))
    return kind, f"{share:.0f}% of the GEMMs' FLOPs"


def _masters(linked: Linked) -> tuple[str, str]:
    """What the optimizer updates."""
    for text in linked.trace.texts:
        if "Adam" in text and "Functor<" in text:
            for name, kind in (("BFloat16", "bf16"), ("Half", "fp16"), ("float", "fp32")):
                if re.search(rf"Adam\w*Functor<(c10::)?{name}", text):
                    return kind, f"the optimizer's kernel works on {kind}"
    return "", ""


def _recompute(counts: Counts) -> tuple[str, str]:
    again = counts.again
    if again.share > 0.8 and again.attention_share > 0.5:
        word = "full"
    elif again.share > 0.1 or again.attention_share > 0.1:
        word = "selective" if again.share < 0.5 else "full"
    else:
        return "none", "as many forward GEMMs as gradients"
    core = f"{100 * again.attention_share:.0f}% of attention"
    return word, f"{100 * again.share:.0f}% of the GEMMs and {core} run forwards twice"


def _attention(linked: Linked, placed: Placed) -> tuple[str, str]:
    spent: Counter[str] = Counter()
    for at, part in placed.part.items():
        if part == parts.ATTENTION:
            spent[linked.kernel_name(at)] += int(1e9 * linked.kernels.seconds[at])
    if not spent:
        return "", ""
    name = spent.most_common(1)[0][0]
    for kind, pattern in parts.NAMES["attention"].items():
        if re.search(pattern, name, re.I):
            return kind, name[:48]
    return "other", name[:48]


def _compiled(linked: Linked) -> tuple[bool, str]:
    names = linked.trace.texts
    fused = sum(1 for name in names if name.startswith(("triton_poi", "triton_red", "triton_per")))
    marked = any(
        "CompiledFxGraph" in mark.name or "Torch-Compiled" in mark.name
        for mark in linked.trace.marks
    )
    if fused or marked:
        return True, f"{fused} kinds of kernels that torch.compile made"
    return False, "no kernels that torch.compile made"


def _layout(linked: Linked) -> list[Setting]:
    trace = linked.trace
    world, sizes = world_size(trace), axis_sizes(trace)
    found = []
    for axis in (*AXES, *EXPERT_AXES):
        size = sizes.get(axis, 1)
        if axis != "dp" and (axis != "etp" or size > 1):
            said = f"process groups of {size}" if axis in sizes else "no group"
            found.append(Setting(axis, size, said))
    used = math.prod(one.value for one in found if one.name in AXES)
    dp = max(1, world // used)
    doubt = "" if dp * used == world else f"{used} ranks of other axes do not divide {world}"
    told = sizes.get("dp", dp)
    cp = sizes.get("cp", 1)
    if told > 1 and told not in (dp, dp * cp) and not doubt:
        doubt = f"its largest group has {told} ranks"
    found.append(Setting("dp", dp, f"{world} ranks in all", doubt))
    found.append(Setting("gpus", world, "distributedInfo" if world > 1 else "one rank"))
    return found


def preset_of(settings: dict[str, Setting]) -> tuple[str, str]:
    """(a preset of the catalogue with these widths, '' or how it differs)."""
    asked = whole_sizes(settings)
    best: tuple[int, str, str] | None = None
    if not {"hidden", "heads", "vocab"} <= asked.keys():
        return "", ""
    for name in catalog.model_names():
        shape = catalog.model(name)
        has = {
            "hidden": shape.hidden,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "vocab": shape.vocab,
            "experts": shape.experts,
            "ffn": shape.ffn,
            "expert_ffn": shape.moe.ffn if shape.moe else 0,
        }
        skip = {"ffn"} if shape.moe else set()
        if any(has[key] != asked[key] for key in has if key in asked and key not in skip):
            continue
        if shape.experts and "experts" not in asked:
            continue
        layers, tied = asked.get("layers", shape.layers), settings.get("tied")
        off = [f"{layers} layers"] if layers != shape.layers else []
        off += ["tied" if tied.value else "untied"] if tied and tied.value != shape.tied else []
        if best is None or len(off) < best[0]:
            best = (len(off), name, ", ".join(off))
    return (best[1], best[2]) if best else ("", "")


_SHAPE = ("layers", "hidden", "heads", "kv_heads", "vocab", "experts", "ffn", "expert_ffn")
_CUT_BY = dict.fromkeys(("heads", "kv_heads", "ffn", "vocab"), "tp") | {
    "layers": "pp",
    "experts": "ep",
    "expert_ffn": "etp",
}


def whole_sizes(settings: dict[str, Setting]) -> dict[str, int]:
    """Of the model, where a rank sees its part."""
    value = {name: one.value for name, one in settings.items()}
    found = {name: value[name] for name in _SHAPE if name in value}
    return {name: size * value.get(_CUT_BY.get(name, ""), 1) for name, size in found.items()}
