#!/usr/bin/env bash
# Run the whole test suite. Creates the environment if needed. Arguments are passed to pytest.
#
# As many tests run in parallel as there are cores, at most four. For a debugger or -s, run them one at a time: -n 0.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
unset PYTHONDONTWRITEBYTECODE  # each worker, and each process of a test, would compile the package again
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal "$@"
