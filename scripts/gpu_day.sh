#!/usr/bin/env bash
# GPU day: run on a GPU what other machines can only trace, and keep all findings.
#
#   scripts/gpu_day.sh [--minutes 25] [--device cuda|cpu] [--small] [--parts operators,micro] [--models moe]
#                       [--again] [--out FOLDER]
#
# Appends a JSON line per finding to FOLDER/findings.jsonl (default: runs/gpu_day) and continues where an earlier call
# stopped. Exit status 0: all findings are right; 1: something is wrong or missing. See docs/gpu_day.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python=".venv/bin/python"
[ -x "$python" ] || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -m scripts.gpu_day.run "$@"
