"""CloudAI's training_report.json: one document with the resolved configuration of a run and its
steps (schema 1.0 and before it, when it had no version)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.logs.book import Book
from fourfold.logs.lines import open_text
from fourfold.logs.nested import number, whole
from fourfold.logs.series import StepLine
from fourfold.spec.layout import AXES

_MOST_CHARS = 2**26
# Column of the reference schema -> field of the report's `config`.
_CONFIG = {
    "row_id": "test_id", "model": "model_name", "n_layers": "num_layers", "d_model": "hidden_size",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_query_groups", "d_ff": "ffn_hidden_size",
    "seq_len": "seq_length", "n_gpus": "world_size", "gpus_per_node": "gpus_per_node",
    "vpp": "virtual_pipeline_parallel_size", "sequence_parallel": "sequence_parallel",
    "mbs": "micro_batch_size", "gbs": "global_batch_size",
}  # fmt: skip
_AXES = ("pipeline", "data", "context", "tensor")
_CONFIG |= {axis: f"{word}_parallel_size" for axis, word in zip(AXES, _AXES, strict=True)}
_STACKS = {"megatronbridge": "megatron-bridge", "megatronrun": "megatron-lm", "nemorun": "nemo"}
_FAMILIES = {"rmsnorm": "llama", "layernorm": "gpt"}
_AXES_OF_ONE = ("context_parallel_size", "virtual_pipeline_parallel_size")


def document(path: str | Path) -> dict[str, Any] | None:
    """The report, if the file is one."""
    if Path(path).suffix.lower() != ".json":
        return None
    with open_text(path) as stream:
        text = stream.read(_MOST_CHARS)
    if '"step_time_sec"' not in text or '"config"' not in text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_report = isinstance(found, dict) and isinstance(found.get("steps"), list)
    return found if is_report and isinstance(found.get("config"), dict) else None


def read(report: Mapping[str, Any], book: Book) -> None:
    config = report["config"]
    facts = {column: config.get(name) for column, name in _CONFIG.items()}
    facts |= {column: 1 for column, name in _CONFIG.items()
              if name in _AXES_OF_ONE and name in config and config[name] is None}  # fmt: skip
    template = str(config.get("test_template_name", "")).lower()
    facts["stack"] = _STACKS.get(template, template)
    if str(config.get("position_embedding_type")).lower() != "none":
        facts["family"] = _FAMILIES.get(str(config.get("normalization")).lower())
    if config.get("fp8"):
        facts["precision"] = "fp8"
    if whole(str(config.get("num_experts"))):
        facts["unmodelled"] = f"{config['num_experts']} experts"
    plain = {n: v for n, v in facts.items() if isinstance(v, str | int | float)}
    book.fact(**plain)
    slow = _profiled(config)
    for at, step in enumerate(report["steps"], start=1):
        line = _step(step) if isinstance(step, dict) else None
        if line is None:
            book.skip(at, str(step))
            continue
        if line.step in slow:
            book.pause()
        book.step(line)
    book.lines = len(report["steps"])


def _profiled(config: Mapping[str, Any]) -> range:
    """Steps under a profiler, and those right after, are slower than the run."""
    names = ("profiling_start_step", "profiling_stop_step")
    first, last = (whole(str(config.get(name))) for name in names)
    if not config.get("profiling_enabled") or first is None or last is None:
        return range(0)
    return range(first, last + (whole(str(config.get("exclude_post_profiling_steps"))) or 0) + 1)


def _step(step: Mapping[str, Any]) -> StepLine | None:
    at, seconds = whole(str(step.get("iteration"))), number(str(step.get("step_time_sec")))
    if at is None or at < 0 or seconds is None or seconds <= 0:
        return None
    reserved = number(str(step.get("memory_reserved_bytes")))
    return StepLine(
        step=at,
        seconds=seconds,
        loss=str(step.get("loss", "")),
        tflops=number(str(step.get("tflops_per_gpu"))),
        mem_gib=reserved / 2**30 if reserved else None,
    )
