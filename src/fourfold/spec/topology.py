"""The links between the devices of one host, read from what `nvidia-smi topo -m` prints.

Cells: X self, NV# that many NVLinks, PIX/PXB below a PCIe host bridge, PHB/NODE/SYS across it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from fourfold.errors import UserError
from fourfold.spec.cluster import Device

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU[0-9]{1,3}\Z")
# Newer drivers name network cards NIC0 and explain below; older ones print the card's own name.
_NIC = re.compile(r"NIC[0-9]{1,3}\Z|(mlx[45]|bnxt_re|irdma|efa|hfi1|rdmap?)[0-9a-z_-]*\Z")
_DEVICE = re.compile(f"{_GPU.pattern}|{_NIC.pattern}")
_CELL = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC\Z")
_NEAR = ("PIX", "PXB")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTopology:
    """`island` GPUs reach each other over NVLink (1: none do); `nvlinks` are those of one GPU.

    `nics` are network cards below a GPU's PCIe bridge; cards elsewhere serve storage.
    """

    gpus: int
    island: int
    nvlinks: int
    switched: bool
    nics: int


def parse_topo(text: str, device: Device) -> HostTopology:
    """The matrix of one host. More links in a row than `device` has mean a switch."""
    names, rows = _matrix(text)
    gpus = [name for name in names if _GPU.match(name)]
    missing = [name for name in gpus if name not in rows]
    if not gpus or missing:
        rule = f"has no row for {missing[0]}" if gpus else "has no GPU in its first line"
        raise UserError(rule, hint="pass the whole output of 'nvidia-smi topo -m'")
    links = {gpu: {peer: _nvlinks(rows[gpu][peer]) for peer in gpus if peer != gpu} for gpu in gpus}
    island = _nvlink_group_size(gpus, links)
    nvlinks, switched = _links_of_one(links, device)
    nics = [name for name in names if _NIC.match(name)]
    near = [nic for nic in nics if any(rows[gpu][nic] in _NEAR for gpu in gpus)]
    return HostTopology(
        gpus=len(gpus),
        island=island,
        nvlinks=nvlinks,
        switched=switched,
        nics=len(near) or len(nics),
    )


def _matrix(text: str) -> tuple[list[str], dict[str, dict[str, str]]]:
    lines = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    # The heading starts with GPU0 GPU1; a row starts with its name and then a cell.
    heads = [
        i
        for i, words in enumerate(lines)
        if len(words) > 1 and _GPU.match(words[0]) and not _CELL.match(words[1])
    ]
    # With one GPU the heading is 'GPU0 CPU Affinity ...' and its row 'GPU0 X ...'.
    if not heads and any(words[:2] == ["GPU0", "X"] for words in lines):
        return ["GPU0"], {"GPU0": {"GPU0": "X"}}
    if not heads:
        hint = "the first line of that output names GPU0, GPU1, ..."
        raise UserError("is not the output of 'nvidia-smi topo -m'", hint=hint)
    names = list(itertools.takewhile(_DEVICE.match, lines[heads[0]]))
    if len(set(names)) != len(names):
        raise UserError("names a device twice", hint="pass the output of one host")
    rows: dict[str, dict[str, str]] = {}
    for words in lines[heads[0] + 1 :]:
        if len(words) < 2 or not _CELL.match(words[1]):
            continue
        if words[0] not in names:
            if not _GPU.match(words[0]):
                continue
            raise _misfit(f"has a row for {words[0]}, which its first line does not name")
        cells = words[1 : len(names) + 1]
        if words[0] in rows or len(cells) < len(names) or not all(map(_CELL.fullmatch, cells)):
            raise _misfit(f"has a row for {words[0]} that does not match its first line")
        rows[words[0]] = dict(zip(names, cells, strict=True))
    return names, rows


def _misfit(rule: str) -> UserError:
    return UserError(rule, hint="pass the whole output of one host, unwrapped")


def _nvlinks(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0


def _nvlink_group_size(gpus: list[str], links: dict[str, dict[str, int]]) -> int:
    """GPUs of one NVLink group; all groups must be alike, or the host is no regular level."""
    left, sizes = set(gpus), []
    while left:
        group, todo = set(), [min(left)]
        while todo:
            gpu = todo.pop()
            if gpu in group:
                continue
            group.add(gpu)
            todo += [peer for peer, count in links[gpu].items() if count and peer in left]
        left -= group
        sizes.append(len(group))
    if len(set(sizes)) > 1:
        rule = f"has NVLink groups of different sizes: {', '.join(map(str, sizes))} GPUs"
        hint = "describe the host with --host-gpus, --nvlink-ranks and --nvlink"
        raise UserError(rule, hint=hint)
    return sizes[0]


def _links_of_one(links: dict[str, dict[str, int]], device: Device) -> tuple[int, bool]:
    """NVLinks of the worst connected GPU: the sum over peers, or one bundle into a switch."""
    fewest, switched = 0, False
    for peers in links.values():
        total, bundle = sum(peers.values()), max(peers.values(), default=0)
        behind_switch = total > device.links
        count = bundle if behind_switch else total
        if count > device.links:
            rule = f"shows {count} NVLinks, but {device.id} has {device.links}"
            hint = "pass the right --gpu ('fourfold clusters --gpu all' lists them)"
            raise UserError(rule, hint=hint)
        if not fewest or count < fewest:
            fewest, switched = count, behind_switch
    return fewest, switched
