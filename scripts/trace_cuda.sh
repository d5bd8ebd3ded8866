#!/usr/bin/env bash
# Trace training steps of both models on device cuda without a GPU: with torch's fake tensors, the GPU column of the
# operator table, the backward in the device thread of the autograd engine, and a stub for torch's CUDA guard
# (fake_cuda_guard.cpp, built here). Fails if a step exceeds the budgets of trace_cuda_budgets.py: kernels, products,
# bytes, host waits.
#
#   scripts/trace_cuda.sh [NAME ..]                          runs whose names start with NAME; default: all
#   scripts/trace_cuda.sh --operators "layer: dense"         also list kernels and bytes by operator and caller
#
# Exits with status 0 and a reason if this machine cannot build the stub.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "trace_cuda: skipped: $1"; exit 0; }
[ "$(uname -s)" = Linux ] || skip "preloading the stub requires Linux"
python=".venv/bin/python"
[ -x "$python" ] || python=python3
compiler=""
for name in "${CXX:-}" c++ g++ clang++; do
    if [ -n "$name" ] && command -v "$name" >/dev/null; then compiler=$name; break; fi
done
[ -n "$compiler" ] || skip "no C++ compiler (c++, g++, clang++ or CXX)"
torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
[ "$("$python" -c 'import torch; print(torch.version.cuda or torch.version.hip)')" = None ] ||
    skip "this torch has CUDA; the stub is for builds without it"
library=build/cuda/guard.so
stamp="$("$python" -c 'import torch; print(torch.__version__)') $(cksum < scripts/fake_cuda_guard.cpp)"
if [ "$(cat build/cuda/stamp 2>/dev/null)" != "$stamp" ]; then
    mkdir -p build/cuda
    "$compiler" -shared -fPIC -std=c++20 -O1 -I"$torch/include" scripts/fake_cuda_guard.cpp -o "$library" \
        -L"$torch/lib" -lc10 -ltorch_cpu 2> build/cuda/build.log ||
        skip "the stub cannot be built ($(grep -m 1 error build/cuda/build.log))"
    echo "$stamp" > build/cuda/stamp
fi
export MEGAPAR_CUDA_GUARD="$PWD/$library" LD_LIBRARY_PATH="$torch/lib" PYTHONPATH="$PWD" PYTHONWARNINGS=ignore
export OMP_NUM_THREADS=1
LD_PRELOAD="$PWD/$library" exec "$python" scripts/trace_cuda.py "$@"
