"""Run by test_precision.py in a process of its own: forks four ranks, prints what each one saw."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from fourfold.engine import compat
from fourfold.engine.compat_fsdp import fsdp_parameters
from fourfold.engine.compat_modes import UncompiledMode
from fourfold.engine.data.source import Synthetic
from fourfold.engine.model.layers import Norm
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.shards import InitRule
from fourfold.engine.training.gradients import ScalerSettings
from fourfold.engine.training.optimizer import OptimizerSettings
from fourfold.engine.training.step import StepEvent
from fourfold.engine.training.trainer import Trainer
from fourfold.engine.verify.findings import RankFindings
from fourfold.engine.verify.reference import Recipe, train_alone
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.catalog import shape
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from tests.engine.forked import on_ranks
from tests.specs import run_spec

RANKS = 4
ALL = "all" in sys.argv  # every case of each check, or few
# fp16 is slow on CPUs.
TINY = shape("llama", layers=2, hidden=16, ffn=32, heads=4, kv_heads=4, vocab=32)
CPU = torch.device("cpu")
NAMES = {dtype: name for name, dtype in compat.DTYPES.items()}


def spec(layout: str, **policy: Any) -> RunSpec:
    batch = 2 * Layout.parse(layout).dp
    return run_spec(TINY, layout, seq_len=8, global_batch=batch, device="cpu", **policy)


def made(run: RunSpec, **options: Any) -> Trainer:
    return Trainer(run, World.create(run.layout, "cpu"), device=CPU, **options)


def scaled_steps(run: RunSpec) -> list[dict[str, Any]]:
    """Steps of fp16 from a scale that is far too large, which doubles after two good ones."""
    trainer = made(run, scaling=ScalerSettings(initial=2.0**26, interval=2))
    assert trainer.scaler is not None
    seen = []
    for index in range(12):
        before = [leaf.detach().clone() for leaf in trainer.optimizer.leaves]
        scale = float(trainer.scaler.scale)
        done = trainer.step(index)
        pairs = zip(before, trainer.optimizer.leaves, strict=True)
        states = list(trainer.optimizer.inner.state.values())
        seen.append(
            {
                "scale": scale,
                "finite": bool(torch.isfinite(done.grad_norm)),
                "loss": float(done.loss),
                "changed": any(not torch.equal(old, new) for old, new in pairs),
                "updates": float(states[0]["step"]) if states else 0.0,
                "weights_finite": all(bool(torch.isfinite(leaf).all()) for leaf in before),
            }
        )
    return seen


def scaler() -> dict[str, Any]:
    cases: tuple[tuple[str, dict[str, str]], ...] = (
        ("dp2x2", {"sharding": "zero3"}),
        ("pp2 tp2", {"sharding": "zero1"}),
        ("dp4", {"sharding": "zero0"}),
        ("dp4 tp1", {"optimizer": "adamw-plain"}),
    )
    return {
        layout: scaled_steps(spec(layout, precision="fp16", **fields))
        for layout, fields in cases[: None if ALL else 2]
    }


class Sent(UncompiledMode):
    """Formats of gradients in collectives by operator; the two numbers of a step are too small."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d.") and "reduce" in name:
            flat = torch.utils._pytree.tree_leaves(args)
            for one in flat:
                if isinstance(one, torch.Tensor) and one.numel() > 2 and one.is_floating_point():
                    self.seen.setdefault(name.split(".")[1], set()).add(NAMES[one.dtype])
        return func(*args, **(kwargs or {}))


def formats_of(run: RunSpec) -> dict[str, Any]:
    """What real tensors of a second step are in."""
    trainer = made(run)
    trainer.step(0)
    chunk = trainer.chunks[0]
    inside: set[str] = set()
    norm = next(module for module in chunk.modules() if isinstance(module, Norm))
    norm.register_forward_hook(
        lambda module, args, out: inside.update({NAMES[out.dtype], NAMES[module.weight.dtype]})
    )
    grads: set[str] = set()

    def observe(event: StepEvent) -> None:
        if event.phase == "reduce" and trainer.alone:
            # Sums of all micro batches, but for what goes through more sums.
            more = {shard.param for shared in trainer.shared for shard in shared.shards}
            rest = [p.grad for p in trainer.parameters() if p not in more]
            grads.update(NAMES[grad.dtype] for grad in rest if grad is not None)
        for parameter in fsdp_parameters([event.chunk] if event.chunk is not None else []):
            if parameter.unsharded_accumulated_grad is not None:
                grads.add(NAMES[parameter.unsharded_accumulated_grad_data.dtype])
            elif parameter.sharded_param.grad is not None:
                grads.add(NAMES[parameter.sharded_param.grad.dtype])
            elif parameter._unsharded_param.grad is not None:
                grads.add(NAMES[parameter._unsharded_param.grad.dtype])

    trainer.callbacks.append(observe)
    with Sent() as sent:
        trainer.step(1)
    assert isinstance(chunk, FSDPModule) != bool(trainer.alone)
    states = [s for s in trainer.optimizer.inner.state.values() if s]
    moments = {NAMES[s[name].dtype] for s in states for name in ("exp_avg", "exp_avg_sq")}
    return {
        "weights": sorted({NAMES[leaf.dtype] for leaf in trainer.optimizer.leaves}),
        "activations": sorted(inside),
        "grads": sorted(grads),
        "sent": {op: sorted(names) for op, names in sent.seen.items()},
        "moments": sorted(moments),
    }


