#!/usr/bin/env bash
# Make each silent bug of tests/museum/exhibits.yaml in a copy of the tree, and run the test that must fail with it.
# Arguments are passed to tests/museum/museum.py: names of exhibits, --jobs, --record, --relocate, --page.
set -euo pipefail
cd "$(dirname "$0")/.."
OMP_NUM_THREADS=1 exec "${PYTHON:-.venv/bin/python}" -m tests.museum.museum "$@"
