"""Rows of other engines on one GPU, each in a process of its own, on random tokens.

python scripts/h200/rank.py ROWS.csv OUT.csv [--seconds 540] [--only ROW_ID ...]
    [--also ENGINE=FOLDER]

Runs the rows of a table that scripts/h200/engines.py has drawn, in its order, and writes OUT.csv:
the same cells with what was measured. While a row's steps are timed nothing else runs; its builds
and compiles go beside those of others where the GPU has room for all (`rough_gib`). A row of
several GPUs is one rank of them on a fake process group: its sizes are true, its seconds lack
communication.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

GIB = 2**30
ROW_LIMIT_S = 150.0
LEAST_S = 25.0  # left to begin another row
SETTLE_S, WINDOW_S = 2.5, 4.5  # of steps before those that are timed, and of those
LANES = 4  # rows that import, build or compile at once
CARD_GIB, CONTEXT_GIB, SLACK = 138.0, 2.0, 1.1  # of the GPU; of a process; over a rough count
DRAIN_S = 0.5
PATIENCE_S = 40.0
FEWEST, MOST = 5, 60  # timed steps
MEASURED = (
    "step_s", "low_s", "high_s", "steps", "first_s", "tokens_s_gpu", "mem_gb", "allocated_gib",
    "reserved_gib", "smi_gib", "state_gib", "retries", "gemm_s", "attention_s", "optimizer_s",
    "other_s", "idle_s", "launches", "attention_kernel", "sm_mhz", "watts", "torch", "status",
    "why",
)  # fmt: skip
# What the CUDA kernels of a step are for, by parts of their names; the first that fits counts.
PARTS = {
    "attention": ("sdpa", "flash", "fmha", "attention"),
    "gemm": ("gemm", "nvjet", "cutlass", "cublas", "gemv", "xmma"),
    "optimizer": ("multi_tensor",),
}
SPARE = "expandable_segments:True"  # as torchtitan's launcher sets it

Row = dict[str, str]
Facts = dict[str, Any]


class Job(NamedTuple):
    """One step of an engine, and how to let it begin with fresh peaks."""

    step: Callable[[], object]


# ---- In the process of a row: engines. Imports come before the GPU. ----


def load(engine: str) -> None:
    """Import what an engine needs."""
    import torch.distributed.fsdp  # noqa: F401

    if engine == "torchtitan":
        import torchtitan.train  # noqa: F401
        from torchtitan.models import deepseek_v3, llama3, qwen3  # noqa: F401
    else:
        import transformers.models.llama.modeling_llama
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    if engine == "accelerate":
        import accelerate  # noqa: F401
    if engine == "deepspeed":
        import deepspeed  # noqa: F401


def one_process(row: Row) -> None:
    """Say where this rank is, as a launcher does."""
    os.environ |= {
        "RANK": row["rank"], "LOCAL_RANK": "0", "WORLD_SIZE": row["n_gpus"],
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 9999),
    }  # fmt: skip


def titan(row: Row) -> Job:
    import torch
    import torch.distributed as dist
    import torchtitan.distributed.pipeline_parallel  # noqa: F401
    from torchtitan import train
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec

    world, batch, length = int(row["n_gpus"]), int(row["mbs"]), int(row["seq_len"])
    base, arguments = _titan_model(row)
    spec = train_spec.TrainSpec(
        **{
            **vars(base), "model_args": {"row": arguments}, "build_tokenizer_fn": None,
            "build_validator_fn": None, "state_dict_adapter": None,
            "build_dataloader_fn": lambda **_: _tokens_of_titan(row),
        }
    )  # fmt: skip
    train_spec.register_train_spec("row", spec)
    words = [
        "--model.name", "row", "--model.flavor", "row",
        "--training.seq_len", str(length), "--training.local_batch_size", str(_local(row)),
        "--training.steps", "1000", "--training.dtype", row["weights"],
        "--activation_checkpoint.mode", row["act_ckpt"],
        "--activation_checkpoint.selective_ac_option", "op",
        "--parallelism.data_parallel_shard_degree", row["dp"],
        "--parallelism.tensor_parallel_degree", row["tp"],
        "--parallelism.pipeline_parallel_degree", row["pp"],
        "--parallelism.pipeline_parallel_schedule", "1F1B",
        "--parallelism.pipeline_parallel_microbatch_size", str(batch),
        "--job.dump_folder", tempfile.mkdtemp(), "--debug.seed", "1",
    ]  # fmt: skip
    if row["compiled"] == "1":
        words.append("--compile.enable")
    if row["recipe"]:
        words += [
            "--model.converters", "quantize.linear.float8",
            "--quantize.linear.float8.recipe_name", row["recipe"],
            "--quantize.linear.float8.filter_fqns", "output",
        ]  # fmt: skip
    if row["experts"]:
        words.append("--debug.moe_force_load_balance")
    if world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.cuda.set_device(0)
        dist.init_process_group("fake", rank=int(row["rank"]), world_size=world, store=FakeStore())
        words += ["--comm.mode", "fake_backend"]
        _answer_stages(row, arguments.dim)
    trainer = train.Trainer(ConfigManager().parse_args(words))
    trainer.metrics_processor.should_log = lambda step: False  # it resets the peaks
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)

    return Job(step)


def _local(row: Row) -> int:
    """Return how many sequences a data-parallel rank takes in a step."""
    return int(row["gbs"]) // int(row["dp"])


def _titan_model(row: Row) -> tuple[Any, Any]:
    """Its train spec and the arguments of its model class."""
    import dataclasses

    from torchtitan.models import deepseek_v3, llama3, qwen3
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.moe import MoEArgs

    whole = {name: int(row[name] or 0) for name in (*_SIZES, *_EXPERTS)}
    shared = {
        "dim": whole["d_model"], "n_layers": whole["n_layers"], "n_heads": whole["n_heads"],
        "vocab_size": whole["vocab"],
    }  # fmt: skip
    if row["family"] == "llama":
        plain = TransformerModelArgs(
            **shared, n_kv_heads=whole["n_kv_heads"], rope_theta=500000,
            multiple_of=whole["d_ff"], ffn_dim_multiplier=1.0,
        )  # fmt: skip
        return llama3.get_train_spec(), plain
    moe = MoEArgs(
        num_experts=whole["experts"], top_k=whole["experts_per_token"], score_func="softmax",
        num_shared_experts=whole["shared_ffn"] // max(1, whole["expert_ffn"]),
        route_norm=row["model"].startswith("qwen"), score_before_experts=False,
    )  # fmt: skip
    if row["family"] == "deepseek":
        latent = dataclasses.replace(
            deepseek_v3.deepseekv3_args["16B"], **shared, inter_dim=whole["d_ff"],
            moe_inter_dim=whole["expert_ffn"], n_dense_layers=whole["dense_layers"], moe_args=moe,
            attn_type="sdpa", attn_mask_type="causal",
        )  # fmt: skip
        return deepseek_v3.get_train_spec(), latent
    mixed = qwen3.qwen3_args["30B-A3B"]
    some = dataclasses.replace(
        mixed, **shared, n_kv_heads=whole["n_kv_heads"], head_dim=whole["head_dim"],
        hidden_dim=whole["d_ff"], enable_weight_tying=row["tied"] == "1",
        moe_enabled=bool(row["experts"]), moe_inter_dim=whole["expert_ffn"], moe_args=moe,
    )  # fmt: skip
    return qwen3.get_train_spec(), some


_SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "head_dim")
_EXPERTS = ("experts", "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers")


def _tokens_of_titan(row: Row) -> Any:
    import torch
    from torchtitan.components.dataloader import BaseDataLoader

    batch, length = _local(row), int(row["seq_len"])

    class RandomTokens(BaseDataLoader):
        def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
            dice = torch.Generator().manual_seed(0)
            while True:
                ids = torch.randint(int(row["vocab"]), (batch, length + 1), generator=dice)
                yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """It has no state."""

    return RandomTokens()


def _answer_stages(row: Row, hidden: int) -> None:
    """A stage asks the one before it for shapes; on a fake process group nobody answers."""
    import torch
    import torch.distributed as dist

    shape = (int(row["mbs"]), int(row["seq_len"]) // int(row["tp"]), hidden)

    def receive(objects: list[object], *_: object, **__: object) -> None:
        objects[0] = (torch.empty(shape, dtype=torch.bfloat16, device="meta"),)

    dist.recv_object_list = receive
    dist.send_object_list = lambda *_, **__: None


def _hugging_face(row: Row) -> Any:
    """A model of transformers on the GPU, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = {name: int(row[name] or 0) for name in _SIZES}
    kind = {"llama": "llama", "qwen": "qwen3"}[row["family"]]
    size = whole["head_dim"] or whole["d_model"] // whole["n_heads"]
    config = AutoConfig.for_model(
        kind, num_hidden_layers=whole["n_layers"], hidden_size=whole["d_model"],
        intermediate_size=whole["d_ff"], num_attention_heads=whole["n_heads"],
        num_key_value_heads=whole["n_kv_heads"], vocab_size=whole["vocab"], head_dim=size,
        tie_word_embeddings=row["tied"] == "1", use_cache=False,
        max_position_embeddings=int(row["seq_len"]),
    )  # fmt: skip
    narrow = row["weights"] != "float32"
    dtype = torch.bfloat16 if narrow else torch.float32
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    if row["act_ckpt"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _batches(row: Row) -> Iterator[Any]:
    import torch

    dice = torch.Generator().manual_seed(0)
    shape = (int(row["mbs"]), int(row["seq_len"]))
    while True:
        ids = torch.randint(int(row["vocab"]), shape, generator=dice)
        yield ids.pin_memory().to("cuda", non_blocking=True)


def accelerate(row: Row) -> Job:
    """accelerate as `accelerate launch` configures it: FSDP2 (zero3), or one GPU alone (zero0)."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

    torch.cuda.set_device(0)
    plugin = None
    if row["sharding"] == "zero3":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
            cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT",
        )  # fmt: skip
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    compiling = {
        "dynamo_plugin": TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    }
    mixed = "bf16" if row["weights"] == "float32" else "no"
    accelerator = Accelerator(
        mixed_precision=mixed, fsdp_plugin=plugin, **compiling if row["compiled"] == "1" else {}
    )
    model = _hugging_face(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = _batches(row)

    def step() -> None:
        ids = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Job(step)


def deepspeed(row: Row) -> Job:
    """DeepSpeed with bf16 and torch's fused AdamW, for which it needs no compiled operator."""
    import deepspeed as engine_of
    import deepspeed.runtime.engine as runtime
    import torch
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    joins = {"flatten": _flatten_dense_tensors, "unflatten": _unflatten_dense_tensors}
    # What its compiled operator does, by torch's own functions.
    runtime.UtilsBuilder = lambda: SimpleNamespace(load=lambda: SimpleNamespace(**joins))
    torch.cuda.set_device(0)
    model = _hugging_face(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    settings = {
        "train_micro_batch_size_per_gpu": int(row["mbs"]), "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(row["sharding"][-1])},
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = engine_of.initialize(model=model, optimizer=optimizer, config=settings)
    if row["compiled"] == "1":
        engine.compile()
    batches = _batches(row)

    def step() -> None:
        ids = next(batches)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()

    return Job(step)


ENGINES: dict[str, Callable[[Row], Job]] = {
    "torchtitan": titan,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
}


# ---- In the process of a row: what is measured ----


def measure(row: Row) -> Facts:
    """Run a row's steps. The first makes the optimizer's state and compiles. After the second it
    waits until it has the GPU alone; peaks are of the steps after that, seconds of those after the
    clock has settled."""
    import torch
    from hot import Gauge

    one_process(row)
    cuda, gauge = torch.cuda, Gauge()
    facts: Facts = {"torch": torch.__version__, "status": "ok"}
    try:
        job = ENGINES[row["engine"]](row)
        facts["first_s"] = round(_seconds(job), 3)
        _seconds(job)
        facts["state_gib"] = _gib(cuda.memory_allocated())
        print("WARM", flush=True)
        sys.stdin.readline()
        cuda.reset_peak_memory_stats()
        with _Watch(gauge) as watch:
            seconds = _timed(job, _settled(job))
        step_s = median(seconds)
        tokens = _local(row) * int(row["seq_len"]) // (int(row["tp"]) * int(row["pp"]))
        stats = cuda.memory_stats()
        reserved = _gib(stats["reserved_bytes.all.peak"])
        facts |= {
            "step_s": f"{step_s:.5g}", "low_s": f"{seconds[0]:.5g}",
            "high_s": f"{seconds[-1]:.5g}", "steps": len(seconds),
            "tokens_s_gpu": f"{tokens / step_s:.0f}", "mem_gb": reserved,
            "allocated_gib": _gib(stats["allocated_bytes.all.peak"]), "reserved_gib": reserved,
            "smi_gib": _gib(gauge.used_bytes(os.getpid())), "retries": stats["num_alloc_retries"],
            "sm_mhz": watch.clock, "watts": watch.watts,
        }  # fmt: skip
        facts |= _parts(job, step_s)
    except torch.OutOfMemoryError as error:
        facts |= {"status": "oom", "why": str(error).splitlines()[0][:200]}
        facts["allocated_gib"] = _gib(cuda.max_memory_allocated())
    return facts


def _settled(job: Job) -> float:
    """Seconds of a step after SETTLE_S of steps."""
    end = time.perf_counter() + SETTLE_S
    one = _seconds(job)
    while time.perf_counter() < end:
        one = _seconds(job)
    return one


def _timed(job: Job, one: float) -> list[float]:
    """Seconds of steps that follow each other, in order of size; `one` is about what each takes."""
    import torch

    many = max(FEWEST, min(MOST, round(WINDOW_S / one)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(many + 1)]
    marks[0].record()
    for mark in marks[1:]:
        job.step()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks))


def _seconds(job: Job) -> float:
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    job.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _gib(count: int) -> str:
    return f"{count / GIB:.3f}"


class _Watch:
    """Clock and power while steps run, read twice a second."""

    def __init__(self, gauge: Any) -> None:
        self._gauge, self._over = gauge, threading.Event()
        self._clocks: list[int] = []
        self._watts: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while not self._over.wait(0.5):
            self._clocks.append(self._gauge.clock_mhz())
            self._watts.append(self._gauge.watts())

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def clock(self) -> int | str:
        return round(median(self._clocks)) if self._clocks else ""

    @property
    def watts(self) -> int | str:
        return round(median(self._watts)) if self._watts else ""


def _parts(job: Job, step_s: float) -> Facts:
    """Seconds of one more step's kernels, by what they are for. `idle_s`: of a step, what no kernel
    of the profiled one fills; kernels of several streams may overlap."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        job.step()
        torch.cuda.synchronize()
    sums = dict.fromkeys([*PARTS, "other"], 0.0)
    names: dict[str, float] = {}
    launches = 0
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        lower, seconds = event.name.lower(), event.device_time * 1e-6
        part = next((p for p, words in PARTS.items() if any(w in lower for w in words)), "other")
        sums[part] += seconds
        launches += 1
        if part == "attention":
            names[event.name] = names.get(event.name, 0.0) + seconds
    kernel = max(names, key=names.__getitem__, default="")[:60]
    busy = sum(sums.values())
    return {
        **{f"{part}_s": f"{seconds:.4g}" for part, seconds in sums.items()},
        "idle_s": f"{max(0.0, step_s - busy):.4g}", "launches": launches,
        "attention_kernel": kernel,
    }  # fmt: skip


def child(engine: str) -> None:
    """Import, wait for a row on standard input, measure it and print what was measured."""
    load(engine)
    import torch

    early = torch.cuda.is_initialized()
    print("READY", flush=True)
    line = sys.stdin.readline()
    if not line:
        return
    facts = measure(json.loads(line))
    if early:
        facts["why"] = f"{facts.get('why', '')} the import touched the GPU".strip()
    print("RESULT " + json.dumps(facts), flush=True)
    os._exit(0)  # process groups and compile workers need no farewell


# ---- The process that hands out rows ----


class Worker:
    """A row's process: it imports, receives its row when the GPU has room for it, is warm after two
    steps, and times the others when it is told to. Meanwhile the rest is stopped."""

    def __init__(self, row: Row, log: Path, folder: str, *, alone: bool) -> None:
        self.row, self._log = row, log
        rough = CARD_GIB if alone else float(row["rough_gib"])
        self.gib = rough * SLACK + CONTEXT_GIB
        self.state = "importing"
        self.beside = False  # whether another row had its part of the GPU's memory
        self.since = time.perf_counter()  # of the last state
        env = dict(os.environ, PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
        if row["engine"] == "torchtitan":
            env["PYTORCH_CUDA_ALLOC_CONF"] = SPARE
        if folder:
            env["PYTHONPATH"] = os.pathsep.join((env.get("PYTHONPATH", ""), folder))
        words = [sys.executable, os.path.abspath(__file__), "--child", row["engine"]]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=env,
                start_new_session=True,
            )  # fmt: skip

    def look(self) -> None:
        """Move on to the state that its log tells of."""
        if self._process.poll() is not None:
            self.state = "over"
        elif self.state in ("importing", "warming"):
            word, then = {"importing": ("READY", "ready"), "warming": ("WARM", "warm")}[self.state]
            if word in self._lines():
                self.state, self.since = then, time.perf_counter()

    def hand_over(self) -> None:
        self._say(json.dumps(self.row))
        self.state, self.since = "warming", time.perf_counter()

    def time_steps(self) -> None:
        self._say("GO")
        self.state, self.since = "timing", time.perf_counter()

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended already: its log says why
            self._process.stdin.write((line + "\n").encode())
            self._process.stdin.flush()

    def signal(self, which: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, which)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()

    def facts(self) -> Facts:
        lines = [line.strip() for line in self._lines() if line.strip()]
        found = [line for line in lines if line.startswith("RESULT ")]
        if found:
            return json.loads(found[-1].removeprefix("RESULT "))
        last = lines[-1] if lines else ""
        why = next((line for line in reversed(lines) if "Error" in line), last)
        print("\n".join(lines[-25:]), flush=True)
        return {"status": "fail", "why": why[:300]}


class Sitting:
    """Rows over a GPU: several import and warm up at once where its memory has room for all; one
    alone times its steps."""

    def __init__(self, rows: list[Row], out: Path, seconds: float, folders: dict[str, str]) -> None:
        self._rows, self._out, self._folders = list(rows), out, folders
        self._end = time.perf_counter() + seconds
        self._folder = Path(tempfile.mkdtemp())
        self._workers: list[Worker] = []
        self._done: list[Row] = []
        self._alone: set[str] = set()  # rows that get the GPU alone

    def run(self) -> None:
        while self._rows or self._workers:
            left = self._end - time.perf_counter()
            if left < 0:
                break
            while len(self._workers) < LANES and self._rows and left > LEAST_S:
                row = self._rows.pop(0)
                name = row["row_id"]
                folder, log = self._folders.get(row["engine"], ""), self._folder / name
                self._workers.append(Worker(row, log, folder, alone=name in self._alone))
            if left < LEAST_S and all(w.state in ("importing", "ready") for w in self._workers):
                break
            for worker in list(self._workers):
                worker.look()
                late = time.perf_counter() - worker.since > ROW_LIMIT_S
                if worker.state == "over":
                    self._finish(worker, worker.facts())
                elif late and worker.state in ("warming", "timing"):
                    worker.end()
                    self._finish(worker, {"status": "dropped", "why": f"over {ROW_LIMIT_S:.0f} s"})
            self._move()
            time.sleep(0.05)
        for worker in self._workers:
            worker.end()
        names = [row["row_id"] for row in self._rows]
        print("not run for lack of time:", *(w.row["row_id"] for w in self._workers), *names)

    def _move(self) -> None:
        """Time the first that is warm, or else hand a row to the first that fits."""
        if any(worker.state == "timing" for worker in self._workers):
            return
        warm = next((worker for worker in self._workers if worker.state == "warm"), None)
        if warm:
            for worker in self._workers:
                if worker.state == "warming":
                    worker.signal(signal.SIGSTOP)
            time.sleep(DRAIN_S)  # for the work that the stopped have queued
            warm.time_steps()
            return
        held = sum(w.gib for w in self._workers if w.state == "warming")
        for worker in self._workers:
            if worker.state != "ready":
                continue
            if not held or held + worker.gib < CARD_GIB:
                worker.hand_over()
                held += worker.gib
            elif time.perf_counter() - worker.since > PATIENCE_S:
                break  # smaller rows behind it would keep it waiting
        warming = [worker for worker in self._workers if worker.state == "warming"]
        for worker in warming:
            worker.beside |= len(warming) > 1

    def _finish(self, worker: Worker, facts: Facts) -> None:
        self._workers.remove(worker)
        for other in self._workers:
            other.signal(signal.SIGCONT)
        row, wall = worker.row, time.perf_counter() - worker.since
        if worker.beside and (facts["status"] == "oom" or int(facts.get("retries", 0))):
            print(row["row_id"], "again, alone:", facts["status"], facts.get("why", ""), flush=True)
            self._rows.insert(0, row)
            self._alone.add(row["row_id"])
            return
        self._done.append(row | {name: str(facts.get(name, "")) for name in MEASURED})
        show = ("status", "step_s", "first_s", "allocated_gib", "reserved_gib", "smi_gib", "why")
        shown = (f"{name}={facts.get(name, '')}" for name in show)
        print(f"{self._end - time.perf_counter():.0f}", row["row_id"], f"{wall:.0f} s", *shown,
              flush=True)  # fmt: skip
        with self._out.open("w", newline="") as file:
            table = csv.DictWriter(file, self._done[0], lineterminator="\n")
            table.writeheader()
            table.writerows(self._done)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--only", nargs="*", help="these rows alone")
    parser.add_argument("--also", nargs="*", default=[], metavar="ENGINE=FOLDER",
                        help="where rows of an engine alone find packages")  # fmt: skip
    args = parser.parse_args()
    with args.rows.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if args.only:
        rows = [row for row in rows if row["row_id"] in args.only]
    folders = dict(pair.split("=", 1) for pair in args.also)
    Sitting(rows, args.out, args.seconds, folders).run()


if __name__ == "__main__":
    main()
