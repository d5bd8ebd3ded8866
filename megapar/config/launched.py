"""What a launcher says of this process in its environment. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

ROUND = "MEGAPAR_RENDEZVOUS_ROUND"
"""How often the ranks of this job have met before; the same on all of them."""

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


def launch_id(environ: Mapping[str, str]) -> str:
    """The launch that this process belongs to, of ``megapar launch``; "" where there is none."""
    return environ.get(LAUNCH, "")


def slurm_job(environ: Mapping[str, str]) -> tuple[str, int]:
    """(Slurm's job, how often Slurm has started it before); ("", 0) where there is none."""
    times = environ.get("SLURM_RESTART_COUNT") or "0"
    return environ.get("SLURM_JOB_ID", ""), int(times) if times.isdecimal() else 0
