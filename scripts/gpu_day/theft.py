"""Cost of the blocks of a communication kernel for the products that run beside them.

A receive that waits for its sender holds a multiprocessor per block. Products of large shapes have as many blocks as
there are multiprocessors: with a few less, some of their blocks run in a second wave. One GPU shows it, with blocks
that spin until the host releases them.

Shape letters: T tokens, H hidden, R rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapar.core.device.ops import OPS
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.spinning import SpinningBlocks
from scripts.gpu_day.timed import both_ways, normal, seconds_each
from scripts.gpu_day.trainers import flags, parsed, real, trainer

BLOCKS = (2, 4, 8, 16, 32)
WARM_STEPS, STEPS = 8, 3  # the guards try themselves in the first steps, and wait for the whole device there
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
        return beside(day, lambda _: seconds_each(day, one, STEPS, warmup=1))


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
    form = OPS["grouped_linear"].get(day.device, OPS["grouped_linear"]["reference"])
    return both_ways(lambda: form(rows, weights, counts), [rows, weights])
