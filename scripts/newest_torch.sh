#!/usr/bin/env bash
# Run layouts, devices, checkpoints and whole trainings with the newest torch that pip finds, or with another one, in an
# environment apart (build/newest), which has all other packages of .venv.
#
#   scripts/newest_torch.sh                     the newest
#   scripts/newest_torch.sh "torch==2.11.*"     another
#
# Exits with status 0 and a reason if pip finds no other torch than that of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
wanted=${1:-torch}
env=build/newest
if [ "$(cat "$env/wanted" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$env"
    .venv/bin/python -m venv "$env"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check "$wanted" ||
        { echo "newest_torch: skipped: pip finds no $wanted here"; exit 0; }
    # After the installation, so that pip installs every package that torch needs.
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venv/bin/python -c "$site" > "$("$env/bin/python" -c "$site")/libraries.pth"
    echo "$wanted" > "$env/wanted"
fi
version='import torch; print(torch.__version__.partition("+")[0])'
got=$("$env/bin/python" -c "$version")
[ "$got" != "$(.venv/bin/python -c "$version")" ] || { echo "newest_torch: skipped: torch $got is that of .venv"; exit 0; }
echo "newest_torch: torch $got"
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH=$PWD
exec "$env/bin/python" -m pytest -n logical --maxprocesses 4 --dist worksteal \
    tests/core tests/moe tests/model/attention tests/checkpoints/save_load tests/equivalence tests/test_trainer.py
