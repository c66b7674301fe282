"""Composer and llm-foundry: a block for each batch, `[batch=1/10]:` and `Train NAME: VALUE` below.

Throughput is a rolling mean over the SpeedMonitor's window. llm-foundry prints its whole YAML.
"""

from __future__ import annotations

import re

from fourfold.logs.book import Book, EngineReader
from fourfold.logs.lines import Line
from fourfold.logs.nested import Flat, Yaml, fsdp_sharding, number, whole
from fourfold.logs.series import StepLine
from fourfold.logs.words import columns, words_of

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


class Composer(EngineReader):
    name = "llm-foundry"
    steps = r"\[batch=[0-9]+"

    def __init__(self, book: Book) -> None:
        super().__init__(book)
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
    hidden = whole(flat.get("model.d_model"))
    ratio = number(flat.get("model.expansion_ratio")) or 4.0
    is_mpt = flat.get("model.name") == "mpt_causal_lm"  # else the YAML names a model, no sizes
    tied = flat.get("model.tie_word_embeddings", "true").lower() != "false"
    facts = columns("llm-foundry", flat)
    gpus, tp = (whole(facts.get(name)) for name in ("n_gpus", "tp"))
    return facts | {
        "family": "mpt" if is_mpt else "",
        "unmodelled": "experts" if "moe" in flat.get("model.ffn_config.ffn_type", "") else "",
        "d_ff": str(int(ratio * hidden)) if hidden else "",
        "tied": str(int(tied)) if is_mpt else "",
        "dp": str((gpus or 0) // (tp or 1) or ""),
        "sharding": fsdp_sharding(flat.get("fsdp_config.sharding_strategy", "")),
        "steps_of": words_of(flat),
    }
