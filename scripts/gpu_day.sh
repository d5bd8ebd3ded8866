#!/usr/bin/env bash
# A day with a GPU: one command that runs there what other machines can only trace, and keeps all that it finds.
#
#   scripts/gpu_day.sh [--minutes 25] [--device cuda|cpu] [--small] [--parts operators,micro] [--models moe]
#                       [--again] [--out FOLDER]
#
# Appends a JSON line per finding to FOLDER/findings.jsonl (default: runs/gpu_day) and goes on where an earlier call
# stopped. Status 0: all that was run is as it should be; 1: something is not, or is missing. docs/devices.md has more.
set -euo pipefail
cd "$(dirname "$0")/.."
python=".venv/bin/python"
[ -x "$python" ] || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -m scripts.gpu_day.run "$@"
