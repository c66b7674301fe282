"""Another engine's run under Slurm: the script of one node, in bash alone, since its container need
not have fourfold in it; and how the run is followed, by its log, its nodes' words and the job's
state."""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.batch_script import HUNG_FILE
from fourfold.launch.command import Ended, Watch, watched
from fourfold.launch.slurm import Slurm
from fourfold.launch.slurm_ranks import SlurmRanks, started
from fourfold.result.job import LOG_FILES, PORT_VARIABLE, Job
from fourfold.spec import catalog

_LAST_WORDS_S = 15.0  # files of other hosts are seen late
_LOOK_S = 0.1
# What bash says of a command that a signal ended; with them, a node may only follow another one.
_KILLED = (128 + 9, 128 + 15)


def follow_command(slurm: Slurm, job: Job, folder: Path, watch: Watch) -> Ended:
    """Of a job that is submitted; returns when nothing of it runs."""
    began = time.monotonic()
    ranks = started(slurm, job, [0], folder)
    try:
        code, limit, steps, start_s = watched(
            partial(_exit_code, ranks), folder, watch, lambda: ranks.queued
        )
    except BaseException:
        ranks.stop()
        raise
    ranks.end()
    if code is not None and (passed := _limit_of_script(folder)):
        # As where it is followed: silence after enough steps is no hang.
        code, limit = None, "" if steps >= watch.enough else passed
    if code:
        ranks.report_lost_nodes()
    node, own_code = _first_failed(ranks)
    return Ended(
        code=own_code if code and node >= 0 else code,
        limit=limit,
        steps=steps,
        seconds=time.monotonic() - began,
        start_s=start_s,
        log=_last_words(ranks, node),
        kernel_kills=ranks.scene.kernel_kills,
        where=_named(ranks, node),
        by_scheduler=ranks.scene.by_scheduler if code is not None else None,
        environment=ranks.environment,
    )


def _limit_of_script(folder: Path) -> str:
    """By which the script has ended the run; '' where it has not."""
    with contextlib.suppress(UserError):
        return files.read_own_text(folder / HUNG_FILE).strip()
    return ""


def _exit_code(ranks: SlurmRanks) -> int | None:
    """Of the nodes as one program; None while any of them runs."""
    if not ranks.poll():
        return None
    until = time.monotonic() + _LAST_WORDS_S
    while not _is_settled(ranks) and time.monotonic() < until:
        time.sleep(_LOOK_S)
        ranks.poll()
    code = ranks.scene.worker_exit
    return 1 if code is None else code


def _is_settled(ranks: SlurmRanks) -> bool:
    """Whether the end is explained: by the script's status and, of a bad one, by its nodes or by
    Slurm."""
    scene = ranks.scene
    if scene.by_scheduler is not None or scene.worker_exit == 0:
        return True
    if scene.worker_exit is None or ranks.has_ended:
        return ranks.has_ended and scene.worker_exit is not None
    # Who was killed for memory is known to Slurm alone, and of a whole job.
    killed = 128 + 9 in (code for code, _ in scene.exits.values()) and not ranks.is_step
    return len(scene.exits) == scene.ranks and not killed


def _first_failed(ranks: SlurmRanks) -> tuple[int, int]:
    """(node, exit code); others were ended for its sake. (-1, 0) where none has failed."""
    bad = [(code in _KILLED, at, node, code) for node, (code, at) in ranks.scene.exits.items()]
    for _, _, node, code in sorted(one for one in bad if one[3]):
        return node, code
    return -1, 0


def _last_words(ranks: SlurmRanks, node: int) -> Path:
    """The log of the node that failed or, of all alike, the last that was written; what Slurm says
    where no node has written anything."""
    logs = [path for path in ranks.scene.folder.glob(LOG_FILES) if path.stat().st_size]
    own = ranks.scene.folder / f"engine-{node}.log"
    if own in logs:
        return own
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return newest or ranks.scene.worker_log or own


def _named(ranks: SlurmRanks, node: int) -> str:
    if node < 0:
        return ""
    first = node * ranks.each
    host = ranks.scene.hosts.get(node, f"node {node}")
    return f"{host} (ranks {first}-{first + ranks.each - 1})"


def node_script(command: Sequence[str], env: Mapping[str, str], *, folder: Path, cwd: Path) -> str:
    """`folder`: of the job; `cwd`: where the command was asked for, as its words may be relative
    to that."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())]
    places = {"folder": shlex.quote(str(folder)), "cwd": shlex.quote(str(cwd))}
    places["port_file"] = PORT_VARIABLE
    head = re.sub(r"@(\w+)@", lambda found: places[found[1]], catalog.text("slurm-node.sh"))
    # The last command, not `exec`: the trap tells how it ended.
    return "\n".join([head + "\n".join([*exports, shlex.join(command)]), ""])
