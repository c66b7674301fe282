"""advise: sizes of a model that suit a GPU, and what others lose.

What `advise` is asked; the command line's flags are made from its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore
from fourfold.flag import flag
from fourfold.search import advise as sizes
from fourfold.search.advise import LayerShape, SizeAdvice, auto_heads, key_heads
from fourfold.search.advise_experts import expert_advice
from fourfold.search.compare import ShapeDays, compare, shapes_near
from fourfold.search.query import usual_cluster
from fourfold.search.resolve import resolve
from fourfold.spec import Cluster, Device, Layout, ModelShape, catalog, check, codec, words
from fourfold.spec.words import BUNDLES, OURS
from fourfold.units import counted
from fourfold.verbs import Answer, Request
from fourfold.verbs.machine import known_cluster, read_calibration
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import CALIBRATION, Count, PlanRequest, Size


def _of_layout(given: dict[str, Any]) -> dict[str, Any]:
    """Return an AdviseRequest's fields of keywords with a `layout`: what of it sizes depend on."""
    layout = given.get("layout")
    rest = {name: value for name, value in given.items() if name != "layout"}
    if layout is None:
        return rest
    axes, fields = words.split_layout(str(layout))
    sizes = Layout.parse(axes).sizes
    taken = {name: size for name in ("tp", "ep") if (size := sizes[name]) > 1}
    if "batch.micro_batch" in fields:
        taken["micro_batch"] = fields["batch.micro_batch"]
    for name, value in taken.items():
        rule = f"contradicts layout = {layout}"
        check.that(rest.get(name) in (None, value), name, rest.get(name), rule, "omit one of them")
    return rest | taken


