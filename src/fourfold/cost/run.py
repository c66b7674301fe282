"""The only mapping of a RunSpec, a device and a cluster to the cost model's Columns, for a search
over a million layouts as for one run. What a spec says overrides the habits of its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fourfold.cost import experts
from fourfold.cost.columns import BY_COST, DEFAULTS, OPTIMIZERS, Columns, columns
from fourfold.cost.dispatch import OVERLAPS
from fourfold.cost.power import clock_share
from fourfold.cost.scaling import scaling_facts
from fourfold.spec import catalog
from fourfold.spec.catalog import generation_of
from fourfold.spec.cluster import TYPICAL, Cluster, Device
from fourfold.spec.engine import Engine
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec, chosen, running_schedule
from fourfold.spec.words import (
    AROUND,
    DTYPE_BYTES,
    DTYPES,
    KEEPS_SCORES,
    PRICED_ATTENTION,
    RECOMPUTE_KINDS,
    SCHEDULES,
)

_NORM_ACT, _NORM_MLP = (RECOMPUTE_KINDS.index(kind) for kind in ("norm+act", "norm+mlp"))


def model_facts(model: ModelShape) -> dict[str, float]:
    return {
        **experts.model_facts(model),
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
        "bias": float(model.bias),
        "gated": float(model.gated),
        "window": float(model.window or 0),
        "local": model.count_layers("window") / model.layers,
        "values": model.value_width,
    }


def padded_vocab(vocab: int, tp: Any, engine: Engine) -> Any:
    """Return the rows of the embedding and the head: an odd number of them runs a product at a
    quarter of its rate."""
    multiple = engine.habits.vocab_multiple * tp
    return np.ceil(vocab / multiple) * multiple if engine.habits.vocab_multiple else vocab


def learned_rows(model: ModelShape) -> float:
    """Rows of the table of positions, -1 for as many as tokens; 0 where they are computed."""
    return float(model.positions.length or -1) if model.positions.kind == "learned" else 0.0


def device_facts(device: Device, precision: str) -> dict[str, float]:
    """Peaks, clock, memory. A precision the device lacks runs at its 16-bit rate; fp32 is that
    without TF32, which torch leaves off."""
    peaks = device.peak_flops_per_s
    half = peaks.bf16 or peaks.fp16 or peaks.fp32 or peaks.fp64 or 1.0
    asked = getattr(peaks, precision.split("-")[0], None)
    if precision == "fp4" and asked is None:
        asked = peaks.fp8
    peak = (asked or peaks.fp32 or half) if precision in ("fp32", "fp64") else half
    return {
        "peak": peak,
        "peak_low": asked or peak,
        "clock": clock_share(device),
        "hbm": device.memory_bytes_per_s,
        "sms": float(device.sms),
        "older_flash": float(has_older_flash(device)),
        **kernel_facts(device, precision),
        "capacity": float(device.memory_bytes),
    }


def kernel_facts(device: Device, precision: str) -> dict[str, float]:
    """What kernels reach on a device, in the format that products compute in."""
    rates = catalog.kernel_rates(device)
    return {
        "product_share": rates.product,
        "narrow_share": rates.fp4 if precision == "fp4" else rates.fp8,
        "grouped_share": rates.grouped,
        "attention_share": rates.attention,
        "small_head": rates.small_head,
        "large_head": rates.large_head,
        "large_head_backward": rates.large_head_backward,
        "forward_keys": rates.forward_keys,
        "backward_keys": rates.backward_keys,
        "backward_rate": rates.backward_rate,
        "product_spread": rates.product_spread,
        "attention_spread": rates.attention_spread,
    }


def machine_facts(cluster: Cluster, precision: str) -> dict[str, float]:
    """Device and links of a cluster; its peak in the format that products compute in."""
    node, inner, outer = float(cluster.host_gpus), cluster.links[0], cluster.links[-1]
    if outer is inner:
        domain, net = float(cluster.gpus), inner.bytes_per_s * node
    else:
        # A cluster file gives the rate per rank when all ranks of a host send.
        domain, net = float(max(inner.ranks, cluster.host_gpus)), outer.bytes_per_s * node
    fabric = {"link": inner.bytes_per_s, "domain": domain, "node": node, "net": net}
    is_typical = float(cluster.source == TYPICAL)
    return {**device_facts(cluster.device, precision), **fabric, "net_open": is_typical}


# The same by places: without and with virtual stages.
_RUNNING = np.array(
    [
        [SCHEDULES.index(running_schedule(schedule, virtual)) for schedule in SCHEDULES]
        for virtual in (1, 2)
    ]
)


def has_newer_flash(device: Device) -> bool:
    """Whether the GPU has attention kernels that leave FlashAttention 2 behind."""
    return generation_of(device) in ("h", "b")


def has_older_flash(device: Device) -> bool:
    """Whether it is known to have none: a measured device of no known generation is not."""
    return generation_of(device) in ("a", "mi")


def priced_attention(policy: Policy, engine: Engine, device: Device) -> str:
    """The word of PRICED_ATTENTION for the kernel that runs. To our engine "flash" is torch's own
    kernel of that name, FlashAttention 2; to others whichever they use."""
    if policy.attention in KEEPS_SCORES:
        return "fused-softmax" if engine.habits.fuses_softmax else policy.attention
    if engine.habits.flash1 and policy.attention in ("auto", "flash"):
        return "flash1"
    named = policy.attention == "flash" and engine.is_ours
    is_old = named or (policy.attention != "cudnn" and engine.habits.flash2)
    return "flash2" if is_old and has_newer_flash(device) else "flash"


def policy_facts(policy: Policy, engine: Engine, device: Device) -> dict[str, float]:
    """Kernels and overlap of a policy under an engine: what no search varies."""
    usual, is_ours = engine.habits, engine.is_ours
    kind = priced_attention(policy, engine, device)
    overlap = usual.overlap if policy.overlap_kind == "auto" else policy.overlap_kind
    # Activation, rope and residual are calls of their own: torch's engines leave fusing them to the
    # compiler, others have kernels.
    is_compiled = usual.compiled or policy.compile
    eager = usual.eager or ((usual.counted or usual.plain_norms) and not is_compiled)
    return {
        "fsdp2": float(usual.counted),
        "reserved": usual.reserved,
        "autocast": float(usual.autocast),
        "selective_share": usual.selective_share,
        "balanced": BY_COST if usual.cuts_by_cost else float(usual.balanced),
        "even_stages": float(usual.even_stages),
        "split_loss": float(usual.split_loss),
        "overlap": float(list(OVERLAPS).index(overlap)),
        "sp": float(policy.sequence_parallel),
        "attention": PRICED_ATTENTION.index(kind),
        "overlap_dp": float(usual.overlap_dp and policy.overlap_grad_reduce),
        # Engines that overlap it do so only where the sequence is divided too.
        "overlap_tp": float(policy.async_tp or (usual.overlap_tp and policy.sequence_parallel)),
        "prefetch": float(policy.prefetch),
        "fused_qkv": float(policy.fused_projections),
        "fused_host": 2.0 if policy.cuda_graph else float(is_compiled),
        "loss_chunks": policy.loss_chunks,
        "lean_loss": float(policy.is_loss_lean and is_ours),
        "our_kernels": float(policy.compile and is_ours),
        "eager": float(eager),
        "fused_norm": float(is_compiled or not usual.plain_norms),
        "compiled": float(is_compiled),
        "compiled_loss": float(usual.compiles_loss and policy.compile),
    }


def gradient_bytes(policy: Policy, engine: Engine) -> tuple[float, float]:
    """Return the bytes of a gradient's element on the wire and in memory: as stated, else by the
    engine's habit. A pure precision has no wider ones, but where an engine reduces in fp32."""
    dtypes, usual = policy.dtypes, engine.habits
    wire, held = usual.gradient_bytes(dtypes.compute)
    is_pure = policy.precision == "bf16-pure"
    if policy.reduce_dtype or engine.is_ours:
        wire = DTYPE_BYTES[dtypes.reduce]
    elif is_pure and not usual.reduces_in_fp32:
        wire = min(wire, 2.0)
    if policy.grad_dtype or engine.is_ours:
        held = DTYPE_BYTES[dtypes.grad]
    elif is_pure:
        held = min(held, 2.0)
    return wire, held


