"""The same where the device is a host's own cores: operators run one after another, each paid in
full. A rough guess by coefficients that begin with `cpu_`, which only a profile of a CPU has
(result/cpu_profile.py), of as many ranks at work at once."""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.ops.ends import reduced_ranks
from fourfold.cost.ops.op import Op
from fourfold.cost.step.rates import Rates
from fourfold.result.points import CPU_FLASH

# Of what passes over memory are taken to move: RMSNorm, for one, is six operators.
_PASSES = 1.5


def is_cpu(coef: Coefficients) -> bool:
    return "cpu_layer_s" in coef


def rates_of(c: Columns, coef: Coefficients) -> Rates:
    return CpuRates(c, coef, CPU_FLASH) if is_cpu(coef) else Rates(c, coef)


class CpuRates(Rates):
    def product(self, op: Op) -> Floats:
        """Multiplying, and laying operands side by side."""
        operands = self.c.act_bytes * (op.m * op.k + op.n * op.k + op.m * op.n)
        multiply = 2.0 * op.m * op.n * op.k / (self.c.peak * self.coef["cpu_product"])
        return multiply + operands * self.coef["cpu_operand_s"]

    def grouped_product(self, op: Op) -> Floats:
        return op.groups * self.product(op)

    def copy(self, op: Op) -> Floats:
        if op.phase == "update":
            each = self.c.param_bytes * self.coef["cpu_element_s"] + self.coef["cpu_update_s"]
            return op.m * each
        return op.bytes * self.coef["cpu_element_s"]

    def elementwise(self, op: Op) -> Floats:
        return _PASSES * self.copy(op)

    norm = cast = elementwise

    def tp(self, op: Op) -> Floats:
        return self._collective(op, self.c.tp, np.where(op.halves > 0, 1.0, 0.0))

    def cp(self, op: Op) -> Floats:
        return self._collective(op, self.c.cp, op.halves, data=op.bytes * self.c.cp)

    def shard(self, op: Op) -> Floats:
        """FSDP copies into its buffers and out of them."""
        copied = 2.0 * op.bytes * self.coef["cpu_element_s"] + self.coef["cpu_wrap_s"]
        size = self.c.shard if op.axis == "shard" else self.c.expert_shard
        return op.times * (self._collective(op, size, op.halves) + copied)

    def ep(self, op: Op) -> Floats:
        """Rows of tokens, one for each chosen expert, and their counts."""
        c = self.c
        return self._collective(op, c.ep, 2.0 * op.halves, data=op.bytes * c.top_k * c.fullest)

    def etp(self, op: Op) -> Floats:
        return self._collective(op, self.c.etp, op.halves)

    def reduced(self, reduce: Op, gather: Op, window: Floats) -> Floats:
        """Layer by layer, and the ends."""
        c, took = self.c, np.zeros(())
        calls = c.layers / c.pp + 1.0
        ranks, shards = reduced_ranks(c, reduce.axis.removeprefix("dp"))
        for op, size in ((reduce, ranks), (gather, shards)):
            copied = 2.0 * op.bytes * self.coef["cpu_element_s"] + calls * self.coef["cpu_wrap_s"]
            took = took + op.times * (self._collective(op, size, calls) + copied)
        return took

    def _collective(
        self, op: Op, size: Floats, calls: Floats, data: Floats | None = None
    ) -> Floats:
        """Start, hop by hop, and bytes that a rank sends."""
        data = op.bytes if data is None else data
        coef, moved = self.coef, op.halves * data * (size - 1.0) / size
        start = coef["cpu_call_s"] + (size - 1.0) * coef["cpu_gather_s"]
        took = calls * start + moved * coef["cpu_gather_byte_s"]
        return np.where(size > 1, took, 0.0)

    def send(self, op: Op) -> Floats:
        return op.times * (self.coef["cpu_send_s"] + op.bytes * self.coef["cpu_send_byte_s"])

    def host(self, op: Op) -> Floats:
        return self.coef["cpu_layer_s"] * (1.0 + self.c.full_ckpt / 3.0)

    def together(self, busy: Floats, move: Floats, launch: Floats) -> tuple[Floats, Floats]:
        return busy + move, busy + move + launch

    def pipeline(self, usual: Floats, work: Floats) -> Floats:
        """Rates are of ranks that are all at work. Where they are more than cores, one that waits
        leaves its turn to the others: together they take as long as their `work` does, or as a
        pipeline whose ranks have a core each."""
        alone = np.maximum(work, self.coef["cpu_share"] * usual)
        return np.where(self.c.pp > 1, alone, usual)
