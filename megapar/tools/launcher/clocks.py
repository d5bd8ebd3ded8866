"""Rendezvous times of nodes whose clocks differ.

torch writes each node's time of day into the state of a rendezvous and compares it with the reader's clock. Nodes
consider a node dead if its clock is more than 15 s (three times ``keep_alive_interval``) slow; a node whose clock is
fast considers the other nodes dead. The nodes then remove each other, continue in two halves, or wait forever. Here, a
time of another node is replaced by the moment at which this node first saw it, on this node's clock. In the shared
state it stays unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from megapar.health.stop.signal_listener import write_stderr

LAST_CALL_SECONDS = 30.0  # torch's default
APART_SECONDS = 10.0  # well above the interval between two reads of the state, about 1 s
_ENOUGH = 5  # heartbeats: a busy machine writes a few late, but hardly all of them


@dataclass(frozen=True)
class _Time:
    """A time of a node.

    Attributes:
        theirs: As its node wrote it.
        ours: Time on this node's clock.
    """

    theirs: datetime
    ours: datetime


class Clocks:
    """Converts the times in a rendezvous state between the clocks of the nodes, for one node.

    Args:
        last_call_seconds: Time in which more nodes may join after the minimum is present.
        log: Called once for each node whose clock differs, with a message.
    """

    def __init__(self, last_call_seconds: float = LAST_CALL_SECONDS, log: Callable[[str], None] = write_stderr) -> None:
        self._last_call = timedelta(seconds=last_call_seconds)
        self._log = log
        self._beats: dict[_NodeDesc, _Time] = {}
        self._deadline: _Time | None = None
        self._ahead: dict[str, tuple[int, float]] = {}  # node -> (heartbeats, seconds that the earliest was ahead)
        self._logged: set[str] = set()

    def ours(self, state: _RendezvousState, now: datetime | None = None) -> _RendezvousState:
        """Convert a state that any node may have written to this node's clock."""
        now = now or datetime.now(timezone.utc)
        beats = {}
        for node, theirs in state.last_heartbeats.items():
            known = self._beats.get(node)
            if known is not None and known.theirs != theirs:
                self._compare(node.addr, theirs, now)
            beats[node] = known if known is not None and known.theirs == theirs else _Time(theirs, now)
        self._beats = beats
        state.last_heartbeats = {node: beat.ours for node, beat in beats.items()}
        if state.deadline is None:
            self._deadline = None
        elif self._deadline is None or self._deadline.theirs != state.deadline:
            self._deadline = _Time(state.deadline, now + self._last_call)
        state.deadline = None if self._deadline is None else self._deadline.ours
        return state

    def theirs(self, state: _RendezvousState) -> _RendezvousState:
        """Convert a state that torch writes: restore the times of other nodes as they wrote them."""
        for node, ours in state.last_heartbeats.items():
            known = self._beats.get(node)
            if known is not None and known.ours == ours:
                state.last_heartbeats[node] = known.theirs
            else:
                self._beats[node] = _Time(ours, ours)
        if state.deadline is not None and (self._deadline is None or self._deadline.ours != state.deadline):
            self._deadline = _Time(state.deadline, state.deadline)
        elif state.deadline is not None and self._deadline is not None:
            state.deadline = self._deadline.theirs
        return state

    def _compare(self, address: str, theirs: datetime, now: datetime) -> None:
        """Log once that a clock differs. A heartbeat may arrive late, but never early: the earliest one counts."""
        count, most = self._ahead.get(address, (0, -math.inf))
        seconds = max(most, (theirs - now).total_seconds())
        self._ahead[address] = count + 1, seconds
        enough = seconds > 0 or count + 1 >= _ENOUGH
        if address in self._logged or abs(seconds) <= APART_SECONDS or not enough:
            return
        self._logged.add(address)
        side, doubt = ("ahead of", "") if seconds > 0 else ("behind", ", or its heartbeats arrive late")
        self._log(
            f"megapar launch: the clock of node {address} is about {abs(seconds):.0f} s {side} this node's{doubt}. "
            "Times in logs and metrics may differ by that; nothing else depends on it"
        )
