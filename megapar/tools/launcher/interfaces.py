"""Which network interface of this machine gloo and NCCL are to listen on, where they would choose a wrong one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Mapping

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def interfaces(address: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for ranks on a node that the others reach by ``address``; what is set already wins over them.

    A job on loopback listens there alone. gloo takes the address of the machine's name, which on many machines is a
    loopback address to themselves (Debian: 127.0.1.1): then it is told the interface of ``address``.
    """
    if sys.platform != "linux":
        return {}
    found = {}
    if address.startswith("127.") or address == "::1":
        found = {GLOO: "lo", NCCL: "lo"}
    elif own_name_is_loopback() and (name := interface_of(address)):
        found = {GLOO: name}
    return {name: value for name, value in found.items() if name not in (os.environ if environ is None else environ)}


def own_name_is_loopback() -> bool:
    """Whether this machine's name is a loopback address to itself, or none at all."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True


def interface_of(address: str) -> str:
    """The interface that has an IPv4 address; "" where none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
