"""Nodes are numbered by --node-rank, and alike on all nodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from megapar.tools.launcher.node_order import order_by_node_rank, ordered


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


def test_other_backends_keep_their_order() -> None:
    backend = object()
    assert order_by_node_rank(backend, 0) is backend
