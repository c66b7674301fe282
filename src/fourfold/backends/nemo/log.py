"""NeMo's prints: a line for each step, or a progress bar; the configuration as YAML; the ranks of
each group. Megatron-Bridge's YAML and list of settings too. docs/collect.md says which statements
print them."""

from __future__ import annotations

import re

from fourfold.logs.nested import MOST_ENTRIES, Flat, number, whole
from fourfold.logs.series import StepLine
from fourfold.logs.words import renamed

_LINE = re.compile(r"Training epoch [0-9]{1,9}, iteration ([0-9]{1,12})/[0-9]{1,12}\s*\|(.*)")
# Of Megatron's line, too.
FIELD = re.compile(r"([A-Za-z][\w /()%.-]{1,60}):\s*([^|\s]{1,40})\s*(?=\||$)")
_BAR_TIME = re.compile(r"train_step_timing in s=([0-9.eE+-]{1,24})")
_BAR_STEP = re.compile(r"global_step=([0-9]{1,12}(?:\.0{0,3})?)(?=[,\]\s])")
_BAR_COUNT = re.compile(r"(?:\| |: )([0-9]{1,12})(?:/(?:[0-9]{1,12}|\?)|it) \[")
_BAR_LOSS = re.compile(r"reduced_train_loss=([0-9.eE+-]{1,24})")
# A bar of a training run, whether or not it has the time of a step.
BAR = re.compile(r"\[[0-9:?]{4,12}[<,].{0,400}reduced_train_loss=.{0,200}global_step=")
_GROUPS = re.compile(
    r"All (data parallel group ranks with context parallel combined|context parallel group ranks"
    r"|tensor model parallel group ranks|pipeline model parallel group ranks): \[\[([0-9, ]{1,9})"
)
VOCAB = re.compile(r"Padded vocab_size: ([0-9]{1,12}), original vocab_size")
_AXES = {"context": "cp", "tensor": "tp", "pipeline": "pp"}
# '${.hidden_size}', '${model.hidden_size}', '${multiply:4, ${.hidden_size}}': as OmegaConf prints.
_REFERENCE = re.compile(r"\$\{\.{0,4}([\w.]{1,120})\}")
_PRODUCT = re.compile(r"\$\{multiply:\s{0,4}([0-9]{1,12}),\s{0,4}([0-9]{1,12})\}")
# Megatron-Bridge lists what differs from Megatron's defaults, and all of its own settings.
SUMMARY = "Configuration Summary (Non-Default Values vs Megatron Core)"
_SECTION = re.compile(r"\[([a-z_]{2,40})\](?: Non-default values .*)?:$")
_VALUE, _MCORE = re.compile(r"  ([A-Za-z]\w{0,120}): (.*)$"), "  (Mcore default: "
_DEFAULTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
# Of several fields of one name, that of the model outweighs the trainer's, and those the rest.
_WEIGHTS = ("model", "train", "trainer", "")


def line_of(text: str) -> tuple[StepLine | None, float | None] | None:
    """None where the text is not such a line; its step (None: not readable) and peak memory, GiB.
    Iterations are printed from 0."""
    found = _LINE.search(text)
    if found is None:
        return None
    fields = {name.strip().lower(): value for name, value in FIELD.findall(found.group(2))}
    seconds = number(fields.get("train_step_timing in s"))
    if seconds is None or not 0 < seconds < 1e9:
        return None, None
    step = StepLine(
        step=int(found.group(1)) + 1,
        seconds=seconds,
        batch=whole(fields.get("global_batch_size")),
        loss=fields.get("reduced_train_loss", ""),
        tflops=number(fields.get("tflops_per_gpu")),
    )
    peak = number(fields.get("max_memory_reserved") or fields.get("peak_memory_usage"))
    return step, peak / 2**30 if peak else None


