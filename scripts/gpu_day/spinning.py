"""Blocks of a kernel that hold multiprocessors until the host releases them, as the kernels of NCCL do that wait.

The kernel is compiled by cupy, or by torch if there is a CUDA toolkit. It polls a flag in page-locked memory of the
host, and ends by itself after a few seconds, so that a program that waits for the whole device goes on.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SHARED = 100 * 1024  # bytes of shared memory of a block: beside it, no block of a large product fits
THREADS = 512
LIMIT_MS, START_SECONDS = 3000, 1.0
MOST = 64
SOURCE = """
extern "C" __global__ void hold(volatile int* flags, int limit_ms) {
    extern __shared__ volatile char memory[];
    memory[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        unsigned long long begin, now, limit = 1000000ull * limit_ms;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
        flags[1 + blockIdx.x] = 1;
        __threadfence_system();
        do {
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (flags[0] == 0 && now - begin < limit);
    }
    __syncthreads();
}
"""
Launch = Callable[[int, torch.cuda.Stream, Tensor, int], None]  # blocks, stream, flags, limit in milliseconds


class SpinningBlocks:
    """Blocks on a stream of high priority. Raises RuntimeError with the reasons if no compiler builds the kernel.

    Attributes:
        outlasted: The last blocks still ran when they were released: they covered all that was measured.
    """

    def __init__(self) -> None:
        self._launch = _compiled()
        self._stream = torch.cuda.Stream(priority=-1)
        self._flags = torch.zeros(1 + MOST, dtype=torch.int32, pin_memory=True)
        self.outlasted = True
        with self.held(1):  # loads the kernel, which may wait for the device
            pass

    @contextmanager
    def held(self, blocks: int) -> Iterator[None]:
        """Hold ``blocks`` multiprocessors; none for 0. The block must not wait for the whole device."""
        if not blocks:
            yield
            return
        self._flags.zero_()
        try:
            self._launch(blocks, self._stream, self._flags, LIMIT_MS)
            done = self._stream.record_event()
            until = time.monotonic() + START_SECONDS
            while int(self._flags[1:].sum()) < blocks:
                if time.monotonic() > until:
                    raise RuntimeError(f"{int(self._flags[1:].sum())} of {blocks} blocks started")
            yield
            self.outlasted = not done.query()
        finally:
            self._flags[0] = 1
            self._stream.synchronize()


def _compiled() -> Launch:
    reasons = []
    for build in (_by_cupy, _by_torch):
        try:
            return build()
        except Exception as error:  # a package, a toolkit or a library of one is missing
            reasons.append(f"{build.__name__[4:]}: {type(error).__name__}: {str(error)[:200]}")
    raise RuntimeError("; ".join(reasons))


def _by_cupy() -> Launch:
    cupy, numpy = (importlib.import_module(name) for name in ("cupy", "numpy"))
    kernel = cupy.RawKernel(SOURCE, "hold")
    kernel.max_dynamic_shared_size_bytes = SHARED  # compiles it

    def launch(blocks: int, stream: torch.cuda.Stream, flags: Tensor, limit: int) -> None:
        arguments = (numpy.uintp(flags.data_ptr()), numpy.int32(limit))
        with cupy.cuda.ExternalStream(stream.cuda_stream):
            kernel((blocks,), (THREADS,), arguments, shared_mem=SHARED)

    return launch


def _by_torch() -> Launch:
    kernel = getattr(torch.cuda, "_compile_kernel")(SOURCE, "hold")  # noqa: B009 - not a name that every torch has
    kernel.set_shared_memory_config(SHARED)

    def launch(blocks: int, stream: torch.cuda.Stream, flags: Tensor, limit: int) -> None:
        kernel((blocks, 1, 1), (THREADS, 1, 1), [flags, limit], shared_mem=SHARED, stream=stream)

    return launch
