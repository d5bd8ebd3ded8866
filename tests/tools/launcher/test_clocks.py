"""Clocks that differ: what nodes see of one another."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from megapar.tools.launcher.clocks import Clocks

HERE, THERE = _NodeDesc("here", 1, 0), _NodeDesc("there", 2, 0)
NOW = datetime(2026, 1, 2, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def state(deadline: datetime | None = None, **beats: datetime) -> _RendezvousState:
    made = _RendezvousState()
    made.last_heartbeats = {node: beats[node.addr] for node in (HERE, THERE) if node.addr in beats}
    made.deadline = deadline
    return made


@pytest.mark.parametrize("apart", [timedelta(0), timedelta(hours=-1), timedelta(hours=1)])
def test_a_beat_is_new_when_it_changes_and_goes_on_as_it_came(apart: timedelta) -> None:
    said: list[str] = []
    clocks = Clocks(log=said.append)
    seen = clocks.ours(state(there=NOW + apart), NOW)
    assert seen.last_heartbeats == {THERE: NOW}
    seen = clocks.ours(state(there=NOW + apart), NOW + 9 * SECOND)
    assert seen.last_heartbeats == {THERE: NOW}
    seen = clocks.ours(state(there=NOW + apart + 10 * SECOND), NOW + 11 * SECOND)
    assert seen.last_heartbeats == {THERE: NOW + 11 * SECOND}
    seen.last_heartbeats[HERE] = NOW + 12 * SECOND
    wrote = clocks.theirs(seen)
    assert wrote.last_heartbeats == {THERE: NOW + apart + 10 * SECOND, HERE: NOW + 12 * SECOND}
    again = clocks.ours(state(here=NOW + 12 * SECOND, there=NOW + apart + 10 * SECOND), NOW + 20 * SECOND)
    assert again.last_heartbeats == {THERE: NOW + 11 * SECOND, HERE: NOW + 12 * SECOND}
    assert len(said) == (apart > timedelta(0))
    assert not said or "the clock of node there is about 3599 s ahead of this node's" in said[0]


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ((12, 1, 1, 1, 1, 1), ""),
        ((12, 12, 12, 1, 12, 12), ""),
        ((3612, 3601, 3602, 3604, 3660, 3600), "is about 3601 s behind this node's, or its heartbeats arrive late"),
    ],
)
def test_a_heartbeat_may_be_late(late: Sequence[float], message: str) -> None:
    """It is never early: the clock of a node is behind only if none of several arrives in time."""
    said: list[str] = []
    clocks = Clocks(log=said.append)
    for number, seconds in enumerate((0, *late)):
        now = NOW + 5 * number * SECOND
        clocks.ours(state(there=now - seconds * SECOND), now)
    assert [message in line for line in said] == [True] * bool(message)


def test_the_last_call_of_another_node_is_counted_from_when_it_is_seen() -> None:
    clocks = Clocks(30.0)
    theirs = NOW - timedelta(hours=1)
    seen = clocks.ours(state(theirs), NOW)
    assert seen.deadline == NOW + 30 * SECOND
    assert clocks.ours(state(theirs), NOW + SECOND).deadline == NOW + 30 * SECOND
    assert clocks.theirs(seen).deadline == theirs
    assert clocks.ours(state(None), NOW).deadline is None
    own = clocks.theirs(state(NOW + 5 * SECOND))
    assert own.deadline == NOW + 5 * SECOND
    assert clocks.ours(state(NOW + 5 * SECOND), NOW + SECOND).deadline == NOW + 5 * SECOND
