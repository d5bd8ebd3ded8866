#!/usr/bin/env bash
# Traces training steps of both models on device cuda without a GPU: torch's fake tensors, the operator table's GPU column,
# the backward in the engine's thread of the device, and a stand-in for what torch asks of CUDA (fake_cuda_guard.cpp,
# built here). Fails where a step leaves the budgets of trace_cuda_budgets.py: kernels, products, bytes, waits of the host.
#
#   scripts/trace_cuda.sh [NAME ..]     runs whose names begin so; by default all
#
# Ends with status 0 and the reason where this machine cannot build the stand-in.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "trace_cuda: skipped: $1"; exit 0; }
[ "$(uname -s)" = Linux ] || skip "the stand-in is preloaded as Linux does it"
python=".venv/bin/python"
[ -x "$python" ] || python=python3
compiler=""
for name in "${CXX:-}" c++ g++ clang++; do
    if [ -n "$name" ] && command -v "$name" >/dev/null; then compiler=$name; break; fi
done
[ -n "$compiler" ] || skip "no C++ compiler (c++, g++, clang++, or the one that CXX names)"
torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
[ "$("$python" -c 'import torch; print(torch.version.cuda or torch.version.hip)')" = None ] ||
    skip "this torch has CUDA; the stand-in is for builds without it"
library=build/cuda/guard.so
stamp="$("$python" -c 'import torch; print(torch.__version__)') $(cksum < scripts/fake_cuda_guard.cpp)"
if [ "$(cat build/cuda/stamp 2>/dev/null)" != "$stamp" ]; then
    mkdir -p build/cuda
    "$compiler" -shared -fPIC -std=c++20 -O1 -I"$torch/include" scripts/fake_cuda_guard.cpp -o "$library" \
        -L"$torch/lib" -lc10 -ltorch_cpu 2> build/cuda/build.log ||
        skip "the stand-in cannot be built ($(grep -m 1 error build/cuda/build.log))"
    echo "$stamp" > build/cuda/stamp
fi
export MEGAPAR_CUDA_GUARD="$PWD/$library" LD_LIBRARY_PATH="$torch/lib" PYTHONPATH="$PWD" PYTHONWARNINGS=ignore
export OMP_NUM_THREADS=1
LD_PRELOAD="$PWD/$library" exec "$python" scripts/trace_cuda.py "$@"
