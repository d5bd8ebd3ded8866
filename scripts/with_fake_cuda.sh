#!/usr/bin/env bash
# Run a Python program in which torch accepts tensors on device cuda, without a GPU: builds a stub for torch's CUDA guard
# (fake_cuda_guard.cpp) and preloads it.
#
#   scripts/with_fake_cuda.sh NAME FILE [ARGUMENT ..]        or NAME -m MODULE [ARGUMENT ..]
#
# Exits with status 0 and a reason, which begins with NAME, if this machine cannot build the stub.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
shift

skip() { echo "$name: skipped: $1"; exit 0; }
[ "$(uname -s)" = Linux ] || skip "preloading the stub requires Linux"
python=".venv/bin/python"
[ -x "$python" ] || python=python3
compiler=""
for candidate in "${CXX:-}" c++ g++ clang++; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null; then compiler=$candidate; break; fi
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
LD_PRELOAD="$PWD/$library" exec "$python" "$@"
