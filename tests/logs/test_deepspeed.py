"""Logs of plain DeepSpeed and of the Hugging Face Trainer, in the words that both print (DeepSpeed
issues 1825, 2629, 3742, 5222 and 5779, transformers 25027, LlamaFactory 4783, peft 1806)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.logs.row import Row, shown_layout
from tests.logs import written
from tests.logs.reading import collected, says

SETTINGS, TRAINER = written.printed("deepspeed.txt"), written.printed("trainer.txt")


def row_of(tmp_path: Path, text: str, **fields: str) -> Row:
    (tmp_path / "run.log").write_text(text)
    (row,) = collected(tmp_path / "run.log", out=tmp_path / "out.csv", **fields).rows_read
    return row


def speed(step: int, rate: float) -> str:
    return (
        f"[2024-03-04 12:10:{step % 60:02d},000] [INFO] [timer.py:258:stop] "
        f"epoch=0/micro_step={4 * step}/global_step={step}, RunningAvgSamplesPerSec=60.1, "
        f"CurrSamplesPerSec={rate}, MemAllocated=17.94GB, MaxMemAllocated=54.06GB\n"
    )


def bar(step: int, rate: str, total: int = 1500, before: str = "") -> str:
    return f"{before} {100 * step // total:2d}%|█▏        | {step}/{total} [00:52<45:12,  {rate}]\r"


def test_deepspeed_by_the_speed_it_prints(tmp_path: Path) -> None:
    text = SETTINGS + "".join(
        speed(step, 64.0 if step > 10 else 32.0) for step in range(10, 90, 10)
    )
    row = row_of(tmp_path, text)
    says(row, "stack=deepspeed sharding=zero3 precision=bf16 n_gpus=8 dp=8 tp=1 pp=1 mbs=4")
    says(row, "gbs=128 step_s=2 mem_gb=54.06")
    assert "seq_len" in row.missing


def test_old_releases_count_micro_batches_so_that_the_clock_says_more(tmp_path: Path) -> None:
    lines = [
        f"[2022-03-11 02:0{6 + n // 60}:{n % 60:02d},985] [INFO] [logging.py:69:log_dist] "
        f"[Rank 0] step={n * 10}, skipped=2, lr=[5e-05], mom=[[0.9, 0.999]]\n"
        f"[2022-03-11 02:0{6 + n // 60}:{n % 60:02d},985] [INFO] [timer.py:189:stop] "
        f"0/{n * 40}, SamplesPerSec=83.486, MemAllocated=0.26GB, MaxMemAllocated=9.02GB\n"
        for n in range(1, 90, 15)
    ]
    row = row_of(tmp_path, SETTINGS + "".join(lines))
    says(row, "step_s=0.1 mem_gb=9.02")  # 150 steps in 15 s


@pytest.mark.parametrize("has_block", [True, False])
def test_the_trainer_by_its_bar(tmp_path: Path, has_block: bool) -> None:
    loss = "{'loss': 2.8957, 'grad_norm': 0.888, 'learning_rate': 9.9e-05, 'epoch': 0.0}\n"
    text = (TRAINER if has_block else "") + "".join(
        [
            bar(7, "3.59s/it", total=7, before="Loading checkpoint shards: 100%"),
            bar(1, "9.99s/it"), bar(2, "5.10s/it"), loss, bar(2, "5.10s/it"),
            *(bar(step, "4.50s/it") for step in range(3, 20)),
            bar(3, "1.20s/it", total=40),  # an evaluation
            "{'train_runtime': 6800.1, 'train_samples_per_second': 14.1, 'epoch': 1.0}\n",
        ]
    )  # fmt: skip
    row = row_of(tmp_path, text)
    says(row, "stack=hf-trainer step_s=4.5")
    if has_block:
        says(row, "n_gpus=8 dp=8 mbs=2 gbs=64")
        says(row, "n_layers=32 d_model=4096 n_kv_heads=8 vocab=128256 tied=0")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ('"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,',
         "experts=8 experts_per_token=2 expert_ffn=14336 shared_ffn= dense_layers= family=mixtral"),
        ('"model_type": "deepseek_v3", "n_routed_experts": 64, "num_experts_per_tok": 6, '
         '"moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1, '
         '"q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128, '
         '"qk_rope_head_dim": 64, "v_head_dim": 128,',
         "experts=64 experts_per_token=6 expert_ffn=1408 shared_ffn=2816 dense_layers=1 "
         "attn_kind=mla kv_lora_rank=512 head_dim=192 family=deepseek"),
    ],
)  # fmt: skip
def test_the_trainers_model_has_the_experts_of_its_config(
    tmp_path: Path, config: str, wanted: str
) -> None:
    said = TRAINER.replace('"model_type": "llama",', config.replace(", ", ",\n  "))
    end = "{'train_runtime': 6750.0, 'train_samples_per_second': 14.2, 'epoch': 1.0}\n"
    says(row_of(tmp_path, said + end), wanted + " ep=1 routing=natural")


@pytest.mark.parametrize(
    ("fsdp", "sharding"),
    [("[<FSDPOption.FULL_SHARD: 'full_shard'>, <FSDPOption.AUTO_WRAP: 'auto_wrap'>]", "zero3"),
     ("[<FSDPOption.SHARD_GRAD_OP: 'shard_grad_op'>]", "zero2"), ("full_shard", "zero3"),
     ("[<FSDPOption.HYBRID_SHARD_ZERO2: 'hybrid_shard_zero2'>]", "zero2"), ("[]", ""), ("None", ""),
     ("True,\nfsdp_config={'reshard_after_forward': True, 'xla': False}", "zero3"),
     ("True,\nfsdp_config={'reshard_after_forward': False, 'xla': False}", "zero2"),
     ("True,\nfsdp_config={'min_num_params': 0, 'xla': False}", "zero3")],
)  # fmt: skip
def test_the_trainer_says_how_fsdp_shards(tmp_path: Path, fsdp: str, sharding: str) -> None:
    """As transformers 4 and 5 print it. None says nothing: accelerate's own file may shard."""
    args = f"_n_gpu=1,\nbf16=True,\ndeepspeed=None,\nfp16=False,\nfsdp={fsdp},\n"
    said = f"Training/evaluation parameters TrainingArguments(\n{args})\n"
    end = "{'train_runtime': 6750.0, 'train_samples_per_second': 14.2, 'epoch': 1.0}\n"
    says(row_of(tmp_path, said + TRAINER + end), f"sharding={sharding} precision=bf16 dp=8")


