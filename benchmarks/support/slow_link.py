"""Two network namespaces on one machine, joined by a link of a given rate: one rank on each side.

Needs Linux, root, and ``ip`` and ``tc`` (package iproute2). The limit holds for each direction.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.support.contest import Rank

# Room for whole messages: with less, the core that computes must wake gloo's thread for every chunk. And a window that
# is kept between messages: the answers to an end in slow start would wait behind the other end's full queue.
_TCP = (
    "net.ipv4.tcp_rmem=4096 8388608 16777216",
    "net.ipv4.tcp_wmem=4096 8388608 16777216",
    "net.ipv4.tcp_slow_start_after_idle=0",
)


@dataclass(frozen=True)
class SlowLink:
    """The two ends of a link: names of namespaces and interfaces by rank."""

    namespaces: tuple[str, str]
    interfaces: tuple[str, str]

    def rank(self, number: int, argv: Sequence[str]) -> Rank:
        """Start ``argv`` at one end."""
        command = ["ip", "netns", "exec", self.namespaces[number], *argv]
        return Rank(command, {"GLOO_SOCKET_IFNAME": self.interfaces[number], "OMP_NUM_THREADS": "1"}, core=number)

    def set_rate(self, rate: str) -> None:
        """Limit both directions to a rate as tc writes it (``400mbit``)."""
        for namespace, interface in zip(self.namespaces, self.interfaces, strict=True):
            _limit(namespace, interface, rate)

    def set_rate_inside(self, rate: str) -> None:
        """Limit what the ranks of one end send to each other."""
        for namespace in self.namespaces:
            _limit(namespace, "lo", rate)


@contextmanager
def slow_link() -> Iterator[SlowLink]:
    """Make the link and remove it. Raises PermissionError without root, FileNotFoundError without the tools."""
    if os.geteuid() != 0:
        raise PermissionError("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise FileNotFoundError(f"{tool} is missing: install the package iproute2")
    link = SlowLink((f"bench{os.getpid()}a", f"bench{os.getpid()}b"), ("side0", "side1"))
    made = []
    # A benchmark that is asked to end leaves no namespaces, which outlive processes.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for namespace in link.namespaces:
            _run("ip", "netns", "add", namespace)
            made.append(namespace)
        ends = [("name", i, "netns", n) for i, n in zip(link.interfaces, link.namespaces, strict=True)]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, namespace in enumerate(link.namespaces):
            interface = link.interfaces[number]
            _run("ip", "-n", namespace, "addr", "add", f"10.99.0.{number + 1}/24", "dev", interface)
            for setting in _TCP:
                _run("ip", "netns", "exec", namespace, "sysctl", "-qw", setting)
            for name in (interface, "lo"):
                _run("ip", "-n", namespace, "link", "set", name, "up")
        yield link
    finally:
        signal.signal(signal.SIGTERM, before)
        for namespace in made:
            _run("ip", "netns", "del", namespace)


def _limit(namespace: str, interface: str, rate: str) -> None:
    # A larger burst would let messages pass unlimited after idle time. With one below the 64 KB that TCP sends at once,
    # tbf cuts everything into packets, which takes a third of two cores.
    shape = ["rate", rate, "burst", "192kb", "latency", "300ms"]
    _run("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *shape)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)
