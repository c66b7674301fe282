"""Logs as engines print them, written from rows of the reference schema.

The prints are those that docs/collect.md quotes; the numbers are the rows'.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Row = Mapping[str, str]
ARGUMENTS = "------------------------ arguments ------------------------"
END_OF_ARGUMENTS = "-------------------- end of arguments ---------------------"


def printed(name: str) -> str:
    """A configuration as an engine prints it."""
    return (Path(__file__).parent / "printed" / name).read_text()


def megatron(row: Row, *, deepspeed: bool = True) -> str:
    """A start, the argument list, two iterations and the memory line; or how it ended."""
    lines = [
        "using world size: {}, data-parallel-size: {}, tensor-model-parallel size: {}, "
        "pipeline-model-parallel size: {}".format(*(row[n] for n in ("n_gpus", "dp", "tp", "pp"))),
        "using torch.float16 for parameters ...",
        ARGUMENTS,
        *(
            f"  {name} {'.' * (48 - len(name))} {value}"
            for name, value in _arguments(row, deepspeed)
        ),
        END_OF_ARGUMENTS,
        "setting number of micro-batches to constant 128",
        f" > padded vocab (size: 250680) with 200 dummy tokens (new size: {row['vocab']})",
        "[before the start of training step] datetime: 2022-02-17 20:01:11",
    ]
    if row["status"] != "ok":
        return "\n".join([*lines, *ENDS[row["status"]], ""])
    step_s, batch = float(row["step_s"]), int(row["gbs"])
    lines.append(iteration(1, 1.7 * step_s, batch, row))
    lines.append(iteration(2, step_s, batch, row))
    if row["mem_gb"]:
        used = 1024 * float(row["mem_gb"])
        lines.append(
            f"[Rank 0] (after 2 iterations) memory (MB) | allocated: {used / 2} | max allocated: "
            f"{used / 1.1} | reserved: {used} | max reserved: {used}"
        )
    return "\n".join([*lines, ""])


ENDS = {
    "oom": (
        "Traceback (most recent call last):",
        "RuntimeError: CUDA out of memory. Tried to allocate 784.00 MiB (GPU 0; 79.17 GiB total)",
    ),
    "fail": ("Traceback (most recent call last):", "RuntimeError: shape '[1]' is invalid"),
    "hang": (
        "[E ProcessGroupNCCL.cpp:587] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1801002 milliseconds",
    ),
}


def told(args: Mapping[str, str], text: str) -> str:
    """Megatron's log with more arguments in its list."""
    dump = "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in args.items())
    return text.replace("  num_layers ", f"{dump}  num_layers ", 1)


def iteration(step: int, step_s: float, batch: int, row: Row, *, unit: str = "s") -> str:
    seconds = f"{step_s:.2f}" if unit == "s" else f"{1000 * step_s:.1f}"
    samples = step * batch
    length = int(row["seq_len"]) if row.get("seq_len") else 2048
    tflops = f" TFLOPs: {float(row['tflops_gpu']):.2f} |" if row.get("tflops_gpu") else ""
    return (
        f" iteration {step:8d}/   95367 | consumed samples: {samples:12d} | consumed tokens: "
        f"{samples * length:12d} | elapsed time per iteration ({unit}): {seconds} | learning rate: "
        f"3.787E-06 | global batch size: {batch:5d} | lm loss: {11.0 - 0.01 * step:.6E} | loss "
        f"scale: 4096.0 | grad norm: {1.5 + 0.001 * step:.3f} | num zeros: 0.0 | number of skipped "
        f"iterations:   0 | "
        f"number of nan iterations:   0 | samples per second: {batch / step_s:.3f} |{tflops}"
    )


