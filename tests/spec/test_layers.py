"""The layers of a model in order: their kinds, and what is counted from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.cost.count.params import attended_tokens, layer_params, matmul_params, model_params
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.hf.shapes import shape_from_config
from fourfold.spec.layers import shortest_cycle

NEO = {
    "model_type": "gpt_neo", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 96,
    "intermediate_size": 256, "max_position_embeddings": 128, "window_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("llama-3.1-8b", [("full", "dense", 32)]),
        ("deepseek-v3", [("full", "dense", 3), ("full", "experts", 58)]),
        ("llama4-maverick", [("full", "dense", 1), ("full", "experts", 1)] * 24),
        ("gpt-oss-20b", [("window", "experts", 1), ("full", "experts", 1)] * 12),
        (
            "gemma-3-1b",
            [("window", "dense", 5), ("full", "dense", 1)] * 4 + [("window", "dense", 2)],
        ),
    ],
)
def test_layer_runs_follow_the_order_of_the_config(name: str, runs: list[tuple]) -> None:
    assert [(*kind, count) for kind, count in catalog.model(name).layer_runs] == runs


def test_shortest_cycle_allows_a_cut_last_cycle() -> None:
    pattern = ("window", "window", "full")
    assert shortest_cycle(pattern * 3) == pattern
    assert shortest_cycle((pattern * 3)[:-1]) == pattern
    assert shortest_cycle(("full", "full", "window")) == ("full", "full", "window")
    assert shortest_cycle(("window",) * 5) == ("window",)


def test_config_keeps_which_layers_have_a_window() -> None:
    first_full = shape_from_config(NEO | {"attention_types": [[["global", "local"], 2]]})
    last_full = shape_from_config(NEO | {"attention_types": [[["local", "global"], 2]]})
    assert first_full.mixers == ("full", "window")
    assert last_full.mixers == ("window", "full")
    assert first_full != last_full
    assert replace(first_full, layers=3).count_layers("window") == 1


def test_mixers_without_a_window_are_refused() -> None:
    with pytest.raises(UserError, match="needs a window"):
        replace(catalog.model("llama-tiny"), mixers=("window", "full"))
    with pytest.raises(UserError, match="window in some layers"):
        replace(catalog.model("llama-tiny"), mixers=("full",), window=8)


def test_counts_are_sums_over_the_layers() -> None:
    """DeepSeek-V3's 3 dense and 58 expert layers, from the sizes of its config."""
    model, d = catalog.model("deepseek-v3"), 7168
    attention = d * 1536 + 1536 * 128 * 192 + d * 576 + 512 * 128 * 256 + 128 * 128 * d
    norms = 2 * d + 1536 + 512
    dense, expert = 3 * d * 18432, 3 * d * 2048
    router = 256 * d + 256
    routed = attention + norms + router + 257 * expert
    assert layer_params(model).all == routed
    assert layer_params(model).active == routed - 248 * expert
    ends = 2 * 129280 * d + d
    assert model_params(model, 4096) == ends + 3 * (attention + norms + dense) + 58 * routed
    assert matmul_params(model) == 61 * attention + 3 * dense + 58 * 9 * expert


def test_attended_tokens_add_windows_and_whole_sequences() -> None:
    model, s = catalog.model("gemma-3-1b"), 4096
    assert attended_tokens(model, s) == pytest.approx(4 * s + 22 * 512 * (2 - 512 / s), rel=1e-12)
