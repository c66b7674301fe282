"""What each engine's log says: numbers exactly, the whole configuration, how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.backends.megatron.log_experts import megatron_experts
from fourfold.errors import UserError
from fourfold.logs.row import shown_layout
from tests.logs import written
from tests.logs.reading import BLOOM, GOLDEN, collected, one, rows, says, table

# Columns that no log can know, and those that the collected row says in its own words.
NOT_LOGGED = ("source", "model", "note", "flop_rule", "stack", "status")


# --- Megatron


def six_lines() -> list[tuple[float, float, str]]:
    return [
        (769.99, 108.47, "6.384045E+01"), (844.81, 98.87, "6.373861E+01"),
        (430.21, 97.07, "6.373876E+01"), (777.09, 107.48, "6.381926E+01"),
        (853.81, 97.82, "6.369443E+01"), (434.14, 96.19, "6.369444E+01"),
    ]  # fmt: skip


def test_six_pasted_lines_are_six_runs_with_exactly_their_numbers(tmp_path: Path) -> None:
    text = "".join(
        f" iteration        2/   95367 | consumed samples:         4096 | consumed tokens:      "
        f"8388608 | elapsed time per iteration (s): {step_s:.2f} | learning rate: 3.787E-06 | "
        f"global batch size:  2048 | "
        f"lm loss: {loss} | loss scale: 1.0 | number of skipped iterations:   0 | TFLOPs: "
        f"{tflops:.2f} |\n"
        for step_s, tflops, loss in six_lines()
    )
    found = rows(tmp_path, text)
    assert [(float(r["step_s"]), float(r["tflops_gpu"])) for r in found] == [
        (step_s, tflops) for step_s, tflops, _ in six_lines()
    ]
    assert {(r["gbs"], r["seq_len"], r["status"]) for r in found} == {
        ("2048", "2048", "incomplete")
    }


@pytest.mark.parametrize("row", BLOOM, ids=[row["row_id"] for row in BLOOM])
def test_a_published_row_written_as_a_log_is_collected_back(tmp_path, row) -> None:
    found = one(tmp_path, written.megatron(row), cluster="jean-zay", row_id=row["row_id"])
    for column in (name for name in row if name not in NOT_LOGGED):
        said, read = row[column], found[column]
        if said and column in ("step_s", "tokens_s_gpu", "tflops_gpu", "mem_gb"):
            assert float(read) == pytest.approx(float(said), rel=1e-5), column
        else:
            assert read == said, column
    assert found["outcome"] == row["status"]
    assert found["engine"] == "megatron-deepspeed"
    assert found.missing == (() if row["mbs"] else ("mbs",))


def test_milliseconds_of_megatron_lm_and_its_own_arguments(tmp_path: Path) -> None:
    row = table(GOLDEN / "par4d.csv")[0]
    text = written.megatron(row, deepspeed=False).replace("consumed tokens", "consumed words")
    text = text.replace("(s): 332.56 |", "(ms): 332563.0 |")
    found = one(tmp_path, text, hardware=row["hardware"])
    names = ("tp", "cp", "pp", "dp", "vpp", "n_kv_heads", "d_ff", "tied", "family", "sharding",
             "sequence_parallel", "act_ckpt", "attention", "precision", "mbs", "gbs")  # fmt: skip
    assert [found[name] for name in names] == [row[name] for name in names]
    assert float(found["step_s"]) == 332.563
    assert (found["engine"], found["status"]) == ("megatron-lm", "ok")


def test_megatron_recomputes_the_first_layers_of_each_chunk(tmp_path: Path) -> None:
    row = table(GOLDEN / "par4d.csv")[0] | {"act_ckpt": "block-3"}
    found = one(tmp_path, written.megatron(row, deepspeed=False), hardware=row["hardware"])
    assert (found["act_ckpt"], found["status"]) == ("block-3", "ok")
    whole = row | {"act_ckpt": f"block-{row['n_layers']}"}
    found = one(tmp_path, written.megatron(whole, deepspeed=False), hardware=row["hardware"])
    assert found["act_ckpt"] == "full"


def told(args: dict[str, str]) -> str:
    return written.told(args, written.megatron(BLOOM[0]))


def _lines(numbers: list[tuple[int, float]], **changes: str) -> str:
    row = {"seq_len": "2048", **changes}
    return "".join(f"{written.iteration(step, s, 64, row, unit='ms')}\n" for step, s in numbers)


def test_warm_up_evaluation_checkpoint_and_skipped_iterations_are_left_out(tmp_path: Path) -> None:
    text = _lines([(1, 30.0)] + [(step, 2.0) for step in range(2, 10)])
    text += " validation loss at iteration 9 | lm loss value: 1.0E+01 | lm loss PPL: 2.2E+04 |\n"
    text += _lines([(10, 9.0), (11, 2.0)])
    text += "  successfully saved checkpoint at iteration      11 to /ckpt\n" + _lines([(12, 8.0)])
    text += _lines([(13, 1.5)]).replace("skipped iterations:   0", "skipped iterations:   1")
    found = one(tmp_path, text + _lines([(14, 2.2)]))
    assert float(found["step_s"]) == 2.0
    assert found["steps"] == "10"
    assert found["step_rule"] == (
        "median of 10 iterations; left out: 1 warm-up, "
        "2 after an evaluation or checkpoint, 1 skipped"
    )


@pytest.mark.parametrize(
    ("numbers", "step_s", "steps"),
    [
        ([(10, 9.0), (20, 2.0), (25, 3.0), (26, 3.0), (27, 3.0)], 2.0, "17"),
        ([(45, 6.0), (46, 6.0), (47, 6.0), (48, 6.0), (527, 2.0)], 6.0, "5"),  # lines are cut out
    ],
)
def test_lines_weigh_the_iterations_they_average_and_no_gap(tmp_path, numbers, step_s, steps):
    found = one(tmp_path, _lines(numbers))
    assert (float(found["step_s"]), found["steps"]) == (step_s, steps)


def test_a_single_line_that_may_hold_the_first_iteration_is_no_measurement(tmp_path: Path) -> None:
    found = one(tmp_path, _lines([(1, 9.0)]))
    assert (found["step_s"], found["step_rule"]) == ("", "no timed iteration; left out: 1 warm-up")
    assert "step_s" in found.missing


def test_only_steps_of_the_last_batch_size_count(tmp_path: Path) -> None:
    sizes = [(1, 9.0, 16), (2, 1.0, 16), (3, 1.0, 16), (4, 2.0, 32), (5, 2.0, 32)]
    ramp = "".join(written.iteration(*one, {"seq_len": "2048"}) + "\n" for one in sizes)
    found = one(tmp_path, ramp)
    assert (found["gbs"], float(found["step_s"]), found["steps"]) == ("32", 2.0, "2")
    assert "2 of another batch size" in found["step_rule"]


def test_a_restart_in_the_middle_is_the_same_run(tmp_path: Path) -> None:
    head = written.megatron(BLOOM[0]).partition(" iteration ")[0]
    row = {"seq_len": "2048"}
    text = head + _lines([(s, 2.0) for s in range(1, 9)], **row)
    text += "RuntimeError: NCCL error: unhandled system error\n" + head
    text += _lines([(6, 40.0), (7, 2.0), (8, 2.0)], **row)
    found = one(tmp_path, text)
    assert (float(found["step_s"]), found["steps"], found["outcome"]) == (2.0, "9", "ok")
    assert "2 warm-up" in found["step_rule"]


def test_another_configuration_is_another_run(tmp_path: Path) -> None:
    text = written.megatron(BLOOM[0]) + written.megatron(BLOOM[1]) + written.megatron(BLOOM[0])
    found = rows(tmp_path, text)
    assert [(r["n_layers"], float(r["step_s"])) for r in found] == [
        ("8", 769.99), ("80", 844.81), ("8", 769.99),
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["oom", "fail", "hang"])
def test_how_a_run_ended(tmp_path: Path, end: str) -> None:
    text = written.megatron({**BLOOM[0], "status": end})
    found = one(tmp_path, text, cluster="jean-zay")
    assert (found["outcome"], found["status"], found["step_s"]) == (end, end, "")


def test_a_crash_after_many_steps_keeps_what_was_measured(tmp_path: Path) -> None:
    text = _lines([(s, 2.0) for s in range(1, 9)]) + "\n".join(written.ENDS["fail"]) + "\n"
    found = one(tmp_path, text)
    assert (found["outcome"], float(found["step_s"])) == ("ok", 2.0)
    assert "RuntimeError" in found.notes[0] or "Traceback" in found.notes[0]
    late = _lines([(s, 2.0) for s in range(1, 9)]) + "\n".join(written.ENDS["oom"]) + "\n"
    assert one(tmp_path, late)["outcome"] == "oom"


# --- the others


def test_torchtitan(tmp_path: Path) -> None:
    found = one(tmp_path, written.titan([2000, 6600, 6650, 6640], ranks=3))
    assert float(found["tokens_s_gpu"]) == 6638  # the slowest of three ranks
    assert float(found["step_s"]) == pytest.approx(16 * 8192 / 6638 / 8)
    says(found, "n_layers=32 d_model=4096 n_heads=32 n_kv_heads=8 d_ff=14336 vocab=128256")
    says(found, "seq_len=8192 hardware=h100-80gb n_gpus=8 dp=8 tp=1 mbs=2 gbs=16 sharding=zero3")
    says(found, "precision=bf16 act_ckpt=selective status=ok mem_gb=54.3 steps=29")


H200 = Path(__file__).parents[2] / "results" / "h200" / "torchtitan"
TITAN_RUNS = {  # layers, recompute, micro batch, GiB, seconds
    "716fa291": ("16", "none", "2", 50.73, 0.3092),
    "6e3beb08": ("28", "none", "1", 75.31, 0.3979),
    "4f937880": ("32", "full", "1", 121.75, 0.9799),
}


@pytest.mark.parametrize("run", TITAN_RUNS)
def test_torchtitan_as_it_ran_on_a_gpu(run: str, tmp_path: Path) -> None:
    (log,) = H200.glob(f"{run}*/engine.log")
    found = one(tmp_path, log.read_text())
    layers, recompute, micro, gib, seconds = TITAN_RUNS[run]
    says(found, f"n_layers={layers} act_ckpt={recompute} mbs={micro}")
    says(found, "hardware=h200 precision=bf16 status=ok")
    assert found["note"] == "torch.compile; real tokens"
    assert float(found["mem_gb"]) == gib
    assert float(found["step_s"]) == pytest.approx(seconds, rel=0.01)
    assert not found["unread_lines"]


def test_torchtitan_leaves_out_what_follows_a_validation(tmp_path: Path) -> None:
    text = written.titan([2000, 6600, 6600, 3000, 6600])
    validation = "validate step: 20  loss:  7.1  memory: 1.0GiB(1%)  tps: 9,000\n"
    before, mark, after = text.partition("step: 30")
    start = before.rfind("\n") + 1
    found = one(tmp_path, before[:start] + validation + before[start:] + mark + after)
    assert float(found["tokens_s_gpu"]) == 6600
    assert "10 after an evaluation" in found["step_rule"]


@pytest.mark.parametrize("year", [2024, 2025])
def test_nanotron_and_its_experts(tmp_path: Path, year: int) -> None:
    text = written.nanotron([9000, 4870, 4860, 4850, 4860])
    if year == 2025:  # seconds have another name, and batches are counted in tokens
        text = text.replace("elapsed_time_per", "time_per")
        text = text.replace("global_batch_size: 256", "global_batch_size: 1.05M")
    found = one(tmp_path, text, hardware="h100-80gb")
    says(found, "n_layers=16 vocab=49152 n_gpus=8 dp=2 pp=2 tp=2 mbs=4 gbs=256 sharding=zero1")
    says(found, "precision=bf16 sequence_parallel=1 act_ckpt=none status=ok step_s=4.86")
    assert float(found["mem_gb"]) == pytest.approx(21.5e9 / 2**30)
    moe = (
        "moe_config=MoEConfig(num_experts=8, top_k=2, moe_intermediate_size=1024,\n"
        "enable_shared_expert=True, shared_expert_intermediate_size=2048, layers=LAYERS,\n"
        "token_dispatcher_type='alltoall'), num_hidden_layers="
    )
    text = text.replace("num_hidden_layers=", moe, 1)
    text = text.replace(
        "expert_parallel_size=1", "expert_parallel_size=1, expert_tensor_parallel_size=2"
    )
    dense = {"[-1]": "", str([*range(16)]): "", str([*range(2, 16)]): "2"}
    for layers, first in dense.items():
        found = one(tmp_path, text.replace("LAYERS", layers), hardware="h100-80gb")
        says(found, "experts=8 experts_per_token=2 expert_ffn=1024 shared_ffn=2048 ep=1 etp=2")
        says(found, f"dense_layers={first} routing=natural status=ok")
    dropped = text.replace("LAYERS", "[-1], moe_expert_capacity_factor=1.5")
    says(one(tmp_path, dropped, hardware="h100-80gb"), "routing=drop capacity_factor=1.5")
    some = one(tmp_path, text.replace("LAYERS", "[1, 3]"), hardware="h100-80gb")
    assert "dense-model" in some.missing


def test_llm_foundry(tmp_path: Path) -> None:
    found = one(
        tmp_path, written.composer([0, 0, 0, 10600, 10643, 10650, 10640]), hardware="h100-80gb"
    )
    assert float(found["tokens_s_gpu"]) == pytest.approx(10643)
    assert float(found["step_s"]) == pytest.approx(2048 * 96 / 8 / 10643)
    says(found, "n_layers=32 d_ff=16384 n_gpus=8 mbs=6 gbs=96 sharding=zero3 precision=bf16")
    says(found, "note=pure status=ok")


# --- one file for all


def test_rows_are_kept_and_replaced_by_log(tmp_path: Path) -> None:
    log, out = tmp_path / "a.log", tmp_path / "rows.csv"
    log.write_text(written.megatron(BLOOM[0]))
    assert collected(log, out=out).rows_read[0].missing == ("hardware",)
    other = tmp_path / "b.log"
    other.write_text(written.megatron(BLOOM[1]))
    collected(other, out=out, cluster="jean-zay")
    again = collected(log, out=out, cluster="jean-zay")
    kept = table(out)
    assert again.total == 2
    assert {(row["row_id"], row["status"]) for row in kept} == {("a", "ok"), ("b", "ok")}


def test_a_collected_table_is_completed_later(tmp_path: Path) -> None:
    log, out = tmp_path / "a.log", tmp_path / "rows.csv"
    log.write_text(written.megatron({**BLOOM[0], "status": "oom"}))
    collected(log, out=out)
    (row,) = collected(out, out=out, hardware="a100-80gb").rows_read
    assert (row["status"], row["row_id"]) == ("oom", "a")
    assert len(table(out)) == 1


def test_fields_by_file_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.log").write_text(written.megatron(BLOOM[0]))
    side = tmp_path / "fields.toml"
    side.write_text('hardware = "a100-80gb"\n["b.*"]\nhardware = "a100-40gb"\n')
    read = collected(tmp_path, out=tmp_path / "o.csv", side=str(side)).rows_read
    found = {Path(row["log"]).name: row["hardware"] for row in read}
    assert found == {"a.log": "a100-80gb", "b.log": "a100-40gb"}


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    log, out = tmp_path / "a.log", tmp_path / "thesis.csv"
    log.write_text(written.megatron(BLOOM[0]))
    out.write_text("my,own,table\n1,2,3\n")
    with pytest.raises(UserError, match="was not written by this command"):
        collected(log, out=out)
    assert out.read_text() == "my,own,table\n1,2,3\n"


def test_an_unknown_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown field"):
        collected("a", out=tmp_path / "rows.csv", gpu="h100")


def test_an_argument_list_without_an_end_printed_by_another_rank(tmp_path: Path) -> None:
    text = written.megatron(BLOOM[0])
    rest = text.replace(written.END_OF_ARGUMENTS, "-" * 59).splitlines()
    lines = [f"[default{7 if ' iteration ' in line else 0}]:{line}\n" for line in rest]
    for found in rows(tmp_path, "".join(lines) * 2, cluster="jean-zay"):
        assert (found["status"], found["n_layers"], float(found["step_s"])) == ("ok", "8", 769.99)


def test_experts_of_megatrons_arguments(tmp_path: Path) -> None:
    said = {
        "num_experts": "64", "moe_router_topk": "6", "moe_ffn_hidden_size": "1408",
        "moe_shared_expert_intermediate_size": "2816", "expert_model_parallel_size": "4",
        "expert_tensor_parallel_size": "1", "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep", "moe_router_force_load_balancing": "True",
        "moe_layer_freq": "[0, 1, 1, 1, 1, 1, 1, 1]", "multi_latent_attention": "True",
        "q_lora_rank": "None", "kv_lora_rank": "512", "qk_head_dim": "128",
        "qk_pos_emb_head_dim": "64", "v_head_dim": "128", "recompute_granularity": "selective",
        "recompute_modules": "['moe_act', 'layernorm']", "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": "[<CudaGraphScope.attn: 2>, <CudaGraphScope.moe_router: 5>]",
        "moe_expert_capacity_factor": "None", "overlap_moe_expert_parallel_comm": "False",
    }  # fmt: skip
    found = one(tmp_path, told(said), cluster="jean-zay")
    says(found, "experts=64 experts_per_token=6 expert_ffn=1408 shared_ffn=2816 dense_layers=1")
    says(found, "ep=4 etp=1 dispatcher=hybridep routing=forced a2a_overlap=0 act_ckpt=selective")
    says(found, "kv_lora_rank=512 q_lora_rank= head_dim=192 family=deepseek attn_kind=mla")
    assert found["recompute_modules"] == "moe_act layernorm"
    assert found["cuda_graph"] == "transformer_engine attn moe_router"
    assert found.missing == ()
    assert shown_layout(found).endswith("ep4")


def test_what_is_not_modelled_stays_so_when_the_table_is_collected_again(tmp_path: Path) -> None:
    log, first, second = (tmp_path / name for name in ("train.log", "first.csv", "second.csv"))
    log.write_text(told({"is_hybrid_model": "True"}))
    collected(log, out=first, cluster="jean-zay")
    (again,) = collected(first, out=second, gpus_per_node="4").rows_read
    assert (again["status"], again.missing) == ("incomplete", ("dense-model",))
    # A table of an earlier release, without the last column.
    earlier = [line.rpartition(",")[0] for line in first.read_text().splitlines()]
    first.write_text("\n".join(earlier) + "\n")
    collected(log, out=first, cluster="jean-zay")
    assert first.read_text().splitlines()[0] == f"{earlier[0]},unmodelled"


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({}, ("natural", "2", "alltoall")),
        ({"moe_expert_capacity_factor": "1.25"}, ("drop", "2", "alltoall")),
        ({"moe_token_dispatcher_type": "flex", "moe_enable_deepep": "True"},
         ("natural", "2", "deepep")),
        ({"expert_tensor_parallel_size": "1", "moe_token_dispatcher_type": "allgather"},
         ("natural", "1", "allgather")),
    ],
)  # fmt: skip
def test_what_megatron_leaves_unsaid_of_experts(args: dict, wanted: tuple) -> None:
    """The trap of its default: experts are cut over tensor parallelism unless it is told."""
    base = {"num_experts": "8", "moe_router_topk": "2", "tensor_model_parallel_size": "2"}
    base |= {"expert_tensor_parallel_size": "None", "moe_token_dispatcher_type": "alltoall"}
    found = megatron_experts({**base, **args})
    assert (found["routing"], found["etp"], found["dispatcher"]) == wanted


def test_unlabelled_ranks_that_print_the_same_step(tmp_path: Path) -> None:
    """Eight processes to one stream: rates differ by little, the loss does not."""
    line = "[titan] 2026-02-24 19:46:17,508 - root - INFO - step: {:2}  loss: {:8.5f}  grad_norm: "
    line += "1.5000  memory: 66.91GiB(37.51%)  tps: {:,}  tflops: 314.69  mfu: 13.99%\n"
    text = "".join(
        line.format(s, 8 - s / 10, 10_050 - r % 2) for s in range(1, 6) for r in range(8)
    )
    found = one(tmp_path, text)
    assert (float(found["tokens_s_gpu"]), found["steps"]) == (10_049, "4")


@pytest.mark.parametrize("labels", [("[rank0]:", "[rank4]:"), ("", "")])
def test_stages_of_a_pipeline_that_do_not_see_the_loss(tmp_path, labels) -> None:
    line = (
        "{}[titan] - step: {:2}  loss: {:8.5f}  memory: {}GiB(1%)  tps: {:,}  tflops: 1  mfu: 1%\n"
    )
    text = "".join(
        line.format(labels[0], step, -1.0, 40.5, 5000)
        + line.format(labels[1], step, 7.5, 50.5, 4990)
        for step in range(1, 6)
    )
    found = one(tmp_path, text)
    assert (float(found["tokens_s_gpu"]), found["steps"]) == (4990, "4")
    assert found["mem_gb"] == "50.5"
