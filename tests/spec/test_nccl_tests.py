"""nccl-tests logs -> latency and bandwidth of a level."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.cluster import device_id
from fourfold.spec.nccl_tests import fit, parse_log

SAMPLES = Path(__file__).parents[1] / "samples"
FACTOR = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n,
          "sendrecv": lambda n: 1.0}  # fmt: skip
STEPS = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "sendrecv": lambda n: 1,
}


def log_text(op: str, hosts: int, per_host: int, latency_s: float, bytes_per_s: float) -> str:
    """A log as the tools print it, for links that follow the model exactly."""
    ranks = hosts * per_host
    lines = [f"# Collective test starting: {op}_perf", "# Using devices"]
    for rank in range(ranks):
        host, device = divmod(rank, per_host)
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid {rank + 900:6d} on   worker-{host} device {device:2d} "
            "[0x1b] NVIDIA H100 80GB HBM3"
        )
    lines.append(
        "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    )
    lines.append("#        (B)    (elements)                               (us)  (GB/s)  (GB/s)")
    for exponent in range(10, 34):
        size = 2**exponent
        seconds = STEPS[op](ranks) * latency_s + size * FACTOR[op](ranks) / bytes_per_s
        algbw = size / seconds / 1e9
        lines.append(
            f"{size:12d} {size // 4:12d} float sum -1 {seconds * 1e6:.2f} {algbw:.2f} "
            f"{algbw * FACTOR[op](ranks):.2f} 0"
        )
    return "\n".join(lines)


@given(
    st.sampled_from(sorted(FACTOR)),
    st.sampled_from([(1, 2), (1, 8), (2, 4), (4, 8), (2, 1)]),
    st.floats(1e-6, 3e-5),
    st.floats(5e9, 9e11),
)
def test_a_log_that_follows_the_model_is_read_back(op, shape, latency_s, bytes_per_s):
    log = parse_log(log_text(op, *shape, latency_s, bytes_per_s))
    assert (log.op, log.hosts, log.host_ranks) == (op, *shape)
    found = fit(log, crosses=False)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert found.latency_s == pytest.approx(latency_s, rel=0.05)


def test_a_ring_between_hosts_is_shared_by_a_hosts_ranks():
    log = parse_log((SAMPLES / "all_reduce_4x8.log").read_text(), "all_reduce_4x8.log")
    found = fit(log, crosses=True)
    assert (log.hosts, log.ranks, log.op) == (4, 32, "all_reduce")
    assert found.bytes_per_s == pytest.approx(336e9 / 8, rel=0.02)
    assert found.latency_s == pytest.approx(4.1e-6, rel=0.05)


def test_the_test_is_told_by_its_factor_when_nothing_names_it():
    text = (SAMPLES / "all_reduce_1x8.log").read_text()
    assert parse_log(text).op == "all_reduce"
    gather = log_text("all_gather", 1, 8, 2e-6, 3e11).replace("all_gather_perf", "?")
    gather = gather.replace(" sum ", " none ")
    assert parse_log(gather).op == "all_gather"


@pytest.mark.parametrize(
    "mark", ["", "[1,0]<stdout>:", "0: ", "(head, rank=0, pid=38) [1,0]<stdout>:"]
)
@pytest.mark.parametrize("sharp", ["#", ""])
def test_marks_of_launchers_and_lost_sharps_are_ignored(mark, sharp):
    """A page that renders Markdown takes the sharps."""
    text = (SAMPLES / "all_reduce_4x8.log").read_text()
    marked = "".join(f"{mark}{line.replace('#', sharp, 1)}\n" for line in text.splitlines())
    assert parse_log(marked) == parse_log(text)


def test_the_older_form_without_group_and_root():
    text = (
        "# nThread 1 nGpus 2 minBytes 1048576\n#\n# Using devices\n"
        "#   Rank  0 Pid   1320 on  ip-10-0-0-1 device  0 [0x00] Tesla V100-SXM2-16GB\n"
        "#   Rank  1 Pid   1320 on  ip-10-0-0-1 device  1 [0x00] Tesla V100-SXM2-16GB\n#\n"
        "#       size         count      type   redop     time   algbw   busbw  error\n"
        "     1048576        262144     float     sum    52.43   20.00   20.00  0e+00\n"
        "   134217728      33554432     float     sum   3355.4   40.00   40.00  0e+00\n"
    )
    log = parse_log(text, "all_reduce.txt")
    assert (log.ranks, len(log.points)) == (2, 2)
    assert fit(log, crosses=False).bytes_per_s == pytest.approx(40e9, rel=0.01)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: "", "has no '#  Rank 0"),
        (lambda text: text + text, "lists a rank twice"),
        (lambda text: "\n".join(text.splitlines()[:12]), "no line with a size"),
        (
            lambda text: text.replace("node-a device  7", "node-b device  7"),
            "has 1 to 7 ranks per host",
        ),
        # A run that failed or stopped early is no measurement.
        (lambda text: text.replace("0 OK", "12 FAILED"), "12 FAILED"),
        (
            lambda text: text + "node-a: Test NCCL failure common.cu:1005 'unhandled'",
            "NCCL failure",
        ),
        (lambda text: "\n".join(text.splitlines()[:24]), "too small to saturate a link"),
    ],
)
def test_refusals(change, reason):
    text = (SAMPLES / "all_reduce_1x8.log").read_text()
    with pytest.raises(UserError, match=reason):
        parse_log(change(text))


@given(st.integers(0, 3500), st.integers(0, 3500), st.text(max_size=6))
def test_a_mutilated_log_is_read_or_refused(start, length, insert):
    text = (SAMPLES / "all_reduce_1x8.log").read_text()
    try:
        log = parse_log(text[:start] + insert + text[start + length :])
        found = fit(log, crosses=True)
    except UserError:
        return
    assert found.bytes_per_s > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_driver_names(name, expected):
    assert device_id(name, catalog.device_names()) == expected


NEW = "#       size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
OLD = "#       size count type redop time algbw busbw error time algbw busbw error\n"


def ranks_of(count: int, hosts: int) -> str:
    return "".join(
        f"#  Rank {r:2d} Group  0 Pid   41 on n{r * hosts // count} device {r % 8} [0x10] H100\n"
        for r in range(count)
    )


def measured(kind: str, factor: float, in_place: str, *, counted: float = 1.0) -> str:
    """At 100 us a MiB; `counted`: of the bytes, in the rate that is printed."""
    lines = []
    for size in (2**20, 2**24, 2**28, 2**30):
        us = 100.0 * size / 2**20
        rate = counted * size / us / 1e3
        words = f"{us:.1f} {rate:.2f} {rate * factor:.2f}"
        lines.append(f" {size} {size // 4} float {kind} {words} 0 {words} {in_place}\n")
    return "".join(lines)


@pytest.mark.parametrize(
    ("titles", "kind", "factor", "in_place", "op"),
    [
        (NEW, "sum -1", 1.5, "0", "all_reduce"),
        (NEW, "none -1", 0.75, "0", "all_gather"),
        (NEW, "none -1", 0.75, "N/A", "alltoall"),
        (NEW, "sum -1", 1.0, "N/A", "sendrecv"),
        (OLD, "", 0.75, "1e+00", "alltoall"),
        (OLD, "", 0.75, "0e+00", "all_gather"),
    ],
)
def test_a_test_without_a_name_is_known_by_its_table(titles, kind, factor, in_place, op) -> None:
    """Old releases leave the column of an operation empty: numbers behind it stay in theirs."""
    found = parse_log(ranks_of(4, 2) + titles + measured(kind, factor, in_place))
    assert (found.op, len(found.points)) == (op, 4)
    assert found.points[-1].algbw == pytest.approx(2**20 / 100e-6, rel=1e-3)


def test_a_line_whose_numbers_contradict_each_other_is_left_out() -> None:
    """Two ranks that printed into one line, or a line that lost a word."""
    whole = measured("sum -1", 1.5, "0")
    broken = whole.replace(" 262144 float", " 262144 8 float", 1)
    found = parse_log(ranks_of(4, 2) + NEW + broken, "all_reduce_perf.log")
    assert [point.size_bytes for point in found.points] == [2**24, 2**28, 2**30]


@pytest.mark.parametrize("redop", ["", " redop"])
def test_an_old_table_whose_sizes_count_otherwise_is_taken_by_its_bandwidth(redop):
    """An all-gather over two ranks once printed twice the bytes that crossed the link."""
    text = ranks_of(2, 2).replace(" Group  0", "") + OLD.replace(" redop", redop)
    found = parse_log(text + measured("", 1.0, "0e+00", counted=0.5), "pasted.txt")
    assert found.op == "sendrecv"  # nothing is summed, and both bandwidths are one
    assert fit(found, crosses=True).bytes_per_s == pytest.approx(0.5 * 2**20 / 1e-4, rel=0.01)
