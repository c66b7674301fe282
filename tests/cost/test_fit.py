"""Does a fit find the coefficients that made the rows, and stay at its priors elsewhere?"""

from __future__ import annotations

import csv
import io
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.cost.fit.accuracy import pair_agreement, score
from fourfold.cost.fit.calibration import (
    Calibration,
    FittedStack,
    blend,
    from_json,
    shipped,
    to_json,
)
from fourfold.cost.fit.coefficients import BY_NAME, defaults
from fourfold.cost.fit.fit import MOST_MEMORY, MOST_TIME, fit_entries, fit_many
from fourfold.cost.fit.folds import folds, sample
from fourfold.cost.fit.interval import StepInterval
from fourfold.cost.fit.validate import suggest
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.predict import predict
from fourfold.cost.table.reference import SCHEMA, read_table
from fourfold.cost.table.rows import Rows
from fourfold.errors import UserError
from fourfold.search.rows.read import parse
from fourfold.spec.engine import MeasuredAs

GOLDEN = Path(__file__).parent.parent / "golden"


def table(name: str) -> Rows:
    return parse(read_table(GOLDEN / f"{name}.csv"))


def written(tmp_path: Path, rows: list[dict[str, str]], name: str = "rows") -> Rows:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, SCHEMA)
    writer.writeheader()
    writer.writerows(rows)
    path = tmp_path / f"{name}.csv"
    path.write_text(stream.getvalue())
    return parse(read_table(path))


def golden_rows(name: str) -> list[dict[str, str]]:
    with (GOLDEN / f"{name}.csv").open() as stream:
        return list(csv.DictReader(stream))


def test_a_fit_finds_the_knobs_that_made_the_rows() -> None:
    rows = table("mpt")
    truth = {**defaults(), "engine": 1.3, "attention": 0.6, "elem": 1.7, "dp_exposed": 1.2}
    made = replace(rows, step_s=estimate(rows.columns, truth).step_s)
    (a100, h100) = fit_entries(sample([made]))
    for entry in (a100, h100):
        for name in ("engine", "attention", "elem"):
            assert entry.coefficients[name] == pytest.approx(truth[name], rel=0.08), name
        assert len(entry.free_time) <= MOST_TIME
        assert len(entry.free_memory) <= MOST_MEMORY
    again = fit_entries(sample([made]))
    assert again == (a100, h100)


def test_many_samples_are_fitted_as_each_alone() -> None:
    first, second = sample([table("mpt")]), sample([table("bloom")])
    together = fit_many([(first, ()), (second, ())], rounds=1)
    alone = [fit_entries(one, rounds=1) for one in (first, second)]
    for mine, other in zip(together, alone, strict=True):
        for one, same in zip(mine, other, strict=True):
            assert one.free_time == same.free_time
            assert one.coefficients == pytest.approx(same.coefficients, rel=1e-6)


def test_a_key_frees_no_more_than_it_has_rows() -> None:
    rows = table("par4d")
    few = replace(rows, usable=rows.usable & (np.arange(rows.table.length) < 2))
    for entry in fit_entries(sample([few])):
        assert len(entry.free_time) <= entry.rows_time


def test_a_knob_the_rows_do_not_exercise_stays_at_its_prior() -> None:
    (entry, _) = fit_entries(sample([table("mpt")]))
    for name in ("cp_attention", "micro_s", "head128", "slow_tp_s"):
        assert name not in entry.free_time
        assert entry.coefficients[name] == pytest.approx(BY_NAME[name].default)


def test_one_disturbed_run_hardly_moves_a_fit() -> None:
    rows = table("mpt")
    clean = fit_entries(sample([rows]))[0]
    broken = rows.step_s.copy()
    broken[60] *= 30
    other = fit_entries(sample([replace(rows, step_s=broken)]))[0]
    assert other.coefficients["engine"] == pytest.approx(clean.coefficients["engine"], rel=0.03)


def test_a_calibration_file_reads_back() -> None:
    entries = fit_entries(sample([table("bloom")]))
    one = Calibration(name="x", sources=("bloom",), entries=entries)
    back = from_json(to_json(one), "x")
    assert [e.key for e in back.entries] == [e.key for e in entries]
    assert back.entries[0].coefficients["engine"] == pytest.approx(
        entries[0].coefficients["engine"], rel=1e-4
    )


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"type": "Calibration", "schema": 99}', '{"type": "RunReport"}']
)
def test_a_wrong_calibration_file_says_so(text: str) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        from_json(text, "x.json")


def test_an_unknown_key_gets_a_blend_and_a_wider_interval() -> None:
    known = shipped()
    entry, why = known.entry(MeasuredAs.of("nobody-2024"), "nowhere", "h")
    assert "no measured runs" in why
    own = [e for e in known.entries if e.rows_time >= 40]
    c = table("mpt").columns
    widths = {}
    # Of stacks that ran these rows: to the others they are far from anything measured.
    for one in (entry, *(e for e in own if e.stack == "llm-foundry-2023")):
        low, high = StepInterval(c, one, estimate(c, one.coefficients)).ends_s
        widths[one.key] = float(np.median(np.log(high / low)))
    assert widths.pop(entry.key) > 2.0 * max(widths.values())
    assert min(e.coefficients["engine"] for e in own) < entry.coefficients["engine"]


def test_a_blend_of_nothing_is_the_default() -> None:
    entry = blend((), MeasuredAs("a"), cluster="b", generation="h")
    assert entry.coefficients == pytest.approx(defaults())


