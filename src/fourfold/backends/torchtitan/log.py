"""torchtitan: `step: 10  loss: ...  memory: 5.61GiB(5.90%)  tps: 7,162  tflops: ...  mfu: 41.1%`.

`tps` is tokens per second of one device, averaged since the line before (the first step has a line
of its own). The configuration is printed only when asked for; the mesh, the model's sizes (since
0.3: its number of parameters), the batch and what was applied to the model always are.
"""

from __future__ import annotations

import re

from fourfold.backends.torchtitan.log_model import (
    configured_sizes,
    printed_sizes,
    sizes_by_count,
    titan_placed,
)
from fourfold.logs.book import Book, EngineReader
from fourfold.logs.lines import Line
from fourfold.logs.nested import OFFLOADED, Flat, Nested, json_object, number, whole
from fourfold.logs.series import StepLine
from fourfold.logs.words import columns, words_of
from fourfold.spec import catalog
from fourfold.spec.cluster import device_id
from fourfold.spec.words import RECOMPUTE

_RELEASE = re.compile(r"torchtitan version: ([0-9][0-9a-z.+]{0,30})")
_STEP = re.compile(r"(?<!validate )\bstep:\s{0,20}([0-9]{1,12})\s")
_UNTIMED = re.compile(r" - INFO - step:\s{0,20}[0-9]{1,12}\s{1,20}loss:")
_TPS = re.compile(r"\b(?:tps|wps):\s{0,20}([0-9][0-9,]{0,20})(?![0-9.,]|$)")
_TFLOPS = re.compile(r"\btflops:\s{0,20}([0-9][0-9,.]{0,20})\s")
_MEMORY = re.compile(r"\bmemory:\s{0,20}([0-9.]{1,12})GiB")
_LOSS = re.compile(r"\bloss:\s{0,20}(-?[0-9.eE+-]{1,24}|nan)\s")
_MESH = re.compile(r"Building device mesh with parallelism: (.{1,300})")
_OLD_MESH = re.compile(
    r"Building [0-9]-D device mesh with [\[(]([^\])]{1,200})[\])], \[([0-9, ]{1,100})\]"
)
# Names of an old mesh: 'dp' was sharded, and experts may cut that axis in two.
_OLD_AXES = {"dp": "dp_shard", "dp_shard_mod_ep": "dp_shard", "dp_shard_in_ep": "dp_shard"}
_SIZES = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep|etp)=(-?[0-9]{1,9})")
_TRAINER = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9}), (?:gradient accumulation steps "
    r"\d{1,9}, )?sequence length (\d{1,9})"
)
_DEVICE = re.compile(r"\b[A-Z]{2,6} capacity: (.{1,100}?) with ([0-9.]{1,10})GiB memory")
_CHECKPOINTED = re.compile(r"Applied (\w{1,20}) activation checkpointing")
_PIPELINE = re.compile(r"with (\d{1,9}) microbatches and (\d{1,9}) stages")
_CONFIG = re.compile(r"Running with (?:configs?|args): (?=[{\w])")
_MODEL = re.compile(r"Building (\S{1,60}) ?(\S{0,60}?) ?with (?=\{|\w{1,60}\()")
_SIZE = re.compile(r"Model (\S{1,60}) (\S{1,60}) size: ([0-9,]{1,24}) total parameters")
_STEP_END = re.compile(r'"log_type_name": ?"step_end"')
_PAUSES = {"checkpoint_save", "eval"}
# Classes of 0.3.
_POLICIES = {"FullAC": "full", "SelectiveAC": "selective"}
_APPLIED = (
    ("Applied FSDP", {"sharding": "zero3"}),
    ("Applied HSDP", {"sharding": "zero3"}),
    ("Applied DDP", {"sharding": "zero0"}),
    # Outweighs the type of what is not quantised, which 0.3 prints later.
    ("Float8 training active", {"_products": "fp8"}),
    ("Float8 tensorwise scaled training active", {"_products": "fp8"}),  # of 0.2
    ("MX training active", {"_products": "fp8", "_scaling": "recipe mxfp8"}),
    ("Applied CPU Offloading", {"unmodelled": OFFLOADED}),
    ("Float8 training active with recipe rowwise", {"_scaling": "recipe rowwise"}),
    ("MXFP8 training active", {"_products": "fp8", "_scaling": "recipe mxfp8"}),
    ("Linear layers to MXFP8Linear", {"_products": "fp8", "_scaling": "recipe mxfp8"}),
    ("Linear layers to NVFP4Linear", {"_products": "fp4"}),
)


