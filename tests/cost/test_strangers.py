"""Do notes state settings, do open fields take their best, and does an interval grow with what is
not known?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.columns import Columns, columns
from fourfold.cost.fit.calibration import shipped
from fourfold.cost.fit.coefficients import BY_NAME, TIME, defaults
from fourfold.cost.fit.fit import fit_entries
from fourfold.cost.fit.folds import sample
from fourfold.cost.fit.interval import HOST, PER_DOUBLING, SCATTER, TWO_SIDED_80, StepInterval
from fourfold.cost.kinds import DENSE
from fourfold.cost.memory.peak import limit_bytes, memory
from fourfold.cost.step.estimate import (
    ends_s,
    estimate,
    last_rounds,
)
from fourfold.cost.step.rates import SENT_ALONE
from fourfold.cost.step.traffic import crosses, exchange_s, far_hops, group_rate, half_collective_s
from fourfold.cost.table.reference import NoteWords, RowTable, read_table
from fourfold.cost.table.rows import Rows
from fourfold.search.query import usual_cluster
from fourfold.search.rows.read import parse
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs

GOLDEN = Path(__file__).parent.parent / "golden"


def changed(name: str, **cells: str) -> Rows:
    """The first row of a table with other cells."""
    table = read_table(GOLDEN / f"{name}.csv")
    texts = {column: [cells.get(column, values[0])] for column, values in table.texts.items()}
    return parse(RowTable(name, texts, 1))


def run(n: int = 1, **facts: object) -> Columns:
    usual = {
        "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248,
        "vocab": 128256, "seq": 8192, "micro": 1, "batch": 2048, "gpus": 16384, "tp": 8, "pp": 16,
        "vpp": 8, "dp": 128, "zero": 2, "peak": 989e12, "hbm": 3.35e12, "sms": 132, "link": 450e9,
        "node": 8, "net": 400e9, "capacity": 80 * 2**30,
    }  # fmt: skip
    return columns(n, **(usual | facts))


def test_a_note_states_settings() -> None:
    words = NoteWords("rope, QK norm; head size 128, so q is 8192 wide; net 200 Gb/s IB per GPU")
    assert (words.head_size, words.net_bytes_per_s) == (128, 25e9)
    assert NoteWords("net 8 x 400 Gb/s IB per node").net_bytes_per_s_of_node == 400e9
    assert NoteWords("AWS P4d: 400 Gb/s EFA per node").net_bytes_per_s_of_node == 50e9
    assert NoteWords("TCP sockets, about 6 GB/s per node").net_bytes_per_s_of_node == 6e9
    assert NoteWords("8 x 12.5 GB/s IB per node").net_bytes_per_s_of_node == 100e9
    assert NoteWords("NVLink of 450 GB/s per GPU, 50 GB/s IB per GPU").net_bytes_per_s == 50e9
    assert NoteWords("HSDP: shard 64, replicate 16").shard_group == 64
    assert NoteWords("torch.compile + AsyncTP").async_tp is True
    assert NoteWords("eager; vanilla TP").async_tp is False
    assert (NoteWords("").compiled, NoteWords("eager").compiled) == (None, False)


@given(st.text(alphabet="abcHGz 0123456789/;,.-_", max_size=60))
def test_any_note_is_read(note: str) -> None:
    words = NoteWords(note)
    assert words.head_size >= 0
    assert words.net_bytes_per_s >= 0.0
    assert words.shard_group >= 0


def test_a_head_size_reaches_widths_and_weights() -> None:
    plain, wide = changed("par4d"), changed("par4d", note="head size 256")
    assert wide.columns.width[0] == 256 * wide.columns.heads[0]
    assert DENSE.count(wide.columns)[0] > DENSE.count(plain.columns)[0]


def test_an_open_field_takes_the_best_that_fits() -> None:
    cells = {"stack": "nobody-2024", "pp": "4", "tp": "1", "cp": "1", "dp": "2", "n_gpus": "8",
             "gbs": "16", "vpp": ""}  # fmt: skip
    rows = changed("par4d", **cells)
    assert rows.usable[0]
    assert rows.columns.vpp[0] > 1
    assert "virtual stages not stated" in rows.reasons[0]
    assert changed("par4d", **(cells | {"vpp": "1"})).columns.vpp[0] == 1
    # Nothing about recompute, and no room without it.
    tall = {"stack": "nobody-2024", "act_ckpt": "", "mbs": "64"}
    assert changed("mpt", **tall).columns.full_ckpt[0] == 1.0


def test_blocks_of_recomputed_layers_are_counted_by_chunk() -> None:
    cells = {"pp": "2", "tp": "1", "cp": "1", "dp": "4", "n_gpus": "8", "gbs": "16", "vpp": "2"}
    rows = changed("par4d", **cells, act_ckpt="block-3")
    assert rows.columns.full_ckpt[0] == 3 * 4 / rows.columns.layers[0]
    assert changed("par4d", **cells, act_ckpt="block-99").columns.full_ckpt[0] == 1.0
    assert not changed("par4d", **cells, act_ckpt="block-").usable[0]


def test_an_open_layout_takes_the_fastest_that_fits() -> None:
    open_cells = dict.fromkeys(("tp", "pp", "cp", "dp", "sharding", "mbs", "act_ckpt", "vpp"), "")
    big = {"stack": "nobody-2024", "cluster": "", "hardware": "h100-80gb", "n_layers": "126",
           "d_model": "16384", "n_heads": "128", "n_kv_heads": "8", "d_ff": "53248",
           "n_gpus": "4096", "gbs": "512"}  # fmt: skip
    rows = changed("par4d", **big, **open_cells)
    c = rows.columns
    assert rows.usable[0], rows.reasons[0]  # one sequence on each of 4,096 GPUs would not be
    assert c.tp[0] * c.pp[0] * c.cp[0] * c.dp[0] == 4096
    assert c.tp[0] * c.pp[0] > 8
    assert c.shard[0] == c.dp[0] * c.cp[0]
    axes = f"pp{c.pp[0]:.0f} dp{c.dp[0]:.0f} cp1 tp{c.tp[0]:.0f}"
    assert f"layout not stated: {axes} zero" in rows.reasons[0]
    assert "taken as 1" not in rows.reasons[0]
    small = changed("par4d", stack="nobody-2024", n_gpus="8", gbs="64", **open_cells)
    assert memory(small.columns, defaults()).worst_bytes[0] < limit_bytes(small.columns, defaults())
    assert len(sample([changed("par4d")]).step_s) == 1
    assert len(sample([small]).step_s) == 0  # nothing is learned from a guess
    # One word of it is enough to take the rest as 1.
    stated = changed("par4d", **big, **(open_cells | {"sharding": "zero3"}))
    assert "dp 4096 exceeds global_batch 512" in stated.reasons[0]


def test_groups_of_a_rack_do_not_straddle() -> None:
    """1,536 GPUs are 21.3 racks of 72: a job takes whole hosts, as many as its groups fill."""
    c = run(gpus=1536, node=4, domain=72, tp=4)
    assert not crosses(c, c.tp, np.ones(1)).any()
    three = run(gpus=24, node=8, tp=3)
    assert crosses(three, three.tp, np.ones(1)).all()


def test_most_hops_of_a_ring_stay_in_its_host() -> None:
    c = run(gpus=256, tp=1, dp=256)
    assert far_hops(c, np.array([256.0]), np.ones(1))[0] == 31.0
    assert far_hops(c, np.array([8.0]), np.ones(1))[0] == 0.0
    assert far_hops(c, np.array([32.0]), np.array([8.0]))[0] == 31.0


def test_all_to_all_between_hosts_has_one_gpus_share_of_the_network() -> None:
    """In a ring one rank of a host sends to the next host; in an all-to-all each of them does."""
    coef = defaults() | {"latency_s": 0.0, "net_latency_s": 0.0}
    sent, one = np.array([8e9]), np.ones(1)
    inside, wide = run(gpus=64, tp=1, cp=8, dp=8), run(gpus=64, tp=1, cp=64, dp=1)
    within = exchange_s(inside, coef, sent, size=inside.cp, stride=one)
    assert within[0] == sent[0] / (coef["nvlink"] * 450e9)
    across = exchange_s(wide, coef, sent, size=wide.cp, stride=one)
    assert np.isclose(across[0], sent[0] * 56 / 63 / (coef["net"] * 400e9 / 8))
    gathered = half_collective_s(wide, coef, sent * 64 / 63, size=wide.cp, stride=one)
    assert across[0] > 6 * gathered[0]


def test_recompute_by_module_trades_memory_for_time() -> None:
    modules = [{}, {"norm_ckpt": 1}, {"norm_ckpt": 1, "mlp_ckpt": 1}, {"full_ckpt": 1}]
    sizes = [float(memory(run(**kind), defaults()).worst_bytes[0]) for kind in modules]
    seconds = [float(estimate(run(**kind), defaults()).step_s[0]) for kind in modules]
    assert sizes == sorted(sizes, reverse=True)
    assert seconds == sorted(seconds)
    assert seconds[1] < 1.03 * seconds[0]
    assert sizes[1] < 0.8 * sizes[0]


def test_gh200_boards_have_four() -> None:
    cluster = usual_cluster(catalog.device("gh200-96gb"), 64)
    assert (cluster.host_gpus, cluster.links[0].ranks) == (4, 4)
    assert catalog.device("mi250x-gcd-64gb").peak("bf16") == 191.5e12


def test_an_interval_grows_with_what_is_open_and_far() -> None:
    c = run(seq=2**22)  # beyond anything measured
    entry, _ = shipped().entry(MeasuredAs.of("nobody-2024"), "nowhere", "h")
    entry = replace(entry, least_half=0.0)
    times = estimate(c, entry.coefficients)

    def width(**changes: object) -> float:
        low, high = StepInterval(c, replace(entry, **changes), times).ends_s
        return float(np.log(high[0] / low[0]))

    some, every = dict.fromkeys(("engine", "attention"), 0.9), dict.fromkeys(TIME, 1.0)
    assert width() > width(ranges={}) > width(ranges={}, rows_time=40)
    assert width(rows_time=40) > width(rows_time=40, informed=some)
    known = {"ranges": {}, "informed": every, "noise": 0.02}
    assert width(**known) == pytest.approx(2.0 * SCATTER * 0.02)
    assert "nothing of this stack was measured" in StepInterval(c, entry, times).why_wide()[0]
    assert "x from the nearest measured value" in StepInterval(c, entry, times).why_wide()[0]
    assert StepInterval(c, replace(entry, **known), times).why_wide() == [""]


def test_a_width_counts_within_measured_ranges_and_by_half_a_doubling_further() -> None:
    c = run(seq=8192)
    entry = replace(
        shipped().entry(MeasuredAs.of("nobody-2024"), "nowhere", "h")[0], ranges={}, least_half=0.0
    )
    times = estimate(c, entry.coefficients)

    def half(width: float, least_seq: float) -> float:
        ranges = {"seq": (least_seq, 20.0)}  # log2
        return float(StepInterval(c, replace(entry, width=width, ranges=ranges), times).half[0])

    inside = half(1.0, 10.0)
    assert half(0.5, 10.0) == pytest.approx(0.5 * inside)
    assert half(0.5, 14.0) == pytest.approx(np.hypot(0.75 * inside, PER_DOUBLING))
    assert half(0.5, 15.0) == pytest.approx(np.hypot(0.875 * inside, 2.0 * PER_DOUBLING))


def test_doubt_of_a_coefficient_counts_by_what_a_run_depends_on_it() -> None:
    """Against the step with the coefficient moved; one that a run does not use adds nothing."""
    c = run(2, tp=[1, 8], dp=[64, 8], gpus=64, pp=1, vpp=1)
    every = dict.fromkeys(TIME, 1.0)
    entry = replace(
        shipped().entry(MeasuredAs.of("nobody-2024"), "nowhere", "h")[0],
        ranges={},
        noise=1e-6,
        least_half=0.0,
    )
    times = estimate(c, entry.coefficients)
    half = StepInterval(c, replace(entry, informed=every | {"nvlink": 0.75}), times).half
    sd = 0.5 * BY_NAME["nvlink"].spread  # a quarter of the variance is left
    slower = {**entry.coefficients, "nvlink": entry.coefficients["nvlink"] * np.exp(-0.01)}
    slope = np.log(estimate(c, slower).step_s / times.step_s) / 0.01
    assert half == pytest.approx(TWO_SIDED_80 * sd * slope, rel=0.02, abs=1e-5)
    assert half[0] < 1e-4 < 0.005 < half[1]


def test_an_unknown_host_is_in_the_interval_of_runs_that_it_decides() -> None:
    c = run(2, hidden=[512, 16384], heads=[8, 128], ffn=[2048, 53248], seq=[2048, 8192])
    entry, _ = shipped().entry(MeasuredAs.of("nobody-2024"), "nowhere", "h")
    entry = replace(entry, ranges={}, least_half=0.0)
    times = estimate(c, entry.coefficients)
    half = StepInterval(c, entry, times).half
    assert half[0] > 1.5 * half[1]
    known = StepInterval(c, replace(entry, informed=dict.fromkeys(HOST, 1.0)), times).half
    assert known[0] < 0.7 * half[0]
    assert known[1] == pytest.approx(half[1], rel=0.02)
    small, large = StepInterval(c, entry, times).why_wide()
    assert "host-bound" in small
    assert "host" not in large


def test_an_unstated_network_is_in_the_interval_until_it_is_stated() -> None:
    c = run(2, gpus=[8, 512], tp=8, pp=1, vpp=1, dp=[1, 64], net_open=1, net=200e9)
    entry, _ = shipped().entry(MeasuredAs.of("nobody-2024"), "nowhere", "h")
    times = estimate(c, entry.coefficients)
    low, high = StepInterval(c, entry, times).ends_s
    known = replace(c, net_open=np.zeros(2))
    known_low, known_high = StepInterval(known, entry, times).ends_s
    assert (low[0], high[0]) == (known_low[0], known_high[0])  # one host needs none
    assert low[1] < known_low[1]
    assert high[1] > known_high[1]
    one_host, many = StepInterval(c, entry, times).open_network()
    assert one_host == ""
    assert many.startswith("network not stated: -")
    assert many in StepInterval(c, entry, times).why_wide()[1]


def test_a_network_stated_in_bytes_makes_a_run_between_nodes_as_slow_as_it_is() -> None:
    cells = {"n_gpus": "16", "dp": "16", "tp": "1", "pp": "1", "cp": "1", "sharding": "zero3",
             "cluster": "elsewhere"}  # fmt: skip
    told = changed("mpt", **cells, note="about 6 GB/s per node").columns
    assert (told.net[0], told.net_open[0]) == (pytest.approx(6e9), 0)
    usual = estimate(changed("mpt", **cells).columns, defaults()).step_s[0]
    assert estimate(told, defaults()).step_s[0] > 2 * usual


def test_a_stated_network_is_believed_whatever_the_cluster() -> None:
    """6 GB/s over TCP on machines whose name promises 400: also between two nodes."""
    cells = {"n_gpus": "16", "dp": "16", "tp": "1", "pp": "1", "cp": "1", "sharding": "zero3"}
    told, silent = changed("mpt", **cells, net_gbs="6"), changed("mpt", **cells)
    strange = changed("mpt", **cells, cluster="elsewhere")
    assert (told.columns.net_open[0], silent.columns.net_open[0]) == (0, 0)
    assert strange.columns.net_open[0] == 1
    assert changed("mpt", **cells, cluster="elsewhere", net_gbs="6").columns.net_open[0] == 0
    one = np.ones(1)
    rate = group_rate(told.columns, defaults(), told.columns.dp, one)
    assert rate[0] == pytest.approx(6e9)
    slow, usual = (estimate(one.columns, defaults()).step_s[0] for one in (told, silent))
    assert slow > 2 * usual


def test_without_sequence_parallelism_outputs_travel_in_parts() -> None:
    coef = defaults() | {"micro_s": 0.0, "latency_s": 0.0, "call_s": 0.0}
    c = run(3, sp=[1, 0, 0], fsdp2=[0, 0, 1], vpp=1)
    parts, mixed, whole = ends_s(c, coef, np.ones(3))[2]
    assert whole == pytest.approx(8 * parts)
    assert parts < mixed < 0.7 * whole  # gradients go whole


def test_interleaved_stages_send_beside_their_compute() -> None:
    coef = defaults() | {"micro_s": 0.0}
    runs = [run(vpp=vpp) for vpp in (1, 4, 8)]
    sent = [float(ends_s(c, coef, np.ones(1))[2][0]) for c in runs]
    assert sent[1] == pytest.approx(4 * SENT_ALONE * sent[0])
    assert sent[2] == pytest.approx(8 * SENT_ALONE * sent[0])


def test_gradients_of_early_chunks_travel_while_later_ones_are_made() -> None:
    # Of 16 stages a rank makes gradients of 8 chunks, a round of 16 micro batches in each.
    assert last_rounds(run(vpp=[1, 2, 8], n=3)).tolist() == [1.0, 1.0 + 15 / 2, 1.0 + 15 * 7 / 8]
    paid = [
        float(
            estimate(run(vpp=vpp, zero=1, overlap_dp=1, net=50e9), defaults()).parts["dp_comm"][0]
        )
        for vpp in (1, 8)
    ]
    assert paid[1] < paid[0]


def test_counted_memory_teaches_the_limit_only() -> None:
    """A table of torchtitan runs has memory that no coefficient changes."""
    rows = changed("par4d", stack="torchtitan-2024", sharding="zero3", mem_gb="30", step_s="9")
    (entry,) = fit_entries(sample([rows]), rounds=1)
    assert entry.rows_memory == 1
