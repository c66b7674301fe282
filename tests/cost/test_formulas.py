"""Do the single formulas say what their sources say?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.columns import Columns, columns
from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery
from fourfold.cost.count.params import layer_params, model_params
from fourfold.cost.fit.coefficients import COEFFICIENTS, defaults
from fourfold.cost.kinds import DENSE
from fourfold.cost.memory.peak import memory
from fourfold.cost.power import clock_share
from fourfold.cost.run import machine_facts, model_facts
from fourfold.cost.step.estimate import PARTS, estimate
from fourfold.cost.step.kernels import attention_s, gemm_s, misalignment, tile_waves
from fourfold.cost.step.pipeline import StageTimes, pipeline_s
from fourfold.cost.step.traffic import group_rate, ranks_within, ring_share
from fourfold.spec import catalog
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.words import PRICED_ATTENTION, SCHEDULES


def runs(n: int = 1, **facts: object) -> Columns:
    """Llama-8B-like runs on H100 nodes of 8."""
    machine = machine_facts(catalog.cluster("nvidia-h100", 16), "bf16")
    base = {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336,
        "vocab": 128256, "seq": 8192, "micro": 1, "batch": 128,
        "gpus": 8, "tp": 1, "cp": 1, "pp": 1, "dp": 8,
    }  # fmt: skip
    return columns(n, **{**base, **machine, **facts})


def test_a_shard_off_64_elements_costs_per_power_of_two() -> None:
    assert misalignment(np.array([64.0, 1800.0, 150.0, 7.0])).tolist() == [0.0, 3.0, 5.0, 6.0]


def test_a_wave_more_costs_a_wave() -> None:
    sms, wave = np.array([108.0]), 1.0
    full = tile_waves(np.array([256.0 * 108]), np.array([128.0]), sms=sms, wave=wave)
    spilled = tile_waves(np.array([256.0 * 108 + 1]), np.array([128.0]), sms=sms, wave=wave)
    assert 1.2 < spilled[0] / full[0] <= 2.0


def test_a_thin_product_is_bound_by_memory() -> None:
    one = {"rate": 7e14, "hbm": np.array([3e12]), "sms": np.array([132.0]), "coef": defaults()}
    m, n, k = np.array([1.0]), np.array([8192.0]), np.array([8192.0])
    assert gemm_s(m, n, k, **one)[0] >= 2 * 8192 * 8192 / 3e12


def test_hidden_14400_on_tp8_costs_more_per_flop_than_14336() -> None:
    coef = defaults()
    both = runs(
        2, hidden=[14336, 14400], ffn=[4 * 14336, 4 * 14400], heads=[64, 96], kv_heads=[64, 96],
        gated=0, seq=2048, tp=8, dp=1, vocab=250880,
        attention=PRICED_ATTENTION.index("fused-softmax"),
    )  # fmt: skip
    step = estimate(both, coef).step_s
    flops = both.hidden**2
    assert 1.12 < (step[1] / flops[1]) / (step[0] / flops[0]) < 1.4


def test_fused_softmax_needs_heads_over_tp_times_micro_in_fours() -> None:
    facts = {
        "heads": 24,
        "kv_heads": 24,
        "hidden": 6144,
        "tp": 8,
        "dp": 1,
        "attention": PRICED_ATTENTION.index("fused-softmax"),
    }
    c = runs(2, micro=[1, 4], **facts)
    forward, _ = attention_s(c, defaults(), micro=c.micro)
    assert forward[0] > forward[1] / 4 * 1.3  # 3 heads on a rank: falls back to slow kernels


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_of_equal_stages_is_the_published_bubble(schedule: str) -> None:
    pp, micros, stage = 8.0, 64.0, 0.5
    vpp = 4.0 if schedule == "interleaved" else 1.0
    c = runs(pp=pp, vpp=vpp, schedule=SCHEDULES.index(schedule), gpus=64)
    each = np.array([stage])
    got = pipeline_s(c, StageTimes(each, each, each, each * pp), np.array([micros]))
    fill = {"1f1b": 1, "gpipe": 1, "interleaved": 1 / vpp, "zero-bubble": 1 / 3}[schedule]
    assert got[0] == pytest.approx(stage * (micros + (pp - 1) * fill))


def test_the_slowest_stage_sets_the_beat() -> None:
    c = runs(pp=4, gpus=32)
    one, slow = np.array([1.0]), np.array([2.0])
    got = pipeline_s(c, StageTimes(one, one, slow, np.array([5.0])), one * 10)
    assert got[0] == pytest.approx(10 * 2 + 3)


def test_groups_that_share_a_node_share_its_network() -> None:
    c = runs(tp=8, gpus=64)
    coef = defaults()
    alone = group_rate(runs(tp=1, gpus=64), coef, np.array([64.0]), np.array([1.0]))
    shared = group_rate(c, coef, np.array([8.0]), np.array([8.0]))
    assert shared[0] == pytest.approx(alone[0] / 8)
    assert ranks_within(16.0, 4.0, 8.0) == 2.0


def test_groups_that_do_not_tile_a_host_pay_for_its_network() -> None:
    """tp 3 on hosts of 8: some group spans two hosts, and everybody waits for it."""
    coef, one = defaults(), np.array([1.0])
    inside = group_rate(runs(tp=4, gpus=48), coef, np.array([4.0]), one)
    across = group_rate(runs(tp=3, gpus=48), coef, np.array([3.0]), one)
    single = group_rate(runs(tp=3, gpus=6), coef, np.array([3.0]), one)
    assert across[0] < inside[0] / 4
    assert 0.9 * inside[0] < single[0] < inside[0]  # a ring of three, behind the same switch


def test_a_step_waits_for_the_rank_with_the_largest_share() -> None:
    """100 sequences over 16 ranks: most have 6, four have 7, and 7 decide."""
    uneven, even = (
        estimate(runs(dp=16, gpus=16, micro=1, batch=b), defaults()) for b in (100, 112)
    )
    assert uneven.step_s[0] == pytest.approx(even.step_s[0])


def test_parts_add_up_to_the_step() -> None:
    c = runs(3, tp=[1, 2, 8], dp=[8, 4, 1], pp=1, micro=[1, 3, 2], batch=[128, 100, 7])
    times = estimate(c, defaults())
    assert tuple(times.parts) == PARTS
    assert np.allclose(sum(times.parts.values()), times.step_s)
    assert all(np.all(times.parts[name] >= -1e-12) for name in PARTS)


def test_an_uneven_last_micro_batch_costs_less_than_a_whole_one() -> None:
    c = runs(3, dp=1, gpus=1, micro=11, batch=[44, 48, 55])
    step = estimate(c, defaults()).step_s
    assert step[0] < step[1] < step[2]


def test_a_question_can_be_asked_for_many_knobs_at_once() -> None:
    c = runs(4, micro=[1, 2, 4, 8])
    several = {**defaults(), "product": np.array([[0.6], [0.8]])}
    step = estimate(c, several).step_s
    assert step.shape == (2, 4)
    assert np.allclose(step[1], estimate(c, {**defaults(), "product": 0.8}).step_s)


def test_a_hot_h200_loses_a_fifth_and_an_a100_nothing() -> None:
    assert clock_share(catalog.device("a100-80gb")) == 1.0
    assert pytest.approx(clock_share(catalog.device("h200")), rel=0.03) == 672 / 814


def test_sharding_divides_state_stage_by_stage() -> None:
    c = runs(4, zero=[0, 1, 2, 3])
    state = memory(c, defaults()).parts["state"]
    assert state[0] > state[1] > state[2] > state[3]
    assert state[0] / state[3] == pytest.approx(8.0)


def test_recompute_and_cp_shrink_activations() -> None:
    c = runs(3, full_ckpt=[0, 1, 0], cp=[1, 1, 2], dp=[8, 8, 4], gpus=8)
    held = memory(c, defaults()).parts["activations"]
    assert held[1] < held[0] / 3
    assert held[2] == pytest.approx(held[0] / 2)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mpt-7b", "gpt-3-175b", "llama-3.2-1b"])
def test_counting_over_columns_is_counting_one_model(name: str) -> None:
    model = catalog.model(name)
    c = runs(**model_facts(model), seq=2048)
    learned = np.array([float(model.positions.kind == "learned")])
    many = FlopsQuery.of_columns(c, learned_positions=learned)
    assert many.params[0] == model_params(model, 2048)
    ask = FlopsQuery.of(model=model, seq_len=2048, layout=Layout(), policy=Policy())
    for rule, convention in CONVENTIONS.items():
        assert convention.count(many).printed[0] == pytest.approx(
            convention.count(ask).printed, rel=1e-12
        ), rule


def test_every_knob_has_a_default_inside_its_bounds() -> None:
    for coefficient in COEFFICIENTS:
        assert coefficient.low < coefficient.default < coefficient.high, coefficient.name
        assert 0 < coefficient.spread <= 1.0, coefficient.name


def test_a_head_size_of_its_own_reaches_every_formula() -> None:
    """Mistral Nemo has 32 heads of 128 on 5120 columns: attention is 4096 wide."""
    model = replace(
        catalog.model("llama-3.1-8b"), hidden=5120, heads=32, head_dim=128, layers=40, vocab=131072
    )
    c = runs(**model_facts(model))
    assert DENSE.count(c)[0] == layer_params(model).matmul
    assert c.kv_width[0] == model.kv_width
    coef = defaults()
    wide = runs(**{**model_facts(model), "width": model.hidden})
    assert attention_s(c, coef, micro=c.micro)[0] < attention_s(wide, coef, micro=c.micro)[0]
    assert memory(c, coef).worst_bytes < memory(wide, coef).worst_bytes
    assert estimate(c, coef).step_s < estimate(wide, coef).step_s


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_window_leaves_as_many_pairs_as_its_mask(seq: int, window: int) -> None:
    pairs = sum(min(place + 1, window) for place in range(seq))
    c = runs(seq=seq, window=window, local=1.0)
    seen = min(window, seq)
    # The formula halves the square, which leaves out half of the diagonal.
    assert pairs / seq == pytest.approx(c.reach[0] / 2.0 + seen / (2.0 * seq))
    half = runs(seq=seq, window=window, local=0.5)
    assert half.reach[0] == pytest.approx((c.reach[0] + seq) / 2.0)


def test_a_ring_of_two_behind_a_switch_is_slower_than_one_of_eight() -> None:
    """Of boards of four without one, a pair has a third of the links and no more to lose."""
    sizes = np.array([2.0, 4.0, 8.0])
    c = runs(3, tp=sizes)
    rate = group_rate(c, defaults(), sizes, np.ones(3))
    assert (rate / rate[2]).round(2).tolist() == [0.76, 0.95, 1.0]
    board = replace(c, domain=np.full(3, 4.0))
    assert ring_share(board, sizes, np.ones(3)).tolist() == [1.0, 1.0, 1.0]
