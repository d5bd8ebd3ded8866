"""What every layer of a model needs beside its input."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megapar.core.device.packed import Documents
from megapar.core.random import Streams


@dataclass(frozen=True)
class Context:
    """Made once per forward. No pytree on purpose: hooks that copy or cast a module's arguments leave it alone.

    valid: [B, S] bool, False at padding; None where there is none.
    own_valid: the part of ``valid`` whose positions this rank's activations have (sequence parallelism cuts them).
    valid_tokens: non-padding tokens of the micro-batch, known on the host.
    angles: (cos, sin) of rope, [B, S, D / 2] each; None without rope.
    streams: where this micro-batch's dropout draws.
    documents: what attention stays inside of; None: the whole sample.
    """

    valid: Tensor | None
    own_valid: Tensor | None
    valid_tokens: int
    angles: tuple[Tensor, Tensor] | None = None
    streams: Streams = field(default_factory=Streams.current)
    documents: Documents | None = None
