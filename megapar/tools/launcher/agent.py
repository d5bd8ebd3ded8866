"""torch's elastic agent as ``megapar launch`` runs it: it listens where the other nodes are, and nowhere else.

torch's own stores listen on every interface, and unpickle what anybody writes there. Here the ranks of one node meet by
a file that nobody else can open; several nodes on the address by which a node reaches ``--rdzv-endpoint``, or on
``--local-addr``, and tell each other JSON (tools/launcher/rendezvous.py).
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

from torch.distributed import FileStore, HashStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from megapar.config.launched import RANK_FILE, ROUND, failure_file
from megapar.core.health.parent import be_launcher
from megapar.errors import DistributedError
from megapar.tools.launcher import unkillable
from megapar.tools.launcher.clocks import LAST_CALL_SECONDS, Clocks
from megapar.tools.launcher.deaths import describe, following
from megapar.tools.launcher.failures import Failure, again, first_failure, is_refusal
from megapar.tools.launcher.places import RankFiles
from megapar.tools.launcher.rank_logs import RankLogs
from megapar.tools.launcher.rendezvous import JsonBackend, SignedStore
from megapar.tools.launcher.stopper import Stopper
from megapar.tools.launcher.unkillable import Dying
from megapar.tools.launcher.waiting import Waiting, limit_of, nodes_of
from megapar.tools.launcher.warm import Warm
from megapar.tools.launcher.warm_start import starting

LOOPBACK = "127.0.0.1"
_FAILURES = "torch.distributed.elastic.multiprocessing.api"
CONNECT = timedelta(minutes=5)  # nodes of a cluster do not start in the same minute

# What scripts find that expect torchrun's store: their error says what to do.
NO_PORT = "none: --rdzv-endpoint localhost:0 of megapar launch makes one"


@dataclass(frozen=True)
class Meeting:
    """Address of nodes. store: that of a ``MeetingPlace``; None for another backend. address: this node's, for the
    others. endpoint: of those backends. settings: further ones of the backend. files, secret: of a ``MeetingPlace``.
    """

    backend: str
    id: str
    min_nodes: int
    max_nodes: int
    address: str | None
    store: Store | None
    endpoint: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    files: RankFiles | None = None
    secret: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class MeetingPlace:
    """A store that nodes can meet at. endpoint: of it, for the others. address: this node's, as they reach it.

    hosted: whether the store is in this process. files: by which the ranks meet; None: by a store with a port, on the
    address of the first node. secret: by which nodes know each other; None: they do not.
    """

    store: Store
    endpoint: str
    address: str
    hosted: bool
    files: RankFiles | None = None
    secret: bytes | None = field(default=None, repr=False)


def meet_here() -> MeetingPlace:
    """For a job of this node alone: nothing listens. Raises DistributedError where its ranks could not meet."""
    return MeetingPlace(HashStore(), "", LOOPBACK, hosted=True, files=RankFiles())


def meet_by_file(path: str, local_addr: str) -> MeetingPlace:
    """For nodes that share a file (``--rdzv-conf store_type=file``)."""
    return MeetingPlace(FileStore(path), path, local_addr or _address_of(socket.gethostname()), hosted=False)


def meet_at(endpoint: str, local_addr: str = "", hosts: bool | None = None) -> MeetingPlace:
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
            return MeetingPlace(store, f"{host}:{store.port}", local_addr or listens, hosted=True)
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
    except RuntimeError as error:  # torch's own are RuntimeErrors
        raise DistributedError(
            f"nothing that nodes could meet at answers at --rdzv-endpoint {endpoint} within "
            f"{CONNECT.total_seconds():g} s. Is megapar launch started on that node, with the same endpoint, and its "
            f"port open to this one? {str(error).splitlines()[0]}"
        ) from error
    return MeetingPlace(store, endpoint, local_addr or _towards(found, port), hosted=False)


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
    meeting: Meeting,
    arguments: Sequence[str],
    nproc: int,
    max_restarts: int,
    grace: int,
    log_dir: str = "",
    stopper: Stopper | None = None,
    *,
    warm: bool = False,
) -> Any:
    """An agent that will run ``python ARGUMENTS`` on ``nproc`` ranks of this node.

    grace: seconds that ranks get to end after SIGTERM before a restart or the end of a failed job. log_dir: with one,
    output also goes to files per rank there, and lines carry the rank. stopper: hears of what the agent does. warm:
    whether ranks are forked from a process that has imported torch.
    """
    # The agent would end at once on a signal and forget how its ranks ended: the stopper has them all. No name is
    # the name of no signal; an empty list is taken for torch's own.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "none"
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
    return _Agent(spec, RankLogs(log_dir), grace, stopper or Stopper(grace), Warm() if warm else None)


class ClosedError(DistributedError):
    """The rendezvous that a node came to is over: what it was for has ended, or takes no more nodes."""


class _Agent(LocalElasticAgent):
    """torch's, which gives ranks 30 s to follow a dead one whatever ``shutdown_timeout`` says: nearly all of a restart
    where they wait for it in a collective, or are stopped, and end by no signal but the last. Here nothing waits for a
    rank that no signal ends, and nobody is started again beside it, or where the same failure would end it.

    The stopper hears of what it does, and ranks know whom they are to end with. What ended ranks is said here.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace: int, stopper: Stopper, warm: Warm | None) -> None:
        # Lines of logs carry the number that the ranks themselves have, not the node's.
        super().__init__(spec, logs_specs=logs, shutdown_timeout=grace, log_line_prefix_template="[rank${rank}]:")
        self._stopper = stopper
        self._warm = warm
        self._dying = Dying()
        self._looked = 0.0
        self._over = False
        self._failure: Failure | None = None

    def run(self, role: str = "default") -> Any:
        """As torch's. Raises DistributedError where the nodes cannot agree, ClosedError where they have ended."""
        try:
            return super().run(role)
        except RendezvousClosedError as error:
            told = "the job has ended on the other nodes, or takes no more of them"
            raise ClosedError(f"the nodes' rendezvous failed: {told}") from error
        except RendezvousError as error:
            raise DistributedError(f"the nodes' rendezvous failed: {str(error) or type(error).__name__}") from error
        finally:
            if self._warm is not None:
                self._warm.close()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler = worker_group.spec.rdzv_handler
        limit = limit_of(handler)
        try:
            with self._stopper.idle("waiting for nodes"), Waiting(lambda: nodes_of(handler), limit):
                super()._rendezvous(worker_group)
        except RendezvousTimeoutError as error:
            raise DistributedError(f"gave up waiting for {nodes_of(handler)}, after {limit:g} s") from error
        except (ValueError, LookupError, TypeError) as error:  # JSON of the other nodes' agents, and torch trusts it
            raise DistributedError(f"what the nodes tell each other cannot be read: {error!r:.200}") from error

    def _exit_barrier(self) -> None:
        with self._stopper.leaving():
            super()._exit_barrier()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        ranks = self._pcontext
        assert ranks is not None
        if result.state == WorkerState.FAILED:
            # The rank that has failed may take longer to end than those that it leaves alone.
            killed = any(one.exitcode < 0 for one in result.failures.values())
            failed = [one.local_rank for one in result.failures.values()] if killed else list(ranks.error_files)
            files = [ranks.error_files[rank] for rank in failed]
            noted = [failure_file({"TORCHELASTIC_ERROR_FILE": file}) or "" for file in files]
            before, self._failure = self._failure, first_failure(noted)
            if self._remaining_restarts and is_refusal(result.failures):
                self._start_no_more("the run is refused: not started again")
            if self._remaining_restarts and (why := again(before, self._failure)):
                self._start_no_more(why)
            self._tell(result, ranks.error_files)
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

    def _tell(self, result: RunResult, error_files: Mapping[int, str]) -> None:
        """Which ranks failed, and what comes now. error_files: by local rank."""
        most, left = self._worker_group.spec.max_restarts, self._remaining_restarts
        notes = {
            rank: failure_file({"TORCHELASTIC_ERROR_FILE": error_files[one.local_rank]})
            for rank, one in result.failures.items()
        }
        statuses = {rank: one.exitcode for rank, one in result.failures.items()}
        if told := describe(statuses, notes, following(most, left, over=self._over or bool(self._stopper.asked))):
            print(f"megapar launch: {told}", file=sys.stderr, flush=True)

    def _start_no_more(self, why: str) -> None:
        self._remaining_restarts, self._over = 0, True
        print(f"megapar launch: {why}", file=sys.stderr, flush=True)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        be_launcher(os.environ, self._worker_group.spec.rdzv_handler.get_run_id())
        if self._warm is not None:
            with self._stopper.idle("torch was imported for the ranks"):
                self._warm.ready()
        with self._stopper.starting(), starting(self._warm):
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
    """Not how a rank ended and that the others are ended then: it has said why, and the launcher says the rest. Nor
    that no signal is handled there.
    """
    return not record.getMessage().startswith(("failed (exitcode:", "Sending process", "Failed to register signal"))


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
    secret = meeting.secret
    limit = float(parameters.get("last_call_timeout") or LAST_CALL_SECONDS)
    handler = create_handler(meeting.store, JsonBackend(meeting.store, meeting.id, secret, Clocks(limit)), parameters)
    # The ranks' own store is made by the handler, on all interfaces if left to itself.
    handler._create_tcp_store_server = listening_store  # type: ignore[method-assign,assignment]
    if secret is not None:
        store_of_round = handler._wrap_store

        def signed(store: Store) -> Any:
            return SignedStore(
                store_of_round(store), f"round {handler._state_holder.state.round}, {meeting.id}", secret
            )

        handler._wrap_store = signed  # type: ignore[method-assign]
    return _fresh(handler, meeting.files)


def _fresh(handler: Any, files: RankFiles | None = None) -> Any:
    """Each rendezvous tells the ranks which one it is, and has a new store for them.

    Nodes count their own restarts, which differ where one of them came later; the number of the rendezvous is the same
    on all. torch 2.13 keeps the first store, with what the dead left in it.
    """
    if not hasattr(handler, "_bootstrap_store_info"):
        return handler  # of a backend that has none
    meet = handler.next_rendezvous

    def next_rendezvous() -> Any:
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        os.environ.pop(RANK_FILE, None)
        if files is not None:
            os.environ[RANK_FILE] = str(files.next())
            # torch makes no store, with its port, where it has one.
            handler._shared_tcp_store_server = handler
            handler._bootstrap_store_info = RendezvousStoreInfo(LOOPBACK, NO_PORT)  # type: ignore[arg-type]
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
