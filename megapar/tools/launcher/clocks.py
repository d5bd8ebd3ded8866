"""Times that nodes tell each other, where their clocks differ.

torch writes each node's time of day into the state of a rendezvous and compares it with the reader's: a node whose
clock is more than 15 s (three times ``keep_alive_interval``) behind is taken for dead by the others, one that is ahead
takes the others for dead, and nodes throw each other out, go on by halves or wait for ever. Here a time of another node
means the moment at which this node first saw it, by this node's clock; it travels on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from megapar.core.health.signal_listener import write_stderr

LAST_CALL_SECONDS = 30.0  # torch's default
APART_SECONDS = 10.0  # a state is looked at every second or so


@dataclass(frozen=True)
class _Time:
    """As its node wrote it, and as this node's clock has it."""

    theirs: datetime
    ours: datetime


class Clocks:
    """Of the nodes of a job, as one of them sees them.

    last_call_seconds: that more nodes may come in after enough are there. say: tells of nodes whose clock is another
    one, once of each.
    """

    def __init__(self, last_call_seconds: float = LAST_CALL_SECONDS, say: Callable[[str], None] = write_stderr) -> None:
        self._last_call = timedelta(seconds=last_call_seconds)
        self._say = say
        self._beats: dict[_NodeDesc, _Time] = {}
        self._deadline: _Time | None = None
        self._told: set[str] = set()

    def ours(self, state: _RendezvousState, now: datetime | None = None) -> _RendezvousState:
        """A state that another node may have written, with times of this node's clock."""
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
        """A state that torch wants to write, with what came from other nodes as they wrote it."""
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
        seconds = (theirs - now).total_seconds()
        if abs(seconds) > APART_SECONDS and address not in self._told:
            self._told.add(address)
            side = "ahead of" if seconds > 0 else "behind"
            self._say(
                f"megapar launch: the clock of node {address} is about {abs(seconds):.0f} s {side} this node's: times "
                "in logs and metrics differ by that; nothing else goes by it"
            )
