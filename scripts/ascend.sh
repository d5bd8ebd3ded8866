#!/usr/bin/env bash
# Ascend NPUs on one machine: the vendor's environment, then scripts/local.sh. Arguments are the trainer's.
#
#   scripts/ascend.sh --config configs/mindspeed-ampipe.yaml
#
# ASCEND_TOOLKIT: the folder with set_env.sh. The launcher sets HCCL_CONNECT_TIMEOUT, TASK_QUEUE_ENABLE and
# PYTORCH_NPU_ALLOC_CONF where they are not set.
set -euo pipefail
toolkit="${ASCEND_TOOLKIT:-/usr/local/Ascend/ascend-toolkit}"
if [ ! -f "$toolkit/set_env.sh" ]; then
    echo "ascend.sh: $toolkit/set_env.sh is not there; name the toolkit's folder by ASCEND_TOOLKIT" >&2
    exit 2
fi
set +u  # the vendor's file reads variables that may be unset
# shellcheck disable=SC1091
source "$toolkit/set_env.sh"
set -u
export RANKS="${RANKS:-$(find /dev -maxdepth 1 -name 'davinci[0-9]*' | wc -l)}"
exec "$(dirname "$0")/local.sh" --device npu "$@"