@codec.takes_more(_of_layout, lambda: ("layout",))
@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseRequest(Request):
    """Sizes of one layer on a GPU; with `params` and `tokens`, whole models on machines."""

    gpu: str | None = flag("GPU to judge for (see 'fourfold clusters')", "ID")
    cluster: str | Cluster | None = flag(
        "take the GPU, and the machines for --params, from a cluster", "NAME"
    )
    model: str | None = flag("model preset for sizes that are not given", "NAME")
    hidden: Size | None = flag("hidden size", "N")
    heads: Size | None = flag("attention heads (default: head size 128)", "N")
    kv_heads: Size | None = flag("key-value heads (default: as many as heads)", "N")
    ffn: Size | None = flag("MLP width (default: 4 x hidden)", "N")
    vocab: int | None = flag("vocabulary size", "N")
    experts: Size | None = flag("experts per layer", "N")
    expert_ffn: Size | None = flag("width of an expert", "N")
    top_k: Size | None = flag("experts per token", "N")
    ep: Size | None = flag("ranks that experts are divided over (default 1)", "N")
    tp: Size | None = flag("tensor-parallel size (default 1)", "N")
    micro_batch: Size | None = flag("sequences per micro batch (default 1)", "N")
    seq_len: Size | None = flag("sequence length in tokens (default 2048)", "N")
    gpus: Size | None = flag("number of GPUs, for --params", "N")
    max_nodes: Size | None = flag("at most N hosts, for --params", "N", rare=True)
    global_batch: Size | None = flag("sequences per step, for --params (default 2048)", "N")
    params: Count | None = flag("compare model shapes of about P parameters, such as 30B", "P")
    tokens: Count | None = flag("training tokens for --params, such as 1T", "T")
    attention: Literal["flash", "fused-softmax", "unfused"] = flag(
        "attention kernel (default flash)", default="flash"
    )
    precision: str = flag("precision, as in 'plan'", "X", default="bf16-mixed")
    stack: str | None = flag("engine to predict", "NAME")
    calibration: str | None = flag(*CALIBRATION, rare=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(Answer):
    """Of each size what it loses and the nearest better value; or whole shapes, by days."""

    gpu: str
    gpus: int | None = None
    stack: str | None = None
    tokens: int | None = None
    tp: int
    seq_len: int
    micro_batches: int | str
    precision: str
    attention: str
    calibration: str
    shapes: tuple[ShapeDays, ...] | None = None
    sizes: Annotated[dict[str, SizeAdvice], codec.INLINE] = field(default_factory=dict)

    @property
    def none_fits(self) -> bool:
        return self.shapes is not None and all(row.days is None for row in self.shapes)

    def rows(self) -> list[dict[str, Any]]:
        """The shapes; else every value that was tried, with the size it is a value of."""
        if self.shapes is not None:
            return codec.encode(self.shapes)
        return [
            {"size": name, "asked": advice.asked, **codec.encode(row)}
            for name, advice in self.sizes.items()
            for row in advice.table
        ]


def advise(request: AdviseRequest, *, on_event: OnEvent = ignore) -> Advice:
    whole = request.params is not None
    rule = "is of one layer, not of --params" if whole else "needs --params"
    for name in _OF_ONE_LAYER if whole else _OF_PARAMS:
        value, default = getattr(request, name), "flash" if name == "attention" else None
        check.that(value == default, name.replace("_", "-"), value, rule)
    return _shapes(request, on_event) if whole else _sizes(request)


_OF_ONE_LAYER = (
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "experts",
    "expert_ffn",
    "top_k",
    "ep",
    "micro_batch",
    "attention",
)
_OF_PARAMS = ("gpus", "max_nodes", "global_batch", "tokens")


def _sizes(request: AdviseRequest) -> Advice:
    """Advice on each size that was given (all of them with --model)."""
    if request.cluster:
        device = known_cluster(request.cluster).device
    elif request.gpu:
        device = catalog.device(request.gpu)
    else:
        raise UserError("is required", field="gpu", hint="or pass --cluster NAME")
    stated = words.with_scaling({"precision": request.precision})["precision"]
    precision = words.policy_word("precision", stated)
    check.that(precision in BUNDLES, "precision", precision, f"is not one of {', '.join(BUNDLES)}")
    if precision in ("fp8", "fp4"):
        device.peak(precision)  # refuses a GPU without it
    base = catalog.model(request.model) if request.model else None
    shape = _shape(request)
    routed = _with_experts(request, shape)
    coefficients, whose = _coefficients(request, device, experts=routed.experts > 0)
    kernels = sizes.Kernels(device, precision, coefficients, request.attention)
    every = request.model is not None
    free_heads = request.heads is None and _own_heads(request, shape.hidden) is None
    advice = {
        "hidden": sizes.hidden_advice(
            shape,
            kernels,
            free_heads=free_heads,
            mlp_ratio=None if request.ffn else _mlp_ratio(base),
        ),
        "heads": _heads(request, shape, kernels),
    }
    if every or request.ffn is not None:
        advice["ffn"] = sizes.ffn_advice(shape, kernels)
        if base is not None and request.ffn is None and shape.hidden != base.hidden:
            rule = f"not given: {_mlp_ratio(base):.3g} times the hidden size, as in {base.name}"
            advice["ffn"] = replace(advice["ffn"], notes=(rule, *advice["ffn"].notes))
    if every or request.vocab is not None:
        advice["vocab"] = sizes.vocab_advice(shape, kernels)
    advice["micro_batch"] = sizes.micro_advice(shape, kernels)
    if routed.experts:
        advice |= expert_advice(routed, kernels)
    return Advice(
        gpu=device.id,
        tp=shape.tp,
        seq_len=shape.seq_len,
        micro_batches=shape.micro_batch,
        precision=precision,
        attention=request.attention,
        calibration=whose,
        sizes=advice,
    )


def _heads(request: AdviseRequest, shape: LayerShape, kernels: sizes.Kernels) -> SizeAdvice:
    advice = sizes.heads_advice(shape, kernels)
    notes = advice.notes
    if request.heads is None and _own_heads(request, shape.hidden) is None:
        rule = f"not given: {shape.heads} of size {shape.head_size} divide hidden {shape.hidden}"
        notes = (rule, *notes)
    if request.model and catalog.model(request.model).latent:
        rule = "latent attention is judged as a plain one of as many heads, each with its own keys"
        notes = (*notes, rule)
    return replace(advice, notes=notes)


def _coefficients(
    request: AdviseRequest, device: Device, *, experts: bool
) -> tuple[dict[str, float], str]:
    known = read_calibration(request.calibration)
    cluster = known_cluster(request.cluster) if request.cluster else usual_cluster(device, 8)
    engine = resolve(request.stack or OURS, cluster, known, experts=experts)
    rows = engine.no_rows or counted(engine.entry.rows_time, "measured row")
    basis = f"efficiencies of {engine.stack} on {cluster.name} ({rows})"
    return engine.entry.coefficients, basis


def _shape(request: AdviseRequest) -> LayerShape:
    """Sizes of the request, else of its model, else usual ones."""
    base = catalog.model(request.model) if request.model else None

    def size(name: str, usual: int | None) -> int:
        value = getattr(request, name)
        value = usual if value is None else value
        flag = name.replace("_", "-")
        if value is None:
            raise UserError("is required", field=flag, hint="or pass --model NAME")
        check.that(1 <= value <= 2**24, flag, value, "must be from 1 to 16777216")
        return value

    tp, hidden = size("tp", 1), size("hidden", base.hidden if base else None)
    own = _own_heads(request, hidden)
    heads = size("heads", own.heads if own else auto_heads(hidden, tp, _head_size(base)))
    group = base.heads // base.kv_heads if base and request.heads is request.kv_heads is None else 1
    kv_heads = size("kv_heads", own.kv_heads if own else key_heads(heads, group))
    # A size that heads have of their own belongs to their number.
    head_dim = own.head_size if own and own.attention_width != hidden else None
    width = hidden if head_dim is None else heads
    for name, value, whole in (("heads", heads, width), ("kv-heads", kv_heads, heads)):
        check.that(whole % value == 0, name, value, f"must divide {whole}")
    return LayerShape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=size("ffn", round(_mlp_ratio(base) * hidden)),
        vocab=size("vocab", base.vocab if base else 1),
        gated=base.gated if base else False,
        seq_len=size("seq_len", 2048),
        micro_batch=size("micro_batch", 1),
        tp=tp,
        head_dim=head_dim,
        group=group,
    )


