"""Plain DeepSpeed, and the Hugging Face Trainer with or without it.

DeepSpeed prints its settings ('config.py:1003:print]   train_batch_size ...... 128'), a line for
steps ('[Rank 0] step=40, skipped=2') and one for their speed ('global_step=34, ...,
CurrSamplesPerSec=8.0, MemAllocated=59.65GB'); until 0.8 the speed's line counts micro batches, so
that steps and the clock say more. The Trainer prints its batch sizes, a bar ('10/560 [00:52<45:12,
4.93s/it]') and dicts with the loss. Engines on top of DeepSpeed print these lines too: a reader
that knows such an engine outweighs this one (`is_below`).
"""

from __future__ import annotations

import re
from datetime import datetime

from fourfold.logs.book import Book, EngineReader
from fourfold.logs.lines import Line
from fourfold.logs.models import config_columns
from fourfold.logs.nested import (
    ADAPTERS,
    OFFLOADED,
    Flat,
    Nested,
    fsdp_sharding,
    is_none,
    number,
    whole,
    yes,
)
from fourfold.logs.series import StepLine
from fourfold.logs.words import columns
from fourfold.spec.layout import AXES

_SETTING = re.compile(
    r"\[config\.py:[0-9]{1,6}:print(?:_user_config)?\]\s{1,8}(\w{1,80}) (?:\.+)? ?(.{1,400})$"
)
_STEP = re.compile(r"\[Rank 0\] step=([0-9]{1,12}), skipped=([0-9]{1,12}),")
_SPEED = re.compile(
    r"global_step=([0-9]{1,12}), RunningAvgSamplesPerSec=[^,]{1,40}, "
    r"CurrSamplesPerSec=([0-9.eE+-]{1,40}),"
)
_MEMORY = re.compile(r"SamplesPerSec=.{1,80}, MaxMemAllocated=([0-9.]{1,12})GB")
_CLOCK = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]")
_TRAINER = re.compile(
    r"(Instantaneous batch size per device|Total train batch size \(w\. parallel, distributed & "
    r"accumulation\)|Gradient Accumulation steps|Total optimization steps) = ([0-9,]{1,20})$"
)
# A bar that says nothing before its percentage is the Trainer's; an evaluation has another total.
_BAR = re.compile(
    r"^\s{0,8}[0-9]{1,3}%\|.{0,400}\| ([0-9]{1,12})/([0-9]{1,12}) \[[0-9:]{1,12}<[0-9:?]{1,12}, "
    r" {0,3}([0-9.]{1,12})(s/it|it/s)"
)
_LOSS = re.compile(r"\{'loss': '?([^,'}]{1,40})'?, .{0,200}'learning_rate': .{0,200}'epoch': ")
_RUNTIME = re.compile(r"\{'train_runtime': '?([0-9.]{1,20})'?, 'train_samples_per_second'")
# What peft says of the weights that are trained.
_ADAPTERS = re.compile(r"\btrainable params: [0-9,]{1,20} \|\| all params: [0-9,]{1,20} \|\|")
_MODEL, _MOST_TEXT = "model.", 2**20
_DUMPS = (("json = {", "ds."), ("TrainingArguments(", "args."), ("Model config ", _MODEL))


