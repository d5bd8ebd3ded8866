"""Roles of flags in a search for a faster layout: tried, left to the user, part of what is trained, outside a step."""

from __future__ import annotations

from typing import NamedTuple

TRIED, BY_HAND, PROPERTY, OUTSIDE = "tried", "by hand", "property", "outside a step"


class Role(NamedTuple):
    """Treatment of a flag by a search, and the reason for it.

    Attributes:
        kind: ``TRIED``: the flag changes time, memory or traffic, and not what is trained. ``BY_HAND``: it affects a
            step and is not tried. ``PROPERTY``: it decides what is trained, so a search must not change it.
            ``OUTSIDE``: it changes neither time nor memory of a step in the plan.
        reason: Why it is not tried.
        drawn: It may change a number, so the layout fuzzer of the tests draws it, or it says why not (``undrawn``).
    """

    kind: str
    reason: str = ""
    drawn: bool = True


def by_hand(reason: str) -> Role:
    """Return the role of a flag that affects a step and is not tried for this reason."""
    return Role(BY_HAND, reason)


KNOB = Role(TRIED)
NOT_BUILT = by_hand("is not built")
MODEL = Role(PROPERTY, "describes the model")
TOKENS = Role(PROPERTY, "decides which tokens reach their experts")
LOSS = Role(PROPERTY, "is part of the loss or of regularization")
PRECISION = Role(PROPERTY, "decides the precision of the results")
OPTIMIZER = Role(PROPERTY, "is part of the optimizer or of its schedule")
DATA = Role(PROPERTY, "describes the data")
FILES = DATA._replace(drawn=False)  # names files, or how they are read
CLUSTER = Role(PROPERTY, "says what the search is for", drawn=False)
MOVES_EXPERTS = Role(OUTSIDE, "moves experts between some steps; --expert-imbalance gives the load that it leaves")
EVALUATES = Role(OUTSIDE, "is evaluation, between steps")
SAVES = Role(OUTSIDE, "loads or saves, between steps", drawn=False)
WATCHES = Role(
    OUTSIDE, "checks or limits a run; checks take about a percent of its time, which the plan leaves out", drawn=False
)
LOGS = Role(OUTSIDE, "logs or measures a run", drawn=False)
COLLECTS = Role(OUTSIDE, "belongs to the host's garbage collection, which the plan leaves out")
STARTS_NOTHING = Role(OUTSIDE, "checks flags without a run", drawn=False)