class Torchtitan(EngineReader):
    name = "torchtitan"
    steps = "step: *[0-9]+ .*[tw]ps:"
    events = '"log_type_name":'
    # SOURCE.global_rank_RANK.TIME-LETTERS.jsonl
    rank_file = re.compile(r"(.+)\.global_rank_([0-9]{1,9})\.[\w-]{1,60}\.jsonl")

    def __init__(self, book: Book) -> None:
        super().__init__(book)
        self._nested: Nested | None = None
        self._is_model = False
        self._label = ""

    def take(self, line: Line) -> bool:
        text = line.text
        if text.startswith("{") and self.events in text:
            self._event(line)
            return True
        if "step:" in text and ("tps:" in text or "wps:" in text):
            self._nested = None  # a step ends any dump
            return self._step(line)
        if "step:" in text and _UNTIMED.search(text):  # of spring 2024, without a rate
            self.book.unreadable(line)
            return True
        if self._nested is not None and line.label == self._label:
            self._feed(line.text)
            return True
        if " - " in text and ("Starting job:" in text or "torchtitan version:" in text):
            self.book.begin()
            if release := _RELEASE.search(text):
                self.book.fact(engine_release=release.group(1))
            return True
        for pattern, is_model in ((_CONFIG, False), (_MODEL, True)):
            if "with " in text and (found := pattern.search(text)):
                self._nested, self._is_model, self._label = Nested(), is_model, line.label
                if is_model:
                    self.book.fact(model=f"{found.group(1)}-{found.group(2)}".strip("-").lower())
                self._feed(text[found.end() :])
                return True
        return self._fact(text)

    def _event(self, line: Line) -> None:
        """Read a line of the structured log. The span "step" ends with {"log_type_name":
        "step_end", "value": 321.9, "step": 7, "rank": 0}, the milliseconds of the whole step; its
        `step_tags` say whether it saved a checkpoint or evaluated."""
        if not _STEP_END.search(line.text):
            return
        found = json_object(line.text) or {}
        at, milliseconds = whole(str(found.get("step"))), number(str(found.get("value")))
        if at is None or not milliseconds or milliseconds < 0:
            self.book.unreadable(line)
            return
        tags = found.get("step_tags")
        if isinstance(tags, list) and _PAUSES.intersection(map(str, tags)):
            self.book.pause()
        label = f"rank {found.get('rank', 0)}"
        self.book.step(StepLine(step=at, seconds=milliseconds / 1e3, label=label))

    def _step(self, line: Line) -> bool:
        place, rate, loss = (p.search(line.text) for p in (_STEP, _TPS, _LOSS))
        if "validate step:" in line.text:
            self.book.pause()
            return True
        value = number(rate.group(1)) if rate else None
        if place is None or not value or not line.is_whole:
            self.book.unreadable(line)
            return True
        tflops, memory = _TFLOPS.search(line.text + " "), _MEMORY.search(line.text)
        self.book.step(
            StepLine(
                step=int(place.group(1)),
                tokens_s_gpu=value,
                loss=loss.group(1) if loss else "",
                label=line.label,
                tflops=number(tflops.group(1)) if tflops else None,
                mem_gib=number(memory.group(1)) if memory else None,
            ),
        )
        return True

    def _fact(self, text: str) -> bool:
        if "capacity:" in text and (found := _DEVICE.search(text)):
            self.book.fact(hardware=gpu_of(found.group(1), number(found.group(2)) or 0.0))
        elif "device mesh" in text:
            return self._mesh(text)
        elif "local batch size" in text and (found := _TRAINER.search(text)):
            local, batch, length = found.groups()
            self.book.fact(_local=local, gbs=batch, seq_len=length)
        elif "total parameters" in text and (found := _SIZE.search(text)):
            name = f"{found.group(1)}-{found.group(2)}".lower()
            self.book.fact(model=name, _parameters=found.group(3))
        elif " budget option" in text:
            self.book.fact(_recompute="budget")
        elif "Applied" in text or "training active" in text or "Linear layers to" in text:
            if found := _CHECKPOINTED.search(text):
                word = found.group(1)
                self.book.fact(_recompute=_POLICIES.get(word, word))
            for words, facts in _APPLIED:
                if words in text:
                    self.book.fact(**facts)
        elif "pipeline schedule" in text and (found := _PIPELINE.search(text)):
            self.book.fact(_micro=found.group(1), _stages=found.group(2))
        else:
            return False
        return True

    def _mesh(self, text: str) -> bool:
        if found := _MESH.search(text):
            sizes = dict(_SIZES.findall(found.group(1)))
        elif found := _OLD_MESH.search(text):
            sizes = {}
            names, counts = re.findall(r"\w+", found.group(1)), re.findall(r"\d+", found.group(2))
            for name, count in zip(names, counts, strict=False):
                name = _OLD_AXES.get(name, name)
                sizes[name] = str(int(sizes.get(name, "1")) * int(count))
        else:
            return False
        if sizes and all(whole(size) and int(size) > 0 for size in sizes.values()):
            self.book.fact(**{f"_mesh_{name}": size for name, size in sizes.items()}, _mesh="1")
        return True

    def _feed(self, text: str) -> None:
        assert self._nested is not None
        self._nested.feed(text)
        if self._nested.is_done:
            flat, self._nested = self._nested.flat, None
            self.book.fact(**(printed_sizes(flat) if self._is_model else config_facts(flat)))
            if not self._is_model:
                self.book.run.interval = whole(flat.get("metrics.log_freq")) or 0

    def finish(self) -> None:
        for run in self.book.runs:
            run.facts = facts_of(run.facts)