class DeepSpeed(EngineReader):
    name = "deepspeed"
    steps = "SamplesPerSec=|s/it\\]|it/s\\]|step=[0-9]+, skipped="
    is_below = True

    def __init__(self, book: Book) -> None:
        super().__init__(book)
        self._said: Flat = {}
        self._nested: tuple[Nested, str] | None = None
        self._text = ""  # of the dump that is open
        self._before: tuple[int, float] | None = None
        self._has_speed = False
        self._total = self._bar = 0

    def take(self, line: Line) -> bool:
        text = line.text
        if self._nested is not None:
            self._feed(text)
            return True
        if "config.py:" in text and (found := _SETTING.search(text)):
            self._setting(found.group(1), found.group(2).strip(), text)
        elif "SamplesPerSec=" in text:
            self._speed(text)
        elif "[Rank 0] step=" in text and (found := _STEP.search(text)):
            self._step(int(found.group(1)), line.head)
        elif "%|" in text and (found := _BAR.search(text)):
            self._drawn(*found.groups())
        elif "***** Running training *****" in text:
            self._begin()
            self._said["trainer"] = "1"
        elif " = " in text and (found := _TRAINER.search(text)):
            self._said[found.group(1).split(" (")[0]] = found.group(2).replace(",", "")
            self._say()
        elif "{'loss'" in text and _LOSS.search(text):
            self._said["trainer"] = "1"
            self._total = self._total or self._bar
        elif "trainable params: " in text and _ADAPTERS.search(text):
            self._said["peft.is_used"] = "True"
            self._say()
        elif "{'train_runtime'" in text and (found := _RUNTIME.search(text)):
            self._ended(number(found.group(1)))
        else:
            return self._dump(text)
        return True

    # --- steps

    def _speed(self, text: str) -> None:
        if found := _MEMORY.search(text):
            self.book.memory(number(found.group(1)) or 0.0)
        batch, found = whole(self.book.run.facts.get("gbs")), _SPEED.search(text)
        rate = number(found.group(2)) if found else None
        if found and batch and rate and rate > 0:
            self._has_speed = True
            step = StepLine(step=int(found.group(1)), seconds=batch / rate, span=1)
            self._add(step)

    def _step(self, step: int, head: str) -> None:
        """By the clock, where the line of the speed does not count steps."""
        found = _CLOCK.search(head)
        if found is None or self._has_speed:
            return
        try:
            clock = datetime.fromisoformat(found.group(1)).timestamp() + int(found.group(2)) / 1e3
        except ValueError:
            return
        before, self._before = self._before, (step, clock)
        if before is not None and step > before[0] and clock > before[1]:
            span = step - before[0]
            self._add(StepLine(step=step, seconds=(clock - before[1]) / span, span=span))

    def _drawn(self, place: str, total: str, rate: str, unit: str) -> None:
        """A bar's speed is a running mean; it is drawn several times at one place."""
        if not self._total:
            self._bar = int(total)
        value, step = number(rate), int(place)
        if int(total) != self._total or not value or self._has_speed or self._before:
            return
        if step > self.book.run.steps.last:
            self._add(StepLine(step=step, seconds=value if unit == "s/it" else 1.0 / value))

    def _ended(self, seconds: float | None) -> None:
        if seconds and self._total and self.book.run.steps.first is None:
            step = StepLine(step=self._total, seconds=seconds / self._total, span=self._total)
            self._add(step)

    def _add(self, step: StepLine) -> None:
        if self.book.run.steps.last < step.step or self.book.run.steps.first is None:
            self.book.step(step)

    # --- configuration

    def _begin(self) -> None:
        if self.book.runs and not self.book.run.is_fresh:
            kept = {name: value for name, value in self._said.items() if "." in name}
            self._said, self._before, self._has_speed = kept, None, False
        self.book.begin()

    def _setting(self, name: str, value: str, text: str) -> None:
        self._said[f"engine.{name}"] = value
        if value == "{" or "json = {" in text:
            self._dump(text)
        elif name in ("zero_optimization_stage", "world_size"):  # of the last ones
            self._say()

    def _dump(self, text: str) -> bool:
        for words, prefix in _DUMPS:
            if words in text and text.rstrip().endswith(("{", "(")):
                self._nested, self._text = (Nested(), prefix), ""
                self._feed(text[text.index(words) + len(words) - 1 :])
                return True
        return False

    def _feed(self, text: str) -> None:
        assert self._nested is not None
        nested, prefix = self._nested
        nested.feed(text)
        if len(self._text) < _MOST_TEXT:
            self._text += text
        if nested.is_done:
            flat = config_columns(self._text) if prefix == _MODEL else nested.flat
            said = {name: v for name, v in self._said.items() if not name.startswith(prefix)}
            self._said = said | {f"{prefix}{name}": value for name, value in flat.items()}
            self._nested = None
            self._say()

    def _say(self) -> None:
        self._total = whole(self._said.get("Total optimization steps")) or self._total
        self.book.fact(**facts_of(self._said))

    def finish(self) -> None:
        is_trainer = "trainer" in self._said and not any(
            n.startswith("engine.") for n in self._said
        )
        self.book.engine = "hf-trainer" if is_trainer else self.name
        for run in self.book.runs:
            run.engine = self.book.engine


