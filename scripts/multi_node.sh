#!/usr/bin/env bash
# Several machines without a scheduler: start this on each of them. Arguments are the trainer's.
#
#   HEAD=node0:29500 NODES=4 NODE=0 scripts/multi_node.sh --config X.yaml      on the first
#   HEAD=node0:29500 NODES=4 NODE=1 scripts/multi_node.sh --config X.yaml      on the second, ...
#
# MEGAPAR_SECRET, the same on each, keeps others out of the launchers' meeting (docs/launch.md).
# JOB names the run where one head serves several. LAUNCH holds further flags of the launcher, such as --preflight.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${HEAD:?HOST:PORT of the first machine}" "${NODES:?how many machines}" "${NODE:?the number of this machine, from 0}"
python=".venv/bin/python"
[ -x "$python" ] || python=python3
ranks="${RANKS:-$("$python" -c 'import torch; print(max(1, torch.accelerator.device_count()))')}"
# shellcheck disable=SC2086
exec "$python" -m megapar.tools.main launch --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "$ranks" \
    --rdzv-endpoint "$HEAD" ${JOB:+--rdzv-id "$JOB"} ${LAUNCH:-} "${SCRIPT:-pretrain_moe.py}" "$@"
