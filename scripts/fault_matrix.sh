#!/usr/bin/env bash
# Run every fault of docs/faults.md with real processes. Arguments are passed to tests/faults/matrix.py.
set -euo pipefail
cd "$(dirname "$0")/.."
OMP_NUM_THREADS=1 exec "${PYTHON:-.venv/bin/python}" -m tests.faults.matrix "$@"
