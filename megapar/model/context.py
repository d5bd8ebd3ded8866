"""What every layer of a model needs beside its input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Context:
    """Made once per forward. No pytree on purpose: hooks that copy or cast a module's arguments leave it alone.

    valid: [B, S] bool, False at padding; None where there is none.
    own_valid: the part of ``valid`` whose positions this rank's activations have (sequence parallelism cuts them).
    valid_tokens: non-padding tokens of the micro-batch, known on the host.
    angles: (cos, sin) of rope, [B, S, D / 2] each, in the order of the positions; None without rope.
    slices: of the sequence, where layers run slice by slice; own_slices: of this rank's activations.
    """

    valid: Tensor | None
    own_valid: Tensor | None
    valid_tokens: int
    angles: tuple[Tensor, Tensor] | None = None
    slices: tuple[slice, ...] = ()
    own_slices: tuple[slice, ...] = ()

    @property
    def cut(self) -> bool:
        """Activations are in an order of their own: each rank of mp holds its part of every slice."""
        return self.slices != self.own_slices and len(self.slices) > 1
