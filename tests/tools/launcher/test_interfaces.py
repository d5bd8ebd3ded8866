"""Which interface gloo and NCCL are told."""

from __future__ import annotations

import sys

import pytest

from megapar.tools.launcher import interfaces as module
from megapar.tools.launcher.interfaces import interface_of, interfaces

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")


def test_loopback_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""  # nobody's


def test_a_job_on_loopback_listens_there_alone() -> None:
    assert interfaces("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interfaces("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth1"}) == {"NCCL_SOCKET_IFNAME": "lo"}


def test_gloo_is_told_where_the_machines_name_is_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interface_of", {"10.0.0.7": "ib0"}.__getitem__)
    monkeypatch.setattr(module.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert interfaces("10.0.0.7", {}) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert interfaces("10.0.0.7", {"GLOO_SOCKET_IFNAME": "eth1"}) == {}
    monkeypatch.setattr(module.socket, "gethostbyname", lambda name: "10.0.0.7")
    assert interfaces("10.0.0.7", {}) == {}
