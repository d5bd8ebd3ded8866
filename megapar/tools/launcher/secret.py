"""Signatures of what the launchers of a job tell each other.

Nodes sign the state of their rendezvous (tools/launcher/rendezvous.py), the values of each round and the launch's name.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousStateError

from megapar.errors import DistributedError

UNSIGNED = "unsigned"
_NAME_KEY = "megapar/launch/"
_NOT_SIGNED = ("add", "wait", "timeout", "set_timeout")


class StateRefusedError(RendezvousStateError, DistributedError):
    """An entry of the store that was not written by this job's launchers, or is out of order."""


class Signer:
    """Signs messages and checks signatures, by an HMAC with this key; None: messages have no signature."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    def sign(self, context: str, body: bytes) -> bytes:
        """Return signature, space and body. The signature also covers ``context``, the place of the message."""
        return self._signature(context, body) + b" " + body

    def open(self, context: str, message: bytes) -> bytes:
        """Return the body of a signed message. Raises StateRefusedError if the signature is wrong."""
        signature, _, body = message.partition(b" ")
        if hmac.compare_digest(signature, self._signature(context, body)):
            return body
        if self._secret is None and len(signature) == 64:
            raise StateRefusedError(f"{context} is signed: other nodes have a secret, which this one needs as well")
        if signature == UNSIGNED.encode():
            raise StateRefusedError(f"{context} is not signed: it was written without this job's secret")
        raise StateRefusedError(f"{context} was not written with this job's secret, or not by a launcher")

    def _signature(self, context: str, body: bytes) -> bytes:
        if self._secret is None:
            return UNSIGNED.encode()
        message = b"%d %s %s" % (len(context.encode()), context.encode(), body)
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest().encode()


class SignedStore:
    """The store of one round, with signed values: ranks and addresses. Reads raise StateRefusedError.

    Counters and waits are not signed: overwriting them can end the job, but nothing worse.
    """

    def __init__(self, store: Store, round_name: str, secret: bytes) -> None:
        self._store = store
        self._round = round_name
        self._signer = Signer(secret)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, as a store does, with its signature."""
        body = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._signer.sign(self._context(key), body))  # type: ignore[arg-type] # torch's stub wants str

    def get(self, key: str) -> bytes:
        """Return a value, as a store does. Raises StateRefusedError if its signature is wrong."""
        return self._signer.open(self._context(key), self._store.get(key))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values, as a store does, with their signatures."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values, as a store does. Raises StateRefusedError if a signature is wrong."""
        values = self._store.multi_get(list(keys))
        return [self._signer.open(self._context(key), value) for key, value in zip(keys, values, strict=True)]

    def __getattr__(self, name: str) -> Any:
        """Return a method of the store for counters, waits and timeouts, which are not signed."""
        if name not in _NOT_SIGNED:
            raise AttributeError(name)
        return getattr(self._store, name)

    def _context(self, key: str) -> str:
        return f"{key} of {self._round}"


def launch_name(nodes: int, job: str, store: Store, secret: bytes | None = None) -> str:
    """Return a name that no other launch has; nodes that join later, or again, get the same.

    ``job`` is the name from --rdzv-id, because one store may serve several jobs; "" for none. Raises DistributedError
    if the store does not answer or contains anything but a name: the name is used as a folder name.
    """
    new_name = uuid.uuid4().hex
    if nodes == 1:
        return new_name
    signer, what = Signer(secret), f"the name of the launch of job {job or 'without a name'}"
    try:
        message: bytes = store.compare_set(_NAME_KEY + job, "", signer.sign(what, new_name.encode()).decode())
    except RuntimeError as error:  # torch's store errors are RuntimeErrors
        raise DistributedError(f"the store of {what} does not answer: {error}") from error
    name = signer.open(what, message)
    if not re.fullmatch(rb"[0-9a-f]{32}", name):
        raise DistributedError(f"{what} is {name[:100]!r}, which no launcher has written")
    return name.decode()
