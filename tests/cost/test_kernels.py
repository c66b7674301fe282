"""Do kernels of a layer take what they were measured to take?"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.cost.columns import Columns
from fourfold.cost.fit.calibration import gpu_entry
from fourfold.cost.fit.coefficients import defaults
from fourfold.cost.run import device_facts, priced_attention
from fourfold.cost.step.estimate import estimate
from fourfold.cost.step.kernels import (
    BLOCK_ROWS,
    FLASH2,
    NEWER_FLASH,
    OLDER_KERNEL,
    attention_s,
)
from fourfold.cost.table.reference import SCHEMA, RowTable
from fourfold.cost.table.reports import report_rows
from fourfold.errors import UserError
from fourfold.result.profile import AttentionPoint
from fourfold.search.rows.read import parse
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.spec.policy import Policy
from fourfold.spec.words import PRICED_ATTENTION
from fourfold.verbs.machine import known_cluster
from tests.cost.test_formulas import runs

H200 = Path(__file__).parents[2] / "results" / "h200"


def flop_rate(c: Columns) -> np.ndarray:
    """Causal FLOP/s of both passes."""
    forward, backward = attention_s(c, defaults(), micro=c.micro)
    pairs = c.micro * c.seq / c.cp * c.seq * c.heads / c.tp / 2.0
    return 14.0 * pairs * (c.width / c.heads) / (forward + backward)


def measured() -> list[AttentionPoint]:
    """The cuDNN kernels of results/h200, as seconds of causal FLOPs in each pass."""
    points = []
    with (H200 / "kernels.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            batch, heads, tokens, head = (
                int(row[name]) for name in ("batch", "heads", "seq_len", "head_size")
            )
            flop = 2.0 * batch * heads * tokens**2 * head
            points.append(
                AttentionPoint(
                    kernel=row["kernel"], dtype="bf16", batch=batch, heads=heads,
                    head_size=head, seq_len=tokens,
                    forward_s=flop / float(row["forward_tflops"]) / 1e12,
                    backward_s=2.5 * flop / float(row["backward_tflops"]) / 1e12,
                )
            )  # fmt: skip
    return points


@pytest.mark.parametrize(
    ("kernel", "shape", "rate", "usual"),
    [("cudnn", NEWER_FLASH, 695e12, 0.04), ("flash", FLASH2, 355e12, 0.01)],
)
def test_flash_kernels_follow_rows_and_blocks(kernel, shape, rate, usual) -> None:
    """Up to 16,384 tokens, where the power limit does not show: from 256 blocks on 132
    multiprocessors, and from rows of 512."""
    errors = {
        (p.seq_len, p.batch * p.heads): p.flops_per_s / rate / shape.share(p, 132) - 1.0
        for p in measured()
        if p.kernel == kernel and p.head_size == 128 and 512 <= p.seq_len <= 16384
        and p.batch * p.heads * p.seq_len >= 256 * 128
    }  # fmt: skip
    wrong = {at for at, error in errors.items() if abs(error) > 0.11}
    assert wrong <= {(16384, 2)}  # backwards faster than any other shape
    assert np.median(np.abs(list(errors.values()))) < usual
    plain = [p.flops_per_s for p in measured() if p.kernel == kernel and p.head_size == 128]
    assert max(plain) / min(plain) > 1.9  # what the shape explains


def test_an_older_kernel_is_as_much_slower_as_measured() -> None:
    full = {"cudnn": NEWER_FLASH, "flash": FLASH2}
    rates = {(p.kernel, p.seq_len): p.flops_per_s / full[p.kernel].share(p, 132) for p in measured()
             if p.batch * p.heads * p.seq_len == 2**19 and p.head_size == 128}  # fmt: skip
    ratios = [rates["flash", n] / rates["cudnn", n] for n in (2048, 4096, 8192, 16384)]
    assert np.mean(ratios) == pytest.approx(OLDER_KERNEL, abs=0.01)
    assert ratios == pytest.approx([OLDER_KERNEL] * 4, abs=0.035)


def test_the_last_blocks_of_a_kernel_are_waited_for() -> None:
    c = runs(2, seq=8192, micro=[1, 4])
    blocks = np.array([1.0, 4.0]) * 32 * 8192 / BLOCK_ROWS
    one, many = flop_rate(c)
    waits = 1.0 + NEWER_FLASH.last_blocks * 132 / blocks
    assert many / one == pytest.approx(waits[0] / waits[1])


def test_steps_of_a_ring_fill_each_others_ends() -> None:
    c = runs(2, cp=[1, 8], seq=65536)
    rates = flop_rate(c) * np.array([1.0, defaults()["cp_attention"]])
    assert 0.9 < rates[1] / rates[0] < 1.1


@pytest.mark.parametrize("axis", [{"tp": [1, 8]}, {"cp": [1, 8], "cp_kind": 1}])
def test_ranks_of_few_rows_or_heads_fill_a_gpu_less(axis: dict[str, object]) -> None:
    pieces = np.array([1.0, np.sqrt(defaults()["cp_attention"]) if "cp" in axis else 1.0])
    whole, part = flop_rate(runs(2, dp=[8, 1], **axis)) * pieces
    assert 1.3 < whole / part < 1.7


def made(**cells: str) -> Columns:
    """A row of torchtitan's 8B on 8 GPUs, as a table states it."""
    base = {
        "stack": "torchtitan-2024", "hardware": "h100-80gb", "family": "llama", "n_layers": "32",
        "d_model": "4096", "n_heads": "32", "n_kv_heads": "8", "d_ff": "14336", "vocab": "128256",
        "seq_len": "8192", "n_gpus": "8", "gbs": "16", "mbs": "2", "sharding": "zero3",
        "precision": "bf16", "act_ckpt": "full", "attention": "flash", "note": "torch.compile",
    }  # fmt: skip
    texts = {name: [{**base, **cells}.get(name, "")] for name in SCHEMA}
    return parse(RowTable("made", texts, 1)).columns


