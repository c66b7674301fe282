"""Do our counts and utilisation figures equal the published ones, row by row?"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fourfold.cost.count.flops import FlopsQuery, convention, utilisation_pct
from fourfold.cost.count.params import model_params
from fourfold.spec import catalog
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy

GOLDEN = Path(__file__).parent

# Counts published by the models' authors.
COUNTS = {
    "bloom-176b": 176_247_271_424,
    "gpt-3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.2-1b-untied": 1_498_482_688,
    "llama-3.2-3b-untied": 3_606_752_256,
}


def _rows(name: str) -> dict[str, dict[str, str]]:
    with (GOLDEN / name).open(newline="") as stream:
        return {row["row_id"]: row for row in csv.DictReader(stream)}


def _shape(row: dict[str, str]) -> ModelShape:
    return catalog.shape(
        row["family"],
        layers=int(row["n_layers"]),
        hidden=int(row["d_model"]),
        heads=int(row["n_heads"]),
        kv_heads=int(row["n_kv_heads"]),
        ffn=int(row["d_ff"]),
        vocab=int(row["vocab"]),
        tied=row["tied"] == "1",
    )


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_preset_counts_are_the_authors(name: str, count: int) -> None:
    assert model_params(catalog.model(name), 2048) == count


def test_every_mpt_row_has_exact_parameters_and_utilisation() -> None:
    measured, published = _rows("mpt.csv"), _rows("mpt_published.csv")
    assert len(published) == 139
    for row_id, figures in published.items():
        row = measured[row_id]
        model, seq_len = _shape(row), int(row["seq_len"])
        assert model_params(model, seq_len) == int(figures["params"]), row_id
        recompute = row["act_ckpt"]
        ask = FlopsQuery.of(
            model=model, seq_len=seq_len, layout=Layout(), policy=Policy(recompute=recompute)
        )
        count = convention(row["flop_rule"]).count(ask)
        peak = catalog.device(row["hardware"]).peak(row["precision"])
        speed = float(row["tokens_s_gpu"])
        mfu = utilisation_pct(count.model, speed, peak)
        hfu = utilisation_pct(count.hardware, speed, peak)
        assert mfu == pytest.approx(float(figures["mfu_pct"]), abs=0.01), row_id
        assert hfu == pytest.approx(float(figures["hfu_pct"]), abs=0.01), row_id


def test_every_bloom_row_has_the_printed_tflops_under_its_convention() -> None:
    measured, published = _rows("bloom.csv"), _rows("bloom_published.csv")
    assert len(published) == 63
    for row_id, figures in published.items():
        row = measured[row_id]
        ask = FlopsQuery.of(
            model=_shape(row),
            seq_len=int(row["seq_len"]),
            layout=Layout(tp=int(row["tp"]), pp=int(row["pp"])),
            policy=Policy(recompute=row["act_ckpt"]),
        )
        count = convention(figures["convention"]).count(ask)
        tokens = int(row["gbs"]) * int(row["seq_len"])
        tflops = count.printed * tokens / float(figures["sec_per_it"]) / int(row["n_gpus"]) / 1e12
        assert tflops == pytest.approx(float(figures["tflops"]), abs=0.02), row_id


def test_torchtitans_published_speeds_give_its_published_utilisation() -> None:
    """Llama 3 8B at 8,192 tokens: 57.9 GFLOP a token; 6,667 tokens/s/GPU is 39.0% of 989."""
    ask = FlopsQuery.of(
        model=catalog.model("llama-3.1-8b"), seq_len=8192, layout=Layout(), policy=Policy()
    )
    count = convention("full-attention").count(ask)
    assert count.model == pytest.approx(57.91e9, rel=1e-3)
    assert utilisation_pct(count.model, 6667, 989e12) == pytest.approx(39.0, abs=0.05)
    causal = convention("causal").count(ask)
    assert convention("mpt").count(ask).model / causal.model == pytest.approx(1.19, abs=0.005)
