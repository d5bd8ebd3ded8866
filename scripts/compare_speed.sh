#!/usr/bin/env bash
# Compare training steps of this tree with those of another revision, step by step in turns: of the quickstart, or of what
# is named (--help). Prints the ratio of the times with its 95 % confidence interval. Exit status 1 if this tree is slower:
# lower bound above 1.00 and median above 1.03.
#
#   scripts/compare_speed.sh origin/main
#   scripts/compare_speed.sh HEAD~3 --rounds 41
#   scripts/compare_speed.sh 4f3c225 ERNIE "sharding, link"
set -euo pipefail
revision=${1:?pass a revision: scripts/compare_speed.sh origin/main}
exec "$(dirname "$0")/with_revision.sh" "$revision" benchmarks.revisions.steps "${@:2}"
