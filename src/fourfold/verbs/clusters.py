"""new_cluster: a cluster file from answers, `nvidia-smi topo -m` output and nccl-tests logs.

A rate is given, else measured, else links x the data sheet's rate of a link, else asked for; it is
never guessed. A latency that nobody gave or measured is assumed, and the file says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.escape import toml_text
from fourfold.events import Event, OnEvent, ignore
from fourfold.spec import catalog, check, codec
from fourfold.spec.cluster import Device, device_id
from fourfold.spec.nccl_tests import LinkFit, NcclLog, fit, parse_log
from fourfold.spec.topology import HostTopology, parse_topo
from fourfold.units import bytes_per_s_from
from fourfold.verbs.requests import ClusterRequest
from fourfold.verbs.shapes import OneCluster

# (field, question, flag) -> the answer.
Ask = Callable[[str, str, str], str]


def refuse(field: str, question: str, flag: str) -> str:
    raise UserError("is required", field=field, hint=f"{flag}: {question}")


# Typical of one NCCL step inside a host and between hosts; the shipped clusters assume the same.
_ASSUMED = {"alone": "0us", "nvlink": "3us", "pcie": "5us", "network": "10us"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    request: ClusterRequest
    ask: Ask
    on_event: OnEvent
    device: Device
    topo: HostTopology | None
    logs: tuple[NcclLog, ...]
    hosts: int
    host_gpus: int
    nvlink_ranks: int

    @property
    def gpus(self) -> int:
        return self.hosts * self.host_gpus

    @property
    def nics(self) -> int:
        return self.request.nics or (self.topo.nics if self.topo else 0)


def new_cluster(
    request: ClusterRequest, *, ask: Ask = refuse, on_event: OnEvent = ignore
) -> OneCluster:
    """A cluster from what is known of it. `ask` answers what is missing: on a terminal a person,
    else it refuses."""
    name = request.name or ask("name", "a name for the cluster", "--name NAME")
    if not name.isprintable() or len(name) > 100:
        raise UserError("must be one short line of text", field="name", value=name)
    plain = _plain(_evidence(request, ask, on_event), name)
    return OneCluster(catalog.cluster_from(plain), toml_text(plain))


def _ask_count(ask: Ask, field: str, question: str) -> int:
    answer = ask(field, question, f"--{field} N")
    if not (answer.isascii() and answer.isdecimal()) or int(answer[:9]) < 1:
        raise UserError("must be a whole number from 1", field=field, value=answer)
    return int(answer[:9])


def _evidence(request: ClusterRequest, ask: Ask, on_event: OnEvent) -> _Evidence:
    for flag in ("hosts", "host_gpus", "nvlink_ranks", "nics"):
        value = getattr(request, flag)
        if value is not None and not 1 <= value <= 2**24:
            name = flag.replace("_", "-")
            raise UserError("must be from 1 to 2^24", field=name, value=value)
    logs = tuple(_read_log(path) for path in request.nccl_tests or ())
    logged = {device_id(log.device_name, catalog.device_names()) for log in logs}
    gpu = request.gpu or (logged.pop() if len(logged) == 1 else None)
    device = catalog.device(gpu or ask("gpu", "which GPU", "--gpu ID"))
    topo = None
    if request.topo:
        try:
            topo = parse_topo(files.read_text(request.topo, field="topo"), device)
        except UserError as error:
            raise error.within(f"topo {request.topo}") from None
    host_gpus = _host_gpus(request, ask, topo, logs)
    hosts = request.hosts or max((log.hosts for log in logs), default=0)
    hosts = hosts or _ask_count(ask, "hosts", "number of hosts")
    if topo is not None and topo.switched and topo.gpus <= 4 and not request.nvlink_ranks:
        # Hosts of 4 join their GPUs directly; a switch there is a rack's (NVL72).
        assumed = "note: NVLink is taken to end at the host; where its switch joins hosts (NVL72)"
        on_event(Event(f"{assumed}, add --nvlink-ranks 72"))
    island = request.nvlink_ranks or (topo.island if topo else host_gpus if device.links else 1)
    return _Evidence(
        request=request,
        ask=ask,
        on_event=on_event,
        device=device,
        topo=topo,
        logs=logs,
        hosts=hosts,
        host_gpus=host_gpus,
        nvlink_ranks=min(island, hosts * host_gpus),
    )


def _read_log(path: str) -> NcclLog:
    try:
        return parse_log(files.read_text(path, field="nccl-tests"), Path(path).name)
    except UserError as error:
        raise error.within("" if error.field else f"nccl-tests {path}") from None


def _host_gpus(
    request: ClusterRequest, ask: Ask, topo: HostTopology | None, logs: tuple[NcclLog, ...]
) -> int:
    seen = topo.gpus if topo else 0
    if seen and request.host_gpus and request.host_gpus != seen:
        rule = f"contradicts the topology, which shows {seen}"
        hint = "omit it, or pass the topology of the right host"
        raise UserError(rule, field="host-gpus", value=request.host_gpus, hint=hint)
    most = max((log.host_ranks for log in logs), default=0)
    count = request.host_gpus or seen or most
    count = count or _ask_count(ask, "host-gpus", "how many GPUs in one host")
    rule = f"is fewer than the {most} ranks per host in an nccl-tests log"
    check.that(most <= count, "host-gpus", count, rule)
    return count


def _plain(known: _Evidence, name: str) -> dict[str, Any]:
    """The file as plain data: rates and times as people write them, a known GPU by its id."""
    links: list[dict[str, Any]] = []
    notes: list[str] = []
    if known.nvlink_ranks > 1:
        _add_level(known, links, notes, "nvlink", known.nvlink_ranks)
    if known.host_gpus > known.nvlink_ranks:
        _add_level(known, links, notes, "pcie", known.host_gpus)
    if not links or links[-1]["ranks"] < known.gpus:
        _add_level(known, links, notes, "network" if known.gpus > 1 else "alone", known.gpus)
    shipped = known.device.id in catalog.device_names()
    shipped = shipped and catalog.device(known.device.id) == known.device
    price = known.request.price
    return {
        "schema": codec.SCHEMA_VERSION,
        "name": name,
        "device": known.device.id if shipped else codec.encode(known.device),
        "gpus": known.gpus,
        "host_gpus": known.host_gpus,
        **({} if price is None else {"price_per_gpu_hour": price}),
        **({"dispatchers": [*built]} if (built := known.request.dispatchers) else {}),
        "source": "; ".join(notes),
        "links": links,
    }


def _add_level(
    known: _Evidence, links: list[dict[str, Any]], notes: list[str], level: str, ranks: int
) -> None:
    measured = _measured(known, level)
    rate, why = _rate(known, level, measured)
    given = getattr(known.request, f"{level}_latency", None)
    if given:
        latency, source = given, "given"
    elif measured is not None and measured.latency_s is not None:
        latency, source = f"{measured.latency_s * 1e6:.4g}us", "measured"
    else:
        latency, source = _ASSUMED[level], "assumed"
    links.append({"name": level, "ranks": ranks, "bytes_per_s": rate, "latency_s": latency})
    notes.append(f"{level}: {why}, latency {source}")


def _rate(known: _Evidence, level: str, measured: LinkFit | None) -> tuple[str, str]:
    """(rate of one GPU, where it comes from)."""
    request, device, topo = known.request, known.device, known.topo
    if level == "network":
        return _network_rate(known, measured)
    if level == "alone":
        return _show_rate(device.memory_bytes_per_s), "one GPU, its own memory"
    given = request.nvlink if level == "nvlink" else request.pcie
    if given:
        return given, "given"
    if measured is not None:
        return _show_rate(measured.bytes_per_s), "measured with nccl-tests"
    if level == "nvlink" and topo is not None and topo.nvlinks and device.link_bytes_per_s:
        how = "through a switch" if topo.switched else "between GPUs"
        each = device.link_bytes_per_s
        return _show_rate(topo.nvlinks * each), f"{topo.nvlinks} links of {_show_rate(each)} {how}"
    if level == "nvlink" and device.peer_bytes_per_s:
        return _show_rate(device.peer_bytes_per_s), "data sheet"
    question = f"{level} rate of one GPU, one way, such as 30GB/s"
    return known.ask(level, question, f"--{level} RATE"), "given"


def _network_rate(known: _Evidence, measured: LinkFit | None) -> tuple[str, str]:
    request = known.request
    if request.network:
        host, why = _parsed("network", request.network), f"{request.network} a host"
    elif measured is not None:
        used = max(log.host_ranks for log in known.logs if _level_of(known, log) == "network")
        part = f" on {used} of {known.host_gpus} GPUs a host" if used < known.host_gpus else ""
        return _show_rate(measured.bytes_per_s), f"measured with nccl-tests{part}"
    elif request.nic_rate and known.nics:
        host = known.nics * _parsed("nic-rate", request.nic_rate)
        why = f"{known.nics} cards of {request.nic_rate} a host"
    elif request.nic_rate:
        raise UserError("is required", field="nics", hint="or pass --topo FILE")
    else:
        example = f"--nic-rate RATE ({known.nics} cards seen)" if known.nics else "--network RATE"
        answer = known.ask("network", "network rate of one host, such as 3200Gbit/s", example)
        host, why = _parsed("network", answer), f"{answer} a host"
    gpu = _show_rate(host / known.host_gpus)
    bits = f"{8 * host / known.host_gpus / 1e9:.6g}Gbit/s"
    known.on_event(Event(f"network: {why} = {bits} ({gpu}) a GPU"))
    return gpu, why


def _parsed(field: str, text: str) -> float:
    try:
        rate = bytes_per_s_from(text)
        check.positive(rate=rate)
    except UserError as error:
        raise UserError(error.rule, field=field, value=text, hint=error.hint) from None
    return rate


def _show_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.6g}GB/s"


def _measured(known: _Evidence, level: str) -> LinkFit | None:
    """Median over the logs that used most ranks of this level."""
    logs = [log for log in known.logs if _level_of(known, log) == level]
    if not logs:
        return None
    most = max(log.ranks for log in logs)
    fits = [_fit(known, log, level) for log in logs if log.ranks == most]
    latencies = [each.latency_s for each in fits if each.latency_s is not None]
    return LinkFit(
        bytes_per_s=statistics.median(each.bytes_per_s for each in fits),
        latency_s=statistics.median(latencies) if latencies else None,
    )


def _level_of(known: _Evidence, log: NcclLog) -> str:
    """The level a log's slowest hop used. NVLink may span hosts (a rack of 72)."""
    if log.ranks <= known.nvlink_ranks and (log.hosts == 1 or known.nvlink_ranks > known.host_gpus):
        return "nvlink"
    return "pcie" if log.hosts == 1 else "network"


def _fit(known: _Evidence, log: NcclLog, level: str) -> LinkFit:
    found = fit(log, crosses=level == "network")
    if level != "network" or not known.nics:
        return found
    # Some ranks of a host had network cards to themselves that all ranks would have to share.
    alone = log.op == "sendrecv" or log.host_ranks < known.host_gpus
    share = min(1.0, known.nics / known.host_gpus) if alone else 1.0
    return LinkFit(bytes_per_s=found.bytes_per_s * share, latency_s=found.latency_s)
