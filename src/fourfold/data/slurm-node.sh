#!/bin/bash
# One node's part of the run: the engine's own launcher starts the ranks here. NODE_RANK,
# MASTER_ADDR and MASTER_PORT say how the nodes meet.
here=@folder@
export NODE_RANK=$SLURM_PROCID # SLURM_NODEID does not follow a host file
tell() {
    printf '{"rank": %d, "host": "%s", "step": "%s", %s}\n' "$NODE_RANK" \
        "${SLURMD_NODENAME:-$(hostname)}" "$SLURM_STEP_ID" "$1" >>"$here/news-$NODE_RANK.jsonl"
}
log=$here/engine-$NODE_RANK.log
exec >"$log" 2>&1
trap 'code=${asked:-$?}; sync "$log"; tell "\"code\": $code, \"at\": $(date +%s.%N)"' EXIT
tell "\"pid\": $$"
cd @cwd@ || exit
if [ "$NODE_RANK" = 0 ]; then # the next port at which nobody listens
    listens() { (exec 3<>"/dev/tcp/$1/$MASTER_PORT") 2>/dev/null; }
    while listens "$MASTER_ADDR" || listens 127.0.0.1; do
        MASTER_PORT=$((MASTER_PORT + 1))
    done
    echo "$MASTER_PORT" >"$@port_file@.new" && mv "$@port_file@.new" "$@port_file@"
else
    until [ -s "$@port_file@" ]; do sleep 0.1; done
    MASTER_PORT=$(cat "$@port_file@")
fi
trap asked=143 TERM # the engine is asked too: its processes must not outlive this one
