#!/usr/bin/env bash
# Makes or refreshes the environment in .venv, and nothing else. Safe to run again: it does nothing when up to date.
#
#   scripts/setup.sh            what training needs
#   scripts/setup.sh dev        and what tests, lint and types need
#
# MEGAPAR_TORCH=skip leaves torch as the environment finds it (machines with their own CUDA or Ascend build, where
# .venv is then made with access to the system's packages).
set -euo pipefail
cd "$(dirname "$0")/.."

extra="${1:-}"
python="${PYTHON:-python3}"
sha256() { if command -v sha256sum >/dev/null 2>&1; then sha256sum; else shasum -a 256; fi; }  # the latter on macOS
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256 | cut -d' ' -f1)
stamp=".venv/.megapar${extra:+-$extra}"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

"$python" - <<'PY'
import sys
if sys.version_info < (3, 10):
    sys.exit(f"megapar needs Python 3.10 or newer, this is {sys.version.split()[0]}; name another by PYTHON=...")
PY

if [ "${MEGAPAR_TORCH:-}" = skip ]; then
    [ -x .venv/bin/python ] || "$python" -m venv --system-site-packages .venv
elif [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi

# A machine with a GPU wants the build that its platform offers; every other one wants the CPU build. Where pip does
# not have that build by itself, name PyTorch's public CPU wheel index: PIP_EXTRA_INDEX_URL or pip.conf.
constraint=()
if [ "${MEGAPAR_TORCH:-}" != skip ] && ! command -v nvidia-smi >/dev/null 2>&1; then
    constraint=(--constraint constraints.txt)
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${constraint[@]}" torch
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check "${constraint[@]}" --editable ".${extra:+[$extra]}"
echo "$wanted" > "$stamp"
echo "environment ready: .venv ($(.venv/bin/python --version), torch $(.venv/bin/python -c 'import torch; print(torch.__version__)'))"
