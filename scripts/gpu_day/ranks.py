"""Several ranks on one GPU over real NCCL: rows of the equivalence table, and two drills of failures.

NCCL refuses two ranks on one device only if they are on the same host, and takes NCCL_HOSTID for the host. Each rank
has another one, and sends through NCCL's sockets on the loopback interface. Communicators, their splits, queues,
streams, the watchdog and the abort are those of a cluster; transports, bandwidth and overlap are not.

Ranks are the warm pools of the tests (``tests/support/ranks.py``): a row makes all groups and destroys them. A row that
fails or exceeds its seconds kills its pool, and the next row gets a new one. The reference is one process, in fp64 on
the host; bf16 is compared with one process on the same device, fp64 with the same numbers to 1e-10.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megapar.training.loop.callbacks import TrainerCallback
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.hazards import recorded, recorded_collectives
from scripts.gpu_day.waits import detector, seen
from tests.equivalence.compare import differences, excess, still
from tests.equivalence.run import Routing, Trace, trace
from tests.equivalence.table import (
    BLOCKING,
    CLIPPED,
    CROSS,
    DROPS,
    EP2,
    FOUR_LAYERS,
    INTERLEAVED,
    MP2,
    NODE_ROWS,
    ROWS,
    SP,
    TOP4,
    ZBV,
    ZERO_BUBBLE,
    Row,
)
from tests.support import ranks as pools

STEPS = 4  # of a row in bf16, all of the same model
WATCHED, PROFILED = 3, 4  # the step with the detector of host waits, and the one whose kernels are counted
ROW_SECONDS, FIRST_SECONDS = 20.0, 50.0
DRILL_STEP, DRILL_SECONDS, STEP_TIMEOUT = 3, 40.0, 6
PP2, ULYSSES = ("--pp-degree", "2"), ("--context-parallel-algo", "ulysses_cp_algo")
CP2, HALVES = ("--cp-degree", "2"), ("--sharding-degree", "2", "--sharding-stage")
OVERLAP = ("--tp-comm-overlap",)
ON_GPU = ("fused",)  # layouts that a CPU refuses
# Name -> row, in order of worth.
TWO: dict[str, Row] = {
    "pp 2": Row("moe", 2, PP2, FOUR_LAYERS, accumulation=4),
    "ep 2, 2 slices": Row("moe", 2, (*EP2, "--ampipe-degree", "2"), TOP4),
    "zero-bubble": Row("moe", 2, (*PP2, *ZERO_BUBBLE), FOUR_LAYERS, accumulation=4),
    "mp 2, sp": Row("moe", 2, (*MP2, *SP, *BLOCKING), CLIPPED),
    "mp 2, sp, overlap": Row("moe", 2, (*MP2, *SP, *OVERLAP, "on"), CLIPPED),
    "mp 2, sp, fused": Row("moe", 2, (*MP2, *SP, *OVERLAP, "fused"), CLIPPED),
    "stage 3": Row("moe", 2, (*HALVES, "3"), CLIPPED),
    "stage 1": Row("moe", 2, (*HALVES, "1"), CLIPPED),
    "stage 2": Row("moe", 2, (*HALVES, "2"), CLIPPED),
    "cp 2, ring": Row("moe", 2, (*CP2, *EP2)),
    "cp 2, ulysses": Row("moe", 2, (*CP2, *ULYSSES, *EP2)),
    "interleaved": Row("moe", 2, (*PP2, *INTERLEAVED), FOUR_LAYERS, accumulation=4),
    "ep 2, dropless": Row("moe", 2, EP2),
    "ep 2, capacity": Row("moe", 2, EP2, DROPS, 2),
    "recompute, offload": Row("gpt", 2, (*MP2, *SP, "--recompute-interval", "1", "--recompute-offload"), FOUR_LAYERS),
    "pipe-experts": Row("moe", 2, (*EP2, "--use-pipe-experts", "--pipe-experts-multi-data", "2"), DROPS, 2),
    "slices across layers": Row("moe", 2, (*EP2, "--ampipe-degree", "2", *CROSS), DROPS, 2),
    "ernie, cp 2": Row("ernie", 2, CP2, micro_batch=2),
    "ernie, stage 3": Row("ernie", 2, (*HALVES, "3"), micro_batch=3),
    "zbv": Row("moe", 2, (*PP2, *ZBV), FOUR_LAYERS, accumulation=4),
}
FOUR: dict[str, Row] = {
    "pp 2, ep 2": Row("moe", 4, (*PP2, *EP2), FOUR_LAYERS, accumulation=4),
    "mp 2, pp 2": Row("moe", 4, (*MP2, *SP, *PP2), FOUR_LAYERS, accumulation=4),
    "node dispatch": NODE_ROWS[0],
    "stage 3, ep 2": Row("moe", 4, (*EP2, "--sharding-degree", "4", "--sharding-stage", "3")),
}
SMALL = ("pp 2", "ep 2, 2 slices")
EXACT = (
    "pp 2",
    "ep 2, 2 slices",
    "zero-bubble",
    "mp 2, sp, overlap",
    "stage 3",
    "stage 2",
    "cp 2, ring",
    "interleaved",
)
KERNELS = ("pp 2", "ep 2, 2 slices", "stage 3", "cp 2, ring", "mp 2, sp, overlap")  # rows whose kernels are counted
RECORDER = "tests/equivalence/run.py"  # it copies gradients to the host, and no run has it
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def run(day: Day) -> None:
    """Run the rows on two ranks, the drills, the rows on four ranks, then rows in fp64 and the rest of the table."""
    if day.on_gpu:
        os.environ.update(NCCL)
    two = {name: row for name, row in TWO.items() if not day.small or name in SMALL}
    with patch.object(pools, "MOST_THREADS", 10**6):  # a process with CUDA and NCCL has dozens
        for name, row in two.items():
            if day.on_gpu or not set(ON_GPU) & set(row.layout):
                day.attempt(
                    f"bf16: {name}",
                    partial(_with_failures, rounded, day, row, counted=name in KERNELS),
                    least=ROW_SECONDS,
                )
        for name in DRILLS:
            day.attempt(f"drill: {name}", partial(drilled, day, name), least=ROW_SECONDS)
        if day.small:
            return
        for name, row in FOUR.items():
            day.attempt(f"bf16: {name}", partial(_with_failures, rounded, day, row), least=ROW_SECONDS)
        for name in EXACT:
            day.attempt(f"fp64: {name}", partial(_with_failures, exact, day, TWO[name]), least=ROW_SECONDS)
        for row in (row for row in ROWS if row.world_size == 2 and row not in TWO.values()):
            if day.seconds_left > ROW_SECONDS:
                day.attempt(f"bf16: {row.name}", partial(_with_failures, rounded, day, row), least=ROW_SECONDS)


@dataclass
class Seen:
    """Observations of one rank during a row, beside the numbers.

    Attributes:
        waits: Host waits of one step by the line that causes them.
        entries: Entries of torch's flight recorders, by recorder, and bytes of megapar's dump of them.
        blocks: NCCL kernel -> its numbers of blocks.
        groups: Communicators of the rank.
        taken: Bytes of the device that all processes took since this rank began, and those of this rank's allocator.
        seconds: Seconds of the row by part.
    """

    waits: dict[str, int] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    groups: int = 0
    taken: tuple[int, int] = (0, 0)
    seconds: dict[str, float] = field(default_factory=dict)


def _with_failures(find: Callable[..., Answer], *args: Any, **more: Any) -> Answer:
    """Return the result of ``find``, or what each rank said if the ranks of its row failed."""
    try:
        return find(*args, **more)
    except pools.RanksFailed as failed:
        said = {rank: text.strip()[-3000:] for rank, text in failed.failures.items()}
        return Answer(False, {"error": str(failed).splitlines()[0], "said": said})


def rounded(day: Day, row: Row, *, counted: bool = False) -> Answer:
    """Compare a row in bf16 with one process in bf16 on this device, both against fp64."""
    flags, steps = still(row.reference_flags()), 2 if day.small else STEPS
    want = _reference(row.kind, flags, "fp64", steps, "cpu")
    alone = _reference(row.kind, flags, "bf16", steps, day.device)
    layout = (*still(row.flags()), "--dtype", "bf16")
    got, ranks = _on_ranks(day, row, layout, steps, want.routing, counted)
    wrong = excess(got, alone, want)
    losses = max(abs(a / b - 1) for a, b in zip(got.losses, alone.losses, strict=True))
    norms = max(abs(a / b - 1) for a, b in zip(got.norms, alone.norms, strict=True))
    figures = _summary(day, ranks)
    right = not wrong and figures.get("recorded", 1) > 0
    return Answer(right, {"wrong": wrong[:5], "losses_apart": losses, "norms_apart": norms, **figures})


def exact(day: Day, row: Row) -> Answer:
    """Compare losses, gradients, norms and updated parameters of a row in fp64 with one process."""
    want = _reference(row.kind, row.reference_flags(), "fp64", 2, "cpu")
    got, _ = _on_ranks(day, row, (*row.flags(), "--dtype", "fp64"), 2, None, counted=False)
    wrong = differences(got, want)
    return Answer(not wrong, {"wrong": wrong[:5]})


@functools.cache
def _reference(kind: str, flags: tuple[str, ...], dtype: str, steps: int, device: str) -> Trace:
    replay = None if dtype == "fp64" else _reference(kind, flags, "fp64", steps, "cpu").routing
    args = (device, 1, kind, (*flags, "--dtype", dtype), steps, replay, False)
    found: Trace = pools.run_ranks(1, traced, *args, group=False, timeout=FIRST_SECONDS)[0][0]
    return found


def _on_ranks(
    day: Day, row: Row, flags: tuple[str, ...], steps: int, replay: Routing | None, counted: bool
) -> tuple[Trace, list[Seen]]:
    """Return the numbers of a row and what each rank saw. Raises RanksFailed with the stacks of all ranks."""
    first = row.world_size not in _STARTED
    node = row.world_size if set(ON_GPU) & set(row.layout) else row.layout_degree("--ranks-per-node")
    args = (day.device, node, row.kind, flags, steps, replay, counted and day.on_gpu)
    try:
        found = pools.run_ranks(
            row.world_size,
            traced,
            *args,
            group=False,
            timeout=FIRST_SECONDS if first or not day.on_gpu else ROW_SECONDS,
        )
    except pools.RanksFailed:
        _STARTED.discard(row.world_size)  # its pool is gone
        raise
    _STARTED.add(row.world_size)
    return found[0][0], [seen_by for _, seen_by in found]


_STARTED: set[int] = set()  # sizes of pools whose processes have used their device


def _summary(day: Day, ranks: Sequence[Seen]) -> dict[str, Any]:
    """Return what the ranks saw, in short."""
    if not day.on_gpu:
        return {"seconds": ranks[0].seconds}
    first = ranks[0]
    beside = first.taken[0] - sum(one.taken[1] for one in ranks)
    groups = sum(one.groups for one in ranks)
    return {
        "waits": {place: count for one in ranks for place, count in one.waits.items()},
        "entries": first.entries,
        "recorded": first.entries["megapar"],
        "blocks": first.blocks,
        "groups": first.groups,
        "mib_of_a_group": beside / groups / 2**20 if groups else 0.0,
        "seconds": first.seconds,
    }


def traced(
    rank: int,
    world_size: int,
    rendezvous: str,
    device: str,
    node: int,
    kind: str,
    flags: tuple[str, ...],
    steps: int,
    replay: Routing | None,
    counted: bool,
) -> tuple[Trace | None, Seen]:
    """Train on this rank of a pool. Return the numbers (rank 0) and what the rank saw.

    ``node``: ranks of a node, as a launcher would say; NCCL takes each for a separate node. ``replay``: choices that
    every router repeats. ``counted``: count the blocks of NCCL's kernels in the last step.
    """
    os.environ.update(_place(rank, world_size, node))
    if device == "cpu":
        return trace(rank, world_size, rendezvous, kind, flags, steps, replay), Seen()
    watcher = _Watcher(counted and rank == 0, steps)
    found = trace(
        rank, world_size, rendezvous, kind, (*flags, "--device", device), steps, replay, device, None, watcher
    )
    watcher.seen.seconds["all"] = time.monotonic() - watcher.began
    return found, watcher.seen


def _place(rank: int, world_size: int, node: int) -> dict[str, str]:
    """Return the environment of a rank that NCCL takes for a separate host."""
    nodes = {
        "LOCAL_WORLD_SIZE": str(node),
        "GROUP_RANK": str(rank // node),
        "GROUP_WORLD_SIZE": str(world_size // node),
    }
    return {"NCCL_HOSTID": f"rank{rank}", "LOCAL_RANK": "0", **nodes}


class _Watcher(TrainerCallback):
    """Watches the device in the last steps of a row."""

    def __init__(self, counted: bool, steps: int) -> None:
        self.seen = Seen()
        self.began = time.monotonic()
        self._counted = counted
        self._steps = steps
        torch.zeros(1, device="cuda")  # the context is the process's, not the communicators'
        self._before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        self._watching = ExitStack()
        self._waits: Counter[str] = Counter()
        self._profile: Any = None
        self._trainer: Any = None

    def begin(self, trainer: Any) -> None:
        """Note the time to here: groups, model and checks of the start."""
        self._trainer = trainer
        self.seen.seconds["start"] = time.monotonic() - self.began

    def before_step(self, iteration: int) -> None:
        """Begin to watch one step for waits, and one for kernels."""
        if iteration == min(WATCHED, self._steps):
            self._waits = self._watching.enter_context(seen(but=RECORDER))
            self._watching.enter_context(detector(on_gpu=True))
        if iteration == PROFILED and self._counted:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.__enter__()

    def after_step(self, iteration: int) -> None:
        """End it, and read what the device and the recorders have."""
        self._watching.close()
        self.seen.waits = dict(self._waits)
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.__exit__(None, None, None)
            self.seen.blocks = _blocks(self._profile)
            self._profile = None
        if iteration == self._steps:
            torch.cuda.synchronize()
            self.seen.groups = self._trainer.world.num_groups
            reserved = torch.cuda.memory_reserved() - self._before[1]
            self.seen.taken = self._before[0] - torch.cuda.mem_get_info()[0], reserved
            self.seen.entries = recorded_collectives()
            self.seen.seconds["steps"] = time.monotonic() - self.began - self.seen.seconds["start"]


def _blocks(profiler: Any) -> dict[str, list[int]]:
    """Return NCCL's kernels of a profile with their numbers of blocks."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    found: dict[str, set[int]] = {}
    for event in events:
        if "nccl" in event.get("name", "") and "grid" in event.get("args", {}):
            found.setdefault(event["name"][:60], set()).add(int(event["args"]["grid"][0]))
    return {name: sorted(blocks) for name, blocks in found.items()}


