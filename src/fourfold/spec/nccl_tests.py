"""Latency and bandwidth of links, fitted to nccl-tests logs.

busbw (PERFORMANCE.md of nccl-tests) is what crosses the slowest link, in 1e9 bytes/s; times are in
microseconds. A ring of n ranks takes n - 1 steps (all-reduce twice that) of one latency each.

Who wrote a line of a log, and when: what launchers and log collectors put before it.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from dataclasses import dataclass

from fourfold.errors import UserError

# torchrun --tee, srun --label, mpirun --tag-output, Megatron; Ray and SkyPilot; kubectl --prefix;
# TorchX and NeMo-Run; pdsh by address.
_LABEL = (
    r"\[(?:default|rank)?[0-9]{1,7}\]:? ?"
    r"|[0-9]{1,7}:(?: |$)"
    r"|\[[0-9]{1,9},[0-9]{1,7}\]<std(?:out|err)>:? ?"
    r"|\((?:[\w.-]{1,60},? )?(?:rank=[0-9]{1,7}, )?pid=[0-9]{1,9}(?:, ip=[0-9a-f.:]{3,45})?\) ?"
    r"|\[(?:pod|po)/[\w./-]{1,200}\] ?"
    r"|[\w.-]{1,60}/[0-9]{1,7} (?=\[(?:default|rank)[0-9])"
    r"|(?:[0-9]{1,3}\.){3}[0-9]{1,3}: ?"
)
_STAMP = (
    r"\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?"
    r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?\]?(?: |$)"
)
_BEFORE = re.compile(rf"\s{{0,8}}(?:({_LABEL})|{_STAMP})")
_MOST = 4


def unlabelled(text: str) -> tuple[str, str]:
    """(label as printed, '' where there is none; the line without it and without times). What the
    line was indented by stays."""
    label = ""
    for _ in range(_MOST):
        found = _BEFORE.match(text)
        if found is None:
            break
        label += (found.group(1) or "").strip()
        text = text[found.end() :]
    return label, text


_RANK = re.compile(
    r"#?\s*Rank\s+([0-9]+)\s+(?:Group\s+[0-9]+\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device\s+[0-9]+"
    r"\s+\[[^\]]*\]\s*(.*)"
)
# Name of the test -> (busbw / algbw of n ranks, latency steps of n ranks).
_OPS = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "alltoall"), (lambda n: (n - 1) / n, lambda n: n - 1)
    ),
    **dict.fromkeys(("broadcast", "reduce"), (lambda n: 1.0, lambda n: n - 1)),
    "sendrecv": (lambda n: 1.0, lambda n: 1),
}
_NAME = re.compile(rf"\b({'|'.join(_OPS)})_perf")
# Without a name in the log or on the file: told apart by whether they reduce, whether results in
# place are checked, and by their factor. Releases differ in what send-receive says of a reduction.
_BY_FACTOR = {
    (True, True): ("all_reduce", "reduce_scatter"),
    (False, True): ("all_gather", "sendrecv"),
    (True, False): ("alltoall", "sendrecv"),
    (False, False): ("alltoall", "sendrecv"),
}
# A run that failed prints sizes up to the failure: its largest are no plateau.
_FAILED = re.compile(
    r"Test (NCCL|CUDA) failure|Out of bounds values\s*:\s*[0-9]+\s+FAILED|unhandled \w+ error"
)
_LEAST_BYTES = 2**20
# Sizes within this factor of the largest make the plateau; the rest says what latency costs.
_PLATEAU = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclPoint:
    size_bytes: int
    seconds: float
    algbw: float
    busbw: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """One run of one test; bandwidths in bytes/s."""

    op: str
    hosts: int
    ranks: int
    device_name: str
    points: tuple[NcclPoint, ...]

    @property
    def wire_factor(self) -> float:
        """Bytes over the slowest link per byte of a size, by the test's formula; by the printed
        busbw where that is another: old releases count the sizes of an all-gather otherwise."""
        known = _OPS[self.op][0](self.ranks)
        widest = max(self.points, key=lambda point: point.size_bytes)
        printed = widest.busbw * widest.seconds / widest.size_bytes
        rounding = 0.01e9 / widest.busbw if printed else 0.0
        return printed if printed and abs(printed / known - 1) > 0.05 + rounding else known

    @property
    def host_ranks(self) -> int:
        return self.ranks // self.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """`bytes_per_s` is one rank's while all send; `latency_s` None: only large sizes were run."""

    bytes_per_s: float
    latency_s: float | None


