"""A warning if the ranks of a node share cores although the machine has more, which the job did not get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from megapar.health.stop.process import cores

SLURM = (
    "Pass the cores of the node: sbatch --cpus-per-task N, and srun --cpus-per-task N or SRUN_CPUS_PER_TASK=N, because "
    "srun does not take the value from sbatch; with sbatch --exclusive, N may be all cores."
)
KUBERNETES = "Raise limits.cpu of the container."
OTHERWISE = "Give the job more cores: look at the scheduler's options, at taskset, and at the limits of the container."


def few_cores(
    ranks: int, usable: int | None = None, present: int | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield one line if there are fewer usable cores than ranks although the machine has more.

    Each rank needs a core for itself: it launches kernels, and reads and tokenizes its data. A machine that has no more
    cores gives no reason to warn.

    Args:
        ranks: Ranks of this node.
        usable: Cores that this process may use; None to ask the system.
        present: Cores of the machine; None to ask the system.
        environ: Environment variables; None for this process's.
    """
    usable = cores() if usable is None else usable
    present = os.cpu_count() or 1 if present is None else present
    environ = os.environ if environ is None else environ
    if usable >= min(ranks, present):
        return
    scheduler = [("SLURM_JOB_ID", SLURM), ("KUBERNETES_SERVICE_HOST", KUBERNETES)]
    advice = next((text for name, text in scheduler if environ.get(name)), OTHERWISE)
    yield f"warning: {ranks} ranks share {usable} of this machine's {present} cores, which slows every rank. {advice}"
