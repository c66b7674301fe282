"""The coefficients that a fit may move, with what they are when nobody measured.

Priors are log-normal: `default` is the median, `spread` the standard deviation of the logarithm. A
coefficient that no row exercises stays at its prior. Seconds end in _s; the rest are ratios.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One number of the model. `part`: time or memory, which fits move; or constant, which none
    does: few rows anywhere tell of it (`--fix` sets it)."""

    name: str
    part: str
    default: float
    spread: float
    low: float
    high: float
    about: str


TIGHT = 0.7  # a prior's spread around similar stacks, against that around defaults

# fmt: off
_ROWS = (
    ("engine", "time", 1.0, 0.15, 0.5, 2.5, "seconds of kernels, against those of the model"),
    ("product", "time", 1.0, 0.05, 0.3, 1.6, "rate of products, against the device's"),
    ("align", "time", 0.12, 0.25, 0.02, 0.3, "speed lost per power of two a shard misses 64"),
    ("wave", "constant", 0.9, 0.05, 0.3, 1.0, "how much of a partly filled wave of tiles is paid"),
    ("attention", "time", 1.0, 0.2, 0.1, 2.0, "rate of flash attention, against the device's"),
    ("flash1", "constant", 0.6, 0.2, 0.2, 1.0, "speed of flash attention 1 against 2"),
    ("softmax", "time", 1.1, 0.25, 0.4, 4.0, "passes over the scores against the counted ones"),
    ("head128", "constant", 1.45, 0.5, 0.8, 6.0, "slowdown of batched products at head size 128"),
    ("elem", "time", 1.6, 0.2, 0.5, 6.0, "memory passes of element-wise work over the counted"),
    ("norm", "constant", 6.5, 0.4, 1.0, 20.0, "memory passes of an unfused norm"),
    ("fp8", "time", 1.0, 0.05, 0.3, 1.6, "rate of fp8 and fp4 products, against the device's"),
    ("grouped", "time", 1.0, 0.05, 0.2, 1.6, "rate of experts' products, against the device's"),
    ("exchange", "time", 1.0, 0.4, 0.05, 3.0, "rate of an exchange of tokens against a collective"),
    ("exchange_hidden", "time", 0.35, 0.4, 0.02, 1.0, "exchange still paid where it is overlapped"),
    ("moe_host_s", "time", 9e-3, 0.5, 5e-4, 6e-2, "launching a layer with experts, both ways"),
    ("nvlink", "time", 0.7, 0.25, 0.1, 1.3, "share of the link rate inside the domain"),
    ("net", "time", 0.65, 0.3, 0.1, 1.3, "share of the node network a collective reaches"),
    ("call_s", "time", 3e-5, 0.7, 2e-6, 1e-3, "start of a tp collective, incl. its last rank"),
    ("latency_s", "constant", 6e-6, 0.4, 2e-6, 1e-4, "one hop of a collective"),
    ("net_latency_s", "time", 4e-5, 0.5, 3e-6, 3e-4, "one hop of a collective across nodes"),
    ("cp_attention", "time", 1.3, 0.25, 0.8, 4.0, "attention in pieces under cp, against whole"),
    ("dp_exposed", "time", 0.7, 0.5, 0.05, 3.0, "gradient traffic paid once per step"),
    ("dp_hop_s", "time", 5e-6, 0.7, 5e-7, 2e-4, "hop of gradient traffic, per layer"),
    ("host_s", "time", 2.5e-3, 0.5, 1e-4, 2e-2, "launching one layer, both ways"),
    ("tp_hidden", "time", 0.4, 0.3, 0.05, 1.0, "tp traffic still paid where it is overlapped"),
    ("micro_s", "time", 1e-3, 1.0, 5e-5, 0.1, "hand-over of a micro batch between stages"),
    ("fixed_s", "time", 30e-3, 0.6, 1e-3, 0.5, "once per step: data, logging, clipping"),
    ("jitter", "time", 0.005, 0.4, 5e-4, 0.05, "growth of the step per doubling of nodes"),
    ("noise_s", "time", 8e-4, 1.0, 1e-6, 2e-2, "waiting per micro batch and doubling of nodes"),
    ("slow_host", "constant", 1.0, 0.3, 0.5, 4.0, "launch time in a slow network state"),
    ("slow_tp_s", "constant", 1e-5, 0.5, 1e-6, 2e-2, "launch time per extra tp rank in it"),
    ("slow_hop", "constant", 1.0, 0.5, 0.5, 30.0, "dp_hop_s in it, against normal"),
    ("slow_far", "constant", 1.0, 0.3, 0.5, 4.0, "the same across nodes, against inside"),
    ("act", "memory", 1.15, 0.15, 0.5, 2.5, "activation bytes kept against the counted"),
    ("kept_hidden", "memory", 1.1, 0.4, 0.4, 4.0, "inputs of norms and linears, against counted"),
    ("state", "memory", 1.08, 0.08, 0.8, 1.6, "weights, gradients, optimizer and slack"),
    ("logits", "memory", 1.0, 0.3, 0.2, 4.0, "loss buffers split over tp, against the counted"),
    ("gathered", "memory", 0.3, 0.5, 0.02, 2.0, "gathered sequence-parallel inputs kept"),
    ("whole_logits", "memory", 0.05, 1.0, 1e-3, 8.0, "loss buffers not split over tp"),
    ("room", "memory", 0.98, 0.06, 0.7, 1.15, "share of the device at which a run stops fitting"),
    ("base_gib", "memory", 2.0, 0.4, 0.1, 12.0, "context, communicators, workspaces"),
)
# fmt: on
COEFFICIENTS: tuple[Coefficient, ...] = tuple(Coefficient(*row) for row in _ROWS)

BY_NAME: dict[str, Coefficient] = {coefficient.name: coefficient for coefficient in COEFFICIENTS}
TIME: tuple[str, ...] = tuple(k.name for k in COEFFICIENTS if k.part == "time")
MEMORY: tuple[str, ...] = tuple(k.name for k in COEFFICIENTS if k.part == "memory")


# Rates of kernels as a stack runs them, small ratios to its device's: no other stack has them.
KERNELS: tuple[str, ...] = ("product", "attention", "fp8", "grouped")
# What one place shows: its noise, and hops of its network.
PLACES: tuple[str, ...] = ("noise_s", "jitter", "dp_hop_s", "net_latency_s")
# Those of our engine on a CPU, which only a profile of one has (step/rates.py): nothing to fit.
HOST: tuple[str, ...] = (
    "cpu_start_s",
    "cpu_byte_s",
    "cpu_share",
    "cpu_gather_s",
    "cpu_gather_byte_s",
    "cpu_send_s",
    "cpu_send_byte_s",
)


def defaults() -> dict[str, float]:
    """Every coefficient at its prior median."""
    return {coefficient.name: coefficient.default for coefficient in COEFFICIENTS}


# An engine that wastes nothing: tensors as counted, norms that keep less than their inputs, a fused
# loss, nothing gathered kept, and the whole device. Engines whose memory was measured (most of them
# academic) need more, so a blend of theirs says little about the least another one may need.
LEAN = {
    "act": 1.0,
    "kept_hidden": 0.8,
    "state": 1.0,
    "logits": 0.5,
    "gathered": 0.02,
    "base_gib": 0.5,
    "room": 1.0,
}
