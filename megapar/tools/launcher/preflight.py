"""What ``megapar launch --preflight`` starts in front of a job: is every device and every link as fast as its peers?

Each rank times matrix products; then all ranks, the ranks of each node, and pairs of ranks across nodes (or within one)
exchange a buffer. The first rank prints the figures of every node and names what is slower than the median by more than
a fifth. Nothing is refused: a slow node is still a node.
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
from megapar.core.device.base import Device
from megapar.core.device.pick import pick
from megapar.core.health.parent import end_with_launcher

TOLERANCE = 0.8
TIMEOUT = timedelta(minutes=10)
GEMM = {"cpu": 384}
BUFFER = {"cpu": 1 << 20}


def main() -> int:
    """0 measured."""
    end_with_launcher()
    device = pick("auto", int(os.environ.get("LOCAL_RANK", "0")))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    found = {"gemm TFLOP/s": _gemm(device)}
    if world > 1:
        store = meet(None, rank, world, TIMEOUT)
        dist.init_process_group(device.backend, store=store, rank=rank, world_size=world, device_id=device.device_id)
        numel = BUFFER.get(device.type, 1 << 26)
        for name, groups in _groups(world, local).items():
            handles = [(ranks, dist.new_group(ranks)) for ranks in groups]
            for ranks, handle in handles:
                if rank in ranks:
                    found[name] = _bandwidth(device, handle, len(ranks), numel)
            dist.barrier()
        assert dist.group.WORLD is not None
        everyone = messages.all_gather(found, dist.group.WORLD)
    else:
        everyone = [found]
    if rank == 0:
        print(describe(everyone, local), end="", flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


def describe(everyone: list[dict[str, float]], local: int) -> str:
    """A line per node and the outliers. everyone: measurement -> rate, by rank. local: ranks per node."""
    names = list(dict.fromkeys(name for found in everyone for name in found))
    lines = []
    for node in range(0, len(everyone), local):
        mine = everyone[node : node + local]
        cells = [
            f"{name} {min(f[name] for f in mine if name in f):.3g}" for name in names if any(name in f for f in mine)
        ]
        lines.append(f"preflight: node {node // local}: slowest rank: {', '.join(cells)}")
    slow = []
    for name in names:
        of_rank = {rank: found[name] for rank, found in enumerate(everyone) if name in found}
        median = statistics.median(of_rank.values())
        slow += [
            f"preflight: SLOW: rank {rank} (node {rank // local}): {name} {rate:.3g}, median {median:.3g}"
            for rank, rate in of_rank.items()
            if rate < TOLERANCE * median
        ]
    return "\n".join([*lines, *(slow or ["preflight: no outlier"])]) + "\n"


def _groups(world: int, local: int) -> dict[str, list[list[int]]]:
    """Measurement -> groups of ranks; together they use every rank once."""
    found = {"all ranks GB/s": [list(range(world))]}
    if 1 < local < world:
        found["node GB/s"] = [list(range(start, start + local)) for start in range(0, world, local)]
    if world > local:
        nodes = range(0, world, 2 * local)
        found["pair across nodes GB/s"] = [
            [start + i, start + local + i] for start in nodes for i in range(local) if start + local + i < world
        ]
    else:
        found["pair GB/s"] = [[rank, rank + 1] for rank in range(0, world - 1, 2)]
    return found


def _gemm(device: Device) -> float:
    size = GEMM.get(device.type, 8192)
    a = torch.ones(size, size, dtype=device.default_dtype, device=device.torch_device)
    seconds = _best(device, lambda: torch.mm(a, a))
    return 2 * size**3 / seconds / 1e12


def _bandwidth(device: Device, group: dist.ProcessGroup, ranks: int, numel: int) -> float:
    """GB/s that one rank sends in an all-reduce."""
    x = torch.ones(numel, dtype=torch.float32, device=device.torch_device)
    seconds = _best(device, lambda: dist.all_reduce(x, group=group))
    return 2 * x.nbytes * (ranks - 1) / ranks / seconds / 1e9


def _best(device: Device, act: Callable[[], object], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        device.synchronize()
        start = time.perf_counter()
        act()
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    sys.exit(main())
