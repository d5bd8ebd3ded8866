"""torch's rendezvous with its state as JSON, validated before use and signed if there is a secret.

torch stores the state as a pickle under a key of a store without authentication, so that anyone who can connect to the
store's port can run code in every launcher. Here the store contains JSON, and torch gets a pickle that this process
made from it. With a secret, messages carry an HMAC over the job, the round and an increasing number. They can be
neither forged nor replayed.

torch also writes each node's time of day into the state and compares it with the reader's clock. Nodes consider a node
dead if its clock is more than 15 s (three times ``keep_alive_interval``) slow; a node whose clock is fast considers the
other nodes dead. The nodes then remove each other, continue in two halves, or wait forever. Here, a time of another
node is replaced by the moment at which this node first saw it, on this node's clock. In the shared state it stays
unchanged.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, _NodeDesc, _RendezvousState

from megapar.errors import DistributedError
from megapar.tools.launcher.secret import Signer, StateRefusedError

NOTHING_YET = "-"
MOST_BYTES = 1 << 26
MOST_NODES = 1 << 20
_FIELDS = ("round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats")
_MAX_TIME = 1 << 35  # seconds since 1970
LAST_CALL_SECONDS = 30.0  # torch's default


class StoreLostError(RendezvousConnectionError, DistributedError):
    """The store of a rendezvous does not answer."""


class JsonBackend(RendezvousBackend):
    """Rendezvous backend that keeps the state of a job in a store. Raises StateRefusedError for invalid entries.

    Times that torch compares with this node's clock are converted to this node's clock (``Clocks``). Each write
    increments a number, so that a node that has seen a newer state detects the replay of an older one.
    """

    def __init__(self, store: Store, job: str, secret: bytes | None, clocks: Clocks | None = None) -> None:
        self._store = store
        self._job = job
        self._clocks = clocks or Clocks()
        self._signer = Signer(secret)
        self._key = f"megapar.rendezvous.{job}"
        self._number = self._round = 0
        self._raw = NOTHING_YET.encode()
        self._call(store.compare_set, self._key, "", NOTHING_YET)  # reading a missing key would block

    @property
    def name(self) -> str:
        """The name in torch's events."""
        return "megapar"

    def get_state(self) -> tuple[bytes, bytes] | None:
        """Return (state for torch, token), or None before the first write."""
        raw = self._call(self._store.get, self._key)
        state = self._read(raw)
        return None if state is None else (pickle.dumps(self._clocks.ours(state)), raw)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, bytes, bool] | None:
        """Write the state, unless another node has written since ``token``.

        Returns (current state, its token, True if it is the written one), or None if there is no state.

        Args:
            state: Pickled by this process.
            token: Token of the state that is replaced; None for the first write.
        """
        if token is not None and not isinstance(token, bytes):
            current = self.get_state()
            return None if current is None else (*current, False)
        mine: _RendezvousState = pickle.loads(state)  # noqa: S301 (pickled by torch in the calling function)
        body = {"job": self._job, "number": self._number + 1, "state": to_json(self._clocks.theirs(mine))}
        text = self._signer.sign(self._context, json.dumps(body, separators=(",", ":")).encode()).decode()
        expected = token.decode() if token else NOTHING_YET
        raw = self._call(self._store.compare_set, self._key, expected, text)
        current_state = self._read(raw)
        if current_state is None:
            return None
        return pickle.dumps(self._clocks.ours(current_state)), raw, raw == text.encode()

    @property
    def _context(self) -> str:
        return f"the rendezvous of job {self._job}"

    def _read(self, raw: bytes) -> _RendezvousState | None:
        if raw == NOTHING_YET.encode():
            if self._number:
                raise StateRefusedError(f"{self._context} is gone, which no launcher causes")
            return None
        if len(raw) > MOST_BYTES:
            raise StateRefusedError(f"{self._context} has {len(raw)} bytes, more than {MOST_BYTES}")
        body = self._signer.open(self._context, raw)
        number, state = self._parse(body)
        if number < self._number or state.round < self._round or (number == self._number and raw != self._raw):
            raise StateRefusedError(
                f"{self._context} is number {number} of round {state.round}, after number {self._number} of round "
                f"{self._round}: an old state was replayed, or another process writes to the store"
            )
        self._number, self._round, self._raw = number, state.round, raw
        return state

    def _parse(self, body: bytes) -> tuple[int, _RendezvousState]:
        try:
            message = json.loads(body)
            if not isinstance(message, dict) or set(message) != {"job", "number", "state"}:
                raise ValueError(f"not job, number and state: {str(message)[:100]}")
            if message["job"] != self._job:
                raise ValueError(f"job {str(message['job'])[:100]!r}")
            return _whole(message["number"]), from_json(message["state"])
        except (ValueError, RecursionError) as error:
            raise StateRefusedError(f"{self._context} is invalid: {str(error)[:200]}") from error

    def _call(self, call: Callable[..., Any], *arguments: str) -> bytes:
        try:
            value: bytes = call(*arguments)
        except (ValueError, RuntimeError) as error:  # torch's errors are RuntimeErrors, here also its timeouts
            raise StoreLostError(f"the store of {self._context} does not answer: {error}") from error
        return value


