#!/usr/bin/env bash
# Compare every published architecture with its class in transformers, and print the table (docs/conformance.md).
#
#   scripts/conformance.sh --row Llama
#   scripts/conformance.sh --write docs/conformance.md
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
unset PYTHONDONTWRITEBYTECODE  # the seconds of a refusal are those of a package that was compiled before
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m tests.model.conformance.report "$@"