def formats() -> dict[str, Any]:
    mixed = {"param_dtype": "fp32", "compute_dtype": "bf16", "optimizer_dtype": "bf16"}
    runs = {
        f"{layout} {zero} {precision}": spec(layout, precision=precision, sharding=zero)
        for layout, zero in (
            ("dp4", "zero0"), ("dp4", "zero1"), ("dp4", "zero2"), ("dp4", "zero3"),
            ("dp2x2", "zero2"), ("tp4", "zero1"),
        )
        for precision in ("bf16-mixed", "fp16")
        if precision == "fp16" or zero in ("zero1", "zero3")
    }  # fmt: skip
    runs["dp4 zero3 bf16-pure"] = spec("dp4", precision="bf16-pure", sharding="zero3")
    runs["dp4 zero1 own"] = spec("dp4", sharding="zero1", reduce_dtype="bf16", **mixed)
    return {name: formats_of(run) for name, run in runs.items()}


def fp8() -> dict[str, Any] | None:
    """Losses of five steps in fp8 and in bf16, and how many tensors of 8 bits were made."""
    try:
        import torchao  # noqa: F401
    except ImportError:
        return None
    wide = shape("llama", layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=64)
    found = {}
    cases = (
        ("dp2 tp2", {"sharding": "zero3", "recompute": "full"}),
        ("pp2 cp2", {"sharding": "zero1", "fused_projections": False}),
    )
    for layout, fields in cases[: None if ALL else 1]:
        batch = Batch(seq_len=32, micro_batch=1, global_batch=4)
        run = replace(spec(layout, **fields), model=wide, batch=batch)
        for precision in ("bf16-mixed", "fp8"):
            trainer = made(replace(run, policy=replace(run.policy, precision=precision)))
            with Eights() as eights:
                losses = [float(trainer.step(0).loss) for _ in range(5)]
            of_layout = found.setdefault(layout, {})
            of_layout[precision] = {"losses": losses, "eights": eights.count}
    return found


def ramp() -> dict[str, Any]:
    """Largest differences from one process that follows the same ramp: 4, 6, 8 sequences."""
    batch = Batch(
        seq_len=8, micro_batch=2, global_batch=8, ramp=Ramp(start=4, increment=2, samples=20)
    )
    found: dict[str, Any] = {}
    cases = (("dp2x2", "1f1b"), ("pp2 dp2", "interleaved"), ("cp2 tp2", "1f1b"))
    for layout, schedule in cases[: None if ALL else 2]:
        fields = {"virtual_stages": 2} if schedule == "interleaved" else {}
        fields |= {"precision": "fp64", "schedule": schedule}
        run = run_spec(replace(TINY, layers=4), layout, batch=batch, **fields)
        how = Recipe(
            source=Synthetic(vocab=32, seq_len=8, seed=0, masked=0.2),
            settings=OptimizerSettings(lr=3e-3, eps=1e-5, max_norm=0.5),
            rule=InitRule(vector_std=0.1),
            steps=8,
        )
        truth = train_alone(run, how, CPU)
        options = {"source": how.source, "settings": how.settings, "rule": how.rule}
        trainer = made(run, **options)
        sizes, losses = [], []
        for index in range(how.steps):
            losses.append(float(trainer.step(index).loss))
            sizes.append(list(trainer.sizes))
        seen = RankFindings()
        seen.look(trainer.shards, truth, at_grads=False)
        gaps = [abs(a - b) for a, b in zip(losses, truth.losses, strict=True)]
        found[layout] = {"loss": max(gaps), "param": max(seen.params.values()), "sizes": sizes}
    return found


class Eights(UncompiledMode):
    """Casts to formats of 8 bits, wherever they happen."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.startswith("torchao.") for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and "float8" in str(out.dtype):
            self.count += 1
        return out


CHECKS: dict[str, Callable[[], Any]] = {
    "scaler": scaler,
    "formats": formats,
    "fp8": fp8,
    "ramp": ramp,
}


if __name__ == "__main__":
    if "fp8" in sys.argv and importlib.util.find_spec("torchao"):
        importlib.import_module("torchao.float8")  # seconds: once, not in every rank
    asked = [name for name in sys.argv[1:] if name in CHECKS]
    print(json.dumps(on_ranks(RANKS, lambda folder: {name: CHECKS[name]() for name in asked})))
