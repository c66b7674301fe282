"""Logs as people publish them: old releases, forks, launchers' marks, pasted pieces. The shapes are
those of published logs; names and numbers are ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.logs.book import read_log
from fourfold.spec.nccl_tests import unlabelled
from tests.logs import written
from tests.logs.reading import BLOOM, collected, one, rows, says

# --- who wrote a line


@pytest.mark.parametrize(
    ("text", "label", "rest"),
    [
        ("(head, rank=0, pid=381) [1,0]<stdout>:#  size",
         "(head, rank=0, pid=381)[1,0]<stdout>:", "#  size"),
        ("(worker1, rank=1, pid=27, ip=10.0.0.2)  a: 1",
         "(worker1, rank=1, pid=27, ip=10.0.0.2)", " a: 1"),
        ("(TrainWorker pid=90, ip=10.0.0.9) step", "(TrainWorker pid=90, ip=10.0.0.9)", "step"),
        ("[pod/train-0/main] 2025-01-02T03:04:05.678901234Z model:",
         "[pod/train-0/main]", "model:"),
        ("2025-01-02T03:04:05.678Z   d_model: 512", "", "  d_model: 512"),
        ("[2025-01-02 03:04:05] iteration", "", "iteration"),
        ("pretrain/0 [default0]:[rank0]:x", "pretrain/0[default0]:[rank0]:", "x"),
        ("10.0.0.7: hello", "10.0.0.7:", "hello"),
        ("12: ", "12:", ""),
        ("fp16: true", "", "fp16: true"),
        ("  hidden_size: 64", "", "  hidden_size: 64"),
        ("[1, 2, 3]", "", "[1, 2, 3]"),
        ("2025-01-02 03:04:05,678: rank0[41][MainThread]: INFO: x", "",
         "2025-01-02 03:04:05,678: rank0[41][MainThread]: INFO: x"),
    ],
)  # fmt: skip
def test_marks_of_launchers(text: str, label: str, rest: str) -> None:
    assert unlabelled(text) == (label, rest)


@pytest.mark.parametrize("mark", ["2025-01-02T03:04:05.678Z ", "(head, rank=0, pid=381) ", "7: "])
def test_a_configuration_behind_marks(tmp_path: Path, mark: str) -> None:
    text = "".join(f"{mark}{x}\n" for x in written.composer([0, 9e3, 9.1e3, 9.1e3]).splitlines())
    assert one(tmp_path, text, hardware="h100-80gb")["status"] == "ok"
    text = "".join(f"{mark}{x}\n" for x in written.nanotron([9e3, 4860, 4860]).splitlines())
    assert one(tmp_path, text, hardware="h100-80gb")["status"] == "ok"


# --- Megatron's family


def test_the_first_releases_of_megatron(tmp_path: Path) -> None:
    """Model parallel and nothing else; the batch is that of a replica; no ffn size."""
    found = one(tmp_path, written.printed("megatron-2019.txt"), hardware="a100-40gb")
    says(found, "tp=2 pp=1 dp=32 mbs=8 gbs=256 d_ff=7680 vocab=50432 precision=fp16 step_s=1.9055")
    says(found, "act_ckpt=full sharding=zero0 steps=10 mem_gb=17 status=ok engine=megatron-lm")


def test_gpt_neox_says_behind_each_value_where_it_is_from(tmp_path: Path) -> None:
    found = one(tmp_path, written.printed("gpt-neox.txt"), hardware="a100-40gb")
    says(found, "n_layers=44 d_ff=24576 tied=0 tp=2 pp=4 dp=12 sharding=zero1 mbs=4 gbs=384")
    says(found, "precision=bf16 act_ckpt=full attention=flash n_gpus=96 status=ok step_s=12.5")


@pytest.mark.parametrize(
    ("name", "value", "column", "read"),
    [
        ("glu_activation", "swiglu", "family", "llama"),
        ("fp8_hybrid", "True", "precision", "fp8"),
        ("fp8", "hybrid\n  fp8_recipe ............ mxfp8", "note", "recipe mxfp8; real tokens"),
        ("attention_head_type", "multiquery", "n_kv_heads", "1"),
        ("num_attention_heads_kv", "8", "n_kv_heads", "8"),
        ("use_torch_fsdp2", "True", "sharding", "zero3"),
        ("rope_type", "default", "family", "gpt"),
    ],
)
def test_arguments_of_forks(tmp_path: Path, name: str, value: str, column: str, read: str) -> None:
    text = written.megatron(BLOOM[0], deepspeed=False).replace("consumed tokens", "words")
    text = written.told({name: value}, text)
    text = text.replace(f"  num_query_groups {'.' * 32} {BLOOM[0]['n_kv_heads']}\n", "")
    text = text.replace(f"  group_query_attention {'.' * 27} False\n", "")
    assert one(tmp_path, text)[column] == read


def test_deepspeed_says_which_stage_it_read(tmp_path: Path) -> None:
    text = written.megatron(BLOOM[0])
    before, mark, after = text.partition("setting number of micro-batches")
    said = "[2022-02-17 20:01:11,123] [INFO] [config.py:1062:print]   {} ...... {}\n"
    text = before + said.format("zero_enabled", "True") + said.format("zero_optimization_stage", 2)
    assert one(tmp_path, text + mark + after)["sharding"] == "zero2"


def test_a_line_that_was_wrapped_when_it_was_pasted(tmp_path: Path) -> None:
    text = (
        " iteration 1000/5000 | consumed samples: 8000 | elapsed time per iteration (ms): 283.5 |\n"
        " learning rate: 4.6E-05 | global batch size: 8 | lm loss: 5.54 | loss scale: 65536.0 |\n"
    )
    assert float(one(tmp_path, text)["step_s"]) == 0.2835


# --- NeMo and Megatron-Bridge


def bar(count: int, step: str, seconds: float) -> str:
    return (
        f"Epoch 0: :   1%|          | {count}/90000 [43:24:54<00:00, v_num=, reduced_train_loss="
        f"2.139, global_step={step}, consumed_samples=2.56e+5, train_step_timing in s={seconds}]"
    )


def test_the_bar_rounds_large_steps_and_its_count_does_not(tmp_path: Path) -> None:
    text = "\r".join(
        [bar(1994, "1993.0", 68.5), bar(1998, "2e+3", 68.7),
         bar(1999, "2e+3", 68.75), bar(2000, "2e+3", 68.8)]
    )  # fmt: skip
    found = one(tmp_path, f"{text}[NeMo I 2024-06-17 08:36:41 x:480] Removing checkpoint: /x\n")
    assert (float(found["step_s"]), found["engine"]) == (68.7, "nemo")


def test_the_first_step_of_a_bar_is_warm_up(tmp_path: Path) -> None:
    steps = [(1, 30.0), (2, 2.25), (3, 2.5), (4, 2.75)]  # each is drawn several times
    found = one(tmp_path, "".join(f"{bar(n, f'{n - 1}.000', s)}\r" * 3 for n, s in steps) + "\n")
    says(found, "step_s=2.5 steps=3 engine=nemo")


def test_a_bar_without_the_time_of_a_step_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "old.log"
    text = (
        "Epoch 0:   1%|   | {n}/7722 [9:07:58<878:01:48, 41.36s/it, loss=3.1, v_num=, "
        "reduced_train_loss=3.090, "
        "global_step={n}.0, consumed_samples=1.63e+6]\n"
    )
    log.write_text("".join(text.format(n=n) for n in range(790, 793)))
    book = read_log(log)
    assert (book.unread, book.runs) == (3, [])


HYDRA = written.printed("nemo.txt")


@pytest.mark.parametrize("mark", ["", "0: "])
def test_nemos_configuration(tmp_path: Path, mark: str) -> None:
    text = HYDRA + "".join(
        f"{bar(n, f'{n - 1}.000', s)}\n" for n, s in [(1, 9.0), (2, 2.5), (3, 2.5)]
    )
    text = "".join(f"{mark}{line}\n" for line in text.splitlines())
    found = one(tmp_path, text, hardware="a100-80gb")
    says(found, "n_layers=24 d_model=2048 d_ff=8192 vocab=50688 seq_len=2048 tied=0 n_gpus=16")
    says(found, "tp=4 pp=2 dp=2 mbs=4 gbs=128 sharding=zero1 precision=bf16 act_ckpt=selective")
    says(found, "attention=flash sequence_parallel=1 status=ok")


def test_groups_of_ranks_say_the_layout(tmp_path: Path) -> None:
    head = "[NeMo I 2025-01-01 00:00:00 megatron_init:400] All {} group ranks{}: {}\n"
    text = head.format(
        "data parallel", " with context parallel combined", "[[0, 2, 4, 6], [1, 3, 5, 7]]"
    )
    text += head.format("context parallel", "", "[[0, 2], [4, 6], [1, 3], [5, 7]]")
    text += head.format("tensor model parallel", "", "[[0, 1], [2, 3], [4, 5], [6, 7]]")
    text += head.format("pipeline model parallel", "", "[[0], [1], [2], [3], [4], [5], [6], [7]]")
    text += "".join(
        f"Training epoch 0, iteration {n}/9 | train_step_timing in s: 2.5\n" for n in (0, 1, 2)
    )
    says(one(tmp_path, text), "dp=2 cp=2 tp=2 pp=1 n_gpus=8")


BRIDGE, YAML = written.printed("bridge.txt"), written.printed("bridge.yaml")


@pytest.mark.parametrize(("config", "lacks"), [(BRIDGE, ("seq_len",)), (YAML, ())])
def test_megatron_bridges_configuration(tmp_path, config, lacks) -> None:
    row = {"seq_len": ""}
    text = config + "".join(
        "Step Time : 9.30s GPU utilization: 490.1MODEL_TFLOP/s/GPU\n"
        + written.iteration(n, s, 128, row, unit="ms").replace("consumed tokens", "skipped samples")
        + "\n"
        for n, s in [(1, 42.0), (2, 9.25), (3, 9.5), (4, 9.5)]
    )
    text += "[Rank 0] (after 4 iterations) memory (GB) | mem-max-reserved-gigabytes: 53.6870912\n"
    found = one(tmp_path, text, hardware="h100-80gb", n_gpus="8")
    says(found, "n_layers=32 d_ff=14336 n_kv_heads=8 vocab=128256 tp=2 pp=1 dp=4 mbs=1 gbs=128")
    says(found, "sharding=zero1 precision=bf16 act_ckpt=none attention=flash family=llama")
    says(found, "engine=megatron-bridge mem_gb=50")
    assert float(found["step_s"]) == 9.5
    assert found.missing == lacks


# --- torchtitan and Composer


@pytest.mark.parametrize(
    ("mesh", "dp", "tp"),
    [
        ("Building 1-D device mesh with ('dp',), [4]", "4", "1"),
        ("Building 2-D device mesh with ['dp', 'tp'], [4, 2]", "4", "2"),
        ("Building 2-D device mesh with ['dp_shard_mod_ep', 'dp_shard_in_ep'], [2, 4]", "8", "1"),
        ("Building 2-D device mesh with ['dp_replicate', 'dp_shard'], [2, 4]", "8", "1"),
    ],
)
def test_meshes_of_old_torchtitan(tmp_path: Path, mesh: str, dp: str, tp: str) -> None:
    head = "[rank0]:2025-02-13 11:33:20,100 - root - INFO - "
    text = f"{head}Starting job: mine\n{head}{mesh}\n"
    text += (
        f"{head}Training starts at step 1, with local batch size 2, global batch size 32, "
        "sequence length 8192, total steps 100 (warmup 200)\n"
    )
    text += "".join(
        f"{head}step: {n:2}  loss: 12.2417  memory: 42.08GiB(30.10%)  wps: {rate:,}  mfu: 8.65%\n"
        for n, rate in [(1, 900), (10, 7000), (20, 7010), (30, 7020)]
    )
    found = one(tmp_path, text)
    says(found, f"dp={dp} tp={tp} gbs=32 mbs=2 seq_len=8192")
    assert float(found["tokens_s_gpu"]) == 7010


def test_steps_without_a_rate_are_not_read(tmp_path: Path) -> None:
    log = tmp_path / "old.log"
    head = "[rank0]:2024-03-04 17:01:30,712 - root - INFO - "
    log.write_text(
        f"{head}Building 1-D device mesh with ('dp',), [4]\n"
        + "".join(
            f"{head}step:  {n}  loss: 10.9  iter:  0.92  data: 0.03  lr: 0.0002\n" for n in (1, 2)
        )
    )
    book = read_log(log)
    assert (book.engine, book.unread) == ("torchtitan", 2)


def test_composers_batches_on_one_line_and_its_own_list(tmp_path: Path) -> None:
    text = "Config:\nnum_gpus_per_node: 8\nnum_nodes: 2\nrank_zero_seed: 17\n" + "*" * 30 + "\n"
    text += "".join(
        f"[batch={n}/40]: Train throughput/device/tokens_per_sec: {rate}   "
        f"memory/peak_reserved_mem: 14.5\n"
        for n, rate in [(38, 4000.5), (39, 4880.5), (40, 4890.5)]
    )
    found = one(tmp_path, text)
    says(found, "n_gpus=16")
    assert float(found["tokens_s_gpu"]) == pytest.approx(4885.5, rel=1e-5)


def titan_03(*said: str, rate: int = 5890) -> str:
    """As 0.3 prints without its configuration: neither the job's name nor the model's sizes."""
    head = "[rank0]:[titan] 2026-02-24 19:46:17,508 - root - INFO - "
    lines = [
        "torchtitan version: 0.3.0 (0.0.0 means __version__ is not defined correctly).",
        "Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=4, cp=1, tp=2, ep=1",
        "Building llama3 8B",
        "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory",
        "Model llama3 8B size: 8,030,261,248 total parameters",
        *said,
        "Applied HSDP to the model",
        "Trainer is initialized with local batch size 2, global batch size 32, gradient "
        "accumulation steps 2, sequence length 8192, total steps 1000 (warmup 200)",
    ]
    lines += [
        f"step: {n:2}  loss:  7.62585  grad_norm: 26.6250  memory: 66.91GiB(84.51%)  "
        f"tps: {tps:,}  tflops: 314.71  mfu: N/A"
        for n, tps in ((1, 812), (10, rate), (20, rate + 10), (30, rate - 10))
    ]
    return "".join(f"{head}{line}\n" for line in lines)


def test_a_model_that_is_known_by_its_parameters_or_name_has_its_experts(tmp_path: Path) -> None:
    plain = "Model llama3 8B size: 8,030,261,248 total parameters"
    text = titan_03().replace(plain, "Model qwen3 30B-A3B size: 30,532,122,624 total parameters")
    wanted = "n_layers=48 head_dim=128 experts=128 experts_per_token=8 expert_ffn=768"
    says(one(tmp_path, text), f"{wanted} ep=1 etp=2 dispatcher=alltoall family=qwen-moe")
    named = one(tmp_path, titan_03().replace(plain, ""), model="deepseek-v2-lite")
    says(named, "experts=64 shared_ffn=2816 dense_layers=1 kv_lora_rank=512 attn_kind=mla")


@pytest.mark.parametrize(
    ("said", "recompute", "precision"),
    [
        (("Applied SelectiveAC activation checkpointing to the model",), "selective", "bf16"),
        (("Applied FullAC activation checkpointing to the model",), "full", "bf16"),
        (("Applied MyAC activation checkpointing to the model",), "", "bf16"),
        (("Selected 0.5 budget option",), "", "bf16"),
        (("Float8 training active with recipe rowwise",), "none", "fp8"),
        (("Float8 tensorwise scaled training active",), "none", "fp8"),
        (("MX training active with recipe mxfp8_cublas",), "none", "fp8"),
        ((), "none", "bf16"),
    ],
)
def test_torchtitan_03_names_its_policy_and_counts_its_parameters(
    tmp_path: Path, said: tuple[str, ...], recompute: str, precision: str
) -> None:
    found = one(tmp_path, titan_03(*said))
    says(found, "n_layers=32 d_model=4096 n_heads=32 n_kv_heads=8 d_ff=14336 vocab=128256 tied=0")
    says(found, f"dp=8 tp=2 act_ckpt={recompute} precision={precision}")
    assert ("recipe rowwise" in found["note"]) == any("rowwise" in line for line in said)
    assert float(found["step_s"]) == pytest.approx(32 * 8192 / 5890 / 16)
    lacks = {"precision": precision, "act_ckpt": recompute}
    assert found.missing == tuple(name for name, value in lacks.items() if not value)


def test_a_model_of_another_size_is_not_taken_for_its_namesake(tmp_path: Path) -> None:
    found = one(tmp_path, titan_03().replace("8,030,261,248", "8,030,261,249"))
    assert (found["model"], found["n_layers"]) == ("llama3-8b", "")


def test_two_starts_of_torchtitan_03_are_two_runs(tmp_path: Path) -> None:
    found = rows(tmp_path, titan_03() + titan_03(rate=6890))
    assert [float(row["tokens_s_gpu"]) for row in found] == [5890, 6890]


# --- forks of Megatron


def test_argonnes_lines_have_other_names_and_marks(tmp_path: Path) -> None:
    """Their fork of Megatron-DeepSpeed: megatron/training_log.py, commit b8413d9."""
    found = one(tmp_path, written.printed("argonne.txt"))
    says(found, "engine=megatron-deepspeed gbs=256 seq_len=4096 steps=3 tflops_gpu=32.1")
    says(found, "step_s=14.3001")
    assert "1 skipped" in found["step_rule"]


def test_bert_is_no_model_that_is_predicted(tmp_path: Path) -> None:
    text = written.megatron(BLOOM[0]).replace("| loss scale", "| sop loss: 8.1E-01 | loss scale")
    assert "sop loss" in text
    found = one(tmp_path, text, hardware="a100-80gb")
    assert (found["status"], found.missing) == ("incomplete", ("dense-model",))


# --- exports of several runs


@pytest.mark.parametrize(
    ("name", "text", "step_s", "unread"),
    [
        ("a.csv", 'Step;"iteration-time"\n1;"9,5"\n2;"2,5"\n3;"2,75"\n4;"2,625"\n', 2.625, 0),
        ("a.csv", 'Step,"iteration-time"\n1,"9.5"\n2,"2.5"\n3,"2,7"\n4,"2.5"\n', 2.5, 1),
        ("a.json", '[{"_step": 1, "step-time": 9}, {"_step": 2, "step-time": 2.5}]', 2.5, 0),
    ],
)  # fmt: skip
def test_decimal_commas_and_lists_of_objects(tmp_path, name, text, step_s, unread) -> None:
    (tmp_path / name).write_text(text)
    answer = collected(tmp_path / name, out=tmp_path / "rows.csv")
    (row,) = answer.rows_read
    assert (float(row["step_s"]), answer.files[0].book.unread) == (step_s, unread)


def test_every_run_of_an_export_is_a_row(tmp_path: Path) -> None:
    """W&B's CSV has a column for each run and metric, with its smallest and largest beside it."""
    log = tmp_path / "chart.csv"
    names = [
        f"{run} - iteration-time{end}" for run in ("tp2", "tp4") for end in ("", "__MIN", "__MAX")
    ]
    lines = [",".join(f'"{name}"' for name in ("Step", *names))]
    for step in range(1, 7):
        late = "" if step < 3 else "4.5"
        lines.append(f'"{step}","{9 if step == 1 else 2.5}","1","99","{late}","{late}","{late}"')
    log.write_text("\n".join([*lines, ""]))
    found = collected(log, out=tmp_path / "rows.csv").rows_read
    assert [(r["row_id"], float(r["step_s"]), r["steps"]) for r in found] == [
        ("tp2", 2.5, "5"), ("tp4", 4.5, "3"),
    ]  # fmt: skip


def test_several_shapes_are_no_one_run(tmp_path: Path) -> None:
    """A new configuration in the middle of a log is another run, whoever prints it."""
    text = HYDRA + "".join(f"{bar(n, f'{n - 1}.000', 2.5)}\n" for n in (1, 2, 3))
    text += HYDRA.replace("micro_batch_size: 4", "micro_batch_size: 8")
    text += "".join(f"{bar(n, f'{n - 1}.000', 3.5)}\n" for n in (1, 2, 3))
    found = rows(tmp_path, text)
    assert [(r["mbs"], float(r["step_s"])) for r in found] == [("4", 2.5), ("8", 3.5)]
