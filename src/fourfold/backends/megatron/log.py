"""Megatron-LM, Megatron-DeepSpeed, Megatron-Bridge, GPT-NeoX and NeMo: one family of prints.

` iteration        2/   95367 | ... | elapsed time per iteration (ms): 769990.0 | ... |`, the list
of arguments before it, and NeMo's `Training epoch 0, iteration 3/99 | ... | train_step_timing in
s:`. docs/collect.md quotes the statements that print them.
"""

from __future__ import annotations

import re

from fourfold.backends.megatron.log_args import facts_of
from fourfold.backends.nemo import log as nemo
from fourfold.logs.book import Book, EngineReader
from fourfold.logs.lines import Line
from fourfold.logs.nested import ADAPTERS, Flat, Yaml, argument, number, whole, yes
from fourfold.logs.series import StepLine

_ITERATION = re.compile(r"\biteration:?\s+([0-9]{1,12})\s*/\s*[0-9]{1,12}\s*\|")
_ELAPSED = re.compile(
    r"elapsed time per iteration \(?(ms|s)\)?:\s*([0-9.eE+-]{1,24})(?:/[0-9.eE+-]{1,24})?\s*\|"
)
# Argonne's fork of Megatron-DeepSpeed writes 'global_batch_size=  768 |' for 'global batch size:'.
_EQUALS = re.compile(r"([A-Za-z_]{2,60})=")
# Five dashes of any number: with `-{5,}` each dash of a long rule would begin a search of its own.
_STARTS = re.compile(r"-{5} arguments -{5}")
_ENDS = re.compile(r"-{5} end of arguments -{5}")
_VOCAB = re.compile(
    r"padded vocab \(size: [0-9]{1,12}\) with [0-9]{1,12} dummy tokens "
    r"\(new size: ([0-9]{1,12})\)"
)
_MEMORY = re.compile(r"memory \((MB|GB)\) \|(.*)")
_RESERVED = re.compile(
    r"(max[ _]reserved|mem-max-reserved-gigabytes|peak_reserved_mem|max_reserved)[^:|]{0,30}:\s*"
    r"([0-9.eE+-]{1,24})"
)
# NeMo says that its configuration follows; Megatron-Bridge's begins with the name of a part.
_NEMO_CONFIG, _PART = "Experiment configuration", re.compile(r"[a-z][a-z_]{1,40}:$")


