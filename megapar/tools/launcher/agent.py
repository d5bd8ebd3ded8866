"""torch's elastic agent, restricted to listen only on the address that the other nodes use.

torch's stores listen on every interface and unpickle whatever they receive. Here, the ranks of a single node meet
through a file that no other user can open. Several nodes listen on the address from which a node reaches
``--rdzv-endpoint``, or on ``--local-addr``, and exchange JSON (tools/launcher/rendezvous.py).
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

from megapar.errors import DistributedError
from megapar.health.stop.parent import be_launcher
from megapar.launch_environment import RANK_FILE, ROUND, failure_file
from megapar.tools.launcher import unkillable
from megapar.tools.launcher.clocks import LAST_CALL_SECONDS, Clocks
from megapar.tools.launcher.deaths import describe, next_action
from megapar.tools.launcher.failures import Failure, first_failure, is_refusal, repeated
from megapar.tools.launcher.node_order import order_by_node_rank
from megapar.tools.launcher.places import RankFiles
from megapar.tools.launcher.rank_logs import RankLogs
from megapar.tools.launcher.rendezvous import JsonBackend, SignedStore
from megapar.tools.launcher.stopper import Stopper
from megapar.tools.launcher.unkillable import Dying
from megapar.tools.launcher.waiting import Waiting, limit_of, nodes_of
from megapar.tools.launcher.warm import Warm
from megapar.tools.launcher.warm_start import starting_with

LOOPBACK = "127.0.0.1"
_FAILURES = "torch.distributed.elastic.multiprocessing.api"
CONNECT = timedelta(minutes=5)  # nodes of a cluster do not start in the same minute

# The value of MASTER_PORT for scripts that expect torchrun's store. Their error message then shows the cure.
NO_PORT = "none: pass --rdzv-endpoint localhost:0 to megapar launch to get one"


@dataclass(frozen=True)
class Meeting:
    """Parameters of a rendezvous.

    Attributes:
        backend: Name of torch's rendezvous backend.
        id: Name of the job.
        min_nodes: Nodes that are needed to start.
        max_nodes: Nodes of the complete job.
        address: Address of this node for the other nodes; None to let torch choose.
        store: Store of a ``MeetingPlace``; None for backends that provide one.
        endpoint: HOST:PORT for backends that provide a store.
        settings: Further settings of the backend.
        files: Rank files of a ``MeetingPlace``; None if the ranks meet through a port.
        secret: Secret of the job, or None.
        node_rank: This node's number, which orders the nodes; None for the order of addresses.
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
    node_rank: int | None = None


@dataclass(frozen=True)
class MeetingPlace:
    """A store where nodes meet.

    Attributes:
        store: The store.
        endpoint: HOST:PORT at which the other nodes reach the store.
        address: Address of this node for the other nodes.
        hosted: The store is in this process.
        files: Files through which the ranks meet; None if they use a store with a port on the first node.
        secret: Secret that authenticates the nodes; None if they are not authenticated.
    """

    store: Store
    endpoint: str
    address: str
    hosted: bool
    files: RankFiles | None = None
    secret: bytes | None = field(default=None, repr=False)


def meet_here() -> MeetingPlace:
    """Return a place for a single-node job, which opens no port. Raises DistributedError if no folder is suitable."""
    return MeetingPlace(HashStore(), "", LOOPBACK, hosted=True, files=RankFiles())


def meet_by_file(path: str, local_addr: str) -> MeetingPlace:
    """Return a place for nodes that share a file (``--rdzv-conf store_type=file``)."""
    return MeetingPlace(FileStore(path), path, local_addr or _address_of(socket.gethostname()), hosted=False)


def meet_at(endpoint: str, local_addr: str = "", hosts: bool | None = None) -> MeetingPlace:
    """Return the store at HOST:PORT. Create it if HOST is this machine and the store does not exist yet.

    Raises DistributedError if the address is unusable or nothing answers there.

    Args:
        endpoint: HOST:PORT. Port 0 selects a free port; only the node that creates the store can use it.
        local_addr: Address of this node for the other nodes; "" to detect it.
        hosts: True if this node must create the store, False if it must not, None to try.
    """
    host, port = split_endpoint(endpoint)
    address = _address_of(host)
    if address.startswith("127.") and host != "localhost" and not host.startswith("127.") and not local_addr:
        raise DistributedError(
            f"--rdzv-endpoint {endpoint} is {address} on this machine, which no other node can reach. "
            "Pass an address that all nodes can reach, or set --local-addr."
        )
    listen_address = local_addr if local_addr and (hosts or address.startswith("127.")) else address
    if hosts is not False:
        try:
            store = listening_store(listen_address, port)
        except OSError as error:
            elsewhere = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)  # another machine's address, or it exists already
            if hosts or not port or error.errno not in elsewhere:
                raise DistributedError(f"cannot listen on {listen_address}, port {port}: {error.strerror}") from error
        else:
            return MeetingPlace(store, f"{host}:{store.port}", local_addr or listen_address, hosted=True)
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
    except RuntimeError as error:  # torch's store errors are RuntimeErrors
        raise DistributedError(
            f"no rendezvous store answers at --rdzv-endpoint {endpoint} within {CONNECT.total_seconds():g} s. Check "
            "that megapar launch runs on that node with the same endpoint and that this node can reach its port. "
            f"{str(error).splitlines()[0]}"
        ) from error
    return MeetingPlace(store, endpoint, local_addr or _source_address(address, port), hosted=False)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split HOST:PORT; the default port is 29400. Raises DistributedError if either part is invalid."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or (endpoint.startswith("[") and endpoint.endswith("]")):
        host, port = endpoint, "29400"
    if not host or not port.isdecimal() or int(port) > 65535:
        raise DistributedError(f"--rdzv-endpoint must be HOST:PORT, got {endpoint}")
    return host.strip("[]"), int(port)


