"""Each optimizer by name: the states that it keeps of a parameter. Without torch."""

from __future__ import annotations

MOMENTUM = "momentum_buffer"


def states_of(optimizer: str, momentum: float = 0.0) -> tuple[str, ...]:
    """Return the names of an optimizer's states, which have the shape and dtype of the master weights.

    Checkpoints have them under these names. ``momentum`` is that of sgd, which keeps nothing without. Muon keeps the
    first for matrices, and the others for all other parameters.
    """
    moments = ("exp_avg", "exp_avg_sq")
    states = {"adamw": moments, "muon": (MOMENTUM, *moments), "sgd": (MOMENTUM,) if momentum else ()}
    return states[optimizer]
