"""Known faults of libraries and of the package that only a GPU shows.

``attention with padding``: cuDNN's backward with a mask returned NaN for queries if the number of positions was 64 more
than a multiple of 128 and a row's logsumexp was below -88 (pytorch issue 196678). ``grouped heads in fp32``: torch's
kernels for fp32 take no grouped heads, and plain products store all scores. ``flight recorder``: NCCL has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapar.core.device.attention.table import CAUSAL, MASKED
from megapar.core.device.ops import OPS
from megapar.core.torch_names import flight_record
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.operators import TOLERANCE, relative
from scripts.gpu_day.timed import normal

LENGTH, SIZE = 704, 64  # 5.5 x 128 positions
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
LOWEST = -88.0  # below this, exp in fp32 is 0
COLLECTIVES = 4
RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}


def run(day: Day) -> None:
    """Look for each fault."""
    torch.manual_seed(0)
    day.attempt("attention with padding", partial(padded, day))
    day.attempt("grouped heads in fp32", partial(grouped, day))
    day.attempt("flight recorder", partial(recorders, day))


def padded(day: Day) -> Answer:
    """Compute attention with padding and with rows of very low scores; wrong if the package's result is."""
    length = 48 if day.small else LENGTH
    tensors, valid, lowest = low_scores(day, length)
    form = day.operator("attention")
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = _both_ways(partial(OPS["attention"]["reference"], form=MASKED, valid=valid), exact)
    got = _both_ways(partial(form, form=MASKED, valid=valid), tensors)
    figures: dict[str, Any] = {"lowest_logsumexp": lowest, "package": _compared(got, want)}
    mask = valid[:, None, None, :]
    for backend in (None, *BACKENDS):
        name = "torch chooses" if backend is None else backend.name.lower()
        chosen: AbstractContextManager[None] = nullcontext() if backend is None else sdpa_kernel(backend)
        try:
            with chosen:
                found = _both_ways(partial(F.scaled_dot_product_attention, attn_mask=mask), tensors)
            figures[name] = _compared(found, want)
        except RuntimeError as error:
            figures[name] = str(error)[:120]
    apart = figures["package"]["error"]
    return Answer(lowest < LOWEST and apart <= TOLERANCE[torch.bfloat16], figures)


def low_scores(day: Day, length: int) -> tuple[list[Tensor], Tensor, float]:
    """Return q, k and v [2, 4, S, D], the valid keys, and the lowest logsumexp of a row.

    A feature that all keys have lowers all scores of some queries by 150, which changes no weight.
    """
    q, k, v = (normal(day, 2, 4, length, SIZE, dtype=torch.float32) for _ in range(3))
    k[..., 0], q[..., 0] = 2.0, 0.0
    q[:, :, ::7, 0] = -75.0 * SIZE**0.5
    valid = torch.ones(2, length, dtype=torch.bool, device=day.place)
    valid[1, length // 3 :] = False
    q, k, v = (x.bfloat16() for x in (q, k, v))
    scores = (q.double() @ k.double().mT * SIZE**-0.5).masked_fill(~valid[:, None, None, :], float("-inf"))
    return [x.requires_grad_() for x in (q, k, v)], valid, float(scores.logsumexp(-1).min())


def _both_ways(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    y = attend(*tensors)
    return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]


def _compared(got: list[Tensor], want: list[Tensor]) -> dict[str, Any]:
    """Return the numbers of NaN of the result and of each gradient, and the largest relative error."""
    names = ("result", "q", "k", "v")
    nan = {name: int(x.isnan().sum()) for name, x in zip(names, got, strict=True)}
    errors = torch.tensor([relative(a, b) for a, b in zip(got, want, strict=True)])
    return {"nan": nan, "error": float(errors.max())}  # NaN if one is


def grouped(day: Day) -> Answer:
    """Measure the memory of attention of grouped heads in fp32; wrong if it holds half of the scores at a time."""
    heads, groups, length, size = (4, 2, 64, 16) if day.small else (16, 4, 4096, 128)
    form = day.operator("attention")
    tensors = [
        normal(day, 1, count, length, size, dtype=torch.float32, differentiate=True)
        for count in (heads, groups, groups)
    ]
    if not day.on_gpu:
        _both_ways(partial(form, form=CAUSAL), tensors)
        return Answer(None, {"not_to_be_had": "a CPU does not count its memory"})
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _both_ways(partial(form, form=CAUSAL), tensors)
    torch.cuda.synchronize()
    peak, scores = torch.cuda.max_memory_allocated() - before, 4 * heads * length * length
    return Answer(peak < scores / 2, {"peak_bytes": peak, "scores_bytes": scores})


def recorders(day: Day) -> Answer:
    """Count what torch's recorders and the package's have after collectives; wrong if the package's misses them."""
    dist.init_process_group("nccl" if day.on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(8, device=day.place)
        for _ in range(COLLECTIVES):
            dist.all_reduce(x)
        day.synchronize()
        counts = recorded_collectives()
    finally:
        dist.destroy_process_group()
    right = counts["megapar"] >= COLLECTIVES if any(counts.values()) else None
    return Answer(right, {**counts, "collectives": COLLECTIVES})


def recorded(dump: bytes) -> int:
    """Return the number of collectives in a dump of flight recorders."""
    return dump.count(b'"record_id"')


def recorded_collectives() -> dict[str, int]:
    """Return the number of collectives in each of torch's flight recorders, and in megapar's dump of them."""
    dumps = {name: getattr(torch._C._distributed_c10d, dump, lambda: b"{}") for name, dump in RECORDERS.items()}
    return {name: recorded(dump()) for name, dump in {**dumps, "megapar": flight_record}.items()}
