"""The name of a job that was given none: random, and the same on all of its nodes."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from megapar.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "megapar/launch/"


def launch_name(nodes: int, job: str, store: Store | None, secret: bytes | None = None) -> str:
    """A name that no other launch has; "" where several nodes have no store to agree by.

    job: the name that was given, for one store may serve several jobs. store: where the nodes meet. A node that comes
    later, or again, hears the same. secret: by which nodes know each other, if they do. Raises DistributedError where
    the store does not answer, and for what no launcher has written there: the name becomes a folder's.
    """
    fresh = uuid.uuid4().hex
    if nodes == 1:
        return fresh
    if store is None:
        return ""
    from megapar.tools.launcher.rendezvous import Signer

    signer, what = Signer(secret), f"the name of the launch of job {job or 'without a name'}"
    try:
        told: bytes = store.compare_set(_KEY + job, "", signer.sign(what, fresh.encode()).decode())
    except RuntimeError as error:  # torch's own are RuntimeErrors
        raise DistributedError(f"the store of {what} does not answer: {error}") from error
    found = signer.open(what, told)
    if not re.fullmatch(rb"[0-9a-f]{32}", found):
        raise DistributedError(f"{what} is {found[:100]!r}, which no launcher has written")
    return found.decode()
