"""Logs as people publish them: old releases, forks, launchers' marks, pasted pieces. The shapes are
those of published logs; names and numbers are ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.logs.book import read_log
from fourfold.spec.nccl_tests import unlabelled
from tests.logs import written
from tests.logs.reading import collected, one, rows, says

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


# --- NeMo and Megatron-Bridge


def bar(count: int, step: str, seconds: float) -> str:
    return (
        f"Epoch 0: :   1%|          | {count}/90000 [43:24:54<00:00, v_num=, reduced_train_loss="
        f"2.139, global_step={step}, consumed_samples=2.56e+5, train_step_timing in s={seconds}]"
    )


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


BRIDGE, YAML = written.printed("bridge.txt"), written.printed("bridge.yaml")
TITAN_03 = written.printed("torchtitan-0.3.txt")


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


def test_two_starts_of_torchtitan_03_are_two_runs(tmp_path: Path) -> None:
    found = rows(tmp_path, TITAN_03 + TITAN_03.replace("tps: 5,", "tps: 6,"))
    assert [float(row["tokens_s_gpu"]) for row in found] == [5890, 6890]


# --- DeepSpeed and the Hugging Face Trainer


def test_old_releases_count_micro_batches_so_that_the_clock_says_more(tmp_path: Path) -> None:
    lines = [
        f"[2022-03-11 02:0{6 + n // 60}:{n % 60:02d},985] [INFO] [logging.py:69:log_dist] "
        f"[Rank 0] step={n * 10}, skipped=2, lr=[5e-05], mom=[[0.9, 0.999]]\n"
        f"[2022-03-11 02:0{6 + n // 60}:{n % 60:02d},985] [INFO] [timer.py:189:stop] "
        f"0/{n * 40}, SamplesPerSec=83.486, MemAllocated=0.26GB, MaxMemAllocated=9.02GB\n"
        for n in range(1, 90, 15)
    ]
    row = one(tmp_path, written.printed("deepspeed.txt") + "".join(lines))
    says(row, "step_s=0.1 mem_gb=9.02")  # 150 steps in 15 s


@pytest.mark.parametrize("has_block", [True, False])
def test_the_trainer_by_its_progress(tmp_path: Path, has_block: bool) -> None:
    def progress(step: int, rate: str, total: int = 1500, before: str = "") -> str:
        share = 100 * step // total
        return f"{before} {share:2d}%|█▏        | {step}/{total} [00:52<45:12,  {rate}]\r"

    loss = "{'loss': 2.8957, 'grad_norm': 0.888, 'learning_rate': 9.9e-05, 'epoch': 0.0}\n"
    text = (written.printed("trainer.txt") if has_block else "") + "".join(
        [
            progress(7, "3.59s/it", total=7, before="Loading checkpoint shards: 100%"),
            progress(1, "9.99s/it"), progress(2, "5.10s/it"), loss, progress(2, "5.10s/it"),
            *(progress(step, "4.50s/it") for step in range(3, 20)),
            progress(3, "1.20s/it", total=40),  # an evaluation
            "{'train_runtime': 6800.1, 'train_samples_per_second': 14.1, 'epoch': 1.0}\n",
        ]
    )  # fmt: skip
    row = one(tmp_path, text)
    says(row, "engine=hf-trainer step_s=4.5")
    if has_block:
        says(row, "n_gpus=8 dp=8 mbs=2 gbs=64")
        says(row, "n_layers=32 d_model=4096 n_kv_heads=8 vocab=128256 tied=0")


def test_a_drift_within_a_log_is_said(tmp_path: Path) -> None:
    steps = [
        f" iteration {n:4d}/ 100 | elapsed time per iteration (ms): {86_000 + 200 * n} | loss: 1 |"
        for n in range(1, 76)
    ]
    row = one(tmp_path, "\n".join([*steps, ""]))
    assert (
        "steps drift from 88.1 to 99.3 s within the log: the median is of neither end" in row.notes
    )
    steady = one(tmp_path, "\n".join([*steps[:12], ""]))
    assert not steady.notes


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
