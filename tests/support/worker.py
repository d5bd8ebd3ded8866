"""A worker process of the test kit: it takes a call, runs it as one rank, reports, and resets itself."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

STOP = b"stop"
RELEASE = b"release"
OBJECT_COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
# Of gloo's threads: they still get a quarter of a core that other work keeps busy.
GLOO_NICENESS = 5


@dataclass(frozen=True)
class Call:
    """One call of ``run_ranks``, the same for every rank.

    Attributes:
        function: The function to call.
        args: Its further arguments.
        group: Make the default process group for the function.
        backend: Backend of the group.
        rendezvous: Path of the file store of this call.
        timeout_seconds: Time limit of the parent.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    group: bool
    backend: str
    rendezvous: str
    timeout_seconds: float


@dataclass(frozen=True)
class Report:
    """The end of one rank's call: its pickled result, or a traceback."""

    result: bytes | None
    failure: str


def serve(connection: Connection, rank: int, world_size: int, stacks: Path) -> None:
    """Serve calls until ``STOP`` or until the parent is gone. Does not return.

    Args:
        connection: Connection to the parent.
        rank: Rank of this worker.
        world_size: Number of ranks.
        stacks: File for the Python stacks of all threads, on a crash and on SIGUSR1, which then ends the process.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    torch.set_num_threads(1)
    _refuse_object_collectives()
    _let_ranks_go_first()
    gc.freeze()  # what was imported is never garbage: the collection after each call stays cheap
    with stacks.open("w") as sink:
        faulthandler.enable(sink)
        faulthandler.register(signal.SIGUSR1, sink, all_threads=True, chain=True)
        try:
            while (message := connection.recv_bytes()) != STOP:
                _serve_one(connection, message, rank, world_size)
        except (EOFError, OSError):
            pass  # the parent is gone
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # interpreter exit can abort inside gloo's threads; nothing is left to do


def _refuse_object_collectives() -> None:
    """Refuse collectives that unpickle: they would run code that any rank sends. Ranks exchange tensors and JSON."""

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"{name} sends pickles; megapar.core.comm.json_messages sends JSON")

        return call

    for name in OBJECT_COLLECTIVES:
        setattr(dist, name, refused(name))
        setattr(dist.distributed_c10d, name, refused(name))


def _let_ranks_go_first() -> None:
    """Lower the priority of the threads that serve gloo's sockets, as soon as a group has them.

    Ranks of a test share a core. Such a thread that wakes while the rank's own thread is inside a send takes the core
    from it, finds the connection locked, and polls until its time slice ends: with four ranks on a core, half of all
    time. As a batch thread it waits until the rank's thread blocks or has had its share.
    """
    if not hasattr(os, "SCHED_BATCH"):  # Linux
        return
    make_group = dist.distributed_c10d._new_process_group_helper

    def make(*args: Any, **kwargs: Any) -> Any:
        made = make_group(*args, **kwargs)
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended since
                if (thread / "comm").read_text() == "gloo_tcp_loop\n":
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), GLOO_NICENESS)
        return made

    dist.distributed_c10d._new_process_group_helper = make


def _serve_one(connection: Connection, message: bytes, rank: int, world_size: int) -> None:
    report = _perform(message, rank, world_size)
    if report.failure:
        try:
            _leave()  # closed connections tell the other ranks at once, or they would wait for this one
        except BaseException:  # of NCCL, whose communicator a dead peer has broken
            report = Report(None, report.failure + traceback.format_exc())
    connection.send(report)
    while connection.recv_bytes() != RELEASE:
        pass
    _leave()


def _perform(message: bytes, rank: int, world_size: int) -> Report:
    try:
        call: Call = pickle.loads(message)  # noqa: S301 (written by the parent)
        _reset()
        return Report(pickle.dumps(_invoke(call, rank, world_size)), "")
    except BaseException:
        return Report(None, traceback.format_exc())


def _invoke(call: Call, rank: int, world_size: int) -> Any:
    if not call.group:
        return call.function(rank, world_size, call.rendezvous, *call.args)
    if call.backend == "late":
        from tests.support import late

        late.register()
    dist.init_process_group(
        call.backend,
        init_method=f"file://{call.rendezvous}",
        rank=rank,
        world_size=world_size,
        # Later than the parent's own limit: a hang is shown by all ranks' stacks, not by one rank's time-out.
        timeout=timedelta(seconds=call.timeout_seconds + 60),
    )
    return call.function(rank, world_size, *call.args)


def _reset() -> None:
    """Undo what a test may have changed in this process."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    debug._clear_sharding_prop_cache()  # it holds every mesh, and with it groups
    gc.collect()  # groups held by cycles keep gloo's threads and sockets
