"""nanotron: `iteration: 4 / 10 | ... | elapsed_time_per_iteration_ms: 4.86K | ...`; since 2025
`time_per_iteration_ms`.

Numbers have three digits and a letter for thousands; a line is of one iteration, not of those since
the line before. `Config(...)` and the model's own config are pretty-printed before.
"""

from __future__ import annotations

import re

from fourfold.logs.book import Book, EngineReader
from fourfold.logs.lines import Line
from fourfold.logs.models import placed
from fourfold.logs.nested import Flat, Nested, number, whole, yes
from fourfold.logs.series import StepLine
from fourfold.logs.words import columns, words_of

_STEP = re.compile(r"\biteration: ([0-9]{1,12}) / [0-9]{1,12} \|")
_FIELD = re.compile(
    r"([a-z_0-9]{1,60}): (-?[0-9.]{1,20}(?:e[+-]?[0-9]{1,3})?)([KMGTPE]?)(?= \||\s*$)"
)
_PREFIX = re.compile(r"^.{0,60}?\[(?:DEBUG|INFO|WARNING|ERROR)\|DP=[^\]]{0,200}\]: ?")
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_MEMORY = re.compile(r"Peak reserved: ([0-9.]{1,15})MiB")
_ELAPSED = ("elapsed_time_per_iteration_ms", "time_per_iteration_ms")  # of 2024, since 2025
_STARTS = ("Config(", "LlamaConfig(", "Starcoder2Config(", "Qwen2Config(")


class Nanotron(EngineReader):
    name = "nanotron"
    steps = "iteration: [0-9]+ / [0-9]+ "

    def __init__(self, book: Book) -> None:
        super().__init__(book)
        self._nested: Nested | None = None
        self._kind = self._label = ""

    def take(self, line: Line) -> bool:
        if "iteration: " in line.text and (place := _STEP.search(line.text)):
            self._nested = None
            return self._step(line, int(place.group(1)))
        text = _PREFIX.sub("", line.text)
        if self._nested is not None and line.label == self._label:
            self._feed(text)
            return True
        if "Peak reserved" in text and (memory := _MEMORY.search(text)):
            self.book.memory((number(memory.group(1)) or 0.0) / 1024)
            return True
        if text.startswith(_STARTS):
            self._kind, self._label = text.partition("(")[0], line.label
            if self._kind == "Config":
                self.book.begin()
            self._nested = Nested()
            self._feed(text)
            return True
        return False

    def _step(self, line: Line, step: int) -> bool:
        fields = {
            name: (number(digits) or 0.0) * _SCALE[letter]
            for name, digits, letter in _FIELD.findall(line.text)
        }
        old_ms, new_ms = (fields.get(name, 0.0) for name in _ELAPSED)
        elapsed_ms = old_ms or new_ms
        if not 0 < elapsed_ms < 1e12 or not line.is_whole:
            self.book.unreadable(line)
            return True
        memory = fields.get("cuda_max_memory_reserved")
        batch = fields.get("global_batch_size") if old_ms else None  # since 2025: tokens
        loss = fields.get("lm_loss")
        self.book.step(
            StepLine(
                step=step,
                seconds=elapsed_ms / 1000.0,
                span=1,
                # Three digits say it exactly up to 1000.
                batch=int(batch) if batch and batch < 1000 else None,
                loss="" if loss is None else f"{loss:g}",
                label=line.label,
                tflops=fields.get("model_tflops_per_gpu"),
                mem_gib=memory / 2**30 if memory else None,
            ),
        )
        return True

    def _feed(self, text: str) -> None:
        assert self._nested is not None
        self._nested.feed(text)
        if self._nested.is_done:
            flat, kind, self._nested = self._nested.flat, self._kind, None
            if kind != "Config":
                self.book.fact(**model_facts(flat))
                return
            inner = "model.model_config."
            model = {n.removeprefix(inner): v for n, v in flat.items() if n.startswith(inner)}
            self.book.fact(**(model_facts(model) | config_facts(flat)))

    def finish(self) -> None:
        pass


def model_facts(flat: Flat) -> Flat:
    gated = not yes(flat.get("is_starcoder2_config"))
    known = columns("nanotron-model", flat)
    tied = yes(flat.get("tie_word_embeddings"))
    known |= {"family": "llama" if gated else "gpt", "tied": str(int(tied))}
    return known | _experts(flat)


def _experts(flat: Flat) -> Flat:
    """Since 2025 they have a table of their own, which lists the layers that have them."""
    facts = columns("nanotron-experts", flat)
    experts = whole(facts.get("experts")) or 0
    if experts < 2 or "moe_config.top_k" not in flat:
        return {"unmodelled": f"{experts} experts" if experts > 1 else ""}
    table = {name.removeprefix("moe_config."): value for name, value in flat.items()}
    routed = {value for name, value in table.items() if name.startswith("layers.")}
    layers = range(whole(flat.get("num_hidden_layers")) or 0)
    has_shared = yes(table.get("enable_shared_expert"))
    return (
        facts
        | {
            "unmodelled": "",
            "family": "mixtral",
            "shared_ffn": table.get("shared_expert_intermediate_size", "") if has_shared else "",
            "routing": "drop" if "capacity_factor" in facts else "natural",
        }
        | placed([int(routed == {"-1"} or str(at) in routed) for at in layers])
    )


def config_facts(flat: Flat) -> Flat:
    facts = columns("nanotron", flat)
    dp, tp, pp, cp, micro = (whole(facts.get(n)) for n in ("dp", "tp", "pp", "cp", "mbs"))
    rounds = whole(flat.get("tokens.batch_accumulation_per_replica"))
    if dp and tp and pp:
        facts["n_gpus"] = str(dp * tp * pp * (cp or 1))
    if micro and rounds and dp:
        facts["gbs"] = str(micro * rounds * dp)
    mode = flat.get("parallelism.tp_mode", "").lower()
    return facts | {
        "steps_of": words_of(flat),
        "sequence_parallel": str(int("reduce_scatter" in mode and tp != 1)),
    }
