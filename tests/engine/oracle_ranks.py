"""Run by test_oracles.py in a process of its own: forks two ranks, prints one JSON of differences.

The oracles are torch's own: the DTensor plan for tensor parallelism, its schedules for pipelines.
"""

from __future__ import annotations

import functools
import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fourfold.cost.count.params import stage_layers
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.layers import Core
from fourfold.engine.model.positions import Tables, make_tables, rotate
from fourfold.engine.parallel import order
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.shards import InitRule, ShardPlace, initialize, shards_of
from fourfold.engine.parallel.wrap import apply_compile
from fourfold.engine.training.trainer import Trainer
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from tests.engine.forked import on_ranks
from tests.specs import run_spec

SEQ_LEN, SEQUENCES, RANKS = 32, 4, 2
RULE = InitRule(vector_std=0.1)
CPU = torch.device("cpu")


class Twin(nn.Module):
    """llama-tiny out of torch's own modules, as torch's plans expect them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleDict({str(i): TwinLayer(shape) for i in range(shape.layers)})
        self.final_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor, tables: Tables) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x, tables)
        return self.head(self.final_norm(x))


class TwinLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.attention = TwinAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = TwinMlp(shape)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        return x + self.mlp(self.mlp_norm(x))


class TwinAttention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.size = shape.head_size
        self.q = nn.Linear(shape.hidden, shape.attention_width, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_width, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_width, bias=False)
        self.out = nn.Linear(shape.attention_width, shape.hidden, bias=False)
        self.core = Core()

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = self.core(rotate(q, tables), rotate(k, tables), v, tables)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TwinMlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def spec(layout: str, **policy: object) -> RunSpec:
    fields = {"seq_len": SEQ_LEN, "global_batch": SEQUENCES, "precision": "fp32", **policy}
    return run_spec("llama-tiny", layout, device="cpu", **fields)


def ours(run: RunSpec) -> tuple[Trainer, float]:
    """Our trainer after one accumulation, and its loss."""
    trainer = Trainer(run, World.create(run.layout, "cpu"), device=CPU, rule=RULE)
    return trainer, float(trainer.reduce(trainer.accumulate(0)).loss)


def filled(decoder: Decoder, shape: ModelShape) -> Decoder:
    shards = shards_of(decoder, shape, SEQ_LEN, ShardPlace())
    initialize(shards, seed=0, layers=shape.layers, rule=RULE)
    return decoder


def data(trainer: Trainer) -> tuple[Tensor, Tensor, Tables]:
    positions = torch.arange(SEQ_LEN)
    tokens, targets = trainer.source.batch(0, torch.arange(SEQUENCES), positions)
    return tokens, targets, make_tables(trainer.spec.model, positions, range(4))


def worst(trainer: Trainer, grads: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to the largest gradient of its tensor."""
    gaps = [0.0]
    for shard in trainer.shards:
        want = grads[shard.name]
        rows, columns = slice(*shard.rect.rows), slice(*shard.rect.columns)
        part = want[rows] if want.ndim == 1 else want[rows, columns]
        assert shard.grad is not None
        gaps.append(float((shard.grad - part).abs().max() / want.abs().max()))
    return max(gaps)


def tensor_plan() -> dict[str, float]:
    trainer, loss = ours(spec("tp2"))
    shape = trainer.spec.model
    twin = Twin(shape)
    source = dict(filled(Decoder(shape, SEQ_LEN, fused=False), shape).named_parameters())
    twin.load_state_dict(source)
    mesh = init_device_mesh("cpu", (RANKS,))
    parallelize_module(
        twin,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "final_norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    with_tables = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    for layer in twin.layers.values():
        plan = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        plan |= {"attention": with_tables, "mlp": whole}
        plan |= {f"attention.{part}": ColwiseParallel() for part in "qkv"}
        plan |= {f"mlp.{part}": ColwiseParallel() for part in ("gate", "up")}
        plan |= {
            name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")
        }
        parallelize_module(layer, mesh, plan)
    tokens, targets, tables = data(trainer)
    with loss_parallel():
        logits = twin(tokens, tables)
        theirs = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        theirs.backward()
    grads = {name: _whole(param.grad) for name, param in twin.named_parameters()}
    return {"loss": abs(loss - float(_whole(theirs))), "grad": worst(trainer, grads)}


def _whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def schedules() -> dict[str, float]:
    gaps = {}
    for kind, name in (("gpipe", "GPipe"), ("1f1b", "1F1B")):
        trainer, loss = ours(spec("pp2", schedule=kind, fused_projections=False))
        shape, rank = trainer.spec.model, dist.get_rank()
        tokens, targets, tables = data(trainer)
        layers = stage_layers(shape, RANKS, SEQ_LEN)[rank]
        decoder = filled(Decoder(shape, SEQ_LEN, layers, fused=False), shape)
        stage = PipelineStage(_Bound(decoder, tables), rank, RANKS, CPU)

        def loss_of(logits: Tensor, wanted: Tensor, all_: int = targets.numel()) -> Tensor:
            flat = logits.flatten(0, 1)
            return nn.functional.cross_entropy(flat, wanted.flatten(), reduction="sum") / all_

        schedule = get_schedule_class(name)(stage, SEQUENCES, loss_fn=loss_of, scale_grads=False)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
            gaps[f"{kind} loss"] = abs(loss - float(torch.stack(losses).sum().detach()))
        grads = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
        gaps[f"{kind} grad"] = worst(trainer, grads)
    return gaps


def compiled() -> dict[str, float]:
    """Compiled layers against the same layers run as they are; no code is generated (aot_eager)."""
    order.apply_compile = functools.partial(apply_compile, backend="aot_eager")
    gaps = {}
    for layout, fields in (
        ("tp2", {"recompute": "full"}),
        ("tp2", {"sequence_parallel": False}),
        ("cp2", {"cp_kind": "ring", "sharding": "zero3"}),
        ("cp2", {"cp_kind": "allgather", "recompute": "full"}),
        ("cp2", {"cp_kind": "ulysses"}),
        ("dp2", {"recompute": "every-2", "sharding": "zero3"}),
        ("pp2", {"recompute": "selective"}),
    ):
        trainer, loss = ours(spec(layout, compile=True, **fields))
        plain, expected = ours(spec(layout, **fields))
        label = f"{layout} {fields}"
        gaps[f"{label} loss"] = abs(loss - expected)
        pairs = zip(trainer.shards, plain.shards, strict=True)
        gaps[f"{label} grad"] = max(
            float((have.grad - want.grad).abs().max() / want.grad.abs().max().clamp(min=1e-9))
            for have, want in pairs
            if have.grad is not None and want.grad is not None
        )
    return gaps


class _Bound(nn.Module):
    """A stage of one argument, as torch's schedules call it."""

    def __init__(self, decoder: Decoder, tables: Tables) -> None:
        super().__init__()
        self.decoder, self.tables = decoder, tables

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.tables)


WHICH = {"tensor": tensor_plan, "pipeline": schedules, "compiled": compiled}

if __name__ == "__main__":
    gaps = on_ranks(RANKS, lambda folder: WHICH[sys.argv[1]]())
    print(json.dumps({key: max(one.get(key, 0.0) for one in gaps) for key in gaps[-1]}))