def test_the_trainer_without_a_bar_by_its_runtime(tmp_path: Path) -> None:
    end = "{'train_runtime': 6750.0, 'train_samples_per_second': 14.2, 'epoch': 1.0}\n"
    row = row_of(tmp_path, TRAINER + end)
    assert row["step_s"] == "4.5"


@pytest.mark.parametrize(
    "said",
    [SETTINGS.replace('"stage": 3,', '"stage": 3,\n "offload_optimizer": {"device": "cpu"},'),
     "TrainingArguments(\n_n_gpu=1,\nfsdp=[<FSDPOption.OFFLOAD: 'offload'>],\n)\n"],
)  # fmt: skip
def test_a_run_that_keeps_states_on_the_host_is_not_fitted(tmp_path: Path, said: str) -> None:
    assert "no-offload" in row_of(tmp_path, said + TRAINER).missing
    assert "no-offload" not in row_of(tmp_path, SETTINGS + TRAINER).missing


@pytest.mark.parametrize(
    ("config", "words"),
    [("mistral\",\n  \"sliding_window\": 4096,", "windows of 4096 tokens"),
     ("llama\",\n  \"quantization_config\": {\"load_in_4bit\": true},", "quantised weights"),
     ("mamba2\",", "not a supported model type")],
)  # fmt: skip
def test_a_model_that_is_not_dense_softmax_attention_is_not_fitted(
    tmp_path: Path, config: str, words: str
) -> None:
    row = row_of(tmp_path, TRAINER.replace('llama",', config))
    assert "dense-model" in row.missing
    assert words in row["unmodelled"]


@pytest.mark.parametrize(("seq_len", "is_covered"), [("4096", True), ("8192", False)])
def test_windows_matter_to_longer_sequences(
    tmp_path: Path, seq_len: str, *, is_covered: bool
) -> None:
    said = TRAINER.replace('llama",', 'mistral",\n  "sliding_window": 4096,')
    assert ("dense-model" in row_of(tmp_path, said, seq_len=seq_len).missing) != is_covered


def test_a_run_that_trains_adapters_is_not_fitted(tmp_path: Path) -> None:
    said = "trainable params: 4,194,304 || all params: 8,034,455,552 || trainable%: 0.0522\n"
    assert "all-weights" in row_of(tmp_path, said + TRAINER).missing


def test_the_loss_of_a_router_says_that_there_are_experts(tmp_path: Path) -> None:
    steps = "".join(
        f" iteration        {step}/   100 | elapsed time per iteration (ms): 900.0 | global batch "
        "size:     8 | lm loss: 1.1E+01 | load_balancing_loss: 1.0E+00 |\n"
        for step in range(1, 5)
    )
    row = row_of(tmp_path, steps, n_layers="8")
    assert "dense-model" in row.missing


def test_a_drift_within_a_log_is_said(tmp_path: Path) -> None:
    steps = [
        f" iteration {n:4d}/ 100 | elapsed time per iteration (ms): {86_000 + 200 * n} | loss: 1 |"
        for n in range(1, 76)
    ]
    row = row_of(tmp_path, "\n".join([*steps, ""]))
    assert (
        "steps drift from 88.1 to 99.3 s within the log: the median is of neither end" in row.notes
    )
    steady = row_of(tmp_path, "\n".join([*steps[:12], ""]))
    assert not steady.notes


def test_replicas_are_kept(tmp_path: Path) -> None:
    mesh = "- INFO - Building 3-D device mesh with ['dp_replicate', 'dp_shard', 'cp'], [2, 4, 2]\n"
    step = "- INFO - step: {}  loss: 8.0  memory: 45.00GiB(56.00%)  tps: 5,000  tflops: 290.00\n"
    text = mesh + "".join(step.format(n) for n in range(1, 5))
    for fields in ({}, {"dp": "2x4"}):
        row = row_of(tmp_path, text, **fields)
        assert (row["dp"], row["note"]) == ("8", "zero3 over 8 ranks")
        assert shown_layout(row) == "pp1 dp2x4 cp2 tp1"


def test_an_engine_on_top_of_deepspeed_keeps_its_log(tmp_path: Path) -> None:
    steps = "".join(
        speed(step, 8.0)
        + f" samples/sec: 7.799 | iteration       {step}/   10000 | elapsed time per iteration "
        "(ms): 4103.1 | learning rate: 2.111E-06 | lm_loss: 1.118665E+01 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |\n"
        for step in range(1, 9)
    )
    row = row_of(tmp_path, SETTINGS + steps)
    says(row, "step_s=4.1031 sharding=zero3")
    assert row["stack"].startswith("megatron")
