"""What every layer of a model needs beside its input."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megapar.core.context_parallel.blockwise import TilePlan
from megapar.core.context_parallel.slices import SlicePlan
from megapar.core.device.packed_attention import PackedDocuments
from megapar.core.random import Streams
from megapar.core.recompute.replay import Replay


@dataclass(frozen=True)
class Context:
    """Made once per forward. No pytree on purpose: hooks that copy or cast a module's arguments leave it alone.

    valid: [B, S] bool, False at padding, of what attention sees; None where there is none.
    own_valid: the positions that this rank's activations have (cp and sequence parallelism cut them).
    valid_tokens: non-padding tokens of the micro-batch, known on the host.
    angles: (cos, sin) of rope, [B, S/cp, D / 2] each, in the order of the positions; None without rope.
    streams: where this micro-batch's dropout draws.
    documents: what attention stays inside of; None: the whole sample.
    plan: what this rank computes of attention where keys come from other ranks of cp; it knows documents and padding.
    slices: of the sequence, where layers run slice by slice, as far as this rank of cp has it; own_slices: of this
    rank's activations; whole_slices: of the whole sequence. slice_plans: in place of ``plan`` where there are slices.
    replay: of the recomputed unit that the layer is in; None: it is in none. closes_unit: it is the unit's last.
    """

    valid: Tensor | None
    own_valid: Tensor | None
    valid_tokens: int
    angles: tuple[Tensor, Tensor] | None = None
    streams: Streams = field(default_factory=Streams.current)
    documents: PackedDocuments | None = None
    plan: TilePlan | None = None
    slices: tuple[slice, ...] = ()
    own_slices: tuple[slice, ...] = ()
    whole_slices: tuple[slice, ...] = ()
    slice_plans: tuple[SlicePlan, ...] | None = None
    replay: Replay | None = None
    closes_unit: bool = False

    @property
    def closing(self) -> Replay | None:
        """The unit whose output the layer makes: what only that needs is left out when the unit runs again."""
        return self.replay if self.closes_unit else None

    @property
    def cut(self) -> bool:
        """Activations are in an order of their own: each rank of mp holds its part of every slice."""
        return self.slices != self.own_slices and len(self.slices) > 1

    def place(self, name: str, number: int) -> str:
        """Where slice ``number`` draws: every slice has a stream of its own, a whole sequence the plain one."""
        return f"{name}.slices.{number}" if len(self.slices) > 1 else name
