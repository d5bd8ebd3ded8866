#!/usr/bin/env bash
# Runs the whole test suite; makes the environment if needed. Arguments go to pytest.
#
# As many tests run at once as there are cores, four at most, each with its ranks on cores of its own. One after the
# other, as a debugger and -s want it: -n 0.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal "$@"