def gpu_of(name: str, gib: float) -> str:
    """The catalogue's id of a device by its name and, where that names several, its memory."""
    names = catalog.device_names()
    found = device_id(name, names)
    if found is None and gib:
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        near = [
            known
            for known in names
            if known.split("-")[0] in words
            and abs(catalog.device(known).memory_bytes / 2**30 / gib - 1) < 0.08
        ]
        found = near[0] if len(near) == 1 else None
    return found or ""


def config_facts(flat: Flat) -> Flat:
    facts = columns("torchtitan", flat) | configured_sizes(flat) | {"steps_of": words_of(flat)}
    converters = " ".join(v for k, v in flat.items() if k.startswith("model.converters"))
    return facts | ({"precision": "fp8"} if "float8" in converters or "mx" in converters else {})


def _stays_gathered(facts: Flat, pp: int) -> bool:
    """Weights between passes; by default those of a pipeline, between its micro batches."""
    return facts.get("_reshard", "") in (("never", "default", "") if pp > 1 else ("never",))


def facts_of(facts: Flat) -> Flat:
    """What the prints say together, in columns of the reference schema."""
    facts = dict(facts)
    if not facts.get("n_layers"):
        facts |= sizes_by_count(facts.get("model", ""), facts.get("_parameters", ""))
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    size = {axis: whole(facts.get(f"_{axis}")) for axis in axes}
    if facts.get("_mesh"):  # the configuration may say -1, for what is left
        size = {axis: whole(facts.get(f"_mesh_{axis}")) or 1 for axis in axes}
    copies, shard = size["dp_replicate"], size["dp_shard"]
    notes = [facts.get("_compile", ""), facts.get("_scaling", "")]
    for axis in ("pp", "cp", "tp"):
        facts[axis] = str(size[axis] or "")
    if copies and shard and shard > 0:
        facts["dp"] = str(copies * shard)
        facts.setdefault("sharding", "zero3" if shard > 1 else "zero0")
        if copies > 1 and shard > 1:
            notes.append(f"zero3 over {shard * (size['cp'] or 1)} ranks")
        if facts["sharding"] == "zero3" and _stays_gathered(facts, size["pp"] or 1):
            facts["sharding"] = "zero2"
    facts["note"] = "; ".join(filter(None, notes))
    local, batch = whole(facts.get("_local")), whole(facts.get("gbs"))
    dp = whole(facts.get("dp"))
    if not batch and local and dp:
        facts["gbs"] = str(local * dp)
    if size["pp"] == 1:
        facts["mbs"] = str(local or "")
    elif facts.get("_micro") and local:
        facts["mbs"] = str(local // max(1, whole(facts["_micro"]) or 1))
    else:
        facts["mbs"] = facts.get("_micro_size", "")
    stages = whole(facts.get("_stages"))
    facts["vpp"] = str(stages // (size["pp"] or 1)) if stages and size["pp"] else "1"
    facts["seq_len"] = facts.get("seq_len") or facts.get("_max_len", "")
    facts |= titan_placed(facts) | {"act_ckpt": _recompute(facts), "attention": "flash"}
    usual = "bf16" if (shard or 1) > 1 else ""  # its default, which FSDP applies
    facts["precision"] = facts.get("_products") or facts.get("precision") or usual
    if facts.get("_dtype") == "bfloat16" and facts["precision"] in ("bf16", ""):
        facts["precision"] = "bf16-pure"  # weights, gradients and moments too
    facts["sequence_parallel"] = str(int((size["tp"] or 1) > 1))
    return {name: value for name, value in facts.items() if not name.startswith("_") and value}


def _recompute(facts: Flat) -> str:
    """Its 'selective' of an operation list is ours; of every N-th layer it is every-N. Without a
    word about it in a log of a whole start, nothing was applied."""
    kind = facts.get("_recompute", "")
    if not kind:
        return "none" if facts.get("_mesh") and facts.get("sharding") else ""
    every = whole(facts.get("_every"))
    if kind == "selective" and every:
        return f"every-{every}"
    return kind if kind in RECOMPUTE else ""
