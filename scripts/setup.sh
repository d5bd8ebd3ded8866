#!/usr/bin/env bash
# Create or update the environment in .venv, and nothing else. Does nothing if it is up to date.
#
#   scripts/setup.sh            for training
#   scripts/setup.sh dev        also for tests, lint and types
#   scripts/setup.sh wandb,s3   with other extras of pyproject.toml
#
# MEGAPAR_TORCH=skip keeps the installed torch (on machines with a CUDA or Ascend build); .venv then has access to the
# system's packages.
set -euo pipefail
cd "$(dirname "$0")/.."

extra="${1:-}"
python="${PYTHON:-python3}"
sha256() { if command -v sha256sum >/dev/null 2>&1; then sha256sum; else shasum -a 256; fi; }  # shasum: macOS
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256 | cut -d' ' -f1)
stamp=".venv/.megapar${extra:+-$extra}"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

"$python" - <<'PY'
import sys
if sys.version_info < (3, 10):
    sys.exit(f"megapar needs Python 3.10 or newer, this is {sys.version.split()[0]}. Set PYTHON to another interpreter.")
PY

if [ "${MEGAPAR_TORCH:-}" = skip ]; then
    [ -x .venv/bin/python ] || "$python" -m venv --system-site-packages .venv
elif [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi

echo "installing packages into .venv: the first time it takes minutes, and 1.5 GB with the CPU build of torch, 6 GB with CUDA"
# A machine with a GPU needs the default build of its platform, other machines the CPU build. If pip does not find the
# CPU build, set PyTorch's public CPU wheel index in PIP_EXTRA_INDEX_URL or pip.conf.
constraint=()
if [ "${MEGAPAR_TORCH:-}" != skip ] && ! command -v nvidia-smi >/dev/null 2>&1; then
    constraint=(--constraint constraints.txt)
    echo "installing torch's CPU build into .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${constraint[@]}" torch
fi
echo "installing megapar${extra:+[$extra]} and the packages that it needs"
.venv/bin/python -m pip install --quiet --disable-pip-version-check "${constraint[@]}" --editable ".${extra:+[$extra]}"
echo "$wanted" > "$stamp"
echo "environment ready: .venv ($(.venv/bin/python --version), torch $(.venv/bin/python -c 'import torch; print(torch.__version__)'))"
