"""List GPUs and clusters, or show one; 'clusters new' describes yours.

Without a name it lists all. With a name or path it shows the cluster's link levels, from inner to
outer, as one GPU sees them (per direction, while all its neighbours send too). With --gpu it shows
a GPU's peaks; its JSON is also the template of a file that adds a GPU ('--gpu ./mine.json').
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fourfold
from fourfold import files, options
from fourfold.commands import Command
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show import machines
from fourfold.spec import catalog, check, codec
from fourfold.spec.site import site_start
from fourfold.verbs.requests import ClusterRequest

EXAMPLES = """\
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
OPTIONS = (
    option("cluster", "a cluster, or the path of its file", "NAME", nargs="?", either="one"),
    option("--gpu", "a GPU's id or file; 'all' lists the GPUs", "ID", either="one"),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    if args.cluster is not None:
        one = fourfold.cluster(args.cluster)
        return Output.of(one, lambda: machines.cluster_page(one.cluster))
    if args.gpu == "all":
        known = fourfold.gpus()
        return Output.of(known, lambda: machines.gpus_page(known.gpus))
    if args.gpu is not None:
        device = catalog.device(args.gpu)
        plain = codec.dump(device)
        return Output(lambda: plain, lambda: [plain], lambda: machines.gpu_page(device))
    every = fourfold.clusters()
    return Output.of(every, lambda: machines.clusters_page(every.clusters, every.gpus))


def new(args: Any, show: OnEvent) -> Output:
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


def _ask(field: str, question: str, flag: str) -> str:
    """An answer from the terminal; without one the request is incomplete."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("is required", field=field, hint=f"{flag}: {question}")
    print(f"{question}? ", end="", file=sys.stderr, flush=True)
    return check.given(sys.stdin.readline().strip(), field, f"answer, or pass {flag}")


ACTIONS = {
    "new": Command(
        "new",
        "Describe a cluster in a file; on a terminal, missing values are asked for.",
        (
            *options.of(ClusterRequest),
            option("--out", "output file (default: stdout)", "FILE"),
            option("--site-out", "also start a site file, for --on", "FILE", rare=True),
            option("--force", "overwrite existing output files", switch=True),
            options.FORMAT,
        ),
        new,
        line="a cluster file from what you know and measured",
    )
}
