"""What a difference is called: by the laboratory that names those of other engines, and by guesses
that one process can try out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fourfold.conformance.ranks import compare
from fourfold.engine.data.source import micro_sequences
from fourfold.engine.parallel.experts import places_of
from fourfold.engine.parallel.shards import Rect
from fourfold.engine.verify.findings import Piece, RankFindings, idle_tensors
from fourfold.engine.verify.plain_experts import Guess
from fourfold.engine.verify.plain_muon import MuonGuess, in_order
from fourfold.engine.verify.reference import Recipe, Truth, train_alone
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.spec.run import RunSpec

# Blocks of ours by the laboratory's letters.
_LETTERS = {"experts": "e", "shared": "s"}
_NAMES = {
    "embedding": "embed",
    "final_norm": "norm",
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
    "out": "o",
}
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class Answers:
    """Of all ranks: findings, and pieces of gradients (`grad`) and parameters (`param`)."""

    findings: Sequence[RankFindings]
    pieces: Sequence[dict[str, list[Piece]]]
    truth: Truth
    spec: RunSpec


def name_of(answers: Answers, recipe: Recipe, device: torch.device) -> list[str]:
    truth, spec = answers.truth, answers.spec
    grads, spread = _assembled((pieces["grad"] for pieces in answers.pieces), truth.grads)
    params, spread_after = _assembled((pieces["param"] for pieces in answers.pieces), truth.params)
    moved, _ = _assembled((pieces["moved"] for pieces in answers.pieces), truth.moved)
    first, once = answers.findings[0], replace(recipe, steps=1)
    right = _is_like(first, grads, truth)  # then something goes wrong after the first step
    for words, guess in () if right else _guesses(spec):
        if _is_like(first, grads, train_alone(spec, once, device, guess)):
            return [f"as if {words}"]
    for words, guess in _muon_guesses(answers) if right else ():
        like = train_alone(spec, recipe, device, Guess(muon=guess))
        if next(iter(compare.differences(params, like.params).values())) < _CLOSE:
            return [f"as if {words}"]
    layers = sorted({layer for one in answers.findings for layer in one.counts[0]})
    balance = zip(*(one.balance for one in answers.findings), strict=True)
    got = {
        "loss": first.losses,
        "norm": first.norms,
        "balance": [sum(parts) for parts in balance],
        "grad": _stacked(grads),
        "param": _stacked(params),
        "spread": _largest(spread),
        "spread_after": _largest(spread_after),
        "moved": _stacked(moved),
    }
    want = {
        "loss": truth.losses,
        "norm": truth.norms,
        "grad": _stacked(truth.grads),
        "param": _stacked(truth.params),
        "balance": truth.balance,
        "start": _stacked(truth.start),
        "moved": _stacked(truth.moved),
        "idle": _stacked_idle(truth, layers),
    }
    return compare.signature(got, want, _degrees(spec))


def _degrees(spec: RunSpec) -> dict[str, int]:
    layout = spec.layout
    sizes = {axis: getattr(layout, axis) for axis in (*AXES, *EXPERT_AXES)}
    copies = layout.edp * layout.replicate
    sizes |= {"copies of experts": copies} if spec.model.moe else {}
    sizes["micro batches"] = spec.batch.micro_count(layout.dp)
    return {axis: size for axis, size in sizes.items() if size > 1}


def _guesses(spec: RunSpec) -> Iterator[tuple[str, Guess]]:
    """What engines have done with experts, one at a time."""
    moe = spec.model.moe
    if moe is None:
        return
    yield "experts' outputs were added up without their scores", Guess(scores="never")
    yield "scores were applied twice", Guess(scores="twice")
    yield "the router had no gradient through the scores", Guess(scores="without gradient")
    yield "the routers' losses had no gradient", Guess(balance="left out")
    if moe.balance != "none":
        seen = "part of a sequence" if moe.balance == "sequence" else "rank and micro batch"
        words = f"experts were balanced over each {seen} apart"
        yield words, Guess(balance="by part", parts=_parts(spec))
    if moe.capacity:
        yield "a full expert dropped its first tokens, not its last", Guess(keeps="last")


def _muon_guesses(answers: Answers) -> Iterator[tuple[str, MuonGuess]]:
    """What engines may do with Muon's matrices, one at a time."""
    if answers.spec.policy.optimizer != "muon":
        return
    rects: dict[str, set[Rect]] = {}
    for name, rows, columns, _ in (piece for one in answers.pieces for piece in one["param"]):
        rects.setdefault(name, set()).add(Rect(rows, columns))
    parts = {name: in_order(some) for name, some in rects.items()}
    yield "each rank made its part of a matrix orthogonal apart", MuonGuess("apart", parts)
    yield "one shard of each matrix was left out", MuonGuess("left out", parts)
    shape = "transposed matrix" if answers.spec.policy.muon.scale == "original" else "shorter side"
    yield f"updates were scaled by the {shape}", MuonGuess("scale")


