"""Pages of models, FLOP counts and shape advice."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from fourfold.spec import ModelShape, codec
from fourfold.spec.experts import Moe
from fourfold.spec.model import OF_SCALING
from fourfold.text_table import Grid, Part, named, or_dash, table
from fourfold.units import show_count

if TYPE_CHECKING:
    from fourfold.search.advise import BetterSize, SizeAdvice
    from fourfold.verbs.advise import Advice
    from fourfold.verbs.shapes import Flops, Model, Models

_NEIGHBOURS = 9
# What tables of sizes show beside a value.
_BESIDE = ("heads", "head_size", "attention_loss:.2f", "expert_ffn", "top_k", "rows:,d")
_SHAPE = ("family", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab")


def models_page(answer: Models) -> list[Part]:
    rows = [
        [
            one.name,
            *(str(getattr(one.shape, name)) for name in _SHAPE),
            _experts_cell(one.shape),
            f"{one.params:,}",
            or_dash(one.active_params, ","),
        ]
        for one in answer.models
    ]
    headings = [
        "model",
        *(name.removesuffix("_heads") for name in _SHAPE),
        "experts",
        "params",
        "active",
    ]
    tokens = answer.models[0].seq_len
    note = f"learned positions of MPT follow the sequence: counted at {tokens} tokens"
    active = (
        "active: parameters that a token meets, both embeddings counted; 'models NAME' has others"
    )
    return [Grid(headings, rows), "", note, active]


def _experts_cell(shape: ModelShape) -> str:
    """'8 of 256 + 1': chosen, all, and the width of shared ones in units of an expert's."""
    if shape.moe is None:
        return "-"
    shared = shape.moe.shared_ffn / shape.moe.ffn
    return f"{shape.top_k} of {shape.experts}" + (f" + {shared:g}" if shared else "")


def model_page(answer: Model) -> list[Part]:
    if answer.stages is not None:
        return _stages_page(answer)
    shape = codec.encode(answer.shape)
    tables = {name: shape.pop(name, {}) for name in ("moe", "latent")}
    positions = shape.pop("positions")
    usual = _usual()
    rows = [
        ["parameters", f"{answer.params:,}"],
        *_active_rows(answer),
        ["of one layer", f"{answer.layer_params:,}"],
        *(
            [key, ", ".join(value) if isinstance(value, list) else str(value)]
            for key, value in shape.items()
            if key not in usual or value != usual[key]
        ),
    ]
    usual = {field.name: field.default for field in fields(Moe)}
    for name, table_ in tables.items():
        rows += [[f"{name}.{k}", str(v)] for k, v in table_.items() if v != usual.get(k)]
    scaling = positions.pop("scaling", {})
    kept = ("kind", "factor", *OF_SCALING[scaling["kind"]]) if scaling else ()
    if positions["partial"] == 1:
        del positions["partial"]
    rows += [[f"positions.{key}", str(value)] for key, value in positions.items()]
    rows += [[f"positions.scaling.{key}", str(scaling[key])] for key in kept]
    return [Grid([answer.name, "value"], rows), "", *answer.remarks]


def _active_rows(answer: Model) -> list[list[str]]:
    """ "Active" is printed in three ways."""
    if answer.active_params is None:
        return []
    shape = answer.shape
    table = 0 if shape.tied else shape.vocab * shape.hidden
    rows = [
        ["active", f"{answer.active_params:,}"],
        ["active, without the input embedding", f"{answer.active_params - table:,}"],
        ["active, without both embeddings", f"{answer.active_params_no_embedding:,}"],
    ]
    if answer.mtp_params:
        rows.append(["multi-token prediction (MTP), not counted", f"{answer.mtp_params:,}"])
    return rows


def _usual() -> dict[str, Any]:
    """Fields that most models leave at their default, and are then not worth a line."""
    always = ("norm_eps", "embedding_norm", "head_dim", "name")
    return {
        field.name: [] if field.default == () else field.default
        for field in fields(ModelShape)
        if field.default is not MISSING and field.name not in always
    }


def _stages_page(answer: Model) -> list[Part]:
    stages = table(answer.stages or (), *named("stage", "rank", "layers", "held:,", "owned:,"))
    about = f"{answer.name}: {answer.params:,} parameters; {answer.layout}; {answer.sharding}"
    meaning = (
        "held: of its stage and tensor shard, while it computes; owned: its share of the "
        "optimizer's\nupdate (under zero3 also all it keeps between uses; a tied copy is not owned)"
    )
    return [stages, "", about, meaning]


