"""llm-analysis (https://github.com/cli99/llm-analysis) answers the exam.

    pip install llm-analysis fire
    python exam/adapters/llm_analysis_entrant.py exam/published

Writes entrants/llm-analysis.csv and its card. Its own GPU files are taken, and a FLOP efficiency of
0.5. It has no context parallelism: such tasks are declined, as are those that it refuses.
"""

from __future__ import annotations

import csv
import logging
import sys
from pathlib import Path

from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import DtypeConfig, ModelConfig, ParallelismConfig, get_gpu_config_by_name

GPUS = {"a100-40gb": "a100-sxm-40gb", "a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm-80gb",
        "h100-94gb": "h100-sxm-80gb"}  # fmt: skip
RECOMPUTE = {"none": ActivationRecomputation.NONE, "selective": ActivationRecomputation.SELECTIVE,
             "full": ActivationRecomputation.FULL}  # fmt: skip
ZERO = {f"zero{stage}": zero for stage, zero in enumerate(DSZeRO)}
CARD = """\
name = "llm-analysis"
by = "Cheng Li"
version = "0.2.2"
how = "LLMAnalysis.training at a FLOP efficiency of 0.5, by exam/adapters/llm_analysis_entrant.py"
saw = "not known: its authors may have seen the tables"
url = "https://github.com/cli99/llm-analysis"
"""


def answer(task: dict[str, str]) -> dict[str, float] | None:
    """None: declined."""
    if int(task["cp"] or 1) > 1 or task["hardware"] not in GPUS or task["precision"] == "fp8":
        return None
    ffn, hidden, gated = int(task["d_ff"]), int(task["d_model"]), task["family"] == "llama"
    model = ModelConfig(
        name=task["model"], num_layers=int(task["n_layers"]), n_head=int(task["n_heads"]),
        hidden_dim=hidden, vocab_size=int(task["vocab"]), max_seq_len=int(task["seq_len"]),
        num_key_value_heads=int(task["n_kv_heads"]), ffn_embed_dim=ffn,
        expansion_ratio=ffn / hidden, model_type="llama" if gated else "gpt2",
    )  # fmt: skip
    tp, pp, dp = (int(task[axis] or 1) for axis in ("tp", "pp", "dp"))
    gpu = get_gpu_config_by_name(GPUS[task["hardware"]])
    layout = ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=dp)
    planner = LLMAnalysis(model, gpu, DtypeConfig(), layout, flops_efficiency=0.5,
                          hbm_memory_efficiency=1.0)  # fmt: skip
    found = planner.training(
        batch_size_per_gpu=int(task["mbs"]), global_batch_size=int(task["gbs"]),
        seq_len=int(task["seq_len"]), total_num_tokens=10**9,
        activation_recomputation=RECOMPUTE[task["act_ckpt"]], ds_zero=ZERO[task["sharding"]],
        flash_attn=task["attention"] == "flash", mlp_gated_linear_units=gated,
    )  # fmt: skip
    return {"step_s": found["latency_per_iter"]}


def main() -> None:
    logging.disable(logging.CRITICAL)
    folder = Path(sys.argv[1])
    with (folder / "tasks.csv").open(newline="") as stream:
        tasks = list(csv.DictReader(stream))
    declined: dict[str, int] = {}
    with (folder / "entrants" / "llm-analysis.csv").open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["row_id", "step_s"])
        for task in tasks:
            try:
                said = answer(task)
                why = "cannot be expressed"
            except (AssertionError, KeyError, ValueError, ZeroDivisionError) as error:
                said, why = None, f"{type(error).__name__}: {error}"[:60]
            if said is None:
                declined[why] = declined.get(why, 0) + 1
            writer.writerow([task["row_id"], "" if said is None else f"{said['step_s']:.6g}"])
    (folder / "entrants" / "llm-analysis.toml").write_text(CARD)
    print(f"{len(tasks) - sum(declined.values())} of {len(tasks)} tasks answered")
    for why, count in sorted(declined.items(), key=lambda one: -one[1]):
        print(f"  {count} declined: {why}")


if __name__ == "__main__":
    main()
