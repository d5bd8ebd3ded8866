"""torch's elastic agent as ``megapar launch`` runs it: it listens where the other nodes are, and nowhere else.

torch's own stores listen on every interface. Here one node's job listens on loopback; that of several nodes on the
address by which a node reaches ``--rdzv-endpoint``, or on ``--local-addr``.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from megapar.config.launched import ROUND, failure_file
from megapar.errors import DistributedError
from megapar.tools import unkillable
from megapar.tools.failures import Failure, again, first_failure
from megapar.tools.unkillable import Dying

LOOPBACK = "127.0.0.1"
_FAILURES = "torch.distributed.elastic.multiprocessing.api"
CONNECT = timedelta(minutes=5)  # nodes of a cluster do not start in the same minute


@dataclass(frozen=True)
class Meeting:
    """Where nodes meet. store: that of a ``Place``; None for backends of their own. address: this node's, for the
    others. endpoint: of those backends. settings: further ones of the backend.
    """

    backend: str
    id: str
    min_nodes: int
    max_nodes: int
    address: str | None
    store: TCPStore | None
    endpoint: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A store that nodes can meet at. endpoint: of it, for the others. address: this node's, as they reach it.

    hosted: whether the store is in this process.
    """

    store: TCPStore
    endpoint: str
    address: str
    hosted: bool


def meet_here() -> Place:
    """For a job of this node alone: a free port that only this machine can reach."""
    store = listening_store(LOOPBACK, 0)
    return Place(store, f"{LOOPBACK}:{store.port}", LOOPBACK, hosted=True)


def meet_at(endpoint: str, local_addr: str = "", hosts: bool | None = None) -> Place:
    """The store at HOST:PORT, made here where HOST is an address of this machine and nobody has made it yet.

    local_addr: this node's address for the others. hosts: whether this node is to make it, where that is known. Port 0
    is a free one, which only the node that makes the store can choose. Raises DistributedError.
    """
    host, port = split_endpoint(endpoint)
    found = _address_of(host)
    if found.startswith("127.") and host != "localhost" and not host.startswith("127.") and not local_addr:
        raise DistributedError(
            f"--rdzv-endpoint {endpoint} is {found} on this machine, which no other node can reach; "
            "give an address that all of them reach, or --local-addr"
        )
    listens = local_addr if local_addr and (hosts or found.startswith("127.")) else found
    if hosts is not False:
        try:
            store = listening_store(listens, port)
        except OSError as error:
            elsewhere = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)  # another machine's address, or made already
            if hosts or not port or error.errno not in elsewhere:
                raise DistributedError(f"cannot listen on {listens}, port {port}: {error.strerror}") from error
        else:
            return Place(store, f"{host}:{store.port}", local_addr or listens, hosted=True)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
    return Place(store, endpoint, local_addr or _towards(found, port), hosted=False)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """HOST and PORT (29400 where there is none) of HOST:PORT. Raises DistributedError."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or (endpoint.startswith("[") and endpoint.endswith("]")):
        host, port = endpoint, "29400"
    if not host or not port.isdecimal() or int(port) > 65535:
        raise DistributedError(f"--rdzv-endpoint must be HOST:PORT, got {endpoint}")
    return host.strip("[]"), int(port)


def _address_of(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DistributedError(f"--rdzv-endpoint: {host} has no address: {error.strerror}") from error
    ordered = sorted(found, key=lambda one: one[0] != socket.AF_INET)
    return str(ordered[0][4][0])


def _towards(address: str, port: int) -> str:
    """The address of this machine from which it reaches another one; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def make_agent(
    meeting: Meeting, arguments: Sequence[str], nproc: int, max_restarts: int, grace: int, log_dir: str = ""
) -> Any:
    """An agent that will run ``python ARGUMENTS`` on ``nproc`` ranks of this node.

    grace: seconds that ranks get to end after SIGTERM before a restart or the end of a failed job. log_dir: with one,
    output also goes to files per rank there, and lines carry the rank.
    """
    # The agent would end at once on a signal and forget how its ranks ended: the launcher passes signals on instead.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"
    logging.getLogger(_FAILURES).addFilter(_is_not_said_here)
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=_handler(meeting),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr=meeting.address,
    )
    logs = DefaultLogsSpecs(log_dir=log_dir or None, tee=Std.ALL if log_dir else Std.NONE)
    return _Agent(spec, logs_specs=logs, shutdown_timeout=grace)


