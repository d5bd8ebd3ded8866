#!/usr/bin/env bash
# Compare layouts with a single process in fp64, one line per row with its seconds. --all: all combinations (hours on a
# laptop).
#
#   scripts/equivalence.sh --match "mp-degree 2"
#   scripts/equivalence.sh --all
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m tests.equivalence.product "$@"
