#!/usr/bin/env bash
# Start a training on the Ascend NPUs of one machine: sets up the vendor's environment, then runs scripts/local.sh.
# Arguments are passed to the trainer.
#
#   RANKS=2 scripts/ascend.sh --config configs/quickstart.yaml
#
# RANKS: number of NPUs to use (default: all). ASCEND_TOOLKIT: see ascend_env.sh. Several machines:
# ascend_multi_node.sh.
set -euo pipefail
# shellcheck source=scripts/ascend_env.sh
source "$(dirname "$0")/ascend_env.sh"
exec "$(dirname "$0")/local.sh" --device npu "$@"
