"""Traces of runs on cores, by torch's own profiler: layers, and where the host stands still.

A busy machine holds a run up at any instant, for longer than a planted sleep. So counts are those
of the trace as it was written, whatever held it up, and the order of causes is that of the same
trace with all other waits cut short.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import fourfold
from fourfold.traces import parts
from fourfold.traces.cores import find_kernel_ops
from fourfold.traces.examined import read_trace

VOCAB = 320
PLANTED = "planted"  # the mark of a sleep
QUIET_US = 20.0  # from one instant of a trace to the next on a machine that does nothing else


class Layer(nn.Module):
    """A decoder layer with biases, whose products call a copy of their own."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        width = hidden // heads
        self.heads, self.kv_heads = heads, kv_heads
        self.q, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.k, self.v = (nn.Linear(hidden, kv_heads * width) for _ in range(2))
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        sequences, length, hidden = x.shape
        normed = self.norms[0](x)
        q, k, v = (
            product(normed).view(sequences, length, heads, -1).transpose(1, 2)
            for product, heads in (
                (self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads),
            )
        )  # fmt: skip
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.out(attended.transpose(1, 2).reshape(sequences, length, hidden))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    def __init__(self, *, layers: int, hidden: int, kv_heads: int = 4, ffn: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, hidden), nn.Linear(hidden, VOCAB)
        self.layers = nn.Sequential(*(Layer(hidden, 4, kv_heads, ffn) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.table(tokens)))


def traced(path: Path, step: Callable[[], None], *, steps: int = 3) -> Path:
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True,
        schedule=schedule(wait=1, warmup=1, active=steps),
    ) as profiler:  # fmt: skip
        for _ in range(steps + 2):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


def pause(seconds: float) -> None:
    with record_function(PLANTED):
        time.sleep(seconds)


def retimed(trace: dict[str, Any], wait_us: Callable[[float, bool], float]) -> dict[str, Any]:
    """Return the trace with `wait_us(microseconds, whether within a planted sleep)` from each of
    its instants to the next; without the marks of the sleeps."""
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    instants = sorted({at for e in spans for at in (e["ts"], e["ts"] + e["dur"])})
    begins = {e["ts"] for e in spans if e["name"] == PLANTED}
    moved = {instants[0]: 0.0}
    for before, at in pairwise(instants):
        moved[at] = moved[before] + wait_us(at - before, before in begins)
    kept = [
        event | {"ts": moved[event["ts"]],
                 "dur": moved[event["ts"] + event["dur"]] - moved[event["ts"]]}
        for event in spans if event["name"] != PLANTED
    ]  # fmt: skip
    return trace | {"traceEvents": kept}


def quieted(path: Path) -> Path:
    """Write the trace as a machine that does nothing else would have."""
    trace = retimed(
        json.loads(path.read_text()), lambda us, planted: us if planted else min(us, QUIET_US)
    )
    (path.parent / "quiet.json").write_text(json.dumps(trace))
    return path.parent / "quiet.json"


def delayed(path: Path, share: float, seed: int) -> Path:
    """Write the trace as a busy machine would have, which holds up a share of its instants."""
    dice = Random(seed)

    def wait_us(us: float, planted: bool) -> float:
        held_up = not planted and dice.random() < share
        return us + (dice.choice((500.0, 4e3, 12e3, 6e4, 2e5)) if held_up else 0.0)

    trace = retimed(json.loads(path.read_text()), wait_us)
    (path.parent / f"busy {share} {seed}.json").write_text(json.dumps(trace))
    return path.parent / f"busy {share} {seed}.json"


def training(
    model: nn.Module, batch: Callable[[], Tensor], *, sleep_s: float = 0.0, micro_batches: int = 1
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        for _ in range(micro_batches):
            pause(sleep_s)
            logits = model(batch())
            logits = logits.view(-1, logits.shape[-1])
            F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 48))


def diagnosed(path: Path) -> Any:
    return fourfold.diagnose([str(path)])


@pytest.mark.parametrize(
    ("micro_batches", "kv_heads", "ffn"),
    [(1, 4, 192), (2, 2, 128)],
    ids=["MLP as wide as qkv", "grouped heads"],
)
def test_sleep_before_each_batch_is_the_data_loader(
    micro_batches: int, kv_heads: int, ffn: int, tmp_path: Path
) -> None:
    model = Decoder(layers=3, hidden=64, kv_heads=kv_heads, ffn=ffn)
    step = training(model, tokens, sleep_s=0.05, micro_batches=micro_batches)
    path = traced(tmp_path / "trace.json", step)
    told = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": kv_heads, "vocab": VOCAB}
    told |= {"ffn": ffn, "seq_len": 48, "micro_batch": 2, "micro_batches": micro_batches}
    busy = [delayed(path, share, seed) for share in (0.01, 0.1, 0.3) for seed in range(4)]
    for trace in (path, *busy):
        settings = diagnosed(trace).settings
        assert {name: settings[name].value for name in told} == told
    answer = diagnosed(quieted(path))
    cause = answer.causes[0]
    assert cause.name == "data loader"
    assert cause.seconds > 0.05 * micro_batches
    assert "before aten::randint" in cause.evidence
    assert sum(answer.found.parts.values()) == pytest.approx(answer.step_s)


