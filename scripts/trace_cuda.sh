#!/usr/bin/env bash
# Trace training steps of both models on device cuda without a GPU: with torch's fake tensors, the GPU column of the
# operator table, the backward in the device thread of the autograd engine, and a stub for torch's CUDA guard
# (with_fake_cuda.sh). Fails if a step exceeds the budgets of trace_cuda_budgets.py: kernels, products,
# bytes, host waits.
#
#   scripts/trace_cuda.sh [NAME ..]                          runs whose names start with NAME; default: all
#   scripts/trace_cuda.sh --operators "layer: dense"         also list kernels and bytes by operator and caller
#
# Exits with status 0 and a reason if this machine cannot build the stub.
set -euo pipefail
exec "$(dirname "$0")/with_fake_cuda.sh" trace_cuda scripts/trace_cuda.py "$@"
