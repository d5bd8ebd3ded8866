#!/usr/bin/env bash
# Start a training on the Ascend NPUs of several machines: run this on each machine. Arguments are passed to the trainer.
#
#   HEAD=node0:29500 NODES=2 NODE=0 scripts/ascend_multi_node.sh --config configs/mindspeed-ampipe.yaml   # first machine
#   HEAD=node0:29500 NODES=2 NODE=1 scripts/ascend_multi_node.sh --config configs/mindspeed-ampipe.yaml   # second machine
#
# HEAD, NODES, NODE, JOB, LAUNCH: see multi_node.sh. ADDR: this machine's address on the network that the machines share,
# if it has several networks; ranks and HCCL use it (HCCL would choose the first network by name). All machines need the
# same toolkit, driver and code. ASCEND_TOOLKIT: see ascend_env.sh.
set -euo pipefail
# shellcheck source=scripts/ascend_env.sh
source "$(dirname "$0")/ascend_env.sh"
if [ -n "${ADDR:-}" ]; then
    export HCCL_IF_IP="${HCCL_IF_IP:-$ADDR}" LAUNCH="--local-addr $ADDR ${LAUNCH:-}"
fi
exec "$(dirname "$0")/multi_node.sh" --device npu "$@"
