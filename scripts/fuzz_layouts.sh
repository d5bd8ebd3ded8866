#!/usr/bin/env bash
# Fuzz models, layouts and options: each case must be refused before it starts, or compute the numbers of one process.
#
#   scripts/fuzz_layouts.sh --minutes 10             random seed, which is printed
#   scripts/fuzz_layouts.sh --cases 300 --seed 7
#   scripts/fuzz_layouts.sh --pairs pairs.json       cover all legal pairs of options; the file stores the coverage
#   scripts/fuzz_layouts.sh --case moe 4 --mp-degree 2 --sequence-parallel --hidden-size 16
#
# Prints tried / refused / equal / failed and the covered legal pairs of options, and failures as minimized command
# lines. Exit status 1 if there is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m tests.fuzz.run "$@"
