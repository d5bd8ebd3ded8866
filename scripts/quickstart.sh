#!/usr/bin/env bash
# From nothing to a trained model: makes the environment, trains a small mixture of experts on two processes on text
# that every Python carries, exports it for Hugging Face transformers and lets that generate a sentence.
# A minute and a half after installation on 2 CPU cores. Flags are passed on: scripts/quickstart.sh --train-iters 50
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
run=runs/quickstart
rm -rf "$run"
mkdir -p "$run"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/megapar launch --nproc-per-node 2 pretrain_moe.py --config configs/quickstart.yaml \
    --save "$run/checkpoints" --save-hf "$run/huggingface" \
    --tensorboard-dir "$run/tensorboard" --metrics-jsonl "$run/metrics.jsonl" "$@"
.venv/bin/python scripts/quickstart_summary.py "$run"
