"""Composer and llm-foundry: a block for each batch, `[batch=1/10]:` and `Train NAME: VALUE` below.

Throughput is a rolling mean over the SpeedMonitor's window. llm-foundry prints its whole YAML.
"""

from __future__ import annotations

import re

from fourfold.logs.book import Book
from fourfold.logs.lines import Line
from fourfold.logs.nested import Flat, Yaml, fsdp_sharding, number, whole, words_of
from fourfold.logs.series import StepLine

_BATCH = re.compile(
    r"\[(?:epoch=[0-9]{1,9}\]\[)?batch=([0-9]{1,12})(?:/[0-9]{1,12})?\]:?(\s*$|\s+Train .*)"
)
_METRIC = re.compile(
    r"^\s*(?:Train )?((?:throughput|memory|loss|time|trainer)/[\w/.-]{1,80}): (\S{1,60})\s*$"
)
# The same on one line, as people paste it.
_METRICS = re.compile(r"\b((?:throughput|memory|loss|trainer)/[\w/.-]{1,80}): (\S{1,60})(?=\s|$)")
_CONSOLE = re.compile(r"(num_nodes|num_gpus_per_node): ([0-9]{1,7})$")
_KEY = re.compile(r"^[a-z_]{2,40}:( \S.*)?$")
_PRECISION = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32", "amp_fp8": "fp8"}


class Composer:
    name = "llm-foundry"
    steps = r"\[batch=[0-9]+"

    def __init__(self, book: Book) -> None:
        self.book = book
        self._yaml: Yaml | None = None
        self._step: int | None = None
        self._metrics: Flat = {}
        self._sizes: dict[str, int] = {}

    def take(self, line: Line) -> bool:
        text = line.text
        if "batch=" in text and (found := _BATCH.search(text)):
            self._close()
            self._yaml_done()
            self._step = int(found.group(1))
            self._metrics = dict(_METRICS.findall(found.group(2))) if line.is_whole else {}
            return True
        if text.startswith("num_") and (found := _CONSOLE.match(text)):
            self._gpus(found.group(1), int(found.group(2)))
        if self._step is not None and line.is_whole and (found := _METRIC.match(text)):
            self._metrics[found.group(1)] = found.group(2).strip('"')
            return True
        if self._yaml is not None:
            if self._yaml.feed(text):
                return True
            self._yaml_done()
        if _KEY.match(text):
            self._yaml = Yaml()
            self._yaml.feed(text)
        return False

    def _gpus(self, name: str, count: int) -> None:
        """Composer's own list: nodes, and GPUs of each."""
        self._sizes[name] = count
        if len(self._sizes) == 2:
            nodes, each = self._sizes["num_nodes"], self._sizes["num_gpus_per_node"]
            self.book.fact(n_gpus=str(nodes * each))

    def _close(self) -> None:
        """The block is whole when the next one begins, or the log ends."""
        if self._step is None:
            return
        metrics, step = self._metrics, self._step
        self._step, self._metrics = None, {}
        rate = number(metrics.get("throughput/device/tokens_per_sec"))
        batches = number(metrics.get("throughput/batches_per_sec"))
        if not rate and not batches:
            return  # the window is not full yet
        micro = whole(metrics.get("trainer/device_train_microbatch_size"))
        self.book.fact(mbs=str(micro or ""))
        memory = number(metrics.get("memory/peak_reserved_mem"))
        self.book.step(
            StepLine(
                step=step,
                tokens_s_gpu=rate or None,
                seconds=None if rate else 1.0 / (batches or 1.0),
                loss=metrics.get("loss/train/total", ""),
                mem_gib=memory * 1e9 / 2**30 if memory else None,
            ),
        )

    def _yaml_done(self) -> None:
        if self._yaml is None:
            return
        flat, self._yaml = self._yaml.flat, None
        if "model.name" in flat and ("max_seq_len" in flat or "global_train_batch_size" in flat):
            self.book.begin()
            self.book.fact(**facts_of(flat))

    def finish(self) -> None:
        self._yaml_done()
        self._close()


def facts_of(flat: Flat) -> Flat:
    hidden, heads = whole(flat.get("model.d_model")), flat.get("model.n_heads", "")
    ratio = number(flat.get("model.expansion_ratio")) or 4.0
    gpus = flat.get("n_gpus", "")
    kv = flat.get("model.attn_config.kv_n_heads") or heads
    pure = flat.get("fsdp_config.mixed_precision", "").upper()
    tp = whole(flat.get("tp_config.tensor_parallel_degree")) or 1
    kernel = flat.get("model.attn_config.attn_impl", "flash")
    full = flat.get("fsdp_config.activation_checkpointing", "false").lower()
    is_mpt = flat.get("model.name") == "mpt_causal_lm"  # else the YAML names a model, no sizes
    tied = flat.get("model.tie_word_embeddings", "true").lower() != "false"
    return {
        "family": "mpt" if is_mpt else "",
        "unmodelled": "experts" if "moe" in flat.get("model.ffn_config.ffn_type", "") else "",
        "n_layers": flat.get("model.n_layers", ""),
        "d_model": str(hidden or ""),
        "n_heads": heads,
        "n_kv_heads": kv,
        "d_ff": str(int(ratio * hidden)) if hidden else "",
        "vocab": flat.get("model.vocab_size", ""),
        "tied": str(int(tied)) if is_mpt else "",
        "seq_len": flat.get("max_seq_len", flat.get("variables.max_seq_len", "")),
        "n_gpus": gpus,
        "tp": str(tp), "cp": "1", "pp": "1", "vpp": "1",
        "dp": str((whole(gpus) or 0) // tp or ""),
        "sharding": fsdp_sharding(flat.get("fsdp_config.sharding_strategy", "")),
        "sequence_parallel": "0",
        "mbs": str(whole(flat.get("device_train_microbatch_size")) or ""),
        "gbs": flat.get("global_train_batch_size", ""),
        "precision": _PRECISION.get(flat.get("precision", ""), ""),
        "act_ckpt": "full" if full == "true" else "none",
        "attention": "unfused" if kernel == "torch" else "flash",
        "steps_of": words_of(flat),
        "note": pure.lower() if pure in ("PURE", "DEFAULT") else "",
    }  # fmt: skip
