"""What can this machine do? Measures it and writes a hardware profile.

Matrix products by shape and format, attention by kernel, head size and length, memory bandwidth,
launch time, sustained against burst speed, and collectives between ranks of this host (gloo with 2
and 4 ranks on a CPU, NCCL between GPUs). About 2.5 minutes; --quick 20 seconds. 'plan' takes the
cluster file that --cluster-out writes.
"""

from __future__ import annotations

import argparse
import sys

from fourfold import files
from fourfold.commands import flags
from fourfold.commands.progress import end_line, progress_lines
from fourfold.errors import UserError
from fourfold.launch.devices import gpu_count
from fourfold.launch.folder import scratch
from fourfold.launch.local import JobError, must_be_ok, run_job
from fourfold.result.job import answer_file
from fourfold.result.profile import HardwareProfile, cluster_of, coefficients_of, link_of
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.job import Job, Limits
from fourfold.units import show_bytes, show_seconds

EXAMPLES = """\
examples:
  fourfold calibrate --quick
  fourfold calibrate --out profile.json --cluster-out this.toml --calibration-out this.json
  fourfold plan --model llama-mini --cluster this.toml --calibration this.json --seq-len 128 \\
      --global-batch 16 --precision fp32
"""
_QUICK_S, _WHOLE_S = 11.0, 130.0
_CPU_RANKS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="20 seconds instead of 2.5 minutes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", metavar="FILE", help="write the profile as JSON")
    parser.add_argument(
        "--cluster-out", metavar="FILE", help="write this host as a cluster file for plan"
    )
    parser.add_argument(
        "--calibration-out", metavar="FILE", help="write what plan and predict start from here"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of that cluster (default: all measured)"
    )
    flags.add_force(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    marks = ((args.out, '"type": "HardwareProfile"'), (args.cluster_out, "fourfold calibrate on"),
             (args.calibration_out, '"type": "Calibration"'))  # fmt: skip
    for path, mark in marks:
        if path:  # before minutes are spent on measuring
            files.require_mine(path, mark=mark, force=args.force)
    try:
        profile = measure(quick=args.quick, device=args.device)
    except JobError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    ranks = _ranks(args.ranks, profile)
    if args.out:
        files.write_text(args.out, codec.to_json(profile))
    if args.calibration_out:
        from fourfold.cost.fit import calibration

        known = calibration.calibration_of(profile, cluster_of(profile, ranks))
        files.write_text(args.calibration_out, calibration.to_json(known))
    if args.cluster_out:
        files.write_text(args.cluster_out, codec.to_toml(cluster_of(profile, ranks)))
    if args.format == "json":
        print(json_text(codec.dump(profile) | {"knobs": coefficients_of(profile)}))
        return 0
    print(render(["quantity", "value", "measured as"], _rows(profile), args.format))
    if args.format != "csv":
        print(f"\n{_conditions(profile)}")
    return 0


def measure(*, quick: bool, device: str) -> HardwareProfile:
    """The profile of this host; the torch processes are gone when it returns."""
    gpus = gpu_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise UserError("no GPU is visible", field="device", value=device, hint="--device cpu")
    options = {"quick": "true" if quick else "false", "device": "cuda" if gpus else "cpu"}
    options["seconds"] = str(_QUICK_S if quick else _WHOLE_S)
    job = Job(
        job="calibrate",
        ranks=gpus or _CPU_RANKS,
        options=tuple(sorted(options.items())),
        limits=Limits(start_s=300.0, step_s=120.0),
    )
    with scratch() as folder:
        report = run_job(job, folder, progress=progress_lines())
        end_line()
        must_be_ok(report)
        return codec.from_json(HardwareProfile, files.read_text(answer_file(folder, 0)))


def _ranks(asked: int | None, profile: HardwareProfile) -> int:
    most = max(point.ranks for point in profile.shared)
    if asked is not None and not 1 <= asked <= 1024:
        raise UserError("must be from 1 to 1024", field="ranks", value=asked)
    return asked or most


def _rows(profile: HardwareProfile) -> list[list[str]]:
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
