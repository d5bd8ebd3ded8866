"""Timings of operations on which the package's choices depend: launches, messages, loss chunks, products, copies.

``products`` calibrates the table of products by rows: a product takes the time of its launch or of its tiles.

Shape letters: T tokens, H hidden, k choices, E experts, V vocabulary, R rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megapar.core.comm.axis import Axis
from megapar.model.layers.loss import vocab_parallel_linear_cross_entropy
from megapar.moe.expert_order import sort_by_expert
from megapar.moe.token_dispatcher import fill
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.timed import GB, T_FLOPS, normal

ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDTHS = ((4096, 768), (4096, 4096), (4096, 14336), (1536, 2560))


class Sizes:
    """Sizes of a real layer, or of a test."""

    def __init__(self, small: bool) -> None:
        self.T, self.H, self.k, self.E, self.V = (64, 64, 2, 8, 512) if small else (8192, 4096, 8, 64, 103424)
        self.rows = (8, 64) if small else ROWS
        self.widths = ((64, 96),) if small else WIDTHS


def run(day: Day) -> None:
    """Measure each family of timings as one finding."""
    torch.manual_seed(0)
    sizes = Sizes(day.small)
    for name, work in (
        ("launches", _launches),
        ("products", _products),
        ("message rows", _messages),
        ("loss chunks", _loss),
        ("copies", _copies),
        ("all-reduce of one rank", _all_reduce),
    ):
        day.attempt(name, partial(_only_figures, work, day, sizes), least=3.0)


def _only_figures(work: Callable[[Day, Sizes], dict[str, Any]], day: Day, sizes: Sizes) -> Answer:
    if day.on_gpu:
        torch.cuda.empty_cache()
    return Answer(None, work(day, sizes))


def _launches(day: Day, sizes: Sizes) -> dict[str, Any]:
    """Measure a tiny kernel: host time per launch, and total time per kernel with a thousand in the queue."""
    x, times = torch.zeros(8, device=day.place), 50 if day.small else 1000

    def many() -> None:
        for _ in range(times):
            x.add_(1.0)

    many()
    day.synchronize()
    began = time.perf_counter()
    many()
    host = time.perf_counter() - began
    day.synchronize()
    return {"host_seconds": host / times, "seconds": (time.perf_counter() - began) / times}


def _products(day: Day, sizes: Sizes) -> dict[str, Any]:
    """Measure [rows, inner] x [inner, out] for every number of rows and width, and a large product for the peak."""
    found = []
    for inner, out in sizes.widths:
        weight = normal(day, inner, out)
        for rows in sizes.rows:
            x = normal(day, rows, inner)
            seconds = day.seconds(lambda x=x, weight=weight: x @ weight, 50)  # type: ignore[misc]
            flops = 2 * rows * inner * out
            found.append(
                {"rows": rows, "inner": inner, "out": out, "seconds": seconds, "tflops": flops / seconds / T_FLOPS}
            )
    large = normal(day, *((128, 128) if day.small else (8192, 8192)))
    seconds = day.seconds(lambda: large @ large)
    return {"products": found, "large_tflops": 2 * large.shape[0] ** 3 / seconds / T_FLOPS}


def _messages(day: Day, sizes: Sizes) -> dict[str, Any]:
    """Measure the rows of a token dispatch by width: H, and H with additional columns for a weight."""
    x, weights = normal(day, sizes.T, sizes.H), torch.rand(sizes.T, sizes.k, device=day.place)
    experts = torch.rand(sizes.T, sizes.E, device=day.place).topk(sizes.k).indices
    permutation = sort_by_expert(experts, None, sizes.E, experts.numel()).order
    found: dict[str, Any] = {
        "sort": day.seconds(lambda: sort_by_expert(experts, None, sizes.E, experts.numel())),
        "fill_as_it_is": day.seconds(lambda: fill(x, weights, permutation)),
        "columns_as_it_is": fill(x, weights, permutation).shape[1],
    }
    pairs = permutation.pair // sizes.k
    for more in (0, 2, 8):
        rows = torch.empty(pairs.shape[0], sizes.H + more, device=day.place, dtype=x.dtype)
        into = rows[:, : sizes.H]
        found[f"gather_into_h_{more}"] = day.seconds(lambda into=into: torch.index_select(x, 0, pairs, out=into))  # type: ignore[misc]
        found[f"copy_of_h_{more}"] = day.seconds(lambda into=into: into.contiguous().add_(0))  # type: ignore[misc]
        found[f"clone_of_h_{more}"] = day.seconds(rows.clone)
    return {**found, "bytes_of_h_0": 2 * pairs.shape[0] * sizes.H * x.element_size()}


def _loss(day: Day, sizes: Sizes) -> dict[str, Any]:
    """Measure output layer and loss by rows per chunk."""
    hidden = normal(day, sizes.T, sizes.H, differentiate=True)
    head = normal(day, sizes.V, sizes.H, differentiate=True)
    labels = torch.randint(0, sizes.V, (sizes.T,), device=day.place)
    found: dict[str, Any] = {}
    for rows in (16, 64) if day.small else (162, 512, 1024, 2048, 4096, 8192):

        def work(rows: int = rows) -> None:
            held = {"mp": Axis.single("mp"), "logits_bytes": 4 * rows * sizes.V}
            loss = vocab_parallel_linear_cross_entropy(hidden, head, None, labels, vocab_size=sizes.V, **held)
            torch.autograd.grad(loss, (hidden, head))

        try:
            found[f"rows_{rows}"] = day.seconds(work, 3)
        except torch.OutOfMemoryError:
            found[f"rows_{rows}"] = "out of memory"
    flops = 3 * 2 * sizes.T * sizes.H * sizes.V
    return {**found, "flops": flops}


def _copies(day: Day, sizes: Sizes) -> dict[str, Any]:
    """Measure copies between host and device, from pageable and page-locked memory, in GB/s."""
    found: dict[str, Any] = {}
    for size in (1 << 12, 1 << 16) if day.small else (1 << 16, 1 << 20, 1 << 24, 1 << 28):
        here = torch.empty(size, dtype=torch.uint8, device=day.place)
        for name, host in (
            ("pageable", torch.empty(size, dtype=torch.uint8)),
            ("pinned", torch.empty(size, dtype=torch.uint8, pin_memory=day.on_gpu)),
        ):
            to = day.seconds(lambda host=host, here=here: here.copy_(host, non_blocking=True))  # type: ignore[misc]
            back = day.seconds(lambda host=host, here=here: host.copy_(here, non_blocking=True))  # type: ignore[misc]
            found[f"{name}_{size}"] = {"to_device": size / to / GB, "to_host": size / back / GB}
    return found


def _all_reduce(day: Day, sizes: Sizes) -> dict[str, Any]:
    """Measure a collective of one rank, which moves no data: launch and device time."""
    store = dist.HashStore()
    dist.init_process_group("nccl" if day.on_gpu else "gloo", store=store, rank=0, world_size=1)
    try:
        found = {}
        for size in (1 << 8, 1 << 12) if day.small else (1 << 8, 1 << 20, 1 << 26):
            x = torch.zeros(size, device=day.place)
            found[f"floats_{size}"] = day.seconds(lambda x=x: dist.all_reduce(x))  # type: ignore[misc]
        return found
    finally:
        dist.destroy_process_group()