def to_json(state: _RendezvousState) -> dict[str, Any]:
    """Return the state as JSON values. Nodes are [address, process, number]; times are seconds since 1970."""
    return {
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else state.deadline.timestamp(),
        "closed": state.closed,
        "participants": [[*_node(node), rank] for node, rank in state.participants.items()],
        "wait_list": [_node(node) for node in sorted(state.wait_list)],
        "redundancy_list": [_node(node) for node in sorted(state.redundancy_list)],
        "last_heartbeats": [[*_node(node), beat.timestamp()] for node, beat in state.last_heartbeats.items()],
    }


def from_json(value: Any) -> _RendezvousState:
    """Return the state that ``to_json`` converted. Raises ValueError for any other value."""
    if not isinstance(value, dict) or set(value) != set(_FIELDS):
        raise ValueError(f"not the fields of a state: {str(value)[:100]}")
    state = _RendezvousState()
    state.round = _whole(value["round"])
    state.complete, state.closed = _boolean(value["complete"]), _boolean(value["closed"])
    state.deadline = None if value["deadline"] is None else _time(value["deadline"])
    state.participants = {_node_of(row[:3]): _whole(row[3]) for row in _rows(value["participants"], 4)}
    state.wait_list = {_node_of(row) for row in _rows(value["wait_list"], 3)}
    state.redundancy_list = {_node_of(row) for row in _rows(value["redundancy_list"], 3)}
    state.last_heartbeats = {_node_of(row[:3]): _time(row[3]) for row in _rows(value["last_heartbeats"], 4)}
    return state


def _node(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node_of(row: Sequence[Any]) -> _NodeDesc:
    address, process, number = row
    if not isinstance(address, str) or not 0 < len(address) < 256 or not address.isprintable():
        raise ValueError(f"{str(address)[:100]!r} is not an address")
    return _NodeDesc(address, _whole(process), _whole(number))


def _rows(value: Any, width: int) -> list[list[Any]]:
    if not isinstance(value, list) or len(value) > MOST_NODES:
        raise ValueError(f"not a list of nodes: {str(value)[:100]}")
    for row in value:
        if not isinstance(row, list) or len(row) != width:
            raise ValueError(f"not a node: {str(row)[:100]}")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ValueError(f"{str(value)[:100]} is not a count")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{str(value)[:100]} is neither true nor false")
    return value


def _time(value: Any) -> datetime:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MAX_TIME:
        raise ValueError(f"{str(value)[:100]} is not a time")
    return datetime.fromtimestamp(value, timezone.utc)


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

    last_call_seconds: Time in which more nodes may join after the minimum is present.
    """

    def __init__(self, last_call_seconds: float = LAST_CALL_SECONDS) -> None:
        self._last_call = timedelta(seconds=last_call_seconds)
        self._beats: dict[_NodeDesc, _Time] = {}
        self._deadline: _Time | None = None

    def ours(self, state: _RendezvousState, now: datetime | None = None) -> _RendezvousState:
        """Convert a state that any node may have written to this node's clock."""
        now = now or datetime.now(timezone.utc)
        beats = {}
        for node, theirs in state.last_heartbeats.items():
            known = self._beats.get(node)
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
