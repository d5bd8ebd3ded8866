"""The network interface for gloo and NCCL, set if their default would be wrong."""

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
    """Return environment variables for the ranks of this node, except those that are set already.

    A job on a loopback address uses only the loopback interface. Otherwise, gloo by default uses the address of the
    host name, which many machines resolve to a loopback address (Debian: 127.0.1.1). In that case gloo gets the
    interface of ``address``.

    Args:
        address: Address of this node for the other nodes.
        environ: Variables that are set already; None for this process's environment.
    """
    if sys.platform != "linux":
        return {}
    variables = {}
    if address.startswith("127.") or address == "::1":
        variables = {GLOO: "lo", NCCL: "lo"}
    elif host_name_is_loopback() and (interface := interface_of(address)):
        variables = {GLOO: interface}
    present = os.environ if environ is None else environ
    return {name: value for name, value in variables.items() if name not in present}


def host_name_is_loopback() -> bool:
    """Return True if this machine resolves its host name to a loopback address or cannot resolve it."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True


def interface_of(address: str) -> str:
    """Return the network interface with this IPv4 address; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
