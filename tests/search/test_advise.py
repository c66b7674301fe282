"""Shape advice names what tiles, waves and kernels punish, and the nearest better size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.cli import main
from fourfold.cost.count.params import model_params
from fourfold.cost.fit import calibration as calibrations
from fourfold.search import advise
from fourfold.search.compare import TOLERANCE, shapes_near
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs

SHAPE = advise.LayerShape(
    hidden=14336, heads=112, kv_heads=112, ffn=57344, vocab=250880, gated=False, seq_len=2048,
    micro_batch=1, tp=8,
)  # fmt: skip


def kernels(gpu: str = "a100-80gb", attention: str = "flash") -> advise.Kernels:
    entry, _ = calibrations.shipped().entry(MeasuredAs.of("fourfold"), "", "a")
    return advise.Kernels(catalog.device(gpu), "bf16-mixed", entry.coefficients, attention)


def test_14400_is_sent_to_14336_with_the_gain_the_tables_show(cli) -> None:
    """BLOOM notes: hidden 14400 costs 1.2 to 1.3 times as much per FLOP as 14336."""
    said = cli.json("advise", "--gpu", "a100-80gb", "--tp", "8", "--hidden", "14400")
    assert said["hidden"]["better"]["value"] == 14336
    assert 1.15 <= said["hidden"]["better"]["gain"] <= 1.35
    assert said["hidden"]["notes"] == [
        "hidden/tp = 1800 is a multiple of 8, not of 64 (128 bytes in 16 bits)"
    ]
    alignment = {one["name"]: one["alignment_loss_pct"] for one in said["hidden"]["gemms"]}
    assert alignment["attention in"] > alignment["mlp in"] > 0
    back = cli.json("advise", "--gpu", "a100-80gb", "--tp", "8", "--hidden", "14336")
    assert back["hidden"]["better"] is None or back["hidden"]["better"]["gain"] < 1.06


def test_odd_hidden_size_of_a_named_model_is_moved(cli) -> None:
    words = ("advise", "--gpu", "h100-80gb", "--hidden", "4100")
    for model in ([], ["--model", "llama-3.1-8b"]):
        said = cli.json(*words, *model)
        assert said["hidden"]["better"]["value"] == 4096
        assert said["hidden"]["better"]["gain"] > 2
        rows = {row["value"]: row for row in said["hidden"]["table"]}
        assert (rows[4096]["heads"], rows[4096]["head_size"]) == (32, 128)
        assert said["heads"]["notes"][0] == "not given: 41 of size 100 divide hidden 4100"
    assert cli.json(*words, "--heads", "41")["hidden"]["notes"][1].endswith("try other heads")


def test_nearby_hidden_size_has_one_rate_whatever_was_asked(cli) -> None:
    """The MLP of 4224 beside 4097 was 14,785 wide, which no tile divides: half the rate."""
    rates = set()
    for hidden, width in (("4097", 14340), ("4100", 14350)):
        words = ("--model", "llama-3.1-8b", "--hidden", hidden)
        said = cli.json("advise", "--gpu", "h100-80gb", *words)
        rows = {row["value"]: row["tflops_gpu"] for row in said["hidden"]["table"]}
        rates.add((rows[4032], rows[4096], rows[4160], rows[4224]))
        assert said["ffn"]["asked"] == width
        assert said["ffn"]["notes"][0].startswith("not given: 3.5 times the hidden size")
    assert len(rates) == 1


def test_heads_of_their_own_width_stay_with_another_hidden_size(cli) -> None:
    said = cli.json("advise", "--gpu", "h100-80gb", "--model", "qwen3-30b-a3b", "--hidden", "2100")
    assert (said["heads"]["asked"], said["heads"]["head_size"]) == (32, 128)
    assert {row["heads"] for row in said["hidden"]["table"]} == {32}


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "llama-3.1-8b", "--hidden", "4100", "--heads", "41"],
        ["--model", "llama-3.1-8b", "--hidden", "4160"],
        ["--tp", "8", "--hidden", "13824", "--heads", "72"],
    ],
)
def test_advice_names_no_gain_below_two_percent(cli, words: list[str]) -> None:
    said = cli.json("advise", "--gpu", "h100-80gb", *words)
    sizes = [size for size in said.values() if isinstance(size, dict) and "better" in size]
    assert len(sizes) >= 3
    assert all(size["better"] is None or size["better"]["gain"] > 1.02 for size in sizes)
    text = cli("advise", "--gpu", "h100-80gb", *words)
    assert " 1.00x as fast" not in text
    assert "loses 0%" not in text
    assert "no nearby value is 2% faster" in text


def test_experts_are_judged_by_their_rows_and_tiles(cli) -> None:
    words = ("--gpu", "h100-80gb", "--hidden", "4096", "--experts", "96", "--expert-ffn", "1400")
    words += ("--top-k", "4", "--seq-len", "4096")
    said = cli.json("advise", *words, "--ep", "8")
    width, count = said["expert_ffn"], said["experts"]
    assert width["notes"] == ["120 columns of the last tile of 128 are used"]
    assert count["asked"] == 96
    by_width = {row["value"]: row["tflops_gpu"] for row in width["table"]}
    assert by_width[1408] > by_width[1400] > by_width[1344]  # 1344 leaves half a tile empty
    for row in count["table"]:  # as many weights, as much work
        assert row["value"] * row["expert_ffn"] == 96 * 1400
        assert row["top_k"] * row["expert_ffn"] == 4 * 1400
    rates = [row["tflops_gpu"] for row in count["table"]]
    assert rates == sorted(rates, reverse=True)  # wider ones lose less to sorting rows
    alone = cli.json("advise", *words)
    rows = [one["micro_batch"]["table"][0]["rows"] for one in (alone, said)]
    assert rows == [171, 1365]  # 4096 x 4 / 96, and of eight ranks
    assert alone["micro_batch"]["tflops_gpu"] < said["micro_batch"]["tflops_gpu"]
    model = cli.json("advise", "--gpu", "h100-80gb", "--model", "qwen3-30b-a3b")
    assert (model["experts"]["asked"], model["expert_ffn"]["asked"]) == (128, 768)
    head = model["heads"]
    assert head["head_size"] == 128  # its own, not hidden / heads
    assert {row["value"] * row["head_size"] for row in head["table"]} == {4096}
    latent = cli.json("advise", "--gpu", "h100-80gb", "--model", "deepseek-v3")["heads"]
    assert latent["head_size"] == 192
    assert "judged as a plain one" in latent["notes"][-1]
    assert not [note for note in head["notes"] if "judged" in note]
    for wrong in (words[:6], (*words[:8], "--top-k", "97"), (*words[:4], "--ep", "2")):
        assert main(["advise", *wrong]) == 2


@pytest.mark.parametrize("tp", ["1", "8"])
def test_128_heads_on_13824_are_slow(cli, tp: str) -> None:
    asked = ("advise", "--gpu", "a100-80gb", "--tp")
    said = cli.json(*asked, tp, "--hidden", "13824", "--heads", "128")
    assert said["heads"]["verdict"] == "slow"
    assert said["heads"]["head_size"] == 108
    assert "head size 108 is not a multiple of 8" in said["heads"]["notes"][0]
    losses = {row["value"]: row["attention_loss"] for row in said["heads"]["table"]}
    # Heads of 192 are aligned; beyond 128 the backward kernels alone are slower.
    assert losses[128] > max(1.1, 1.04 * losses[72])
    fine = cli.json(*asked, "8", "--hidden", "14336", "--heads", "112")
    assert fine["heads"]["verdict"] == "fine"


def test_vocabulary_is_padded_upwards_to_whole_shards() -> None:
    odd = advise.vocab_advice(replace(SHAPE, vocab=50257), kernels())
    assert odd.better.value == 50688  # 99 x 64 x 8
    assert odd.better.gain > 1.2
    whole = advise.vocab_advice(SHAPE, kernels())
    assert whole.better is None


def test_mlp_width_that_misses_the_tiles_is_moved_by_little() -> None:
    said = advise.ffn_advice(replace(SHAPE, ffn=57352), kernels())
    assert abs(said.better.value - 57344) <= 512
    assert said.better.gain > 1.02


def test_the_fused_softmax_rule_is_about_heads_and_micro_batch() -> None:
    shape = replace(SHAPE, hidden=13824, heads=72, kv_heads=72, ffn=55296)
    said = [advise.micro_advice(replace(shape, micro_batch=m), kernels()) for m in (1, 2, 4)]
    assert [one.kernel_rule for one in said] == [False, False, True]
    fused = advise.layer_rates(
        [replace(shape, micro_batch=m) for m in (2, 4)], kernels(attention="fused-softmax")
    )
    flash = advise.layer_rates([replace(shape, micro_batch=m) for m in (2, 4)], kernels())
    assert fused[1] / fused[0] > flash[1] / flash[0] * 1.02


def test_rates_never_exceed_the_peak_and_grow_with_the_micro_batch() -> None:
    rates = advise.layer_rates([replace(SHAPE, micro_batch=m) for m in (1, 4, 16)], kernels())
    assert rates[0] < rates[1] < rates[2] < 312e12


def test_auto_heads_divide_and_are_of_usual_size() -> None:
    assert advise.auto_heads(14336, 8) == 112
    assert advise.auto_heads(14400, 8) == 120
    assert advise.auto_heads(4096, 1) == 32
    assert 7 % advise.auto_heads(7, 8) == 0


def test_shapes_of_a_budget_come_near_it_and_are_legal_for_tp() -> None:
    base = catalog.model("gpt-3-175b")
    models = shapes_near(base, 176e9, 2048, 8)
    assert len(models) > 6
    for model in models:
        assert abs(model_params(model, 2048) / 176e9 - 1) <= TOLERANCE
        assert model.heads % 8 == 0
        assert model.hidden % model.heads == 0
        assert model.ffn % 512 == 0
    small = shapes_near(catalog.model("llama-3.2-1b"), 1e9, 4096, 1)
    assert small
    assert all(model.gated and model.heads % model.kv_heads == 0 for model in small)


def test_shapes_are_compared_by_days(cli) -> None:
    words = ["--gpu", "h100-80gb", "--max-nodes", "1", "--params", "3e9", "--tokens", "1e11"]
    words += ["--model", "llama-3.2-3b", "--tp", "1", "--global-batch", "64"]
    said = cli.json("advise", *words)
    days = [row["days"] for row in said["shapes"]]
    assert days == sorted(days)
    assert len(days) > 3
    first = said["shapes"][0]
    steps = 1e11 / (64 * 2048)
    assert first["days"] == pytest.approx(first["step_s"] * steps / 86400)
    assert "on 8 x h100-80gb, sequences of 2048" in cli("advise", *words)


def test_text_md_and_csv(cli) -> None:
    words = ["advise", "--gpu", "h100-80gb", "--model", "llama-3.1-8b", "--tp", "2", "--vocab",
             "50257"]  # fmt: skip
    text = cli(*words)
    assert "hidden 4096" in text
    assert "in the output layer" in text
    for style in ("md", "csv"):
        assert "50304" in cli(*words, "--format", style)
