"""One process that imports torch and the engine once and forks the ranks of one cell after another.
It reads requests as JSON lines and answers each with one; whatever an engine prints goes to a log,
and whatever it does to a rank ends with the rank."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it in their first step: seconds, which ranks inherit
import torch.distributed as dist

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Case, micro_batches, tiny_of
from fourfold.conformance.ranks.compare import figures, relative, signature
from fourfold.conformance.ranks.reference import (
    Elements,
    Tiny,
    batch,
    held_norm,
    steady_seed,
    train,
)

# What the others still say after one rank has failed.
LAST_WORDS_S = 3.0


def fork(work: Callable[[], None], log: Path) -> int:
    """A child that does `work`; its exit code says whether it could."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, 1)
        os.dup2(target, 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait(pids: dict[int, int], limit_s: float) -> dict[int, int]:
    """Exit codes by rank; ranks that outlive the limit, or a fallen one, are killed (-9)."""
    codes: dict[int, int] = {}
    until = time.monotonic() + limit_s
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank]:
                    until = min(until, time.monotonic() + LAST_WORDS_S)
        if time.monotonic() > until:
            for rank, pid in pids.items():
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[rank] = -9
        time.sleep(0.02)
    return codes


def run_rank(
    adapter: type[Adapter], case: Case, world: int, folder: Path, limit_s: float, fault: str
) -> None:
    faulthandler.dump_traceback_later(0.9 * limit_s)  # where it hangs is read from the log
    torch.set_num_threads(1)
    backend = "gloo" if case.device.type == "cpu" else "nccl"
    if backend == "nccl":
        torch.cuda.set_device(case.device)
    adapter.prepare(case.cell)
    if fault:
        adapter.plant(fault)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=case.rank, world_size=world
    )
    torch.manual_seed(1234)
    made = adapter(case)
    made.build()
    grads: list = []
    losses, norms = made.train(lambda: grads.extend(made.gradients()))
    state = [(numbers, p.detach()) for numbers, p in made.owned()]
    parts = {
        name: [(numbers.cpu(), value.detach().cpu().clone()) for numbers, value in found]
        for name, found in (("grad", grads), ("param", state))
    }
    answer = {"loss": losses, "norm": norms, "standins": sorted(made.standins), **parts}
    torch.save(answer, folder / f"rank-{case.rank}.pt")
    dist.barrier()


def judge(adapter: type[Adapter], cell: Cell, tiny: Tiny, seed: int, folder: Path) -> None:
    """Compare what the ranks left with the reference; where it differs, with other objectives."""
    torch.set_num_threads(1)
    ranks = [torch.load(folder / f"rank-{rank}.pt") for rank in range(cell.world)]
    elements = Elements(tiny, seed)
    grad, spread = elements.assemble(rank["grad"] for rank in ranks)
    param, after = elements.assemble(rank["param"] for rank in ranks)
    got: dict = {"grad": grad, "param": param, "spread": spread, "spread_after": after}
    got |= {"loss": ranks[0]["loss"], "norm": ranks[0]["norm"]}
    got["sums"] = elements.sums(rank["grad"] for rank in ranks)
    got["held"] = held_norm(ranks[0]["grad"]) if cell.world > 1 else 0.0
    apart = max(relative(rank["norm"], got["norm"]) for rank in ranks)
    truth = train(tiny, seed, decays=adapter.decays)
    answer: dict = {"end": "done", "convention": "", "signature": [], **figures(got, truth)}
    answer["standins"] = ranks[0]["standins"]
    rows = tiny.batch // cell.dp
    micro_rows = rows // micro_batches(cell)
    means = {"mean of every micro batch": (micro_rows, 1), "mean of every rank": (rows, 1)}
    means["mean of every micro batch and context rank"] = (micro_rows, cell.cp)
    for words, (group, cp) in means.items():
        if not answer["equal"] and (group < tiny.batch or cp > 1):
            other = figures(got, train(tiny, seed, rows=group, cp=cp, decays=adapter.decays))
            answer |= other | {"convention": words} if other["equal"] else {}
    degrees = {"TP": cell.tp, "PP": cell.pp, "CP": cell.cp, "EP": cell.ep, "ETP": cell.etp}
    degrees |= {"DP": cell.dp, "micro batches": micro_batches(cell)}
    degrees["targets"] = int(batch(tiny, 0, seed)[2].sum())
    if not answer["equal"]:
        answer["signature"] = signature(got, truth, degrees)
    if apart > 1e-6:
        answer["signature"].append(f"norms of ranks differ by {apart:.2g}")
    answer["equal"] = answer["equal"] and not answer["signature"]
    (folder / "answer.json").write_text(json.dumps(answer, default=float), encoding="utf-8")


