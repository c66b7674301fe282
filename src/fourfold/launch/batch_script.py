"""The batch script of one or several runs: short enough to read, edit and submit by hand."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import UserError
from fourfold.installed import SOURCE_FOLDER
from fourfold.result.job import ENGINE_FILE, JOB_FILE, PORT_VARIABLE, Job
from fourfold.spec import check
from fourfold.spec.site import Site
from fourfold.units import counted

# What the script leaves in a job's folder when its ranks are gone: how often Slurm had started it
# over, and the exit status of srun.
EXIT_FILE = "slurm-exit"
# Beside that: the user stopped the job, so how the script ended is no result.
STOPPED_FILE = "slurm-stopped"
# Of another engine: the limit after which the script ended a run that printed no step.
HUNG_FILE = "slurm-hung"
_LEFT = (
    f"{EXIT_FILE},{STOPPED_FILE},{HUNG_FILE},news-*,beat-*,facts-*,failure-*,answer-*,engine-*.log"
)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Jobs with equally many ranks and the same variables. `logs`: where Slurm's own words go."""

    job: Job
    tasks: tuple[int, ...]
    folders: tuple[Path, ...]
    logs: Path
    array: bool = False

    @property
    def ranks(self) -> int:
        return self.job.processes(self.tasks[0])


def _check(batch: BatchJob, site: Site, nodes: int) -> None:
    if site.hosts and nodes > len(site.hosts):
        rule = f"must have at least the {nodes} that {counted(batch.ranks, 'rank')} need"
        raise UserError(rule, field="hosts", value=len(site.hosts), source=site.name)
    for folder in (*batch.folders, batch.logs):  # an #SBATCH line ends there, whatever the quotes
        hint = "choose a folder without line ends"
        check.that(str(folder).isprintable(), "folder", str(folder), "is not one line", hint)


def script(batch: BatchJob, site: Site) -> str:
    nodes = site.nodes(batch.ranks)
    _check(batch, site, nodes)
    folders = "\n    ".join(shlex.quote(str(folder)) for folder in batch.folders)
    which = 'run "${jobs[$SLURM_ARRAY_TASK_ID]}"'
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by fourfold. Submit it by sbatch, edited or not; the same fourfold command",
            "# without --print-launch follows the job, or collects what it has left.",
            *(f"#SBATCH {line}" for line in _asked(batch, site)),
            *site.prelude,
            *(f"export {name}={value}" for name, value in _variables(batch, site)),
            *_first_host(site, nodes),
            f"jobs=(\n    {folders}\n)",
            # Not "ignore", which srun would inherit.
            *(["trap : TERM USR1 # ranks save and end; this waits"] if batch.job.patient else []),
            "status=0 count=0",
            *_watch(batch, nodes),
            "run() { # one task on every node, which starts the ranks there",
            f'    [ -e "$1/{JOB_FILE}" ] || return',
            "    # What an earlier submission left is not of this one.",
            f'    [ -n "$SLURM_RESTART_COUNT" ] || rm -f "$1"/{{{_LEFT}}}',
            "    # The first node takes the next that is free, and tells the others in this file.",
            "    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + count++) % 12000))",
            f'    export {PORT_VARIABLE}="$1/slurm-port-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"',
            f"    {shlex.join(_srun(batch, site))} \\",
            f"        {_task(batch, site)}{_waited(batch)}",
            "    code=$?",
            f'    echo "${{SLURM_RESTART_COUNT:-0}} $code" >"$1/{EXIT_FILE}"',
            "    [ $code = 0 ] || status=$code",
            "}",
            which if batch.array else 'for job in "${jobs[@]}"; do run "$job"; done',
            "exit $status",
            "",
        ]
    )


def _srun(batch: BatchJob, site: Site) -> list[str]:
    """One task a node. --export: what the script exports reaches it, also where the job has begun
    without the caller's variables."""
    nodes, cpus = site.nodes(batch.ranks), site.per_node(batch.ranks) * site.cpus_per_rank
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--export=ALL", _at_a_bad_exit(batch)]
    # It does not take the first from sbatch; without, one core must not be all that ranks get.
    return [*words, f"--cpus-per-task={cpus}" if cpus else "--cpu-bind=none", *site.srun]


def _task(batch: BatchJob, site: Site) -> str:
    """What runs on every node for the job in folder $1."""
    if batch.job.job == "engine":
        words = [*site.wrapper, "bash"]
        return f'{shlex.join(words)} "$1/{ENGINE_FILE}"'
    words = [*site.wrapper, site.python or sys.executable, "-P", "-m", "fourfold.engine.worker"]
    tasks = ",".join(map(str, batch.tasks))
    per_node = site.per_node(batch.ranks)
    return f'{shlex.join(words)} "$1/{JOB_FILE}" --tasks {tasks} --per-node {per_node}'


def _waited(batch: BatchJob) -> str:
    """After srun: nothing where it is waited for anyway."""
    if batch.job.job != "engine":
        return ""
    return ' &\n    srun=$!\n    watch "$1" $srun &\n    wait $srun'


