#!/usr/bin/env bash
# Steps of the quickstart in this tree and in another revision, in turns; prints the ratio of their times with its 95 %
# interval, and ends with status 1 where this tree is slower: lower end above 1.00 and median above 1.03.
#
#   scripts/compare_speed.sh origin/main
#   scripts/compare_speed.sh HEAD~3 --rounds 41
set -euo pipefail
cd "$(dirname "$0")/.."
revision=${1:?name a revision: scripts/compare_speed.sh origin/main}
shift
tree=$(mktemp -d)
trap 'git worktree remove --force "$tree"' EXIT
git worktree add --quiet --detach "$tree" "$revision"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python=.venv/bin/python
[ -x "$python" ] || python=python
"$python" -m benchmarks.throughput.compare "$tree" "$@"
