#!/usr/bin/env bash
# Ascend NPUs on one machine: the vendor's environment, then scripts/local.sh. Arguments are the trainer's.
#
#   scripts/ascend.sh --config configs/quickstart.yaml
#
# RANKS: fewer than all NPUs. ASCEND_TOOLKIT: as in ascend_env.sh. Several machines: ascend_multi_node.sh.
set -euo pipefail
# shellcheck source=scripts/ascend_env.sh
source "$(dirname "$0")/ascend_env.sh"
exec "$(dirname "$0")/local.sh" --device npu "$@"