def _address_of(host: str) -> str:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DistributedError(f"--rdzv-endpoint: {host} has no address: {error.strerror}") from error
    ipv4_first = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return str(ipv4_first[0][4][0])


def _source_address(address: str, port: int) -> str:
    """Return the address of this machine from which it reaches ``address``. Sends nothing."""
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
    """Return an agent that runs ``python ARGUMENTS`` as ``nproc`` ranks of this node.

    Args:
        meeting: Parameters of the rendezvous.
        arguments: Arguments of the Python interpreter.
        nproc: Ranks of this node.
        max_restarts: Restarts of all ranks after failures.
        grace: Seconds that ranks have to exit after SIGTERM, before a restart or the end of a failed job.
        log_dir: Folder of the per-rank log files, whose lines are also prefixed with the rank; "" for none.
        stopper: Is informed of the agent's phases; None for a new one.
        warm: Fork the ranks from a process that has imported torch.
    """
    # On a signal, the agent would exit immediately and lose the statuses of its ranks. The stopper handles signals
    # instead. "none" is not the name of a signal; an empty value would select torch's default list.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "none"
    logging.getLogger(_FAILURES).addFilter(_is_worth_logging)
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
    """A rendezvous that is closed: its job has ended or accepts no more nodes."""


class _Agent(LocalElasticAgent):
    """torch's agent with shorter waits, fewer hopeless restarts and its own failure messages.

    After a failure, torch gives the other ranks 30 s to exit, regardless of ``shutdown_timeout``. Ranks that wait in a
    collective or are stopped exit only on SIGKILL, so this time dominates a restart. Here they get ``grace`` seconds.
    The agent also does not wait for a rank that no signal can end, does not start ranks next to such a process, and
    does not restart if the same failure would repeat. It informs the stopper of its phases and sets the environment by
    which ranks end with their launcher.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace: int, stopper: Stopper, warm: Warm | None) -> None:
        # Prefix log lines with the global rank, not with torch's local one.
        super().__init__(spec, logs_specs=logs, shutdown_timeout=grace, log_line_prefix_template="[rank${rank}]:")
        self._stopper = stopper
        self._warm = warm
        self._dying = Dying()
        self._checked_at = 0.0
        self._restarts_blocked = False
        self._failure: Failure | None = None

    def run(self, role: str = "default") -> Any:
        """Run the ranks. Raises DistributedError if the nodes cannot agree, ClosedError if the job has ended."""
        try:
            return super().run(role)
        except RendezvousClosedError as error:
            reason = "the job has ended on the other nodes, or accepts no more nodes"
            raise ClosedError(f"the nodes' rendezvous failed: {reason}") from error
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
        except (ValueError, LookupError, TypeError) as error:  # torch does not check the JSON of the other agents
            raise DistributedError(f"the messages of the other nodes cannot be parsed: {error!r:.200}") from error

    def _exit_barrier(self) -> None:
        with self._stopper.leaving():
            super()._exit_barrier()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        ranks = self._pcontext
        assert ranks is not None
        if result.state == WorkerState.FAILED:
            # Without a killed rank, read the notes of all ranks: the rank that failed first may exit after the ranks
            # that lost it.
            killed = any(failure.exitcode < 0 for failure in result.failures.values())
            failed = [failure.local_rank for failure in result.failures.values()] if killed else list(ranks.error_files)
            files = [ranks.error_files[rank] for rank in failed]
            notes = [failure_file({"TORCHELASTIC_ERROR_FILE": file}) or "" for file in files]
            previous, self._failure = self._failure, first_failure(notes)
            if self._remaining_restarts and is_refusal(result.failures):
                self._block_restarts("the run is refused; it is not restarted")
            if self._remaining_restarts and (why := repeated(previous, self._failure)):
                self._block_restarts(why)
            self._report(result, ranks.error_files)
        elif result.state == WorkerState.HEALTHY and time.monotonic() > self._checked_at + 1:
            self._checked_at = time.monotonic()
            if stuck := self._dying.stuck(ranks.pids()):
                pids = ranks.pids()
                ranks.close()  # ends the other ranks and reports those that cannot be ended
                failures = {
                    worker_group.workers[rank].global_rank: ProcessFailure(rank, pids[rank], 1, "") for rank in stuck
                }
                return RunResult(WorkerState.FAILED, failures=failures)
        return result

    def _report(self, result: RunResult, error_files: Mapping[int, str]) -> None:
        """Print which ranks failed and whether the job restarts. error_files: local rank -> torch's error file."""
        maximum, left = self._worker_group.spec.max_restarts, self._remaining_restarts
        notes = {
            rank: failure_file({"TORCHELASTIC_ERROR_FILE": error_files[failure.local_rank]})
            for rank, failure in result.failures.items()
        }
        statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
        job_ends = self._restarts_blocked or bool(self._stopper.signal)
        if message := describe(statuses, notes, next_action(maximum, left, job_ends=job_ends)):
            print(f"megapar launch: {message}", file=sys.stderr, flush=True)

    def _block_restarts(self, why: str) -> None:
        self._remaining_restarts, self._restarts_blocked = 0, True
        print(f"megapar launch: {why}", file=sys.stderr, flush=True)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        be_launcher(os.environ, self._worker_group.spec.rdzv_handler.get_run_id())
        if self._warm is not None:
            with self._stopper.idle("importing torch for the ranks"):
                self._warm.ready()
        with self._stopper.starting(), starting_with(self._warm):
            started: dict[int, Any] = super()._start_workers(worker_group)
        ranks: Any = self._pcontext  # torch's SubprocessContext
        close, grace = ranks.close, self._shutdown_timeout

        def within_grace(death_sig: signal.Signals | None = None, timeout: int = grace) -> None:
            for rank in unkillable.end(ranks.subprocess_handlers, death_sig or signal.SIGTERM, timeout):
                self._block_restarts(unkillable.describe(worker_group.workers[rank].global_rank, ranks.pids()[rank]))
                del ranks.subprocess_handlers[rank]  # otherwise torch waits for it
                ranks._running_local_ranks.discard(rank)
            close(death_sig, timeout)

        # After a failure, torch's SubprocessContext calls its close() without a timeout, and start_processes, which
        # creates it, does not take one. The only way to set it is on the object. Ranks that are stopped because nodes
        # join keep torch's 30 s.
        ranks.close = within_grace
        return started


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for torch's messages on failed ranks, which the launcher reports, and on unhandled signals."""
    return not record.getMessage().startswith(("failed (exitcode:", "Sending process", "Failed to register signal"))


