"""Flags for fault handling: bad numbers, diverged replicas, hangs, slow and lost ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megapar.schema import role as roles
from megapar.schema.flag import flag


@dataclass(frozen=True, kw_only=True)
class ReliabilityOptions:
    """Bad numbers, replicas, hangs, stragglers, local checkpoints."""

    role: ClassVar[roles.Role] = roles.WATCHES
    bad_step_limit: int = flag(
        3,
        "consecutive steps that are skipped because a gradient is not finite; one more stops the run",
        low=0,
        role=roles.OPTIMIZER,
    )
    spike_sigmas: float = flag(
        6.0,
        "a loss or gradient norm is a spike if it exceeds the mean of the last 128 steps by this many standard "
        "deviations; 0: off",
        low=0,
        role=roles.OPTIMIZER,
    )
    spike_skip: bool = flag(
        False, "skip the update of a spike, at most --bad-step-limit times in a row", role=roles.OPTIMIZER
    )
    skip_samples: tuple[str, ...] = flag((), "ranges A-B of sample numbers to skip", role=roles.DATA, other=("0-1",))
    replica_check_interval: int = flag(
        100,
        "steps between comparisons of the parameters that are replicated on several ranks; 0: off",
        unit="steps",
        low=0,
    )
    recompute_check_interval: int = flag(
        500,
        "steps between checks that running a micro-batch again gives bit-identical results; 0: off",
        unit="steps",
        low=0,
    )
    state_digest_steps: int = flag(
        -1,
        "steps in which all master weights and moments are checked once, a part in each step, for changes between two "
        "updates (memory corruption); 1: all in every step; auto: as many as cost 1 % of a step; 0: off",
        unit="steps",
        low=-1,
        words={"auto": -1},
    )
    step_timeout_seconds: float = flag(
        600.0,
        "time limit of a step; a longer one is a hang: the late ranks are named and the run ends; 0: only report it",
        unit="seconds",
        low=0,
    )
    section_timeouts: tuple[str, ...] = flag(
        (),
        "NAME=SECONDS: time limits of start-up, load, first-step, step, evaluation, save, log; a section without a "
        "limit is only reported, after 10 minutes and 10 times its longest duration so far",
        unit="seconds",
        comma=True,
    )
    local_checkpoint_interval: int = flag(
        0,
        "steps between checkpoints in node memory, with a copy on the next node, for fast restarts; 0: off",
        unit="steps",
        low=0,
        role=roles.SAVES,
    )
    local_checkpoint_dir: str | None = flag(
        None,
        "folder for these checkpoints, in node-local memory",
        derived="/dev/shm/megapar-UID",
        path=True,
        per_node=True,
        role=roles.SAVES,
    )
    straggler_factor: float = flag(
        1.5,
        "a rank is a straggler, and is named in the log, if its own work takes this many times as long as the median "
        "rank's; 0: off",
        low=0,
    )
