"""torch's elastic agent as ``megapar launch`` runs it: on one node everything listens on loopback only."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """Where nodes meet. endpoint: "" for a free port of this machine. settings: further ones of the backend."""

    backend: str
    endpoint: str
    id: str
    min_nodes: int
    max_nodes: int
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether nobody from outside this machine is to take part."""
        return self.max_nodes == 1 and self.backend == "c10d" and not self.endpoint


def make_agent(
    meeting: Meeting, arguments: Sequence[str], nproc: int, max_restarts: int, grace: int, log_dir: str = ""
) -> Any:
    """An agent that will run ``python ARGUMENTS`` on ``nproc`` ranks of this node.

    grace: seconds that ranks get to end after SIGTERM before a restart or the end of a failed job. log_dir: with one,
    output also goes to files per rank there, and lines carry the rank.
    """
    # The agent would end at once on a signal and forget how its ranks ended: the launcher passes signals on instead.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"
    local_addr = "localhost" if meeting.max_nodes == 1 else None
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=_handler(meeting, local_addr),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr=local_addr,
    )
    logs = DefaultLogsSpecs(log_dir=log_dir or None, tee=Std.ALL if log_dir else Std.NONE)
    return LocalElasticAgent(spec, logs_specs=logs, shutdown_timeout=grace)


def no_more_restarts(agent: Any) -> None:
    """Whatever happens to the ranks from now on ends the job."""
    agent._remaining_restarts = 0  # the agent has no other way to be told


def _handler(meeting: Meeting, local_addr: str | None) -> Any:
    parameters = RendezvousParameters(
        backend=meeting.backend,
        endpoint=meeting.endpoint or f"{LOOPBACK}:0",
        run_id=meeting.id,
        min_nodes=meeting.min_nodes,
        max_nodes=meeting.max_nodes,
        local_addr=local_addr,
        **meeting.settings,
    )
    if not meeting.local:
        return _fresh(get_rendezvous_handler(parameters))
    store = loopback_store()
    handler = create_handler(store, C10dRendezvousBackend(store, meeting.id), parameters)
    # The ranks' own store is made by the handler, on all interfaces if left to itself.
    handler._create_tcp_store_server = lambda *_: loopback_store()  # type: ignore[method-assign]
    return _fresh(handler)


def _fresh(handler: Any) -> Any:
    """A new store for the ranks of each rendezvous: torch 2.13 keeps the first one, with what the dead left."""
    if not hasattr(handler, "_bootstrap_store_info"):
        return handler  # of a backend that has none
    meet = handler.next_rendezvous

    def next_rendezvous() -> Any:
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        return meet()

    handler.next_rendezvous = next_rendezvous
    return handler


def loopback_store() -> TCPStore:
    """A store that only this machine can reach: torch's own sockets listen on every interface."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
