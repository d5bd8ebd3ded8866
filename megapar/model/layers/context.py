"""Arguments that all layers of a model take in addition to their input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megapar.core.context_parallel.blockwise import TilePlan
from megapar.core.context_parallel.slices import SlicePlan
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.random import Streams
from megapar.core.recompute.replay import Replay
from megapar.model.rope import Rope
from megapar.moe.slicing import Slicing


@dataclass(frozen=True)
class Context:
    """Arguments of all layers, made once per forward.

    Not a pytree on purpose, so that hooks that copy or cast a module's arguments leave it unchanged.

    Attributes:
        mask: The mask of attention, where it sees whole samples; ``plan`` follows from it under context parallelism.
        own_valid: [B, S] bool, False at padding, at the positions of this rank's activations (split by cp and sequence
            parallelism); None without padding.
        valid_tokens: Non-padding tokens of the micro-batch, known on the host.
        angles: (cos, sin) of each rope that layers have, [B, S/cp, D / 2] each, in the order of the positions.
        streams: Random streams of this micro-batch's dropout.
        plan: This rank's tiles of attention if keys come from other cp ranks; it includes documents and padding.
        slicing: How layers run slice by slice.
        slices: Slices of the sequence on this cp rank if layers run slice by slice; otherwise empty.
        own_slices: Slices of this rank's activations.
        slice_plans: One plan per slice, in place of ``plan``, if there are slices.
        text: [B, S] bool, False at padding, at the positions of attention's queries: those of this cp rank, or all
            where ranks have heads (Ulysses); None without padding, or if nothing reads it.
        replay: The recomputed unit that contains the layer; None if the layer is not recomputed.
        closes_unit: The layer is the last one of its recomputed unit.
        followed: The result goes to another layer of the same unit, so that its last sum may be left to that layer.
    """

    mask: DeviceMask
    own_valid: Tensor | None
    valid_tokens: int
    angles: Mapping[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    streams: Streams = field(default_factory=Streams.current)
    plan: TilePlan | None = None
    slicing: Slicing = field(default_factory=Slicing)
    slices: tuple[slice, ...] = ()
    own_slices: tuple[slice, ...] = ()
    whole_slices: tuple[slice, ...] = ()
    slice_plans: tuple[SlicePlan, ...] | None = None
    text: Tensor | None = None
    replay: Replay | None = None
    closes_unit: bool = False
    followed: bool = False

    @property
    def ends_unit(self) -> Replay | None:
        """The unit whose output the layer makes. Work that only the output needs is skipped in the recomputation."""
        return self.replay if self.closes_unit else None

    @property
    def cut(self) -> bool:
        """Each mp rank's activations hold a part of every slice, in the order of ``Arrangement``."""
        return self.slices != self.own_slices and len(self.slices) > 1

    def place(self, name: str, number: int) -> str:
        """Return the name of the random stream of slice ``number``; ``name`` itself without slices."""
        return f"{name}.slices.{number}" if len(self.slices) > 1 else name