def _watch(batch: BatchJob, nodes: int) -> list[str]:
    """Another engine's run that nobody follows is ended as by a follower: when no node has printed
    what a step looks like for too long."""
    if batch.job.job != "engine":
        return []
    limits = batch.job.task_limits(batch.tasks[0])
    steps = shlex.quote(batch.job.option("steps"))
    return [
        "watch() { # ends srun, process $2, when no node has printed a step for too long",
        f'    tail -q -n +1 -F --pid=$2 "$1"/engine-{{0..{nodes - 1}}}.log 2>/dev/null |',
        f"        LC_ALL=C grep -a --line-buffered -E {steps} | {{",
        f"            name=start limit={limits.start_s:g}",
        "            while read -r -t $limit; got=$?; [ $got = 0 ]; do",
        f"                name=step limit={limits.step_s:g}",
        "            done",
        "            [ $got -le 128 ] || { # not the end of tail",
        f'                echo "$name limit of $limit s" >"$1/{HUNG_FILE}"',
        "                kill $2",
        "            }",
        "        }",
        "}",
    ]


def _at_a_bad_exit(batch: BatchJob) -> str:
    """Our ranks have words of their own to say; those of another engine may wait for ever."""
    return f"--kill-on-bad-exit={int(batch.job.job == 'engine')}"


def _first_host(site: Site, nodes: int) -> list[str]:
    """Slurm sorts its nodes; a host file is the one way to another order."""
    if not site.hosts:
        return [
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_ADDR",
        ]
    hosts = site.hosts[:nodes]
    return [
        "SLURM_HOSTFILE=$(mktemp)",
        "trap 'rm -f \"$SLURM_HOSTFILE\"' EXIT",
        f'printf "%s\\n" {shlex.join(hosts)} >"$SLURM_HOSTFILE"',
        f"export SLURM_HOSTFILE SLURM_DISTRIBUTION=arbitrary MASTER_ADDR={hosts[0]}",
    ]


def _asked(batch: BatchJob, site: Site) -> list[str]:
    job, per_node = batch.job, site.per_node(batch.ranks)
    nodes = site.nodes(batch.ranks)
    lines = [f"--job-name=fourfold-{job.job}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    if site.cpus_per_rank:
        lines.append(f"--cpus-per-task={per_node * site.cpus_per_rank}")
    needs_gpus = dict(job.options).get("device") != "cpu" and (
        not job.specs or any(spec.device != "cpu" for spec in job.specs)
    )
    if needs_gpus and site.ask_gpus != "no":
        by_word = {"gpus-per-node": "--gpus-per-node=", "gres": "--gres=gpu:"}
        kind = f"{site.gpu_type}:" if site.gpu_type else ""
        lines.append(f"{by_word[site.ask_gpus]}{kind}{per_node}")
    lines += site.asked()
    if site.exclusive:  # another job on the node would be measured too
        lines.append("--exclusive")
    if site.hosts:
        lines.append(f"--nodelist={','.join(site.hosts[:nodes])}")
    if batch.array:
        lines.append(f"--array=0-{len(batch.folders) - 1}")
    # A measurement that starts over is another one; a training goes on from its checkpoint.
    lines += ["--requeue", "--open-mode=append"] if job.patient else ["--no-requeue"]
    if job.patient and site.warn_s:
        lines.append(f"--signal=USR1@{site.warn_s}")
    logs = Path(str(batch.logs).replace("%", "%%"))
    log = logs / ("slurm-%A_%a.log" if batch.array else "slurm-%j.log")
    # sbatch reads words as a shell does.
    return [*lines, f"--output={shlex.quote(str(log))}", *site.extra]


def _variables(batch: BatchJob, site: Site) -> list[tuple[str, str]]:
    """Names and values, as words of the shell."""
    own = batch.job.task_env(batch.tasks[0])
    fixed = {"PYTHONUNBUFFERED": "1"}
    if site.interface:
        fixed |= {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    if batch.job.job == "engine":  # its own variables are in its own script
        return sorted(fixed.items())
    source = SOURCE_FOLDER
    paths = os.pathsep.join(filter(None, [source, own.get("PYTHONPATH", "")]))
    # torch keeps its last collectives, to be dumped when a limit passes.
    fixed |= {"TORCH_FR_BUFFER_SIZE": "2000"}
    words = {name: shlex.quote(value) for name, value in (fixed | own).items()}
    # Before what the prelude's modules have put there.
    words["PYTHONPATH"] = f"{shlex.quote(paths)}${{PYTHONPATH:+:$PYTHONPATH}}"
    return sorted(words.items())


def same_batch(job: Job) -> tuple[object, ...]:
    """What jobs must have in common to share a script."""
    devices = tuple(spec.device for spec in job.specs)
    if job.job == "engine":  # its own variables are in its own script, its limits in this one
        return job.processes(0), job.task_limits(0), job.option("steps"), devices
    return job.processes(0), tuple(sorted(job.task_env(0).items())), devices
