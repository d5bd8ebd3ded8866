#!/usr/bin/env bash
# Takes each row of the compatibility matrix out and shows what happens without it (docs/fuzzing.md).
#
#   scripts/rules_proof.sh                                  every row that is not from a published document
#   scripts/rules_proof.sh mp-heads cp-ring-length          these rows
#   scripts/rules_proof.sh --write docs/rules_proof.md      and write the page
#   scripts/rules_proof.sh --results proof.json             keep each row's result, and go on from there another time
#
# Status 1 where a row is worth nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m tests.fuzz.proof "$@"
