#!/usr/bin/env bash
# Every fault of docs/reliability.md by real processes. Arguments go to tests/faults/matrix.py.
set -euo pipefail
cd "$(dirname "$0")/.."
OMP_NUM_THREADS=1 exec "${PYTHON:-.venv/bin/python}" -m tests.faults.matrix "$@"
