"""Cost of the blocks of a communication kernel for the products that run beside them.

A receive that waits for its sender holds a multiprocessor per block. Products of large shapes have as many blocks as
there are multiprocessors: with a few less, some of their blocks run in a second wave. One GPU shows it, with blocks
that spin until the host releases them. Their kernel is compiled by cupy, or by torch if there is a CUDA toolkit. It
polls a flag in page-locked memory of the host, and ends by itself after a few seconds, so that a program that waits for
the whole device goes on.

Shape letters: T tokens, H hidden, R rows, E experts.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapar.core.device.kinds import device_class
from megapar.core.pipeline.lookahead import post_later
from megapar.core.pipeline.schedule import make_schedule
from megapar.core.pipeline.simulate import RUNNERS, Costs, simulate
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.timed import both_ways, normal, seconds_each
from scripts.gpu_day.trainers import flags, parsed, real, trainer

BLOCKS = (2, 4, 8, 16, 32)
WARM_STEPS, STEPS = 8, 3  # the guards try themselves in the first steps, and wait for the whole device there
SHARED = 100 * 1024  # bytes of shared memory of a block: beside it, no block of a large product fits
THREADS = 512
LIMIT_MS, START_SECONDS = 3000, 1.0
MOST = 64
PIPELINE = (4, 1, 16)  # stages, chunks of a stage, micro-batches
MESSAGES, LOOKAHEADS = (0.005, 0.02, 0.1), (None, 0, 1, 2, 4)
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
Work = Callable[[], object]


def run(day: Day) -> None:
    """Time the parts of a layer, then a training step, beside more and more blocks."""
    torch.manual_seed(0)
    for name, make in (("product", _product), ("attention", _attention), ("grouped product", _grouped)):
        day.attempt(name, partial(part, day, make), least=2.0)
    day.attempt("product on fewer multiprocessors", partial(carved, day), least=2.0)
    day.attempt("dense step", partial(step, day), least=5.0)


def part(day: Day, make: Callable[[Day], Work]) -> Answer:
    """Time one part of a layer."""
    work = make(day)
    seconds_each(day, work, 5)
    return beside(day, lambda _: seconds_each(day, work, 20, warmup=1))


def step(day: Day) -> Answer:
    """Time training steps of a dense model."""
    config = parsed(flags(day, "dense", real(day, layers=4)), "dense")
    with trainer(config, day.device) as made:

        def one() -> None:
            made.monitor.add(made.step())

        for _ in range(2 if day.small else WARM_STEPS):
            one()
        answer = beside(day, lambda _: seconds_each(day, one, STEPS, warmup=1))
    ratios = answer.figures.get("ratios", {})
    return answer._replace(figures={**answer.figures, **to_set(ratios)}) if ratios else answer


def to_set(ratios: Mapping[int, float]) -> dict[str, Any]:
    """Return what to write into ``megapar/core/device/kinds.yaml``, by simulations of a pipeline at these ratios.

    A message takes a share of a stage's forward. For each, the lookahead with the shortest step is named, with the
    steps of all, relative to one whose messages hold nothing.
    """
    held = replace(device_class("cuda"), beside_blocks=ratios)
    schedule, chosen = make_schedule("1f1b", *PIPELINE), {}
    for share in MESSAGES:
        costs = Costs(send=share)
        alone = simulate(schedule, costs, RUNNERS).end
        slower = replace(costs, beside=held.beside_queues)
        ends = {str(n): simulate(post_later(schedule, n), slower, RUNNERS).end / alone for n in LOOKAHEADS}
        best = min(ends, key=lambda name: ends[name]).replace("None", "null")
        chosen[f"messages of {share:.1%} of a forward"] = {"receives_ahead": best, "steps": ends}
    measured = ", ".join(f"{blocks}: {max(1.0, ratio):.2f}" for blocks, ratio in ratios.items())
    return {"set": f"beside_blocks: {{{measured}}}", **chosen}


def carved(day: Day) -> Answer:
    """Time a product beside blocks, for which torch asks cuBLAS to leave as many multiprocessors."""
    limit = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if limit is None:
        return Answer(None, {"not_to_be_had": "this torch has no such setting"})
    work = _product(day)

    def measured(blocks: int) -> list[float]:
        limit(blocks or None)
        return seconds_each(day, work, 20, warmup=3)

    try:
        return beside(day, measured)
    finally:
        limit(None)


def beside(day: Day, times: Callable[[int], list[float]]) -> Answer:
    """Return the ratios of the medians of ``times(blocks)`` beside blocks to that alone, measured first and last."""
    spinning, lacks = None, "a CPU has no multiprocessors: the work ran alone"
    if day.on_gpu:
        try:
            spinning = SpinningBlocks()
        except RuntimeError as error:
            lacks = str(error)
    if spinning is None:
        return Answer(None, {"alone_seconds": median(times(0)), "not_to_be_had": lacks})
    alone, beside_seconds, ended_early = [median(times(0))], {}, []
    for blocks in BLOCKS:
        with spinning.held(blocks):
            beside_seconds[blocks] = median(times(blocks))
        if not spinning.outlasted:  # something waited for the whole device, until the blocks' limit
            ended_early.append(blocks)
            break
    alone.append(median(times(0)))
    ratios = {blocks: seconds / min(alone) for blocks, seconds in beside_seconds.items()}
    return Answer(not ended_early, {"alone_seconds": alone, "ratios": ratios, "blocks_ended_early": ended_early})


def _product(day: Day) -> Work:
    T, H, wide = (64, 64, 96) if day.small else (16384, 2048, 6144)
    x, weight = normal(day, T, H), normal(day, H, wide)
    y = torch.empty(T, wide, device=day.place, dtype=x.dtype)
    return lambda: torch.mm(x, weight, out=y)


def _attention(day: Day) -> Work:
    """Return causal attention in both directions, by cuDNN on a GPU."""
    shape = (1, 2, 32, 16) if day.small else (4, 16, 4096, 128)
    q, k, v = (normal(day, *shape, differentiate=True) for _ in range(3))

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if day.on_gpu else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return both_ways(attend, [q, k, v])


def _grouped(day: Day) -> Work:
    """Return the product of the experts' rows, as the package calls it, forward and backward."""
    R, H, wide, E = (64, 32, 48, 4) if day.small else (65536, 2048, 1536, 16)
    rows, weights = normal(day, R, H, differentiate=True), normal(day, E, wide, H, differentiate=True)
    counts = torch.full((E,), R // E, device=day.place)
    form = day.operator("grouped_linear")
    return both_ways(lambda: form(rows, weights, counts), [rows, weights])


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