def parse_log(text: str, name: str = "") -> NcclLog:
    """A log of nccl-tests; `name` (of its file) may say which test it was."""
    lines = [unlabelled(line)[1] for line in text.splitlines()]
    ranks = [match.groups() for line in lines if (match := _RANK.match(line.strip()))]
    per_host = Counter(host for _, host, _ in ranks)
    _must_be_one_run(ranks, per_host)
    points, reduces, in_place = _points(lines, len(ranks))
    failure = _FAILED.search(text)
    if failure:
        raise UserError(f"says '{failure.group()}'", hint="pass the log of a run without errors")
    if points[-1].size_bytes < _LEAST_BYTES:
        rule = f"ends at {points[-1].size_bytes} bytes, too small to saturate a link"
        raise UserError(rule, hint="run it with sizes of 1 MiB and more (-e 1G)")
    op, device_name = _named("\n".join(lines), name), ranks[0][2].strip()
    op = op or _by_factor(points, len(ranks), reduces, in_place)
    return NcclLog(
        op=op, hosts=len(per_host), ranks=len(ranks), device_name=device_name, points=points
    )


def _must_be_one_run(ranks: list[tuple[str, ...]], per_host: Counter[str]) -> None:
    if not ranks:
        hint = "pass the whole output of all_reduce_perf or another of the nccl-tests"
        raise UserError("has no '#  Rank 0 ... on HOST device 0' lines", hint=hint)
    if len({rank for rank, _, _ in ranks}) != len(ranks):
        rule = "lists a rank twice: it has several runs, or runs that overlapped"
        raise UserError(rule, hint="use one file per run; build nccl-tests with MPI=1")
    if len(set(per_host.values())) > 1:
        rule = f"has {min(per_host.values())} to {max(per_host.values())} ranks per host"
        raise UserError(rule, hint="use the same number of GPUs on every host")
    if len(ranks) < 2:
        raise UserError("has only one rank, so nothing was sent", hint="run it on 2 GPUs or more")


def _points(lines: list[str], ranks: int) -> tuple[tuple[NcclPoint, ...], bool, bool]:
    """By size; whether the test reduces; whether its results in place are right, as those of
    all-to-all and send-receive are not. A log pasted as text may have lost its '#'."""
    titles: list[str] = []
    points, reduces, in_place = [], False, True
    for line in lines:
        words = line.split()
        names = words[1:] if words[:1] == ["#"] else words
        if names[:1] == ["size"]:
            titles = names
        elif {"time", "algbw", "busbw"} <= set(titles) and words and words[0].isdecimal():
            point = _point(words, titles)
            if point is not None and _is_consistent(point, ranks):
                points.append(point)
                kind = words[titles.index("redop")] if "redop" in titles else "none"
                reduces = kind.isalpha() and kind != "none"
                in_place = _is_right(words[-1])
    if not points:
        hint = "pass the whole output, with sizes of 1 MiB and more"
        raise UserError("has no line with a size, a time and a bandwidth above 0", hint=hint)
    return tuple(sorted(points, key=lambda point: point.size_bytes)), reduces, in_place


def _is_right(error: str) -> bool:
    """'N/A' where results in place are not checked; older releases check them and find errors."""
    try:
        return float(error) < 0.1
    except ValueError:
        return False