def failure(adapter: type[Adapter], folder: Path, codes: dict[int, int], limit_s: float) -> dict:
    """Why ranks ended. An error raised in the engine is its refusal; in torch or here it is not."""
    bad = [rank for rank, code in codes.items() if code not in (0, -9)]
    if not bad:
        text = (folder / "rank-0.log").read_text(errors="replace")
        at = re.findall(r'File "([^"]+)", line (\d+)', text.partition("most recent call first")[2])
        where = ", from ".join(f"{Path(file).name} line {line}" for file, line in at[:4])
        return {"end": "hang", "why": f"no answer within {limit_s:g} s; rank 0 at {where}"}
    tails = {}
    for rank in bad:
        lines = (folder / f"rank-{rank}.log").read_text(errors="replace").splitlines()
        tails[rank] = [line for line in lines if line.strip()] or [""]
    # The rank that failed first is the one that does not complain of a lost peer.
    peers = ("Connection closed", "Connection reset", "onnection was", "gloo/transport")
    rank = min(bad, key=lambda r: any(word in tails[r][-1] for word in peers))
    last, code = tails[rank], codes[rank]
    if code < 0:
        return {"end": "crash", "why": f"rank {rank} died of {signal.Signals(-code).name}"}
    starts = [i for i, line in enumerate(last) if line.startswith("Traceback")]
    frames = [line for line in last[starts[-1] if starts else 0 :] if line.startswith('  File "')]
    said = [line for line in last if not line.startswith((" ", "Traceback"))]
    words = next((line for line in reversed(said) if ": " in line or "Error" in line), last[-1])
    place = frames[-1].split('"')[1] if frames else ""
    speaker = sys.modules[adapter.__module__].__file__
    ours = "fourfold/conformance" in place or place in ("", speaker)
    end = "crash" if ours or "site-packages/torch/" in place else "refused"
    where = f" ({Path(place).name} {frames[-1].split(',')[1].strip()})" if place else ""
    return {"end": end, "why": words.strip()[:300] + where}


def run_cell(adapter: type[Adapter], request: dict) -> dict:
    cell, device = Cell.parse(request["cell"]), request.get("device", "cpu")
    why = cell.illegal() or adapter.legal(cell)
    if why or request.get("only_legal"):
        return {"end": "refused" if why else "legal", "why": why}
    if device == "cuda" and torch.cuda.device_count() < cell.world:
        why = f"{cell.world} ranks need as many GPUs; here are {torch.cuda.device_count()}"
        return {"end": "blocked", "why": why}
    limit_s = float(request.get("limit_s", 120.0))
    with tempfile.TemporaryDirectory(prefix="cell-") as name:
        folder = Path(name)
        tiny = tiny_of(cell, request.get("size", 0), **adapter.shape(cell))
        seed_file = folder / "seed"

        def draw() -> None:
            torch.set_num_threads(1)
            seed_file.write_text(str(steady_seed(tiny, request.get("seed", 0))))

        wait({0: fork(draw, folder / "draw.log")}, limit_s)
        seed = int(seed_file.read_text())
        os.environ |= {"WORLD_SIZE": str(cell.world), "LOCAL_WORLD_SIZE": str(cell.world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        pids = {}
        for rank in range(cell.world):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            place = torch.device("cpu") if device == "cpu" else torch.device(device, rank)
            case = Case(cell, tiny, seed, rank, place)
            asked = (adapter, case, cell.world, folder, limit_s, request.get("break", ""))
            pids[rank] = fork(partial(run_rank, *asked), folder / f"rank-{rank}.log")
        codes = wait(pids, limit_s)
        if any(codes.values()):
            return failure(adapter, folder, codes, limit_s)
        judging = fork(lambda: judge(adapter, cell, tiny, seed, folder), folder / "rank-0.log")
        if any(wait({0: judging}, limit_s).values()):
            return failure(adapter, folder, {0: 1}, limit_s)
        return json.loads((folder / "answer.json").read_text(encoding="utf-8"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serve(adapter: type[Adapter], answers: int) -> None:
    """`answers` is a descriptor that nothing else writes to."""
    for line in sys.stdin:
        try:
            answer: dict = run_cell(adapter, json.loads(line))
        except Exception as error:
            answer = {"end": "crash", "why": f"{type(error).__name__}: {error}"}
        for name, value in answer.items():
            if isinstance(value, float) and not math.isfinite(value):
                answer[name] = math.inf
        os.write(answers, f"{json.dumps(answer)}\n".encode())