@pytest.mark.parametrize(
    ("stack", "gpu", "attention", "kernel"),
    [
        ("torchtitan-2024", "h100-80gb", "flash", "flash2"),
        ("torchtitan-2024", "a100-80gb", "flash", "flash"),  # made for it
        ("torchtitan-2024", "h100-80gb", "flash3", "flash"),
        ("torchtitan", "h200", "flash", "flash"),  # cuDNN's since 0.2
        ("nemo-2025", "h100-80gb", "flash", "flash"),
        ("nemo-2025", "h100-80gb", "flash2", "flash2"),
        ("nanotron-2025", "h100-80gb", "flash", "flash2"),
        ("megatron-deepspeed-2022", "a100-80gb", "fused", "fused-softmax"),
    ],
)
def test_an_engine_keeps_its_attention_kernel_on_a_newer_gpu(stack, gpu, attention, kernel) -> None:
    c = made(stack=stack, hardware=gpu, attention=attention)
    assert PRICED_ATTENTION[int(c.attention[0])] == kernel


def test_a_gpu_without_newer_kernels_runs_the_older_at_its_full_rate() -> None:
    flash, flash2 = (PRICED_ATTENTION.index(kind) for kind in ("flash", "flash2"))
    older = {"forward_keys": 300, "backward_keys": 660, "backward_rate": 0.92}
    own = {name: [getattr(NEWER_FLASH, name)] * 2 + [value] for name, value in older.items()}
    c = runs(3, attention=[flash, flash2, flash], older_flash=[0, 0, 1], **own)
    new, old, on_older_gpu = flop_rate(c)
    assert old / on_older_gpu == pytest.approx(OLDER_KERNEL)
    assert new < on_older_gpu  # of the same peak: the older kernel loses less to short rows


@pytest.mark.parametrize(("gpu", "older"), [("a100-80gb", 1), ("h100-80gb", 0), ("b200", 0)])
def test_which_gpus_have_newer_kernels(gpu: str, older: float) -> None:
    assert device_facts(catalog.device(gpu), "bf16")["older_flash"] == older
    assert made(hardware=gpu).older_flash == [older]


@pytest.mark.parametrize(
    ("attention", "stack", "gpu", "kernel"),
    [
        ("auto", "fourfold", "h200", "flash"),
        ("flash", "fourfold", "h200", "flash2"),
        ("flash", "fourfold", "a100-80gb", "flash"),
        ("auto", "nanotron", "h100-80gb", "flash2"),
        ("cudnn", "nanotron", "h100-80gb", "flash"),
        ("unfused", "fourfold", "h200", "unfused"),
    ],
)
def test_a_policy_names_the_kernel_that_runs(attention, stack, gpu, kernel) -> None:
    policy = Policy(attention=attention)
    assert priced_attention(policy, engine_of(stack), catalog.device(gpu)) == kernel


def test_torch_recomputes_all_of_a_layer_but_its_last_product() -> None:
    again = [
        estimate(made(stack=stack), defaults()).parts["recompute"][0]
        for stack in ("torchtitan", "megatron-lm")
    ]
    assert 0.75 < again[0] / again[1] < 0.9


def test_a_compiled_step_of_torchs_engines_waits_for_nothing() -> None:
    fixed = [
        estimate(made(note=note), defaults()).parts["fixed"][0]
        for note in ("torch.compile", "eager")
    ]
    assert fixed[0] == pytest.approx(0.1 * fixed[1])