def format_facts(policy: Policy, engine: Engine, generation: str) -> dict[str, float]:
    """Bytes of an element of everything, by the policy's formats."""
    usual, dtypes = engine.habits, policy.dtypes
    precision, around = dtypes.compute, DTYPE_BYTES[AROUND.get(dtypes.compute, dtypes.compute)]
    wire, held = gradient_bytes(policy, engine)
    master = 4.0 if dtypes.param == "fp32" and precision != "fp32" else 0.0
    count, update_traffic = OPTIMIZERS[policy.optimizer]
    moments = count * DTYPE_BYTES[dtypes.optimizer]
    rest = OPTIMIZERS["adamw"][0] * DTYPE_BYTES[dtypes.optimizer]
    return {
        "precision": DTYPES.index(precision),
        **scaling_facts(policy.scaling_kind, generation),
        "grad_bytes": wire,
        "acc_bytes": held,
        "opt_bytes": master + moments,
        "act_bytes": around,
        "saved_bytes": usual.fp8_saved_bytes if precision in AROUND else around,
        "gather_bytes": usual.fp8_gather_bytes if precision in AROUND else around,
        "param_bytes": DTYPE_BYTES[dtypes.param],
        "moment_bytes": moments,
        "end_moment_bytes": rest - moments,
        "update_traffic": update_traffic,
    }


