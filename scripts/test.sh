#!/usr/bin/env bash
# Runs the whole test suite; makes the environment if needed. Arguments go to pytest.
#
# Tests of one process and tests whose ranks wait for each other share the cores: as many run at once as there are
# cores, four at most (each has its own pools of up to eight ranks). One after the other, for a debugger or -s: -n 0.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal "$@"