def no_more_restarts(agent: Any) -> None:
    """Make the agent end the job after the next failure instead of restarting the ranks."""
    agent._remaining_restarts = 0  # the agent has no public method for this


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
        return _with_new_stores(order_by_node_rank(get_rendezvous_handler(parameters), meeting.node_rank))
    secret = meeting.secret
    limit = float(parameters.get("last_call_timeout") or LAST_CALL_SECONDS)
    handler = create_handler(meeting.store, JsonBackend(meeting.store, meeting.id, secret, Clocks(limit)), parameters)
    # The handler creates the ranks' store. By default that store would listen on all interfaces.
    handler._create_tcp_store_server = listening_store  # type: ignore[method-assign,assignment]
    if secret is not None:
        store_of_round = handler._wrap_store

        def signed(store: Store) -> Any:
            return SignedStore(
                store_of_round(store), f"round {handler._state_holder.state.round}, {meeting.id}", secret
            )

        handler._wrap_store = signed  # type: ignore[method-assign]
    return _with_new_stores(order_by_node_rank(handler, meeting.node_rank), meeting.files)


def _with_new_stores(handler: Any, files: RankFiles | None = None) -> Any:
    """Make each rendezvous of a handler pass its number to the ranks and give them a new store.

    The restart counts of nodes differ if one joined later, but the number of the rendezvous is the same on all nodes.
    torch 2.13 reuses the first store, with the keys that dead ranks left in it.
    """
    if not hasattr(handler, "_bootstrap_store_info"):
        return handler  # the backend has no such store
    meet = handler.next_rendezvous

    def next_rendezvous() -> Any:
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        os.environ.pop(RANK_FILE, None)
        if files is not None:
            os.environ[RANK_FILE] = str(files.next())
            # torch does not create a store with a port if it has one already.
            handler._shared_tcp_store_server = handler
            handler._bootstrap_store_info = RendezvousStoreInfo(LOOPBACK, NO_PORT)  # type: ignore[arg-type]
        result = meet()
        os.environ[ROUND] = str(handler._state_holder.state.round)
        return result

    handler.next_rendezvous = next_rendezvous
    return handler


def listening_store(address: str, port: int) -> TCPStore:
    """Return a new store that listens on one address of this machine. Raises OSError if that fails."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