def _mlp_ratio(base: ModelShape | None) -> float:
    """Return the width of an MLP over the hidden size, where nobody states the width."""
    return base.ffn / base.hidden if base else 4.0


def _own_heads(request: AdviseRequest, hidden: int) -> ModelShape | None:
    """Return the request's model where its heads hold: none are given, and the hidden size is the
    model's own or does not decide the width of its heads."""
    base = catalog.model(request.model) if request.model and request.heads is None else None
    holds = base is not None and (base.hidden == hidden or base.attention_width != base.hidden)
    return base if holds else None


def _head_size(base: ModelShape | None) -> int:
    return base.head_size if base else 128


def _with_experts(request: AdviseRequest, shape: LayerShape) -> LayerShape:
    """The same with experts, where the request or its model has some."""
    base = catalog.model(request.model) if request.model else None
    own = base if base and base.moe else None
    known = {
        "experts": request.experts or (own.experts if own else 0),
        "top_k": request.top_k or (own.top_k if own else 0),
        "expert_ffn": request.expert_ffn or (own.moe.ffn if own and own.moe else 0),
    }
    if not any(known.values()):
        check.that(request.ep is None, "ep", request.ep, "needs --experts, --expert-ffn, --top-k")
        return shape
    for name, value in known.items():
        check.given(value, name.replace("_", "-"), "or pass --model NAME")
    check.that(
        known["top_k"] <= known["experts"], "top-k", known["top_k"], "must be at most experts"
    )
    return replace(shape, **known, ep=request.ep or 1)


def _shapes(request: AdviseRequest, on_event: OnEvent) -> Advice:
    params, tokens, tp = request.params or 0, request.tokens, request.tp or 8
    check.that(1e6 <= params <= 1e13, "params", params, "must be from 1e6 to 1e13")
    if tokens is None:
        raise UserError(
            "is required",
            field="tokens",
            hint="such as 1T: shapes are compared by days of training",
        )
    check.that(0 < tokens < 1e18, "tokens", tokens, "must be above 0")
    # The model is only the family to vary.
    family = PlanRequest(
        model=request.model or "llama-3.1-8b",
        seq_len=request.seq_len or 2048,
        global_batch=request.global_batch or 2048,
        policy={"precision": request.precision},
        cluster=request.cluster,
        gpu=request.gpu,
        gpus=request.gpus,
        stack=request.stack,
        calibration=request.calibration,
        max_nodes=request.max_nodes,
    )
    query, _ = resolved(family, on_event)
    models = shapes_near(query.model, params, query.batch.seq_len, tp)
    check.that(models, "params", params, "is too small for this vocabulary: no shape comes close")
    return Advice(
        gpu=query.resolved.cluster.device.id,
        gpus=query.gpus,
        stack=query.resolved.stack,
        tokens=tokens,
        tp=tp,
        seq_len=query.batch.seq_len,
        micro_batches="best",
        precision=query.policy.precision_name,
        attention=query.policy.attention,
        calibration=query.resolved.no_rows
        or counted(query.resolved.entry.rows_time, "measured row"),
        shapes=tuple(compare(query, models, tokens=tokens)),
    )
