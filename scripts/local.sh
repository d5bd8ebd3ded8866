#!/usr/bin/env bash
# Start a training on one machine, with all devices or RANKS of them. Arguments are passed to the trainer.
#
#   RANKS=2 scripts/local.sh --config configs/quickstart.yaml
#   SCRIPT=pretrain_ernie.py RANKS=8 scripts/local.sh --config configs/ernie-quickstart.yaml
set -euo pipefail
cd "$(dirname "$0")/.."
python=".venv/bin/python"
[ -x "$python" ] || python=python3
ranks="${RANKS:-$("$python" -c 'import torch; print(max(1, torch.accelerator.device_count()))')}"
exec "$python" -m megapar.tools.main launch --nproc-per-node "$ranks" "${SCRIPT:-pretrain_moe.py}" "$@"
