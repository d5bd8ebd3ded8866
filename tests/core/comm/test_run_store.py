"""Where ranks find each other, and what is said where they do not."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest

from megapar.core.comm import run_store as meeting
from megapar.core.comm.run_store import loopback_advice, meet, unknown_address
from megapar.errors import DistributedError
from megapar.health.stop.failure import is_first_to_report
from megapar.launch_environment import RANK_FILE
from tests.support.ranks import run_ranks


def meet_by_the_launchers_file(rank: int, world_size: int, rendezvous: str) -> tuple[bytes, list[bool]]:
    os.environ[RANK_FILE] = rendezvous
    try:
        store = meet(None, rank, world_size, timedelta(seconds=20))
        store.set(f"from {rank}", str(rank))
        found = store.get(f"from {1 - rank}")
        environ = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        said = [is_first_to_report(text, environ) for text in ("a", "a")]
        store.add("done", 1)
        store.set(f"done {rank}", "")
        store.wait([f"done {1 - rank}"], timedelta(seconds=20))
    finally:
        del os.environ[RANK_FILE]
    return found, said


def test_ranks_of_one_node_meet_by_the_launchers_file() -> None:
    (first, said), (second, also_said) = run_ranks(2, meet_by_the_launchers_file, group=False)
    assert (first, second) == (b"1", b"0")
    assert sorted(said + also_said) == [False, False, False, True]


def test_an_error_is_printed_at_once_if_the_launchers_folder_is_gone(tmp_path: Path) -> None:
    file = str(tmp_path / "gone" / "ranks-1")
    environ = {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", RANK_FILE: file}
    started = time.monotonic()
    assert is_first_to_report("a", environ)
    assert time.monotonic() - started < 60  # torch waits 300 s, and holds the interpreter lock meanwhile


def test_a_file_whose_folder_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_FILE, str(tmp_path / "gone/ranks-1"))
    with pytest.raises(DistributedError, match=r"rank 0 of 2 cannot reach the others at .*ranks-1: .*gone does not"):
        meet(None, 0, 2, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("address", "environ", "expected"),
    [
        (
            *("127.0.1.1", {}),
            "resolves to 127.0.1.1 here, where gloo listens and no other node can reach it: set GLOO_SOCKET",
        ),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, ""),
        ("127.0.1.1", {"LOCAL_WORLD_SIZE": "4"}, ""),
        ("10.0.0.1", {}, ""),
        (None, {}, "has no address: set GLOO_SOCKET_IFNAME"),
    ],
)
def test_where_gloo_listens_on_loopback_it_is_told(
    monkeypatch: pytest.MonkeyPatch, address: str | None, environ: dict[str, str], expected: str
) -> None:
    def resolve(name: str) -> str:
        if address is None:
            raise OSError
        return address

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting.socket, "gethostbyname", resolve)
    advice = loopback_advice()
    assert expected in advice
    assert bool(expected) == bool(advice)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"MASTER_ADDR": "node..0", "WORLD_SIZE": "2"}, "no address of 'node..0'"),
        ({"MASTER_ADDR": "node-0", "WORLD_SIZE": "2"}, "no address of 'node-0' ([Errno -2] Name or service not known)"),
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}, ""),
        ({"MASTER_ADDR": "node-0", "WORLD_SIZE": "1"}, ""),
        ({"MASTER_ADDR": "node-0", "WORLD_SIZE": "2", RANK_FILE: "/tmp/meet"}, ""),  # not asked for
    ],
)
def test_a_name_without_an_address_is_told(environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def resolve(name: str, port: None) -> object:
        if name == "node-0":  # as the C library answers, without asking the network
            raise socket.gaierror(-2, "Name or service not known")
        return known(name, port)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("MASTER_ADDR", "WORLD_SIZE", RANK_FILE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (said in unknown_address()) if said else unknown_address() == ""