class _Agent(LocalElasticAgent):
    """torch's, which gives ranks 30 s to follow a dead one whatever ``shutdown_timeout`` says: nearly all of a restart
    where they wait for it in a collective, or are stopped, and end by no signal but the last. Here nothing waits for a
    rank that no signal ends, and nobody is started again beside it, or where the same failure would end it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dying = Dying()
        self._looked = 0.0
        self._failure: Failure | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        ranks = self._pcontext
        assert ranks is not None
        if result.state == WorkerState.FAILED:
            files = [ranks.error_files[one.local_rank] for one in result.failures.values()]
            noted = [failure_file({"TORCHELASTIC_ERROR_FILE": file}) or "" for file in files]
            before, self._failure = self._failure, first_failure(noted)
            if self._remaining_restarts and (why := again(before, self._failure)):
                self._start_no_more(why)
        elif result.state == WorkerState.HEALTHY and time.monotonic() > self._looked + 1:
            self._looked = time.monotonic()
            if stuck := self._dying.stuck(ranks.pids()):
                pids = ranks.pids()
                ranks.close()  # those that can be ended are, and it is told which cannot
                failures = {
                    worker_group.workers[rank].global_rank: ProcessFailure(rank, pids[rank], 1, "") for rank in stuck
                }
                return RunResult(WorkerState.FAILED, failures=failures)
        return result

    def _start_no_more(self, why: str) -> None:
        self._remaining_restarts = 0
        print(f"megapar launch: {why}", file=sys.stderr, flush=True)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        ranks: Any = self._pcontext  # torch's SubprocessContext
        close, grace = ranks.close, self._shutdown_timeout

        def within_grace(death_sig: signal.Signals | None = None, timeout: int = grace) -> None:
            for rank in unkillable.end(ranks.subprocess_handlers, death_sig or signal.SIGTERM, timeout):
                self._start_no_more(unkillable.describe(worker_group.workers[rank].global_rank, ranks.pids()[rank]))
                del ranks.subprocess_handlers[rank]  # or torch would wait for it
                ranks._running_local_ranks.discard(rank)
            close(death_sig, timeout)

        # torch's SubprocessContext calls its own close() without a time where a rank has failed, and start_processes,
        # which makes it, takes none: only the object can be told. Ranks that make room for more nodes keep their 30 s.
        ranks.close = within_grace
        return started


def _is_not_said_here(record: logging.LogRecord) -> bool:
    """Not how a rank ended and that the others are ended then: it has said why, and the launcher says the rest."""
    return not record.getMessage().startswith(("failed (exitcode:", "Sending process"))


def no_more_restarts(agent: Any) -> None:
    """Whatever happens to the ranks from now on ends the job."""
    agent._remaining_restarts = 0  # the agent has no other way to be told


def _handler(meeting: Meeting) -> Any:
    parameters = RendezvousParameters(
        backend=meeting.backend,
        endpoint=meeting.endpoint,
        run_id=meeting.id,
        min_nodes=meeting.min_nodes,
        max_nodes=meeting.max_nodes,
        local_addr=meeting.address,
        **meeting.settings,
    )
    if meeting.store is None:
        return _fresh(get_rendezvous_handler(parameters))
    handler = create_handler(meeting.store, C10dRendezvousBackend(meeting.store, meeting.id), parameters)
    # The ranks' own store is made by the handler, on all interfaces if left to itself.
    handler._create_tcp_store_server = listening_store  # type: ignore[method-assign,assignment]
    return _fresh(handler)


def _fresh(handler: Any) -> Any:
    """Each rendezvous tells the ranks which one it is, and has a new store for them.

    Nodes count their own restarts, which differ where one of them came later; the number of the rendezvous is the same
    on all. torch 2.13 keeps the first store, with what the dead left in it.
    """
    if not hasattr(handler, "_bootstrap_store_info"):
        return handler  # of a backend that has none
    meet = handler.next_rendezvous

    def next_rendezvous() -> Any:
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        met = meet()
        os.environ[ROUND] = str(handler._state_holder.state.round)
        return met

    handler.next_rendezvous = next_rendezvous
    return handler


def listening_store(address: str, port: int) -> TCPStore:
    """A store that is reached by one address of this machine. Raises OSError where that cannot be listened on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
