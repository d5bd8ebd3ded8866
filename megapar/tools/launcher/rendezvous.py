"""How launchers agree on who takes part: torch's rendezvous, with its state as JSON that is checked before it is used.

torch keeps the state as a pickle under a key of a store that asks nobody who he is: whoever reaches its port runs code
in every launcher. Here JSON travels; torch gets a pickle that this process made of it. With a secret, what nodes tell
each other carries an HMAC over the job, the round and a number that only rises, so that it can be neither forged nor
brought again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import pickle
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, _NodeDesc, _RendezvousState

from megapar.errors import DistributedError
from megapar.tools.launcher.clocks import Clocks

NOTHING_YET = "-"
UNSIGNED = "unsigned"
MOST_BYTES = 1 << 26
MOST_NODES = 1 << 20
_FIELDS = ("round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats")
_LATEST = 1 << 35  # seconds since 1970 that a time may be


class StateRefusedError(RendezvousStateError, DistributedError):
    """What lies in the store was not written by this job's launchers, or not in this order."""


class StoreLostError(RendezvousConnectionError, DistributedError):
    """The store of a rendezvous does not answer."""


class Signer:
    """Marks messages, and knows its own marks. secret: None marks and proves nothing."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    def sign(self, context: str, body: bytes) -> bytes:
        """The body behind its mark. context: where it belongs, which is marked too."""
        return self._mark(context, body) + b" " + body

    def open(self, context: str, message: bytes) -> bytes:
        """The body of a message. Raises StateRefusedError where the mark is not ours."""
        mark, _, body = message.partition(b" ")
        if hmac.compare_digest(mark, self._mark(context, body)):
            return body
        if self._secret is None and len(mark) == 64:
            raise StateRefusedError(f"{context} is signed: other nodes have a secret, which this one needs as well")
        if mark == UNSIGNED.encode():
            raise StateRefusedError(f"{context} is not signed: somebody without this job's secret has written it")
        raise StateRefusedError(f"{context} was not written with this job's secret, or by no launcher at all")

    def _mark(self, context: str, body: bytes) -> bytes:
        if self._secret is None:
            return UNSIGNED.encode()
        message = b"%d %s %s" % (len(context.encode()), context.encode(), body)
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest().encode()


class JsonBackend(RendezvousBackend):
    """Holds the state of a job's rendezvous in a store. Raises StateRefusedError for what no launcher has written.

    Times that torch compares with this node's clock are of this node's clock (tools/launcher/clocks.py).

    Every writing has the number after the one it replaces, so that an older one, brought again, is known to everybody
    who has seen a newer one.
    """

    def __init__(self, store: Store, job: str, secret: bytes | None, clocks: Clocks | None = None) -> None:
        self._store = store
        self._job = job
        self._clocks = clocks or Clocks()
        self._signer = Signer(secret)
        self._key = f"megapar.rendezvous.{job}"
        self._number = self._round = 0
        self._raw = NOTHING_YET.encode()
        self._call(store.compare_set, self._key, "", NOTHING_YET)  # to read a missing key would wait for it

    @property
    def name(self) -> str:
        """For torch's events."""
        return "megapar"

    def get_state(self) -> tuple[bytes, bytes] | None:
        """What torch reads, and a token; None before the first writing."""
        raw = self._call(self._store.get, self._key)
        state = self._read(raw)
        return None if state is None else (pickle.dumps(self._clocks.ours(state)), raw)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, bytes, bool] | None:
        """Write, unless another node has written since ``token``; what is there then, its token, whether it is ours.

        state: pickled by this process.
        """
        if token is not None and not isinstance(token, bytes):
            found = self.get_state()
            return None if found is None else (*found, False)
        mine: _RendezvousState = pickle.loads(state)  # noqa: S301 (torch pickled it in the call above this one)
        body = {"job": self._job, "number": self._number + 1, "state": to_json(self._clocks.theirs(mine))}
        text = self._signer.sign(self._context, json.dumps(body, separators=(",", ":")).encode()).decode()
        before = token.decode() if token else NOTHING_YET
        raw = self._call(self._store.compare_set, self._key, before, text)
        found_state = self._read(raw)
        if found_state is None:
            return None
        return pickle.dumps(self._clocks.ours(found_state)), raw, raw == text.encode()

    @property
    def _context(self) -> str:
        return f"the rendezvous of job {self._job}"

    def _read(self, raw: bytes) -> _RendezvousState | None:
        if raw == NOTHING_YET.encode():
            if self._number:
                raise StateRefusedError(f"{self._context} is gone, which no launcher does")
            return None
        if len(raw) > MOST_BYTES:
            raise StateRefusedError(f"{self._context} has {len(raw)} bytes")
        body = self._signer.open(self._context, raw)
        number, state = self._parse(body)
        if number < self._number or state.round < self._round or (number == self._number and raw != self._raw):
            raise StateRefusedError(
                f"{self._context} is number {number} of round {state.round}, after number {self._number} of round "
                f"{self._round}: somebody has brought an old one again or written beside the launchers"
            )
        self._number, self._round, self._raw = number, state.round, raw
        return state

    def _parse(self, body: bytes) -> tuple[int, _RendezvousState]:
        try:
            told = json.loads(body)
            if not isinstance(told, dict) or set(told) != {"job", "number", "state"}:
                raise ValueError(f"not job, number and state: {str(told)[:100]}")
            if told["job"] != self._job:
                raise ValueError(f"job {str(told['job'])[:100]!r}")
            return _whole(told["number"]), from_json(told["state"])
        except (ValueError, RecursionError) as error:
            raise StateRefusedError(f"{self._context} is none: {str(error)[:200]}") from error

    def _call(self, call: Callable[..., Any], *arguments: str) -> bytes:
        try:
            found: bytes = call(*arguments)
        except (ValueError, RuntimeError) as error:  # TimeoutError and torch's own are RuntimeErrors here
            raise StoreLostError(f"the store of {self._context} does not answer: {error}") from error
        return found


