"""One node's part of another engine's run under a site's scheduler, in bash alone: the container of
an engine need not have fourfold in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from fourfold.result.job import PORT_VARIABLE

_HEAD = """\
#!/bin/bash
# One node's part of the run: the engine's own launcher starts the ranks here. NODE_RANK,
# MASTER_ADDR and MASTER_PORT say how the nodes meet.
here={folder}
export NODE_RANK=$SLURM_PROCID # SLURM_NODEID does not follow a host file
tell() {{
    printf '{{"rank": %d, "host": "%s", "step": "%s", %s}}\\n' "$NODE_RANK" \\
        "${{SLURMD_NODENAME:-$(hostname)}}" "$SLURM_STEP_ID" "$1" >>"$here/news-$NODE_RANK.jsonl"
}}
log=$here/engine-$NODE_RANK.log
exec >"$log" 2>&1
trap 'code=${{asked:-$?}}; sync "$log"; tell "\\"code\\": $code, \\"at\\": $(date +%s.%N)"' EXIT
tell "\\"pid\\": $$"
cd {cwd} || exit
if [ "$NODE_RANK" = 0 ]; then # the next port at which nobody listens
    listens() {{ (exec 3<>"/dev/tcp/$1/$MASTER_PORT") 2>/dev/null; }}
    while listens "$MASTER_ADDR" || listens 127.0.0.1; do
        MASTER_PORT=$((MASTER_PORT + 1))
    done
    echo "$MASTER_PORT" >"${port_file}.new" && mv "${port_file}.new" "${port_file}"
else
    until [ -s "${port_file}" ]; do sleep 0.1; done
    MASTER_PORT=$(cat "${port_file}")
fi
trap asked=143 TERM # the engine is asked too: its processes must not outlive this one
"""


def node_script(command: Sequence[str], env: Mapping[str, str], *, folder: Path, cwd: Path) -> str:
    """`folder`: of the job; `cwd`: where the command was asked for, as its words may be relative
    to that."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())]
    places = {"folder": shlex.quote(str(folder)), "cwd": shlex.quote(str(cwd))}
    head = _HEAD.format(**places, port_file=PORT_VARIABLE)
    # The last command, not `exec`: the trap tells how it ended.
    return "\n".join([head + "\n".join([*exports, shlex.join(command)]), ""])
