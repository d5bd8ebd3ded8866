"""What came of a fault, against the run to which nothing happened."""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.job import Ended, Fault, run_job

SHARDING = ("--sharding-degree", "2")
MP = ("--mp-degree", "2")
DP = ("--sharding-degree", "1", "--hybrid-dp")
FOUR = ("--mp-degree", "2", "--sharding-degree", "2")
NONE = Fault("none", attempts=())
BATCH = 8


@dataclass
class Outcome:
    """Of one case. tried: faults. survived: of them those after which the run went on or was refused by name.

    lost_steps: of each. lost_samples: at most, of what the uninterrupted run had read at an iteration. worst: largest
    relative difference of a loss to it. seconds: from each fault to the next step.
    """

    tried: int
    survived: int
    lost_steps: list[int] = field(default_factory=list)
    lost_samples: int = 0
    worst: float = 0.0
    seconds: list[float] = field(default_factory=list)
    note: str = ""


_WANTED: dict[tuple[int, tuple[str, ...]], dict[int, float]] = {}
_LOCKS: dict[tuple[int, tuple[str, ...]], threading.Lock] = defaultdict(threading.Lock)


def uninterrupted(world_size: int, *flags: str) -> dict[int, float]:
    """The losses of the run that nothing happens to; cases that run side by side make it once."""
    key = (world_size, flags)
    with _LOCKS[key]:
        if key not in _WANTED:
            with tempfile.TemporaryDirectory() as folder:
                ended = run_job(Path(folder), world_size, NONE, *flags)
                assert ended.status == 0, ended.output
                _WANTED[key] = ended.losses
    return _WANTED[key]


def compared(ended: Ended, want: dict[int, float], tolerance: float = 0.0) -> Outcome:
    """The outcome of a job that was to go on to the end."""
    same = ended.status == 0 and ended.losses.keys() == want.keys()
    worst = max((abs(ended.losses[i] - want[i]) / abs(want[i]) for i in want), default=0.0) if same else 1.0
    tried = max(1, len(ended.strikes))
    lost = max((abs(samples - BATCH * i) for i, samples in ended.samples.items()), default=0) if same else 0
    good = same and worst <= tolerance and not lost
    note = "" if good else ended.output[-2000:]
    return Outcome(tried, tried if good else 0, ended.lost_steps, lost, worst, ended.seconds_to_next_step, note)


def told(outcome: Outcome, ended: Ended, *texts: str) -> Outcome:
    """Survived only where all of this was said."""
    lacking = [text for text in texts if text not in ended.output]
    if lacking:
        outcome.survived, outcome.note = 0, f"not told: {lacking}: {ended.output[-3000:]}"
    return outcome


def verdict(good: bool, *ended: Ended) -> Outcome:
    """Of a case whose every word is asked for."""
    return Outcome(1, int(good), [0], note="" if good else "\n".join(f"{e.status}: {e.output[-2500:]}" for e in ended))
