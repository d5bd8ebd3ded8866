#!/usr/bin/env bash
# Run a Python module of this tree with a checkout of another revision as its first argument; the checkout is removed.
# compare_speed.sh and compare_benchmarks.sh call this.
#
#   scripts/with_revision.sh origin/main benchmarks.revisions.steps --rounds 41
set -euo pipefail
cd "$(dirname "$0")/.."
revision=$1 module=$2
shift 2
tree=$(mktemp -d)
trap 'git worktree remove --force "$tree" 2>/dev/null || rmdir "$tree"' EXIT
git worktree add --quiet --detach "$tree" "$revision"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python=.venv/bin/python
[ -x "$python" ] || python=python
"$python" -m "$module" "$tree" "$@"
