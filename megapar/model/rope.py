"""The rotary positions of a layer as one value."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.model.rope_scaling import RopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base of the angles, and the scaling of their frequencies; None for none."""

    theta: float
    scaling: RopeScaling | None = None
