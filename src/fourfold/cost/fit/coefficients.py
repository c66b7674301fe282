"""Which numbers may a fit move, and what are they when nobody measured? The list of knobs.

Priors are log-normal: `default` is the median, `spread` the standard deviation of the logarithm.
A knob that the rows do not exercise stays at its prior. Seconds end in _s; the rest are ratios.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knob:
    """One fitted number. `part` is time or memory."""

    name: str
    part: str
    default: float
    spread: float
    low: float
    high: float
    about: str


KNOBS: tuple[Knob, ...] = (
    Knob("gemm", "time", 0.82, 0.1, 0.3, 1.1, "share of the sustained peak a large GEMM reaches"),
    Knob("align", "time", 0.12, 0.25, 0.02, 0.3, "speed lost per power of two a shard misses 64"),
    Knob("wave", "time", 0.9, 0.05, 0.3, 1.0, "how much of a partly filled wave of tiles is paid"),
    Knob("flash", "time", 0.45, 0.4, 0.08, 0.95, "share of the peak flash attention reaches"),
    Knob("small_head", "time", 0.5, 0.8, 0.05, 2.0, "how much flash loses on heads under 128"),
    Knob("flash1", "time", 0.5, 0.2, 0.2, 1.0, "speed of flash attention 1 against 2"),
    Knob("softmax", "time", 1.1, 0.25, 0.4, 4.0, "passes over the scores against the counted ones"),
    Knob("head128", "time", 1.3, 0.5, 0.8, 6.0, "slowdown of batched products at head size 128"),
    Knob(
        "elem", "time", 1.6, 0.35, 0.5, 6.0, "memory passes of element-wise work over the counted"
    ),
    Knob("norm", "time", 6.5, 0.4, 1.0, 20.0, "memory passes of an unfused norm"),
    Knob("fp8", "time", 0.75, 0.15, 0.3, 1.2, "fp8 and fp4 GEMM efficiency against 16 bits"),
    Knob("nvlink", "time", 0.7, 0.25, 0.1, 1.3, "share of the link rate inside the domain"),
    Knob("net", "time", 0.65, 0.3, 0.1, 1.3, "share of the node network a collective reaches"),
    Knob("call_s", "time", 3e-5, 0.7, 2e-6, 1e-3, "start of a tp collective, incl. its last rank"),
    Knob("latency_s", "time", 6e-6, 0.4, 2e-6, 1e-4, "one hop of a collective"),
    Knob("net_latency_s", "time", 4e-5, 0.5, 3e-6, 3e-4, "one hop of a collective across nodes"),
    Knob(
        "cp_attention", "time", 1.3, 0.25, 0.8, 4.0, "attention in pieces under cp, against whole"
    ),
    Knob("dp_exposed", "time", 0.7, 0.5, 0.05, 3.0, "gradient traffic paid once per step"),
    Knob("dp_hop_s", "time", 5e-6, 0.7, 5e-7, 2e-4, "hop of gradient traffic, per layer"),
    Knob("host_s", "time", 2.5e-3, 0.5, 1e-4, 2e-2, "launching one layer, both ways"),
    Knob("tp_hidden", "time", 0.4, 0.3, 0.05, 1.0, "tp traffic still paid where it is overlapped"),
    Knob("micro_s", "time", 1e-3, 1.0, 5e-5, 0.1, "hand-over of a micro batch between stages"),
    Knob("fixed_s", "time", 30e-3, 0.6, 1e-3, 0.5, "once per step: data, logging, clipping"),
    Knob("jitter", "time", 0.005, 0.4, 5e-4, 0.05, "growth of the step per doubling of nodes"),
    Knob("noise_s", "time", 3e-4, 1.0, 1e-6, 2e-2, "waiting per micro batch, times nodes^0.75"),
    Knob("slow_host", "time", 1.5, 0.3, 0.5, 4.0, "launch time in the slow network state"),
    Knob(
        "slow_tp_s",
        "time",
        3e-3,
        0.5,
        1e-5,
        2e-2,
        "launch time per extra tp rank in the slow state",
    ),
    Knob("slow_hop", "time", 4.0, 0.5, 1.0, 30.0, "dp_hop_s in the slow state, against normal"),
    Knob("slow_far", "time", 1.2, 0.3, 0.5, 4.0, "the same across nodes, against inside"),
    Knob("act", "memory", 1.2, 0.15, 0.5, 2.5, "activation bytes kept against the counted"),
    Knob(
        "kept_hidden", "memory", 1.1, 0.4, 0.4, 4.0, "inputs of norms and linears, against counted"
    ),
    Knob("state", "memory", 1.08, 0.08, 0.8, 1.6, "weights, gradients, optimizer and slack"),
    Knob("logits", "memory", 1.0, 0.3, 0.2, 4.0, "loss buffers split over tp, against the counted"),
    Knob("gathered", "memory", 0.3, 0.5, 0.02, 2.0, "gathered sequence-parallel inputs kept"),
    Knob("whole_logits", "memory", 0.05, 1.0, 1e-3, 8.0, "loss buffers not split over tp"),
    Knob(
        "room", "memory", 0.98, 0.06, 0.7, 1.15, "share of the device at which a run stops fitting"
    ),
    Knob("base_gib", "memory", 2.0, 0.4, 0.1, 12.0, "context, communicators, workspaces"),
)

BY_NAME: dict[str, Knob] = {knob.name: knob for knob in KNOBS}
TIME: tuple[str, ...] = tuple(k.name for k in KNOBS if k.part == "time")
MEMORY: tuple[str, ...] = tuple(k.name for k in KNOBS if k.part == "memory")


def defaults() -> dict[str, float]:
    """Every knob at its prior median."""
    return {knob.name: knob.default for knob in KNOBS}
