"""Machines: known ones, a description of yours, what this one reaches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import fourfold
from fourfold import files, options
from fourfold.commands import command
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output, submitted
from fourfold.show import machines
from fourfold.show.machines import profile_page
from fourfold.show.runs import demo_page
from fourfold.spec import check
from fourfold.spec.site import site_start
from fourfold.verbs.requests import ClusterRequest, ReportRequest
from fourfold.verbs.run_requests import CalibrateRequest
from fourfold.verbs.shapes import gpu

if TYPE_CHECKING:
    from fourfold.flag import Arguments

_CLUSTERS = """\
examples:
  fourfold clusters
  fourfold clusters jean-zay
  fourfold clusters --gpu h100-80gb --format json
  fourfold clusters new --name mine --gpu h100-80gb --hosts 16 --host-gpus 8 \\
      --network 3200Gbit/s --out mine.toml
  nvidia-smi topo -m > topo.txt
  fourfold clusters new --name mine --gpu h100-80gb --hosts 16 --topo topo.txt \\
      --nic-rate 400Gbit/s --nccl-tests all_reduce_1x8.log all_reduce_16x8.log --out mine.toml
"""


@command(
    *options.of(ClusterRequest),
    option("--out", "output file (default: stdout)", "FILE"),
    option("--site-out", "also start a site file, for --on", "FILE", rare=True),
    option("--force", "overwrite existing output files", switch=True),
    line="a cluster file from what you know and measured",
)
def new(args: Arguments, show: OnEvent) -> Output:
    """Describe a cluster in a file; on a terminal, missing values are asked for."""
    for path in filter(None, (args.out, args.site_out)):
        files.require_mine(path, mark="", force=bool(args.force))
    name = args.name or (Path(args.out).stem if args.out else None)
    request = options.load(ClusterRequest, args, name=name)
    answer = fourfold.new_cluster(request, ask=_ask, on_event=show)
    if args.site_out:
        named = str(Path(args.out).absolute()) if args.out else ""
        files.write_text(args.site_out, site_start(answer.cluster.host_gpus, named))
        show(Event(f"wrote {args.site_out}; complete it, then use it as --on {args.site_out}"))
    if not args.out:
        is_text = args.format in (None, "text", "md")
        return Output(raw=answer.toml) if is_text else Output.of(answer, list)
    files.write_text(args.out, answer.toml)
    path = args.out if "/" in args.out or args.out.endswith(".toml") else f"./{args.out}"
    show(Event(f"wrote {args.out}; use it as --cluster {path}"))
    return Output.of(answer, lambda: machines.cluster_page(answer.cluster))


@command(
    option("cluster", "a cluster, or the path of its file", "NAME", nargs="?", either="one"),
    option("--gpu", "a GPU's id or file; 'all' lists the GPUs", "ID", either="one"),
    examples=_CLUSTERS,
    actions={"new": new},
)
def clusters(args: Arguments, show: OnEvent) -> Output:
    """List GPUs and clusters, or show one; 'clusters new' describes yours.

    Without a name it lists all. With a name or path it shows the cluster's link levels, from inner
    to outer, as one GPU sees them (per direction, while all its neighbours send too). With --gpu it
    shows a GPU's peaks; its JSON is also the template of a file that adds a GPU ('--gpu
    ./mine.json').
    """
    if args.cluster is not None:
        one = fourfold.cluster(args.cluster)
        return Output.of(one, lambda: machines.cluster_page(one.cluster))
    if args.gpu == "all":
        known = fourfold.gpus()
        return Output.of(known, lambda: machines.gpus_page(known.gpus))
    if args.gpu is not None:
        of_name = gpu(args.gpu)
        return Output.of(of_name, lambda: machines.gpu_page(of_name.device))
    every = fourfold.clusters()
    return Output.of(every, lambda: machines.clusters_page(every.clusters, every.gpus))


def _ask(field: str, question: str, flag: str) -> str:
    """An answer from the terminal; without one the request is incomplete."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("is required", field=field, hint=f"{flag}: {question}")
    print(f"{question}? ", end="", file=sys.stderr, flush=True)
    return check.given(sys.stdin.readline().strip(), field, f"answer, or pass {flag}")


_CALIBRATE = """\
examples:
  fourfold calibrate --quick
  fourfold calibrate --out profile.json --cluster-out this.toml --calibration-out this.json
  fourfold calibrate --on slurm --nodes 4 --cluster-out mine.toml     (links by level)
  fourfold plan --model llama-mini --cluster this.toml --calibration this.json --seq-len 128 \\
      --global-batch 16 --precision fp32
"""
_MARKS = {
    "out": '"type": "HardwareProfile"',
    "cluster_out": "fourfold calibrate on",
    "calibration_out": '"type": "Calibration"',
}


@command(
    *options.of(CalibrateRequest),
    option("--out", "write the profile as JSON", "FILE"),
    option("--cluster-out", "write this host as a cluster file for plan", "FILE"),
    option("--calibration-out", "write a starting calibration for plan and predict", "FILE"),
    options.FORCE,
    examples=_CALIBRATE,
)
def calibrate(args: Arguments, show: OnEvent) -> Output:
    """Measure this machine's kernels and links, and write a hardware profile.

    Matrix products by shape and format, attention by kernel, head size and length, memory
    bandwidth, launch time, burst and sustained speed, and collectives between ranks of this host
    (gloo with 2 and 4 ranks on a CPU, NCCL between GPUs); on a CPU also a layer of our engine,
    while 1, 2 and 4 ranks do the same. About 2.5 minutes; --quick 20 seconds. 'plan' takes the
    cluster file that --cluster-out writes.
    """
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


_DEMO = """\
examples:
  fourfold demo --open
  fourfold demo --layouts 2 --steps 4
"""
PAGE, RUNS = "demo.html", "runs"


@command(
    option("--layouts", "layouts to run (default 3)", "N", read=int),
    option("--steps", "timed steps per layout (default 6)", "N", read=int),
    option("--out", "folder for the runs and their page (default fourfold-demo)", "FOLDER"),
    option("--open", "show the page in a browser", switch=True),
    examples=_DEMO,
)
def demo(args: Arguments, show: OnEvent) -> Output:
    """Calibrate, plan and measure a small model on this machine, in about two minutes.

    Measures the machine briefly, plans a small model on it, runs the best layouts for a few steps,
    and compares predicted with measured times. On a CPU four ranks share the cores (gloo); with
    GPUs each GPU is one rank (NCCL). The runs and a page with charts of them are left in a folder.
    """
    out = Path(args.out or "fourfold-demo")
    given = options.given(args, "layouts", "steps")
    answer = fourfold.demo(**given, store=str(out / RUNS), on_event=show)
    for row in answer.runs:
        if row.failure:
            show(Event(f"{row.layout} {row.outcome}: {row.failure}"))
    _write_page(out, show, browser=bool(args.open))
    all_ok = all(row.outcome == "ok" for row in answer.runs)
    return Output.of(answer, lambda: demo_page(answer), status=0 if all_ok else 1)


def _write_page(out: Path, show: OnEvent, *, browser: bool) -> None:
    """Of this demo's runs and earlier ones; without plotly the demo has only its table."""
    from fourfold.page.report import write_report

    request, path = ReportRequest(runs=str(out / RUNS)), str(out / PAGE)
    try:
        write_report(request, path, browser=browser, force=False, on_event=show)
    except UserError as error:
        show(Event(f"no page: {error}", "warning"))
