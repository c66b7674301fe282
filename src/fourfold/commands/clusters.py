"""Which GPUs and clusters are known? 'clusters new' describes yours.

Without a name: all of them. With a name or a path: one cluster's link levels, from inner to outer,
as one GPU sees them (one way, while all its neighbours send too). With --gpu: one GPU's peaks; its
JSON is also the form of a file that adds a GPU ('--gpu ./mine.json' or .toml).
"""

from __future__ import annotations

import argparse

from fourfold.commands import flags
from fourfold.errors import UserError
from fourfold.show.table import json_text, render
from fourfold.spec import catalog, codec
from fourfold.spec.cluster import Cluster
from fourfold.spec.device import PEAK_NAMES, Device

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cluster", nargs="?", metavar="NAME", help="a cluster, a path, or 'new'")
    parser.add_argument("--gpu", metavar="ID", help="a GPU's id or file; 'all' lists the GPUs")
    flags.add_format(parser)
    group = parser.add_argument_group(
        "clusters new (what is missing is asked for on a terminal; a measurement replaces the "
        "data sheet's rate, a flag replaces both)"
    )
    for flag, kind, metavar, text in _NEW_FLAGS:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument("--nccl-tests", nargs="+", metavar="FILE", help="logs of nccl-tests")
    group.add_argument("--force", action="store_true", help="replace an existing --out file")


_NEW_FLAGS: tuple[tuple[str, type, str, str], ...] = (
    ("--name", str, "NAME", "what the cluster is called"),
    ("--hosts", int, "N", "how many hosts"),
    ("--host-gpus", int, "N", "GPUs of one host"),
    ("--nvlink-ranks", int, "N", "GPUs joined by NVLink (default: those of a host)"),
    ("--nvlink", str, "RATE", "of one GPU, one way: 450GB/s"),
    ("--nvlink-latency", str, "TIME", "of one message: 3us"),
    ("--pcie", str, "RATE", "of one GPU, one way, where NVLink does not reach"),
    ("--network", str, "RATE", "of one host, one way, all its cards: 3200Gbit/s"),
    ("--network-latency", str, "TIME", "of one message: 10us"),
    ("--nics", int, "N", "network cards of one host"),
    ("--nic-rate", str, "RATE", "of one network card: 400Gbit/s"),
    ("--price", float, "X", "of one GPU-hour, in any currency"),
    ("--topo", str, "FILE", "output of 'nvidia-smi topo -m' on one host"),
    ("--out", str, "FILE", "where to write (default: stdout)"),
)


def run(args: argparse.Namespace) -> int:
    if args.cluster == "new":
        from fourfold.commands.clusters_new import run_new

        return run_new(args)
    _refuse_new_flags(args)
    if args.cluster is not None and args.gpu is not None:
        raise UserError(
            "name a cluster or a GPU, not both",
            field="gpu",
            value=args.gpu,
            hint="leave one out",
        )
    if args.cluster is not None:
        print(cluster_text(catalog.cluster(args.cluster), args.format))
    elif args.gpu == "all":
        print(_gpus(args.format))
    elif args.gpu is not None:
        print(_gpu_text(catalog.device(args.gpu), args.format))
    else:
        print(_all(args.format))
    return 0


def _refuse_new_flags(args: argparse.Namespace) -> None:
    for flag in (*(flag for flag, *_ in _NEW_FLAGS), "--nccl-tests", "--force"):
        if getattr(args, flag[2:].replace("-", "_")):
            raise UserError(
                "belongs to 'clusters new'", field=flag, hint=f"fourfold clusters new {flag} ..."
            )


def _all(style: str) -> str:
    clusters = [catalog.cluster(name) for name in catalog.cluster_names()]
    if style == "json":
        devices = [catalog.device(name) for name in catalog.device_names()]
        return json_text(
            {
                "clusters": [codec.encode(cluster) for cluster in clusters],
                "gpus": [codec.encode(device) for device in devices],
            }
        )
    rows = [
        [
            cluster.name,
            cluster.device.id,
            f"{cluster.gpus:,}",
            str(cluster.host_gpus),
            str(cluster.links[0].ranks),
            _rate(cluster.links[0].bytes_per_s),
            _rate(cluster.links[-1].bytes_per_s),
        ]
        for cluster in clusters
    ]
    headings = [
        "cluster", "GPU", "GPUs", "per host", "NVLink domain", "NVLink GB/s", "network GB/s/GPU",
    ]  # fmt: skip
    table = render(headings, rows, style)
    if style == "csv":
        return table
    return f"{table}\n\n{_gpus(style)}"


def _gpus(style: str) -> str:
    devices = [catalog.device(name) for name in catalog.device_names()]
    if style == "json":
        return json_text([codec.encode(device) for device in devices])
    peaks = ("bf16", "fp8", "fp4")
    rows = [
        [
            device.id,
            *(_teraflops(device, name) for name in peaks),
            f"{device.memory_bytes / 2**30:.1f}",
            f"{device.memory_bytes_per_s / 1e9:,.0f}",
            _rate(device.peer_bytes_per_s) if device.links else "-",
            str(device.sms),
            f"{device.power_w:.0f}",
        ]
        for device in devices
    ]
    headings = [
        "GPU", *(f"{name} TFLOP/s" for name in peaks), "memory GiB", "memory GB/s", "NVLink GB/s",
        "SMs", "W",
    ]  # fmt: skip
    table = render(headings, rows, style)
    if style == "csv":
        return table
    return f"{table}\n\npeaks are dense; links are one way; GB = 1e9 bytes, GiB = 2^30 bytes"


def cluster_text(cluster: Cluster, style: str) -> str:
    if style == "json":
        return json_text(codec.dump(cluster))
    rows = [
        [link.name, f"{link.ranks:,}", _rate(link.bytes_per_s), f"{link.latency_s * 1e6:.4g}"]
        for link in cluster.links
    ]
    table = render(["level", "GPUs", "GB/s/GPU one way", "latency us"], rows, style)
    if style == "csv":
        return table
    price = cluster.price_per_gpu_hour
    conditions = [
        f"{cluster.name}: {cluster.gpus:,} x {cluster.device.id} in {cluster.hosts:,} "
        f"{'host' if cluster.hosts == 1 else 'hosts'} of {cluster.host_gpus}",
        *([f"{price:g} a GPU-hour"] if price is not None else []),
    ]
    return f"{table}\n\n{'; '.join(conditions)}" + (f"\n{cluster.source}" if cluster.source else "")


def _gpu_text(device: Device, style: str) -> str:
    if style == "json":
        return json_text(codec.dump(device))
    rows = [[f"{name} TFLOP/s, dense", _teraflops(device, name)] for name in PEAK_NAMES]
    rows += [
        ["memory GiB", f"{device.memory_bytes / 2**30:.2f}"],
        ["memory GB/s", f"{device.memory_bytes_per_s / 1e9:,.0f}"],
        ["links", str(device.links)],
        ["link GB/s, one way", _rate(device.link_bytes_per_s or 0.0)],
        ["SMs", str(device.sms)],
        ["W", f"{device.power_w:g}"],
    ]
    table = render([device.id, "value"], rows, style)
    return table if style == "csv" else f"{table}\n\n{device.name}; {device.source}"


def _teraflops(device: Device, name: str) -> str:
    value = getattr(device.peak_flops_per_s, name)
    return "-" if value is None else f"{value / 1e12:,.7g}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.6g}"
