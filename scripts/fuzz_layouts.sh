#!/usr/bin/env bash
# Draws models, layouts and options at random; each must be refused before it starts, or give the numbers of one process.
#
#   scripts/fuzz_layouts.sh --minutes 10             a random seed, printed
#   scripts/fuzz_layouts.sh --cases 300 --seed 7
#   scripts/fuzz_layouts.sh --pairs pairs.json       cases that cover all legal pairs of options; the file remembers
#   scripts/fuzz_layouts.sh --case moe 4 --mp-degree 2 --sequence-parallel --hidden-size 16
#
# Prints tried / refused / equal / failed and the legal pairs of options that were covered; failures minimised, as
# command lines. Status 1 where there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m tests.fuzz.run "$@"
