#!/usr/bin/env bash
# Remove each row of the compatibility matrix and show what happens without it (docs/fuzzing.md).
#
#   scripts/rules_proof.sh                                  every row that is not from a published document
#   scripts/rules_proof.sh mp-heads cp-ring-length          these rows
#   scripts/rules_proof.sh --write docs/rules_proof.md      also write the page; with ids, only their lines
#   scripts/rules_proof.sh --results proof.json             store each row's result, and continue from there next time
#
# Exit status 1 if a row has no effect.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m tests.fuzz.proof "$@"
