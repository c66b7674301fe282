"""Measure this machine's kernels and links, and write a hardware profile.

Matrix products by shape and format, attention by kernel, head size and length, memory bandwidth,
launch time, burst and sustained speed, and collectives between ranks of this host (gloo with 2
and 4 ranks on a CPU, NCCL between GPUs); on a CPU also what a layer of our engine is made of, while
1, 2 and 4 ranks do the same. About 2.5 minutes; --quick 20 seconds. 'plan' takes the
cluster file that --cluster-out writes.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output, submitted
from fourfold.show.machines import profile_page
from fourfold.verbs.run_requests import CalibrateRequest

EXAMPLES = """\
examples:
  fourfold calibrate --quick
  fourfold calibrate --out profile.json --cluster-out this.toml --calibration-out this.json
  fourfold calibrate --on slurm --nodes 4 --cluster-out mine.toml     (links by level)
  fourfold plan --model llama-mini --cluster this.toml --calibration this.json --seq-len 128 \\
      --global-batch 16 --precision fp32
"""
OPTIONS = (
    *options.of(CalibrateRequest),
    option("--out", "write the profile as JSON", "FILE"),
    option("--cluster-out", "write this host as a cluster file for plan", "FILE"),
    option("--calibration-out", "write a starting calibration for plan and predict", "FILE"),
    options.FORCE,
    options.FORMAT,
)
_MARKS = {
    "out": '"type": "HardwareProfile"',
    "cluster_out": "fourfold calibrate on",
    "calibration_out": '"type": "Calibration"',
}


def run(args: Any, show: OnEvent) -> Output:
    wanted = {flag: path for flag in _MARKS if (path := getattr(args, flag))}
    for flag, path in wanted.items():  # before minutes are spent on measuring
        files.require_mine(path, mark=_MARKS[flag], force=bool(args.force))
        files.require_place(path)
    request = options.load(CalibrateRequest, args)
    if request.detach or request.print_launch:
        return submitted(fourfold.submit_calibrate(request))
    answer = fourfold.calibrate(request, on_event=show)
    texts = {
        "out": answer.profile_json,
        "cluster_out": answer.cluster_toml,
        "calibration_out": answer.calibration_json,
    }
    for flag, path in wanted.items():
        files.write_text(path, texts[flag]())
    return Output.of(answer, lambda: profile_page(answer.profile))
