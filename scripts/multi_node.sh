#!/usr/bin/env bash
# Start a training on several machines without a scheduler: run this on each machine. Arguments are passed to the trainer.
#
#   HEAD=node0:29500 NODES=4 NODE=0 scripts/multi_node.sh --config X.yaml      # first machine: rank 0, and the log
#   HEAD=node0:29500 NODES=4 NODE=1 scripts/multi_node.sh --config X.yaml      # second machine, ...
#
# MEGAPAR_SECRET, the same on all machines, protects the rendezvous (docs/launch.md). JOB names the run, if one head serves
# several, and its folder of logs. LAUNCH: further flags of the launcher, such as --log-dir logs --preflight. SCRIPT: another
# script than pretrain_moe.py. RANKS: ranks of this machine (default: its devices).
set -euo pipefail
cd "$(dirname "$0")/.."
: "${HEAD:?HOST:PORT of the first machine}" "${NODES:?number of machines}" "${NODE:?index of this machine, from 0}"
python=".venv/bin/python"
[ -x "$python" ] || python=python3
ranks="${RANKS:-$("$python" -c 'import torch; print(max(1, torch.accelerator.device_count()))')}"
# shellcheck disable=SC2086
exec "$python" -m megapar.tools.main launch --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "$ranks" \
    --rdzv-endpoint "$HEAD" ${JOB:+--rdzv-id "$JOB"} ${LAUNCH:-} "${SCRIPT:-pretrain_moe.py}" "$@"
