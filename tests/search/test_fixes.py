"""Does a run that ran out of memory get advice that can help, in an order a reader can trust?"""

from __future__ import annotations

from dataclasses import replace

from fourfold.search.fixes import fixes, remedies
from fourfold.search.predict import predict
from fourfold.spec.catalog import cluster
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from tests.specs import run_spec


def spec(**layout: int) -> RunSpec:
    sizes = {"seq_len": 4096, "micro_batch": 4, "global_batch": 16}
    return run_spec("llama-3.2-1b-untied", Layout(**layout), **sizes)


def words(run: RunSpec) -> set[str]:
    return {fix.words for fix in fixes(run)}


def test_what_changes_nothing_is_not_advice() -> None:
    alone, four = words(spec()), words(spec(shard=4))
    assert not {one for one in alone if one.startswith(("sharding", "layout"))}
    assert {"sharding = zero2", "sharding = zero3", "layout = pp2 dp2 cp1 tp1"} <= four
    assert {"micro_batch = 1", "recompute = full", "loss_chunks = 8"} <= alone & four


def test_what_fits_comes_first_the_fastest_on_top() -> None:
    def ask(specs):
        return predict(specs, cluster=cluster("hf-h100"))

    (own,) = ask([spec()])
    rows = remedies(spec(), ask, limit_bytes=0.7 * own.peak_bytes)
    fitting = [row for row in rows if row.fits]
    assert fitting
    assert list(rows[: len(fitting)]) == fitting
    assert [row.step_s for row in fitting] == sorted(row.step_s for row in fitting)
    assert all(row.peak_bytes <= 0.7 * own.peak_bytes for row in fitting)
    assert all(row.peak_bytes > 0.7 * own.peak_bytes for row in rows[len(fitting) :])


def test_chunks_of_the_loss_free_logits_and_cost_their_product_again() -> None:
    whole = spec()
    parts = replace(whole, policy=replace(whole.policy, loss_chunks=8))
    plain, chunked = predict([whole, parts], cluster=cluster("hf-h100"))
    logits = 10 * 4 * 4096 * whole.model.vocab  # bf16, fp32 and their gradients
    assert 0.6 < (plain.peak_bytes - chunked.peak_bytes) / (logits * 7 / 8) < 1.4
    product_s = 4 * 2.0 * 4 * 4096 * whole.model.vocab * whole.model.hidden / 989.5e12
    assert product_s < chunked.step_s - plain.step_s < 3 * product_s
