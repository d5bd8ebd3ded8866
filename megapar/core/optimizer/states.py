"""Each optimizer by name: the states that it keeps of a parameter, and the flags that choose it. Without torch."""

from __future__ import annotations


def states_of(optimizer: str, momentum: float = 0.0) -> tuple[str, ...]:
    """Return the names of an optimizer's states, which have the shape and dtype of the master weights.

    Checkpoints have them under these names. ``momentum`` is that of sgd, which keeps nothing without.
    """
    if optimizer == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if momentum else ()
