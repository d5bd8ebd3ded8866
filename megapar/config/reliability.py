"""How a run meets faults: bad numbers, diverged replicas, hangs, slow and lost ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.schema.flag import flag


@dataclass(frozen=True, kw_only=True)
class ReliabilityOptions:
    """Bad numbers, replicas, hangs, stragglers, local checkpoints."""

    bad_step_limit: int = flag(
        3, "steps in a row that are skipped because a gradient is not finite; the next one stops the run", low=0
    )
    spike_sigmas: float = flag(
        6.0, "standard deviations above the last 128 steps at which loss or norm is a spike; 0: off", low=0
    )
    spike_skip: bool = flag(False, "skip the update of a step that is a spike, at most --bad-step-limit in a row")
    skip_samples: tuple[str, ...] = flag((), "ranges A-B of sample numbers that are stepped over")
    replica_check_interval: int = flag(
        100, "steps between comparisons of parameters that several ranks hold; 0: off", unit="steps", low=0
    )
    recompute_check_interval: int = flag(
        500, "steps between checks that a micro-batch, run again, gives the same bits; 0: off", unit="steps", low=0
    )
    state_digest_steps: int = flag(
        -1,
        "steps within which every master and moment is compared with itself from one update to the next, a part in "
        "each: what changes in a part at rest is seen; 1: all in every step; auto: what costs 1 % of a step; 0: off",
        unit="steps",
        low=-1,
        words={"auto": -1},
    )
    step_timeout_seconds: float = flag(
        600.0,
        "a step that takes longer hangs: the late ranks are named and the run ends; 0: it is only told",
        unit="seconds",
        low=0,
    )
    section_timeouts: tuple[str, ...] = flag(
        (),
        "NAME=SECONDS: the same for start-up, load, first-step, step, evaluation, save, log; without one they are "
        "told, and go on, after 10 minutes or 10 times the longest so far",
        unit="seconds",
        comma=True,
    )
    local_checkpoint_interval: int = flag(
        0,
        "steps between checkpoints in the node's memory with a copy on the next node, for restarts; 0: off",
        unit="steps",
        low=0,
    )
    local_checkpoint_dir: str | None = flag(
        None, "folder in node-local memory for them", derived="/dev/shm/megapar-UID", path=True, per_node=True
    )
    straggler_factor: float = flag(
        1.5, "a rank whose own work takes so many times the median rank's is named in the log; 0: off", low=0
    )
