"""How does the cost model see a RunSpec? Facts of one run, Columns of many, one cluster and stack.

    columns = columns_of(specs, cluster=catalog.cluster("jean-zay"), stack="megatron-lm-2024")
    seconds = estimate(columns, entry.knobs).step_s

A search over many layouts is faster with `columns(n, **arrays)` and `machine_facts`, `policy_facts`
and `model_facts` below for what all candidates share.
"""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.cost.columns import ATTENTION, CP_KIND, PRECISION, SCHEDULE, Columns, columns
from fourfold.cost.fit.habits import habits
from fourfold.cost.step.hardware import device_facts, fabric_facts
from fourfold.spec.cluster import Cluster
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.words import AROUND, DTYPE_BYTES, KEEPS_SCORES, Schedule


def model_facts(model: ModelShape) -> dict[str, float]:
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "width": model.attention_width,
        "ffn": model.ffn,
        "vocab": model.vocab,
        "tied": float(model.tied),
        "rope": float(model.positions.kind == "rope"),
        "positions": learned_rows(model),
        "alibi": float(model.positions.kind == "alibi"),
        "gated": float(model.gated),
        "window": float(model.window or 0),
        "local": model.local_share,
    }


def learned_rows(model: ModelShape) -> float:
    """Rows of the table of positions, -1 for as many as tokens; 0 where they are computed."""
    return float(model.positions.length or -1) if model.positions.kind == "learned" else 0.0


def machine_facts(cluster: Cluster, policy: Policy) -> dict[str, float]:
    """Device and links of a cluster; its peak in the format the policy's products compute in."""
    return device_facts(cluster.device, policy.dtypes.compute) | fabric_facts(
        cluster.device, cluster, float(cluster.host_gpus)
    )


def running_schedule(schedule: Schedule, virtual_stages: int) -> Schedule:
    """The order that really runs: virtual stages loop, zero-bubble with them stays zero-bubble, and
    interleaving without them is 1F1B."""
    if schedule == "zero-bubble":
        return schedule
    if virtual_stages > 1:
        return "interleaved"
    return "1f1b" if schedule == "interleaved" else schedule


def policy_facts(policy: Policy, stack: str) -> dict[str, float]:
    """Formats, sharding, recompute, schedule and overlap of a policy under a stack."""
    usual, dtypes = habits(stack), policy.dtypes
    kind = policy.attention if policy.attention in KEEPS_SCORES else "flash"
    precision, around = dtypes.compute, DTYPE_BYTES[AROUND.get(dtypes.compute, dtypes.compute)]
    schedule = running_schedule(policy.schedule, policy.virtual_stages)
    reduce_bytes = DTYPE_BYTES[dtypes.reduce]
    # Named engines reduce in what they are known to; only a stated format overrides that.
    wire = reduce_bytes if policy.reduce_dtype or stack == "fourfold" else usual.grad_bytes
    master = 4.0 if dtypes.param == "fp32" and dtypes.compute != "fp32" else 0.0
    moments = 2.0 * DTYPE_BYTES[dtypes.optimizer]
    return {
        "zero": policy.zero,
        "sp": float(policy.sequence_parallel),
        "full_ckpt": policy.recompute_share,
        "attn_ckpt": float(policy.recompute == "selective"),
        "attention": ATTENTION.index(kind),
        "precision": PRECISION.index(precision),
        "block_scale": float(precision == "fp4"),
        "cp_kind": CP_KIND.index(policy.cp_kind),
        "schedule": SCHEDULE.index(schedule),
        "vpp": policy.virtual_stages,
        "grad_bytes": min(wire, 2.0) if policy.precision == "bf16-pure" else wire,
        "acc_bytes": DTYPE_BYTES[dtypes.grad],
        "opt_bytes": master + moments,
        "overlap_dp": float(usual.overlap_dp and policy.overlap_grad_reduce),
        # Engines that overlap it do so only where the sequence is divided too.
        "overlap_tp": float(policy.async_tp or (usual.overlap_tp and policy.sequence_parallel)),
        "prefetch": float(policy.prefetch),
        "own": float(usual.counted),
        "reserved": usual.reserved,
        "selective_share": usual.selective_share,
        "act_bytes": around,
        "saved_bytes": usual.fp8_saved_bytes if precision == "fp8" else around,
        "gather_bytes": usual.fp8_gather_bytes if precision == "fp8" else around,
        "param_bytes": DTYPE_BYTES[dtypes.param],
        "moment_bytes": moments,
        "fused_qkv": float(policy.fused_projections),
        "fused_host": float(usual.compiled or policy.compile),
        "balanced": float(usual.balanced),
        "even_stages": float(usual.even_stages),
        "split_loss": float(usual.split_loss),
        "loss_chunks": policy.loss_chunks,
        "lean_loss": float(policy.is_loss_lean and stack == "fourfold"),
        "eager": float(usual.eager),
    }


def run_facts(spec: RunSpec, cluster: Cluster, stack: str) -> dict[str, float]:
    """Every fact of one run; a micro batch of 0 ('auto') is priced as 1."""
    layout, batch = spec.layout, spec.batch
    return {
        **model_facts(spec.model),
        **machine_facts(cluster, spec.policy),
        **policy_facts(spec.policy, stack),
        "seq": batch.seq_len,
        "micro": max(1, batch.micro_batch),
        "batch": batch.global_batch,
        "gpus": spec.gpus,
        **layout.sizes,
        "shard": layout.shard * layout.cp,
    }


def columns_of(specs: Sequence[RunSpec], *, cluster: Cluster, stack: str) -> Columns:
    """Columns of runs on one cluster under one stack."""
    facts = [run_facts(spec, cluster, stack) for spec in specs]
    names = facts[0] if facts else {}
    return columns(len(facts), **{name: [fact[name] for fact in facts] for name in names})