def test_sleep_within_a_step_is_named_by_the_operator_after_it(tmp_path: Path) -> None:
    model = Decoder(layers=3, hidden=64, ffn=128)
    model.head.register_forward_pre_hook(lambda *_: pause(0.05))
    path = traced(tmp_path / "trace.json", training(model, tokens))
    assert diagnosed(path).settings["layers"].value == 3
    cause = diagnosed(quieted(path)).causes[0]
    assert cause.name == "host outside of torch"
    assert cause.seconds > 0.05
    assert "before aten::" in cause.evidence
    assert "other work on its cores" in cause.remedy


@pytest.mark.parametrize("generates", [True, False])
def test_inference_is_told_by_its_missing_gradients(generates: bool, tmp_path: Path) -> None:
    model = Decoder(layers=3, hidden=64, ffn=128)

    def step() -> None:
        with torch.no_grad():
            ids = tokens()
            for _ in range(4 if generates else 1):
                ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)

    answer = diagnosed(traced(tmp_path / "trace.json", step))
    assert answer.scope == "no backward pass: parts and waits only"
    assert answer.settings["layers"].value == 3
    assert ("seq_len" in answer.settings) is not generates


@pytest.mark.parametrize("trains", [True, False])
def test_convolutions_are_no_transformer(trains: bool, tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    train = training(model, lambda: torch.ones(8, 3, 32, 32))

    def infer() -> None:
        with torch.no_grad():
            model(torch.ones(8, 3, 32, 32))

    answer = diagnosed(traced(tmp_path / "trace.json", train if trains else infer))
    assert "no transformer: parts and waits only" in answer.scope
    assert ("no backward pass" in answer.scope) is not trains
    assert answer.found.parts[parts.CONVOLUTION] > 0
    assert "layers" not in answer.settings


def op(name: str, start: float, end: float, thread: int = 1) -> dict[str, Any]:
    times = {"ts": start, "dur": end - start, "tid": thread}
    return {"ph": "X", "cat": "cpu_op", "name": name, **times}


def test_kernels_of_the_compiler_are_no_dispatch(tmp_path: Path) -> None:
    """They run between the operators that the compiled function calls, Python outside of it."""
    events: list[dict[str, Any]] = []
    for step in range(3):
        begin = 10_000.0 * step
        events.append(op(f"ProfilerStep#{step}", begin, begin + 9000) | {"cat": "user_annotation"})
        events.append(op("CompiledFunction", begin, begin + 5600))
        events += [op("aten::mm", begin + 600 * i, begin + 600 * i + 200) for i in range(10)]
        events += [op("aten::mul", begin + at, begin + at + 100) for at in (6300, 6700)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    spent = diagnosed(path).found.times[-1].parts
    assert spent[parts.ELEMENTWISE] == pytest.approx(9 * 400e-6 + 2 * 100e-6)
    assert spent[parts.LAUNCHES] == pytest.approx(700e-6 + 300e-6, rel=0.1)


def test_operators_that_compute_stand_for_kernels(tmp_path: Path) -> None:
    """A product with the copy in it, what calls little beside its own work, and leaves; no frame
    of autograd, no operator that only calls others."""
    events = [
        op("aten::linear", 0, 100), op("aten::addmm", 10, 90), op("aten::copy_", 12, 14),
        op("autograd::engine::evaluate_function: MulBackward0", 100, 130),
        op("aten::mul", 110, 120),
        op("aten::convolution_backward", 140, 240), op("aten::fill_", 141, 143),
        op("aten::to", 10, 40, thread=2), op("aten::_to_copy", 12, 39, thread=2),
        op("aten::copy_", 13, 38, thread=2),
        # Held up in an allocation, as on a busy machine: still one kernel.
        op("aten::scaled_dot_product_attention", 300, 402), op("aten::_flash_attention", 301, 401),
        op("aten::empty", 302, 390),
        op("aten::_scaled_dot_product_attention_math", 500, 600), op("aten::mm", 510, 550),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    named = [trace.texts[trace.ops.name[at]] for at in find_kernel_ops(trace)]
    assert named == [
        "aten::addmm", "aten::copy_", "aten::mul", "aten::convolution_backward",
        "aten::_flash_attention", "aten::mm",
    ]  # fmt: skip
    assert parts.simple_part("", "aten::addmm") == parts.OTHER