def _arguments(row: Row, deepspeed: bool) -> list[tuple[str, object]]:
    full, (method, _, blocks) = row["act_ckpt"] == "full", row["act_ckpt"].partition("-")
    granularity = {"none": "None", "block": "full"}.get(method, row["act_ckpt"])
    args: dict[str, object] = {
        "adam_beta1": 0.9,
        "bf16": row["precision"] == "bf16",
        "fp16": row["precision"] == "fp16",
        "checkpoint_activations": full,
        "data_parallel_size": row["dp"],
        "data_path": "['/data/oscar.en']",
        "ffn_hidden_size": row["d_ff"],
        "global_batch_size": row["gbs"],
        "hidden_size": row["d_model"],
        "log_interval": 1,
        "masked_softmax_fusion": row["attention"] == "fused",
        "micro_batch_size": row["mbs"],
        "num_attention_heads": row["n_heads"],
        "num_layers": row["n_layers"],
        "padded_vocab_size": "None",
        "pipeline_model_parallel_size": row["pp"],
        "seq_length": row["seq_len"],
        "tensor_model_parallel_size": row["tp"],
        "train_samples": 220_000_000,
        "use_a_name_that_is_longer_than_forty_eight_characters": "True",
        "world_size": row["n_gpus"],
        "virtual_pipeline_model_parallel_size": "None",
    }
    if deepspeed:
        args |= {"deepspeed": True, "deepspeed_activation_checkpointing": full}
        args["zero_stage"] = int(row["sharding"][-1])
    else:
        args |= {
            "context_parallel_size": row["cp"],
            "group_query_attention": row["n_kv_heads"] != row["n_heads"],
            "num_query_groups": row["n_kv_heads"],
            "recompute_granularity": granularity,
            "recompute_method": "uniform" if full else method if blocks else "None",
            "recompute_num_layers": blocks or "None",
            "sequence_parallel": row["sequence_parallel"] == "1",
            "swiglu": row["family"] == "llama",
            "transformer_impl": "transformer_engine",
            "untie_embeddings_and_output_weights": row["tied"] == "0",
            "use_distributed_optimizer": row["sharding"] == "zero1",
        }
    return sorted(args.items(), key=lambda pair: pair[0].lower())


def titan(tps: list[int], *, config: bool = True, ranks: int = 1) -> str:
    """8 GPUs, FSDP; `tps` of the first step and then of every tenth."""
    head = "[titan] 2025-12-01 10:00:00,123 - root - INFO - "
    said = printed("torchtitan-config.txt") if config else ""
    text = printed("torchtitan.txt").replace("{config}", said).splitlines()
    for at, rate in enumerate(tps):
        step = 1 if at == 0 else at * 10
        text += [
            f"[rank{rank}]:{head}\x1b[31mstep: {step:2}  \x1b[32mloss: {12.0 - at / 10:8.5f}  "
            f"\x1b[38;2;180;60;0mgrad_norm: {1.5:7.4f}  \x1b[36mmemory: {52.3 + rank:5.2f}GiB"
            f"(66.12%)  \x1b[34mtps: {rate - rank:,}  \x1b[36mtflops: {rate * 0.0579:,.2f}  "
            "\x1b[35mmfu: 33.10%\x1b[39m"
            for rank in range(ranks)
        ]
    return "\n".join([*text, ""])


def nanotron(step_ms: list[float]) -> str:
    """8 GPUs as dp2 pp2 tp2, three digits and a letter in every number."""
    head = "07/03/2024 14:12:03 [INFO|DP=0|PP=0|TP=0|ip-26-0-161-153]: "
    lines = [head + line for line in printed("nanotron.txt").splitlines()]
    for step, elapsed in enumerate(step_ms, start=1):
        lines.append(
            f"{head}iteration: {step} / 20 | consumed_tokens: {human(step * 1048576)} | "
            f"elapsed_time_per_iteration_ms: {human(elapsed)} | tokens_per_sec: "
            f"{human(1048576e3 / elapsed)} | tokens_per_sec_per_gpu: {human(131072e3 / elapsed)} | "
            f"global_batch_size: 256 | lm_loss: {human(11 - step / 10)} | lr: 0.0003 | "
            f"model_tflops_per_gpu: {human(231.3)} | hardware_tflops_per_gpu: 231 | "
            "grad_norm: 1.5 | "
            f"cuda_memory_allocated: {human(9.13e9)} | cuda_max_memory_reserved: {human(21.5e9)}"
        )
    return "\n".join([*lines, ""])


def human(value: float) -> str:
    """Three digits, and K, M, G for thousands."""
    rounded, power = float(f"{value:.3g}"), 0
    while abs(rounded) >= 1000:
        rounded, power = rounded / 1000.0, power + 1
    return f"{rounded:f}".rstrip("0").rstrip(".") + ["", "K", "M", "G", "T"][power]


def composer(rates: list[float]) -> str:
    lines = ["2024-05-01 10:00:00,000: rank0[412][MainThread]: INFO: Logging config"]
    lines += [printed("composer.yaml")]
    for batch, rate in enumerate(rates, start=1):
        lines += [
            f"[batch={batch}/30]:",
            f"\t Train time/batch: {batch - 1}",
            f"\t Train loss/train/total: {12.0 - batch / 10:.4f}",
            "\t Train memory/peak_reserved_mem: 61.2340",
        ]
        if rate:
            lines += [
                f"\t Train throughput/batches_per_sec: {rate * 8 / 2048 / 96:.4f}",
                f"\t Train throughput/device/tokens_per_sec: {rate:.4f}",
            ]
    return "\n".join([*lines, ""])