def flops_page(answer: Flops) -> list[Part]:
    from fourfold.cost.count.flops import CONVENTIONS  # 3 ms that 'models' does not need

    counted = table(
        answer.rows(),
        *named("convention"),
        ("GFLOP/token", lambda one: f"{one['flops_per_token'] / 1e9:.3f}"),
        *named("TFLOP/s/GPU=tflops_gpu:.2f", "MFU %=mfu_pct:.2f", "HFU %=hfu_pct:.2f"),
        ("formula", lambda one: CONVENTIONS[one["convention"]].formula),
    )
    active = ""
    if answer.active_params is not None:
        active = f" ({answer.active_params:,} of them active: the N of the formulas)"
    text = (
        f"{answer.model}: {answer.params:,} parameters{active} at {answer.seq_len} tokens; "
        f"{answer.precision}, recompute {answer.recompute}; GPUs: {answer.gpus}"
    )
    if answer.window:
        text += f"; attention counted by its window of {answer.window} tokens in layers with one"
    if answer.gpu:
        text += f" of {answer.gpu} at {(answer.peak_flops or 0.0) / 1e12:g} TFLOP/s dense"
    if answer.tokens_per_s is not None:
        text += f"; {answer.tokens_per_s:,.0f} tokens/s"
    return [counted, "", text, *_impossible(answer)]


def _impossible(answer: Flops) -> list[str]:
    """No run beats the peak: one of the numbers is not what it was taken for."""
    most = max((one.hfu_pct or 0.0 for one in answer.conventions.values()), default=0.0)
    if most <= 100:
        return []
    return [
        f"HFU up to {most:.0f}% is more than the GPU can do: is --tokens-per-s over all GPUs and "
        "--step-s of a whole step? are --gpus, --gpu, --precision and --recompute those of the run?"
    ]


def advice_page(advice: Advice) -> list[Part]:
    if advice.shapes is not None:
        heading = (
            f"{show_count(advice.tokens or 0)} tokens on {advice.gpus} x {advice.gpu}, sequences "
            f"of {advice.seq_len}, {advice.precision}: shapes that tp {advice.tp} divides, each at "
            f"its best layout; days are of steps alone; {advice.calibration}"
        )
        return [heading, "", table(advice.shapes, *_SHAPE_DAYS)]
    kernel = "flash attention" if advice.attention.startswith("flash") else advice.attention
    parts: list[Part] = [
        f"one layer on one {advice.gpu} at tp {advice.tp}, micro batch {advice.micro_batches} x "
        f"{advice.seq_len} tokens, {advice.precision}, {kernel}; {advice.calibration}"
    ]
    for name, one in advice.sizes.items():
        parts += ["", *_size(name, one)]
    return parts


def _size(name: str, advice: SizeAdvice) -> list[Part]:
    label = name.replace("_", " ")
    where = " in the output layer" if name == "vocab" else ""
    where = " in experts" if advice.table[0].rows is not None else where
    better = advice.better
    ending = "no nearby value is 2% faster"
    if better:
        ending = (
            f"loses {advice.loses_pct:.0f}% to the best nearby; {better.value} "
            f"({better.value - advice.asked:+d}) is {better.gain:.2f}x as fast per FLOP"
        )
    verdict = f", {advice.verdict}" if advice.verdict else ""
    extra = ""
    if advice.head_size is not None:
        loss = f"attention core {advice.attention_loss:.2f}x the best"
        extra = f" (head size {advice.head_size}, {loss})"
    speed = f"{advice.tflops_gpu:.0f} TFLOP/s{where}"
    lines = [
        f"{label} {advice.asked}{extra}{verdict}: {speed}; {ending}",
        *(f"  {note}" for note in advice.notes),
    ]
    parts: list[Part] = ["\n".join(lines)]
    if better:
        parts.append(_neighbours(label, advice, better))
        parts += ["", table(advice.gemms, *_PRODUCT)] if advice.gemms else []
    return parts


def _neighbours(label: str, advice: SizeAdvice, better: BetterSize) -> Grid:
    wanted = {advice.asked, better.value}
    by_distance = sorted(advice.table, key=lambda row: abs(row.value - advice.asked))
    near = [row for row in by_distance if row.value in wanted]
    near += [row for row in by_distance if row not in near][: _NEIGHBOURS - len(near)]
    first = advice.table[0]
    beside = (text for text in _BESIDE if getattr(first, text.partition(":")[0]) is not None)
    return table(
        sorted(near, key=lambda row: row.value),
        *named(f"{label}=value"),
        *((heading.replace("_", " "), cell) for heading, cell in named(*beside)),
        *named("TFLOP/s=tflops_gpu:.1f", "against asked=against_asked:.3f"),
    )


_PRODUCT = named(
    "product=name",
    "tokens",
    "in=into:g",
    "out:g",
    "alignment loses %=alignment_loss_pct:.0f",
    "tiles and waves lose %=wave_loss_pct:.0f",
)
_SHAPE_DAYS = [
    *named("layers", "hidden", "heads", "ffn", "params B=params:B.1f"),
    ("layout", lambda row: row.reason if row.days is None else row.layout),
    *named("micro=micro_batch:d", "s/step=step_s:.1f", "days:.1f", "GPU-hours=gpu_hours:,.0f"),
    *named("days per 1e21 FLOP=days_per_1e21_flop:.3f"),
]
