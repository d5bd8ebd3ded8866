#!/usr/bin/env bash
# Compares layouts with one process in fp64, a line per row with its seconds. --all: the full product (hours on a laptop).
#
#   scripts/equivalence.sh --match "mp-degree 2"
#   scripts/equivalence.sh --all
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m tests.equivalence.product "$@"
