#!/usr/bin/env bash
# Ascend NPUs of several machines: start this on each of them. Arguments are the trainer's.
#
#   HEAD=node0:29500 NODES=2 NODE=0 scripts/ascend_multi_node.sh --config configs/mindspeed-ampipe.yaml   on the first
#   HEAD=node0:29500 NODES=2 NODE=1 scripts/ascend_multi_node.sh --config configs/mindspeed-ampipe.yaml   on the second
#
# HEAD, NODES, NODE, JOB, LAUNCH: as in multi_node.sh. ADDR: this machine's address on the network that all of them share,
# where it has several; ranks and HCCL meet there (HCCL would take the first network by its name). Every machine has the
# same toolkit, driver and code. ASCEND_TOOLKIT: as in ascend_env.sh.
set -euo pipefail
# shellcheck source=scripts/ascend_env.sh
source "$(dirname "$0")/ascend_env.sh"
if [ -n "${ADDR:-}" ]; then
    export HCCL_IF_IP="${HCCL_IF_IP:-$ADDR}" LAUNCH="--local-addr $ADDR ${LAUNCH:-}"
fi
exec "$(dirname "$0")/multi_node.sh" --device npu "$@"
