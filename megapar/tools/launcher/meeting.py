"""The place where the nodes of a job meet: a store, torch's rendezvous in it, and the order of the nodes.

torch's stores listen on every interface and unpickle whatever they receive. Here, the ranks of a single node meet
through a file that no other user can open. Several nodes listen on the address from which a node reaches
``--rdzv-endpoint``, or on ``--local-addr``, and exchange JSON (tools/launcher/rendezvous.py).

torch's c10d rendezvous numbers the nodes by their addresses. A scheduler's order is better: the first node of a job,
where people look for the log, has rank 0, and nodes that the scheduler placed next to each other have neighbouring
ranks. Here nodes are ordered by ``--node-rank``.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from megapar.errors import DistributedError
from megapar.launch_environment import RANK_FILE, ROUND
from megapar.tools.launcher.launch_options import Launch, split_endpoint
from megapar.tools.launcher.rank_files import RankFiles
from megapar.tools.launcher.rendezvous import LAST_CALL_SECONDS, Clocks, JsonBackend
from megapar.tools.launcher.secret import SignedStore

LOOPBACK = "127.0.0.1"
CONNECT = timedelta(minutes=5)  # nodes of a cluster do not start in the same minute

# The value of MASTER_PORT for scripts that expect torchrun's store. Their error message then shows the cure.
NO_PORT = "none: pass --rdzv-endpoint localhost:0 to megapar launch to get one"


@dataclass(frozen=True)
class MeetingPlace:
    """A store where nodes meet.

    Attributes:
        endpoint: HOST:PORT at which the other nodes reach the store.
        address: Address of this node for the other nodes.
        hosted: The store is in this process.
        files: Files through which the ranks meet; None if they use a store with a port on the first node.
        secret: Secret that authenticates the nodes; None if they are not authenticated.
    """

    store: Store
    endpoint: str
    address: str
    hosted: bool = False
    files: RankFiles | None = None
    secret: bytes | None = field(default=None, repr=False)


def meet_here() -> MeetingPlace:
    """Return a place for a single-node job, which opens no port. Raises DistributedError if no folder is suitable."""
    return MeetingPlace(HashStore(), "", LOOPBACK, hosted=True, files=RankFiles())


def meet_by_file(path: str, local_addr: str) -> MeetingPlace:
    """Return a place for nodes that share a file (``--rdzv-conf store_type=file``). Raises DistributedError."""
    address = local_addr or _address_of(socket.gethostname())
    if not local_addr and address.startswith("127."):
        name = socket.gethostname()
        raise DistributedError(f"{name} is {address} on this machine, which no other node can reach: set --local-addr.")
    return MeetingPlace(FileStore(path), path, address)


def meet_at(endpoint: str, local_addr: str = "", hosts: bool | None = None) -> MeetingPlace:
    """Return the store at HOST:PORT. Create it if HOST is this machine and the store does not exist yet.

    Raises DistributedError if the address is unusable or nothing answers there, ValueError if it is not HOST:PORT.

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
    return MeetingPlace(store, endpoint, local_addr or _source_address(address, port))


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


def listening_store(address: str, port: int) -> TCPStore:
    """Return a new store that listens on one address of this machine. Raises OSError if that fails."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def make_handler(launch: Launch, place: MeetingPlace) -> Any:
    """Return torch's rendezvous handler for a launch, with the changes that the top of this file names."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=place.endpoint,
        run_id=launch.rdzv_id,
        min_nodes=launch.min_nodes,
        max_nodes=launch.nnodes,
        local_addr=place.address,
        **launch.rdzv_conf,
    )
    secret, clocks = place.secret, Clocks(float(parameters.get("last_call_timeout") or LAST_CALL_SECONDS))
    handler = create_handler(place.store, JsonBackend(place.store, launch.rdzv_id, secret, clocks), parameters)
    # The handler creates the ranks' store. By default that store would listen on all interfaces.
    handler._create_tcp_store_server = listening_store  # type: ignore[method-assign,assignment]
    if secret is not None:
        store_of_round = handler._wrap_store

        def signed(store: Store) -> Any:
            round_name = f"round {handler._state_holder.state.round}, {launch.rdzv_id}"
            return SignedStore(store_of_round(store), round_name, secret)

        handler._wrap_store = signed  # type: ignore[method-assign]
    return _with_new_stores(order_by_node_rank(handler, launch.node_rank), place.files)


def _with_new_stores(handler: Any, files: RankFiles | None) -> Any:
    """Make each rendezvous of a handler pass its number to the ranks and give them a new store.

    The restart counts of nodes differ if one joined later, but the number of the rendezvous is the same on all nodes.
    torch 2.13 reuses the first store, with the keys that dead ranks left in it.
    """
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


def order_by_node_rank(handler: Any, node_rank: int | None) -> Any:
    """Make a rendezvous number its nodes by their ``--node-rank``; return the same handler.

    Each node writes its number to the store of the round and reads those of the others, so all nodes compute the same
    order, also in later rounds, when nodes have joined or left.
    """
    by_address = handler._get_world

    def by_node_rank() -> tuple[int, int]:
        place, nodes = by_address()
        if nodes == 1:
            return place, nodes
        store = handler._get_store()
        store.set(f"node_rank/{place}", "" if node_rank is None else str(node_rank))
        given = [store.get(f"node_rank/{other}").decode() for other in range(nodes)]
        order = ordered([int(text) if text.isdecimal() else None for text in given])
        return order.index(place), nodes

    handler._get_world = by_node_rank
    return handler


def ordered(given: Sequence[int | None]) -> list[int]:
    """Return the places of the nodes by their ``given`` numbers; nodes without one are last, in their old order.

    Numbers that several nodes share are reported: they are a mistake, but every order trains the same model.
    """
    repeated = [number for number, times in Counter(given).items() if number is not None and times > 1]
    if repeated:
        numbers = ", ".join(map(str, sorted(repeated)))
        message = f"several nodes have --node-rank {numbers}; they are ordered by their addresses"
        print(f"megapar launch: {message}", file=sys.stderr, flush=True)
    return sorted(range(len(given)), key=lambda place: (given[place] is None, given[place] or 0, place))


def nodes_of(handler: Any) -> str:
    """Return how many nodes have joined the rendezvous, and how many it needs."""
    minimum, maximum = handler._settings.min_nodes, handler._settings.max_nodes
    needed = f"{maximum}" if minimum == maximum else f"{minimum} to {maximum}"
    return f"nodes: {len(handler._state_holder.state.participants)} of {needed} are present"