def test_what_a_compiler_did_not_fuse_is_read_and_written_again() -> None:
    compiled, eager = made(stack="torchtitan"), made(stack="torchtitan", note="eager")
    passes = [estimate(c, defaults()).parts["elementwise"][0] for c in (compiled, eager)]
    assert (compiled.eager[0], eager.eager[0]) == (0, 1)
    assert 1.3 < passes[1] / passes[0] <= 1.5


@pytest.mark.parametrize("stack", ["accelerate", "deepspeed", "trl-fsdp2", "torchtitan-2024"])
def test_norms_of_eager_trainers_are_several_operators(stack: str) -> None:
    """... where torch had no kernel for them, or the model does not call it."""
    compiled, eager = made(stack=stack), made(stack=stack, note="eager")
    assert (compiled.fused_norm[0], eager.fused_norm[0]) == (1, 0)
    passes = [estimate(c, defaults()).parts["elementwise"][0] for c in (compiled, eager)]
    assert 2.0 < passes[1] / passes[0] < 4.0


def test_a_step_that_is_one_graph_launches_nothing() -> None:
    plain, graphed = (
        estimate(made(stack="nemo", cuda_graph=scope), defaults()).parts
        for scope in ("", "full_iteration")
    )
    assert graphed["host"][0] == 0.0
    assert graphed["fixed"][0] == pytest.approx(0.1 * plain["fixed"][0])


def test_megatron_pads_its_vocabulary_for_each_tensor_rank() -> None:
    """50,257 columns are odd: a product with them runs at a quarter of its rate."""
    cells = {"vocab": "50257", "tp": "8", "n_gpus": "64", "gbs": "16", "sharding": "zero1"}
    padded, odd = (made(stack=stack, **cells) for stack in ("megatron-lm", "aleph"))
    assert (padded.vocab[0], odd.vocab[0]) == (51200, 50257)
    head = [estimate(c, defaults()).parts["head"][0] for c in (padded, odd)]
    assert head[1] > 2.0 * head[0]


def test_heads_of_256_are_as_slow_backwards_as_measured() -> None:
    """On an H200 (results/h200/attention.csv): forwards at the rate of 128, backwards at 0.70."""
    with (H200 / "attention.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["kernel"] == "cudnn"]
    rate = {
        (r["head_size"], r["pass"]): float(r["tflops"]) for r in rows if r["seq_len"] == "131072"
    }
    own = catalog.kernel_rates(catalog.device("h200"))
    with (H200 / "kernels.csv").open(newline="") as stream:
        usual = next(
            float(row["backward_tflops"]) for row in csv.DictReader(stream)
            if row["seq_len"] == "131072" and row["head_size"] == "128" and row["kernel"] == "cudnn"
        )  # fmt: skip
    assert 2.0**own.large_head_backward == pytest.approx(rate["256", "backward"] / usual, rel=0.03)
    assert 2.0**own.large_head == pytest.approx(rate["256", "forward"] / 568.0, rel=0.03)


def test_a_device_of_a_known_generation_has_its_kernels() -> None:
    own = catalog.kernel_rates(catalog.device("h100-80gb"))
    assert catalog.kernel_rates(replace(catalog.device("h200"), kernels="", generation="")) == own
    unknown = replace(catalog.device("h200"), id="x1", kernels="", generation="x")
    assert catalog.kernel_rates(unknown).product_spread > own.product_spread
    with pytest.raises(UserError, match="unknown table of kernels"):
        catalog.kernel_rates(replace(unknown, kernels="warp"))


@pytest.mark.parametrize("gpu", catalog.device_names())
def test_rates_of_kernels_are_physical_and_have_a_source(gpu: str) -> None:
    rates = catalog.kernel_rates(catalog.device(gpu))
    assert 0.3 < rates.attention < rates.product < 1.0
    assert rates.source or "product" in rates.guessed


def test_our_engine_on_one_h200_is_predicted_at_every_length() -> None:
    """Runs that nothing was fitted on, of 2,048 to 131,072 tokens."""
    cluster = known_cluster(str(H200 / "one-h200.toml"))
    rows = report_rows(str(H200 / "table"), cluster, lambda _: None)
    entry = gpu_entry(MeasuredAs("fourfold"), "h200")
    error = estimate(rows.columns, entry.coefficients).step_s / rows.step_s - 1.0
    assert np.median(np.abs(error)) < 0.02
    assert np.max(np.abs(error)) < 0.08
    assert np.max(np.abs(error[rows.columns.seq >= 8192])) < 0.045
    assert set(rows.columns.seq) == {2048, 8192, 32768, 131072}
