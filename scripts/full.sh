#!/usr/bin/env bash
# Run everything that .ci/run draws from, whole: its stages, and all eight shares of each table, in parts of minutes; and
# the parts of a step with the newest torch.
#
#     scripts/full.sh             everything, in order; goes on behind a part that fails, and ends with 1 then
#     scripts/full.sh faults      the parts whose name begins with this
#
# What passed is kept for each commit in .git/checks/, with its output; the same command goes on behind it.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
source scripts/stages.sh

if [ -n "$(git status --porcelain)" ]; then
    echo "There are changes that are not committed: results are kept for a commit. Commit or stash them." >&2
    exit 2
fi
kept=$(git rev-parse --git-common-dir)/checks/$(git rev-parse HEAD)
mkdir -p "$kept"
parts=("${whole[@]}" newest_torch)
for share in 0 1 2 3 4 5 6 7; do
    for table in "${tables[@]}"; do parts+=("$table-$share"); done
done

failed=()
for part in "${parts[@]}"; do
    case $part in "${1:-}"*) ;; *) continue ;; esac
    if [ -e "$kept/$part.passed" ]; then
        echo "$part: passed before ($(cat "$kept/$part.passed"))"
        continue
    fi
    share=all from=$SECONDS
    case $part in *-[0-7]) share=${part##*-} ;; esac
    # A shell of its own ends at the first command that fails, which one behind || or in an if would not.
    set +e
    CI_SHARE=$share bash -c 'set -euo pipefail; source scripts/stages.sh; stage "$1"' - "${part%-[0-7]}" >"$kept/$part.log" 2>&1
    status=$?
    set -e
    said="$((SECONDS - from)) s"
    if [ $status -eq 0 ]; then
        echo "$said" >"$kept/$part.passed"
        echo "$part: passed in $said"
    else
        failed+=("$part")
        echo "$part: FAILED in $said, status $status: $kept/$part.log"
        tail -n 25 "$kept/$part.log"
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
