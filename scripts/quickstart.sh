#!/usr/bin/env bash
# Train a model from scratch: creates the environment, trains a small mixture of experts with two processes on text that
# is included in every Python, exports it for Hugging Face transformers and generates a sentence with transformers.
# Takes 90 seconds on 2 CPU cores, after installation. Flags are passed on: scripts/quickstart.sh --train-iters 50
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
