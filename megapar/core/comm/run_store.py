"""The store through which all ranks of a run find each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megapar.errors import DistributedError
from megapar.launch_environment import RANK_FILE

_GLOO = "GLOO_SOCKET_IFNAME"


def meet(url: str | None, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store that all ranks share, found by the url, the launcher's file, or MASTER_ADDR and MASTER_PORT.

    Raises DistributedError if it cannot be created or reached.
    """
    file = "" if url else os.environ.get(RANK_FILE, "")
    try:
        if file:
            return _by_file(Path(file), world_size, timeout)
        store: dist.Store = next(rendezvous(url or "env://", rank, world_size, timeout=timeout))[0]
    except (RuntimeError, ValueError, OSError) as error:  # torch raises RuntimeError
        where = url or file or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        advice = (
            "Check that its folder still exists: megapar launch creates one for every start."
            if file
            else "Check that this is the address of rank 0, and that its port is free there and open to this node. "
            "It is set by MASTER_ADDR and MASTER_PORT, which megapar launch --rdzv-endpoint HOST:PORT and torchrun set."
        )
        raise DistributedError(
            f"rank {rank} of {world_size} cannot reach the others at {where}: {str(error).splitlines()[0]}. {advice}"
        ) from error
    return store


def _by_file(path: Path, world_size: int, timeout: timedelta) -> dist.Store:
    if not path.parent.is_dir():  # torch would wait for it until the timeout
        raise FileNotFoundError(f"{path.parent} does not exist")
    store = dist.FileStore(str(path), world_size)
    store.set_timeout(timeout)
    return store


def unknown_address() -> str:
    """Return what to look at if this machine knows no address of MASTER_ADDR, which torch waits for; else ""."""
    name = os.environ.get("MASTER_ADDR", "")
    if not name or os.environ.get(RANK_FILE) or int(os.environ.get("WORLD_SIZE") or "1") == 1:
        return ""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        return (
            f"this machine knows no address of {name!r} ({error}), which MASTER_ADDR names; waiting for it. "
            "MASTER_ADDR is the name or the address of the machine of rank 0, as the other nodes reach it"
        )
    return ""


def loopback_advice() -> str:
    """Return what to set if gloo listens on a loopback address, which no other node can reach; else "".

    gloo resolves the machine's host name, which many machines map to a loopback address locally.
    """
    if os.environ.get(_GLOO) or int(os.environ.get("LOCAL_WORLD_SIZE") or "0") >= int(
        os.environ.get("WORLD_SIZE") or "1"
    ):
        return ""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f" This machine's name, {name}, has no address: set {_GLOO} to the network interface of the nodes."
    if not address.startswith("127."):
        return ""
    return (
        f" This machine's name, {name}, resolves to {address} here, where gloo listens and no other node can reach it: "
        f"set {_GLOO} to the network interface of the nodes, or map the name to its real address in /etc/hosts."
    )