def facts_of(said: Flat) -> Flat:
    """Columns of the reference schema; '' where nothing is printed (the sequence length never is).
    Without a word of pipelines and tensor parallelism, all GPUs are data-parallel."""

    facts = columns("deepspeed", said)
    repeats, ranks = facts.pop("_repeats", ""), whole(facts.get("n_gpus"))
    sizes = [whole(one) for one in (facts.get("gbs"), facts.get("mbs"), repeats)]
    if ranks is None and all(sizes):
        total, micro, steps = (size or 1 for size in sizes)
        ranks = total // (micro * steps) if total % (micro * steps) == 0 else None
    alone = dict.fromkeys((*AXES, "vpp"), "1") | {"dp": str(ranks)} if ranks else {}
    return (
        alone
        | facts
        | {
            **{n.removeprefix(_MODEL): v for n, v in said.items() if n.startswith(_MODEL)},
            **_unmodelled(said),
            "n_gpus": str(ranks or ""),
            "sharding": _sharding(said),
            "precision": _precision(said),
        }
    )


def _unmodelled(said: Flat) -> Flat:
    """Of how the model is trained, beside what its own config may ask for."""
    if "peft.is_used" in said:
        return {"unmodelled": ADAPTERS}
    places = [
        said.get(f"ds.zero_optimization.offload_{what}.device", "none")
        for what in ("optimizer", "param")
    ]
    fsdp = " ".join(v for n, v in said.items() if n.startswith("args.fsdp") and "config" not in n)
    is_offloaded = any(place in ("cpu", "nvme") for place in places) or "offload" in fsdp.lower()
    return {"unmodelled": OFFLOADED} if is_offloaded else {}


def _sharding(said: Flat) -> str:
    stage = said.get("engine.zero_optimization_stage", said.get("ds.zero_optimization.stage", ""))
    if stage in ("0", "1", "2", "3"):
        return f"zero{stage}"
    if said.get("args.fsdp") == "True":  # transformers 5
        is_kept = said.get("args.fsdp_config.reshard_after_forward") == "False"
        return "zero2" if is_kept else "zero3"
    # One word, or a list of FSDPOption.FULL_SHARD and the like.
    fsdp = (v for n, v in said.items() if n == "args.fsdp" or n.startswith("args.fsdp.0"))
    chosen = " ".join(fsdp)
    is_plain = (
        "args.fsdp" in said and is_none(said.get("args.deepspeed")) and not chosen.strip("[]")
    )
    return "zero0" if is_plain else fsdp_sharding(chosen)


def _precision(said: Flat) -> str:
    for name, word in (("bfloat16", "bf16"), ("float16", "fp16"), ("fp16", "fp16")):
        short = "bf16" if word == "bf16" else "fp16"
        is_on = (
            yes(said.get(f"engine.{name}_enabled"))
            or "enabled=True" in said.get(f"engine.{name}_config", "")
            or yes(said.get(f"ds.{short}.enabled"))
            or yes(said.get(f"args.{short}"))
        )
        if is_on:
            return word
    is_said = any(
        n in said for n in ("engine.bfloat16_enabled", "engine.fp16_enabled", "args.bf16")
    )
    return "fp32" if is_said else ""