class Megatron(EngineReader):
    name = "megatron-lm"
    steps = "elapsed.time.per.iteration|train_step_timing in s"

    def __init__(self, book: Book) -> None:
        super().__init__(book)
        self._arguments: Flat | None = None
        self._label = ""
        self._yaml: Yaml | nemo.Summary | None = None
        self._groups: Flat = {}

    def take(self, line: Line) -> bool:
        """Whether the line is one of these engines'."""
        text = line.text
        if self._arguments is not None and self._argument(line):
            return True
        if self._arguments is not None and (_ENDS.search(text) or _ITERATION.search(text)):
            self._close()
        if self._yaml is not None and self._config(line):
            return False  # an error looks like YAML too
        if "memory (" in text and (found := _MEMORY.search(text)):
            self._memory(found.group(1), found.group(2))
            return True
        if "iteration" in text:
            return self._iterations(line)
        if "global_step=" in text and nemo.BAR.search(text):
            return self._bar(line)
        if "---" in text and _STARTS.search(text):
            self.book.begin()
            self._arguments, self._label = {}, line.label
            return True
        if _NEMO_CONFIG in text:
            self._yaml, self._label = Yaml(), line.label
        elif nemo.SUMMARY in text:
            self._yaml, self._label = nemo.Summary(), line.label
        elif text.endswith(":") and _PART.match(text):
            self._yaml, self._label = Yaml(), line.label
            self._yaml.feed(text)
        else:
            self._fact(text)
        return False

    def _fact(self, text: str) -> None:
        """What is printed outside of the configuration."""
        if "added vocab" in text and (vocab := _VOCAB.search(text) or nemo.VOCAB.search(text)):
            self.book.fact(vocab=vocab.group(1))
        elif "zero_optimization_stage" in text and (pair := argument(text)):
            # What DeepSpeed read of its own file outweighs the argument.
            if pair[0] == "zero_optimization_stage" and pair[1] in ("0", "1", "2", "3"):
                self.book.fact(sharding=f"zero{pair[1]}")
        elif "Adding lora to: " in text:  # NeMo and Megatron-Bridge, for every module
            self.book.fact(unmodelled=ADAPTERS)
        elif "group ranks" in text and (group := nemo.group_of(text)):
            self._groups |= dict([group])
            self.book.fact(**_layout(self._groups))

    # --- steps

    def _iterations(self, line: Line) -> bool:
        if "iteration=" in line.text:
            plain = _EQUALS.sub(lambda found: found[1].replace("_", " ") + ": ", line.text)
            line = line._replace(text=plain)
        if (found := nemo.line_of(line.text)) is not None:
            return self._nemo(line, *found)
        starts = [found.start() for found in _ITERATION.finditer(line.text)]
        if not starts or "elapsed time" not in line.text:
            if starts and line.text.lstrip().startswith("iteration"):
                self.book.unreadable(line)
            return False
        # Lines of two ranks may run into each other: each piece is read by itself.
        for start, end in zip(starts, [*starts[1:], len(line.text)], strict=True):
            self._iteration(line, line.text[start:end])
        return True

    def _iteration(self, line: Line, text: str) -> None:
        place, elapsed = _ITERATION.match(text), _ELAPSED.search(text)
        seconds = number(elapsed.group(2)) if elapsed else None
        if place is None or elapsed is None or seconds is None or not 0 < seconds < 1e9:
            self.book.unreadable(line)
            return
        # Of two fields of a name the first: Argonne's fork prints TFLOPs by two formulas.
        fields = {name.strip().lower(): value for name, value in reversed(nemo.FIELD.findall(text))}
        tflops = fields.get("tflops") or fields.get("throughput per gpu (tflop/s/gpu)")
        if "sop loss" in fields:
            self.book.fact(unmodelled="the losses of BERT")
        elif any(name.endswith("load_balancing_loss") for name in fields):  # of a router
            self.book.run.facts.setdefault("unmodelled", "experts")
        batch = fields.get("global batch size") or fields.get("gloabl batch size")
        step = StepLine(
            step=int(place.group(1)),
            seconds=seconds / 1000.0 if elapsed.group(1) == "ms" else seconds,
            batch=whole(batch) or None,
            skipped=whole(fields.get("number of skipped iterations")) or 0,
            loss=f"{fields.get('lm loss', '')} {fields.get('grad norm', '')}".strip(),
            label=line.label,
            tflops=number((tflops or "").partition("/")[0]),
        )
        if "consumed tokens" in fields and "deepspeed" not in self.book.engine:
            self._named("megatron-deepspeed")
        self.book.step(step)
        samples, tokens = (whole(fields.get(f"consumed {what}")) for what in ("samples", "tokens"))
        if samples and tokens and tokens % samples == 0:
            self.book.run.facts.setdefault("seq_len", str(tokens // samples))

    def _nemo(self, line: Line, step: StepLine | None, peak_gib: float | None) -> bool:
        if step is None or not line.is_whole:
            self.book.unreadable(line)
            return True
        self._named("nemo")
        self.book.step(step)
        if peak_gib:
            self.book.memory(peak_gib)
        return True

    def _bar(self, line: Line) -> bool:
        step = nemo.bar_of(line.text)
        if step is None:
            self.book.unreadable(line)
            return True
        self._named("nemo")
        if step.step > self.book.run.steps.last:  # the bar is drawn many times
            self.book.step(step)
        return True

    def _named(self, engine: str) -> None:
        if self.book.engine != engine:
            self.book.engine = engine
            self.book.run.engine = engine

    def _memory(self, unit: str, text: str) -> None:
        found = _RESERVED.search(text)
        value = number(found.group(2)) if found else None
        if value is not None and value > 0:
            # Megatron divides by 1024 x 1024 and writes MB; Bridge writes 1e9 bytes as GB.
            self.book.memory(value / 1024 if unit == "MB" else value * 1e9 / 2**30)

    # --- configuration

    def _argument(self, line: Line) -> bool:
        assert self._arguments is not None
        if line.label != self._label:
            return False
        pair = argument(line.text)
        if pair is not None:
            self._arguments[pair[0]] = pair[1]
            return True
        return False

    def _close(self) -> None:
        """Some print no end: the first iteration is one, whichever rank prints it."""
        args, self._arguments = self._arguments or {}, None
        self.book.fact(**facts_of(args))
        if "zero_stage" in args or yes(args.get("deepspeed")):
            self._named("megatron-deepspeed")
        self.book.run.interval = whole(args.get("log_interval")) or 0

    def _config(self, line: Line) -> bool:
        assert self._yaml is not None
        if line.label != self._label:
            return False
        is_step = "iteration" in line.text and _ITERATION.search(line.text)
        if not is_step and self._yaml.feed(line.text):
            return True
        if not self._yaml.flat and line.text.startswith("[NeMo"):
            return True  # the head of the message that has it
        self._configured()
        return False

    def _configured(self) -> None:
        yaml, self._yaml = self._yaml, None
        args = nemo.arguments_of(yaml.flat) if yaml else {}
        if yaml is None or not args:
            return
        is_bridge = isinstance(yaml, nemo.Summary) or "_target_" in args
        facts = facts_of(args)
        if is_bridge and "untie_embeddings_and_output_weights" not in args:
            facts["tied"] = ""
        self.book.begin()
        self.book.fact(**facts)
        self.book.run.interval = whole(args.get("log_interval")) or 0
        self._named("megatron-bridge" if is_bridge else "nemo")

    def finish(self) -> None:
        if self._arguments:
            self._close()
        self._configured()


def _layout(groups: Flat) -> Flat:
    """Columns of the layout, from the sizes of the groups of ranks."""
    both, cp = whole(groups.get("dp_cp")), whole(groups.get("cp")) or 1
    dp = {"dp": str(both // cp)} if both and both % cp == 0 else {}
    return {axis: size for axis, size in groups.items() if axis != "dp_cp"} | dp