def drilled(day: Day, name: str) -> Answer:
    """Let rank 1 fail in a step: rank 0 must end by itself, and a hang must leave torch's flight record."""
    row, began = TWO["stage 2"], time.monotonic()
    flags = (*row.flags(), "--dtype", "fp32", "--step-timeout-seconds", str(STEP_TIMEOUT), "--device", day.device)
    folder = day.out / "drills"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        pools.run_ranks(2, drill, name, str(folder), row.kind, flags, group=False, timeout=DRILL_SECONDS)
    except pools.RanksFailed as failed:
        took, said = time.monotonic() - began, failed.failures.get(0, "")
        _STARTED.discard(2)
        records = {path.name: recorded(path.read_bytes()) for path in folder.glob("flight-record*")}
        right = "still running" not in said and (name != SLEEPS or min(records.values(), default=0) > 0)
        return Answer(right, {"rank 0 ended after": took, "records": records, "said": said.strip()[-1500:]})
    return Answer(False, {"error": "both ranks finished"})


def drill(
    rank: int, world_size: int, rendezvous: str, name: str, folder: str, kind: str, flags: tuple[str, ...]
) -> None:
    """Train on this rank of a pool, with a fault of rank 1; flight records go to ``folder``."""
    os.environ.update(_place(rank, world_size, 1))
    os.chdir(folder)
    callback = _Fault(DRILLS[name]) if rank == 1 else None
    backend = "gloo" if "cpu" in flags else "cuda"
    trace(rank, world_size, rendezvous, kind, flags, 2 * DRILL_STEP, None, backend, None, callback)


SLEEPS = "a rank sleeps"
DRILLS: dict[str, Callable[[], None]] = {
    "a rank is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    SLEEPS: lambda: time.sleep(2 * DRILL_SECONDS),
}


class _Fault(TrainerCallback):
    """Fails after a step."""

    def __init__(self, fault: Callable[[], None]) -> None:
        self._fault = fault

    def after_step(self, iteration: int) -> None:
        """Fail."""
        if iteration == DRILL_STEP:
            self._fault()
