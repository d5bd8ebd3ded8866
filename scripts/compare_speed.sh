#!/usr/bin/env bash
# Compare the speed of the quickstart in this tree with another revision, in alternating runs. Prints the ratio of their
# step times with its 95 % confidence interval. Exit status 1 if this tree is slower: lower bound above 1.00 and median
# above 1.03.
#
#   scripts/compare_speed.sh origin/main
#   scripts/compare_speed.sh HEAD~3 --rounds 41
set -euo pipefail
revision=${1:?pass a revision: scripts/compare_speed.sh origin/main}
exec "$(dirname "$0")/with_revision.sh" "$revision" benchmarks.throughput.compare "${@:2}"
