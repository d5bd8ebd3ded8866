"""What a launcher says of this process in its environment. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megapar.errors import DistributedError

ROUND = "MEGAPAR_RENDEZVOUS_ROUND"
"""How often the ranks of this job have met before; the same on all of them."""

RANK_FILE = "MEGAPAR_RANK_FILE"
"""The file by which the ranks of this start meet, where all of them are on one node; another one for each start."""

LAUNCH = "MEGAPAR_LAUNCH"
"""A name that no other launch has, the same on all nodes; restarts by the launcher keep it."""

NAMELESS = ("none", "megapar")
"""Names of jobs that were given none: by torchrun, and by ``megapar launch`` where nodes have no store to agree by."""


def starts_before(environ: Mapping[str, str]) -> int:
    """How often ranks of this job were started before: by ``megapar launch``, or by torchrun as this node counts."""
    return int(environ.get(ROUND) or environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def job_id(environ: Mapping[str, str]) -> str:
    """The name of the launch that this process belongs to, which restarts keep; "" where it has none."""
    name = environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name in NAMELESS else name


STOP_TIMEOUT = "MEGAPAR_STOP_TIMEOUT"
"""Seconds that ranks get to save and end once they are asked to; --stop-timeout of their launcher."""


def stop_timeout(environ: Mapping[str, str]) -> float:
    """The same; 300 where nobody says otherwise. Raises DistributedError."""
    said = environ.get(STOP_TIMEOUT) or "300"
    try:
        found = float(said)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise DistributedError(f"{STOP_TIMEOUT} must be a number of seconds from 0 on, got {said}")
    return found


def failure_file(environ: Mapping[str, str]) -> str | None:
    """Where a rank says what ended it: beside the file in which torch's agent looks for the same; None without one."""
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    return f"{file}.megapar" if file else None


def launch_id(environ: Mapping[str, str]) -> str:
    """The launch that this process belongs to, of ``megapar launch``; "" where there is none."""
    return environ.get(LAUNCH, "")


def slurm_job(environ: Mapping[str, str]) -> tuple[str, int]:
    """(Slurm's job, how often Slurm has started it before); ("", 0) where there is none."""
    times = environ.get("SLURM_RESTART_COUNT") or "0"
    return environ.get("SLURM_JOB_ID", ""), int(times) if times.isdecimal() else 0
