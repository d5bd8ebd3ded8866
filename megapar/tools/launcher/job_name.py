"""The random name of a launch, agreed on by all nodes of the job."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from megapar.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "megapar/launch/"


def launch_name(nodes: int, job: str, store: Store | None, secret: bytes | None = None) -> str:
    """Return a name that no other launch has; "" if several nodes have no store to agree on one.

    Nodes that join later, or again, get the same name. Raises DistributedError if the store does not answer or
    contains something else than a name: the name is used as a folder name.

    Args:
        nodes: Nodes of the job.
        job: The name from --rdzv-id, because one store may serve several jobs; "" for none.
        store: Store where the nodes meet, or None.
        secret: Secret of the job, or None.
    """
    new_name = uuid.uuid4().hex
    if nodes == 1:
        return new_name
    if store is None:
        return ""
    from megapar.tools.launcher.rendezvous import Signer

    signer, what = Signer(secret), f"the name of the launch of job {job or 'without a name'}"
    try:
        message: bytes = store.compare_set(_KEY + job, "", signer.sign(what, new_name.encode()).decode())
    except RuntimeError as error:  # torch's store errors are RuntimeErrors
        raise DistributedError(f"the store of {what} does not answer: {error}") from error
    name = signer.open(what, message)
    if not re.fullmatch(rb"[0-9a-f]{32}", name):
        raise DistributedError(f"{what} is {name[:100]!r}, which no launcher has written")
    return name.decode()
