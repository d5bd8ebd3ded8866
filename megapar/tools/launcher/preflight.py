"""The measurement of ``megapar launch --preflight``, which finds slow devices and links before a job starts.

Each rank times matrix products. Then all ranks, the ranks of each node, and pairs of ranks across nodes (or within a
single node) exchange a buffer. Rank 0 prints the slowest rates of every node and each rank that is more than a fifth
below the median. A slow rank does not stop the job.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megapar.core.comm import json_messages as messages
from megapar.core.comm.run_store import meet
from megapar.core.device.accelerators import pick
from megapar.core.device.base import Device
from megapar.health.stop.parent import end_with_launcher

TOLERANCE = 0.8
TIMES = 5
TIMEOUT = timedelta(minutes=10)
GEMM = {"cpu": 384}
BUFFER = {"cpu": 1 << 20}


def main() -> int:
    """Measure this rank and its links; rank 0 prints the result. Returns 0."""
    end_with_launcher()
    device = pick("auto", int(os.environ.get("LOCAL_RANK") or "0"))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    rates = {"gemm TFLOP/s": _gemm(device)}
    if world > 1:
        store = meet(None, rank, world, TIMEOUT)
        dist.init_process_group(device.backend, store=store, rank=rank, world_size=world, device_id=device.device_id)
        numel = BUFFER.get(device.type, 1 << 26)
        for name, groups in _groups(world, local).items():
            handles = [(ranks, dist.new_group(ranks)) for ranks in groups]
            for ranks, handle in handles:
                if rank in ranks:
                    rates[name] = _bandwidth(device, handle, len(ranks), numel)
            dist.barrier()
        assert dist.group.WORLD is not None
        everyone = messages.all_gather(rates, dist.group.WORLD)
    else:
        everyone = [rates]
    if rank == 0:
        print(describe(everyone, local), end="", flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


def describe(everyone: list[dict[str, float]], local: int) -> str:
    """Return a line per node and a line per outlier.

    Args:
        everyone: For each rank, measurement -> rate.
        local: Ranks per node.
    """
    names = list(dict.fromkeys(name for rates in everyone for name in rates))
    lines = []
    for node in range(0, len(everyone), local):
        ranks = everyone[node : node + local]
        cells = [
            f"{name} {min(r[name] for r in ranks if name in r):.3g}" for name in names if any(name in r for r in ranks)
        ]
        lines.append(f"preflight: node {node // local}: slowest rank: {', '.join(cells)}")
    slow = []
    for name in names:
        rate_of = {rank: rates[name] for rank, rates in enumerate(everyone) if name in rates}
        median = statistics.median(rate_of.values())
        slow += [
            f"preflight: SLOW: rank {rank} (node {rank // local}): {name} {rate:.3g}, median {median:.3g}"
            for rank, rate in rate_of.items()
            if rate < TOLERANCE * median
        ]
    return "\n".join([*lines, *(slow or ["preflight: no outlier"])]) + "\n"


def _groups(world: int, local: int) -> dict[str, list[list[int]]]:
    """Return measurement -> disjoint groups of ranks that measure at the same time."""
    groups = {"all ranks GB/s": [list(range(world))]}
    if 1 < local < world:
        groups["node GB/s"] = [list(range(start, start + local)) for start in range(0, world, local)]
    if world > local:
        nodes = range(0, world, 2 * local)
        groups["pair across nodes GB/s"] = [
            [start + i, start + local + i] for start in nodes for i in range(local) if start + local + i < world
        ]
    else:
        groups["pair GB/s"] = [[rank, rank + 1] for rank in range(0, world - 1, 2)]
    return groups


def _gemm(device: Device) -> float:
    size = GEMM.get(device.type, 8192)
    a = torch.ones(size, size, dtype=device.default_dtype, device=device.torch_device)
    seconds = _fastest(device, lambda: torch.mm(a, a))
    return 2 * size**3 / seconds / 1e12


def _bandwidth(device: Device, group: dist.ProcessGroup, ranks: int, numel: int) -> float:
    """Return the rate at which one rank sends in an all-reduce, in GB/s."""
    x = torch.ones(numel, dtype=torch.float32, device=device.torch_device)
    seconds = _fastest(device, lambda: dist.all_reduce(x, group=group))
    return 2 * x.nbytes * (ranks - 1) / ranks / seconds / 1e9


def _fastest(device: Device, function: Callable[[], object]) -> float:
    """Return the seconds of the fastest of ``TIMES`` calls."""
    fastest = float("inf")
    for _ in range(TIMES):
        device.synchronize()
        start = time.perf_counter()
        function()
        device.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


if __name__ == "__main__":
    sys.exit(main())