def test_the_interval_grows_outside_the_calibrated_range() -> None:
    rows = table("mpt")
    (entry, _) = fit_entries(sample([rows]))
    c = rows.columns.take(np.array([0, 0]))
    far = replace(c, seq=np.array([c.seq[0], c.seq[0] * 1000.0]))
    low, high = StepInterval(far, entry, estimate(far, entry.coefficients)).ends_s
    assert (high / low)[1] > 1.005 * (high / low)[0] > 1.0


def test_shipped_calibrations_keep_to_their_limits() -> None:
    for entry in shipped().entries:
        assert len(entry.free_time) <= MOST_TIME, entry.key
        assert len(entry.free_memory) <= MOST_MEMORY, entry.key
        assert len(entry.free_time) <= entry.rows_time, entry.key
        for name, value in entry.coefficients.items():
            assert BY_NAME[name].low * 0.999 <= value <= BY_NAME[name].high * 1.001, (
                entry.key,
                name,
            )


@pytest.mark.parametrize(
    ("name", "median", "p90"), [("mpt", 3, 10), ("bloom", 4, 12), ("par4d", 6, 16)]
)
def test_shipped_calibrations_explain_the_golden_tables(name, median, p90) -> None:
    rows = table(name)
    got = score(rows, predict(rows, shipped()))
    assert got.median_pct < median
    assert got.p90_pct < p90


def test_labels_and_order_never_reach_a_prediction(tmp_path: Path) -> None:
    rows = golden_rows("mpt") + golden_rows("bloom") + golden_rows("par4d")
    plain = predict(written(tmp_path, rows, "mpt"), shipped()).step_s
    keep = ("default", "pure")
    for i, row in enumerate(rows):
        row["row_id"], row["source"], row["model"] = f"x{i}", "nobody", "something"
        row["step_s"] = row["tokens_s_gpu"] = row["tflops_gpu"] = row["mem_gb"] = ""
        row["note"] = "; ".join([w for w in keep if w in row["note"].split("; ")] + ["seen today"])
    order = list(range(len(rows)))
    random.Random(3).shuffle(order)
    other = predict(written(tmp_path, [rows[i] for i in order], "other"), shipped()).step_s
    assert np.allclose(plain[order], other, rtol=1e-12)


def test_suggestions_see_configurations_only() -> None:
    rows = table("bloom")
    entry, _ = shipped().entry(MeasuredAs.of("new-2022"), "jean-zay", "a")
    picks = suggest(rows.columns, entry, 10)
    assert len(set(picks)) == 10
    c = rows.columns.take(np.array(picks))
    assert len(set(zip(c.hidden.tolist(), c.pp.tolist(), c.micro.tolist(), strict=True))) >= 6


def test_folds_are_the_published_ones() -> None:
    import hashlib

    rows = table("bloom")
    text = f"{rows.table.column('d_model')[5]}|{rows.table.column('n_heads')[5]}"
    assert folds(rows.table)[5] == int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5


def test_rank_agreement_ignores_pairs_within_two_percent() -> None:
    truth = np.array([1.0, 1.01, 2.0])
    assert pair_agreement(np.array([2.0, 1.0, 3.0]), truth) == 1.0
    assert pair_agreement(np.array([3.0, 3.0, 1.0]), truth) == -1.0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hardware": "tpu-v9"}, "known GPU"),
        ({"n_layers": ""}, "n_layers"),
        ({"d_model": "lots"}, "d_model"),
        ({"n_gpus": "-8"}, "n_gpus"),
        ({"tp": "3"}, "n_gpus"),
        ({"pp": "x"}, "pp"),
        ({"sharding": "zero9"}, "sharding"),
        ({"precision": "int3"}, "precision"),
        ({"act_ckpt": "some"}, "act_ckpt"),
        ({"attention": "magic"}, "attention"),
        ({"gbs": "1e30"}, "gbs"),
        ({"seq_len": "nan"}, "seq_len"),
        ({"mbs": "0"}, "mbs"),
    ],
)
def test_what_cannot_be_expressed_keeps_its_line(tmp_path, change, word) -> None:
    good = golden_rows("mpt")[0]
    rows = written(tmp_path, [good, {**good, "row_id": "other", **change}])
    got = predict(rows, shipped())
    assert rows.usable.tolist() == [True, False]
    assert got.reasons[1].startswith("not expressible")
    assert word in got.reasons[1]
    assert np.isfinite(got.step_s[0])
    assert np.isnan(got.step_s[1])


def test_blank_policy_fields_take_the_stacks_usual_value_and_say_so(tmp_path: Path) -> None:
    good = golden_rows("mpt")[0]
    blank = {**good, "sharding": "", "act_ckpt": "", "sequence_parallel": "", "cp": "", "dp": ""}
    rows = written(tmp_path, [blank])
    assert rows.columns.zero[0] == 3
    assert "sharding taken as the stack's usual" in rows.reasons[0]
    assert "act_ckpt taken as the stack's usual" in rows.reasons[0]


def test_an_unknown_cluster_is_predicted_with_the_usual_fabric(tmp_path: Path) -> None:
    good = golden_rows("mpt")[0]
    rows = written(tmp_path, [{**good, "cluster": "garage", "stack": "homemade"}])
    got = predict(rows, shipped())
    assert np.isfinite(got.step_s[0])
    assert "cluster unknown" in got.reasons[0]
    assert "no measured runs of this stack" in got.reasons[0]


def test_entry_key() -> None:
    entry = FittedStack(
        measured_as=MeasuredAs("a", "2024"), cluster="b", generation="h", coefficients={}
    )
    assert entry.key == "a-2024|b"
