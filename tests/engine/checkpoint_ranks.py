"""Run by test_checkpoint.py in a process of its own: forks four ranks, prints one JSON of findings.

Which: `pairs` saves under every layout and loads under every other; `resume` goes from layout to
layout; `muon` does so on two ranks; `policies` changes projections, copies of weights and AdamW;
`quick` has a few of each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fourfold.engine.checkpoint import checkpoint
from fourfold.engine.checkpoint.background import Saver
from fourfold.engine.checkpoint.checkpoint import state_of, state_shards
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.shards import InitRule
from fourfold.engine.training.trainer import Trainer
from fourfold.errors import UserError
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.spec.muon import Muon, Placement
from fourfold.spec.run import RunSpec
from tests.engine.forked import on_ranks
from tests.specs import run_spec

RANKS, RANKS_OF = 4, {"muon": 2}
CPU = torch.device("cpu")
# Each axis, each kind of sharding, copies x shards, and axes together.
LAYOUTS = {
    "pp2 dp2 zero1": ("pp2 dp2", "zero1"),
    "tp2 dp2 zero2": ("dp2 tp2", "zero2"),
    "cp2 dp2 zero3": ("dp2 cp2", "zero3"),
    "dp4 zero1": ("dp4", "zero1"),
    "dp4 zero3": ("dp4", "zero3"),
    "dp4 zero0": ("dp4", "zero0"),
    "dp2x2 zero2": ("dp2x2", "zero2"),
    "pp2 tp2 zero1": ("pp2 tp2", "zero1"),
}
WORLDS: dict[str, World] = {}


def spec_of(layout: str, sharding: Any, *, name: str = "llama-tiny", **policy: Any) -> RunSpec:
    fields = {"precision": "fp64", "sharding": sharding, "device": "cpu", "seed": 7} | policy
    return run_spec(name, layout, seq_len=32, micro_batch=2, global_batch=6, **fields)


def trainer_of(spec: RunSpec) -> Trainer:
    name = str(spec.layout)
    if name not in WORLDS:
        WORLDS[name] = World.create(spec.layout, "cpu")
    return Trainer(spec, WORLDS[name], device=CPU, rule=InitRule(vector_std=0.1))


def run(trainer: Trainer, first: int, last: int) -> list[float]:
    return [float(trainer.step(index).loss) for index in range(first, last)]


def saved(trainer: Trainer, root: Path, step: int, *, background: bool = True) -> None:
    saver = Saver(trainer, root, background=background)
    saver.save(state_of(trainer, step))
    saver.wait()


def loaded(trainer: Trainer, root: Path) -> None:
    found = checkpoints.newest(root)
    assert found is not None
    checkpoint.load(trainer, found)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().clone().reshape(-1).view(torch.uint8).numpy()


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every tensor of the state, put together on every rank without any checkpoint code."""
    # As arrays of bytes: to send a tensor as an object takes longer than to train it.
    mine = [
        (h.name, h.shape, h.offsets, h.tensor.shape, h.tensor.dtype, _bytes_of(h.tensor))
        for h in state_shards(trainer)
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    full: dict[str, torch.Tensor] = {}
    for name, shape, offsets, size, dtype, held in (item for some in everyone for item in some):
        part = torch.from_numpy(held).view(dtype).view(size)
        target = full.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
        view = target[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))]
        assert bool((view.isnan() | (view == part)).all()), f"copies of {name} differ"
        view.copy_(part)
    assert not any(bool(t.isnan().any()) for t in full.values())
    return full


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def pairs(folder: Path) -> dict[str, Any]:
    truths = {}
    for number, (name, (layout, sharding)) in enumerate(LAYOUTS.items()):
        trainer = trainer_of(spec_of(layout, sharding))
        run(trainer, number, number + 2)  # other data for each, so that a mix-up would show
        truths[name] = whole(trainer)
        saved(trainer, folder / name, 2, background=number % 2 == 0)
    gaps: dict[str, Any] = {}
    for target, (layout, sharding) in LAYOUTS.items():
        trainer = trainer_of(replace(spec_of(layout, sharding), seed=99))
        for source, truth in truths.items():
            if source != target:
                loaded(trainer, folder / source)
                assert trainer.optimizer.updates == 2
                gaps[f"{source} -> {target}"] = worst(whole(trainer), truth)
    tensors = len(next(iter(truths.values())))
    return {"gaps": gaps, "tensors": tensors, "apart": _apart(truths)}


def _apart(truths: dict[str, dict[str, torch.Tensor]]) -> float:
    """Least difference between two of the saved states: an error of 0 must mean something."""
    states = list(truths.values())
    return min(worst(a, b) for i, a in enumerate(states) for b in states[:i])


def resume(folder: Path) -> dict[str, Any]:
    """Two steps on one layout, two on the next, ...; against all of them uninterrupted."""
    names = list(LAYOUTS)
    steps = 2 * len(names)
    straight = run(trainer_of(spec_of(*LAYOUTS["dp4 zero0"])), 0, steps)
    losses: list[float] = []
    for number, name in enumerate(names):
        trainer = trainer_of(spec_of(*LAYOUTS[name]))
        if losses:
            loaded(trainer, folder)
        losses += run(trainer, 2 * number, 2 * number + 2)
        saved(trainer, folder, len(losses))
    gaps = [abs(a - b) / abs(b) for a, b in zip(losses, straight, strict=True)]
    return {"gaps": gaps, "losses": losses}


