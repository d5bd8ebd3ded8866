#!/usr/bin/env bash
# Compare the benchmarks of this tree with those of another revision, in alternating runs of short forms: the ratio of
# each time with its 95 % confidence interval. Exit status 1 if this tree is slower in one: lower bound above 1.00 and
# median above 1.03. scripts/compare_speed.sh compares training steps. About an hour on two idle cores.
#
#   scripts/compare_benchmarks.sh 4f3c225
#   scripts/compare_benchmarks.sh 4f3c225 checkpoint "data, loader" --rounds 8 --results figures.jsonl
set -euo pipefail
revision=${1:?pass a revision: scripts/compare_benchmarks.sh origin/main}
exec "$(dirname "$0")/with_revision.sh" "$revision" benchmarks.revisions.run "${@:2}"
