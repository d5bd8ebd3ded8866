"""Environment variables that a launcher sets for this process."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megapar.errors import DistributedError

ROUND = "MEGAPAR_RENDEZVOUS_ROUND"  # number of earlier rendezvous of this job; the same on all ranks

RANK_FILE = "MEGAPAR_RANK_FILE"  # file for the rendezvous of a single-node job; a new one for each start

LAUNCH = "MEGAPAR_LAUNCH"  # unique name of a launch, the same on all nodes; restarts by the launcher keep it

ELASTIC = "MEGAPAR_ELASTIC"
"""Set for the ranks of a job that continues with fewer nodes, while a lost one may still run."""

NAMELESS = ("none", "megapar")
"""Default job names: torchrun's, and that of ``megapar launch`` if the nodes have no store to agree on a name."""


def starts_before(environ: Mapping[str, str]) -> int:
    """Return the number of earlier starts of this job, by ``megapar launch`` or (as counted on this node) torchrun."""
    return int(environ.get(ROUND) or environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def job_id(environ: Mapping[str, str]) -> str:
    """Return the name of this process's job, which restarts keep; "" if it has none."""
    name = environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name in NAMELESS else name


def equal_nodes(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks of each node, as far as this one can tell; None if it is not set or they differ."""
    names = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    texts = [environ.get(name) or "" for name in names]
    local, world, nodes = (int(text) if text.isascii() and text.isdecimal() else 0 for text in texts)
    if not local or world % local:
        return None
    return local if not nodes or local * nodes == world else None


STOP_TIMEOUT = "MEGAPAR_STOP_TIMEOUT"
"""Seconds that ranks have to save and exit after a stop request; the launcher's --stop-timeout."""


def stop_timeout(environ: Mapping[str, str]) -> float:
    """Return STOP_TIMEOUT in seconds, by default 300. Raises DistributedError if it is not a number of seconds."""
    text = environ.get(STOP_TIMEOUT) or "300"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise DistributedError(f"{STOP_TIMEOUT} must be a number of seconds of at least 0, got {text}")
    return seconds


def failure_file(environ: Mapping[str, str]) -> str | None:
    """Return the file in which a rank reports its error, next to that of torch's agent; None without an agent."""
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    return f"{file}.megapar" if file else None


def launch_id(environ: Mapping[str, str]) -> str:
    """Return the name of the ``megapar launch`` that started this process; "" if there is none."""
    return environ.get(LAUNCH, "")


def slurm_job(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return (Slurm's job id, number of earlier starts by Slurm), or ("", 0) outside Slurm."""
    times = environ.get("SLURM_RESTART_COUNT") or "0"
    return environ.get("SLURM_JOB_ID", ""), int(times) if times.isdecimal() else 0