def bar_of(text: str) -> StepLine | None:
    """The last state of a bar on the line. Its step, from 0, is rounded where that is shorter
    ('2e+3'); the bar's own count, from 1, says it then."""
    times, losses = _BAR_TIME.findall(text), _BAR_LOSS.findall(text)
    seconds = number(times[-1]) if times else None
    last = text.rpartition("train_step_timing in s=")[0]
    steps, counts = _BAR_STEP.findall(last[-400:]), _BAR_COUNT.findall(last[-600:])
    place = whole(steps[-1] if steps else counts[-1] if counts else None)
    if seconds is None or place is None or not 0 < seconds < 1e9:
        return None
    loss = losses[-1] if losses else ""
    return StepLine(step=place + bool(steps), seconds=seconds, loss=loss)


def group_of(text: str) -> tuple[str, str] | None:
    """An axis and its size, by the ranks of its groups; 'dp_cp' is what data and context share."""
    found = _GROUPS.search(text)
    if found is None:
        return None
    inner = text[found.start(2) :].partition("]")
    if not inner[1]:
        return None  # cut
    axis = _AXES.get(found.group(1).split()[0], "dp_cp")
    return axis, str(inner[0].count(",") + 1)


class Summary:
    """Megatron-Bridge's list, line by line, under 'section.field'."""

    def __init__(self) -> None:
        self.flat: Flat = {f"model.{name}": "1" for name in _DEFAULTS}
        self._section = ""

    def feed(self, text: str) -> bool:
        """Whether the line can be part of the list; a ruler after a section ends it."""
        if not text.strip("=- ") or text == "Other Configuration Values:":
            return not (text.startswith("===") and self._section)
        if found := _SECTION.match(text):
            self._section = found.group(1)
        elif found := _VALUE.match(text):
            path = f"{self._section}.{found.group(1)}".lower()
            self.flat[path] = found.group(2).partition(_MCORE)[0].strip("'\"")[:200]
        else:
            return False
        return len(self.flat) < MOST_ENTRIES


def arguments_of(yaml: Flat) -> Flat:
    """The fields of a YAML under the names of Megatron's arguments; {} where it is not a run's."""
    resolved = {path: _resolved(path, value, yaml) for path, value in yaml.items()}
    flat: Flat = {}
    for weight in reversed(_WEIGHTS):
        for path, value in resolved.items():
            if not weight or (path.startswith(f"{weight}.") and path.count(".") == 1):
                flat[path.rpartition(".")[2]] = value
    if "tensor_model_parallel_size" not in flat:
        return {}
    flat = renamed("nemo", flat)
    gpus = [whole(resolved.get(f"trainer.{name}")) for name in ("devices", "num_nodes")]
    if None not in gpus:
        flat.setdefault("world_size", str((gpus[0] or 0) * (gpus[1] or 0)))
    if resolved.get("model.optim.name") in ("distributed_fused_adam", "mcore_distributed_optim"):
        flat["use_distributed_optimizer"] = "true"
    share = flat.get("share_embeddings_and_output_weights", "")
    if share:
        flat["untie_embeddings_and_output_weights"] = str(share.lower() == "false")
    if flat.get("gated_linear_unit", "").lower() == "true":
        flat["swiglu"] = "true"
    if flat.get("transformer_engine", "").lower() == "true":
        flat["transformer_impl"] = "transformer_engine"
    if flat.get("use_flash_attention", "").lower() == "true":
        flat["use_flash_attn"] = "true"
    return flat


def _resolved(path: str, value: str, yaml: Flat) -> str:
    """References of OmegaConf, one level deep: to a sibling, or from the top."""
    if "${" not in value:
        return value
    parent = path.rpartition(".")[0]

    def field(found: re.Match[str]) -> str:
        name = found.group(1)
        near = yaml.get(f"{parent}.{name}", yaml.get(name, ""))
        return near if near and "${" not in near else found.group()

    value = _REFERENCE.sub(field, value)
    product = _PRODUCT.fullmatch(value)
    return str(int(product.group(1)) * int(product.group(2))) if product else value
