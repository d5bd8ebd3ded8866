#!/usr/bin/env bash
# Try random changes of one line of the package, each by the tests that reach the line (docs/museum.md). The first run needs
# scripts/mutants.sh --coverage, which takes two suites' time. Arguments are passed to tests/museum/mutator.py.
set -euo pipefail
cd "$(dirname "$0")/.."
OMP_NUM_THREADS=1 exec "${PYTHON:-.venv/bin/python}" -m tests.museum.mutator "$@"