def to_json(state: _RendezvousState) -> dict[str, Any]:
    """The state as JSON holds it. Nodes are [address, process, number]; times are seconds since 1970."""
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


def from_json(told: Any) -> _RendezvousState:
    """A state from ``to_json``. Raises ValueError for anything else."""
    if not isinstance(told, dict) or set(told) != set(_FIELDS):
        raise ValueError(f"not the fields of a state: {str(told)[:100]}")
    state = _RendezvousState()
    state.round = _whole(told["round"])
    state.complete, state.closed = _truth(told["complete"]), _truth(told["closed"])
    state.deadline = None if told["deadline"] is None else _time(told["deadline"])
    state.participants = {_node_of(row[:3]): _whole(row[3]) for row in _rows(told["participants"], 4)}
    state.wait_list = {_node_of(row) for row in _rows(told["wait_list"], 3)}
    state.redundancy_list = {_node_of(row) for row in _rows(told["redundancy_list"], 3)}
    state.last_heartbeats = {_node_of(row[:3]): _time(row[3]) for row in _rows(told["last_heartbeats"], 4)}
    return state


def _node(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node_of(row: Sequence[Any]) -> _NodeDesc:
    address, process, number = row
    if not isinstance(address, str) or not 0 < len(address) < 256 or not address.isprintable():
        raise ValueError(f"{str(address)[:100]!r} is no address")
    return _NodeDesc(address, _whole(process), _whole(number))


def _rows(told: Any, width: int) -> list[list[Any]]:
    if not isinstance(told, list) or len(told) > MOST_NODES:
        raise ValueError(f"no list of nodes: {str(told)[:100]}")
    for row in told:
        if not isinstance(row, list) or len(row) != width:
            raise ValueError(f"no node: {str(row)[:100]}")
    return told


def _whole(told: Any) -> int:
    if not isinstance(told, int) or isinstance(told, bool) or not 0 <= told < 1 << 53:
        raise ValueError(f"{str(told)[:100]} is no count")
    return told


def _truth(told: Any) -> bool:
    if not isinstance(told, bool):
        raise ValueError(f"{str(told)[:100]} is neither true nor false")
    return told


def _time(told: Any) -> datetime:
    if not isinstance(told, int | float) or isinstance(told, bool) or not 0 <= told < _LATEST:
        raise ValueError(f"{str(told)[:100]} is no time")
    return datetime.fromtimestamp(told, timezone.utc)


class SignedStore:
    """A store of a round for what launchers tell each other in it: ranks, addresses. Raises StateRefusedError.

    Counters and waits are the store's own: who overwrites those ends the job, and no more.
    """

    def __init__(self, store: Store, round_name: str, secret: bytes) -> None:
        self._store = store
        self._round = round_name
        self._signer = Signer(secret)

    def set(self, key: str, value: str | bytes) -> None:
        """As a store does."""
        body = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._signer.sign(self._context(key), body))  # type: ignore[arg-type] # torch's do so

    def get(self, key: str) -> bytes:
        """As a store does."""
        return self._signer.open(self._context(key), self._store.get(key))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """As a store does."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As a store does."""
        found = self._store.multi_get(list(keys))
        return [self._signer.open(self._context(key), value) for key, value in zip(keys, found, strict=True)]

    def add(self, key: str, amount: int) -> int:
        """As a store does."""
        return self._store.add(key, amount)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """As a store does."""
        self._store.wait(keys, *timeout)

    @property
    def timeout(self) -> timedelta:
        """As a store does."""
        found: timedelta = self._store.timeout  # type: ignore[attr-defined] # of every store there is
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """As a store does."""
        self._store.set_timeout(timeout)

    def _context(self, key: str) -> str:
        return f"{key} of {self._round}"