def _parts(spec: RunSpec) -> Tensor:
    """Which tokens of the first step come together, as a number for each; for a loss by sequence
    those of a sequence on a rank."""
    layout, batch = spec.layout, spec.batch
    parts = torch.zeros(batch.global_batch, batch.seq_len, dtype=torch.int64)
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        if place["pp"]:
            continue
        own = micro_sequences(batch.at(0), layout.dp, place["dp"], torch.device("cpu"))
        for micro, sequences in enumerate(own):
            real = sequences[sequences >= 0]
            parts[real[:, None], places_of(spec, rank)] = rank * len(own) + micro
    if spec.model.moe is not None and spec.model.moe.balance == "sequence":
        parts += torch.arange(batch.global_batch)[:, None] * (int(parts.max()) + 1)
    return parts


def _is_like(first: RankFindings, grads: dict[str, Tensor], like: Truth) -> bool:
    gaps = compare.differences(grads, like.grads)
    near = abs(first.losses[0] / like.losses[0] - 1) < _CLOSE
    return near and next(iter(gaps.values())) < _CLOSE


def _assembled(
    ranks: Iterator[list[Piece]], wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Whole tensors as the first rank that holds a value has it, and by how much other copies
    differ relative to the largest value."""
    whole = {name: torch.full_like(tensor, math.nan) for name, tensor in wanted.items()}
    spread = dict.fromkeys(wanted, 0.0)
    for name, rows, columns, value in (piece for pieces in ranks for piece in pieces):
        target = whole[name][slice(*rows)]
        target = target if target.ndim == 1 else target[:, slice(*columns)]
        known = ~target.isnan()
        if known.any():
            gap = (target - value)[known].abs().max() / wanted[name].abs().max().clamp_min(1e-12)
            spread[name] = max(spread[name], float(gap))
        target.copy_(torch.where(known, target, value))
    return whole, spread


def canonical(name: str) -> tuple[str, int]:
    """(the laboratory's name, the expert): layers.3.mlp.experts.5.gate.weight is ("3.egate", 5)."""
    found = re.fullmatch(r"layers\.(\d+)\.mlp\.(experts|shared)\.(?:(\d+)\.)?(\w+)\.weight", name)
    if found:
        return f"{found[1]}.{_LETTERS[found[2]]}{found[4]}", int(found[3] or 0)
    *path, owner, leaf = name.split(".")
    owner = _NAMES.get(owner, owner)
    word = {"weight": owner, "bias": f"{owner}_bias"}.get(leaf, leaf)
    return (f"{path[1]}.{word}" if path else word), 0


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the laboratory's names; matrices of a layer's experts as one tensor."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(canonical(name)[0], []).append(tensor)
    return {
        name: torch.stack(some) if compare.kind(name) in compare.EXPERTS else some[0]
        for name, some in found.items()
    }


def _largest(values: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        short = canonical(name)[0]
        found[short] = max(value, found.get(short, 0.0))
    return found


def _stacked_idle(truth: Truth, layers: Sequence[int]) -> dict[str, list[int]]:
    """Experts without tokens, by the name of their stack."""
    found: dict[str, Any] = {}
    for name in idle_tensors(truth, layers) if truth.counts[0] else ():
        short, expert = canonical(name)
        found.setdefault(short, []).append(expert)
    return found
