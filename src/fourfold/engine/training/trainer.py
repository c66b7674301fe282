"""One rank of a training run: build its part of the model, run steps.

The order of collectives on a rank, the same on all ranks that share a group:
1. last stage: number of counting targets, summed over dp x cp
2. for each action of the pipeline's list: transfers between stages; or a forward or backward pass,
   in which per layer FSDP gathers weights (ahead by `policy.prefetch` layers), tensor parallelism
   gathers / scatters (or sums) activations, context parallelism moves keys and values, and, in the
   backward pass, FSDP reduces gradients
3. gradients of shared weights: over tp, over ranks that share a KV head, over first and last stage
4. numbers over everyone: squares of the gradient, the loss, and what routers add to it
5. with Muon, round by round: parts of matrices to their owners (whose blocks add up a product in
   each step of the iteration), and parts of updates back
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.cost.schedule import Action
from fourfold.engine.compat import DTYPES
from fourfold.engine.data.source import Source, micro_sequences, micro_sizes, source_of
from fourfold.engine.model.decoder import IGNORE, Decoder
from fourfold.engine.model.positions import Tables
from fourfold.engine.parallel.context import positions_of, rank_tables
from fourfold.engine.parallel.data import backward_weights, before_backward, make_alone
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.matrices import Matrices, matrices_of
from fourfold.engine.parallel.order import parallelize
from fourfold.engine.parallel.pipeline import Passes, Pipeline, plan, stage_link
from fourfold.engine.parallel.products import DeferredWeightGrads, apply_split
from fourfold.engine.parallel.shards import InitRule, Shard, initialize, shards_of
from fourfold.engine.training import gradients
from fourfold.engine.training.gradients import Balance, LossScaler, ScalerSettings, SharedGradients
from fourfold.engine.training.muon import MuonMatrices
from fourfold.engine.training.optimizer import How, Optimizer, OptimizerSettings
from fourfold.engine.training.step import Batches, StepEvent, StepGraph, StepOutcome
from fourfold.spec.batch import Batch
from fourfold.spec.run import RunSpec


class Trainer:
    """`chunks` are the parts of the model on this rank: one, or one per virtual stage.
    `materialize=False` leaves the model on the meta device until `materialize()` is called."""

    muon_type = MuonMatrices

    def __init__(
        self,
        spec: RunSpec,
        world: World,
        *,
        device: torch.device,
        settings: OptimizerSettings | None = None,
        source: Source | None = None,
        rule: InitRule | None = None,
        scaling: ScalerSettings | None = None,
        materialize: bool = True,
    ) -> None:
        self.spec, self.world, self.device = spec, world, device
        self.settings = settings or OptimizerSettings()
        self.scaling = scaling or ScalerSettings()
        self.rule = rule or InitRule()
        self.source = source or source_of(spec)
        graphs = spec.policy.cuda_graph and device.type == "cuda"
        self.step_graph = StepGraph(self, device) if graphs else None
        self.chunks = parallelize(spec, world)
        self.deferred: dict[Decoder, DeferredWeightGrads] = {}
        if spec.policy.schedule == "zero-bubble":
            self.deferred = {chunk: apply_split(chunk) for chunk in self.chunks}
        self.batch = spec.batch.at(0)
        self._divide()
        self.executed: list[Action] = []
        self.callbacks: list[Callable[[StepEvent], None]] = []
        if materialize:
            self.materialize()

    def materialize(self, *, initial: bool = True) -> None:
        """Give parameters storage and (`initial`) values; make tables and the optimizer."""
        spec, world = self.spec, self.world
        for chunk in self.chunks:
            chunk.to_empty(device=self.device)
        self.shards = self.make_shards()
        if initial:
            initialize(self.shards, seed=spec.seed, layers=spec.model.layers, rule=self.rule)
        kind, seq_len, cp = spec.policy.cp_kind, spec.batch.seq_len, world.cp
        self.positions = positions_of(kind, seq_len, cp.size, cp.rank, self.device)
        self.tables = self.make_tables()
        self.sequences = self._sequences(self.batch)
        self.alone = make_alone(spec, self.chunks)
        self.shared = self.make_shared()
        self.counted = self.make_counted()
        self.balance = self.make_balance()
        self.optimizer = Optimizer(
            [parameter for parameter in self.parameters() if parameter.requires_grad],
            self.settings,
            kind=spec.policy.optimizer,
            dtype=DTYPES[spec.policy.dtypes.optimizer],
            compiled=spec.policy.compile and self.device.type == "cuda",
            copies={w: c for alone in self.alone.values() for w, c in alone.copies.items()},
            make_muon=self.make_muon if spec.policy.optimizer == "muon" else None,
        )
        small = spec.policy.dtypes.compute == "fp16"  # too few exponents for gradients
        self.scaler = LossScaler(self.scaling, self.device) if small else None

    def _tell(self, event: StepEvent) -> None:
        for callback in self.callbacks:
            callback(event)

    def parameters(self) -> Iterator[nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def make_shards(self) -> list[Shard]:
        model, seq_len = self.spec.model, self.spec.batch.seq_len
        place = self.world.shard_place(self.spec.policy.zero)
        return [shard for chunk in self.chunks for shard in shards_of(chunk, model, seq_len, place)]

    def make_tables(self) -> Tables:
        return rank_tables(self.spec, self.world, self.positions)

    def make_shared(self) -> list[SharedGradients]:
        return gradients.shared_gradients(self.shards, self.spec, self.world)

    def make_balance(self) -> Balance:
        return Balance(self.chunks, self.world)

    def make_counted(self) -> list[Shard]:
        return gradients.counted_once(self.shards, self.spec, self.world)

    def make_matrices(self) -> Matrices:
        return matrices_of(self.chunks, self.spec, self.world, self.spec.policy.muon)

    def make_muon(
        self, leaves: Mapping[nn.Parameter, Tensor], settings: OptimizerSettings, how: How
    ) -> MuonMatrices:
        return self.muon_type(
            self.spec.policy.muon,
            self.make_matrices(),
            leaves,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            dtype=how.dtype,
            copies=how.copies,
        )

    def _divide(self) -> None:
        spec = self.spec
        dp, rank = spec.layout.dp, self.world.place["dp"]
        self.sizes = micro_sizes(self.batch, dp, rank)
        self.real_micros = len(self.batch.micro_sizes(self.batch.shares(dp)[rank]))
        self.plan = plan(
            spec.policy.schedule,
            stages=spec.layout.pp,
            virtual_stages=spec.policy.virtual_stages,
            micros=len(self.sizes),
            rank=self.world.stage,
        )

    def _follow_ramp(self, index: int) -> None:
        """Take up the batch of step `index` if it is another; all ranks do so in the same step."""
        if self.spec.batch.global_batch_at(index) != self.batch.global_batch:
            self.batch = self.spec.batch.at(index)
            self._divide()
            self.sequences = self._sequences(self.batch)

    def step(self, index: int) -> StepOutcome:
        """One optimizer update on the batch of step `index`; no host synchronisation inside."""
        was_on = gc.isenabled()
        gc.disable()  # collecting takes milliseconds at its own moment
        try:
            done = self.reduce(self.accumulate(index))
            self.update(done.grad_norm)
        finally:
            if was_on:
                gc.enable()
        return done

    def update(self, norm: Tensor) -> None:
        """Clip by the global norm, change the weights, forget the gradients."""
        self._tell(StepEvent("optimizer", norm=norm))
        max_norm, scaler = self.settings.max_norm, self.scaler
        self.balance.take_up(None if scaler is None else scaler.overflow(norm))
        if scaler is None:
            self.optimizer.step(factor=gradients.clip_factor(norm, max_norm))
        else:
            overflow = scaler.overflow(norm)
            factor = gradients.clip_factor(norm, max_norm, scaler.scale)
            self.optimizer.step(overflow, factor=factor)
            scaler.update(overflow)
        for alone in self.alone.values():
            alone.mark_equal()
        self._tell(StepEvent("end"))

    def accumulate(self, index: int) -> Tensor:
        """All micro batches forwards and backwards; this rank's part of the loss."""
        self._tell(StepEvent("data"))
        self._follow_ramp(index)
        batches = self._batches(index) if self.world.is_first or self.world.is_last else []
        for alone in self.alone.values():
            alone.refresh()
        return self.step_graph(batches) if self.step_graph else self.micro_batches(batches)

    def micro_batches(self, batches: Batches) -> Tensor:
        # Here, not before: of a recorded step routers keep what its replay fills.
        self.balance.begin(self.batch.tokens, None if self.scaler is None else self.scaler.scale)
        pp, stage = self.spec.layout.pp, self.world.stage
        numbers = range(stage, pp * len(self.chunks), pp)
        chunks = dict(zip(numbers, self.chunks, strict=True))
        link = stage_link(self.spec, self.world, self.sizes, self.device)
        pipeline = Pipeline(chunks, link, self._passes(batches))
        with contextlib.ExitStack() as stack:
            for alone in self.alone.values():
                stack.enter_context(alone.in_use())
            losses = pipeline.run(self.plan)
        for alone in self.alone.values():
            alone.hand_over(shard.param for shared in self.shared for shard in shared.shards)
        self.executed = pipeline.executed
        if not losses:
            return torch.zeros((), device=self.device)
        loss = torch.stack(losses).sum()
        return loss if self.scaler is None else self.scaler.unscaled(loss)

    def _passes(self, batches: Batches) -> Passes:
        count = self.count_targets([t for _, t in batches]) if self.world.is_last else None

        def forward(chunk: Decoder, micro: int, x: Tensor | None) -> Tensor:
            tokens, targets = batches[micro] if batches else (None, None)
            self.balance.enter(chunk, is_padding=micro >= self.real_micros)
            given = tokens if chunk.is_first else x
            if count is None or not chunk.is_last:
                return chunk(given, self.tables)
            loss = chunk(given, self.tables, targets) / count
            return loss if self.scaler is None else self.scaler.scaled(loss)

        return Passes(
            forward=forward,
            before=self.before_backward,
            split=lambda chunk, micro: self.deferred[chunk].keep(micro),
            weights=self.backward_weights,
        )

    def _batches(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets of each micro batch; those of the next step are asked for."""
        whole, source = self.spec.batch, self.source
        first = whole.sequences_before(index)
        batches = [source.batch(first, s, self.positions) for s in self.sequences]
        coming = whole.at(index + 1)
        same = coming.global_batch == self.batch.global_batch
        sequences = self.sequences if same else self._sequences(coming)
        source.ahead(whole.sequences_before(index + 1), sequences, self.positions)
        return batches

    def count_targets(self, targets: list[Tensor]) -> Tensor:
        """Targets that count, over all ranks that see different tokens; never 0."""
        count = torch.stack([(t != IGNORE).sum() for t in targets]).sum()
        if self.world.dp_cp.size > 1:
            dist.all_reduce(count, group=self.world.dp_cp.handle)
        return count.clamp(min=1)

    def before_backward(self, chunk: Decoder, kind: str, last: bool) -> None:
        """`kind` B, or I and W of a split one; `last`: the step's last through this chunk."""
        self._tell(StepEvent("backward", chunk, kind))
        if chunk not in self.alone:
            before_backward(chunk, self.spec.policy.zero, last=last, kind=kind)

    def backward_weights(self, chunk: Decoder, micro: int) -> None:
        deferred = self.deferred[chunk]
        if chunk not in self.alone:
            backward_weights(chunk, lambda layer: deferred.multiply(micro, layer))
            return
        for layer in (None, *reversed(chunk.blocks)):
            deferred.multiply(micro, layer)
        self.alone[chunk].collect()

    def reduce(self, loss: Tensor) -> StepOutcome:
        """Finish gradients. They keep the scale of the loss, the numbers do not."""
        self._tell(StepEvent("reduce"))
        for shared in self.shared:
            shared.sum()
        squares = gradients.squares(self.counted, self.device)
        # Every tensor-parallel rank of the last stage has the same loss: one of them reports it.
        reports = self.world.is_last and self.world.tp.rank == 0
        own = [squares, loss if reports else torch.zeros_like(loss)]
        if self.spec.model.moe is not None:
            own.append(sum(self.balance.losses(), torch.zeros_like(loss)))
        self.balance.sum_counts()
        numbers = torch.stack([number.to(squares.dtype) for number in own])
        if self.world.all_ranks.size > 1:
            dist.all_reduce(numbers)
        norm = numbers[0].sqrt()
        norm = norm if self.scaler is None else self.scaler.unscaled(norm)
        return StepOutcome(numbers[1], norm, numbers[2:].sum())

    @property
    def may_overflow(self) -> bool:
        """Whether a gradient that is not finite means only that the loss was scaled too much."""
        return self.scaler is not None and not self.scaler.collapsed()

    def scalars(self) -> dict[str, float]:
        """Numbers by name that a checkpoint must hold besides tensors and counts."""
        return {} if self.scaler is None else self.scaler.scalars()

    def restore_scalars(self, scalars: dict[str, float]) -> None:
        if self.scaler is not None:
            self.scaler.restore(scalars)

    def _sequences(self, batch: Batch) -> list[Tensor]:
        return micro_sequences(batch, self.spec.layout.dp, self.world.place["dp"], self.device)