def muon_facts(policy: Policy, device: Device) -> dict[str, float]:
    """Muon's iterations; nothing of other optimizers."""
    if policy.optimizer != "muon":
        return {}
    muon, peaks = policy.muon, device.peak_flops_per_s
    usual = device_facts(device, policy.dtypes.compute)["peak"]
    return {
        "muon_steps": float(muon.steps),
        "muon_bytes": DTYPE_BYTES[muon.dtype],
        "muon_peak": (getattr(peaks, muon.dtype) or usual) / usual,
        "muon_routers": float(muon.matrices == "layers"),
        "muon_blocks": float(muon.placement == "blocks"),
    }


def run_facts(
    spec: RunSpec,
    cluster: Cluster,
    engine: Engine,
    points: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Every fact of one run, or of many that differ in `points`: columns of CHOSEN fields, and
    `global_batch`, `seq_len` and `gpus` where those differ too."""
    run = {**chosen(spec.layout, spec.batch, spec.policy), **(points or {})}
    return {
        **model_facts(spec.model),
        "layer_runs": spec.model.layer_runs,
        **machine_facts(cluster, spec.policy.dtypes.compute),
        **policy_facts(spec.policy, engine, cluster.device),
        **format_facts(spec.policy, engine, generation_of(cluster.device)),
        **muon_facts(spec.policy, cluster.device),
        "seq": run.get("seq_len", spec.batch.seq_len),
        "micro": run["micro_batch"],
        "batch": run.get("global_batch", spec.batch.global_batch),
        "gpus": run.get("gpus", spec.gpus),
        **{axis: run[axis] for axis in (*MODEL_AXES, *EXPERT_AXES)},
        "vocab": padded_vocab(spec.model.vocab, run["tp"], engine),
        "dp": run["replicate"] * run["shard"],
        "shard": run["shard"] * run["cp"],
        "vpp": run["virtual_stages"],
        "zero": run["zero"],
        **experts.run_facts(spec, cluster, engine, run),
        "cp_kind": run["cp_kind"],
        "schedule": _RUNNING[np.greater(run["virtual_stages"], 1) * 1, run["schedule"]],
        **_recompute_facts(spec, run),
    }


def _recompute_facts(spec: RunSpec, run: Mapping[str, Any]) -> dict[str, Any]:
    kind, number = run["recompute"], spec.policy.recompute_number
    whole = {"full": 1.0, "every": 1.0 / max(1, number)}
    share = np.array([whole.get(name, 0.0) for name in RECOMPUTE_KINDS])[kind]
    block = number * np.equal(kind, RECOMPUTE_KINDS.index("block"))
    if np.any(block):  # else the share is a way's own, whatever the row of an open mesh
        chunks = run["pp"] * run["virtual_stages"]
        share = np.maximum(share, np.minimum(1.0, block * chunks / spec.model.layers))
    return {
        "full_ckpt": share,
        "block_ckpt": block,
        "attn_ckpt": np.equal(kind, RECOMPUTE_KINDS.index("selective")),
        "norm_ckpt": np.equal(kind, _NORM_ACT) | np.equal(kind, _NORM_MLP),
        "mlp_ckpt": np.equal(kind, _NORM_MLP),
    }


def columns_of(specs: Sequence[RunSpec], *, cluster: Cluster, engine: Engine) -> Columns:
    facts = [run_facts(spec, cluster, engine) for spec in specs]
    runs = [fact.pop("layer_runs") for fact in facts]
    sequences = tuple(dict.fromkeys(runs))
    names = {name: None for fact in facts for name in fact}
    values = {name: [fact.get(name, DEFAULTS.get(name)) for fact in facts] for name in names}
    values["sequence"] = [sequences.index(one) for one in runs]
    return columns(len(facts), sequences, **values)


def varied_columns(
    spec: RunSpec,
    points: Mapping[str, Any],
    *,
    cluster: Cluster,
    engine: Engine,
    is_open: bool = False,
) -> Columns:
    """Columns of as many runs as there are points, alike but for those; `is_open`: points and facts
    keep their shapes, which broadcast."""
    facts = run_facts(spec, cluster, engine, points)
    sequences = (facts.pop("layer_runs"),)
    return columns(None if is_open else len(points["pp"]), sequences, **facts)
