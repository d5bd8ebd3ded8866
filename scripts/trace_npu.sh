#!/usr/bin/env bash
# Trace training steps of both models on device npu without an NPU: with the real torch_npu wheel in a separate
# environment (build/npu), stubs for the driver's libraries, and torch's fake tensors. A wrong argument, layout or dtype
# fails as it would on Ascend. Operators that would fall back to the CPU and fp64 fail, too.
#
#   scripts/trace_npu.sh
#
# Exits with status 0 and a reason if torch_npu cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "trace_npu: skipped: $1"; exit 0; }
[ "$(uname -s)" = Linux ] || skip "torch_npu has wheels for Linux only"
command -v cc >/dev/null && command -v nm >/dev/null || skip "building the stub libraries needs cc and nm"
base=".venv/bin/python"
[ -x "$base" ] || base=python3
version=$("$base" -c 'import torch; print(torch.__version__.split("+")[0])')
env="build/npu/env"
if [ "$(cat build/npu/stamp 2>/dev/null)" != "$version" ]; then
    rm -rf build/npu && mkdir -p build/npu
    "$base" -m venv "$env"
    # The new environment uses the packages of the existing one and adds torch_npu.
    "$base" -c 'import site; print("\n".join(site.getsitepackages()))' > "$(
        "$env/bin/python" -c 'import site; print(site.getsitepackages()[0])')/megapar.pth"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "torch_npu==$version.*" \
        2> build/npu/pip.log || skip "no torch_npu for torch $version ($(grep -m 1 ERROR build/npu/pip.log))"
    "$env/bin/python" scripts/make_cann_stubs.py build/npu/lib
    echo "$version" > build/npu/stamp
fi
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 LD_LIBRARY_PATH="$PWD/build/npu/lib" PYTHONPATH="$PWD" PYTHONWARNINGS=ignore
root=$PWD
cd build/npu  # torch_npu's profiler leaves a file where it is started
exec "$root/$env/bin/python" "$root/scripts/trace_npu.py" "$@"