def _point(words: list[str], titles: list[str]) -> NcclPoint | None:
    """None where the tool printed a size of 0, N/A or a bandwidth that rounded to 0. The first
    time, algbw and busbw are out of place; in-place columns follow them."""
    # Of a test without a reduction, old releases leave that column empty.
    blank = len(titles) - len(words)
    blank = blank if 0 < blank < titles.index("time") - 1 else 0
    try:
        size = int(words[0][:20])
        time_us, algbw, busbw = (
            float(words[titles.index(key) - blank]) for key in ("time", "algbw", "busbw")
        )
    except (ValueError, IndexError):
        return None
    if not (size > 0 and 0 < time_us < 1e12 and 0 <= algbw < 1e9 and 0 <= busbw < 1e9):
        return None
    return NcclPoint(size_bytes=size, seconds=time_us * 1e-6, algbw=algbw * 1e9, busbw=busbw * 1e9)


def _is_consistent(point: NcclPoint, ranks: int) -> bool:
    """Bandwidth is the size by the time; old releases count the part of a rank only. Else a column
    was taken for another."""
    if point.algbw < 0.1e9:  # printed in two digits after the point
        return True
    share = point.algbw * point.seconds / point.size_bytes
    return 0.9 / ranks < share < 1.1


def _named(text: str, name: str) -> str:
    found = _NAME.search(text) or _NAME.search(name)
    if found:
        return found.group(1)
    # A file called alltoall.log or nccl-sendrecv-2x8.txt.
    return next((op for op in _OPS if op in name.lower().replace("-", "_")), "")


def _by_factor(points: tuple[NcclPoint, ...], ranks: int, reduces: bool, in_place: bool) -> str:
    widest = max(points, key=lambda point: point.busbw)
    if widest.algbw > 0:
        for op in _BY_FACTOR[reduces, in_place]:
            if abs(widest.busbw / widest.algbw / _OPS[op][0](ranks) - 1) < 0.02:
                return op
    raise UserError("does not say which test it was", hint="call the file all_reduce_perf.log")


def fit(log: NcclLog, *, crosses: bool) -> LinkFit:
    """Bandwidth from the plateau of large sizes, latency from what small ones take beyond it;
    `crosses`: a host's ranks shared what was measured."""
    factor, steps = log.wire_factor, _OPS[log.op][1](log.ranks)
    data = [(point.size_bytes * factor, point.seconds) for point in log.points]
    bytes_per_s = _slope([pair for pair in data if pair[0] * _PLATEAU >= data[-1][0]])
    small = [
        (seconds - wire / bytes_per_s) / steps
        for wire, seconds in data
        if wire / bytes_per_s < seconds / 2
    ]
    latency_s = max(0.0, statistics.median(small)) if small else None
    share = _share(log) if crosses else 1.0
    return LinkFit(bytes_per_s=bytes_per_s * share, latency_s=latency_s)


def _slope(pairs: list[tuple[float, float]]) -> float:
    """Bytes/s of seconds = a + bytes / rate, each point weighted by 1 / seconds^2, a >= 0."""
    best = max(wire / seconds for wire, seconds in pairs)
    if len({wire for wire, _ in pairs}) < 2:
        return best
    import numpy as np  # 100 ms, only paid for a log

    wires, seconds = np.array(pairs).T
    each_s, start_s = np.polyfit(wires, seconds, 1, w=1 / seconds)
    if each_s <= 0 or start_s < 0:
        return best  # noise, or faster than any line through the origin: what was reached
    return float(1 / each_s)


def _share(log: NcclLog) -> float:
    """What one rank gets of the measured rate when every rank of a host sends at once. A ring
    crosses a host's edge once, over all of its network cards together: its busbw is the host's.
    Send-receive loads one card of a host; all-to-all sends most of its bytes outside."""
    if log.op == "sendrecv":
        return 1.0
    if log.op == "alltoall":
        return (log.ranks - log.host_ranks) / (log.ranks - 1)
    return 1 / log.host_ranks
