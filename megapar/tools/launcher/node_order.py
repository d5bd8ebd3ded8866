"""The order of the nodes of a job: by ``--node-rank``, so that rank 0 is on node 0.

torch's c10d rendezvous numbers the nodes by their addresses. A scheduler's order is better: the first node of a job,
where people look for the log, has rank 0, and nodes that the scheduler placed next to each other have neighbouring
ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any


def order_by_node_rank(handler: Any, node_rank: int | None) -> Any:
    """Make a rendezvous number its nodes by their ``--node-rank``; return the same handler.

    Each node writes its number to the store of the round and reads those of the others, so all nodes compute the same
    order, also in later rounds, when nodes have joined or left. Backends of another kind are returned unchanged.

    Args:
        handler: Rendezvous handler of torch.
        node_rank: This node's number; None if it has none.
    """
    if not hasattr(handler, "_get_world"):
        return handler
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
    """Return the places of the nodes in the order of their numbers; nodes without one are last, in their old order.

    Numbers that several nodes share are reported: they are a mistake, but every order trains the same model.

    Args:
        given: The number of each node, or None, in the order of their addresses.
    """
    repeated = [number for number, times in Counter(given).items() if number is not None and times > 1]
    if repeated:
        numbers = ", ".join(map(str, sorted(repeated)))
        message = f"several nodes have --node-rank {numbers}; they are ordered by their addresses"
        print(f"megapar launch: {message}", file=sys.stderr, flush=True)
    return sorted(range(len(given)), key=lambda place: (given[place] is None, given[place] or 0, place))
