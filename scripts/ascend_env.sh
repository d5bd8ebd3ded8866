# Sourced by ascend.sh and ascend_multi_node.sh: sets up the vendor's environment, and RANKS to the number of NPUs.
#
# ASCEND_TOOLKIT: the folder with set_env.sh. The launcher sets HCCL_CONNECT_TIMEOUT, TASK_QUEUE_ENABLE and
# PYTORCH_NPU_ALLOC_CONF if they are not set.
toolkit="${ASCEND_TOOLKIT:-/usr/local/Ascend/ascend-toolkit}"
if [ ! -f "$toolkit/set_env.sh" ]; then
    echo "$(basename "$0"): $toolkit/set_env.sh does not exist; set ASCEND_TOOLKIT to the folder of the toolkit" >&2
    exit 2
fi
set +u  # the vendor's file reads unset variables
# shellcheck disable=SC1091
source "$toolkit/set_env.sh"
set -u
export RANKS="${RANKS:-$(find /dev -maxdepth 1 -name 'davinci[0-9]*' | wc -l)}"
if [ "$RANKS" = 0 ]; then
    echo "$(basename "$0"): /dev/davinci0, /dev/davinci1, ... do not exist: this machine has no NPU, or its driver is not loaded" >&2
    exit 2
fi
