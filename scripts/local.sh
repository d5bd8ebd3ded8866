#!/usr/bin/env bash
# One machine: every device of it, or RANKS of them. Arguments are the trainer's.
#
#   scripts/local.sh --config configs/quickstart.yaml
#   SCRIPT=pretrain_ernie.py RANKS=8 scripts/local.sh --config configs/ernie-quickstart.yaml
set -euo pipefail
cd "$(dirname "$0")/.."
python=".venv/bin/python"
[ -x "$python" ] || python=python3
ranks="${RANKS:-$("$python" -c 'import torch; print(max(1, torch.accelerator.device_count()))')}"
exec "$python" -m megapar.tools.main launch --nproc-per-node "$ranks" "${SCRIPT:-pretrain_moe.py}" "$@"