def muon(folder: Path) -> dict[str, Any]:
    """Blocks of tensor ranks, then whole matrices of weights that ZeRO-3 divides."""

    def on(layout: str, sharding: str, placement: Placement = "owner") -> Trainer:
        recipe = Muon(dtype="fp64", placement=placement)
        return trainer_of(spec_of(layout, sharding, optimizer="muon", muon=recipe))

    straight = run(on("tp2", "zero1", "blocks"), 0, 6)
    first = on("tp2", "zero1", "blocks")
    losses = run(first, 0, 3)
    saved(first, folder, 3)
    resumed = on("dp2", "zero3")
    loaded(resumed, folder)
    moved = worst(whole(resumed), whole(first))
    losses += run(resumed, 3, 6)
    forgetful = on("dp2", "zero3")
    loaded(forgetful, folder)
    for held in state_shards(forgetful):
        if held.name.startswith("exp_avg."):
            held.tensor.zero_()
    without = run(forgetful, 3, 6)
    return {
        "moved": moved,
        "gaps": [abs(a - b) / abs(b) for a, b in zip(losses, straight, strict=True)],
        "without momentum": abs(without[-1] - straight[-1]) / abs(straight[-1]),
    }


def policies(folder: Path) -> dict[str, Any]:
    """Tied ends, shared KV heads, projections fused and not, both kinds of AdamW."""
    cases = {
        "tied": [("gpt-tiny", "pp2 dp2", {}), ("gpt-tiny", "dp2 tp2", {"sharding": "zero3"})],
        "kv heads": [("llama-tiny", "tp4", {}), ("llama-tiny", "dp2 cp2", {})],
        "fused": [
            ("llama-tiny", "dp4", {"fused_projections": True}),
            ("llama-tiny", "pp2 dp2", {"fused_projections": False, "sharding": "zero2"}),
        ],
        "adamw": [
            ("mpt-tiny", "dp4", {"optimizer": "adamw"}),
            ("mpt-tiny", "pp2 tp2", {"optimizer": "adamw-plain"}),
        ],
        "virtual stages": [
            ("gpt-tiny", "pp2 dp2", {"schedule": "interleaved", "virtual_stages": 2}),
            ("gpt-tiny", "pp2 tp2", {"schedule": "zero-bubble"}),
        ],
    }
    gaps: dict[str, Any] = {}
    for name, (one, other) in cases.items():
        for label, (source, target) in (("there", (one, other)), ("back", (other, one))):
            specs = [
                spec_of(layout, how.get("sharding", "zero1"), name=shape,
                        **{k: v for k, v in how.items() if k != "sharding"})
                for shape, layout, how in (source, target)
            ]  # fmt: skip
            trainer = trainer_of(specs[0])
            run(trainer, 0, 2)
            truth = whole(trainer)
            saved(trainer, folder / f"{name} {label}", 2)
            following = run(trainer, 2, 3)
            second = trainer_of(replace(specs[1], seed=3))
            second.source = trainer.source
            loaded(second, folder / f"{name} {label}")
            gaps[f"{name} {label}"] = worst(whole(second), truth)
            gaps[f"{name} {label}, next loss"] = abs(run(second, 2, 3)[0] - following[0])
    return {"gaps": gaps}


def quick(folder: Path) -> dict[str, Any]:
    """A few of everything: two axes at a time, tied ends, fused projections, formats."""
    gaps: dict[str, Any] = {}
    names = ("pp2 tp2 zero1", "cp2 dp2 zero3", "dp2x2 zero2")
    for source, target in zip(names, (*names[1:], names[0]), strict=True):
        one = trainer_of(spec_of(*LAYOUTS[source], name="gpt-tiny"))
        run(one, 0, 2)
        saved(one, folder / source, 2)
        following = run(one, 2, 3)
        other = trainer_of(spec_of(*LAYOUTS[target], name="gpt-tiny", fused_projections=False))
        loaded(other, folder / source)
        again = run(other, 2, 3)
        gaps[f"{source} -> {target}"] = abs(again[0] - following[0]) + worst(
            whole(one), whole(other)
        )
    return {"gaps": gaps, "formats": formats(folder)}


def formats(folder: Path) -> dict[str, Any]:
    """What is exact is converted, what is not is refused on every rank."""
    said: dict[str, Any] = {}
    pure = trainer_of(spec_of("dp4", "zero1", precision="bf16-pure"))
    run(pure, 0, 2)
    saved(pure, folder / "pure", 2)
    truth = whole(pure)
    mixed = trainer_of(spec_of("dp2 tp2", "zero1", precision="bf16-mixed"))
    loaded(mixed, folder / "pure")
    said["bf16 to fp32"] = worst(whole(mixed), truth)
    saved(mixed, folder / "mixed", 2)
    try:
        loaded(pure, folder / "mixed")
    except UserError as error:
        said["fp32 to bf16"] = str(error)
    narrow = trainer_of(spec_of("dp4", "zero1", precision="fp32", optimizer_dtype="bf16"))
    run(narrow, 0, 2)
    saved(narrow, folder / "narrow", 2)
    again = trainer_of(spec_of("pp2 dp2", "zero1", precision="fp32", optimizer_dtype="bf16"))
    loaded(again, folder / "narrow")
    said["moments in bf16"] = worst(whole(again), whole(narrow))
    return said


if __name__ == "__main__":
    which = sys.argv[1]
    print(json.dumps(on_ranks(RANKS_OF.get(which, RANKS), globals()[which])[0]))
