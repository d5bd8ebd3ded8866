"""What a launcher says of this process in its environment. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

ROUND = "MEGAPAR_RENDEZVOUS_ROUND"
"""How often the ranks of this job have met before; the same on all of them."""

RANK_FILE = "MEGAPAR_RANK_FILE"
"""The file by which the ranks of this start meet, where all of them are on one node; another one for each start."""


def starts_before(environ: Mapping[str, str]) -> int:
    """How often ranks of this job were started before: by ``megapar launch``, or by torchrun as this node counts."""
    return int(environ.get(ROUND) or environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def job_id(environ: Mapping[str, str]) -> str:
    """The name of the launch that this process belongs to, which restarts keep; "" where it has none."""
    name = environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name  # torchrun's name for all that were given none
