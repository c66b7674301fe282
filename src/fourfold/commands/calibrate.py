"""Measure this machine's kernels and links, and write a hardware profile.

Matrix products by shape and format, attention by kernel, head size and length, memory bandwidth,
launch time, sustained against burst speed, and collectives between ranks of this host (gloo with 2
and 4 ranks on a CPU, NCCL between GPUs). About 2.5 minutes; --quick 20 seconds. 'plan' takes the
cluster file that --cluster-out writes.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.result.profile import HardwareProfile, link_of
from fourfold.show.table import Grid, Part
from fourfold.units import show_bytes, show_seconds

EXAMPLES = """\
examples:
  fourfold calibrate --quick
  fourfold calibrate --out profile.json --cluster-out this.toml --calibration-out this.json
  fourfold plan --model llama-mini --cluster this.toml --calibration this.json --seq-len 128 \\
      --global-batch 16 --precision fp32
"""
OPTIONS = (
    option("--quick", "20 seconds instead of 2.5 minutes", switch=True),
    option("--device", "what to measure (default auto)", choices=("auto", "cpu", "cuda")),
    option("--out", "write the profile as JSON", "FILE"),
    option("--cluster-out", "write this host as a cluster file for plan", "FILE"),
    option("--calibration-out", "write a starting calibration for plan and predict", "FILE"),
    option("--ranks", "ranks of the cluster file (default: all measured)", "N", read=int),
    options.FORCE,
    options.FORMAT,
)


def run(args: Any) -> Output:
    marks = ((args.out, '"type": "HardwareProfile"'), (args.cluster_out, "fourfold calibrate on"),
             (args.calibration_out, '"type": "Calibration"'))  # fmt: skip
    for path, mark in marks:
        if path:  # before minutes are spent on measuring
            files.require_mine(path, mark=mark, force=bool(args.force))
    show = Stderr()
    answer = fourfold.calibrate(
        quick=bool(args.quick), device=args.device or "auto", ranks=args.ranks, on_event=show
    )
    show.close()
    if args.out:
        files.write_text(args.out, answer.profile_json())
    if args.calibration_out:
        files.write_text(args.calibration_out, answer.calibration_json())
    if args.cluster_out:
        files.write_text(args.cluster_out, answer.cluster_toml())
    return Output.of(answer, lambda: _page(answer.profile))


def _page(profile: HardwareProfile) -> list[Part]:
    rows = _compute_rows(profile) + _link_rows(profile)
    return [Grid(["quantity", "value", "measured as"], rows), "", _conditions(profile)]


def _compute_rows(profile: HardwareProfile) -> list[list[str]]:
    rows = []
    for dtype in dict.fromkeys(point.dtype for point in profile.gemms):
        points = [point for point in profile.gemms if point.dtype == dtype]
        best = max(points, key=lambda point: point.flops_per_s)
        rows.append(
            [
                f"gemm {dtype}",
                f"{best.flops_per_s / 1e9:,.1f} GFLOP/s",
                f"best of {len(points)} shapes, {best.m}x{best.n}x{best.k}",
            ]
        )
    for kernel in dict.fromkeys(point.kernel for point in profile.attentions):
        best_a = max(
            (point for point in profile.attentions if point.kernel == kernel),
            key=lambda point: point.flops_per_s,
        )
        rows.append(
            [
                f"attention {kernel}",
                f"{best_a.flops_per_s / 1e9:,.1f} GFLOP/s",
                f"both ways, head {best_a.head_size}, {best_a.seq_len} tokens, {best_a.dtype}",
            ]
        )
    largest = max(profile.copies, key=lambda point: point.moved_bytes)
    ratio = profile.sustained_flops_per_s / profile.burst_flops_per_s
    rows += [
        [
            "memory",
            f"{largest.bytes_per_s / 1e9:,.1f} GB/s",
            f"copy of {show_bytes(largest.moved_bytes)}, read and write",
        ],
        ["launch", show_seconds(profile.launch_s), "one small operator, host time"],
        ["layer launch", show_seconds(profile.layer_launch_s), "one tiny layer, both ways"],
        ["sustained", f"{100 * ratio:.1f} %", f"of burst, after {profile.sustained_over_s:.0f} s"],
    ]
    return rows


def _link_rows(profile: HardwareProfile) -> list[list[str]]:
    rows = []
    for point in profile.shared:
        if point.ranks > 1:
            rate, latency_s = link_of(profile, point.ranks)
            rows += [
                [
                    f"{point.ranks} ranks: each",
                    f"{point.flops_per_s / 1e9:,.1f} GFLOP/s",
                    f"all at once, {point.dtype}; memory {point.bytes_per_s / 1e9:,.1f} GB/s",
                ],
                [
                    f"{point.ranks} ranks: link",
                    f"{rate / 1e9:,.2f} GB/s",
                    f"all-reduce, one way; {show_seconds(latency_s)} a hop",
                ],
            ]
    return rows


def _conditions(profile: HardwareProfile) -> str:
    return (
        f"{profile.device_name} ({profile.units} units, {show_bytes(profile.memory_bytes)}), "
        f"host {profile.host}, torch {profile.torch}; measured in {profile.measured_s:.0f} s"
    )
