"""Where nodes meet, and their order: by --node-rank, and alike on all nodes."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megapar.errors import DistributedError
from megapar.tools.launcher import meeting
from megapar.tools.launcher.meeting import meet_at, order_by_node_rank, ordered


class Handler:
    """A rendezvous of torch after the nodes have met: this node's place by address, and the round's store."""

    def __init__(self, place: int, nodes: int, store: HashStore) -> None:
        self._world, self._store = (place, nodes), store

    def _get_world(self) -> tuple[int, int]:
        return self._world

    def _get_store(self) -> HashStore:
        return self._store


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ((0, 1, 2), [0, 1, 2]),
        ((2, 0, 1), [2, 0, 1]),
        ((None, None, None), [0, 1, 2]),  # by address, as torch does
        ((None, 5, 1), [2, 1, 0]),
    ],
)
def test_the_node_with_the_smallest_number_is_first(given: tuple[int | None, ...], ranks: list[int]) -> None:
    store, nodes = HashStore(), len(given)
    handlers = [order_by_node_rank(Handler(place, nodes, store), number) for place, number in enumerate(given)]
    with ThreadPoolExecutor(nodes) as pool:
        found = list(pool.map(lambda handler: handler._get_world(), handlers))
    assert found == [(rank, nodes) for rank in ranks]


def test_one_node_exchanges_nothing() -> None:
    store = HashStore()
    assert order_by_node_rank(Handler(0, 1, store), 3)._get_world() == (0, 1)
    assert store.num_keys() == 0


def test_shared_numbers_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert ordered([1, 0, 1]) == [1, 0, 2]
    assert "several nodes have --node-rank 1; they are ordered by their addresses" in capsys.readouterr().err


def test_nodes_meet_at_the_store_of_the_first_one() -> None:
    first = meet_at("localhost:0")
    second = meet_at(first.endpoint)
    assert (first.hosted, second.hosted) == (True, False)
    assert {first.address, second.address} == {"127.0.0.1"}
    first.store.set("from", "first")
    assert second.store.get("from") == b"first"
    with pytest.raises(DistributedError, match="cannot listen on"):
        meet_at(first.endpoint, hosts=True)


@pytest.mark.parametrize("endpoint", ["host:port", ":1", "host:70000", "no.such.host.invalid:1", ""])
def test_endpoints_that_are_none_are_refused(endpoint: str) -> None:
    with pytest.raises((DistributedError, ValueError), match="--rdzv-endpoint"):
        meet_at(endpoint)


def test_an_endpoint_where_nobody_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "CONNECT", timedelta(seconds=0.1))
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(DistributedError, match=f"answers at --rdzv-endpoint {endpoint} within 0.1 s"):
            meet_at(endpoint, hosts=False)


def test_a_name_that_only_this_machine_takes_for_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_address_of", lambda host: "127.0.1.1")
    with pytest.raises(DistributedError, match=r"node0:1 is 127\.0\.1\.1 on this machine, .* or set --local-addr"):
        meet_at("node0:1")


def test_nodes_that_share_a_file_do_not_meet_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_address_of", lambda host: "127.0.1.1")
    with pytest.raises(DistributedError, match="set --local-addr"):
        meeting.meet_by_file(str(tmp_path / "nodes"), "")
    assert meeting.meet_by_file(str(tmp_path / "nodes"), "127.0.0.1").address == "127.0.0.1"
